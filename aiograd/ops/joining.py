"""Rows that join arrays, take them apart, and repeat or pad them.

numpy passes sequences of arrays as one argument; rows take them as separate arguments, so that every Tensor among them is seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, NoRuleError, ShapeError
from aiograd.ops.creation import astype, refuse, zeros_like
from aiograd.ops.indexing import getitem, take
from aiograd.ops.op import Op, answer, define, implements
from aiograd.ops.reduction import sum_
from aiograd.ops.shape import checked_axis, expand, np_atleast_1d, np_atleast_2d, np_atleast_3d, reshape
from aiograd.running.types import Array, Shape


def _along(axis: int, ndim: int, index: Any) -> tuple[Any, ...]:
    """An index that is `index` on `axis` and everything on the axes before it."""
    return (slice(None),) * checked_axis(axis, ndim) + (index,)


def _cat(*arrays: Array, axis: int = 0) -> Array:
    """Arrays joined along an axis they have.

    Args:
        arrays: of the same shape except along `axis`.
        axis: where to join.
    """
    return np.concatenate(arrays, axis)


def _cat_vjp(g: Array, arrays_shape: tuple[Shape, ...], axis: int) -> tuple[Array, ...]:
    plain = g.__class__ is np.ndarray
    return tuple([g[index] if plain else getitem(g, index=index) for index in _places(arrays_shape, axis)])


def _places(shapes: tuple[Shape, ...], axis: int) -> list[tuple[Any, ...]]:
    """The index of each array in the array that joins them."""
    places, start = [], 0
    for shape in shapes:
        end = start + shape[axis]
        places.append(_along(axis, len(shape), slice(start, end)))
        start = end
    return places


def _stack_vjp(g: Array, arrays_shape: tuple[Shape, ...], axis: int) -> tuple[Array, ...]:
    return unbind(g, axis=axis)  # type: ignore[no-any-return]


def _split(x: Array, /, cuts: tuple[int, ...], axis: int = 0) -> tuple[Array, ...]:
    """`x` cut along `axis` at these positions.

    Args:
        x: any shape with at least one axis.
        cuts: positions, ascending.
        axis: where to cut.

    Returns:
        ``len(cuts) + 1`` views.
    """
    bounds = (0, *cuts, x.shape[axis])
    return tuple(x[_along(axis, x.ndim, slice(bounds[i], bounds[i + 1]))] for i in range(len(cuts) + 1))


def _split_vjp(g: tuple[Array | None, ...], x_shape: Shape, cuts: tuple[int, ...], axis: int) -> Array:
    bounds = (0, *cuts, x_shape[axis])
    some = next(piece for piece in g if piece is not None)
    pieces = []
    for i, piece in enumerate(g):
        if piece is None:
            shape = list(x_shape)
            shape[axis] = len(range(*slice(bounds[i], bounds[i + 1]).indices(x_shape[axis])))
            piece = zeros_like(some, shape=tuple(shape))
        pieces.append(piece)
    return cat(*pieces, axis=axis)


def _unbind(x: Array, /, axis: int = 0) -> tuple[Array, ...]:
    """The slices of `x` along `axis`, without that axis; views."""
    index = _along(axis, x.ndim, 0)[:-1]
    return tuple(x[(*index, i, ...)] for i in range(x.shape[axis]))


def _unbind_vjp(g: tuple[Array | None, ...], axis: int) -> Array:
    some = next(piece for piece in g if piece is not None)
    return stack(*(zeros_like(some) if piece is None else piece for piece in g), axis=axis)


cat: Op = define(
    "cat",
    _cat,
    arrays=_cat_vjp,
    recorded={"arrays": lambda g, arrays_shape, axis: tuple([g[index] for index in _places(arrays_shape, axis)])},
    jvp="linear", complex="explicit",
    cost=0.1,
)
#: arrays of one shape joined along a new axis
stack: Op = define("stack", lambda *arrays, axis=0: np.stack(arrays, axis), arrays=_stack_vjp, jvp="linear", complex="explicit", cost=0.1)
split = define("split", _split, x=_split_vjp, outputs=None, view=True, jvp="forward", complex="explicit", cost=0.5)
unbind: Op = define("unbind", _unbind, x=_unbind_vjp, outputs=None, view=True, jvp="forward", complex="explicit", cost=1.5)


def concat(arrays: Sequence[Array], /, *, axis: int | None = 0) -> Array:
    """Arrays joined along `axis`; flattened and joined when it is None."""
    if axis is None:
        return cat(*(reshape(a, shape=(-1,)) for a in arrays), axis=0)
    return cat(*arrays, axis=axis)


# Repetition and padding.


def _tile_vjp(g: Array, x_shape: Shape, repetitions: tuple[int, ...]) -> Array:
    ndim = max(len(x_shape), len(repetitions))
    shape = (1,) * (ndim - len(x_shape)) + x_shape
    counts = (1,) * (ndim - len(repetitions)) + tuple(repetitions)
    pairs = tuple(length for pair in zip(counts, shape, strict=True) for length in pair)
    return reshape(sum_(reshape(g, shape=pairs), axis=tuple(range(0, 2 * ndim, 2))), shape=x_shape)


def _repeat_vjp(g: Array, x_shape: Shape, repeats: int, axis: int) -> Array:
    if not x_shape:  # numpy takes a number for a vector of one
        return sum_(g)
    axis %= len(x_shape)
    return sum_(reshape(g, shape=(*x_shape[: axis + 1], repeats, *x_shape[axis + 1 :])), axis=axis + 1)


def _constant_pad(x: Array, /, pad_width: tuple[tuple[int, int], ...], value: float = 0.0) -> Array:
    """`x` with a border of `value`.

    Args:
        x: any shape.
        pad_width: per axis how much to add before and after.
        value: the value to pad with.
    """
    out = np.full(tuple(n + before + after for n, (before, after) in zip(x.shape, pad_width, strict=True)), value, x.dtype)
    out[_inside(x.shape, pad_width)] = x
    return out


def _inside(shape: Shape, pad_width: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(before, before + n) for n, (before, _) in zip(shape, pad_width, strict=True))


#: `x` laid side by side, ``repetitions[i]`` times along axis i; the shorter of the two gets ones in front
tile = define("tile", lambda x, /, repetitions: np.tile(x, repetitions), x=_tile_vjp, jvp="forward", complex="explicit", cost=0.5)
#: each element along `axis` repeated as often
repeat_interleave = define(
    "repeat_interleave", lambda x, /, repeats, axis: np.repeat(x, repeats, axis), x=_repeat_vjp, jvp="forward", complex="explicit", cost=0.5
)
constant_pad: Op = define(
    "constant_pad", _constant_pad, x=lambda g, x_shape, pad_width: getitem(g, index=_inside(x_shape, pad_width)),
    jvp=lambda t, pad_width: constant_pad(t, pad_width=pad_width), complex="explicit", cost=0.2
)


def repeat(x: Array, repeats: Any, /, *, axis: int | None = None) -> Array:
    """Elements of `x` repeated.

    Args:
        x: any shape; flattened when `axis` is None.
        repeats: how often, one number for all or one for each element along `axis`.
        axis: where to repeat.
    """
    if axis is None:
        x, axis = reshape(x, shape=(-1,)), 0
    counts = np.asarray(repeats)
    if counts.ndim == 0:
        return repeat_interleave(x, repeats=int(counts), axis=axis)
    axis = checked_axis(axis, len(x.shape))
    if counts.dtype.kind not in "iu" or counts.shape not in ((1,), (x.shape[axis],)) or (counts < 0).any():
        raise ShapeError(f"repeat: repeats {counts.tolist()} along axis {axis} of shape {list(x.shape)}, expected {x.shape[axis]} ints of at least 0")
    return take(x, np.repeat(np.arange(x.shape[axis]), counts), axis=axis)


def pad(x: Array, pad_width: Any, /, *, mode: str = "constant", value: float = 0.0) -> Array:
    """`x` with a border.

    Args:
        x: any shape.
        pad_width: a number, a pair (before, after), or a pair per axis.
        mode: ``constant``, or one of numpy's modes that repeat elements: ``edge``, ``reflect``, ``symmetric``, ``wrap``.
        value: the value that ``constant`` pads with.
    """
    widths = tuple((int(before), int(after)) for before, after in np.broadcast_to(np.asarray(pad_width), (len(x.shape), 2)).tolist())
    if any(width < 0 for pair in widths for width in pair):
        raise ArgumentError(f"pad: pad_width is {pad_width!r}, expected numbers not below 0; slice to take elements away")
    if mode == "constant":
        return constant_pad(x, pad_width=widths, value=value)
    if mode not in ("edge", "reflect", "symmetric", "wrap"):
        raise NoRuleError(f"pad: mode is {mode!r}, expected 'constant', 'edge', 'reflect', 'symmetric' or 'wrap'")
    for axis, width in enumerate(widths):
        if width != (0, 0):
            if not x.shape[axis]:
                raise ShapeError(f"pad: axis {axis} of shape {tuple(x.shape)} has no elements that mode {mode!r} could repeat; use 'constant'")
            x = take(x, np.pad(np.arange(x.shape[axis]), width, mode=mode), axis=axis)  # type: ignore[call-overload]
    return x


# numpy's functions, with numpy's arguments


@implements(np.concatenate)
def np_concatenate(arrays: Sequence[Array], axis: int | None = 0, out: Any = None, *, dtype: Any = None, casting: Any = None) -> Array:
    """numpy's ``concatenate`` and ``concat``."""
    refuse("concatenate", out=out, casting=casting)
    joined = concat(arrays, axis=axis)
    return joined if dtype is None else astype(joined, dtype=dtype)


