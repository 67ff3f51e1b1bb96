"""Softmax along an axis, its logarithm and the variant for masked scores: one launch forward and one backward.

And the logarithm of a sum of exponentials.
"""

from __future__ import annotations

import math
from typing import Any

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, as_cuda, empty
from aiograd.cuda.kernels import softmax as kernels
from aiograd.cuda.kernels.scalar import precision_of
from aiograd.cuda.launching import launch
from aiograd.cuda.operations.reducing import axes_of
from aiograd.cuda.tiles import Tile, tile
from aiograd.ops.op import ROWS, Fused

_MODES = {"softmax": "softmax", "safe_softmax": "safe", "log_softmax": "log"}


def lines_along(x: CudaArray, axis: int) -> tuple[int, int, int, Tile]:
    """How `x` in C order is seen as lines along an axis: how many, how long, how far apart their elements lie; and the tile for them."""
    axes = axes_of(axis, x.ndim)
    n = math.prod(x.shape[a] for a in axes)
    inner = math.prod(x.shape[axes[0] + 1 :]) if axes else 1
    m = x.size // n
    return m, n, inner, tile(x.device.properties, m, n, along=inner == 1, cut=False)


def _forward(name: str, x: CudaArray, axis: int) -> Any:
    if x.dtype.kind != "f":
        return NotImplemented
    out = empty(x.device, x.shape, x.dtype)
    if x.size:
        m, n, inner, here = lines_along(x, axis)
        kernel = kernels.forward(precision_of(x.dtype), f"f{x.itemsize}", here.columns, here.lanes, here.along, _MODES[name])
        launch(kernel, here.blocks, here.block, out, x.contiguous(), m, n, inner, writes=(out,))
    return out


def _backward(name: str, g: Any, out: CudaArray, axis: int) -> Any:
    g = as_cuda(out.device, g, out.dtype)
    dx = empty(out.device, out.shape, out.dtype)
    if out.size:
        m, n, inner, here = lines_along(out, axis)
        kernel = kernels.backward(precision_of(out.dtype), f"f{out.itemsize}", here.columns, here.lanes, here.along, name == "log_softmax")
        launch(kernel, here.blocks, here.block, dx, g.contiguous(), out.contiguous(), m, n, inner, writes=(dx,))
    return dx


def _register(name: str) -> None:
    def forward(x: CudaArray, /, axis: int = -1) -> Any:
        return _forward(name, x, axis)

    def fused_forward(x: CudaArray, axis: int) -> tuple[Any]:
        result = _forward(name, x, axis)
        return (ROWS[name].forward(x, axis) if result is NotImplemented else result,)

    def fused_backward(g: Any, out: CudaArray, axis: int) -> Any:
        return _backward(name, g, out, axis)

    tables.row(name)(forward)
    tables.fused(name, Fused(fused_forward, (), {"x": fused_backward}))


for _name in _MODES:
    _register(_name)


@tables.row("logsumexp")
def logsumexp(x: CudaArray, /, axis: Any = None, *, keepdims: bool = False) -> Any:
    """The row of that name, in one launch; several axes, and lines too few to keep the device busy, are left to reductions."""
    if x.dtype.kind != "f" or not x.size:
        return NotImplemented
    axes = axes_of(axis, x.ndim)
    if axes != tuple(range(axes[0], axes[-1] + 1) if axes else ()):
        return NotImplemented
    n, inner = math.prod(x.shape[a] for a in axes), math.prod(x.shape[axes[-1] + 1 :] if axes else ())
    m = x.size // n
    here = tile(x.device.properties, m, n, along=inner == 1)
    if here.parts > 1:
        return NotImplemented
    out = empty(x.device, tuple(1 if a in axes else extent for a, extent in enumerate(x.shape) if keepdims or a not in axes), x.dtype)
    kernel = kernels.log_sum_exp(precision_of(x.dtype), f"f{x.itemsize}", here.columns, here.lanes, here.along)
    launch(kernel, here.blocks, here.block, out, x.contiguous(), m, n, inner, writes=(out,))
    return out
