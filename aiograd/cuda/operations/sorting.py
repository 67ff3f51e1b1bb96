"""Sorting, the largest elements, searching; see `aiograd.cuda.kernels.sorting`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, as_cuda, device_of, empty
from aiograd.cuda.kernels import sorting as kernels
from aiograd.cuda.launching import launch, spread
from aiograd.cuda.operations.indexing import along
from aiograd.cuda.operations.ordering import sorted_pairs
from aiograd.cuda.operations.selecting import kind_of
from aiograd.errors import ArgumentError


def _order(x: CudaArray, descending: bool) -> Any:
    """Which elements sort each row of a C-contiguous (rows, length), equal ones in their order; int64."""
    device = x.device
    if x.dtype.itemsize < 4 or x.dtype == np.float16:
        x = x.astype(np.float32 if x.dtype.kind == "f" else np.int32)
    kind = f"{x.dtype.kind}{x.itemsize}"
    bits = x.view(x.shape, x.strides, 0, np.dtype(f"u{x.itemsize}"))
    keys = empty(device, x.shape, np.uint64)
    launch(kernels.sortable(kind, descending), *spread(device, x.size), keys, bits, x.size, writes=(keys,))
    return sorted_pairs(keys)[1].astype(np.int64)


def _argsorted(x: Any, axis: int, descending: bool) -> Any:
    """As `_order`, along any axis."""
    if not -x.ndim <= axis < x.ndim:
        raise np.exceptions.AxisError(axis, x.ndim, "sort")
    moved = np.moveaxis(x, axis, -1)
    if not x.size:
        return empty(x.device, x.shape, np.int64)
    rows = moved.contiguous().reshape((-1, moved.shape[-1]))
    return np.moveaxis(_order(rows, descending).reshape(moved.shape), -1, axis)


def _sortable(x: Any) -> bool:
    return isinstance(x, CudaArray) and x.dtype.kind in "fiub" and x.ndim > 0


@tables.function(np.argsort)
def argsort(a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
    """numpy's ``argsort``, always stable."""
    if order is not None or a.dtype.kind not in "fiub":
        return NotImplemented
    if axis is None or a.ndim == 0:
        a, axis = np.reshape(a, -1), 0
    return _argsorted(a, axis, False)


@tables.function(np.sort)
def sort(a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
    """numpy's ``sort``."""
    if order is not None or a.dtype.kind not in "fiub":
        return NotImplemented
    if axis is None:
        a, axis = np.reshape(a, -1), 0
    return along(a, _argsorted(a, axis, False), axis)


@tables.row("topk")
def topk(x: CudaArray, /, k: int, axis: int = -1, *, largest: bool = True) -> Any:
    """The `k` largest (or smallest) elements along an axis, in order, and their indices; of equal ones the first."""
    if not _sortable(x):
        return NotImplemented
    length = x.shape[axis]
    if not 0 <= k <= length:
        raise ArgumentError(f"topk: k is {k}, expected 0 to {length}, the length of axis {axis}")
    order = _argsorted(x, axis, largest)
    indices = order[(slice(None),) * (axis % x.ndim) + (slice(0, k),)].contiguous()
    return along(x, indices, axis), indices


@tables.function(np.searchsorted)
def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    """Where the elements of `v` would go into the sorted vector `a`."""
    if sorter is not None or side not in ("left", "right") or np.ndim(a) != 1:
        return NotImplemented
    dtype = np.result_type(kind_of(a), kind_of(v))
    if dtype.kind not in "fiu":
        return NotImplemented
    if dtype == np.float16:
        dtype = np.dtype(np.float32)
    device = device_of(a, v)
    line, values = (as_cuda(device, each, dtype).contiguous() for each in (a, v))
    out = empty(device, values.shape, np.int64)
    if out.size:
        launch(kernels.SEARCH[side], *spread(device, out.size), out, line, values, out.size, line.size, writes=(out,))
    return out


@tables.row("isin")
def isin(x: Any, elements: Any, /, *, invert: bool = False) -> Any:
    """True if each element of `x` is among `elements`."""
    device = device_of(x, elements)
    dtype = np.result_type(kind_of(x), kind_of(elements))
    if dtype.kind not in "fiu" or dtype == np.float16:
        return NotImplemented
    values = as_cuda(device, x, dtype)
    count = math.prod(np.shape(elements))
    if not count:
        return np.zeros_like(values, np.bool_) if not invert else np.ones_like(values, np.bool_)
    line = sort(as_cuda(device, elements, dtype).reshape(-1))
    found = np.equal(np.take(line, np.minimum(searchsorted(line, values), count - 1), 0), values)
    return np.logical_not(found) if invert else found


tables.ROW_KERNELS.update({
    "argsort": lambda x, /, axis=-1, *, descending=False, stable=True: _argsorted(x, axis, descending) if _sortable(x) else NotImplemented,
    "sort": lambda x, /, axis=-1, *, descending=False, stable=True: (
        along(x, _argsorted(x, axis, descending), axis) if _sortable(x) else NotImplemented
    ),
    "searchsorted": lambda x1, x2, /, *, side="left": searchsorted(x1, x2, side),
})  # fmt: skip
