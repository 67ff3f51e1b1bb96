"""Eigenvalues of general matrices, the matrix exponential, triangular systems and least squares; leading axes are batches.

Note [Complex eigenvalues]
    Eigenvalues and eigenvectors of a general matrix are complex, also where all happen to be real (numpy's are real then), so that their dtype
    depends on dtypes alone. Eigenvectors are of length 1; their phase is arbitrary, and gradients are right for functions that do not depend
    on it.

Source: the rules of `eig` follow C. Boeddeker et al., On the computation of complex-valued gradients (2017), the gradient of `expm`
R. Mathias, A chain rule for matrix functions (1996): the derivative stands in a corner of the exponential of a block matrix.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from aiograd.errors import ShapeError
from aiograd.ops.creation import zeros_like
from aiograd.ops.decomposition import adjoint, cubic, diagonal_matrix, gaps, pinv, quotient, solve, svdvals
from aiograd.ops.elementwise import conj
from aiograd.ops.indexing import getitem
from aiograd.ops.joining import cat
from aiograd.ops.linalg import matmul
from aiograd.ops.op import Op, define, implements
from aiograd.ops.reduction import sum_
from aiograd.ops.shape import diagonal, matrix_transpose, tril, triu, unsqueeze
from aiograd.running.types import Array


class EigResult(NamedTuple):
    """The result of `eig`.

    >>> result = ag.linalg.eig(ag.tensor([[2.0, 0.0], [0.0, 3.0]]))
    >>> result.eigenvalues
    tensor([2.+0.j, 3.+0.j], dtype=complex64)
    """

    eigenvalues: Array
    eigenvectors: Array


class LstsqResult(NamedTuple):
    """The result of `lstsq`.

    >>> result = ag.linalg.lstsq(ag.tensor([[1.0, 0.0], [0.0, 2.0]]), ag.tensor([1.0, 4.0]))
    >>> result.solution
    tensor([1., 2.])
    """

    solution: Array
    residuals: Array
    rank: Array
    singular_values: Array


def _complex_of(x: Array) -> Any:
    return np.result_type(x.dtype, np.complex64)


def _eig(x: Array, /) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors (in columns, of length 1) of square matrices, complex; see Note [Complex eigenvalues]."""
    values, vectors = np.linalg.eig(x)
    return values.astype(_complex_of(x), copy=False), vectors.astype(_complex_of(x), copy=False)


def _eig_vjp(g: tuple[Array | None, Array | None], out: tuple[Array, Array]) -> Array | None:
    values, vectors = out
    inner = None if g[0] is None else diagonal_matrix(g[0])
    if g[1] is not None:
        turned = matmul(adjoint(vectors), g[1])
        # lengths stay 1: what lies along an eigenvector changes nothing
        along = diagonal_matrix(np.real(diagonal(turned)) + 0j * np.real(diagonal(turned)))
        turned = turned - matmul(matmul(adjoint(vectors), vectors), along)
        gap = gaps(conj(unsqueeze(values, axis=-2) - unsqueeze(values, axis=-1)), values)
        mixed = quotient(turned, gap)
        mixed = tril(mixed, k=-1) + triu(mixed, k=1)
        inner = mixed if inner is None else inner + mixed
    if inner is None:
        return None
    return solve(adjoint(vectors), matmul(inner, adjoint(vectors)))


def _eigvals(x: Array, /) -> Array:
    """Eigenvalues of square matrices, complex; see Note [Complex eigenvalues]."""
    return np.linalg.eigvals(x).astype(_complex_of(x), copy=False)


def _eigvals_vjp(g: Array, x: Array) -> Array:
    vectors = eig_row(x)[1]
    return solve(adjoint(vectors), matmul(diagonal_matrix(g), adjoint(vectors)))


def _eigvals_jvp(t: Array, x: Array) -> Array:
    vectors = eig_row(x)[1]
    return diagonal(solve(vectors, matmul(t, vectors)))


#: Padé's approximant of order 13 to the exponential, (26 - k)! / ((13 - k)! k!) over the term of k = 0
_PADE = tuple(math.comb(13, k) / math.perm(26, k) for k in range(14))
#: 1-norm of the matrices for which it has full precision
_PADE_LIMIT = 5.4


def _expm(x: Array, /) -> Array:
    """The exponential of square matrices, by scaling and squaring with Padé's approximant of order 13."""
    if x.dtype.kind not in "fc":
        x = x.astype(np.float64)
    wanted = x.dtype
    x = x.astype(np.result_type(wanted, np.float32), copy=False)
    if not x.size:
        return x.astype(wanted)
    norm = np.max(np.sum(np.abs(x), -2), initial=0.0)
    squarings = max(0, math.ceil(math.log2(norm / _PADE_LIMIT))) if 0 < norm < np.inf else 0
    a = x / 2.0**squarings if squarings else x
    square = a @ a
    odd = even = np.zeros_like(a)
    power = np.broadcast_to(np.eye(a.shape[-1], dtype=a.dtype), a.shape)
    for k in range(0, 14, 2):
        even, odd = even + power * a.dtype.type(_PADE[k]), odd + power * a.dtype.type(_PADE[k + 1])
        power = power @ square
    odd = a @ odd
    out = np.linalg.solve(even - odd, even + odd)
    for _ in range(squarings):
        out = out @ out
    return out.astype(wanted, copy=False)


