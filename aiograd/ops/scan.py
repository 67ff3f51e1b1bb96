"""Cumulative sums and products, products, and the first-order linear recurrence that differentiates them.

Note [Products without division]
    The derivative of a product is the product of the other factors; dividing the product by each factor fails where one is zero. With
    ``y[k] = y[k-1] * x[k]`` the gradient of the cumulative product is ``dx[k] = a[k] * y[k-1]``, where ``a[k] = g[k] + x[k+1] * a[k+1]``
    is a linear recurrence that runs backwards. It needs no division, holds with any number of zeros, and the gradient of a linear
    recurrence is again one that runs the other way: so the family {cumprod, linear_scan, shift} is closed under differentiation.

Note [Blocks]
    A recurrence is a loop over its axis, and a Python loop over a million steps takes a second. A long one is cut into blocks that run
    side by side, then corrected by the carry that enters each block: two loops of the square root of the length.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.ops.creation import ones_like, refuse, zeros_like
from aiograd.ops.joining import cat
from aiograd.ops.op import Op, define, implements
from aiograd.ops.reduction import Axis, in_dtype, multiply_reduce, normalize_axes, restore, sum_
from aiograd.ops.shape import permute, reshape
from aiograd.running.types import Array

#: length up to which a recurrence runs as one loop
LOOP = 256


def _cumsum(x: Array, /, axis: int = -1, *, reverse: bool = False) -> Array:
    """Sums of the elements up to each, or from each on when `reverse`."""
    if not reverse:
        return np.add.accumulate(x, axis)
    return np.flip(np.add.accumulate(np.flip(x, axis), axis), axis)


def _cumprod(x: Array, /, axis: int = -1, *, reverse: bool = False) -> Array:
    """Products of the elements up to each, or from each on when `reverse`."""
    if not reverse:
        return np.multiply.accumulate(x, axis)
    return np.flip(np.multiply.accumulate(np.flip(x, axis), axis), axis)


def _shift(x: Array, /, axis: int, by: int, fill: float = 0.0) -> Array:
    """`x` moved `by` places along `axis`; what enters is `fill`, what leaves is lost.

    Args:
        x: any shape with at least one axis.
        axis: where to move.
        by: how far; negative towards the start.
        fill: the value that enters.
    """
    out = np.full_like(x, fill)
    length = x.shape[axis]
    if abs(by) < length:
        target, source = np.swapaxes(out, axis, 0), np.swapaxes(x, axis, 0)
        if by >= 0:
            target[by:] = source[: length - by]
        else:
            target[:by] = source[-by:]
    return out


def _linear_scan(x: Array, factor: Array, /, axis: int = -1, *, reverse: bool = False) -> Array:
    """``h[k] = x[k] + factor[k] * h[k-1]``, or ``... * h[k+1]`` when `reverse`; h is 0 before the start.

    Args:
        x, factor: arrays of the same shape; the factor that meets the start does not matter.
        axis: the axis that k runs along.
        reverse: run from the end to the start.

    Returns:
        h, of the shape of `x`.
    """
    x, factor = np.moveaxis(x, axis, 0), np.moveaxis(factor, axis, 0)
    if reverse:
        x, factor = x[::-1], factor[::-1]
    dtype = np.result_type(x, factor)
    length = x.shape[0]
    if length <= LOOP:
        out = np.array(x, dtype)
        for k in range(1, length):
            out[k] += factor[k] * out[k - 1]
    else:
        out = _in_blocks(x, factor, dtype)
    if reverse:
        out = out[::-1]
    return np.ascontiguousarray(np.moveaxis(out, 0, axis))


def _in_blocks(x: Array, factor: Array, dtype: Any) -> Array:
    """The recurrence along the first axis; see Note [Blocks]."""
    length = x.shape[0]
    size = math.isqrt(length - 1) + 1
    blocks = -(-length // size)
    out, product = np.zeros((blocks * size, *x.shape[1:]), dtype), np.ones((blocks * size, *x.shape[1:]), dtype)
    out[:length], product[:length] = x, factor
    out, product = out.reshape(blocks, size, *x.shape[1:]), product.reshape(blocks, size, *x.shape[1:])
    for k in range(1, size):
        out[:, k] += product[:, k] * out[:, k - 1]
        product[:, k] *= product[:, k - 1]
    for b in range(1, blocks):
        carry = out[b - 1, -1]
        # a carry of zero adds nothing, even to a product that overflowed
        out[b] += np.where(carry == 0, dtype.type(0), product[b]) * carry
    return out.reshape(blocks * size, *x.shape[1:])[:length]


def _cumprod_vjp(g: Array, x: Array, out: Array, axis: int, reverse: bool) -> Array:
    step = -1 if reverse else 1
    behind = linear_scan(g, shift(x, axis=axis, by=-step), axis=axis, reverse=not reverse)
    return behind * shift(out, axis=axis, by=step, fill=1.0)


def _linear_scan_vjp(g: Array, factor: Array, out: Array, axis: int, reverse: bool, needs: tuple[bool, bool]) -> tuple[Array, Array | None]:
    step = -1 if reverse else 1
    behind = linear_scan(g, shift(factor, axis=axis, by=-step), axis=axis, reverse=not reverse)
    return behind, behind * shift(out, axis=axis, by=step) if needs[1] else None


def _cumprod_jvp(t: Array, x: Array, out: Array, axis: int, reverse: bool) -> Array:
    return linear_scan(t * shift(out, axis=axis, by=-1 if reverse else 1, fill=1.0), x, axis=axis, reverse=reverse)


def _linear_scan_jvp(t: tuple[Array | None, Array | None], factor: Array, out: Array, axis: int, reverse: bool) -> Array:
    moved = t[0]
    if t[1] is not None:
        part = t[1] * shift(out, axis=axis, by=-1 if reverse else 1)
        moved = part if moved is None else moved + part
    return linear_scan(moved, factor, axis=axis, reverse=reverse)


cumsum: Op = define(
    "cumsum", _cumsum, x=lambda g, axis, reverse: cumsum(g, axis=axis, reverse=not reverse), jvp="forward", complex="explicit", cost=2.0
)
cumprod: Op = define("cumprod", _cumprod, x=_cumprod_vjp, jvp=_cumprod_jvp, complex="holomorphic", cost=6.0)
shift: Op = define(
    "shift", _shift, x=lambda g, axis, by: shift(g, axis=axis, by=-by), jvp=lambda t, axis, by: shift(t, axis=axis, by=by),
    complex="explicit", cost=0.6
)
linear_scan: Op = define(
    "linear_scan", _linear_scan, joint={("x", "factor"): _linear_scan_vjp}, jvp=_linear_scan_jvp, complex="holomorphic", cost=6.0
)


# Products over axes.


def _prod(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """The product over `axis`."""
    return multiply_reduce(x, axis, None, None, keepdims)


def _prod_others(x: Array, /) -> Array:
    """For each element, the product of the others along the last axis; exact where there are zeros."""
    whole = multiply_reduce(x, -1, None, None, True)
    if np.all(whole) and np.all(np.isfinite(whole)):
        return whole / x
    before = _shift(_cumprod(x), -1, 1, 1.0)
    return before * _shift(_cumprod(x, reverse=True), -1, -1, 1.0)


def _prod_others_vjp(g: Array, x: Array) -> Array:
    before = shift(cumprod(x), axis=-1, by=1, fill=1.0)
    after = shift(cumprod(x, reverse=True), axis=-1, by=-1, fill=1.0)
    # the outputs are before * after: differentiate both, each a shifted cumulative product
    through_before = linear_scan(shift(g * after, axis=-1, by=-1), shift(x, axis=-1, by=-1), reverse=True) * before
    through_after = linear_scan(shift(g * before, axis=-1, by=1), shift(x, axis=-1, by=1)) * after
    return through_before + through_after


def _prod_vjp(g: Array, x: Array, axis: Axis, keepdims: bool) -> Array:
    ndim = len(x.shape)
    axes = normalize_axes(axis, ndim)
    others = tuple(a for a in range(ndim) if a not in axes)
    order = others + axes
    turned = permute(x, axes=order)
    flat = reshape(turned, shape=(*(x.shape[a] for a in others), math.prod(x.shape[a] for a in axes)))
    rest = reshape(prod_others(flat), shape=turned.shape)
    inverse = tuple(order.index(a) for a in range(ndim))
    return restore(g, x.shape, axis, keepdims) * permute(rest, axes=inverse)


def _prod_jvp(t: Array, x: Array, out: Array, axis: Axis, keepdims: bool) -> Array:
    return sum_(t * _prod_vjp(ones_like(out), x, axis, keepdims), axis=axis, keepdims=keepdims)


prod_others: Op = define("prod_others", _prod_others, x=_prod_others_vjp, jvp="rule", complex="holomorphic", cost=20.0)
prod = define("prod", _prod, x=_prod_vjp, jvp=_prod_jvp, complex="holomorphic", cost=10.0)


# numpy's functions, with numpy's arguments


@implements(np.prod)
def np_prod(a: Array, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, initial: Any = None, where: Any = True) -> Array:
    """numpy's ``prod``."""
    refuse("prod", out=out, initial=initial, where=where)
    return in_dtype(prod, a, dtype, axis=axis, keepdims=False if keepdims is np._NoValue else bool(keepdims))


