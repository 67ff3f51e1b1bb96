"""Determinants of matrices in the last two axes, and their derivatives; leading axes are batches.

Note [Singular matrices]
    The gradient of a determinant is the matrix of cofactors, which exists for every matrix. It is a row of its own, found by the singular
    value decomposition, where ``det(A) * inv(A).T`` would divide zero by zero. So is the gradient of the cofactors: with ``A = U S V`` and
    gradients turned into the same bases, its elements are products of all but two singular values. The third derivative goes by the inverse, and
    is refused where there is none.

All are holomorphic: the engine sees to the conjugates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from aiograd.ops.decomposition import cubic, decomposed, inv
from aiograd.ops.linalg import matmul
from aiograd.ops.op import Op, define, implements
from aiograd.ops.reduction import sum_
from aiograd.ops.shape import matrix_transpose, unsqueeze
from aiograd.running.types import Array


class SlogdetResult(NamedTuple):
    """The result of `slogdet`.

    >>> ag.linalg.slogdet(ag.tensor([[-1.0, 0.0], [0.0, 1.0]]))
    SlogdetResult(sign=tensor(-1.), logabsdet=tensor(0.))
    """

    sign: Array
    logabsdet: Array


def _cofactors(x: Array, /) -> Array:
    """The matrices of cofactors of (..., N, N): the gradients of the determinants, for singular matrices too."""
    u, s, vh = np.linalg.svd(x)
    size = s.shape[-1]
    others = np.stack([np.prod(np.delete(s, i, -1), -1) for i in range(size)], -1) if size else s
    sign = np.linalg.det(u) * np.linalg.det(vh)
    return np.conj(np.matmul(u * (np.conj(sign)[..., None, None] * others[..., None, :]), vh))


def _without_two(s: Array) -> Array:
    """Products of all but two of the numbers (..., N), for each pair: (..., N, N), symmetric, with a diagonal of zeros."""
    size = s.shape[-1]
    ones = np.ones((*s.shape[:-1], 1), s.dtype)
    before = np.concatenate([ones, np.cumprod(s[..., :-1], -1)], -1)
    behind = np.concatenate([np.cumprod(s[..., :0:-1], -1)[..., ::-1], ones], -1)
    later = np.where(np.arange(size) > np.arange(size)[:, None], s[..., None, :], ones[..., None])
    between = np.concatenate([np.broadcast_to(ones[..., None], (*s.shape, 1)), np.cumprod(later, -1)[..., :-1]], -1)
    upper = np.triu(before[..., :, None] * between * behind[..., None, :], 1)
    return upper + np.swapaxes(upper, -1, -2)


def _cofactors_grad(y: Array, x: Array, /) -> Array:
    """The gradient of ``sum(y * cofactors(x))`` by `x`, for singular matrices too; linear in `y`.

    Args:
        y: (..., N, N).
        x: (..., N, N).
    """
    if not x.size:
        return np.zeros(np.broadcast_shapes(y.shape, x.shape), np.result_type(y, x))
    u, s, vh = np.linalg.svd(x)
    left, right = np.conj(u), np.conj(vh)
    turned = np.matmul(np.matmul(np.swapaxes(left, -1, -2), y), np.swapaxes(right, -1, -2))
    products = _without_two(s)
    diagonal = np.matmul(products, np.diagonal(turned, axis1=-2, axis2=-1)[..., None])
    inner = diagonal * np.eye(s.shape[-1], dtype=s.dtype) - products * np.swapaxes(turned, -1, -2)
    sign = np.linalg.det(u) * np.linalg.det(vh)
    return np.matmul(np.matmul(left, sign[..., None, None] * inner), right)


def _third(h: Array, g: Array, x: Array) -> Array:
    """The gradient of ``sum(h * cofactors_grad(g, x))`` by `x`; see Note [Singular matrices]."""
    inverse = inv(x)

    def traced(matrix: Array) -> Array:
        return unsqueeze(sum_(matrix * matrix_transpose(inverse), axis=(-2, -1)), axis=(-2, -1))

    first, second = matmul(inverse, g), matmul(inverse, h)
    both = matmul(g, second)
    a, b = traced(g), traced(h)
    turned = a * b - traced(both), -b, -a
    matrices = inverse, matmul(first, inverse), matmul(second, inverse)
    mixed = matmul(matmul(first, second) + matmul(second, first), inverse)
    whole = turned[0] * matrices[0] + turned[1] * matrices[1] + turned[2] * matrices[2] + mixed
    return unsqueeze(det(x), axis=(-2, -1)) * matrix_transpose(whole)


def _slogdet(x: Array, /) -> tuple[Array, Array]:
    """Sign and logarithm of the magnitude of determinants of real matrices (..., N, N)."""
    sign, logabsdet = np.linalg.slogdet(x)
    return sign, logabsdet


def _slogdet_vjp(g: tuple[Array | None, Array | None], x: Array) -> Array | None:
    if g[1] is None:
        return None
    return unsqueeze(g[1], axis=(-2, -1)) * matrix_transpose(inv(x))


cofactors: Op = define("cofactors", _cofactors, x=lambda g, x: cofactors_grad(g, x), jvp="rule", complex="holomorphic", cost=decomposed)
cofactors_grad: Op = define(
    "cofactors_grad", _cofactors_grad, y=lambda g, x: cofactors_grad(g, x), x=lambda g, y, x: _third(g, y, x),
    jvp="rule", complex="holomorphic", cost=decomposed
)
#: the determinants of matrices (..., N, N)
det: Op = define(
    "det", lambda x, /: np.linalg.det(x),
    x=lambda g, x: unsqueeze(g, axis=(-2, -1)) * cofactors(x), jvp=lambda t, x: sum_(t * cofactors(x), axis=(-2, -1)),
    complex="holomorphic", cost=decomposed, numpy=(np.linalg.det,)
)
slogdet_row = define(
    "slogdet", _slogdet, x=_slogdet_vjp, jvp=lambda t, x: (None, sum_(t * matrix_transpose(inv(x)), axis=(-2, -1))),
    outputs=2, differentiable_outputs=(1,), cost=cubic
)


@implements(np.linalg.slogdet)
def slogdet(x: Array, /) -> SlogdetResult:
    """Sign and logarithm of the magnitude of determinants."""
    return SlogdetResult(*slogdet_row(x))
