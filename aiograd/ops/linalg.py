"""Products of vectors and matrices.

Note [Leading axes]
    A matrix product with one matrix as its second operand, ``(..., M, K) @ (K, N)``, is a single GEMM on the rows of the first; so is the
    gradient of that matrix, where multiplying batch by batch and then summing would write a matrix per batch first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ShapeError
from aiograd.kernels.matmul import LARGE, shifted
from aiograd.kernels.matmul import product as large_product
from aiograd.ops.creation import refuse
from aiograd.ops.elementwise import conj, mul
from aiograd.ops.op import ROWS, Op, answer, define, implements
from aiograd.ops.reduction import in_dtype, sum_
from aiograd.ops.shape import diagonal, matrix_transpose, moveaxis, reshape, reshaped, swapped, unsqueeze
from aiograd.running.types import Array, Shape

#: multiply-adds per nanosecond that a GEMM may be expected to reach on one core
GEMM_RATE = 30.0


def product(x1: Array, x2: Array, bias: Array = None) -> Array:
    """``x1 @ x2 + bias`` of two matrices. ``dot`` makes the same call of BLAS as `np.matmul`, in half a microsecond less."""
    if x1.__class__ is x2.__class__ is np.ndarray:
        if x1.size * x2.size >= LARGE:
            return large_product(x1, x2, bias)
        out = x1.dot(x2)
    else:
        out = np.matmul(x1, x2)
    return out if bias is None else shifted(out, bias)


def _matmul(x1: Array, x2: Array, /) -> Array:
    """The matrix product, with leading axes that broadcast; vectors as in numpy.

    Args:
        x1: (..., M, K) or (K,).
        x2: (..., K, N) or (K,).

    Returns:
        (..., M, N), without the axis that a vector does not have.
    """
    if x1.ndim == x2.ndim == 2:
        return product(x1, x2)
    if x2.ndim == 2 and x1.ndim > 2 and x1.shape[-1] == x2.shape[0] and x1.flags.c_contiguous:
        return product(x1.reshape(math.prod(x1.shape[:-1]), x1.shape[-1]), x2).reshape(*x1.shape[:-1], x2.shape[1])
    return np.matmul(x1, x2)


def _rows(x: Array) -> Array:
    return reshaped(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _matmul_x1(g: Array, x2: Array, x1_shape: Shape) -> Array:
    if x2.ndim == len(x1_shape) == 2:
        return product(g, x2.T)
    if len(x1_shape) == 1:
        if x2.ndim == 1:
            return g * x2
        row = np.matmul(unsqueeze(g, axis=-2), matrix_transpose(x2))
        return reshape(row, shape=(*row.shape[:-2], row.shape[-1]))
    if x2.ndim == 1:
        return unsqueeze(g, axis=-1) * x2
    if x2.ndim == 2:
        return matmul(g, x2.T)
    if len(x1_shape) == 2:  # one matrix for many: contract the leading axes in one product
        return product(_rows(swapped(g)).T, _rows(swapped(x2)))
    return np.matmul(g, swapped(x2))


def _matmul_x2(g: Array, x1: Array, x2_shape: Shape) -> Array:
    if x1.ndim == len(x2_shape) == 2:
        return product(x1.T, g)
    if x1.ndim == 1:
        return g * x1 if len(x2_shape) == 1 else unsqueeze(x1, axis=-1) * unsqueeze(g, axis=-2)
    if len(x2_shape) == 1:
        row = np.matmul(unsqueeze(g, axis=-2), x1)
        return reshape(row, shape=(*row.shape[:-2], row.shape[-1]))
    if x1.ndim == 2:
        return np.matmul(x1.T, g)
    if len(x2_shape) == 2:
        return product(_rows(x1).T, _rows(g))
    return np.matmul(swapped(x1), g)


def _recorded_x1(g: Array, x2: Array, x1_shape: Shape) -> Array:
    if x2.ndim == len(x1_shape) == 2 and x2.dtype.kind == g.dtype.kind == "f":
        return ROWS["linear"](g, x2)  # multiplies by the transpose in one node
    return _matmul_x1(g, x2, x1_shape)


def _factors_x1(g: Array, x2: Array) -> tuple[Array, Array]:
    if x2.ndim == 1:
        x2, g = unsqueeze(x2, axis=-1), unsqueeze(g, axis=-1)
    return swapped(g if g.ndim >= x2.ndim else unsqueeze(g, axis=-2)), swapped(x2)


def _factors_x2(g: Array, x1: Array) -> tuple[Array, Array]:
    return x1, g if g.ndim >= x1.ndim else unsqueeze(g, axis=-1)


def _matmul_cost(output: Shape, inputs: tuple[Shape, ...]) -> float:
    inner = inputs[0][-1] if inputs[0] else 1
    return 2.0 * math.prod(output) * inner / GEMM_RATE


matmul: Op = define(
    "matmul",
    _matmul,
    x1=_matmul_x1,
    x2=_matmul_x2,
    recorded={"x1": _recorded_x1},
    jvp="forward", complex="holomorphic",
    cost=_matmul_cost,
    norm={"x1": _factors_x1, "x2": _factors_x2},
    numpy=(np.matmul, np.linalg.matmul),
)


def _vecdot(x1: Array, x2: Array, /, axis: int = -1) -> Array:
    """Dot products of vectors along `axis`; the first operand is conjugated.

    Args:
        x1, x2: arrays that broadcast, with the same length along `axis`.
        axis: of both operands, counted from the end (negative).
    """
    return np.vecdot(x1, x2, axis=axis)  # type: ignore[call-overload]


vecdot = define(
    "vecdot",
    _vecdot,
    x1=lambda g, x2, axis: unsqueeze(conj(g), axis=axis) * x2,
    x2=lambda g, x1, axis: unsqueeze(g, axis=axis) * x1,
    jvp="forward", complex="explicit",
    cost=1.0,
    numpy=(np.vecdot,),
)


def _cross(x1: Array, x2: Array, /, axis: int = -1) -> Array:
    """Cross products of vectors of length 3 along `axis`.

    Args:
        x1, x2: arrays that broadcast, of length 3 along `axis`.
        axis: counted from the end (negative).
    """
    if x1.shape[axis] != 3 or x2.shape[axis] != 3:
        raise ShapeError(f"cross: found shapes {x1.shape} and {x2.shape}; expected length 3 along axis {axis} of both")
    a, b = np.moveaxis(x1, axis, -1), np.moveaxis(x2, axis, -1)
    a0, a1, a2, b0, b1, b2 = a[..., 0], a[..., 1], a[..., 2], b[..., 0], b[..., 1], b[..., 2]
    return np.moveaxis(np.stack((a1 * b2 - a2 * b1, a2 * b0 - a0 * b2, a0 * b1 - a1 * b0), -1), -1, axis)


cross: Op = define(
    "cross", _cross, x1=lambda g, x2, axis: cross(x2, g, axis=axis), x2=lambda g, x1, axis: cross(g, x1, axis=axis),
    jvp="forward", complex="holomorphic", cost=5.0
)


def outer(x1: Array, x2: Array, /) -> Array:
    """All products of the elements of two arrays, taken as vectors: (N,), (M,) to (N, M)."""
    return mul(reshape(x1, shape=(-1, 1)), reshape(x2, shape=(1, -1)))


def trace(x: Array, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """Sums of the diagonals of matrices (..., M, N), in `dtype` where one is given."""
    return in_dtype(sum_, diagonal(x, offset=offset), dtype, axis=-1)


# numpy's functions, with numpy's arguments


@implements(np.outer, np.linalg.outer)
def np_outer(a: Array, b: Array, out: Any = None) -> Array:
    """numpy's ``outer``."""
    refuse("outer", out=out)
    return outer(a, b)


