"""Numerical calculus composed of rows: differences, the trapezoidal rule, interpolation, ranges with gradients of their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ShapeError
from aiograd.ops.creation import astype
from aiograd.ops.indexing import getitem, take
from aiograd.ops.joining import cat, np_diff
from aiograd.ops.masking import where
from aiograd.ops.op import implements
from aiograd.ops.reduction import sum_
from aiograd.ops.scan import cumsum
from aiograd.ops.shape import checked_axis, moveaxis, reshape, unsqueeze
from aiograd.running.types import Array


def _last(x: Array, start: int | None, stop: int | None) -> Array:
    """Slices `start` to `stop` of the last axis."""
    return getitem(x, index=(..., slice(start, stop)))


def areas(y: Array, x: Array | None, dx: Any, axis: int) -> Array:
    """The areas of the trapezoids between neighbours along `axis`, moved to the end."""
    y = moveaxis(y, axis, -1)
    if x is None:
        step = dx
    else:
        step = np_diff(x if np.ndim(x) == 1 else moveaxis(x, axis, -1))
    return (_last(y, 1, None) + _last(y, None, -1)) * step * 0.5


def cumulative_trapezoid(y: Array, x: Array | None = None, /, *, dx: Any = 1.0, axis: int = -1) -> Array:
    """The integral up to each point but the first, by the trapezoidal rule."""
    return moveaxis(cumsum(areas(y, x, dx, axis), axis=-1), -1, axis)


def _slopes(f: Array, spacing: Any, edge_order: int) -> Array:
    """The derivative along the last axis; `spacing` is the distance of neighbours, or the coordinates."""
    length = f.shape[-1]
    if length < edge_order + 1:
        raise ShapeError(f"gradient: an axis of length {length}, expected at least {edge_order + 1}")
    steps = spacing if np.ndim(spacing) == 0 else np_diff(spacing)
    difference = np_diff(f)
    one = difference / steps  # the slope between neighbours
    first, last = _last(one, None, 1), _last(one, -1, None)
    if length == 2:
        return cat(first, last, axis=-1)
    if np.ndim(steps) == 0:
        middle = (_last(f, 2, None) - _last(f, None, -2)) / (2 * steps)
        left = right = 0.5
    else:
        before, after = _last(steps, None, -1), _last(steps, 1, None)
        middle = (_last(one, None, -1) * after + _last(one, 1, None) * before) / (before + after)
        left = _last(before / (before + after), None, 1)
        right = _last(after / (before + after), -1, None)
    if edge_order == 2:  # the slope of the parabola through three points, at its ends
        first = first - (_last(one, 1, 2) - first) * left
        last = last + (last - _last(one, -2, -1)) * right
    return cat(first, middle, last, axis=-1)


# numpy's functions, with numpy's arguments


@implements(np.trapezoid)
def np_trapezoid(y: Array, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Array:
    """numpy's ``trapezoid``."""
    return sum_(areas(y, x, dx, axis), axis=-1)


