"""Taking elements at indices, and the adjoints, which add: sorted by index first, so that sums have one order.

See `aiograd.cuda.kernels.indexing`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.cuda.array import CudaArray, as_cuda, bits, empty, zeros
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.kernels import indexing as kernels
from aiograd.cuda.launching import launch, spread
from aiograd.cuda.operations.advanced_index import AdvancedIndex
from aiograd.cuda.operations.ordering import sorted_pairs
from aiograd.running.types import Shape

_WIDE = 2**31
#: indices of the host up to which the host brings them into order
_HOST_ORDERS = 2**15
#: columns from which one thread each is enough for a device, and indices up to which it is anyway
_COLUMNS, _FEW = 4096, 16


def gathered(advanced: AdvancedIndex) -> CudaArray:
    """The elements picked, in C order."""
    view, (_, length, inner, count) = advanced.view, advanced.sizes
    out = empty(view.device, advanced.shape, view.dtype)
    n = bits(out).size
    if n:
        inner *= n // out.size
        x, index = bits(view), as_cuda(view.device, advanced.index)
        strides = _three_strides(x, advanced.outer, advanced.indexed)
        if strides is None:
            x = bits(view.contiguous())
            strides = (length * inner, inner, 1)
        wide = max(n, x.size) >= _WIDE
        args = (bits(out), x, index, n, inner, count, length, *strides, _missing(view))
        launch(kernels.GATHER[wide], *spread(view.device, n), *args, writes=(out,))
    return out


def gathered_along(x: CudaArray, index: CudaArray, axis: int) -> CudaArray:
    """Elements along an axis, chosen separately on every position of the others, with which `index` broadcasts."""
    full = (*index.shape[:axis], x.shape[axis], *index.shape[axis + 1 :])
    others = np.broadcast_shapes((*full[:axis], 1, *full[axis + 1 :]), (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    source = _broadcast(x, (*others[:axis], x.shape[axis], *others[axis + 1 :]))
    index = _broadcast(index, (*others[:axis], index.shape[axis], *others[axis + 1 :])).contiguous()
    if x.itemsize == 16:
        flat: Any = source.contiguous().reshape(-1)
        return gathered(AdvancedIndex(flat, 0, 1, flat_along(index, source.shape, axis), index.shape, True))
    out = empty(x.device, index.shape, x.dtype)
    if out.size:
        x_bits = bits(source)
        strides = _three_strides(x_bits, axis, 1)
        inner = math.prod(source.shape[axis + 1 :])
        if strides is None:
            x_bits = bits(source.contiguous())
            strides = (source.shape[axis] * inner, inner, 1)
        wide = max(out.size, x_bits.size) >= _WIDE
        launch(
            kernels.GATHER_ALONG[wide], *spread(x.device, out.size), bits(out), x_bits, index, out.size, inner, index.shape[axis], x.shape[axis],
            *strides, _missing(x), writes=(out,),
        )  # fmt: skip
    return out


def put(advanced: AdvancedIndex, value: Any) -> None:
    """Write a value, which broadcasts to the shape of the picks; of several values for one element the last stays."""
    view, (outer, length, inner, count) = advanced.view, advanced.sizes
    device = view.device
    if not outer * inner * count:
        return
    inner *= 2 if view.itemsize == 16 else 1
    values = _broadcast(as_cuda(device, value, view.dtype), advanced.shape)
    if values.buffer is view.buffer:
        values = values.copy()
    of = _three_strides(bits(values), advanced.outer, len(advanced.picked))
    if of is None:
        values = values.contiguous()
        of = (count * inner, inner, 1)
    target, to = view, _three_strides(bits(view), advanced.outer, advanced.indexed)
    if to is None:
        target, to = view.contiguous(), (length * inner, inner, 1)
    wide = max(outer * inner * max(count, length), values.size) >= _WIDE
    n = outer * count * inner
    keys = _sorted_keys(device, advanced.index, length, repeats=advanced.repeats)
    launch(
        kernels.PUT[wide], *spread(device, n), bits(target), bits(values), keys, n, inner, count, length, *to, *of,
        writes=(target,),
    )  # fmt: skip
    if target is not view:
        view[...] = target


def added(g: CudaArray, index: Any, outer: int, length: int, inner: int) -> CudaArray:
    """Zeros (outer, length, inner) with the elements of `g` added at an index.

    Args:
        g: (outer, picks, inner).
        index: (picks,) integers, of the host (then in range) or of the device.
    """
    device, count = g.device, math.prod(index.shape)
    if not g.size:
        return zeros(device, (outer, length, inner), g.dtype)
    out = empty(device, (outer, length, inner), g.dtype)
    if not out.size:
        return out
    total = "f4" if g.dtype.itemsize == 2 else f"{g.dtype.kind}{g.itemsize}"
    g = g.contiguous()
    wide = max(out.size, g.size) >= _WIDE
    keys = _sorted_keys(device, index, length, repeats=True)
    starts = empty(device, (length + 1,), np.int64)
    launch(kernels.run_starts, *spread(device, length + 1), starts, keys, count, length, writes=(starts,))
    chunks = count // kernels.CHUNK
    partial = keys
    if chunks:
        partial = empty(device, (outer, chunks, inner), np.dtype(total))
        n = partial.size
        launch(kernels.CHUNK_SUMS[wide, total], *spread(device, n), partial, g, keys, n, inner, count, chunks, writes=(partial,))
    else:
        partial = keys.view((1,), (0,), 0, np.dtype(total))  # not looked at
    kernel = kernels.ADD_RUNS[wide, total, f"{g.dtype.kind}{g.itemsize}"]
    launch(kernel, *spread(device, out.size), out, g, keys, starts, partial, out.size, inner, count, length, chunks, writes=(out,))
    return out


def added_along(g: Any, index: CudaArray, shape: Shape, axis: int) -> CudaArray:
    """Zeros of `shape` with the elements of `g` added at indices along an axis; `g` and `index` have `shape` but for that axis."""
    device, count, length = g.device, index.shape[axis], shape[axis]
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    if outer * inner >= _COLUMNS or count <= _FEW:
        if g.dtype != np.float16:
            out = zeros(device, shape, g.dtype)
            if g.size and out.size:
                columns, wide = outer * inner, max(out.size, g.size) >= _WIDE
                args = (out, g.contiguous(), index.contiguous(), columns, inner, count, length)
                launch(kernels.ADD_ALONG[wide], *spread(device, columns), *args, writes=(out,))
            return out
    return added(g.reshape((1, -1, 1)), flat_along(index, shape, axis), 1, math.prod(shape), 1).reshape(shape)  # type: ignore[no-any-return]


def put_along(out: CudaArray, index: CudaArray, values: CudaArray, axis: int) -> None:
    """Write elements of `values` into `out`, in C order, at indices along an axis; of several for one element the last stays."""
    shape = out.shape
    outer, inner, count = math.prod(shape[:axis]), math.prod(shape[axis + 1 :]), index.shape[axis]
    if not values.size or not out.size:
        return
    columns, wide = outer * inner, max(out.size, values.size) >= _WIDE
    values, index = values.contiguous(), index.contiguous()
    if (columns >= _COLUMNS or count <= _FEW) and out.itemsize < 16:
        args = (bits(out), bits(values), index, columns, inner, count, shape[axis])
        launch(kernels.PUT_ALONG[wide], *spread(out.device, columns), *args, writes=(out,))
        return
    flat = out.reshape(-1)
    put(AdvancedIndex(flat, 0, 1, flat_along(index, shape, axis), (values.size,), True), values.reshape(-1))


def flat_along(index: Any, shape: Shape, axis: int) -> Any:
    """Places in the flattened `shape` that indices along an axis name; past its end where there is none."""
    length, inner = shape[axis], math.prod(shape[axis + 1 :])
    wrapped = np.where(np.less(index, 0), np.add(index, np.int64(length)), index)
    base = np.zeros((), np.int64)
    for place, extent in enumerate(shape):
        if place != axis:
            step = np.arange(extent, dtype=np.int64) * math.prod(shape[place + 1 :])
            base = base + step.reshape((-1,) + (1,) * (len(shape) - 1 - place))
    flat = np.add(np.multiply(wrapped, np.int64(inner)), base)
    valid = np.logical_and(np.greater_equal(wrapped, 0), np.less(wrapped, length))
    return np.where(valid, flat, np.int64(math.prod(shape))).reshape(-1)


def _sorted_keys(device: DeviceCore, index: Any, length: int, *, repeats: bool) -> CudaArray:
    """Keys ``index * picks + position`` in ascending order; see `aiograd.cuda.kernels.indexing`."""
    count = math.prod(index.shape)
    if not isinstance(index, CudaArray) and (count <= _HOST_ORDERS or not repeats):
        host = index.astype(np.int64) * count + np.arange(count)
        return CudaArray.from_host(device, np.sort(host) if repeats else host)
    index = as_cuda(device, index)
    keys = empty(device, (count,), np.int64)
    launch(kernels.keys_of, *spread(device, count), keys, index, count, length, writes=(keys,))
    if count == 1:
        return keys
    line = keys.view((1, count), (count * 8, 8), 0, np.dtype(np.uint64))
    return sorted_pairs(line)[0].view((count,), (8,), 0, np.dtype(np.int64))


def _broadcast(array: CudaArray, shape: Shape) -> CudaArray:
    if array.shape == tuple(shape):
        return array
    if array.ndim > len(shape) and math.prod(array.shape[: array.ndim - len(shape)]) == 1:
        array = array.reshape(array.shape[array.ndim - len(shape) :])
    return np.broadcast_to(array, shape)  # type: ignore[return-value]


def _missing(array: CudaArray) -> Any:
    """The value of an element out of range: all bits set, which is NaN in every floating dtype, -1 in signed integers, and true."""
    size = min(array.itemsize, 8)
    return np.dtype(f"u{size}").type(1 if array.dtype.kind == "b" else 2 ** (8 * size) - 1)


def _three_strides(array: CudaArray, outer: int, indexed: int) -> tuple[int, int, int] | None:
    """Strides, in elements, of (outer, indexed, inner) axes; None where a group of axes has no single one, or one runs backwards."""
    shape, strides = array.shape, array.strides
    found: list[int] = []
    for low, high in ((0, outer), (outer, outer + indexed), (outer + indexed, len(shape))):
        step, expected = 0, None
        for extent, stride in zip(reversed(shape[low:high]), reversed(strides[low:high]), strict=True):
            if extent == 1:
                continue
            if stride < 0 or stride % array.itemsize:
                return None
            if expected is None:
                step = stride // array.itemsize
            elif stride != expected:
                return None
            expected = stride * extent
        found.append(step)
    return found[0], found[1], found[2]