@implements(np.dot)
def np_dot(a: Array, b: Array, out: Any = None) -> Array:
    """numpy's ``dot``."""
    refuse("dot", out=out)
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return mul(a, b)
    if np.ndim(b) <= 2:
        return matmul(a, b)
    # the last axis of a with the last but one of b; the other axes follow each other
    flat = reshape(moveaxis(b, -2, 0), shape=(b.shape[-2], math.prod(b.shape[:-2]) * b.shape[-1]))
    return reshape(matmul(a, flat), shape=(*a.shape[:-1], *b.shape[:-2], b.shape[-1]))


@implements(np.inner)
def np_inner(a: Array, b: Array, /) -> Array:
    """numpy's ``inner``: the last axes with each other."""
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return mul(a, b)
    flat = reshape(b, shape=(math.prod(b.shape[:-1]), b.shape[-1]))
    return reshape(matmul(a, matrix_transpose(flat)), shape=(*a.shape[:-1], *b.shape[:-1]))


@implements(np.vdot)
def np_vdot(a: Array, b: Array, /) -> Array:
    """numpy's ``vdot``: the dot product of the flattened arrays, the first conjugated."""
    return vecdot(reshape(a, shape=(-1,)), reshape(b, shape=(-1,)))


@implements(np.linalg.vecdot)
def np_linalg_vecdot(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """numpy's ``linalg.vecdot``."""
    return vecdot(x1, x2, axis=axis)


@implements(np.cross)
def np_cross(a: Array, b: Array, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Array:
    """numpy's ``cross``, of vectors of length 3."""
    if axis is not None:
        axisa = axisb = axisc = axis
    result = cross(moveaxis(a, axisa, -1), moveaxis(b, axisb, -1))
    return moveaxis(result, -1, axisc)


@implements(np.linalg.cross)
def np_linalg_cross(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """numpy's ``linalg.cross``."""
    return np_cross(x1, x2, axis=axis)


@implements(np.kron)
def np_kron(a: Array, b: Array) -> Array:
    """numpy's ``kron``: `b` scaled by each element of `a`."""
    a, b = (x if hasattr(x, "dtype") else np.asarray(x) for x in (a, b))
    ndim = max(np.ndim(a), np.ndim(b))
    left = (1,) * (ndim - np.ndim(a)) + tuple(np.shape(a))
    right = (1,) * (ndim - np.ndim(b)) + tuple(np.shape(b))
    wide = mul(
        reshape(a, shape=tuple(n for length in left for n in (length, 1))), reshape(b, shape=tuple(n for length in right for n in (1, length)))
    )
    return reshape(wide, shape=tuple(m * n for m, n in zip(left, right, strict=True)))


@implements(np.trace)
def np_trace(a: Array, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> Array:
    """numpy's ``trace``."""
    refuse("trace", out=out)
    return in_dtype(sum_, diagonal(a, offset=offset, axis1=axis1, axis2=axis2), dtype, axis=-1)


@implements(np.linalg.multi_dot)
def np_multi_dot(arrays: Sequence[Array], *, out: Any = None) -> Array:
    """numpy's ``linalg.multi_dot``, from left to right or from right to left, whichever takes fewer operations."""
    refuse("linalg.multi_dot", out=out)
    if len(arrays) < 2:
        raise ArgumentError(f"multi_dot takes at least two arrays, found {len(arrays)}")
    first = 1 if len(arrays[0].shape) == 1 else arrays[0].shape[0]
    last = arrays[-1].shape[-1] if len(arrays[-1].shape) > 1 else 1
    sizes = [first, *(a.shape[0] for a in arrays[1:]), last]
    from_left = sum(sizes[0] * sizes[i] * sizes[i + 1] for i in range(1, len(arrays)))
    from_right = sum(sizes[i - 1] * sizes[i] * sizes[-1] for i in range(1, len(arrays)))
    if from_left <= from_right:
        result = arrays[0]
        for a in arrays[1:]:
            result = matmul(result, a)
        return result
    result = arrays[-1]
    for a in reversed(arrays[:-1]):
        result = matmul(a, result)
    return result


answer({
    np.linalg.trace: lambda x, /, *, offset=0, dtype=None: trace(x, offset=offset, dtype=dtype),
    np.linalg.diagonal: lambda x, /, *, offset=0: diagonal(x, offset=offset),
})  # fmt: skip
