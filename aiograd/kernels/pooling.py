"""Max pooling in numpy: one pass per tap of the window over whole planes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.unfold import pad, tap
from aiograd.kernels.window import Window

NDArray = npt.NDArray[Any]


def index_dtype(window: Window) -> np.dtype[Any]:
    """The smallest unsigned type that can name a tap of the window."""
    return np.dtype(np.uint8 if window.taps <= 256 else np.uint32)


def lowest(dtype: np.dtype[Any]) -> Any:
    """What padding holds in max pooling: below every value."""
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def max_pool(x: NDArray, window: Window) -> tuple[NDArray, NDArray]:
    """The maximum of each window and the tap it came from; the first of equals, the first NaN before all.

    Args:
        x: (N, C, H, W).
        window: the window.

    Returns:
        Values and taps, (N, C, H', W').
    """
    outputs = window.outputs(*x.shape[2:])
    padded = pad(x, window, lowest(x.dtype))
    best = tap(padded, window, 0, 0, outputs).copy()
    index = np.zeros(best.shape, index_dtype(window))
    for k in range(1, window.taps):
        value = tap(padded, window, *divmod(k, window.size[1]), outputs)
        better = ~(value <= best)
        better &= best == best  # noqa: PLR0124 - false where best is NaN: the first NaN stays
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
    outputs = (g.shape[2], g.shape[3])
    ph, pw = window.padding
    out = np.zeros((*g.shape[:2], height + 2 * ph, width + 2 * pw), g.dtype)
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
