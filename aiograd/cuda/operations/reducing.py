"""Bringing the elements along axes down to one each: which kernel, over which extents and strides; `reduction` registers the functions.

Note [Launches]
    A reduction computes the pending expression of its argument, and leaves it pending: an argument without another reference is then never in memory
    at all. Asked of the same pending argument a second time, it is launched after all, rather than computed ever again. A second launch follows where
    few results have many elements each (`aiograd.cuda.tiles`).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from aiograd.cuda.array import CudaArray, empty
from aiograd.cuda.driver.protocol import Properties
from aiograd.cuda.expression import Expression, describe, order
from aiograd.cuda.generate import Step, dtype_letters
from aiograd.cuda.launching import launch
from aiograd.cuda.layout import contiguous_strides, lowest, merged
from aiograd.cuda.reduce_generate import FOLDS, kernel, recipe_for
from aiograd.cuda.tiles import tile
from aiograd.running.types import Shape

_DTYPES = {"f4": np.float32, "f8": np.float64, "i8": np.int64, "u8": np.uint64, "i4": np.int32}

#: of a source: shape, strides in bytes, letters of the dtype, how many bytes before its first element its memory begins
_Outline = tuple[Shape, Shape, str, int]

#: pending expressions that were computed by a reduction once already
_computed: weakref.WeakSet[Expression] = weakref.WeakSet()


def is_supported(*dtypes: np.dtype[Any]) -> bool:
    """True if kernels take elements of these dtypes."""
    return all(dtype.kind in "fiub" and dtype.itemsize <= 8 and dtype.isnative for dtype in dtypes)


def axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    """The axes as numpy takes them, ascending; all of them for None.

    Raises:
        AxisError: there is no such axis. ValueError: one is named twice.
    """
    if axis is None:
        return tuple(range(ndim))
    if ndim == 0 and axis in (0, -1):
        return ()
    return tuple(sorted(normalize_axis_tuple(axis, ndim)))


def reduce(
    array: CudaArray, fold: str, axes: tuple[int, ...], keepdims: bool, taken: Any, result: Any, finish: str = "", by: float | None = None
) -> CudaArray:
    """Bring the elements along axes down to one.

    Args:
        array: any shape but an empty one.
        fold: a name in `aiograd.cuda.reduce_generate.FOLDS`.
        axes: ascending.
        keepdims: leave them in place, with length 1.
        taken: the dtype in which elements are taken.
        result: the dtype of the result.
        finish, by: the last step on each result (`aiograd.cuda.reduce_generate.FINISHES`), and its scalar.
    """
    device = array.device
    taken, result = np.dtype(taken), np.dtype(result)
    out = empty(device, tuple(1 if axis in axes else extent for axis, extent in enumerate(array.shape) if keepdims or axis not in axes), result)
    with device.lock:
        steps, sources, scalars = _pending_in(array)
        outlines = tuple([(source.shape, source.strides, dtype_letters(source.dtype), -lowest(source.shape, source.strides)) for source in sources])
        dtypes = dtype_letters(taken), dtype_letters(result)
        plan = _plan(device.properties, fold, array.shape, array.strides, axes, steps, outlines, len(scalars), *dtypes, finish)
        last = (plan.accumulator(by),) if finish else ()
        moved = [
            source.view(source.shape, source.strides, -back) if back else source for source, (_, _, _, back) in zip(sources, outlines, strict=True)
        ]
        if plan.second is None:
            launch(plan.first, plan.grid, plan.block, out, *moved, *plan.sizes, *scalars, *last, *plan.layout, writes=(out,))
            return out
        between = [empty(device, (plan.grid[1], plan.sizes[0]), dtype) for dtype in (plan.accumulator, np.int64)[: plan.states]]
        launch(plan.first, plan.grid, plan.block, *between, *moved, *plan.sizes, *scalars, *plan.layout, writes=between)
        together, grid, block, sizes, layout = plan.second
        launch(together, grid, block, out, *between, *sizes, *last, *layout, writes=(out,))
    return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """The launches of a reduction, but for its arrays and scalars."""

    first: Callable[..., None]
    grid: tuple[int, int]
    block: int
    #: results, elements of each, elements of a part
    sizes: tuple[int, int, int]
    layout: tuple[int, ...]
    #: the dtype of accumulators, and the number of arrays of them that a part has
    accumulator: Any
    states: int
    #: kernel, grid, block, sizes and layout of the launch that brings parts together
    second: tuple[Callable[..., None], tuple[int, int], int, tuple[int, int, int], tuple[int, ...]] | None


@functools.lru_cache(maxsize=4096)
def _plan(
    properties: Properties, fold: str, shape: Shape, strides: Shape, axes: tuple[int, ...], steps: tuple[Step, ...], sources: tuple[_Outline, ...],
    scalars: int, taken: str, result: str, finish: str,
) -> _Plan:  # fmt: skip
    remaining = [axis for axis in range(len(shape)) if axis not in axes]
    kept = _outermost_first(remaining, strides)
    reduced = list(axes) if FOLDS[fold].position else _outermost_first(axes, strides)
    lying = dict(zip(remaining, contiguous_strides(tuple(shape[axis] for axis in remaining), 1), strict=True))
    aligned = [_aligned(source, shape) for source in sources]
    m, n = math.prod(shape[axis] for axis in kept), math.prod(shape[axis] for axis in axes)
    here = tile(properties, m, n, along=_is_along(shape, strides, axes))
    kept_extents, (of_result, *kept_strides) = merged(
        [shape[axis] for axis in kept], [[lying[axis] for axis in kept], *([each[axis] for axis in kept] for each in aligned)]
    )
    reduced_extents, reduced_strides = merged([shape[axis] for axis in reduced], [[each[axis] for axis in reduced] for each in aligned])
    varies = "".join("a" if any(inner) else "k" if any(outer) else "c" for outer, inner in zip(kept_strides, reduced_strides, strict=True))
    accumulator = _accumulator(taken, fold)
    common = {
        "fold": fold, "accumulator": accumulator, "result": result, "taken": taken, "finish": finish, "kept": len(kept_extents),
        "wide": max(m, n) >= 2**31,
    }  # fmt: skip
    layout = [*kept_extents[1:], *reduced_extents[1:], *of_result]
    for letter, outer, inner, (_, _, letters, back) in zip(varies, kept_strides, reduced_strides, sources, strict=True):
        layout += [*((back // int(letters[1:]), *outer) if letter in "ak" else ()), *(inner if letter == "a" else ())]
    first = kernel(recipe_for(
        here, steps=steps, dtypes=tuple(letters for _, _, letters, _ in sources), varies=varies, reduced=len(reduced_extents), scalars=scalars,
        stage="whole" if here.parts == 1 else "partial", **common,
    ))  # fmt: skip
    second = None
    states = 2 if FOLDS[fold].position else 1
    if here.parts > 1:
        again = tile(properties, m, here.parts, along=m == 1, cut=False)
        of_part = (0, *contiguous_strides(kept_extents, 1), m)
        last = kernel(recipe_for(
            again, steps=(), dtypes=(accumulator, "i8")[:states], varies="a" * states, reduced=1, scalars=0, stage="final", **common
        ))  # fmt: skip
        second = (last, again.grid, again.block, (m, here.parts, again.chunk), (*kept_extents[1:], *of_result, *of_part * states))
    return _Plan(first, here.grid, here.block, (m, n, here.chunk), tuple(layout), _DTYPES[accumulator], states, second)


def _pending_in(array: CudaArray) -> tuple[tuple[Step, ...], list[CudaArray], list[Any]]:
    """Pending operations to compute on the way, the arrays that they read, and their scalars; the lock is held."""
    expression = array.buffer.expression
    if (
        not isinstance(expression, Expression)
        or expression in _computed
        or not expression.arrays
        or not array.is_whole
        or array.shape != expression.shape
    ):
        array.flush()
        return (), [array], []
    _computed.add(expression)
    steps: list[Expression] = []
    arrays: dict[int, CudaArray] = {}
    order(expression, steps, arrays, set())
    described, scalars = describe(steps, arrays)
    return described, list(arrays.values()), scalars


def _aligned(source: _Outline, shape: Shape) -> tuple[int, ...]:
    """Elements between neighbours along each axis of `shape`, to which the source is broadcast."""
    own, strides, letters, _ = source
    missing = len(shape) - len(own)
    return (0,) * missing + tuple(0 if extent == 1 else stride // int(letters[1:]) for extent, stride in zip(own, strides, strict=True))


def _outermost_first(axes: Sequence[int], strides: Shape) -> list[int]:
    """The axes by how far apart their neighbours lie in memory, the farthest first; axes that repeat elements come before all."""
    return sorted(axes, key=lambda axis: -abs(strides[axis]) if strides[axis] else -math.inf)


def _is_along(shape: Shape, strides: Shape, axes: tuple[int, ...]) -> bool:
    """True if neighbours in memory belong to the same result."""
    steps = {axis: abs(stride) for axis, (extent, stride) in enumerate(zip(shape, strides, strict=True)) if extent > 1 and stride}
    return not steps or min(steps, key=lambda axis: (steps[axis], -axis)) in axes


def _accumulator(taken: str, fold: str) -> str:
    if fold == "count_nonzero":
        return "i8"
    if FOLDS[fold].truth:
        return "i4"
    return {"f2": "f4", "f4": "f4", "f8": "f8"}.get(taken) or ("u8" if taken[0] == "u" else "i8")
