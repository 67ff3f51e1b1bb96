"""Choosing, taking, searching and sorting, with the standard's signatures, and the distinct elements of an array."""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, as_tensors, row
from aiograd.array_functions.manipulation import broadcast_to
from aiograd.array_functions.scattering import indices_of
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.ops import indexing
from aiograd.ops.broadcasting import expandable
from aiograd.ops.shape import checked_axis, np_broadcast_arrays
from aiograd.tensors.constants import static
from aiograd.tensors.core import make
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

__all__ = [
    "where", "nonzero", "argmax", "argmin", "searchsorted", "isin", "take", "take_along_axis", "take_along_dim", "index_add", "sort", "argsort",
    "topk", "unique_all", "unique_counts", "unique_inverse", "unique_values", "unique", "argwhere", "masked_select", "index_copy", "index_fill",
    "bucketize", "kthvalue", "msort",
]  # fmt: skip


class UniqueAll(NamedTuple):
    """The result of `unique_all`."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCounts(NamedTuple):
    """The result of `unique_counts`."""

    values: Tensor
    counts: Tensor


class UniqueInverse(NamedTuple):
    """The result of `unique_inverse`."""

    values: Tensor
    inverse_indices: Tensor


@overload
def where(condition: ArrayLike, /) -> tuple[Tensor, ...]: ...
@overload
def where(condition: ArrayLike, x1: ArrayLike, x2: ArrayLike, /) -> Tensor: ...
def where(condition: ArrayLike, x1: ArrayLike | None = None, x2: ArrayLike | None = None, /) -> Any:
    """Elements of `x1` where the condition holds, of `x2` elsewhere; with the condition alone, as `nonzero`."""
    if x1 is None and x2 is None:
        return nonzero(condition)
    if x1 is None or x2 is None:
        raise ArgumentError("where(): expected the condition alone, or the condition and both choices; found one choice")
    # a number takes its dtype from the other choice, not from the condition
    return call(row("where"), (as_tensor(condition), *as_tensors(x1, x2)), {})


def nonzero(x: ArrayLike, /) -> tuple[Tensor, ...]:
    """The indices of the elements that are not zero, one Tensor per axis."""
    source = as_tensor(x)
    if not source.ndim:
        raise ShapeError("nonzero() of a 0-d array: expected at least one axis")
    return call(row("nonzero"), (source,), {})  # type: ignore[no-any-return]


def argmax(x: ArrayLike, /, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The index of the first of the largest elements."""
    return call(row("argmax"), (as_tensor(x),), {"axis": axis, "keepdims": keepdims})  # type: ignore[no-any-return]


