"""Convolution and its two gradients.

Note [Two ways to convolve]
    Compiled: a matrix product that reads its left operand through the windows, so nothing is unfolded (see
    `aiograd.kernels.compiled.convolution`). numpy: for a few images at a time, unfold the windows into columns that stay in cache and
    multiply with BLAS; the product of a weight (out, channels * taps) with columns (channels * taps, windows) is already in NCHW order.

    The input gradient of a convolution with stride 1 is itself a convolution with stride 1; for other strides, and where few channels per
    group would leave most of a block empty, both sets take the second way. With one input channel per group there is a third way, see
    `aiograd.kernels.compiled.depthwise`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels import depthwise
from aiograd.kernels.arrays import contiguous, flat, nothing
from aiograd.kernels.pool import partition, run
from aiograd.kernels.selection import compiled
from aiograd.kernels.unfold import fold, unfold
from aiograd.kernels.window import Window, window

NDArray = npt.NDArray[Any]

#: output channels per group below which blocks of the compiled product would be mostly empty
_FEW = 8
#: elements of columns that numpy's way unfolds at a time
_COLUMNS = 1 << 18


@lru_cache(maxsize=128)
def _tables(shape: tuple[int, int], channels: int, win: Window, rows: int) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """Offsets, in a padded image, of windows and of channels and taps: each as it is, and padded to whole blocks of `rows`."""
    height, width = shape[0] + 2 * win.padding[0], shape[1] + 2 * win.padding[1]
    outputs = win.outputs(*shape)
    windows = np.add.outer(np.arange(outputs[0]) * win.stride[0] * width, np.arange(outputs[1]) * win.stride[1]).reshape(-1)
    taps = np.add.outer(np.arange(win.size[0]) * win.dilation[0] * width, np.arange(win.size[1]) * win.dilation[1]).reshape(-1)
    depth = np.add.outer(np.arange(channels) * height * width, taps).reshape(-1)
    return _read_only(windows), _read_only(depth), _read_only(_whole(windows, rows)), _read_only(_whole(depth, rows))


def _whole(table: NDArray, rows: int) -> NDArray:
    return np.pad(table, (0, -len(table) % rows), mode="edge")


def _read_only(table: NDArray) -> NDArray:
    table = np.ascontiguousarray(table, np.int64)
    table.flags.writeable = False
    return table


def _panels(matrices: NDArray, width: int) -> NDArray:
    """(groups, columns, depth) as (groups, blocks, depth, width), zeros beyond the last column."""
    groups, columns, depth = matrices.shape
    blocks = -(-columns // width)
    padded = np.zeros((groups, blocks * width, depth), matrices.dtype)
    padded[:, :columns] = matrices
    return np.ascontiguousarray(padded.reshape(groups, blocks, width, depth).swapaxes(2, 3))


def _convolve(kernels: Any, x: NDArray, matrices: NDArray, bias: NDArray | None, win: Window) -> NDArray:
    groups, channels, depth = matrices.shape
    outputs = win.outputs(x.shape[2], x.shape[3])
    out = np.empty((x.shape[0], groups * channels, outputs[0] * outputs[1]), x.dtype)
    _, taps, windows, _ = _tables((x.shape[2], x.shape[3]), x.shape[1] // groups, win, kernels.gemm_microkernel.ROWS)
    run(
        kernels.convolution.convolve, x.shape[0], out.size * depth // 16, contiguous(x), _panels(matrices, kernels.gemm_microkernel.width(x.dtype)),
        nothing(x.dtype) if bias is None else flat(bias), out, windows, taps, *win.padding,
    )
    return out.reshape(x.shape[0], groups * channels, *outputs)


def _images(x: NDArray, win: Window) -> int:
    """How many images to unfold at a time."""
    outputs = win.outputs(x.shape[2], x.shape[3])
    return max(1, _COLUMNS // max(1, int(x.shape[1]) * win.taps * outputs[0] * outputs[1]))


def conv2d(x: NDArray, weight: NDArray, bias: NDArray | None, win: Window, groups: int) -> NDArray:
    """Cross-correlation.

    Args:
        x: (N, C, H, W).
        weight: (out, C / groups, *win.size).
        bias: (out,) or None.
        win: the window.
        groups: groups of channels.

    Returns:
        (N, out, H', W').
    """
    outputs = win.outputs(x.shape[2], x.shape[3])
    n, channels = x.shape[0], weight.shape[0] // groups
    matrices = weight.reshape(groups, channels, -1)
    kernels = depthwise.loops(n * weight.size * outputs[0] * outputs[1], groups, weight.shape[1], channels, x, weight, bias)
    if kernels is not None:
        return depthwise.convolve(kernels, x, weight, bias, win, groups)
    kernels = compiled(n * weight.size * outputs[0] * outputs[1], x, weight, bias) if channels >= _FEW else None
    if kernels is not None:
        return _convolve(kernels, x, matrices, bias, win)
    out = np.empty((n, groups, channels, outputs[0] * outputs[1]), np.result_type(x, weight))
    step = _images(x, win)
    for first in range(0, n, step):
        columns = unfold(x[first : first + step], win)
        np.matmul(matrices, columns.reshape(len(columns), groups, matrices.shape[2], -1), out=out[first : first + step])
    result = out.reshape(n, weight.shape[0], *outputs)
    return result if bias is None else np.add(result, bias.reshape(-1, 1, 1), out=result if bias.dtype == result.dtype else None)


def input_grad(g: NDArray, weight: NDArray, win: Window, groups: int, height: int, width: int) -> NDArray:
    """The gradient of `x`.

    Args:
        g: (N, out, H', W').
        weight: (out, C / groups, *win.size).
        win: the window.
        groups: groups of channels.
        height: of `x`.
        width: of `x`.

    Returns:
        (N, C, height, width).
    """
    n, channels, depth = g.shape[0], weight.shape[0] // groups, weight.shape[1]
    kernels = depthwise.loops(g.size * win.taps, groups, depth, channels, g, weight)
    if kernels is not None:
        return depthwise.input_grad(kernels, g, weight, win, groups, height, width)
    border = tuple(d * (k - 1) - p for d, k, p in zip(win.dilation, win.size, win.padding, strict=True))
    direct = win.stride == (1, 1) and min(border) >= 0 and depth >= _FEW
    kernels = compiled(g.size * depth * win.taps, g, weight) if direct else None
    if kernels is not None:
        mirrored = weight.reshape(groups, channels, depth, *win.size)[..., ::-1, ::-1].swapaxes(1, 2)
        back = window(win.size, 1, (border[0], border[1]), win.dilation)
        return _convolve(kernels, g, mirrored.reshape(groups, depth, -1), None, back)
    matrices = np.ascontiguousarray(weight.reshape(groups, channels, -1).swapaxes(1, 2))
    dtype = np.result_type(g, weight)
    out = np.empty((n, groups * depth, height, width), dtype)
    outputs = g.shape[2] * g.shape[3]
    step = max(1, _COLUMNS // max(1, groups * depth * win.taps * outputs))
    for first in range(0, n, step):
        part = g[first : first + step]
        columns = np.matmul(matrices, part.reshape(len(part), groups, channels, outputs))
        out[first : first + step] = fold(columns.reshape(len(part), groups * depth, win.taps, outputs), win, height, width)
    return out


def weight_grad(x: NDArray, g: NDArray, win: Window, groups: int) -> NDArray:
    """The gradient of the weight.

    Args:
        x: (N, C, H, W).
        g: (N, out, H', W').
        win: the window.
        groups: groups of channels.

    Returns:
        (out, C / groups, *win.size).
    """
    n, channels, depth = x.shape[0], g.shape[1] // groups, x.shape[1] // groups
    shape = (g.shape[1], depth, *win.size)
    rows = depth * win.taps
    outputs = g.shape[2] * g.shape[3]
    kernels = depthwise.loops(g.size * rows, groups, depth, channels, x, g)
    if kernels is not None:
        return depthwise.weight_grad(kernels, x, g, win, groups)
    kernels = compiled(g.size * rows, x, g) if channels >= _FEW else None
    if kernels is not None:
        width = kernels.gemm_microkernel.width(x.dtype)
        columns = -(-channels // width) * width
        work = g.size * rows // 16
        partial = np.empty((partition(n, work)[0], groups, rows, columns), x.dtype)
        windows, _, _, taps = _tables((x.shape[2], x.shape[3]), depth, win, kernels.gemm_microkernel.ROWS)
        run(
            kernels.convolution.weight_grad, n, work, contiguous(x), contiguous(g).reshape(n, g.shape[1], outputs), partial, taps, windows,
            *win.padding, width,
        )
        return np.ascontiguousarray(np.add.reduce(partial, axis=0)[:, :, :channels].swapaxes(1, 2)).reshape(shape)
    total = np.zeros((groups, channels, rows), np.result_type(x, g))
    step = _images(x, win)
    for first in range(0, n, step):
        unfolded = unfold(x[first : first + step], win)
        part = g[first : first + step].reshape(len(unfolded), groups, channels, outputs)
        total += np.add.reduce(np.matmul(part, unfolded.reshape(len(unfolded), groups, rows, outputs).swapaxes(2, 3)), axis=0)
    return total.reshape(shape)
