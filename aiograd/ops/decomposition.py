"""Inverses and factorisations of matrices, in the last two axes; leading axes are batches.

Note [Symmetric matrices]
    `cholesky`, `eigh` and `eigvalsh` read one triangle of their argument, which stands for a symmetric (Hermitian) matrix. Their gradients
    are those with respect to that matrix, spread evenly over both triangles.

Note [Free choices]
    Eigenvectors and singular vectors are determined up to a sign (a phase, if complex), and within the space of equal values not at
    all. The gradient of a function that does not depend on such choices is right; it does not exist where values coincide and the
    vectors matter.

Source: the rules follow M. Giles, An extended collection of matrix derivative results (2008); Roberts and Roberts, QR and LQ
decomposition matrix backpropagation (2020); Golub and Pereyra for the pseudo-inverse (1973).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from aiograd.errors import NoRuleError, refused
from aiograd.ops.creation import ones_like, zeros_like
from aiograd.ops.elementwise import conj
from aiograd.ops.indexing import getitem
from aiograd.ops.joining import cat
from aiograd.ops.linalg import matmul
from aiograd.ops.masking import where
from aiograd.ops.op import Op, answer, define, implements
from aiograd.ops.reduction import sum_
from aiograd.ops.shape import diagonal, diagonal_adjoint, matrix_transpose, tril, triu, unsqueeze
from aiograd.running.types import Array, Shape


class EighResult(NamedTuple):
    """The result of `eigh`.

    >>> result = ag.linalg.eigh(ag.tensor([[2.0, 0.0], [0.0, 3.0]]))
    >>> result.eigenvalues
    tensor([2., 3.])
    """

    eigenvalues: Array
    eigenvectors: Array


class SVDResult(NamedTuple):
    """The result of `svd`.

    >>> result = ag.linalg.svd(ag.tensor([[3.0, 0.0], [0.0, 2.0]]))
    >>> result.S
    tensor([3., 2.])
    """

    U: Array
    S: Array
    Vh: Array


class QRResult(NamedTuple):
    """The result of `qr`.

    >>> result = ag.linalg.qr(ag.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> (result.Q @ result.R).round()
    tensor([[1., 2.],
            [3., 4.]])
    """

    Q: Array
    R: Array


def adjoint(x: Array) -> Array:
    """The conjugate transpose."""
    return conj(matrix_transpose(x))


def diagonal_matrix(x: Array) -> Array:
    """Diagonal matrices (..., N, N) of vectors (..., N)."""
    return diagonal_adjoint(x, shape=(*x.shape, x.shape[-1]))


def _hermitian(x: Array) -> Array:
    return (x + adjoint(x)) * 0.5


def cubic(output: Shape, inputs: tuple[Shape, ...]) -> float:
    """Nanoseconds for a handful of cubic operations."""
    shape = inputs[0]
    return 1000.0 + 0.5 * math.prod(shape) * min(shape[-2:], default=1)


def decomposed(output: Shape, inputs: tuple[Shape, ...]) -> float:
    """Nanoseconds where a singular value decomposition is among them."""
    return 4.0 * cubic(output, inputs)


# Inverse and solution. Both are holomorphic: the engine sees to the conjugates.


def _inv(x: Array, /) -> Array:
    """The inverses of matrices (..., N, N)."""
    try:
        return np.linalg.inv(x)
    except np.linalg.LinAlgError as error:
        raise refused("inv", (x,), error) from error


def _inv_vjp(g: Array, out: Array) -> Array:
    turned = matrix_transpose(out)
    return -matmul(matmul(turned, g), turned)


def _solve(x1: Array, x2: Array, /) -> Array:
    """The solution of ``x1 @ out = x2``.

    Args:
        x1: (..., N, N).
        x2: (..., N, K), or one vector (N,).
    """
    try:
        return np.linalg.solve(x1, x2)
    except np.linalg.LinAlgError as error:
        raise refused("solve", (x1, x2), error) from error


def _solve_vjp(g: Array, x1: Array, x2_shape: Shape, out: Array, needs: tuple[bool, bool]) -> tuple[Array | None, Array]:
    turned = matrix_transpose(x1)
    if len(x2_shape) > 1:
        g2 = solve(turned, g)
        return (-matmul(g2, matrix_transpose(out)) if needs[0] else None), g2
    column = solve(turned, unsqueeze(g, axis=-1))
    g2 = getitem(column, index=(..., 0))
    return (-(column * unsqueeze(out, axis=-2)) if needs[0] else None), g2


def _solve_jvp(t: tuple[Array | None, Array | None], x1: Array, x2_shape: Shape, out: Array) -> Array:
    vector = len(x2_shape) == 1
    right = None if t[1] is None else unsqueeze(t[1], axis=-1) if vector else t[1]
    if t[0] is not None:
        moved = -matmul(t[0], unsqueeze(out, axis=-1) if vector else out)
        right = moved if right is None else right + moved
    solved = solve(x1, right)
    return getitem(solved, index=(..., 0)) if vector else solved


inv: Op = define("inv", _inv, x=_inv_vjp, jvp=lambda t, out: -matmul(matmul(out, t), out), complex="holomorphic", cost=cubic, numpy=(np.linalg.inv,))
solve: Op = define("solve", _solve, joint={("x1", "x2"): _solve_vjp}, jvp=_solve_jvp, complex="holomorphic", cost=cubic, numpy=(np.linalg.solve,))

# Factorisations. See Note [Symmetric matrices].


def _cholesky_vjp(g: Array, out: Array) -> Array:
    turned = adjoint(out)
    inner = tril(matmul(turned, g))
    inner = (inner + tril(inner, k=-1)) * 0.5  # the diagonal counts half
    return _hermitian(adjoint(solve(turned, adjoint(solve(turned, inner)))))


def _cholesky_jvp(t: Array, out: Array) -> Array:
    inner = tril(adjoint(solve(out, adjoint(solve(out, _hermitian(t))))))
    return matmul(out, (inner + tril(inner, k=-1)) * 0.5)


#: the lower triangular L with ``L @ L.H = x``, for positive definite matrices (..., N, N) given by their lower triangle
cholesky_row = define("cholesky", lambda x, /: np.linalg.cholesky(x), x=_cholesky_vjp, jvp=_cholesky_jvp, complex="explicit", cost=cubic)


def cholesky(x: Array, /, *, upper: bool = False) -> Array:
    """The lower triangular L with ``L @ L.H = x``, or the upper triangular ``L.H``."""
    if upper:
        return adjoint(cholesky_row(adjoint(x)))
    return cholesky_row(x)


def _eigh(x: Array, /) -> tuple[Array, Array]:
    """Eigenvalues, ascending, and eigenvectors (in columns) of Hermitian matrices (..., N, N) given by their lower triangle."""
    values, vectors = np.linalg.eigh(x)
    return values, vectors


def _eigh_vjp(g: tuple[Array | None, Array | None], out: tuple[Array, Array]) -> Array | None:
    values, vectors = out
    inner = None if g[0] is None else diagonal_matrix(g[0])
    if g[1] is not None:
        gap = gaps(unsqueeze(values, axis=-2) - unsqueeze(values, axis=-1), values)
        mixed = quotient(matmul(adjoint(vectors), g[1]), gap)
        inner = _add(inner, tril(mixed, k=-1) + triu(mixed, k=1))
    if inner is None:
        return None
    return _hermitian(matmul(matmul(vectors, inner), adjoint(vectors)))


def gaps(difference: Array, values: Array) -> Array:
    """Differences of eigenvalues or the like with ones on the diagonal, where they are zero."""
    return difference + diagonal_matrix(ones_like(values))


def quotient(numerator: Array, denominator: Array) -> Array:
    """``numerator / denominator``, 0 where both are: coinciding values do no harm to gradients that do not ask about their vectors."""
    neither = np.logical_and(numerator == 0, denominator == 0)
    return numerator / where(neither, 1, denominator)


def _add(total: Array | None, part: Array) -> Array:
    return part if total is None else total + part


def _eigvalsh_vjp(g: Array, x: Array) -> Array:
    vectors = eigh_row(x)[1]
    return matmul(vectors * unsqueeze(g, axis=-2), adjoint(vectors))


def _eigh_jvp(t: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
    values, vectors = out
    inner = matmul(matmul(adjoint(vectors), _hermitian(t)), vectors)
    mixed = quotient(inner, gaps(unsqueeze(values, axis=-2) - unsqueeze(values, axis=-1), values))
    return np.real(diagonal(inner)), matmul(vectors, tril(mixed, k=-1) + triu(mixed, k=1))


def _eigvalsh_jvp(t: Array, x: Array) -> Array:
    vectors = eigh_row(x)[1]
    return np.real(sum_(conj(vectors) * matmul(_hermitian(t), vectors), axis=-2))


eigh_row: Op = define("eigh", _eigh, x=_eigh_vjp, outputs=2, jvp=_eigh_jvp, complex="explicit", cost=cubic)
#: eigenvalues, ascending, of Hermitian matrices (..., N, N) given by their lower triangle
eigvalsh = define("eigvalsh", lambda x, /: np.linalg.eigvalsh(x), x=_eigvalsh_vjp, jvp=_eigvalsh_jvp, complex="explicit", cost=decomposed)


def eigh(x: Array, /) -> EighResult:
    """Eigenvalues and eigenvectors of Hermitian matrices; see Note [Free choices]."""
    return EighResult(*eigh_row(x))


def _svd(x: Array, /, full_matrices: bool = False) -> tuple[Array, Array, Array]:
    """The singular value decomposition ``x = U @ diag(S) @ Vh`` of matrices (..., M, N), S descending.

    Args:
        x: (..., M, N).
        full_matrices: square U and Vh, with additional vectors that carry no gradient.
    """
    u, s, vh = np.linalg.svd(x, full_matrices)
    return u, s, vh


def _svd_vjp(
    g: tuple[Array | None, Array | None, Array | None], x_shape: Shape, out: tuple[Array, Array, Array], full_matrices: bool
) -> Array | None:
    u, s, vh = out
    gu, gs, gvh = g
    rows, columns = x_shape[-2:]
    size = min(rows, columns)
    if full_matrices and rows != columns:
        u, vh = getitem(u, index=(..., slice(size))), getitem(vh, index=(..., slice(size), slice(None)))
        gu = None if gu is None else getitem(gu, index=(..., slice(size)))
        gvh = None if gvh is None else getitem(gvh, index=(..., slice(size), slice(None)))
    uh, v = adjoint(u), adjoint(vh)
    row, column = unsqueeze(s, axis=-2), unsqueeze(s, axis=-1)
    gap = gaps((row - column) * (row + column), s)
    inner = None if gs is None else diagonal_matrix(gs)
    parts = []
    if gu is not None:
        turned = matmul(uh, gu)
        skew = turned - adjoint(turned)
        inner = _add(inner, quotient(skew, gap) * row)
        if u.dtype.kind == "c":  # the phase that u and v share
            inner = _add(inner, diagonal_matrix(quotient(diagonal(skew), 2.0 * s)))
        if rows > size:
            parts.append(matmul(quotient(gu - matmul(u, turned), row), vh))
    if gvh is not None:
        gv = adjoint(gvh)
        turned = matmul(vh, gv)
        inner = _add(inner, column * quotient(turned - adjoint(turned), gap))
        if columns > size:
            parts.append(matmul(u, adjoint(quotient(gv - matmul(v, turned), row))))
    total = None if inner is None else matmul(matmul(u, inner), vh)
    for part in parts:
        total = _add(total, part)
    return total


def _svdvals(x: Array, /) -> Array:
    """The singular values of matrices (..., M, N), descending."""
    return np.linalg.svd(x, compute_uv=False)


def _svdvals_vjp(g: Array, x: Array) -> Array:
    u, _, vh = svd_row(x)
    return matmul(u * unsqueeze(g, axis=-2), vh)


def _svdvals_jvp(t: Array, x: Array) -> Array:
    u, _, vh = svd_row(x)
    return np.real(sum_(conj(u) * matmul(t, adjoint(vh)), axis=-2))


svd_row: Op = define("svd", _svd, x=_svd_vjp, outputs=3, complex="explicit", cost=cubic)
svdvals = define("svdvals", _svdvals, x=_svdvals_vjp, jvp=_svdvals_jvp, complex="explicit", cost=decomposed, numpy=(np.linalg.svdvals,))


def svd(x: Array, /, *, full_matrices: bool = True) -> SVDResult:
    """The singular value decomposition; see Note [Free choices]."""
    return SVDResult(*svd_row(x, full_matrices=full_matrices))


def _qr(x: Array, /) -> tuple[Array, Array]:
    """``x = Q @ R`` for matrices (..., M, N), Q (..., M, K) with orthonormal columns, R (..., K, N) upper triangular, K = min(M, N)."""
    q, r = np.linalg.qr(x)
    return q, r


def _qr_vjp(g: tuple[Array | None, Array | None], x_shape: Shape, out: tuple[Array, Array]) -> Array | None:
    q, r = out
    gq, gr = g
    rows, columns = x_shape[-2:]
    if gq is None and gr is None:
        return None
    if gr is None:
        gr = zeros_like(r)
    if rows >= columns:
        return _qr_tall(q, r, gq, gr)
    # a square part, and the columns beyond it, where R is Q.H @ x
    square, beyond = (..., slice(rows)), (..., slice(rows, None))
    g_beyond, r_beyond = getitem(gr, index=beyond), getitem(r, index=beyond)
    through = matmul(matmul(q, r_beyond), adjoint(g_beyond))
    left = _qr_tall(q, getitem(r, index=square), _add(gq, through), getitem(gr, index=square))
    return cat(left, matmul(q, g_beyond), axis=-1)


def _qr_tall(q: Array, r: Array, gq: Array | None, gr: Array) -> Array:
    inner = matmul(r, adjoint(gr))
    if gq is not None:
        inner = inner - matmul(adjoint(gq), q)
    lower = tril(inner, k=-1)
    mirrored = lower + adjoint(lower) + diagonal_matrix(np.real(diagonal(inner)))
    numerator = _add(gq, matmul(q, mirrored))
    return adjoint(solve(r, adjoint(numerator)))  # numerator @ inverse(R.H)


qr_row = define("qr", _qr, x=_qr_vjp, outputs=2, complex="explicit", cost=cubic)


def qr(x: Array, /, *, mode: str = "reduced") -> QRResult:
    """The QR decomposition; ``complete`` only where it is the reduced one (no more rows than columns)."""
    if mode == "complete" and x.shape[-2] > x.shape[-1]:
        raise NoRuleError(
            f"qr: mode='complete' of a matrix with shape {tuple(x.shape)} has no derivative, its additional columns are arbitrary; use 'reduced'"
        )
    if mode not in ("reduced", "complete"):
        raise NoRuleError(f"qr: mode is {mode!r}, expected 'reduced' or 'complete'")
    return QRResult(*qr_row(x))


def _pinv(x: Array, /, rtol: Any = None) -> Array:
    """The pseudo-inverses of matrices (..., M, N), of constant rank.

    Args:
        x: (..., M, N).
        rtol: singular values below this fraction of the largest count as zero; None: max(M, N) times the precision of the dtype.
    """
    return np.linalg.pinv(x, rcond=max(x.shape[-2:]) * np.finfo(x.dtype).eps if rtol is None else rtol)


def _pinv_vjp(g: Array, x: Array, out: Array) -> Array:
    turned, gh = adjoint(out), adjoint(g)
    direct = matmul(matmul(turned, g), turned)
    left = matmul(matmul(gh, out), turned)
    left = left - matmul(x, matmul(out, left))
    right = matmul(turned, matmul(out, gh))
    right = right - matmul(matmul(right, out), x)
    return left + right - direct


pinv = define("pinv", _pinv, x=_pinv_vjp, complex="explicit", cost=cubic)


def matrix_power(x: Array, n: int, /) -> Array:
    """Matrices (..., N, N) to the integer power `n`, by repeated squaring; of their inverses when it is negative."""
    if n < 0:
        x, n = inv(x), -n
    if n == 0:
        return x * 0 + np.eye(x.shape[-1], dtype=x.dtype)
    result = None
    while n:
        if n & 1:
            result = x if result is None else matmul(result, x)
        n >>= 1
        if n:
            x = matmul(x, x)
    return result


# numpy's functions, with numpy's arguments


@implements(np.linalg.pinv)
def np_pinv(a: Array, rcond: Any = None, hermitian: bool = False, *, rtol: Any = None) -> Array:
    """numpy's ``linalg.pinv``."""
    rtol = None if rtol is np._NoValue else rtol
    return pinv(a, rtol=rcond if rtol is None else rtol)


answer({
    np.linalg.cholesky: lambda a, /, *, upper=False: cholesky(a, upper=upper),
    np.linalg.eigh: lambda a, UPLO="L": eigh(a if UPLO.upper() == "L" else adjoint(a)),
    np.linalg.eigvalsh: lambda a, UPLO="L": eigvalsh(a if UPLO.upper() == "L" else adjoint(a)),
    np.linalg.svd: lambda a, full_matrices=True, compute_uv=True, hermitian=False: svd(a, full_matrices=full_matrices) if compute_uv else svdvals(a),
    np.linalg.qr: lambda a, mode="reduced": qr(a).R if mode == "r" else qr(a, mode=mode),  # for modes ``reduced``, ``complete`` and ``r``
    np.linalg.matrix_power: lambda a, n: matrix_power(a, n),
})  # fmt: skip
