"""Depthwise convolution and its two gradients in compiled loops; shapes as in `aiograd.kernels.convolution`, which asks `loops` first.

A window of 3 × 3 and stride 1 or 2 has kernels of its own, which are three times as fast as those for every window. With stride 1 the input gradient
is the convolution of the output's gradient by the mirrored window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.arrays import contiguous, flat, nothing
from aiograd.kernels.pool import run
from aiograd.kernels.selection import compiled
from aiograd.kernels.unfold import geometry
from aiograd.kernels.window import Window

NDArray = npt.NDArray[Any]

#: output channels per group from which blocks of a matrix product serve better
_FEW = 8


def loops(work: int, groups: int, depth: int, several: int, *arrays: NDArray | None) -> Any:
    """The module of compiled kernels if they serve a convolution of `depth` input and `several` output channels per group here, else None."""
    return compiled(work, *arrays) if groups > 1 and depth == 1 and several < _FEW else None


def _in_registers(win: Window) -> bool:
    """True if `aiograd.kernels.compiled.depthwise_3x3` serves."""
    return win.size == (3, 3) and win.stride in ((1, 1), (2, 2)) and win.dilation == (1, 1)


def _convolve_3x3(kernel: Any, x: NDArray, weight: NDArray, bias: NDArray | None, padding: tuple[int, int], outputs: tuple[int, int]) -> NDArray:
    out = np.empty((len(x), len(weight), *outputs), x.dtype)
    planes = len(x) * len(weight)
    run(
        kernel, planes, out.size, contiguous(x).reshape(-1), contiguous(weight).reshape(-1, 9),
        nothing(x.dtype) if bias is None else flat(bias), out.reshape(-1), (len(weight) // x.shape[1], *x.shape[2:], *outputs, *padding),
    )
    return out


def convolve(kernels: Any, x: NDArray, weight: NDArray, bias: NDArray | None, win: Window, groups: int) -> NDArray:
    """(N, out, H', W')."""
    n, _, height, width = x.shape
    outputs = win.outputs(height, width)
    if _in_registers(win):
        own = kernels.depthwise_3x3
        return _convolve_3x3(own.convolve if win.stride == (1, 1) else own.convolve_by_2, x, weight, bias, win.padding, outputs)
    several = weight.shape[0] // groups
    out = np.empty((n * groups, several, *outputs), x.dtype)
    run(
        kernels.depthwise.convolve, n * groups, out.size * win.taps // 8, contiguous(x).reshape(n * groups, height, width),
        contiguous(weight).reshape(len(weight), win.taps), nothing(x.dtype) if bias is None else flat(bias), out, (*geometry(win), *outputs),
    )
    return out.reshape(n, weight.shape[0], *outputs)


def input_grad(kernels: Any, g: NDArray, weight: NDArray, win: Window, groups: int, height: int, width: int) -> NDArray:
    """(N, groups, height, width)."""
    n, outputs = g.shape[0], g.shape[2:]
    out = np.empty((n * groups, height, width), g.dtype)
    # beyond the border there are no outputs, and so no zeros for an infinite weight to meet
    if _in_registers(win) and len(weight) == groups and np.isfinite(weight).all():
        own = kernels.depthwise_3x3
        if win.stride == (1, 1):
            return _convolve_3x3(own.convolve, g, weight[:, :, ::-1, ::-1], None, (2 - win.padding[0], 2 - win.padding[1]), (height, width))
        run(
            own.input_grad_by_2, n * groups, out.size, contiguous(g).reshape(-1), contiguous(weight).reshape(-1, 9), out.reshape(-1),
            (1, height, width, *outputs, *win.padding),
        )
        return out.reshape(n, groups, height, width)
    run(
        kernels.depthwise.input_grad, n * groups, g.size * win.taps // 8, contiguous(g).reshape(n * groups, -1, *outputs),
        contiguous(weight).reshape(len(weight), win.taps), out, (*geometry(win), *outputs),
    )
    return out.reshape(n, groups, height, width)


def weight_grad(kernels: Any, x: NDArray, g: NDArray, win: Window, groups: int) -> NDArray:
    """(out, 1, *win.size)."""
    n, _, height, width = x.shape
    channels, outputs = g.shape[1], g.shape[2:]
    partial = np.empty((n * groups, channels // groups, win.taps), x.dtype)
    if _in_registers(win):
        own = kernels.depthwise_3x3
        run(
            own.weight_grad if win.stride == (1, 1) else own.weight_grad_by_2, n * channels, g.size, contiguous(x).reshape(-1),
            contiguous(g).reshape(-1), partial.reshape(n * channels, 9), (channels // groups, height, width, *outputs, *win.padding),
        )
    else:
        run(
            kernels.depthwise.weight_grad, n * groups, g.size * win.taps // 8, contiguous(x).reshape(n * groups, height, width),
            contiguous(g).reshape(n * groups, channels // groups, *outputs), partial, (*geometry(win), *outputs),
        )
    total: NDArray = np.add.reduce(partial.reshape(n, channels, win.taps), axis=0)
    return total.reshape(channels, 1, *win.size)