def _cumulate(name: str, row: Op, a: Array, axis: int | None, dtype: Any, out: Any) -> Array:
    refuse(name, out=out)
    if axis is None or (not a.shape and axis in (0, -1)):  # numpy takes a number for a vector of one
        a, axis = reshape(a, shape=(-1,)), 0
    return in_dtype(row, a, dtype, axis=axis)


@implements(np.cumsum)
def np_cumsum(a: Array, axis: int | None = None, dtype: Any = None, out: Any = None) -> Array:
    """numpy's ``cumsum``."""
    return _cumulate("cumsum", cumsum, a, axis, dtype, out)


@implements(np.cumprod)
def np_cumprod(a: Array, axis: int | None = None, dtype: Any = None, out: Any = None) -> Array:
    """numpy's ``cumprod``."""
    return _cumulate("cumprod", cumprod, a, axis, dtype, out)


def cumulative(x: Array, row: Op, axis: int | None, dtype: Any, include_initial: bool) -> Array:
    """The Array API's cumulative functions: `row` along `axis`, with its neutral element in front when `include_initial`."""
    if axis is None:
        if len(x.shape) != 1:
            raise ArgumentError(f"{row.name}: axis may be left out for one-dimensional arrays only, found shape {x.shape}")
        axis = 0
    result = in_dtype(row, x, dtype, axis=axis)
    if not include_initial:
        return result
    first = list(x.shape)
    first[axis] = 1
    neutral = zeros_like if row is cumsum else ones_like
    return cat(neutral(result, shape=tuple(first)), result, axis=axis)


def cumulative_sum(x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Cumulative sums along `axis`, starting with 0 when `include_initial`."""
    return cumulative(x, cumsum, axis, dtype, include_initial)


def cumulative_prod(x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Cumulative products along `axis`, starting with 1 when `include_initial`."""
    return cumulative(x, cumprod, axis, dtype, include_initial)


if hasattr(np, "cumulative_sum"):

    @implements(np.cumulative_sum)
    def np_cumulative_sum(x: Array, /, *, axis: int | None = None, dtype: Any = None, out: Any = None, include_initial: bool = False) -> Array:
        """numpy's ``cumulative_sum``."""
        refuse("cumulative_sum", out=out)
        return cumulative_sum(x, axis=axis, dtype=dtype, include_initial=include_initial)

    @implements(np.cumulative_prod)
    def np_cumulative_prod(x: Array, /, *, axis: int | None = None, dtype: Any = None, out: Any = None, include_initial: bool = False) -> Array:
        """numpy's ``cumulative_prod``."""
        refuse("cumulative_prod", out=out)
        return cumulative_prod(x, axis=axis, dtype=dtype, include_initial=include_initial)