@implements(np.stack)
def np_stack(arrays: Sequence[Array], axis: int = 0, out: Any = None, *, dtype: Any = None, casting: Any = None) -> Array:
    """numpy's ``stack``."""
    refuse("stack", out=out, casting=casting)
    joined = stack(*arrays, axis=axis)
    return joined if dtype is None else astype(joined, dtype=dtype)


@implements(np.vstack)
def np_vstack(tup: Sequence[Array], *, dtype: Any = None, casting: Any = None) -> Array:
    """numpy's ``vstack``."""
    return np_concatenate([np_atleast_2d(a) for a in tup], 0, dtype=dtype, casting=casting)


@implements(np.hstack)
def np_hstack(tup: Sequence[Array], *, dtype: Any = None, casting: Any = None) -> Array:
    """numpy's ``hstack``."""
    arrays = [np_atleast_1d(a) for a in tup]
    return np_concatenate(arrays, 0 if len(arrays[0].shape) == 1 else 1, dtype=dtype, casting=casting)


@implements(np.dstack)
def np_dstack(tup: Sequence[Array]) -> Array:
    """numpy's ``dstack``."""
    return cat(*(np_atleast_3d(a) for a in tup), axis=2)


@implements(np.column_stack)
def np_column_stack(tup: Sequence[Array]) -> Array:
    """numpy's ``column_stack``."""
    return cat(*(np.reshape(a, (-1, 1)) if len(a.shape) < 2 else a for a in tup), axis=1)


