"""An index with arrays as (outer, length, inner) and one vector of indices; the only kernels launched flatten the indices.

Note [Where indices are checked]
    Index arrays of the host are checked when they are used, as numpy does. The values of an index array on the device are known only to the
    device, and reading them would block: there an index out of range reads NaN (or -1, or true: all bits set) and writes nothing. PyTorch stops the
    whole device with an assertion, which nothing but a new process recovers from.

Rejected: a flag that a kernel sets, read with the next copy to the host (the error would name some later line).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.cuda.array import CudaArray
from aiograd.cuda.operations.views import imagined, view_like
from aiograd.errors import IndexRangeError
from aiograd.running.types import Shape


@dataclass(frozen=True, slots=True)
class AdvancedIndex:
    """An index with arrays, applied to an array."""

    #: the array's elements as (*outer, *indexed, *inner)
    view: CudaArray
    #: how many of the view's axes come before the indexed ones, and how many are indexed
    outer: int
    indexed: int
    #: one integer per pick along the (flattened) indexed axes, of the host (and then not negative) or of the device
    index: Any
    #: shape of the picks
    picked: Shape
    #: True if the index may name an element twice
    repeats: bool

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Elements of outer, indexed and inner axes, and number of picks."""
        shape, first, after = self.view.shape, self.outer, self.outer + self.indexed
        return math.prod(shape[:first]), math.prod(shape[first:after]), math.prod(shape[after:]), math.prod(self.picked)

    @property
    def shape(self) -> Shape:
        """Of the result."""
        return (*self.view.shape[: self.outer], *self.picked, *self.view.shape[self.outer + self.indexed :])


def advanced_index_of(array: CudaArray, index: Any) -> AdvancedIndex | None:
    """The normalized form of ``array[index]``; None for a kind of index that has no kernel (booleans on the device).

    Raises:
        IndexRangeError: an index array of the host is out of range. IndexError: too many indices.
    """
    parts = _parts(array.ndim, index)
    if parts is None:
        return None
    basic: list[Any] = []
    axes: list[int] = []  # of the view, that arrays index
    places: list[int] = []  # in the index, of arrays
    arrays: list[Any] = []
    for place, part in enumerate(parts):
        if part is None or isinstance(part, slice):
            basic.append(part)
            continue
        axes.append(len(basic))
        places.append(place)
        arrays.append(part)
        basic.append(slice(None))
    stand_in = imagined(array)
    view: CudaArray = view_like(array, stand_in, stand_in[tuple(basic)])
    together = places == list(range(places[0], places[0] + len(places)))
    outer = axes[0] if together else 0
    rest = [axis for axis in range(view.ndim) if axis not in axes]
    order = (*rest[:outer], *axes, *rest[outer:])
    lengths = tuple(view.shape[axis] for axis in axes)
    view = view.view(tuple(view.shape[axis] for axis in order), tuple(view.strides[axis] for axis in order))
    picked = np.broadcast_shapes(*[each.shape for each in arrays])
    masks = any(isinstance(part, np.ndarray) and part.dtype.kind == "b" for part in (index if isinstance(index, tuple) else (index,)))
    repeats = math.prod(picked) > 1 and not (masks and len(arrays) == 1)
    return AdvancedIndex(view, outer, len(axes), _flat(arrays, lengths, picked), picked, repeats)


def _parts(ndim: int, index: Any) -> list[Any] | None:
    """The index as a list of slices, None and integer arrays, complete for every axis."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        if part is None or part is Ellipsis or isinstance(part, slice):
            parts.append(part)
        elif isinstance(part, CudaArray):
            if part.dtype.kind not in "iu":
                return None
            parts.append(part)
        else:
            array = np.asarray(part)
            if array.size == 0 and not isinstance(part, np.ndarray):
                array = array.astype(np.intp)
            if array.dtype.kind == "b":
                if array.ndim == 0:
                    return None
                parts.extend(np.nonzero(array))
            elif array.dtype.kind in "iu":
                parts.append(array)
            else:
                raise IndexError(f"indexing with an array of dtype {array.dtype}: expected integers or booleans")
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if used > ndim:
        raise IndexError(f"too many indices: the array has {ndim} axes, {used} were indexed")
    if Ellipsis in [part for part in parts if part is None or part is Ellipsis or isinstance(part, slice)]:
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (ndim - used)
    else:
        parts += [slice(None)] * (ndim - used)
    return parts


def _flat(arrays: list[Any], lengths: Shape, picked: Shape) -> Any:
    """One index along the indexed axes taken as one; see Note [Where indices are checked]."""
    if all(isinstance(array, np.ndarray) for array in arrays):
        flat: Any = np.zeros((), np.int64)
        for array, length in zip(arrays, lengths, strict=True):
            if array.size and (array.min() < -length or array.max() >= length):
                raise IndexRangeError(f"indices run from {array.min()} to {array.max()}, expected -{length} to {length - 1}")
            flat = flat * length + np.where(array < 0, array.astype(np.int64) + length, array)
        return np.ascontiguousarray(np.broadcast_to(flat, picked)).reshape(-1)
    if len(arrays) == 1:
        return arrays[0].contiguous().reshape(-1)
    flat, valid = 0, True
    for array, length in zip(arrays, lengths, strict=True):
        wrapped = np.where(np.less(array, 0), np.add(array, np.int64(length)), array)
        valid = np.logical_and(valid, np.logical_and(np.greater_equal(wrapped, 0), np.less(wrapped, length)))
        flat = np.add(np.multiply(flat, np.int64(length)), wrapped)
    beyond = math.prod(lengths)
    spread: Any = np.broadcast_to(np.where(valid, flat, np.int64(beyond)), picked)
    return spread.contiguous().reshape(-1)
