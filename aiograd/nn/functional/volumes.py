"""Convolution and pooling of volumes, (N, C, D, H, W) or (C, D, H, W), made of convolution and pooling of images.

Note [A volume as images]
    The planes that one window touches in depth lie side by side as channels of one image, so that a convolution of a volume is one convolution of
    as many images as there are results in depth. A maximum or mean is taken in planes first and then, with depth and plane as the axes of an image,
    in depth. A transposed convolution in depth is a convolution of the planes with zeros between them, by the kernel in reverse.
"""

from __future__ import annotations

import math
import sys
from typing import Any, TypeAlias

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, row
from aiograd.array_functions.creation import zeros
from aiograd.array_functions.joining import narrow
from aiograd.array_functions.manipulation import concat, flip
from aiograd.array_functions.manipulation import pad as pad_axes
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn.functional.convolutions import conv_transpose2d
from aiograd.nn.functional.documentation import document
from aiograd.nn.functional.maps import conv2d
from aiograd.nn.functional.pooling import avg_pool2d, max_pool2d
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

Triple: TypeAlias = int | tuple[int, int, int]


def triple(value: Any, name: str) -> tuple[int, int, int]:
    """``3`` means ``(3, 3, 3)``.

    Raises:
        ArgumentError: neither an int nor three ints.
    """
    if isinstance(value, (tuple, list)):
        if len(value) != 3:
            raise ArgumentError(f"{name}={value!r}: expected an int or three ints (depth, height, width)")
        return int(value[0]), int(value[1]), int(value[2])
    return int(value), int(value), int(value)


def _batched(name: str, input: Any) -> tuple[Tensor, bool]:
    x = as_tensor(input)
    if x.ndim not in (4, 5):
        raise ShapeError(f"{name}: found shape {list(x.shape)}, expected (N, C, D, H, W) or (C, D, H, W)")
    return (x.unsqueeze(0), True) if x.ndim == 4 else (x, False)


def _kernel(name: str, weight: Any, channels: int, shape: str) -> Tensor:
    kernel = as_tensor(weight)
    if kernel.ndim != 5 or 0 in kernel.shape or channels < 1:
        raise ShapeError(f"{name}: weight has shape {list(kernel.shape)}, expected {shape}")
    return kernel


def _planes(name: str, x: Tensor, taps: int, stride: int, dilation: int) -> tuple[Tensor, int]:
    """Images (N * D', C * taps, H, W): for each result in depth the planes of its window, one channel's planes side by side; and D'."""
    n, channels, depth, height, width = x.shape
    count = (depth - dilation * (taps - 1) - 1) // stride + 1
    if count < 1 or min(stride, dilation) < 1:
        raise ShapeError(f"{name}: a window of {taps} planes, {dilation} apart, does not fit a depth of {depth}: use less or pad more")
    places = np.arange(count)[:, None] * stride + np.arange(taps) * dilation
    chosen: Tensor = call(row("take"), (x, places), {"axis": 2})  # (N, C, D', taps, H, W)
    return chosen.permute(0, 2, 1, 3, 4, 5).reshape(n * count, channels * taps, height, width), count


def _volumes(images: Tensor, n: int, depth: int) -> Tensor:
    """(N * D', C, H, W) as (N, C, D', H, W)."""
    return images.reshape(n, depth, *images.shape[1:]).swapaxes(1, 2)


def conv3d(
    input: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Triple = 1,
    padding: Triple | str = 0,
    dilation: Triple = 1,
    groups: int = 1,
) -> Tensor:
    """Three-dimensional cross-correlation.

    Raises:
        ShapeError: shapes that do not fit. ArgumentError: another `padding`.
    """
    x, alone = _batched("conv3d", input)
    kernel = _kernel("conv3d", weight, x.shape[1], "(out, in / groups, kd, kh, kw)")
    steps, apart = triple(stride, "stride"), triple(dilation, "dilation")
    before = behind = 0
    space: Any = padding
    if not isinstance(padding, str):
        before, *space = triple(padding, "padding")
        behind, space = before, tuple(space)
    elif padding == "same":
        before, behind = (total := apart[0] * (kernel.shape[2] - 1)) // 2, total - total // 2
    if padding == "same" and max(steps) > 1:
        raise ArgumentError(f"conv3d: padding 'same' with stride {steps}: expected stride 1")
    if before or behind:
        x = pad_axes(x, [(0, 0), (0, 0), (before, behind), (0, 0), (0, 0)])
    out, inside, taps, *plane = kernel.shape
    images, depth = _planes("conv3d", x, taps, steps[0], apart[0])
    convolved = conv2d(images, kernel.reshape(out, inside * taps, *plane), bias, steps[1:], space, apart[1:], groups)
    return _one(_volumes(convolved, x.shape[0], depth), alone)