def split_at(x: Array, sections: Any, axis: int = 0, *, even: bool = True) -> tuple[Array, ...]:
    """`x` in parts: a number of them (as even as may be unless `even` demands equal ones), or those between given positions."""
    axis = checked_axis(axis, len(x.shape))
    length = x.shape[axis]
    if np.ndim(sections):
        cuts = tuple(int(i) for i in sections)
        places = [slice(*slice(a, b).indices(length)) for a, b in itertools.pairwise((0, *cuts, length))]
        if all(place.start <= place.stop for place in places):
            return split(x, cuts=cuts, axis=axis)  # type: ignore[no-any-return]
        return tuple([x[_along(axis, len(x.shape), place)] for place in places])  # parts that overlap
    parts = int(sections)
    if parts <= 0 or (even and length % parts):
        raise ArgumentError(f"split: an axis of length {length} does not divide into {parts} equal parts")
    size, longer = divmod(length, parts)
    cuts = tuple(i * size + min(i, longer) for i in range(1, parts))
    return split(x, cuts=cuts, axis=axis)  # type: ignore[no-any-return]


@implements(np.dsplit)
def np_dsplit(ary: Array, indices_or_sections: Any) -> list[Array]:
    """numpy's ``dsplit``."""
    if len(ary.shape) < 3:
        raise ShapeError(f"dsplit of shape {list(ary.shape)}: expected at least three axes")
    return list(split_at(ary, indices_or_sections, 2))


