"""Two-dimensional convolution and its two adjoints.

Note [Places of the gradient]
    The gradient of the input at height ``h`` gets, from tap ``r``, the gradient of the output at ``(h + padding − r · dilation) / stride``, where
    that is whole. Heights with equal ``(h + padding) % stride`` take the same taps, which are ``period = stride / gcd(stride, dilation)`` apart, and
    so for widths: each pair of rests is a launch of the kernel that also goes forward (`aiograd.cuda.kernels.convolution`).

Windows of one element, one apart and without padding, are products of matrices and go the way of those (to cuBLAS, where it is); others do where
`aiograd.cuda.operations.unfolding` says that it pays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, as_cuda, check_same, device_of, empty, zeros
from aiograd.cuda.kernels import convolution as kernels
from aiograd.cuda.kernels.scalar import TYPES, precision_of
from aiograd.cuda.launching import launch, spread
from aiograd.cuda.operations import unfolding
from aiograd.cuda.operations.multiplying import forwards, join, multiply, parts_of, steps_of, tile_of, types_of
from aiograd.kernels.window import Pair, Window, pair, window

#: output channels per group below which tiles would be mostly empty
_FEW = 3
_POINTWISE = window(1)


@dataclass(frozen=True, slots=True)
class Along:
    """One axis of a convolution as the kernels see it: where the taps of a place lie, and where the result goes."""

    #: places
    count: int
    #: taps
    taps: int
    #: the operand's coordinate of a place's tap is ``place * times + first + tap * step``
    times: int
    first: int
    step: int
    #: the weight's coordinate of a tap is ``tap_first + tap * tap_step``
    tap_first: int = 0
    tap_step: int = 1
    #: the result's coordinate of a place is ``out_first + place * out_step``
    out_first: int = 0
    out_step: int = 1


def forward_along(win: Window, axis: int, count: int) -> Along:
    """An axis of a convolution with `count` windows along it."""
    return Along(count, win.size[axis], win.stride[axis], -win.padding[axis], win.dilation[axis])


def backward_along(win: Window, axis: int, length: int) -> list[Along]:
    """The sets of places along an axis of an input of this `length`; see Note [Places of the gradient]."""
    size, stride, padding, dilation = win.size[axis], win.stride[axis], win.padding[axis], win.dilation[axis]
    period = stride // math.gcd(stride, dilation)
    found = []
    for rest in range(stride):
        first = (rest - padding) % stride
        if first >= length:
            continue
        tap = next((tap for tap in range(min(period, size)) if (rest - tap * dilation) % stride == 0), None)
        taps = 0 if tap is None else math.ceil((size - tap) / period)
        start = 0 if tap is None else (first + padding - tap * dilation) // stride
        count = math.ceil((length - first) / stride)
        found.append(Along(count, taps, 1, start, -(period * dilation) // stride, tap or 0, period, first, stride))
    return found


def _floats(*arrays: Any) -> list[CudaArray] | None:
    """On the device and of one dtype; None where that is not floating."""
    device = device_of(*arrays)
    found = [as_cuda(device, array) for array in arrays if array is not None]
    check_same(device, "convolution", found)
    dtype = np.result_type(*[array.dtype for array in found])
    if dtype.kind != "f" or dtype.itemsize > 8:
        return None
    return [forwards(array.astype(dtype, copy=False)) for array in found]


def _index(count: int) -> Any:
    """The unsigned numba type that counts so far, and a tile beyond."""
    return TYPES["u4" if count < 2**31 else "u8"]


def _convolve(
    out: CudaArray, x: CudaArray, weight: CudaArray, bias: CudaArray | None, y: Along, x_along: Along, groups: int, strides: tuple[int, int, int]
) -> None:
    """Launch the kernel for a pair of axes.

    Args:
        strides: of the weight, in elements, from one group, row and column of the product's left operand to the next.
    """
    device = out.device
    w_y, w_x = steps_of(weight)[2:]
    w_group, w_m, w_channel = strides
    images, channels = out.shape[:2]
    m, depth = channels // groups, x.shape[1] // groups
    x_image, x_channel, x_y, x_x = steps_of(x)
    o_image, o_channel, o_y, o_x = steps_of(out)
    number, made = types_of(out.dtype)
    geometry = (
        y.count, x_along.count, *x.shape[2:], y.times, x_along.times, y.first, x_along.first, y.step, x_along.step,
        x_image, depth * x_channel, x_channel, x_y, x_x,
        y.tap_first * w_y + x_along.tap_first * w_x, w_group, w_m, w_channel, y.tap_step * w_y, x_along.tap_step * w_x,
        y.out_first * o_y + x_along.out_first * o_x, o_image, o_channel, y.out_step * o_y, x_along.out_step * o_x,
    )  # fmt: skip
    pointers = (out, x, weight, weight if bias is None else bias)
    n = images * y.count * x_along.count
    taps = (y.taps, x_along.taps)
    if m < _FEW or 0 in taps:
        kernel = kernels.direct(number, made, *taps, bias is not None)
        launch(kernel, *spread(device, n * channels), *pointers, n * channels, channels, m, depth, *geometry, writes=(out,))
        return
    tile = tile_of(device, out.dtype, m, n, groups)
    tiles_n = math.ceil(n / tile[1])
    tiles = math.ceil(m / tile[0]) * tiles_n
    k = depth * y.taps * x_along.taps
    whole = y.out_step == x_along.out_step == 1
    parts, chunk = parts_of(device, tiles * groups, k, 8 * tile[2], tile[2]) if whole else (1, k)
    target, added = (out, bias) if parts == 1 else (empty(device, (parts, out.size), np.dtype(precision_of(out.dtype))), None)
    kernel = kernels.convolved(number, made if parts == 1 else number, _index(n), *tile, *taps, added is not None)
    threads = (tile[0] // tile[3]) * (tile[1] // tile[4])
    pointers = (target, x, weight, weight if added is None else added)
    launch(kernel, tiles * groups * parts, threads, *pointers, m, n, k, chunk, groups, tiles, tiles_n, out.size, *geometry, writes=(target,))
    if parts > 1:
        join(out, target, bias, y.count * x_along.count, channels)


def _is_pointwise(win: Window) -> bool:
    return win == _POINTWISE


@tables.row("conv2d")
def conv2d(x: Any, weight: Any, bias: Any = None, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1, groups: int = 1) -> Any:
    """The row."""
    statics = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    found = _floats(x, weight, bias)
    if (
        found is None or x.ndim != 4 or weight.ndim != 4 or groups < 1 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups
        or (bias is not None and bias.shape != weight.shape[:1])
    ):  # fmt: skip
        return unfolding.on_host("conv2d", x, weight, bias, **statics)
    x, weight, bias = (*found, None)[:3]
    win = window((weight.shape[2], weight.shape[3]), stride, padding, dilation)
    outputs = win.outputs(x.shape[2], x.shape[3])
    channels, depth = weight.shape[:2]
    out = empty(x.device, (x.shape[0], channels, *outputs), x.dtype)
    if not out.size:
        return out
    if not weight.size:
        return zeros(x.device, out.shape, x.dtype) if bias is None else zeros(x.device, out.shape, x.dtype) + bias.reshape(-1, 1, 1)
    if _is_pointwise(win):
        multiply(unfolding.by_group(out, groups), weight.reshape(groups, channels // groups, depth), unfolding.by_group(x, groups))
        return out if bias is None else out + bias.reshape(-1, 1, 1)
    weight = weight.contiguous()
    if unfolding.pays(x.device, x.dtype, channels // groups):
        unfolding.forward(out, x, weight, win, groups)
        return out if bias is None else out + bias.reshape(-1, 1, 1)
    taps = win.taps
    strides = (channels // groups * depth * taps, depth * taps, taps)
    _convolve(out, x, weight, bias, forward_along(win, 0, outputs[0]), forward_along(win, 1, outputs[1]), groups, strides)
    return out


@tables.row("conv2d_input_grad")
def conv2d_input_grad(y: Any, weight: Any, input_size: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1, groups: int = 1) -> Any:
    """The row."""
    statics = {"input_size": input_size, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    found = _floats(y, weight)
    if found is None or y.ndim != 4 or weight.ndim != 4 or groups < 1 or weight.shape[0] % groups or y.shape[1] != weight.shape[0]:
        return unfolding.on_host("conv2d_input_grad", y, weight, **statics)
    y, weight = found
    size = pair(input_size, "input_size")
    win = window((weight.shape[2], weight.shape[3]), stride, padding, dilation)
    if y.shape[2:] != win.outputs(*size):
        return unfolding.on_host("conv2d_input_grad", y, weight, **statics)
    channels, depth = weight.shape[:2]
    out = empty(y.device, (y.shape[0], groups * depth, *size), y.dtype)
    if not out.size:
        return out
    if not y.size:
        return zeros(y.device, out.shape, y.dtype)
    if _is_pointwise(win):
        matrices = weight.reshape(groups, channels // groups, depth)
        multiply(unfolding.by_group(out, groups), np.swapaxes(matrices, 1, 2), unfolding.by_group(y, groups))
        return out
    weight = weight.contiguous()
    if unfolding.pays(y.device, y.dtype, channels // groups):
        unfolding.input_grad(out, y, weight, win, groups)
        return out
    strides = (channels // groups * depth * win.taps, win.taps, depth * win.taps)
    for along_y in backward_along(win, 0, size[0]):
        for along_x in backward_along(win, 1, size[1]):
            _convolve(out, y, weight, None, along_y, along_x, groups, strides)
    return out


@tables.row("conv2d_weight_grad")
def conv2d_weight_grad(x: Any, y: Any, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1, groups: int = 1) -> Any:
    """The row."""
    statics = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    found = _floats(x, y)
    if found is None or x.ndim != 4 or y.ndim != 4 or groups < 1 or x.shape[0] != y.shape[0] or x.shape[1] % groups or y.shape[1] % groups:
        return unfolding.on_host("conv2d_weight_grad", x, y, **statics)
    x, y = found
    win = window(pair(kernel_size, "kernel_size"), stride, padding, dilation)
    outputs = win.outputs(x.shape[2], x.shape[3])
    if y.shape[2:] != outputs:
        return unfolding.on_host("conv2d_weight_grad", x, y, **statics)
    device, depth = x.device, x.shape[1] // groups
    out = empty(device, (y.shape[1], depth, *win.size), x.dtype)
    m, n, k = y.shape[1] // groups, depth * win.taps, y.shape[0] * outputs[0] * outputs[1]
    if not out.size or not k:
        return zeros(device, out.shape, x.dtype)
    if unfolding.pays(device, x.dtype, m) and unfolding.sums_well(x.dtype, math.prod(outputs)):
        unfolding.weight_grad(out, x, y, win, groups)
        return out
    tile = tile_of(device, x.dtype, m, n, groups)
    tiles_n = math.ceil(n / tile[1])
    tiles = math.ceil(m / tile[0]) * tiles_n
    parts, chunk = parts_of(device, tiles * groups, k, 8 * tile[2], tile[2])
    number, made = types_of(x.dtype)
    target = out if parts == 1 else empty(device, (parts, out.size), np.dtype(precision_of(out.dtype)))
    y_along, x_along = forward_along(win, 0, outputs[0]), forward_along(win, 1, outputs[1])
    x_image, x_channel, x_y, x_x = steps_of(x)
    threads = (tile[0] // tile[3]) * (tile[1] // tile[4])
    kernel = kernels.weighed(number, made if parts == 1 else number, _index(k), *tile, *win.size)
    launch(
        kernel, tiles * groups * parts, threads, target, x, y, m, n, k, chunk, groups, tiles, tiles_n, *outputs, x.shape[2], x.shape[3],
        y_along.times, x_along.times, y_along.first, x_along.first, y_along.step, x_along.step,
        x_image, depth * x_channel, x_channel, x_y, x_x, *steps_of(y),
        writes=(target,),
    )  # fmt: skip
    if parts > 1:
        join(out, target, None)
    return out
