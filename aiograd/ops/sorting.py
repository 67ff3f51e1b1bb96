"""Sorting, the largest elements, the median, and searches.

Note [Where the permutation comes from]
    Only the gradient of a sort needs to know where each element came from, and sorting values alone is several times as fast as sorting
    indices. So the forward sorts values, and the rule sorts again, for the indices. `topk` returns its indices anyway.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.ops.creation import refuse
from aiograd.ops.indexing import gather, gather_adjoint, getitem
from aiograd.ops.masking import where
from aiograd.ops.op import Op, define, implements
from aiograd.ops.reduction import Axis, mean, normalize_axes
from aiograd.ops.shape import moveaxis, reshape
from aiograd.running.types import Array, Shape


def _sort(x: Array, /, axis: int = -1, *, descending: bool = False, stable: bool = True) -> Array:
    """`x` sorted along `axis`.

    Args:
        x: any shape with at least one axis.
        axis: the axis to sort along.
        descending: largest first.
        stable: for numbers it makes no difference.
    """
    out = np.sort(x, axis)
    return np.flip(out, axis) if descending else out


def _argsort(x: Array, /, axis: int = -1, *, descending: bool = False, stable: bool = True) -> Array:
    """The indices that sort `x` along `axis`; equal elements keep their order when `stable`."""
    kind: Any = "stable" if stable else None
    if not descending:
        return np.argsort(x, axis, kind=kind)
    # sort the reversed array and turn the result round, so that equal elements keep their order
    backwards = np.argsort(np.flip(x, axis), axis, kind=kind)
    return np.flip(x.shape[axis] - 1 - backwards, axis)


def _sort_vjp(g: Array, x: Array, x_shape: Shape, axis: int, descending: bool, stable: bool) -> Array:
    return gather_adjoint(g, argsort(x, axis=axis, descending=descending, stable=stable), shape=x_shape, axis=axis)


def _sort_jvp(t: Array, x: Array, axis: int, descending: bool, stable: bool) -> Array:
    return gather(t, argsort(x, axis=axis, descending=descending, stable=stable), axis=axis)


def _topk(x: Array, /, k: int, axis: int = -1, *, largest: bool = True) -> tuple[Array, Array]:
    """The `k` largest (or smallest) elements along `axis`, in order, and their indices.

    Args:
        x: any shape with at least `k` elements along `axis`.
        k: how many.
        axis: the axis to search along.
        largest: True to look for the largest.

    Returns:
        values, indices.
    """
    length = x.shape[axis]
    if not 0 <= k <= length:
        raise ArgumentError(f"topk: k is {k}, expected 0 to {length}, the length of axis {axis}")
    order = np.moveaxis(x, axis, -1)
    if 0 < k < length:
        part = np.argpartition(order, length - k if largest else k - 1, -1)
        part = part[..., length - k :] if largest else part[..., :k]
        part = np.sort(part, -1)  # by position, so that ties come out in order (which of those at the edge are in is not determined)
    else:
        part = np.broadcast_to(np.arange(length), order.shape)[..., :k]
    inner = _argsort(np.take_along_axis(order, part, -1), -1, descending=largest)
    indices = np.moveaxis(np.take_along_axis(part, inner, -1), -1, axis)
    return np.take_along_axis(x, indices, axis), indices


def _topk_vjp(g: tuple[Array | None, Array | None], out: tuple[Array, Array], x_shape: Shape, axis: int) -> Array | None:
    return None if g[0] is None else gather_adjoint(g[0], out[1], shape=x_shape, axis=axis)


sort = define("sort", _sort, x=_sort_vjp, jvp=_sort_jvp, cost=40.0)
argsort: Op = define("argsort", _argsort)
topk = define(
    "topk", _topk, x=_topk_vjp, jvp=lambda t, out, axis: (gather(t, out[1], axis=axis), None), outputs=2, differentiable_outputs=(0,), cost=1.0
)


def median(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """The median over `axis`: the middle element, or the mean of the middle two; NaN where there is none, or a NaN among them."""
    shape = tuple(x.shape)
    axes = normalize_axes(axis, len(shape))
    others = tuple(shape[a] for a in range(len(shape)) if a not in axes)
    length = math.prod(shape[a] for a in axes)
    flat = reshape(moveaxis(x, axes, tuple(range(len(shape) - len(axes), len(shape)))), shape=(*others, length))
    ordered = sort(flat, axis=-1)
    result = mean(getitem(ordered, index=(..., slice(max(length - 1, 0) // 2, length // 2 + 1))), axis=-1)
    if length and x.dtype.kind == "f":
        last = getitem(ordered, index=(..., -1))  # NaN comes last
        result = where(np.isnan(last), last, result)
    return reshape(result, shape=tuple(1 if a in axes else n for a, n in enumerate(shape))) if keepdims else result


#: the places of the elements of `x2` in the sorted vector `x1`
searchsorted = define("searchsorted", lambda x1, x2, /, *, side="left": np.searchsorted(x1, x2, side))
isin = define("isin", lambda x, elements, /, *, invert=False: np.isin(x, elements, invert=invert))
unique_values = define("unique_values", lambda x, /: np.unique(x))


# numpy's functions, with numpy's arguments


def _order(kind: Any, stable: Any) -> bool:
    return bool(stable) or kind in ("stable", "mergesort")


@implements(np.sort)
def np_sort(a: Array, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Array:
    """numpy's ``sort``."""
    refuse("sort", order=order)
    if axis is None:
        a, axis = reshape(a, shape=(-1,)), 0
    return sort(a, axis=axis, stable=_order(kind, stable))


@implements(np.argsort)
def np_argsort(a: Array, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Array:
    """numpy's ``argsort``."""
    refuse("argsort", order=order)
    if axis is None:
        a, axis = reshape(a, shape=(-1,)), 0
    return argsort(a, axis=axis, stable=_order(kind, stable))


@implements(np.median)
def np_median(a: Array, axis: Any = None, out: Any = None, overwrite_input: Any = None, keepdims: bool = False) -> Array:
    """numpy's ``median``."""
    refuse("median", out=out, overwrite_input=overwrite_input)
    return median(a, axis=tuple(axis) if isinstance(axis, list) else axis, keepdims=keepdims)


@implements(np.searchsorted)
def np_searchsorted(a: Array, v: Array, side: str = "left", sorter: Any = None) -> Array:
    """numpy's ``searchsorted``."""
    refuse("searchsorted", sorter=sorter)
    return searchsorted(a, v, side=side)


@implements(np.isin)
def np_isin(element: Array, test_elements: Array, assume_unique: bool = False, invert: bool = False, *, kind: Any = None) -> Array:
    """numpy's ``isin``."""
    return isin(element, test_elements, invert=invert)


@implements(np.unique)
def np_unique(ar: Array, **unsupported: Any) -> Array:
    """numpy's ``unique``, the values only."""
    refuse("unique", **unsupported)
    return unique_values(ar)
