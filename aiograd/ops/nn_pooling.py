"""Max and average pooling over windows of the last two axes.

Note [The adjoint of a maximum]
    Max pooling picks one value per window, so its gradient scatters and the gradient of that gathers, both at positions fixed by `x`. They
    are rows over (values, x) without a rule for `x`: moving `x` a little moves no position. The compiled path keeps one byte per window
    instead of looking again.
"""

from __future__ import annotations

import numpy as np

from aiograd.errors import ShapeError
from aiograd.kernels.pooling import max_gather, max_pool, max_unpool
from aiograd.kernels.unfold import pad, tap
from aiograd.kernels.window import Pair, Window, pair, window
from aiograd.ops.op import Fused, Op, define, nothing
from aiograd.running.types import Array


def pool_window(kernel_size: Pair, stride: Pair | None, padding: Pair, dilation: Pair = 1) -> Window:
    """The window of a pooling row; its stride is by default its size.

    Raises:
        ShapeError: padding over half the window, which would leave windows that see nothing.
    """
    win = window(kernel_size, kernel_size if stride is None else stride, padding, dilation)
    if any(2 * p > k for p, k in zip(win.padding, win.size, strict=True)):
        raise ShapeError(f"pooling: padding {win.padding} is over half the window {win.size}")
    return win


def _check_planes(name: str, x: Array) -> None:
    if x.ndim != 4:
        raise ShapeError(f"{name}: x has shape {x.shape}, expected (N, C, H, W)")


def _max_pool2d(x: Array, /, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1) -> Array:
    """The maximum of each window.

    Args:
        x: (N, C, H, W).
        kernel_size: an int or (height, width), as are the others.
        stride: between windows; None: the kernel size.
        padding: on both sides, below every value; at most half the window.
        dilation: between the taps of a window.

    Returns:
        (N, C, H', W').
    """
    _check_planes("max_pool2d", x)
    return max_pool(x, pool_window(kernel_size, stride, padding, dilation))[0]


def _max_pool2d_input_grad(y: Array, x: Array, /, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1) -> Array:
    """Add each of `y` (N, C, H', W') where its window of `x` (N, C, H, W) has its maximum."""
    win = pool_window(kernel_size, stride, padding, dilation)
    return max_unpool(y, max_pool(x, win)[1], win, x.shape[2], x.shape[3])


def _max_pool2d_gather(values: Array, x: Array, /, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1) -> Array:
    """Of `values` (N, C, H, W), the one at the maximum of each window of `x`, of the same shape."""
    win = pool_window(kernel_size, stride, padding, dilation)
    return max_gather(values, max_pool(x, win)[1], win)


def _fused_max_pool2d(x: Array, kernel_size: Pair, stride: Pair | None, padding: Pair, dilation: Pair) -> tuple[Array, Array]:
    _check_planes("max_pool2d", x)
    return max_pool(x, pool_window(kernel_size, stride, padding, dilation))


def _fused_max_pool2d_x(
    g: Array, index: Array, x_shape: tuple[int, ...], kernel_size: Pair, stride: Pair | None, padding: Pair, dilation: Pair
) -> Array:
    return max_unpool(g, index, pool_window(kernel_size, stride, padding, dilation), x_shape[2], x_shape[3])


max_pool2d = define(
    "max_pool2d",
    _max_pool2d,
    fused=Fused(_fused_max_pool2d, ("index",), {"x": _fused_max_pool2d_x}),
    x=lambda g, x, kernel_size, stride, padding, dilation: max_pool2d_input_grad(
        g, x, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    ),
    jvp=lambda t, x, kernel_size, stride, padding, dilation: max_pool2d_gather(
        t, x, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    ),
    cost=5.0,
)
max_pool2d_input_grad: Op = define(
    "max_pool2d_input_grad",
    _max_pool2d_input_grad,
    y=lambda g, x, kernel_size, stride, padding, dilation: max_pool2d_gather(
        g, x, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    ),
    x=nothing,
    jvp={"y": "forward", "x": nothing},
    cost=5.0,
)
max_pool2d_gather: Op = define(
    "max_pool2d_gather",
    _max_pool2d_gather,
    values=lambda g, x, kernel_size, stride, padding, dilation: max_pool2d_input_grad(
        g, x, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    ),
    x=nothing,
    jvp={"values": "forward", "x": nothing},
    cost=5.0,
)


def _divisor(win: Window, height: int, width: int, count_include_pad: bool, dtype: np.dtype[np.generic]) -> Array:
    """The divisor of each window's sum: the number of its taps, or of those inside the input."""
    if count_include_pad or win.padding == (0, 0):
        return np.array(win.taps, dtype)
    inside = pad(np.ones((1, 1, height, width), dtype), win)
    outputs = win.outputs(height, width)
    return np.add.reduce([tap(inside, win, i, j, outputs) for i in range(win.size[0]) for j in range(win.size[1])])


def _avg_pool2d(x: Array, /, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, count_include_pad: bool = True) -> Array:
    """The mean of each window.

    Args:
        x: (N, C, H, W).
        kernel_size: an int or (height, width), as are the next two.
        stride: between windows; None: the kernel size.
        padding: zeros on both sides; at most half the window.
        count_include_pad: True if padding counts as values.

    Returns:
        (N, C, H', W').
    """
    _check_planes("avg_pool2d", x)
    win = pool_window(kernel_size, stride, padding)
    outputs = win.outputs(x.shape[2], x.shape[3])
    padded = pad(x, win)
    total = tap(padded, win, 0, 0, outputs).copy()
    for k in range(1, win.taps):
        total += tap(padded, win, *divmod(k, win.size[1]), outputs)
    return total / _divisor(win, x.shape[2], x.shape[3], count_include_pad, total.dtype)


def _avg_pool2d_input_grad(
    y: Array, /, input_size: Pair, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, count_include_pad: bool = True
) -> Array:
    """Spread each of `y` (N, C, H', W') evenly over its window; returns (N, C, *input_size)."""
    win = pool_window(kernel_size, stride, padding)
    height, width = pair(input_size, "input_size")
    outputs = win.outputs(height, width)
    share = y / _divisor(win, height, width, count_include_pad, y.dtype)
    ph, pw = win.padding
    out = np.zeros((*y.shape[:2], height + 2 * ph, width + 2 * pw), y.dtype)
    for k in range(win.taps):
        view = tap(out, win, *divmod(k, win.size[1]), outputs)
        view += share
    return out[:, :, ph : ph + height, pw : pw + width]


avg_pool2d = define(
    "avg_pool2d",
    _avg_pool2d,
    x=lambda g, x_shape, kernel_size, stride, padding, count_include_pad: avg_pool2d_input_grad(
        g, input_size=(x_shape[2], x_shape[3]), kernel_size=kernel_size, stride=stride, padding=padding, count_include_pad=count_include_pad
    ),
    jvp="forward", cost=4.0,
)
avg_pool2d_input_grad: Op = define(
    "avg_pool2d_input_grad",
    _avg_pool2d_input_grad,
    y=lambda g, kernel_size, stride, padding, count_include_pad: avg_pool2d(
        g, kernel_size=kernel_size, stride=stride, padding=padding, count_include_pad=count_include_pad
    ),
    jvp="forward", cost=4.0,
)
