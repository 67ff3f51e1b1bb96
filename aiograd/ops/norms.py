"""Norms of vectors and matrices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.ops.creation import astype, ones_like
from aiograd.ops.decomposition import svdvals
from aiograd.ops.elementwise import abs_
from aiograd.ops.masking import mask, where
from aiograd.ops.op import answer, define
from aiograd.ops.reduction import Axis, add_reduce, along, max_, maximum_reduce, min_, minimum_reduce, restore, sum_
from aiograd.ops.shape import moveaxis, reshape
from aiograd.running.types import Array


def _vector_norm(x: Array, /, axis: Axis = None, *, keepdims: bool = False, ord: float = 2) -> Array:
    """The norm of `x`, taken as vectors along `axis`.

    Args:
        x: floating, real or complex.
        axis: the axis of the vectors; an int, several axes, or None for all.
        keepdims: leave those axes in place, with length 1.
        ord: 2: Euclidean; 1; inf and -inf: largest and smallest magnitude; 0: how many are not zero; p: ``sum(|x|**p)**(1/p)``.
    """
    if ord == 2:
        square = np.square(x) if x.dtype.kind != "c" else x.real * x.real + x.imag * x.imag
        return np.sqrt(add_reduce(square, axis, None, None, keepdims))
    size = np.absolute(x)
    if ord == math.inf:
        return maximum_reduce(size, axis, None, None, keepdims)
    if ord == -math.inf:
        return minimum_reduce(size, axis, None, None, keepdims)
    if ord == 0:
        return np.asarray(np.count_nonzero(size, axis=axis, keepdims=keepdims)).astype(size.dtype)
    if ord == 1:
        return add_reduce(size, axis, None, None, keepdims)
    return add_reduce(size**ord, axis, None, None, keepdims) ** (1.0 / ord)


def _vector_norm_vjp(g: Array, x: Array, out: Array, axis: Axis, keepdims: bool, ord: float) -> Array | None:
    if ord == 0:
        return None
    g, out = restore(g, x.shape, axis, keepdims), restore(out, x.shape, axis, keepdims)
    if ord == 2:
        return x * (g / where(out == 0, 1, out))
    direction = _direction(x)
    if ord == 1:
        return g * direction
    size = np.absolute(x)
    if math.isinf(ord):
        tied = size == out
        number = astype(sum_(tied, axis=axis, keepdims=True), dtype=g.dtype)
        return (g / number) * (tied * direction)
    # (|x| / norm)**(p - 1), safe where the norm is zero
    ratio = size / where(out == 0, 1, out)
    slope = g * direction * (where(size == 0, 1, ratio) ** (ord - 1))
    return where(out == 0, 0, slope) if ord < 0 else slope  # an element of 0 makes the norm 0, whatever the others are


def _vector_norm_jvp(t: Array, x: Array, out: Array, axis: Axis, keepdims: bool, ord: float) -> Array | None:
    slope = _vector_norm_vjp(ones_like(out), x, out, axis, keepdims, ord)
    return None if slope is None else along(t, slope, axis, keepdims)


def _direction(x: Array) -> Array:
    """``x / |x|``, 0 at 0."""
    if x.dtype.kind != "c":
        return np.sign(x)
    size = np.absolute(x)
    return mask(x / where(size == 0, 1, size), size != 0)  # masked, so that its derivative at 0 is 0 as well


vector_norm_row = define("vector_norm", _vector_norm, x=_vector_norm_vjp, jvp=_vector_norm_jvp, complex="explicit", cost=1.0)


def vector_norm(x: Array, /, *, axis: Axis = None, keepdims: bool = False, ord: float = 2) -> Array:
    """The norm of `x` as vectors along `axis`; see the row of that name."""
    return vector_norm_row(x, axis=axis, keepdims=keepdims, ord=ord)


def matrix_norm(x: Array, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """Norms of the matrices in the last two axes.

    Args:
        x: (..., M, N), floating.
        keepdims: leave the two axes in place, with length 1.
        ord: ``fro``; ``nuc``: sum of singular values; 2, -2: largest, smallest singular value; 1, -1: largest, smallest column sum of
            magnitudes; inf, -inf: the same of rows.
    """
    from_values = {"nuc": sum_, 2: max_, -2: min_}
    if ord == "fro":
        result = vector_norm_row(x, axis=(-2, -1))
    elif ord in from_values:
        result = from_values[ord](svdvals(x), axis=-1)
    elif ord in (1, -1, math.inf, -math.inf):
        sums = sum_(abs_(x), axis=-2 if abs(ord) == 1 else -1)
        result = (max_ if ord > 0 else min_)(sums, axis=-1)
    else:
        raise ArgumentError(f"matrix_norm: ord is {ord!r}, expected 'fro', 'nuc', 1, -1, 2, -2, inf or -inf")
    return reshape(result, shape=(*result.shape, 1, 1)) if keepdims else result


def norm(x: Array, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Array:
    """numpy's ``linalg.norm``: of vectors or matrices, as `axis` and `ord` say."""
    axis = tuple(axis) if isinstance(axis, list) else axis
    ndim = len(x.shape)
    if ord is None or (axis is None and ndim == 1) or isinstance(axis, int) or (isinstance(axis, tuple) and len(axis) == 1):
        return vector_norm_row(x, axis=axis, keepdims=keepdims, ord=2 if ord is None else ord)
    axes = tuple(range(ndim)) if axis is None else axis
    if len(axes) != 2:
        raise ArgumentError(f"norm: with ord={ord!r} one or two axes are needed, found {len(axes)}")
    result = matrix_norm(moveaxis(x, axes, (-2, -1)), ord=ord)
    if not keepdims:
        return result
    return reshape(result, shape=tuple(1 if a in [b % ndim for b in axes] else n for a, n in enumerate(x.shape)))


# numpy's functions, with numpy's arguments

answer({
    np.linalg.norm: norm,
    np.linalg.vector_norm: lambda x, /, *, axis=None, keepdims=False, ord=2: vector_norm(x, axis=axis, keepdims=keepdims, ord=ord),
    np.linalg.matrix_norm: lambda x, /, *, keepdims=False, ord="fro": matrix_norm(x, keepdims=keepdims, ord=ord),
})  # fmt: skip
