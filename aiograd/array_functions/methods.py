"""The methods of Tensor that compute: one table, whose entries are functions of this package.

Note [The table]
    `TensorMethods` is the table: ``name = function``, and a function's first parameter is the tensor. So a method has the parameters, types and
    docstring of the function that it is, and what is given to the function (another name for a parameter, say) is given to the method. Type
    checkers take `Methods` for a base class of Tensor; when the package is imported its entries are put on Tensor itself.
    A method for a row of one array without further arguments calls the row directly, not the function (`_fast`).

Note [Whose meaning]
    Where numpy and PyTorch mean different things by a name, numpy's meaning is meant (``x.max(1)`` returns values only, ``x.repeat(2)`` repeats
    elements, ``x.split(2)`` cuts in two, ``x.std()`` divides by the number of elements); methods that only PyTorch has take its arguments in its
    order. ``x.sort()`` returns a sorted tensor, as numpy's function does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from aiograd.array_functions import activation, comparison, creation, elementwise, linalg, manipulation, products, reduction, searching
from aiograd.array_functions.conversion import ArrayLike, Axis, row
from aiograd.errors import ArgumentError, IndexRangeError, ShapeError
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor
from aiograd.tensors.unrolled import unary

P = ParamSpec("P")
R = TypeVar("R")


# -------------------------------------------------------------------- forms


def _fast(name: str, function: Callable[P, R]) -> Callable[P, R]:
    """The row `name` of one array as a method: what `function` does for anything, without asking whether it is a Tensor."""
    method: Any = functools.wraps(function)(unary(row(name)))
    return method  # type: ignore[no-any-return]


def _cast(dtype: str) -> Callable[[Tensor], Tensor]:
    def cast(x: Tensor, /) -> Tensor:
        return x.astype(dtype, copy=False)

    cast.__doc__ = f"The values as {dtype}; the tensor itself where they are."
    return cast


def _flat(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """``(2, 3)`` of ``f(2, 3)`` and ``f((2, 3))`` alike."""
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else values


def _axis(x: Tensor, axis: int, what: str) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise IndexRangeError(f"{what}: axis {axis} of a tensor of shape {list(x.shape)}, expected {-x.ndim} to {x.ndim - 1}")
    return axis % x.ndim


# -------------------------------------------------------------------- what only a method is


def reshape(x: Tensor, /, *shape: Any) -> Tensor:
    """The same elements in another shape, given as ints or as one tuple; one extent may be -1."""
    return call(row("reshape"), (x,), {"shape": _flat(shape)})  # type: ignore[no-any-return]


def ravel(x: Tensor, /) -> Tensor:
    """The elements in a vector; a view where possible."""
    return reshape(x, -1)


def unflatten(x: Tensor, /, axis: int, sizes: Sequence[int]) -> Tensor:
    """One axis split into several of these extents, of which one may be -1."""
    axis = _axis(x, axis, "unflatten()")
    return reshape(x, (*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))


def transpose(x: Tensor, /, *axes: Any) -> Tensor:
    """Axes in the given order (numpy), reversed without any; two axes exchanged where two are given of a tensor that has more (PyTorch)."""
    order = _flat(axes)
    if len(order) == 2 and x.ndim != 2:
        return manipulation.swapaxes(x, *order)
    return manipulation.transpose(x, None if not order or order == (None,) else order)


def permute(x: Tensor, /, *axes: Any) -> Tensor:
    """Axes in the given order, as ints or as one tuple."""
    return manipulation.permute_dims(x, _flat(axes))


def expand(x: Tensor, /, *shape: Any) -> Tensor:
    """Broadcast without a copy to a shape, given as ints or as one tuple; -1 keeps an extent."""
    wanted = _flat(shape)
    missing = len(wanted) - x.ndim
    if missing < 0:
        raise ShapeError(f"expand(): shape {list(x.shape)} has more axes than {list(wanted)}")
    return manipulation.broadcast_to(x, [own if w == -1 else w for w, own in zip(wanted, (1,) * missing + x.shape, strict=True)])


def expand_as(x: Tensor, /, other: Tensor) -> Tensor:
    """Broadcast without a copy to the shape of another tensor."""
    return manipulation.broadcast_to(x, other.shape)


def view_as(x: Tensor, /, other: Tensor) -> Tensor:
    """The same elements in the shape of another tensor."""
    return reshape(x, other.shape)


def tile(x: Tensor, /, *repetitions: Any) -> Tensor:
    """Laid side by side, so many times along each axis, given as ints or as one tuple."""
    return manipulation.tile(x, _flat(repetitions))


def flip(x: Tensor, /, *axis: Any) -> Tensor:
    """In reverse order along axes, given as ints or as one tuple; along all when none are given."""
    axes = _flat(axis)
    return manipulation.flip(x, axis=None if not axes or axes == (None,) else axes)


def contiguous(x: Tensor, /) -> Tensor:
    """The tensor itself where its elements lie in row-major order without gaps, else a copy that does."""
    return x if not isinstance(x._data, np.ndarray) or x._data.flags.c_contiguous else manipulation.clone(x)


def narrow(x: Tensor, /, axis: int, start: int, length: int) -> Tensor:
    """`length` slices along an axis from `start` on, as a view."""
    axis = _axis(x, axis, "narrow()")
    extent = x.shape[axis]
    first = start + extent if start < 0 else start
    if not 0 <= first <= first + length <= extent:
        raise IndexRangeError(f"narrow({axis}, {start}, {length}): axis {axis} of shape {list(x.shape)} has {extent} slices")
    return x[(slice(None),) * axis + (slice(first, first + length),)]


def chunk(x: Tensor, /, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """Cut along an axis into at most so many parts of equal length, the last one shorter where that does not divide."""
    axis = _axis(x, axis, "chunk()")
    if chunks < 1:
        raise ArgumentError(f"chunk({chunks}): expected at least one")
    length = max(-(-x.shape[axis] // chunks), 1)
    return manipulation.split(x, list(range(length, x.shape[axis], length)), axis=axis)


def diagonal(x: Tensor, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The diagonals of the planes of two axes, along a new last axis."""
    return call(row("diagonal"), (x,), {"offset": offset, "axis1": axis1, "axis2": axis2})  # type: ignore[no-any-return]


