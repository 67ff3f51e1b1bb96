"""Indexing: taking elements out, and the adjoints that put gradients back.

Note [Two rows for one syntax]
    Basic indices (integers, slices, ellipsis, newaxis) give views and never name an element twice: row `getitem`; its adjoint assigns.
    Indices with arrays give copies and may repeat elements: row `index`; its adjoint adds. Both adjoints are rows, and the adjoint of
    an adjoint is the indexing itself, so gradients of gradients need nothing more.

Note [Adding with repetition]
    ``np.add.at`` with one flat integer index has a fast path: 1.5 ns per element, against 100 ns with several indices or with rows to
    add; sorting and ``reduceat`` or ``bincount`` are slower than the flat index too. So indices are made flat first. It adds in the
    order of the index, always the same.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.errors import IndexRangeError
from aiograd.ops.creation import refuse
from aiograd.ops.op import Op, answer, define, implements
from aiograd.ops.shape import reshape
from aiograd.ops.slice_gradient import SliceGradient
from aiograd.running.types import Array, Shape

#: elements to add up to which making the index flat costs more than it saves
FEW = 512


def is_basic(index: Any) -> bool:
    """True if an index consists of integers, slices, ellipsis and newaxis only."""
    for part in index if type(index) is tuple else (index,):
        if not (part is None or part is Ellipsis or type(part) in (int, slice) or isinstance(part, np.integer)):
            return False
    return True


def select(x: Array, index: Any) -> Array:
    """``x[index]`` by the row that fits the index; see Note [Two rows for one syntax]."""
    return getitem(x, index=index) if is_basic(index) else index_(x, index=index)


def _getitem(x: Array, /, index: Any) -> Array:
    """``x[index]`` for a basic index: a view."""
    out = x[index]
    if isinstance(out, np.generic):  # a full set of integers: numpy copies the element, unless there is an ellipsis
        out = x[(*index, ...) if type(index) is tuple else (index, ...)] if x.ndim else x
    return out


def _getitem_adjoint(g: Array, /, index: Any, shape: Shape) -> Array:
    """Zeros of `shape` with `g` at a basic index."""
    out = np.zeros(shape, g.dtype)
    out[index] = g
    return out


def _index(x: Array, /, index: Any) -> Array:
    """``x[index]`` for an index with arrays: a copy."""
    return x[index]


def _index_adjoint(g: Array, /, index: Any, shape: Shape) -> Array:
    """Zeros of `shape` with `g` added at an index with arrays, once for every mention of an element."""
    out = np.zeros(shape, g.dtype)
    if not _may_repeat(index):
        out[index] = g
        return out
    if g.size <= FEW:
        np.add.at(out, index, g)
        return out
    parts = index if type(index) is tuple else (index,)
    arrays = [np.asarray(part) for part in parts if not isinstance(part, slice) and part is not None and part is not Ellipsis]
    if len(arrays) == len(parts) and all(a.dtype.kind in "iu" for a in arrays):
        add_at(out, arrays, np.asarray(g))
    elif out.size <= 8 * g.size:
        positions = np.arange(out.size).reshape(shape)[index]
        np.add.at(out.reshape(-1), positions.reshape(-1), np.broadcast_to(g, positions.shape).reshape(-1))
    else:
        np.add.at(out, index, g)
    return out


def _may_repeat(index: Any) -> bool:
    """True if an element can be named twice: by an integer array of more than one element."""
    for part in index if type(index) is tuple else (index,):
        if isinstance(part, (np.ndarray, list)):
            array = np.asarray(part)
            if array.dtype.kind in "iu" and array.size > 1:
                return True
    return False


def add_at(out: Array, arrays: list[Array], g: Array) -> None:
    """Add the slices of `g` into `out` at integer arrays that index its first axes; see Note [Adding with repetition].

    Args:
        out: contiguous; modified.
        arrays: one per leading axis, of shapes that broadcast.
        g: (*broadcast shape, *the other axes of `out`).
    """
    flat: Array = np.zeros((), np.intp)
    for length, array in zip(out.shape, arrays, strict=False):
        if array.size and (array.min() < -length or array.max() >= length):
            raise IndexError(f"an index runs from {array.min()} to {array.max()}, expected -{length} to {length - 1}")
        flat = flat * length + np.where(array < 0, array + length, array)
    inner = math.prod(out.shape[len(arrays) :])
    flat = flat.reshape(-1)
    if inner != 1:
        flat = (flat[:, None] * inner + np.arange(inner)).reshape(-1)
    np.add.at(out.reshape(-1), flat, g.reshape(-1))


def _getitem_vjp(g: Array, x_shape: Shape, index: Any) -> Array:
    if g.__class__ is np.ndarray:
        if g.dtype.kind == "f" and 8 * g.size <= math.prod(x_shape):
            return SliceGradient(g, index, x_shape)
        if type(g) is np.ndarray:
            return _getitem_adjoint(g, index, x_shape)  # spares the dispatch
    return getitem_adjoint(g, index=index, shape=x_shape)


getitem: Op = define("getitem", _getitem, x=_getitem_vjp, view=True, jvp="forward", complex="explicit", cost=0.5)
getitem_adjoint: Op = define(
    "getitem_adjoint", _getitem_adjoint, g=lambda g, index: getitem(g, index=index), jvp="forward", complex="explicit", cost=0.1
)
index_: Op = define(
    "index", _index, x=lambda g, x_shape, index: index_adjoint(g, index=index, shape=x_shape), jvp="forward", complex="explicit", cost=3.0
)
index_adjoint: Op = define("index_adjoint", _index_adjoint, g=lambda g, index: index_(g, index=index), jvp="forward", complex="explicit", cost=3.0)


# Assignment, as a function.


def _setitem(x: Array, value: Array, /, index: Any) -> Array:
    """A copy of `x` in which the elements at `index` are `value`.

    Args:
        x: any shape.
        value: array or number that broadcasts to ``x[index]``.
        index: basic or with arrays. Where arrays name an element more than once the last value stays.
    """
    out = np.array(x, copy=True)
    out[index] = value
    return out


def _setitem_value(g: Array, value_shape: Shape, x_shape: Shape, index: Any) -> Array:
    part = select(g, index)
    if _may_repeat(index):
        # of several values for one element only the last was kept
        winner, order = np.empty(x_shape, np.intp), np.arange(math.prod(part.shape)).reshape(part.shape)
        winner[index] = order
        kept = np.flatnonzero(winner[index] == order)
        flat = index_(reshape(part, shape=(-1,)), index=kept)
        part = reshape(index_adjoint(flat, index=kept, shape=(order.size,)), shape=order.shape)
    if len(value_shape) > len(part.shape):  # numpy lets the value have more axes, of length 1 in front
        part = reshape(part, shape=(1,) * (len(value_shape) - len(part.shape)) + tuple(part.shape))
    return part


setitem: Op = define(
    "setitem", _setitem, x=lambda g, index: setitem(g, 0, index=index), value=_setitem_value, jvp="linear", complex="explicit", cost=1.0
)


# Elements along one axis.


def _take(x: Array, indices: Array, /, axis: int = 0) -> Array:
    """Slices of `x` along `axis`.

    Args:
        x: (..., length, ...).
        indices: integers of any shape; negative ones count from the end.
        axis: where to take.

    Returns:
        (..., *indices.shape, ...).
    """
    return np.take(x, indices, axis)


def _take_adjoint(g: Array, indices: Array, /, shape: Shape, axis: int = 0) -> Array:
    """Zeros of `shape` with the slices of `g` added at `indices` along `axis`."""
    indices = np.asarray(indices)
    if not shape:  # numpy takes a number for a vector of one
        if ((indices > 0) | (indices < -1)).any():
            raise IndexRangeError(f"indices from {indices.min()} to {indices.max()} of a number, which has place 0 only")
        return np.asarray(np.add.reduce(g, axis=None))
    axis %= len(shape)
    lead, tail = shape[:axis], shape[axis + 1 :]
    out = np.zeros((shape[axis], *lead, *tail), g.dtype)
    slices = np.moveaxis(g, range(axis, axis + indices.ndim), range(indices.ndim))
    add_at(out, [indices], np.ascontiguousarray(slices))
    return np.moveaxis(out, 0, axis)


def _gather_adjoint(g: Array, indices: Array, /, shape: Shape, axis: int = -1) -> Array:
    """Zeros of `shape` with the elements of `g` added at `indices` along `axis`."""
    indices = np.asarray(indices)
    axis %= len(shape)
    out = np.zeros(shape, g.dtype)
    others = [a for a in range(len(shape)) if a != axis]
    if any(indices.shape[a] != shape[a] for a in others):  # broadcast along other axes, as take_along_axis does
        full = list(shape)
        full[axis] = indices.shape[axis]
        indices = np.broadcast_to(indices, full)
        g = np.broadcast_to(g, full)
    arrays = []
    for a in range(len(shape)):
        grid = [1] * len(shape)
        grid[a] = -1
        arrays.append(indices if a == axis else np.arange(shape[a]).reshape(grid))
    add_at(out, arrays, np.ascontiguousarray(g))
    return out


def _scatter(x: Array, indices: Array, value: Array, /, axis: int = -1) -> Array:
    """A copy of `x` in which the elements at `indices` along `axis` are `value` (``put_along_axis`` as a function).

    Args:
        x: any shape.
        indices: integers, of the shape of `x` except along `axis`; no element twice.
        value: broadcasts to the shape of `indices`.
        axis: where to put.
    """
    out = np.array(x, copy=True)
    np.put_along_axis(out, np.asarray(indices), value, axis)
    return out


def _scatter_jvp(t: tuple[Array | None, ...], x: Array, indices: Array, axis: int) -> Array:
    return scatter(np.zeros_like(x) if t[0] is None else t[0], indices, 0 if t[2] is None else t[2], axis=axis)


take: Op = define(
    "take", _take, x=lambda g, indices, x_shape, axis: take_adjoint(g, indices, shape=x_shape, axis=axis), jvp="forward", complex="explicit", cost=3.0
)
take_adjoint: Op = define(
    "take_adjoint", _take_adjoint, g=lambda g, indices, axis: take(g, indices, axis=axis), jvp="forward", complex="explicit", cost=3.0
)
#: elements of `x` along `axis`, chosen separately for each position on the other axes (``take_along_axis``)
gather: Op = define(
    "gather", lambda x, indices, /, axis=-1: np.take_along_axis(x, indices, axis),
    x=lambda g, indices, x_shape, axis: gather_adjoint(g, indices, shape=x_shape, axis=axis),
    jvp="forward", complex="explicit",
    cost=5.0,
)
gather_adjoint: Op = define(
    "gather_adjoint", _gather_adjoint, g=lambda g, indices, axis: gather(g, indices, axis=axis), jvp="forward", complex="explicit", cost=5.0
)
scatter: Op = define(
    "scatter",
    _scatter,
    x=lambda g, indices, axis: scatter(g, indices, 0, axis=axis),
    value=lambda g, indices, axis: gather(g, indices, axis=axis),
    jvp=_scatter_jvp, complex="explicit",
    cost=5.0,
)


def index_add(x: Array, indices: Array, value: Array, /, *, axis: int = 0) -> Array:
    """`x` with the slices of `value` added at `indices` along `axis`, once for every mention."""
    return x + take_adjoint(value, indices, shape=tuple(x.shape), axis=axis)


def scatter_add(x: Array, indices: Array, value: Array, /, *, axis: int = -1) -> Array:
    """`x` with the elements of `value` added at `indices` along `axis`, once for every mention."""
    return x + gather_adjoint(value, indices, shape=tuple(x.shape), axis=axis)


# numpy's functions, with numpy's arguments


@implements(np.take)
def np_take(a: Array, indices: Any, axis: int | None = None, out: Any = None, mode: str = "raise") -> Array:
    """numpy's ``take``; out of range is an error."""
    refuse("take", out=out, mode=None if mode == "raise" else mode)
    if axis is None:
        a, axis = reshape(a, shape=(-1,)), 0
    return take(a, indices if hasattr(indices, "shape") else np.asarray(indices, np.intp), axis=axis)


@implements(np.take_along_axis)
def np_take_along_axis(arr: Array, indices: Array, axis: int | None = -1) -> Array:
    """numpy's ``take_along_axis``."""
    if axis is None:
        arr, axis = reshape(arr, shape=(-1,)), 0
    return gather(arr, indices, axis=axis)


@implements(np.compress)
def np_compress(condition: Any, a: Array, axis: int | None = None, out: Any = None) -> Array:
    """numpy's ``compress``: the slices along `axis` where `condition` holds."""
    refuse("compress", out=out)
    if axis is None:
        a, axis = reshape(a, shape=(-1,)), 0
    return take(a, np.flatnonzero(np.asarray(condition)), axis=axis)


#: the indices of the elements that are not zero, one array per axis
nonzero = define("nonzero", lambda x, /: np.nonzero(x), outputs=None, numpy=(np.nonzero,))


answer({
    np.flatnonzero: lambda a: nonzero(reshape(a, shape=(-1,)))[0],
    np.argwhere: lambda a: np.stack(nonzero(a), axis=-1),
})  # fmt: skip