if hasattr(np, "unstack"):

    @implements(np.unstack)
    def np_unstack(x: Array, /, *, axis: int = 0) -> tuple[Array, ...]:
        """numpy's ``unstack``."""
        return unbind(x, axis=axis)  # type: ignore[no-any-return]


@implements(np.pad)
def np_pad(array: Array, pad_width: Any, mode: str = "constant", **kwargs: Any) -> Array:
    """numpy's ``pad``, for the modes of `pad`."""
    value = kwargs.pop("constant_values", 0.0)
    refuse("pad", **kwargs)
    if np.ndim(value):
        raise NoRuleError(f"np.pad on a Tensor takes one number as constant_values, found {value!r}")
    return pad(array, pad_width, mode=mode, value=value)


@implements(np.meshgrid)
def np_meshgrid(*xi: Array, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> tuple[Array, ...]:
    """numpy's ``meshgrid``."""
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"meshgrid: indexing is {indexing!r}, expected 'xy' or 'ij'")
    ndim = len(xi)
    position = list(range(ndim))
    if indexing == "xy" and ndim > 1:
        position[0], position[1] = 1, 0
    sizes = [math.prod(np.shape(x)) for x in xi]
    grid = [0] * ndim
    for i, p in enumerate(position):
        grid[p] = sizes[i]
    thin = tuple(reshape(x, shape=tuple(sizes[i] if a == position[i] else 1 for a in range(ndim))) for i, x in enumerate(xi))
    return thin if sparse else tuple(expand(x, shape=tuple(grid)) for x in thin)


@implements(np.diff)
def np_diff(a: Array, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Array:
    """numpy's ``diff``: differences of neighbours, `n` times over."""
    if n < 0:
        raise ArgumentError(f"diff: n is {n}, expected 0 or more")
    if n == 0:  # numpy leaves out the ends as well
        return a
    ends = [None if end is np._NoValue else end for end in (prepend, append)]
    if any(end is not None for end in ends):
        thin = list(a.shape)
        thin[axis] = 1
        wide = [end if end is None or np.ndim(end) else np.broadcast_to(end, tuple(thin)) for end in ends]
        a = cat(*(piece for piece in (wide[0], a, wide[1]) if piece is not None), axis=axis)
    ndim = len(a.shape)
    for _ in range(n):
        a = getitem(a, index=_along(axis, ndim, slice(1, None))) - getitem(a, index=_along(axis, ndim, slice(None, -1)))
    return a


answer({
    np.append: lambda arr, values, axis=None: concat([x if hasattr(x, "dtype") else np.asarray(x) for x in (arr, values)], axis=axis),
    np.split: lambda ary, indices_or_sections, axis=0: list(split_at(ary, indices_or_sections, axis)),
    np.array_split: lambda ary, indices_or_sections, axis=0: list(split_at(ary, indices_or_sections, axis, even=False)),
    np.vsplit: lambda ary, indices_or_sections: list(split_at(ary, indices_or_sections, 0)),
    np.hsplit: lambda ary, indices_or_sections: list(split_at(ary, indices_or_sections, 1 if len(ary.shape) > 1 else 0)),
    np.tile: lambda A, reps: tile(A, repetitions=tuple(int(r) for r in reps) if np.iterable(reps) else (int(reps),)),
    np.repeat: lambda a, repeats, axis=None: repeat(a, repeats, axis=axis),
})  # fmt: skip