def trace(x: Tensor, /, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Tensor:
    """Sums of the diagonals of the planes of two axes."""
    return reduction.sum(diagonal(x, offset, axis1, axis2), -1, dtype=dtype)


def take(x: Tensor, /, indices: ArrayLike, axis: int | None = None) -> Tensor:
    """Slices at `indices` along an axis; elements of the flattened tensor when none is given."""
    return searching.take(ravel(x), indices, 0) if axis is None else searching.take(x, indices, axis)


def index_select(x: Tensor, /, axis: int, index: ArrayLike) -> Tensor:
    """Slices at `index` along an axis."""
    return searching.take(x, index, axis)


def index_add(x: Tensor, /, axis: int, index: ArrayLike, source: ArrayLike) -> Tensor:
    """A copy with the slices of `source` added at `index` along an axis, once for every mention."""
    return searching.index_add(x, index, source, axis=axis)


def scatter(x: Tensor, /, axis: int, index: ArrayLike, source: ArrayLike) -> Tensor:
    """A copy with the elements at `index` along an axis replaced by those of `source`."""
    return searching.scatter(x, index, source, axis=axis)


def scatter_add(x: Tensor, /, axis: int, index: ArrayLike, source: ArrayLike) -> Tensor:
    """A copy with the elements of `source` added at `index` along an axis, once for every mention."""
    return searching.scatter_add(x, index, source, axis=axis)


def where(x: Tensor, /, condition: ArrayLike, other: ArrayLike) -> Tensor:
    """The elements where the condition holds, those of `other` elsewhere."""
    return searching.where(condition, x, other)  # type: ignore[no-any-return]


def masked_fill(x: Tensor, /, mask: ArrayLike, value: ArrayLike) -> Tensor:
    """A copy with `value` where `mask` is true, in the tensor's dtype; `mask` broadcasts to its shape."""
    filled: Tensor = searching.where(mask, value, x)
    if filled.shape != x.shape:
        raise ShapeError(f"masked_fill(): mask {list(np.shape(mask))} and value {list(np.shape(value))} do not broadcast to {list(x.shape)}")
    return filled.astype(x.dtype, copy=False)


def norm(x: Tensor, /, ord: float = 2, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Norms of vectors along axes, of all elements when none are given; Euclidean, or of order 0, 1, p, inf, -inf."""
    return linalg.vector_norm(x, axis=axis, keepdims=keepdims, ord=ord)


def numel(x: Tensor, /) -> int:
    """The number of elements."""
    return x.size


def dim(x: Tensor, /) -> int:
    """The number of axes."""
    return x.ndim


# -------------------------------------------------------------------- the table


class TensorMethods:
    """See Note [The table]."""

    __slots__ = ()

    exp, exp2, expm1 = _fast("exp", elementwise.exp), _fast("exp2", elementwise.exp2), _fast("expm1", elementwise.expm1)
    log, log1p = _fast("log", elementwise.log), _fast("log1p", elementwise.log1p)
    log2, log10 = _fast("log2", elementwise.log2), _fast("log10", elementwise.log10)
    sqrt, rsqrt, square = _fast("sqrt", elementwise.sqrt), _fast("rsqrt", elementwise.rsqrt), _fast("square", elementwise.square)
    sin, cos, tan = _fast("sin", elementwise.sin), _fast("cos", elementwise.cos), _fast("tan", elementwise.tan)
    asin, acos, atan = _fast("asin", elementwise.asin), _fast("acos", elementwise.acos), _fast("atan", elementwise.atan)
    sinh, cosh, tanh = _fast("sinh", elementwise.sinh), _fast("cosh", elementwise.cosh), _fast("tanh", elementwise.tanh)
    sigmoid, relu, erf = _fast("sigmoid", activation.sigmoid), _fast("relu", activation.relu), _fast("erf", elementwise.erf)
    abs, neg, sign = _fast("abs", elementwise.abs), _fast("neg", elementwise.negative), _fast("sgn", elementwise.sign)
    floor, ceil, trunc = _fast("floor", elementwise.floor), _fast("ceil", elementwise.ceil), _fast("trunc", elementwise.trunc)
    reciprocal = _fast("reciprocal", elementwise.reciprocal)
    conj = conjugate = _fast("conj", elementwise.conj)
    softmax, log_softmax = activation.softmax, activation.log_softmax

    add, sub, mul, div = elementwise.add, elementwise.subtract, elementwise.multiply, elementwise.divide
    pow, remainder, fmod, floor_divide = elementwise.pow, elementwise.remainder, elementwise.fmod, elementwise.floor_divide
    maximum, minimum, atan2 = elementwise.maximum, elementwise.minimum, elementwise.atan2
    round, nan_to_num = elementwise.round, elementwise.nan_to_num
    clip = clamp = elementwise.clip
    eq, ne, lt, le, gt, ge = (
        comparison.equal, comparison.not_equal, comparison.less, comparison.less_equal, comparison.greater, comparison.greater_equal,
    )  # fmt: skip
    logical_and, logical_or = comparison.logical_and, comparison.logical_or
    logical_xor, logical_not = comparison.logical_xor, comparison.logical_not
    isfinite, isinf, isnan, isclose, allclose = comparison.isfinite, comparison.isinf, comparison.isnan, comparison.isclose, comparison.allclose

    matmul = mm = bmm = products.matmul
    dot, inner, outer = products.dot, products.inner, products.outer
    norm, trace = norm, trace

    sum, prod, mean, median, logsumexp = reduction.sum, reduction.prod, reduction.mean, reduction.median, reduction.logsumexp
    var, std = reduction.var, reduction.std
    max = amax = reduction.max
    min = amin = reduction.min
    all, any, count_nonzero = reduction.all, reduction.any, reduction.count_nonzero
    cumsum, cumprod = reduction.cumsum, reduction.cumprod

    reshape = view = reshape
    ravel, flatten, unflatten, view_as = ravel, manipulation.flatten, unflatten, view_as
    transpose, permute, swapaxes = transpose, permute, manipulation.swapaxes
    moveaxis = movedim = manipulation.moveaxis
    squeeze, unsqueeze, expand, expand_as = manipulation.squeeze, manipulation.expand_dims, expand, expand_as
    flip, roll, tile = flip, manipulation.roll, tile
    repeat = repeat_interleave = manipulation.repeat
    split, chunk, unbind, narrow = manipulation.split, chunk, manipulation.unstack, narrow
    diagonal, tril, triu = diagonal, creation.tril, creation.triu
    clone = copy = manipulation.clone
    contiguous, numel, dim = contiguous, numel, dim

    argmax, argmin, sort, argsort, topk = searching.argmax, searching.argmin, searching.sort, searching.argsort, searching.topk
    nonzero, where, masked_fill = searching.nonzero, where, masked_fill
    take, index_select, take_along_axis, gather = take, index_select, searching.take_along_axis, searching.gather
    scatter, scatter_add, index_add = scatter, scatter_add, index_add

    half, float, double = _cast("float16"), _cast("float32"), _cast("float64")
    int, long, bool = _cast("int32"), _cast("int64"), _cast("bool")


for _name, _method in vars(TensorMethods).items():
    if not _name.startswith("_"):
        setattr(Tensor, _name, _method)
