"""Reading and writing parts of arrays."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import numpy as np

from aiograd.cuda import fallback, generate, tables
from aiograd.cuda.array import CudaArray, as_cuda, bits, check_same, device_of, empty, zeros
from aiograd.cuda.command import enqueue
from aiograd.cuda.driver.protocol import DeviceDriver, Pointer
from aiograd.cuda.layout import lowest
from aiograd.cuda.operations.advanced_index import advanced_index_of
from aiograd.cuda.operations.gathering import added, added_along, gathered, gathered_along, put, put_along
from aiograd.cuda.operations.views import imagined, view_like
from aiograd.errors import ArgumentError, ArgumentTypeError, IndexRangeError, ShapeError
from aiograd.running.types import Shape


def is_basic(index: Any) -> bool:
    """True if an index gives a view: integers, slices, ``...`` and new axes only."""
    parts = index if isinstance(index, tuple) else (index,)
    numbers = (int, np.integer, slice)
    return all(
        part is None or part is Ellipsis or (isinstance(part, numbers) and not isinstance(part, (bool, np.bool_)))
        for part in parts
    )  # fmt: skip


def getitem(array: CudaArray, index: Any) -> Any:
    """``array[index]``: a view for a basic index, else a copy."""
    if is_basic(index):
        stand_in = imagined(array)
        view = stand_in[index]
        if not isinstance(view, np.ndarray):  # one element: numpy would have read it
            view = stand_in[(*index, ...) if isinstance(index, tuple) else (index, ...)]
        return view_like(array, stand_in, view)
    advanced = advanced_index_of(array, index)
    return fallback.on_host("getitem", operator.getitem, (array, index), {}) if advanced is None else gathered(advanced)


def setitem(array: CudaArray, index: Any, value: Any) -> None:
    """``array[index] = value``.

    Raises:
        ShapeError: the value does not fit. numpy's errors for the index.
    """
    if is_basic(index):
        target = array if index is Ellipsis else getitem(array, index)
        assign(target, value)
        return
    if isinstance(index, CudaArray) and index.dtype.kind == "b" and array.shape[: index.ndim] == index.shape:
        rest = array.ndim - index.ndim
        if np.ndim(value) <= rest:  # one value for each element that is true
            assign(array, np.where(index.reshape((*index.shape, *(1,) * rest)), value, array).astype(array.dtype, copy=False))
            return
    advanced = advanced_index_of(array, index)
    if advanced is None:
        assign(array, fallback.on_host("setitem", _changed, (array, index, value), {}))
        return
    _check_fits(np.shape(value), advanced.shape)
    put(advanced, value)


def _changed(array: np.ndarray[Any, Any], index: Any, value: Any) -> np.ndarray[Any, Any]:
    changed = array.copy()
    changed[index] = value
    return changed


def assign(target: CudaArray, value: Any) -> None:
    """Write a value, broadcast and converted, into an array or view.

    Raises:
        ShapeError: it cannot be broadcast to the array's shape.
    """
    device = target.device
    source = value if isinstance(value, CudaArray) else CudaArray.from_host(device, np.asarray(value, target.dtype))
    check_same(device, "writing into an array", (source,))
    if len(source.shape) > len(target.shape) and source.size == target.size:
        source = source.reshape(target.shape)
    _check_fits(source.shape, target.shape)
    if not target.size:
        return
    if "c" in (source.dtype.kind, target.dtype.kind):  # kernels know no complex numbers, but can copy their bits
        source = source.astype(target.dtype, copy=False) if target.dtype.kind == "c" else np.real(source)
        if target.dtype.kind == "c":
            wide = target.itemsize == 16 and source.ndim < target.ndim
            source = source.reshape((1,) * (target.ndim - source.ndim) + source.shape) if wide else source
            source, target = bits(source), bits(target)
    with device.lock:
        source.flush()
        target.flush()
        if source.buffer is target.buffer:
            source = source.copy()  # it may overlap with the target
            source.flush()
        kernel, arguments = generate.assignment(target, source)
        target.buffer.flush_readers()
        grid, block = generate.grid_of(device.properties, target.shape)
        read, written = source.buffer, target.buffer
        from_offset, to_offset = source.offset + lowest(source.shape, source.strides), target.offset + lowest(target.shape, target.strides)

        def run(driver: DeviceDriver, stream: Any) -> None:
            to = Pointer(written.memory, to_offset, target.dtype, (written.nbytes - to_offset) // target.itemsize)
            of = Pointer(read.memory, from_offset, source.dtype, (read.nbytes - from_offset) // source.itemsize)
            driver.launch(kernel, grid, block, (to, of, *arguments), stream)

        enqueue(device, "setitem", run, (read,), (written,))


def _check_fits(shape: Shape, target: Shape) -> None:
    """Raise where an array of one shape cannot be broadcast to another; axes of length 1 in front do not count."""
    extra = max(0, len(shape) - len(target))
    inner = shape[extra:]
    if math.prod(shape[:extra]) != 1 or any(n not in (1, m) for n, m in zip(reversed(inner), reversed(target), strict=False)):
        raise ShapeError(f"writing an array of shape {list(shape)} into one of shape {list(target)}: it cannot be broadcast to that")



@tables.row("getitem_adjoint")
def getitem_adjoint(g: CudaArray, /, index: Any, shape: Shape) -> Any:
    """Zeros of `shape` with `g` at a basic index."""
    out = zeros(g.device, tuple(shape), g.dtype)
    setitem(out, index, g)
    return out


@tables.row("index_adjoint")
def index_adjoint(g: CudaArray, /, index: Any, shape: Shape) -> Any:
    """Zeros of `shape` with `g` added at an index with arrays, once for every mention of an element."""
    if g.dtype.kind not in "fi" or g.dtype.itemsize < (2 if g.dtype.kind == "f" else 4):
        return NotImplemented
    advanced = advanced_index_of(empty(g.device, tuple(shape), g.dtype), index)  # never used for its memory
    if advanced is None:
        return NotImplemented
    outer, length, inner, count = advanced.sizes
    if advanced.repeats and advanced.view.is_whole:
        return added(g.reshape((outer, count, inner)), advanced.index, outer, length, inner).reshape(shape)
    out = zeros(g.device, tuple(shape), g.dtype)
    target = out.view(advanced.view.shape, advanced.view.strides, advanced.view.offset)
    if advanced.repeats:
        assign(target, added(g.reshape((outer, count, inner)), advanced.index, outer, length, inner).reshape(target.shape))
    else:
        put(replace(advanced, view=target), g)
    return out


@tables.row("setitem")
def setitem_row(x: Any, value: Any, /, index: Any) -> Any:
    """A copy of `x` in which the elements at an index are `value`."""
    device = device_of(x, value)
    out = x.copy() if isinstance(x, CudaArray) else CudaArray.from_host(device, np.asarray(x))
    setitem(out, index, value)
    return out


@tables.function(np.take)
def np_take(a: Any, indices: Any, axis: int | None = None, out: Any = None, mode: str = "raise") -> Any:
    """Slices along an axis; of the flattened array where there is none."""
    if out is not None or mode != "raise":
        return NotImplemented
    a = as_cuda(device_of(a, indices), a)
    if axis is None:
        a, axis = np.reshape(a, -1), 0
    index = indices if isinstance(indices, CudaArray) else np.asarray(indices)
    if index.size == 0 and index.dtype.kind == "f":
        index = index.astype(np.intp)
    return getitem(a, (slice(None),) * (axis % a.ndim) + (index,))


@tables.row("take")
def take(x: Any, indices: Any, /, axis: int = 0) -> Any:
    """Slices of `x` along an axis."""
    return np_take(x, indices, axis)


@tables.row("take_adjoint")
def take_adjoint(g: Any, indices: Any, /, shape: Shape, axis: int = 0) -> Any:
    """Zeros of `shape` with the slices of `g` added at indices along an axis."""
    index = indices if isinstance(indices, CudaArray) else np.asarray(indices, np.intp)
    return index_adjoint(as_cuda(device_of(g, indices), g), (slice(None),) * (axis % len(shape)) + (index,), shape)


def _index_along(x: Any, indices: Any, axis: int) -> tuple[CudaArray, int]:
    """Indices for one axis of `x`, on the device; indices from the host are checked."""
    axis %= x.ndim
    length = x.shape[axis]
    if not isinstance(indices, CudaArray):
        indices = np.asarray(indices)
        if indices.size and (indices.min() < -length or indices.max() >= length):
            raise IndexRangeError(f"indices run from {indices.min()} to {indices.max()}, expected -{length} to {length - 1}, along axis {axis}")
    if indices.ndim != x.ndim:
        raise ShapeError(f"indices of shape {list(indices.shape)} for an array of shape {list(x.shape)}: expected as many axes")
    if indices.dtype.kind not in "iu":
        raise ArgumentTypeError(f"indices have dtype {indices.dtype}, expected integers")
    return as_cuda(device_of(x, indices), indices), axis


@tables.function(np.take_along_axis)
def along(x: Any, indices: Any, axis: int | None = -1) -> Any:
    """Elements along an axis, chosen separately on every position of the others."""
    if axis is None:
        x, axis = np.reshape(x, -1), 0
    x = as_cuda(device_of(x, indices), x)
    return gathered_along(x, *_index_along(x, indices, axis))


@tables.row("gather")
def gather(x: Any, indices: Any, /, axis: int = -1) -> Any:
    """Elements along an axis."""
    return along(x, indices, axis)


@tables.row("gather_adjoint")
def gather_adjoint(g: Any, indices: Any, /, shape: Any, axis: int = -1) -> Any:
    """Zeros of `shape` with the elements of `g` added at indices along an axis."""
    device, shape = device_of(g, indices), tuple(shape)
    g = as_cuda(device, g)
    if g.dtype.kind not in "fi" or g.dtype.itemsize < (2 if g.dtype.kind == "f" else 4):
        return NotImplemented
    place = axis % len(shape)
    if not isinstance(indices, CudaArray):
        indices = np.asarray(indices)
        length = shape[place]
        if indices.size and (indices.min() < -length or indices.max() >= length):
            raise IndexRangeError(f"indices run from {indices.min()} to {indices.max()}, expected -{length} to {length - 1}, along axis {place}")
    full = (*shape[:place], indices.shape[place], *shape[place + 1 :])
    whole: Any = np.broadcast_to(as_cuda(device, indices), full)
    return added_along(np.broadcast_to(g, full), whole, shape, place)


def _scattered(out: CudaArray, indices: Any, value: Any, axis: int) -> None:
    """Write into `out`, in C order."""
    index, axis = _index_along(out, indices, axis)
    full = (*out.shape[:axis], index.shape[axis], *out.shape[axis + 1 :])
    values = as_cuda(out.device, value, out.dtype)
    _check_fits(values.shape, full)
    whole: Any = np.broadcast_to(index, full)
    filled: Any = np.broadcast_to(values, full)
    put_along(out, whole, filled, axis)


@tables.row("scatter")
def scatter(x: Any, indices: Any, value: Any, /, axis: int = -1) -> Any:
    """A copy of `x` in which the elements at indices along an axis are `value`."""
    device = device_of(x, indices, value)
    out = x.copy() if isinstance(x, CudaArray) else CudaArray.from_host(device, np.asarray(x))
    _scattered(out, indices, value, axis)
    return out


@tables.function(np.put_along_axis)
def put_along_axis(arr: CudaArray, indices: Any, values: Any, axis: int | None) -> None:
    """Write elements along an axis, in place."""
    if axis is None:
        indices, axis = np.reshape(indices, -1), 0
        out = arr.reshape(-1).contiguous()
    else:
        out = arr.contiguous()
    _scattered(out, indices, values, axis)
    if out.buffer is not arr.buffer:
        arr[...] = out.reshape(arr.shape)


def _row_indices(name: str, indices: Any, rows: int) -> Any:
    """Indices of rows of a matrix; indices from the host are checked."""
    if not isinstance(indices, CudaArray):
        indices = np.asarray(indices)
    if indices.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name}: indices have dtype {indices.dtype}, expected integers")
    if not isinstance(indices, CudaArray) and indices.size and (indices.min() < 0 or indices.max() >= rows):
        raise ArgumentError(f"{name}: indices run from {indices.min()} to {indices.max()}, expected 0 to {rows - 1}")
    return indices


@tables.row("embedding")
def embedding(weight: CudaArray, /, indices: Any, padding_idx: int | None = None) -> Any:
    """Rows of `weight`."""
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight has shape {weight.shape}, expected (rows, features)")
    return getitem(weight, (_row_indices("embedding", indices, weight.shape[0]),))


@tables.row("embedding_grad")
def embedding_grad(rows: CudaArray, /, indices: Any, num_embeddings: int, padding_idx: int | None = None) -> Any:
    """Each of `rows` added into the row its index names."""
    index = _row_indices("embedding_grad", indices, num_embeddings)
    out = index_adjoint(rows, (index,), (num_embeddings, rows.shape[-1]))
    if padding_idx is not None:
        out[padding_idx] = 0
    return out