def conv_transpose3d(
    input: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Triple = 1,
    padding: Triple = 0,
    output_padding: Triple = 0,
    groups: int = 1,
    dilation: Triple = 1,
) -> Tensor:
    """Transposed convolution: the gradient of `conv3d` with the same weight by its input, taken of `input`.

    Raises:
        ShapeError: shapes that do not fit. ArgumentError: numbers that make no sense.
    """
    x, alone = _batched("conv_transpose3d", input)
    kernel = _kernel("conv_transpose3d", weight, x.shape[1], "(in, out / groups, kd, kh, kw)")
    steps, space, apart = triple(stride, "stride"), triple(padding, "padding"), triple(dilation, "dilation")
    extra = triple(output_padding, "output_padding")
    if min(*steps, *apart) < 1 or min(*space, *extra) < 0 or any(e >= max(s, d) for e, s, d in zip(extra, steps, apart, strict=True)):
        raise ArgumentError(
            f"conv_transpose3d: stride {steps}, padding {space}, output_padding {extra}, dilation {apart}: expected strides and dilations of at "
            "least 1, padding of at least 0, and output_padding below the stride or the dilation"
        )
    n, channels, depth = x.shape[:3]
    inside, out, taps, *plane = kernel.shape
    reach = apart[0] * (taps - 1)
    if steps[0] > 1 and depth:
        gaps = zeros((n, channels, depth, steps[0] - 1, *x.shape[3:]), dtype=x.dtype, device=x.device)
        x = concat([x.unsqueeze(3), gaps], axis=3).reshape(n, channels, depth * steps[0], *x.shape[3:])
        x = narrow(x, 2, 0, (depth - 1) * steps[0] + 1)
    x = pad_axes(x, [(0, 0), (0, 0), (reach, reach + extra[0]), (0, 0), (0, 0)])
    length = x.shape[2] - 2 * space[0]
    if length <= reach:
        raise ShapeError(f"conv_transpose3d: a padding of {space[0]} in depth leaves nothing of an input of {list(as_tensor(input).shape)}")
    images, count = _planes("conv_transpose3d", narrow(x, 2, space[0], length), taps, 1, apart[0])
    flat = flip(kernel, 2).swapaxes(1, 2).reshape(inside * taps, out, *plane)
    settings: Any = (steps[1:], space[1:], extra[1:], groups, apart[1:])
    return _one(_volumes(conv_transpose2d(images, flat, bias, *settings), n, count), alone)


def max_pool3d(
    input: ArrayLike, kernel_size: Triple, stride: Triple | None = None, padding: Triple = 0, dilation: Triple = 1, ceil_mode: bool = False
) -> Tensor:
    """The maximum of each window of volumes; windows lie side by side unless a stride is given."""
    x, alone = _batched("max_pool3d", input)
    size, space, apart = triple(kernel_size, "kernel_size"), triple(padding, "padding"), triple(dilation, "dilation")
    steps = size if stride is None else triple(stride, "stride")
    n, channels, depth = x.shape[:3]
    images = max_pool2d(x.reshape(n, channels * depth, *x.shape[3:]), size[1:], steps[1:], space[1:], apart[1:], ceil_mode)
    lines = images.reshape(n, channels, depth, math.prod(images.shape[2:]))
    deep = max_pool2d(lines, (size[0], 1), (steps[0], 1), (space[0], 0), (apart[0], 1), ceil_mode)
    return _one(deep.reshape(n, channels, deep.shape[2], *images.shape[2:]), alone)


def avg_pool3d(
    input: ArrayLike,
    kernel_size: Triple,
    stride: Triple | None = None,
    padding: Triple = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window of volumes; windows lie side by side unless a stride is given.

    Raises:
        ArgumentError: the divisor is 0.
    """
    x, alone = _batched("avg_pool3d", input)
    size, space = triple(kernel_size, "kernel_size"), triple(padding, "padding")
    steps = size if stride is None else triple(stride, "stride")
    n, channels, depth = x.shape[:3]
    divisors = (divisor_override, None if divisor_override is None else 1)
    images = avg_pool2d(x.reshape(n, channels * depth, *x.shape[3:]), size[1:], steps[1:], space[1:], ceil_mode, count_include_pad, divisors[0])
    lines = images.reshape(n, channels, depth, math.prod(images.shape[2:]))
    deep = avg_pool2d(lines, (size[0], 1), (steps[0], 1), (space[0], 0), ceil_mode, count_include_pad, divisors[1])
    return _one(deep.reshape(n, channels, deep.shape[2], *images.shape[2:]), alone)


def _one(x: Tensor, alone: bool) -> Tensor:
    return x.squeeze(0) if alone else x


document(sys.modules[__name__])
