"""Windows of an NCHW array copied into columns, and its adjoint.

In numpy, one strided copy per tap of the window: `taps` large copies instead of one small copy per window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.arrays import contiguous
from aiograd.kernels.pool import run
from aiograd.kernels.selection import compiled
from aiograd.kernels.window import Window

NDArray = npt.NDArray[Any]


def geometry(window: Window) -> tuple[int, ...]:
    """The window as compiled kernels take it."""
    return (*window.size, *window.stride, *window.padding, *window.dilation)


def pad(x: NDArray, window: Window, value: float = 0.0) -> NDArray:
    """`x` with the window's padding on both sides of its last two axes."""
    ph, pw = window.padding
    if not (ph or pw):
        return x
    n, c, h, w = x.shape
    out = np.full((n, c, h + 2 * ph, w + 2 * pw), value, x.dtype)
    out[:, :, ph : ph + h, pw : pw + w] = x
    return out


def tap(padded: NDArray, window: Window, i: int, j: int, outputs: tuple[int, int]) -> NDArray:
    """A view of what tap (i, j) of every window sees: shape (N, C, *outputs)."""
    top, left = i * window.dilation[0], j * window.dilation[1]
    sh, sw = window.stride
    return padded[:, :, top : top + sh * (outputs[0] - 1) + 1 : sh, left : left + sw * (outputs[1] - 1) + 1 : sw]


def unfold(x: NDArray, window: Window) -> NDArray:
    """Columns of windows.

    Args:
        x: (N, C, H, W).
        window: the window.

    Returns:
        (N, C, taps, windows).
    """
    n, c, height, width = x.shape
    outputs = window.outputs(height, width)
    work = n * c * window.taps * outputs[0] * outputs[1]
    kernels = compiled(work, x)
    if kernels is not None:
        columns = np.empty((n * c, window.taps, *outputs), x.dtype)
        run(kernels.window.unfold, n * c, work, contiguous(x).reshape(n * c, height, width), columns, (*geometry(window), *outputs))
        return columns.reshape(n, c, window.taps, -1)
    padded = pad(x, window)
    columns = np.empty((n, c, *window.size, *outputs), x.dtype)
    for i in range(window.size[0]):
        for j in range(window.size[1]):
            columns[:, :, i, j] = tap(padded, window, i, j, outputs)
    return columns.reshape(n, c, window.taps, outputs[0] * outputs[1])


def fold(columns: NDArray, window: Window, height: int, width: int) -> NDArray:
    """The adjoint of `unfold`: every column value added where it came from.

    Args:
        columns: (N, C, taps, windows).
        window: the window.
        height: of the result.
        width: of the result.

    Returns:
        (N, C, height, width).
    """
    outputs = window.outputs(height, width)
    n, c = columns.shape[:2]
    kernels = compiled(columns.size, columns)
    if kernels is not None:
        out = np.empty((n * c, height, width), columns.dtype)
        by_tap = contiguous(columns).reshape(n * c, window.taps, *outputs)
        run(kernels.window.fold, n * c, columns.size, by_tap, out, (*geometry(window), *outputs))
        return out.reshape(n, c, height, width)
    by_tap = columns.reshape(n, c, *window.size, *outputs)
    ph, pw = window.padding
    out = np.zeros((n, c, height + 2 * ph, width + 2 * pw), columns.dtype)
    for i in range(window.size[0]):
        for j in range(window.size[1]):
            view = tap(out, window, i, j, outputs)
            np.add(view, by_tap[:, :, i, j], out=view)
    return np.ascontiguousarray(out[:, :, ph : ph + height, pw : pw + width])