def _expm_jvp(t: Array, x: Array) -> Array:
    n = x.shape[-1]
    t, x = (v if v.dtype == np.result_type(t, x) else v + zeros_like(v, dtype=np.result_type(t, x)) for v in (t, x))
    block = cat(cat(x, t, axis=-1), cat(zeros_like(x), x, axis=-1), axis=-2)
    return getitem(expm(block), index=(..., slice(0, n), slice(n, None)))


eig_row: Op = define("eig", _eig, x=_eig_vjp, outputs=2, complex="explicit", cost=cubic)
eigvals = define("eigvals", _eigvals, x=_eigvals_vjp, jvp=_eigvals_jvp, complex="explicit", cost=cubic, numpy=(np.linalg.eigvals,))
expm: Op = define("expm", _expm, x=lambda g, x: _expm_jvp(g, matrix_transpose(x)), jvp=_expm_jvp, complex="holomorphic", cost=cubic)


@implements(np.linalg.eig)
def eig(x: Array, /) -> EigResult:
    """Eigenvalues and eigenvectors of general matrices; see Note [Complex eigenvalues]."""
    return EigResult(*eig_row(x))


def solve_triangular(x1: Array, x2: Array, /, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Array:
    """The solution of ``x1 @ out = x2`` (of ``out @ x1 = x2`` unless `left`), for which one triangle of `x1` is read."""
    if not left:
        turned = solve_triangular(matrix_transpose(x1), matrix_transpose(x2), upper=not upper, unitriangular=unitriangular)
        return matrix_transpose(turned)
    k = 1 if unitriangular else 0
    triangle = triu(x1, k=k) if upper else tril(x1, k=-k)
    if unitriangular:
        triangle = triangle + np.eye(x1.shape[-1], dtype=x1.dtype)
    return solve(triangle, x2)


def cholesky_solve(x1: Array, x2: Array, /, *, upper: bool = False) -> Array:
    """The solution of ``A @ out = x1`` of the matrix with the Cholesky factor `x2`, ``A = L @ L.H``, lower (or upper, ``A = U.H @ U``)."""
    lower = adjoint(x2) if upper else x2
    return solve_triangular(adjoint(lower), solve_triangular(lower, x1, upper=False), upper=True)


def lstsq(a: Array, b: Array, rcond: Any = None) -> LstsqResult:
    """The shortest of the solutions of ``a @ x = b`` with the smallest squared error, by the pseudo-inverse."""
    if len(a.shape) < 2 or a.shape[-2] != b.shape[-1 if len(b.shape) == 1 else -2]:
        raise ShapeError(f"lstsq: shapes {list(a.shape)} and {list(b.shape)}: expected matrices with as many rows")
    rtol = max(a.shape[-2:]) * float(np.finfo(a.dtype).eps) if rcond is None else rcond
    solution = matmul(pinv(a, rtol=rtol), b)
    values = svdvals(a)
    rank = sum_(values > getitem(values, index=(..., slice(0, 1))) * rtol, axis=-1)
    error = matmul(a, solution) - b
    return LstsqResult(solution, sum_(np.real(error * conj(error)), axis=-1 if len(b.shape) == 1 else -2), rank, values)


@implements(np.linalg.lstsq)
def np_lstsq(a: Array, b: Array, rcond: Any = None) -> tuple[Array, Array, Array, Array]:
    """numpy's ``linalg.lstsq``: no residuals where there are no more equations than unknowns, a vector of one for one right-hand side."""
    solution, residuals, rank, values = lstsq(a, b, rcond)
    if a.shape[-2] <= a.shape[-1]:
        residuals = zeros_like(residuals, shape=(0,))
    elif len(b.shape) == 1:
        residuals = unsqueeze(residuals, axis=0)
    return solution, residuals, rank, values


@implements(np.linalg.cond)
def np_cond(x: Array, p: Any = None) -> Array:
    """numpy's ``linalg.cond``."""
    if p in (None, 2, -2):
        values = svdvals(x)
        first, last = getitem(values, index=(..., 0)), getitem(values, index=(..., -1))
        return last / first if p == -2 else first / last
    return np.linalg.norm(x, p, (-2, -1)) * np.linalg.norm(np.linalg.inv(x), p, (-2, -1))
