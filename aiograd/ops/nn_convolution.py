"""Two-dimensional convolution and its two adjoints, and the copy of windows into columns.

Note [Three bilinear rows]
    With ``y = conv2d(x, w)``, the gradient of `x` is ``conv2d_input_grad(g, w)`` and the gradient of `w` is ``conv2d_weight_grad(x, g)``. Each of
    the three is bilinear and its rules are the other two, so derivatives of every order are closed in three rows.
    `conv2d_input_grad` is also what others call a transposed convolution.

The forward functions are kernels already (a device has its own, reached through the row), so the plain rules are fast as they are.

Rejected: composing conv2d from im2col and matmul nodes. The columns are nine times the input for a 3x3 window, and the graph would
keep them until backward; here they live only inside a kernel.
"""

from __future__ import annotations

import math

import numpy as np

from aiograd.errors import ShapeError
from aiograd.kernels import convolution as kernels
from aiograd.kernels.reduction import channel_sum
from aiograd.kernels.unfold import fold, unfold
from aiograd.kernels.window import Pair, Window, pair, window
from aiograd.ops.linalg import GEMM_RATE
from aiograd.ops.op import Fused, Op, define
from aiograd.running.types import Array, Shape


def _check_planes(name: str, label: str, x: Array) -> None:
    if x.ndim != 4:
        raise ShapeError(f"{name}: {label} has shape {x.shape}, expected (N, C, H, W)")


def _im2col(x: Array, /, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1) -> Array:
    """Copy each window into a column.

    Args:
        x: (N, C, H, W).
        kernel_size: an int or (height, width), as are the others.
        stride: between windows.
        padding: zeros on both sides.
        dilation: between the taps of a window.

    Returns:
        (N, C * taps, windows).
    """
    _check_planes("im2col", "x", x)
    columns = unfold(x, window(kernel_size, stride, padding, dilation))
    return columns.reshape(columns.shape[0], columns.shape[1] * columns.shape[2], columns.shape[3])