@implements(np.gradient)
def np_gradient(f: Array, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """numpy's ``gradient``."""
    if edge_order not in (1, 2):
        raise ArgumentError(f"gradient: edge_order is {edge_order}, expected 1 or 2")
    ndim = len(f.shape)
    axes = tuple(range(ndim)) if axis is None else tuple(checked_axis(a, ndim) for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    spacing: Sequence[Any] = varargs or (1.0,)
    if len(spacing) == 1 and (len(axes) == 1 or np.ndim(spacing[0]) == 0):
        spacing = [spacing[0]] * len(axes)
    if len(spacing) != len(axes):
        raise ArgumentError(f"gradient: {len(spacing)} spacings for {len(axes)} axes; expected none, one number, or one for each axis")
    f = f if f.dtype.kind in "fc" else astype(f, dtype=np.float64)
    spacing = [np.asarray(s) if isinstance(s, (list, tuple)) else s for s in spacing]
    found = tuple(moveaxis(_slopes(moveaxis(f, a, -1), s, edge_order), -1, a) for a, s in zip(axes, spacing, strict=True))
    return found[0] if len(found) == 1 else found


@implements(np.interp)
def np_interp(x: Array, xp: Array, fp: Array, left: Any = None, right: Any = None, period: float | None = None) -> Array:
    """numpy's ``interp``: piecewise linear; gradients for `x`, `xp` and `fp`."""
    xp, fp = (np.asarray(v) if isinstance(v, (list, tuple)) else v for v in (xp, fp))
    if period is not None:
        x, xp = np.remainder(x, period), np.remainder(xp, period)
        order = np.argsort(xp)
        xp, fp = take(xp, order, axis=0), take(fp, order, axis=0)
        xp = cat(_last(xp, -1, None) - period, xp, _last(xp, None, 1) + period, axis=0)
        fp = cat(_last(fp, -1, None), fp, _last(fp, None, 1), axis=0)
    if len(xp.shape) != 1 or tuple(xp.shape) != tuple(fp.shape) or not xp.shape[0]:
        raise ShapeError(f"interp: points of shapes {list(xp.shape)} and {list(fp.shape)}, expected two vectors of one length, not empty")
    if xp.shape[0] == 1:
        inside = take(fp, np.zeros(np.shape(x), np.intp), axis=0)
    else:
        found = np.clip(np.searchsorted(xp, x, "right") - 1, 0, xp.shape[0] - 2)
        x0, x1, y0, y1 = take(xp, found, axis=0), take(xp, found + 1, axis=0), take(fp, found, axis=0), take(fp, found + 1, axis=0)
        inside = y0 + (x - x0) * ((y1 - y0) / (x1 - x0))
    first, last = getitem(xp, index=0), getitem(xp, index=-1)
    below = getitem(fp, index=0) if left is None or period is not None else left
    above = getitem(fp, index=-1) if right is None or period is not None else right
    return where(x < first, below, where(x > last, above, inside))


@implements(np.linspace)
def np_linspace(
    start: Array, stop: Array, num: int = 50, endpoint: bool = True, retstep: bool = False, dtype: Any = None, axis: int = 0, *, device: Any = None
) -> Any:
    """numpy's ``linspace``; gradients for both ends."""
    if num < 0:
        raise ArgumentError(f"linspace: num is {num}, expected at least 0")
    difference = np.subtract(stop, start)
    wanted = np.result_type(difference.dtype, np.float16 if difference.dtype.kind in "fc" else np.float64)
    parts = num - 1 if endpoint else num
    steps = np.arange(num, dtype=np.zeros((), wanted).real.dtype) / max(parts, 1)
    ends = np.ndim(difference)
    steps = steps.reshape((-1,) + (1,) * ends)
    points = unsqueeze(start + difference * 0, axis=0) + unsqueeze(difference, axis=0) * steps if ends else start + difference * steps
    points = points if dtype is None else astype(points, dtype=dtype)
    points = moveaxis(points, 0, axis)
    return (points, difference / max(parts, 1)) if retstep else points


@implements(np.select)
def np_select(condlist: Sequence[Any], choicelist: Sequence[Any], default: Any = 0) -> Array:
    """numpy's ``select``: elements of the first choice with a true condition, of `default` where none is true."""
    if len(condlist) != len(choicelist) or not condlist:
        raise ArgumentError(f"select: {len(condlist)} conditions for {len(choicelist)} choices, expected as many, and at least one")
    result = default
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        result = where(condition, choice, result)
    return result


@implements(np.partition)
def np_partition(a: Array, kth: Any, axis: int | None = -1, kind: str = "introselect", order: Any = None) -> Array:
    """numpy's ``partition``, by sorting."""
    if axis is None:
        a, axis = reshape(a, shape=(-1,)), 0
    return np.sort(a, axis)


@implements(np.rollaxis)
def np_rollaxis(a: Array, axis: int, start: int = 0) -> Array:
    """numpy's ``rollaxis``."""
    ndim = len(a.shape)
    axis, start = checked_axis(axis, ndim), start + ndim if start < 0 else start
    return moveaxis(a, axis, start - 1 if axis < start else start)
