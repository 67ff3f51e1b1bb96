"""Max and average pooling over windows of the last two axes."""

from __future__ import annotations

from typing import Any

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, as_cuda, check_same, device_of, empty
from aiograd.cuda.fallback import on_host
from aiograd.cuda.kernels import pooling as kernels
from aiograd.cuda.kernels.scalar import TYPES, precision_of
from aiograd.cuda.launching import launch, spread
from aiograd.cuda.operations.multiplying import types_of
from aiograd.kernels.window import Pair, Window, pair
from aiograd.ops.nn_pooling import pool_window
from aiograd.ops.op import ROWS, Fused

#: taps that one byte can name
_BYTE = 255


def _geometry(win: Window, outputs: tuple[int, int], size: tuple[int, int]) -> tuple[int, ...]:
    """The window as kernels take it, without dilation."""
    return (*win.size, *outputs, *size, *win.stride, *win.padding)


def _host(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run the row on the host; its errors explain arguments that do not fit."""
    return on_host(name, ROWS[name].forward, args, kwargs)


def _planes(*arrays: Any) -> list[CudaArray]:
    """The image on the device, contiguous."""
    device = device_of(*arrays)
    found = [as_cuda(device, array) for array in arrays]
    check_same(device, "pooling", found)
    return [array.contiguous() for array in found]


def largest(x: CudaArray, win: Window) -> tuple[CudaArray, CudaArray]:
    """The maximum of each window, and the tap it came from (in one byte, where that can name them all)."""
    x = x.contiguous()
    size = (x.shape[2], x.shape[3])
    outputs = win.outputs(*size)
    letters = "u1" if win.taps <= _BYTE else "u4"
    out, taps = (empty(x.device, (*x.shape[:2], *outputs), dtype) for dtype in (x.dtype, letters))
    if out.size:
        number = TYPES[precision_of(x.dtype) if x.dtype.kind == "f" else x.dtype.str[1:]]
        kernel = kernels.largest(number, TYPES[letters])
        launch(kernel, *spread(x.device, out.size), out, taps, x, out.size, *_geometry(win, outputs, size), *win.dilation, writes=(out, taps))
    return out, taps


def scatter(y: CudaArray, taps: CudaArray, win: Window, size: tuple[int, int]) -> CudaArray:
    """Values added where the taps of their windows lie, in planes of this size."""
    y, taps = y.contiguous(), taps.contiguous()
    out = empty(y.device, (*y.shape[:2], *size), y.dtype)
    if out.size:
        outputs = (y.shape[2], y.shape[3])
        kernel = kernels.scattered(*types_of(y.dtype))
        launch(kernel, *spread(y.device, out.size), out, y, taps, out.size, *_geometry(win, outputs, size), *win.dilation, writes=(out,))
    return out


def _known(x: Any) -> bool:
    """True if the maximum has a kernel."""
    return x.ndim == 4 and x.dtype.kind in "fiu" and x.dtype.itemsize <= 8


@tables.row("max_pool2d")
def max_pool2d(x: Any, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1) -> Any:
    """The row."""
    return max_pool2d_with_taps(x, kernel_size, stride, padding, dilation)[0]


def max_pool2d_with_taps(x: Any, kernel_size: Pair, stride: Pair | None, padding: Pair, dilation: Pair) -> tuple[Any, Any]:
    """The row's result, and what its gradient needs."""
    if not _known(x):
        return _host("max_pool2d", x, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation), None
    return largest(x, pool_window(kernel_size, stride, padding, dilation))


@tables.row("max_pool2d_input_grad")
def max_pool2d_input_grad(y: Any, x: Any, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1) -> Any:
    """The row."""
    y, x = _planes(y, x)
    if not _known(x) or y.dtype.kind != "f":
        return _host("max_pool2d_input_grad", y, x, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
    win = pool_window(kernel_size, stride, padding, dilation)
    return scatter(y, largest(x, win)[1], win, (x.shape[2], x.shape[3]))


@tables.row("max_pool2d_gather")
def max_pool2d_gather(values: Any, x: Any, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1) -> Any:
    """The row."""
    values, x = _planes(values, x)
    if not _known(x) or values.dtype.kind not in "fiu":
        return _host("max_pool2d_gather", values, x, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
    win = pool_window(kernel_size, stride, padding, dilation)
    size = (x.shape[2], x.shape[3])
    outputs = win.outputs(*size)
    out = empty(x.device, (*values.shape[:2], *outputs), values.dtype)
    if out.size:
        taps = largest(x, win)[1]
        kernel = kernels.gathered(TYPES["i8"])
        launch(kernel, *spread(x.device, out.size), out, values, taps, out.size, *_geometry(win, outputs, size), *win.dilation, writes=(out,))
    return out


def _max_pool2d_x(g: Any, index: Any, x_shape: tuple[int, ...], kernel_size: Pair, stride: Pair | None, padding: Pair, dilation: Pair) -> Any:
    (g,) = _planes(g)
    return scatter(g, index, pool_window(kernel_size, stride, padding, dilation), (x_shape[2], x_shape[3]))


tables.fused("max_pool2d", Fused(max_pool2d_with_taps, ("index",), {"x": _max_pool2d_x}))


@tables.row("avg_pool2d")
def avg_pool2d(x: Any, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, count_include_pad: bool = True) -> Any:
    """The row."""
    if x.ndim != 4 or x.dtype.kind != "f":
        return _host("avg_pool2d", x, kernel_size=kernel_size, stride=stride, padding=padding, count_include_pad=count_include_pad)
    win = pool_window(kernel_size, stride, padding)
    x = x.contiguous()
    size = (x.shape[2], x.shape[3])
    outputs = win.outputs(*size)
    out = empty(x.device, (*x.shape[:2], *outputs), x.dtype)
    if out.size:
        kernel = kernels.mean(*types_of(x.dtype))
        launch(kernel, *spread(x.device, out.size), out, x, out.size, bool(count_include_pad), *_geometry(win, outputs, size), writes=(out,))
    return out


@tables.row("avg_pool2d_input_grad")
def avg_pool2d_input_grad(
    y: Any, input_size: Pair, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, count_include_pad: bool = True
) -> Any:
    """The row."""
    win = pool_window(kernel_size, stride, padding)
    size = pair(input_size, "input_size")
    outputs = win.outputs(*size)
    if y.ndim != 4 or y.dtype.kind != "f" or y.shape[2:] != outputs:
        statics = {"input_size": input_size, "kernel_size": kernel_size, "stride": stride, "padding": padding}
        return _host("avg_pool2d_input_grad", y, **statics, count_include_pad=count_include_pad)
    y = y.contiguous()
    out = empty(y.device, (*y.shape[:2], *size), y.dtype)
    if out.size:
        kernel = kernels.spread_evenly(*types_of(y.dtype))
        launch(kernel, *spread(y.device, out.size), out, y, out.size, bool(count_include_pad), *_geometry(win, outputs, size), writes=(out,))
    return out
