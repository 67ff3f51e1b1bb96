"""Windows as columns, and convolutions as products of matrices with them, for a library to multiply.

Note [When unfolding pays]
    Unfolding writes and reads each element of the input once for each tap, where the kernels that convolve read through the windows; but the
    library multiplies faster than they do, in half precision by tensor cores. With ``m`` output channels an element of the columns takes part in
    ``m`` products, so it pays from some ``m`` on. The bounds are estimates from the bandwidth and rates of large devices, not measurements.

    Gradients of weights are summed image by image, so in half precision, where each sum would be rounded, they are left to the kernels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.cuda import fallback, tables
from aiograd.cuda.array import CudaArray, empty
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.driver.cublas import supports
from aiograd.cuda.kernels import convolution as kernels
from aiograd.cuda.launching import launch, spread
from aiograd.cuda.operations.multiplying import forwards, join, multiply, steps_of, types_of
from aiograd.kernels.window import Pair, Window, pair, window
from aiograd.ops.op import ROWS

#: output channels of a group from which unfolding pays
_CHANNELS = {"float16": 16, "float32": 128, "float64": 128}
#: places in an image from which its share of a weight's gradient is worth a product of its own
_PLACES = 32
#: elements of columns, or of shares of a gradient, that are in memory at a time
_ELEMENTS = 1 << 26


def pays(device: DeviceCore, dtype: np.dtype[Any], channels: int) -> bool:
    """See Note [When unfolding pays]."""
    return hasattr(device.driver, "gemm") and supports(dtype) and channels >= _CHANNELS[dtype.name]


def sums_well(dtype: np.dtype[Any], places: int) -> bool:
    """True if sums over images may be made one by one."""
    return dtype != np.float16 and places >= _PLACES


def by_group(array: CudaArray, groups: int) -> CudaArray:
    """(N, C, H, W) as matrices (N, groups, C / groups, H * W)."""
    images, channels, height, width = array.shape
    found: CudaArray = array.reshape(images, groups, channels // groups, height * width)
    return found


def unfold(x: CudaArray, win: Window) -> CudaArray:
    """Columns (N, C * taps, windows) of images (N, C, H, W)."""
    x = forwards(x)
    images, channels, height, width = x.shape
    outputs = win.outputs(height, width)
    out = empty(x.device, (images, channels * win.taps, math.prod(outputs)), x.dtype)
    if out.size:
        launch(
            kernels.unfold, *spread(x.device, out.size), out, x, out.size, channels, *win.size, *outputs, height, width, *win.stride,
            -win.padding[0], -win.padding[1], *win.dilation, *steps_of(x),
            writes=(out,),
        )  # fmt: skip
    return out


def fold(out: CudaArray, columns: CudaArray, win: Window) -> None:
    """Add columns (N, C * taps, windows), contiguous, where their windows lie in `out` (N, C, H, W), contiguous."""
    if out.size:
        size = (out.shape[2], out.shape[3])
        launch(
            kernels.folded(*types_of(out.dtype)), *spread(out.device, out.size), out, columns, out.size, *win.size, *win.outputs(*size), *size,
            *win.stride, *win.padding, *win.dilation,
            writes=(out,),
        )  # fmt: skip


def _matrices(weight: CudaArray, groups: int) -> CudaArray:
    """(out, C / groups, kh, kw) as (groups, out / groups, C / groups * taps)."""
    found: CudaArray = weight.reshape(groups, weight.shape[0] // groups, math.prod(weight.shape[1:]))
    return found


def _shares(images: int, *elements: int) -> list[slice]:
    """Slices of the images; each needs memory within bounds."""
    step = max(1, _ELEMENTS // max(elements))
    return [slice(first, min(images, first + step)) for first in range(0, images, step)]


def forward(out: CudaArray, x: CudaArray, weight: CudaArray, win: Window, groups: int) -> None:
    """``out[...] = conv2d(x, weight)``."""
    matrices = _matrices(weight, groups)
    places = out.shape[2] * out.shape[3]
    for share in _shares(len(x), x.shape[1] * win.taps * places):
        columns = unfold(x[share], win)
        multiply(by_group(out[share], groups), matrices, columns.reshape(len(columns), groups, matrices.shape[2], places))


def input_grad(out: CudaArray, y: CudaArray, weight: CudaArray, win: Window, groups: int) -> None:
    """``out[...] = conv2d_input_grad(y, weight)``."""
    matrices = _matrices(weight, groups).swapaxes(1, 2)
    depth, places = matrices.shape[1], y.shape[2] * y.shape[3]
    for share in _shares(len(y), groups * depth * places):
        part = by_group(y[share], groups)
        columns = empty(y.device, (len(part), groups, depth, places), y.dtype)
        multiply(columns, matrices, part)
        fold(out[share], columns.reshape(len(part), groups * depth, places), win)


def weight_grad(out: CudaArray, x: CudaArray, y: CudaArray, win: Window, groups: int) -> None:
    """``out[...] = conv2d_weight_grad(x, y)``: a product for each image, summed in order."""
    depth, places = x.shape[1] // groups * win.taps, y.shape[2] * y.shape[3]
    shares = _shares(len(x), x.shape[1] * win.taps * places, out.size)
    sums = empty(out.device, (len(shares), out.size), out.dtype)
    for number, share in enumerate(shares):
        part = by_group(y[share], groups)
        columns = unfold(x[share], win).reshape(len(part), groups, depth, places)
        products = empty(out.device, (len(part), groups, part.shape[2], depth), out.dtype)
        multiply(products, part, columns.swapaxes(2, 3))
        join(sums[number], products, None)
    join(out, sums, None)


def on_host(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run the row on the host; its errors explain arguments that do not fit."""
    return fallback.on_host(name, ROWS[name].forward, args, kwargs)


@tables.row("im2col")
def im2col(x: Any, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1) -> Any:
    """The row."""
    if x.ndim != 4 or x.dtype.kind not in "fiub":
        return on_host("im2col", x, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
    return unfold(x, window(kernel_size, stride, padding, dilation))


@tables.row("col2im")
def col2im(columns: Any, output_size: Pair, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1) -> Any:
    """The row."""
    win = window(kernel_size, stride, padding, dilation)
    size = pair(output_size, "output_size")
    outputs = win.outputs(*size)
    if columns.ndim != 3 or columns.shape[1] % win.taps or columns.shape[2] != math.prod(outputs) or columns.dtype.kind != "f":
        return on_host(
            "col2im", columns, output_size=output_size, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
        )  # fmt: skip
    out = empty(columns.device, (columns.shape[0], columns.shape[1] // win.taps, *size), columns.dtype)
    fold(out, columns.contiguous(), win)
    return out
