"""Windows of an NCHW array copied into columns, and its adjoint, in numpy.

One strided copy per tap of the window: `taps` large copies instead of one small copy per window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.window import Window

NDArray = npt.NDArray[Any]


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
    outputs = window.outputs(*x.shape[2:])
    padded = pad(x, window)
    columns = np.empty((*x.shape[:2], *window.size, *outputs), x.dtype)
    for i in range(window.size[0]):
        for j in range(window.size[1]):
            columns[:, :, i, j] = tap(padded, window, i, j, outputs)
    return columns.reshape(*x.shape[:2], window.taps, outputs[0] * outputs[1])


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
    by_tap = columns.reshape(n, c, *window.size, *outputs)
    ph, pw = window.padding
    out = np.zeros((n, c, height + 2 * ph, width + 2 * pw), columns.dtype)
    for i in range(window.size[0]):
        for j in range(window.size[1]):
            view = tap(out, window, i, j, outputs)
            np.add(view, by_tap[:, :, i, j], out=view)
    return np.ascontiguousarray(out[:, :, ph : ph + height, pw : pw + width])