def _col2im(columns: Array, /, output_size: Pair, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1) -> Array:
    """The adjoint of `im2col`: add each column where its window lies.

    Args:
        columns: (N, C * taps, windows).
        output_size: height and width of the result.
        kernel_size: as in `im2col`, and so the rest.
        stride: between windows.
        padding: cut off on both sides.
        dilation: between the taps of a window.

    Returns:
        (N, C, *output_size).
    """
    win = window(kernel_size, stride, padding, dilation)
    height, width = pair(output_size, "output_size")
    count = math.prod(win.outputs(height, width))
    if columns.ndim != 3 or columns.shape[1] % win.taps or columns.shape[2] != count:
        raise ShapeError(f"col2im: columns have shape {columns.shape}, expected (N, C * {win.taps}, {count}) for an output of {(height, width)}")
    return fold(columns.reshape(columns.shape[0], columns.shape[1] // win.taps, win.taps, columns.shape[2]), win, height, width)


im2col = define(
    "im2col",
    _im2col,
    x=lambda g, x_shape, kernel_size, stride, padding, dilation: col2im(
        g, output_size=tuple(x_shape[2:]), kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    ),
    jvp="forward", cost=1.5,
)
col2im: Op = define(
    "col2im",
    _col2im,
    columns=lambda g, kernel_size, stride, padding, dilation: im2col(
        g, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    ),
    jvp="forward", cost=1.0,
)


def _conv_window(kernel: Shape, stride: Pair, padding: Pair, dilation: Pair) -> Window:
    return window((kernel[2], kernel[3]), stride, padding, dilation)


def _check_conv(name: str, channels: int, weight: Shape, groups: int) -> None:
    if len(weight) != 4 or groups < 1 or channels != weight[1] * groups or weight[0] % groups:
        raise ShapeError(
            f"{name}: found an input of {channels} channels, weight {weight}, groups={groups}; "
            "expected weight (out, in / groups, kh, kw) with in and out divisible by groups"
        )


def _conv2d(x: Array, weight: Array, bias: Array = None, /, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1, groups: int = 1) -> Array:
    """Cross-correlation of `x` with `weight` over its last two axes.

    Args:
        x: (N, in, H, W).
        weight: (out, in / groups, kh, kw).
        bias: (out,) or absent.
        stride: an int or (height, width), as are the next two.
        padding: zeros on both sides.
        dilation: between the taps of the window.
        groups: channels fall in so many groups that do not mix.

    Returns:
        (N, out, H', W').

    Raises:
        ShapeError: the shapes do not fit.
    """
    _check_planes("conv2d", "x", x)
    _check_conv("conv2d", x.shape[1], weight.shape, groups)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"conv2d: bias has shape {bias.shape}, expected {weight.shape[:1]}")
    return kernels.conv2d(x, weight, bias, _conv_window(weight.shape, stride, padding, dilation), groups)


def _conv2d_input_grad(
    y: Array, weight: Array, /, input_size: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1, groups: int = 1
) -> Array:
    """The gradient of `conv2d` with respect to its input; as a row of its own, a transposed convolution.

    Args:
        y: (N, out, H', W').
        weight: (out, in / groups, kh, kw).
        input_size: height and width of the result.
        stride: as in `conv2d`, and so the rest.
        padding: cut off on both sides.
        dilation: between the taps of the window.
        groups: groups of channels.

    Returns:
        (N, in, *input_size).
    """
    _check_planes("conv2d_input_grad", "y", y)
    _check_conv("conv2d_input_grad", weight.shape[1] * groups, weight.shape, groups)
    height, width = pair(input_size, "input_size")
    win = _conv_window(weight.shape, stride, padding, dilation)
    if y.shape[1] != weight.shape[0] or y.shape[2:] != win.outputs(height, width):
        raise ShapeError(f"conv2d_input_grad: y has shape {y.shape}, expected (N, {weight.shape[0]}, *{win.outputs(height, width)})")
    return kernels.input_grad(y, weight, win, groups, height, width)


def _conv2d_weight_grad(x: Array, y: Array, /, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1, groups: int = 1) -> Array:
    """The gradient of `conv2d` with respect to its weight.

    Args:
        x: (N, in, H, W).
        y: (N, out, H', W').
        kernel_size: height and width of the result.
        stride: as in `conv2d`, and so the rest.
        padding: zeros on both sides of x.
        dilation: between the taps of the window.
        groups: groups of channels.

    Returns:
        (out, in / groups, *kernel_size).
    """
    _check_planes("conv2d_weight_grad", "x", x)
    _check_planes("conv2d_weight_grad", "y", y)
    size = pair(kernel_size, "kernel_size")
    win = window(size, stride, padding, dilation)
    outputs = win.outputs(*x.shape[2:])
    if y.shape[0] != x.shape[0] or y.shape[2:] != outputs or y.shape[1] % groups or x.shape[1] % groups:
        raise ShapeError(f"conv2d_weight_grad: found x {x.shape}, y {y.shape}, groups={groups}; expected y ({x.shape[0]}, out, *{outputs})")
    return kernels.weight_grad(x, y, win, groups)


def _cost(output: Shape, inputs: tuple[Shape, ...]) -> float:
    """Two products as large as the forward, and a pass over the input: all there is to a depthwise one."""
    x, weight = inputs[:2]
    return 2.0 * math.prod(output) * math.prod(weight[1:]) / GEMM_RATE + math.prod(x)


def _adjoint_cost(output: Shape, inputs: tuple[Shape, ...]) -> float:
    return 40.0 * max(math.prod(inputs[0]), math.prod(inputs[1]), math.prod(output))


def _conv2d_x(g: Array, weight: Array, x_shape: Shape, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Array:
    size = (x_shape[2], x_shape[3])
    return conv2d_input_grad(g, weight, input_size=size, stride=stride, padding=padding, dilation=dilation, groups=groups)


def _conv2d_weight(g: Array, x: Array, weight_shape: Shape, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Array:
    size = (weight_shape[2], weight_shape[3])
    return conv2d_weight_grad(x, g, kernel_size=size, stride=stride, padding=padding, dilation=dilation, groups=groups)


def _conv2d_jvp(t: tuple[Array | None, ...], x: Array, weight: Array, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Array:
    out: Array | None = None
    for first, second in ((t[0], weight), (x, t[1])):
        if first is not None and second is not None:
            part = conv2d(first, second, stride=stride, padding=padding, dilation=dilation, groups=groups)
            out = part if out is None else out + part
    if t[2] is None:
        return out
    bias = np.reshape(t[2], (1, -1, 1, 1))
    return bias if out is None else out + bias


conv2d: Op = define(
    "conv2d",
    _conv2d,
    x=_conv2d_x,
    weight=_conv2d_weight,
    bias=lambda g: np.sum(g, axis=(0, 2, 3)),
    jvp=_conv2d_jvp, cost=_cost,
    fused=Fused(
        lambda x, weight, bias, **statics: (_conv2d(x, weight, bias, **statics),),
        (),
        {"x": _conv2d_x, "weight": _conv2d_weight, "bias": lambda g: channel_sum(g)},
    ),
)
conv2d_input_grad: Op = define(
    "conv2d_input_grad",
    _conv2d_input_grad,
    y=lambda g, weight, stride, padding, dilation, groups: conv2d(g, weight, stride=stride, padding=padding, dilation=dilation, groups=groups),
    weight=lambda g, y, weight_shape, stride, padding, dilation, groups: conv2d_weight_grad(
        g, y, kernel_size=(weight_shape[2], weight_shape[3]), stride=stride, padding=padding, dilation=dilation, groups=groups
    ),
    jvp="forward", cost=_adjoint_cost,
)
conv2d_weight_grad: Op = define(
    "conv2d_weight_grad",
    _conv2d_weight_grad,
    x=lambda g, y, x_shape, stride, padding, dilation, groups: conv2d_input_grad(
        y, g, input_size=(x_shape[2], x_shape[3]), stride=stride, padding=padding, dilation=dilation, groups=groups
    ),
    y=lambda g, x, stride, padding, dilation, groups: conv2d(x, g, stride=stride, padding=padding, dilation=dilation, groups=groups),
    jvp="forward", cost=_adjoint_cost,
)
