"""Max pooling; in numpy, one pass per tap of the window over whole planes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.arrays import contiguous
from aiograd.kernels.pool import run
from aiograd.kernels.selection import compiled
from aiograd.kernels.unfold import geometry, pad, tap
from aiograd.kernels.window import Window

NDArray = npt.NDArray[Any]

#: taps that one byte can name, one value being reserved for "none yet"
_BYTE = 255


def _index_dtype(window: Window) -> np.dtype[Any]:
    return np.dtype(np.uint8 if window.taps <= _BYTE else np.uint32)


def _first_taps(window: Window, outputs: tuple[int, int]) -> NDArray:
    """The first tap of each window that is not padding."""
    rows, columns = (
        np.maximum(0, -((np.arange(count) * s - p) // d))
        for count, s, p, d in zip(outputs, window.stride, window.padding, window.dilation, strict=True)
    )
    return rows[:, None] * window.size[1] + columns


def max_pool(x: NDArray, window: Window) -> tuple[NDArray, NDArray]:
    """The maximum of each window and the tap it came from; the first of equals, the first NaN before all.

    Args:
        x: (N, C, H, W).
        window: the window; every window sees some of the input.

    Returns:
        Values and taps, (N, C, H', W').
    """
    n, c, height, width = x.shape
    outputs = window.outputs(height, width)
    kernels = compiled(x.size, x) if window.taps <= _BYTE else None
    if kernels is not None:
        best, index = np.empty((n * c, *outputs), x.dtype), np.empty((n * c, *outputs), np.uint8)
        run(kernels.window.max_pool, n * c, 2 * x.size, contiguous(x).reshape(n * c, height, width), best, index, geometry(window))
        return best.reshape(n, c, *outputs), index.reshape(n, c, *outputs)
    padded = pad(x, window, -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min)
    best = tap(padded, window, 0, 0, outputs).copy()
    index = np.empty(best.shape, _index_dtype(window))
    index[:] = _first_taps(window, outputs)
    for k in range(1, window.taps):
        value = tap(padded, window, *divmod(k, window.size[1]), outputs)
        better = ~(value <= best)
        better &= best == best
        np.copyto(best, value, where=better)
        np.copyto(index, index.dtype.type(k), where=better)
    return best, index


def max_unpool(g: NDArray, index: NDArray, window: Window, height: int, width: int) -> NDArray:
    """Add each value of `g` to the input position that `index` names.

    Args:
        g: (N, C, H', W').
        index: taps, of the same shape.
        window: the window.
        height: of the result.
        width: of the result.

    Returns:
        (N, C, height, width).
    """
    n, c = g.shape[:2]
    outputs = (g.shape[2], g.shape[3])
    kernels = compiled(n * c * height * width, g) if index.dtype == np.uint8 else None
    if kernels is not None:
        out = np.empty((n * c, height, width), g.dtype)
        planes = (n * c, *outputs)
        run(kernels.window.max_unpool, n * c, 2 * out.size, contiguous(g).reshape(planes), contiguous(index).reshape(planes), out, geometry(window))
        return out.reshape(n, c, height, width)
    ph, pw = window.padding
    out = np.zeros((n, c, height + 2 * ph, width + 2 * pw), g.dtype)
    for k in range(window.taps):
        view = tap(out, window, *divmod(k, window.size[1]), outputs)
        np.add(view, g, out=view, where=index == k)
    return np.ascontiguousarray(out[:, :, ph : ph + height, pw : pw + width])


def max_gather(x: NDArray, index: NDArray, window: Window) -> NDArray:
    """The value of each window at the tap that `index` names; the adjoint of `max_unpool`.

    Args:
        x: (N, C, H, W).
        index: taps, (N, C, H', W').
        window: the window.

    Returns:
        (N, C, H', W').
    """
    outputs = (index.shape[2], index.shape[3])
    padded = pad(x, window)
    out = np.zeros(index.shape, x.dtype)
    for k in range(window.taps):
        np.copyto(out, tap(padded, window, *divmod(k, window.size[1]), outputs), where=index == k)
    return out