def argmin(x: ArrayLike, /, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The index of the first of the smallest elements."""
    return call(row("argmin"), (as_tensor(x),), {"axis": axis, "keepdims": keepdims})  # type: ignore[no-any-return]


def searchsorted(x1: ArrayLike, x2: ArrayLike, /, side: str = "left", sorter: ArrayLike | None = None) -> Tensor:
    """The positions at which the elements of `x2` would be inserted into the sorted vector `x1` (or into ``take(x1, sorter)``)."""
    if side not in ("left", "right"):
        raise ArgumentError(f"searchsorted(side={side!r}): expected 'left' or 'right'")
    first, second = as_tensors(x1, x2)
    sorted_ = first if sorter is None else take(first, sorter, axis=0)
    return call(row("searchsorted"), (sorted_, second), {"side": side})  # type: ignore[no-any-return]


def isin(x: ArrayLike, elements: ArrayLike, /, *, invert: bool = False) -> Tensor:
    """True for elements that are among others."""
    return call(row("isin"), tuple(as_tensors(x, elements)), {"invert": invert})  # type: ignore[no-any-return]


# Taking and putting.


def take(x: ArrayLike, /, indices: ArrayLike, axis: int | None = None) -> Tensor:
    """Slices at `indices` along an axis, which may be left out for vectors."""
    source = as_tensor(x)
    if axis is None:
        if source.ndim != 1:
            raise ArgumentError(f"take() of shape {list(source.shape)}: axis may be left out for one-dimensional arrays only")
        axis = 0
    return call(row("take"), (source, indices_of("take", indices)), {"axis": axis})  # type: ignore[no-any-return]


def take_along_axis(x: ArrayLike, /, indices: ArrayLike, axis: int = -1) -> Tensor:
    """Elements along an axis, chosen separately for each position on the others."""
    return call(row("gather"), (as_tensor(x), indices_of("take_along_axis", indices)), {"axis": axis})  # type: ignore[no-any-return]


def index_add(x: ArrayLike, /, *arguments: Any, axis: int | None = None, index: Any = None, source: Any = None, alpha: float = 1) -> Tensor:
    """A copy with slices added at indices along an axis, once for every mention.

    Args:
        x: any shape.
        arguments: ``indices, source``, or in PyTorch's order ``axis, indices, source``.
        axis: the axis; the first by default.
        index: a vector of integers.
        source: as many slices along the axis as there are indices.
        alpha: a factor of the slices.

    Returns:
        A Tensor of the shape and dtype of `x`.

    Raises:
        ArgumentTypeError: arguments that are missing or too many, or indices that are no integers. ShapeError: shapes that do not fit.
        IndexRangeError: an axis or index that is not there.
    """
    rest = list(arguments)
    if axis is None:
        axis = int(rest.pop(0)) if rest and isinstance(rest[0], (int, np.integer)) else 0
    index = rest.pop(0) if rest and index is None else index
    source = rest.pop(0) if rest and source is None else source
    if rest or index is None or source is None:
        raise ArgumentTypeError("index_add(): expected (x, indices, source, axis=...) or (x, axis, indices, source)")
    target, slices = as_tensors(x, source)
    places = indices_of("index_add", index)
    axis = checked_axis(axis, max(target.ndim, 1))
    shape = (*target.shape[:axis], *places.shape, *target.shape[axis + 1 :])
    if slices.shape != shape:
        if not expandable(shape, slices.shape):
            raise ShapeError(f"index_add(): slices of shape {list(slices.shape)} into {list(target.shape)}, expected {list(shape)}. Reshape them.")
        slices = broadcast_to(slices, shape)
    return indexing.index_add(target, places, slices if alpha == 1 else slices * alpha, axis=axis)  # type: ignore[no-any-return]


def take_along_dim(x: ArrayLike, /, indices: ArrayLike, axis: int | None = None) -> Tensor:
    """`take_along_axis`; of the flattened array where no axis is given (PyTorch's function)."""
    if axis is None:
        return take_along_axis(as_tensor(x).reshape(-1), as_tensor(indices).reshape(-1), 0)
    return take_along_axis(x, indices, axis)


# Sorting.


def sort(x: ArrayLike, /, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Sort along an axis."""
    return call(row("sort"), (as_tensor(x),), {"axis": axis, "descending": descending, "stable": stable})  # type: ignore[no-any-return]


def argsort(x: ArrayLike, /, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The indices that sort along an axis."""
    return call(row("argsort"), (as_tensor(x),), {"axis": axis, "descending": descending, "stable": stable})  # type: ignore[no-any-return]


def topk(x: ArrayLike, /, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The `k` largest (or smallest) elements along an axis in order, and their indices."""
    return call(row("topk"), (as_tensor(x),), {"k": k, "axis": axis, "largest": largest})  # type: ignore[no-any-return]


# Distinct elements.


def _unique(x: Any) -> list[Tensor]:
    source = as_tensor(x)
    found = np.unique(source.detach().numpy(), return_index=True, return_inverse=True, return_counts=True, equal_nan=False)
    values, indices, inverse, counts = found
    return [make(values), make(indices), make(np.reshape(inverse, source.shape)), make(counts)]


def unique_all(x: ArrayLike, /) -> UniqueAll:
    """The distinct elements, sorted, where each is first, which each element is, and how often each occurs."""
    return UniqueAll(*_unique(x))


def unique_counts(x: ArrayLike, /) -> UniqueCounts:
    """The distinct elements, sorted, and how often each occurs."""
    values, _, _, counts = _unique(x)
    return UniqueCounts(values, counts)


def unique_inverse(x: ArrayLike, /) -> UniqueInverse:
    """The distinct elements, sorted, and which of them each element is."""
    values, _, inverse, _ = _unique(x)
    return UniqueInverse(values, inverse)


def unique_values(x: ArrayLike, /) -> Tensor:
    """The distinct elements, sorted."""
    return _unique(x)[0]


def unique(x: ArrayLike, /, *, return_inverse: bool = False, return_counts: bool = False) -> Any:
    """The distinct elements, sorted; with them, where asked for, which of them each element is and how often each occurs."""
    values, _, inverse, counts = _unique(x)
    wanted = [values, *([inverse] if return_inverse else []), *([counts] if return_counts else [])]
    return wanted[0] if len(wanted) == 1 else tuple(wanted)


# By PyTorch's names.


def argwhere(x: ArrayLike, /) -> Tensor:
    """The indices of the elements that are not zero, a row for each."""
    return call(row("stack"), nonzero(x), {"axis": -1})  # type: ignore[no-any-return]


def masked_select(x: ArrayLike, mask: ArrayLike, /) -> Tensor:
    """The elements where `mask` is true, in a vector; both broadcast."""
    source, chosen = np_broadcast_arrays(as_tensor(x), as_tensor(mask))
    return source[chosen]  # type: ignore[no-any-return]


def index_copy(x: ArrayLike, axis: int, indices: ArrayLike, source: ArrayLike, /) -> Tensor:
    """A copy of `x` with the slices at `indices` along an axis replaced by the slices of `source`."""
    return call(row("setitem"), tuple(as_tensors(x, source)), {"index": _at(x, axis, indices)})  # type: ignore[no-any-return]


def index_fill(x: ArrayLike, axis: int, indices: ArrayLike, value: ArrayLike, /) -> Tensor:
    """A copy of `x` with the slices at `indices` along an axis filled with one number."""
    return index_copy(x, axis, indices, value)


def _at(x: Any, axis: int, indices: Any) -> tuple[Any, ...]:
    return (slice(None),) * checked_axis(axis, max(as_tensor(x).ndim, 1)) + (static(indices_of("index_copy", indices)),)


def bucketize(x: ArrayLike, boundaries: ArrayLike, /, *, right: bool = False) -> Tensor:
    """The number of the interval between ascending `boundaries` in which each element lies; an end belongs to the interval below, or above it."""
    return searchsorted(boundaries, x, side="right" if right else "left")


def kthvalue(x: ArrayLike, k: int, /, axis: int = -1, keepdims: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th smallest elements along an axis, counted from 1, and their indices."""
    values, indices = topk(x, k, axis, largest=False)
    place = (slice(None),) * (axis % values.ndim) + (slice(-1, None) if keepdims else -1,)
    return values[place], indices[place]


def msort(x: ArrayLike, /) -> Tensor:
    """Sorted along the first axis."""
    return sort(x, axis=0)
