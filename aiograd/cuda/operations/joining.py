"""Joining, repeating and padding: a new array, and the pieces written where they belong, one launch each.

Repetition is a broadcast view that is copied, so it is one launch for any counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, as_cuda, device_of, empty
from aiograd.cuda.operations.creation import constant
from aiograd.cuda.operations.indexing import assign
from aiograd.cuda.operations.selecting import kind_of
from aiograd.errors import ShapeError
from aiograd.running.types import Shape


def _axis(what: str, axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise np.exceptions.AxisError(axis, ndim, what)
    return axis % ndim


@tables.function(np.concatenate)
def concatenate(arrays: Sequence[Any], axis: int | None = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> Any:
    """Arrays joined along an axis; flattened first where that is None.

    Raises:
        ShapeError: the shapes differ elsewhere. numpy.exceptions.AxisError: there is no such axis.
    """
    if out is not None or casting != "same_kind":
        return NotImplemented
    device = device_of(arrays)
    pieces = [np.reshape(array, -1) if axis is None else array for array in arrays]
    first = pieces[0]
    place = _axis("concatenate", 0 if axis is None else axis, first.ndim)
    for piece in pieces:
        if piece.ndim != first.ndim or any(n != m for i, (n, m) in enumerate(zip(piece.shape, first.shape, strict=True)) if i != place):
            shapes = ", ".join(str(list(piece.shape)) for piece in pieces)
            raise ShapeError(f"concatenate: shapes {shapes} do not fit along axis {place}; expected shapes that are equal elsewhere")
    target = np.dtype(dtype) if dtype is not None else np.result_type(*[kind_of(piece) for piece in pieces])
    shape = (*first.shape[:place], sum(piece.shape[place] for piece in pieces), *first.shape[place + 1 :])
    result = empty(device, shape, target)
    start = 0
    for piece in pieces:
        stop = start + piece.shape[place]
        if stop > start:
            assign(_part(result, place, start, stop), as_cuda(device, piece))
        start = stop
    return result


def _part(array: CudaArray, axis: int, start: int, stop: int) -> CudaArray:
    """The slice of `array` from `start` to `stop` along an axis."""
    shape = (*array.shape[:axis], stop - start, *array.shape[axis + 1 :])
    return array.view(shape, array.strides, start * array.strides[axis])


@tables.row("cat")
def cat(*arrays: Any, axis: int = 0) -> Any:
    """Arrays joined along an axis."""
    return concatenate(arrays, axis)


@tables.function(np.stack)
def stack(arrays: Sequence[Any], axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> Any:
    """Arrays of one shape joined along a new axis.

    Raises:
        ShapeError: the shapes differ.
    """
    shapes = {tuple(np.shape(array)) for array in arrays}
    if len(shapes) > 1:
        raise ShapeError(f"stack: the arrays have shapes {', '.join(str(list(shape)) for shape in sorted(shapes))}; expected one shape")
    return concatenate([np.expand_dims(array, axis) for array in arrays], axis, out, dtype=dtype, casting=casting)


@tables.function(np.vstack)
def vstack(tup: Sequence[Any], *, dtype: Any = None, casting: str = "same_kind") -> Any:
    """Arrays on top of each other."""
    return concatenate([np.atleast_2d(array) for array in tup], 0, dtype=dtype, casting=casting)


@tables.function(np.hstack)
def hstack(tup: Sequence[Any], *, dtype: Any = None, casting: str = "same_kind") -> Any:
    """Arrays side by side."""
    arrays = [np.atleast_1d(array) for array in tup]
    return concatenate(arrays, 0 if arrays[0].ndim == 1 else 1, dtype=dtype, casting=casting)


@tables.function(np.append)
def append(arr: Any, values: Any, axis: int | None = None) -> Any:
    """`values` after `arr`."""
    return concatenate([arr, values], axis)


@tables.function(np.tile)
def tile(A: Any, reps: Any) -> Any:  # numpy's name
    """`A` laid side by side, ``reps[i]`` times along axis i; the shorter of the two gets ones in front."""
    counts = tuple(int(n) for n in reps) if np.iterable(reps) else (int(reps),)
    ndim = max(len(counts), A.ndim)
    counts = (1,) * (ndim - len(counts)) + counts
    shape = (1,) * (ndim - A.ndim) + A.shape
    strides = (0,) * (ndim - A.ndim) + A.strides
    pairs = tuple(n for pair in zip(counts, shape, strict=True) for n in pair)
    repeated = A.view(pairs, tuple(n for stride in strides for n in (0, stride)))
    return repeated.copy().reshape(tuple(n * m for n, m in zip(counts, shape, strict=True)))


@tables.function(np.repeat)
def repeat(a: Any, repeats: Any, axis: int | None = None) -> Any:
    """Each element repeated, along an axis or of the flattened array."""
    if isinstance(repeats, CudaArray):
        return NotImplemented
    if axis is None:
        a, axis = np.reshape(a, -1), 0
    axis = _axis("repeat", axis, a.ndim)
    if np.ndim(repeats):
        return np.take(a, np.repeat(np.arange(a.shape[axis]), repeats), axis)
    count = int(repeats)
    if count < 0:
        raise ValueError(f"repeat: found {count} repetitions, expected 0 or more")
    head, tail = axis + 1, a.ndim
    repeated = a.view((*a.shape[:head], count, *a.shape[head:tail]), (*a.strides[:head], 0, *a.strides[head:tail]))
    return repeated.copy().reshape((*a.shape[:axis], a.shape[axis] * count, *a.shape[head:]))


@tables.row("constant_pad")
def constant_pad(x: CudaArray, /, pad_width: tuple[tuple[int, int], ...], value: float = 0.0) -> Any:
    """`x` with a border of `value`."""
    shape = tuple(n + before + after for n, (before, after) in zip(x.shape, pad_width, strict=True))
    out = constant(x.device, shape, value, x.dtype)
    offset = sum(before * stride for (before, _), stride in zip(pad_width, out.strides, strict=True))
    assign(out.view(x.shape, out.strides, offset if x.size else 0), x)
    return out


@tables.function(np.pad)
def pad(array: Any, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    """`array` with a border of a constant, or of its own elements."""
    widths = tuple((int(before), int(after)) for before, after in np.broadcast_to(np.asarray(pad_width), (array.ndim, 2)).tolist())
    if mode == "constant" and not kwargs.keys() - {"constant_values"} and np.ndim(kwargs.get("constant_values", 0)) == 0:
        return constant_pad(array, widths, kwargs.get("constant_values", 0))
    if mode not in ("edge", "reflect", "symmetric", "wrap") or kwargs:
        return NotImplemented
    for axis, width in enumerate(widths):
        if width != (0, 0):
            array = np.take(array, np.pad(np.arange(array.shape[axis]), width, mode=mode), axis)
    return array


@tables.function(np.roll)
def roll(a: Any, shift: Any, axis: Any = None) -> Any:
    """Elements shifted along axes; what leaves at one end comes in at the other."""
    if axis is None:
        return roll(np.reshape(a, -1), shift, 0).reshape(a.shape)
    moves: dict[int, int] = {}
    for by, place in np.broadcast(shift, axis):
        key = _axis("roll", int(place), a.ndim)
        moves[key] = moves.get(key, 0) + int(by)
    pieces: list[tuple[tuple[slice, ...], tuple[slice, ...]]] = [((), ())]
    for place, length in enumerate(a.shape):
        by = moves.get(place, 0) % max(1, length)
        cuts = [(0, length, 0)] if by == 0 else [(0, length - by, by), (length - by, length, 0)]
        pieces = [((*sources, slice(low, high)), (*targets, slice(to, to + high - low))) for sources, targets in pieces for low, high, to in cuts]
    if len(pieces) == 1:
        return a.copy()
    out = empty(a.device, a.shape, a.dtype)
    for source, target in pieces:
        assign(out[target], a[source])
    return out


@tables.row("diagonal_adjoint")
def diagonal_adjoint(x: CudaArray, /, shape: Shape, offset: int = 0, axis1: int = -2, axis2: int = -1) -> Any:
    """Zeros of `shape` with `x` on the diagonals of the matrices that two axes span."""
    out = constant(x.device, tuple(shape), 0, x.dtype)
    target: Any = np.diagonal(out, offset, axis1, axis2)  # a writeable view, unlike numpy's
    if math.prod(x.shape):
        assign(target, x)
    return out


tables.ROW_KERNELS.update({
    "stack": lambda *arrays, axis=0: stack(arrays, axis),
    "tile": lambda x, /, repetitions: tile(x, repetitions),
    "repeat_interleave": lambda x, /, repeats, axis: repeat(x, repeats, axis),
    "roll": lambda x, /, shift, axis=None: roll(x, shift, axis),
})  # fmt: skip
