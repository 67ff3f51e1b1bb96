"""``ag.linalg``: the linear algebra extension of the standard. Matrices are the last two axes, leading axes are batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, Axis, as_tensor, as_tensors, axes_of, row
from aiograd.array_functions.manipulation import diagonal, matrix_transpose
from aiograd.array_functions.products import matmul, outer, tensordot, trace, vecdot
from aiograd.array_functions.searching import where
from aiograd.errors import ArgumentTypeError, ShapeError
from aiograd.ops import decomposition, matrix_functions, norms
from aiograd.ops import linalg as linalg_rows
from aiograd.ops.decomposition import EighResult, QRResult, SVDResult
from aiograd.ops.determinant import SlogdetResult, slogdet_row
from aiograd.ops.matrix_functions import EigResult, LstsqResult
from aiograd.running.lazy import on_first_use
from aiograd.tensors.core import host_array, make
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = [
    "cholesky", "cholesky_solve", "cond", "cross", "det", "diagonal", "eig", "eigh", "eigvals", "eigvalsh", "expm", "inv", "logdet", "lstsq",
    "matmul", "matrix_exp", "matrix_norm", "matrix_power", "matrix_rank", "matrix_transpose", "multi_dot", "norm", "outer", "pinv", "qr", "slogdet",
    "solve", "solve_triangular", "svd", "svdvals", "tensordot", "trace", "vecdot", "vector_norm", "EigResult", "EighResult", "LstsqResult",
    "QRResult",
    "SVDResult", "SlogdetResult",
]  # fmt: skip


def _matrix(name: str, x: Any, *, square: bool = False) -> Tensor:
    source = as_tensor(x)
    if source.ndim < 2 or (square and source.shape[-1] != source.shape[-2]):
        raise ShapeError(f"linalg.{name}() of shape {list(source.shape)}: expected {'square ' if square else ''}matrices in the last two axes")
    return source


def cholesky(x: ArrayLike, /, upper: bool = False) -> Tensor:
    """The lower triangular L with ``L @ L.H = x`` of positive definite matrices, or the upper ``L.H``."""
    return decomposition.cholesky(_matrix("cholesky", x, square=True), upper=upper)  # type: ignore[no-any-return]


def cross(x1: ArrayLike, x2: ArrayLike, /, *, axis: int = -1) -> Tensor:
    """Cross products of vectors of length 3 along an axis."""
    return linalg_rows.np_linalg_cross(*as_tensors(x1, x2), axis=axis)  # type: ignore[no-any-return]


def det(x: ArrayLike, /) -> Tensor:
    """Determinants of square matrices."""
    return call(row("det"), (_matrix("det", x, square=True),), {})  # type: ignore[no-any-return]


def eigh(x: ArrayLike, /) -> EighResult:
    """Eigenvalues, ascending, and eigenvectors of symmetric or Hermitian matrices given by their lower triangle."""
    return decomposition.eigh(_matrix("eigh", x, square=True))


def eigvalsh(x: ArrayLike, /) -> Tensor:
    """Eigenvalues, ascending, of symmetric or Hermitian matrices given by their lower triangle."""
    return call(row("eigvalsh"), (_matrix("eigvalsh", x, square=True),), {})  # type: ignore[no-any-return]


def inv(x: ArrayLike, /) -> Tensor:
    """Inverses of square matrices."""
    return call(row("inv"), (_matrix("inv", x, square=True),), {})  # type: ignore[no-any-return]


def matrix_norm(x: ArrayLike, /, ord: int | float | str | None = "fro", *, keepdims: bool = False) -> Tensor:
    """Norms of matrices: "fro", "nuc", 1, -1, 2, -2, inf or -inf."""
    return norms.matrix_norm(_matrix("matrix_norm", x), keepdims=keepdims, ord="fro" if ord is None else ord)  # type: ignore[no-any-return]


def matrix_power(x: ArrayLike, n: int, /) -> Tensor:
    """Matrices to an integer power; of their inverses when it is negative.

    Raises:
        ArgumentTypeError: a power that is no integer.
    """
    if not isinstance(n, (int, np.integer)):
        raise ArgumentTypeError(f"matrix_power(n={n!r}): expected an int")
    return decomposition.matrix_power(_matrix("matrix_power", x, square=True), n)  # type: ignore[no-any-return]


def matrix_rank(x: ArrayLike, /, *, rtol: ArrayLike | None = None) -> Tensor:
    """The number of singular values above `rtol` times the largest, 0 of an empty matrix; without a gradient.

    Args:
        x: (..., M, N).
        rtol: a number, or one for each matrix, of a shape that broadcasts to (...); None: max(M, N) times the precision of the dtype.

    Returns:
        int64, (...).
    """
    source = _matrix("matrix_rank", x).detach()
    values: Tensor = svdvals(source)
    limit = max(source.shape[-2:]) * float(np.finfo(values.dtype).eps) if rtol is None else as_tensor(rtol).detach().unsqueeze(-1)
    # values descend; a slice is there also when there are none
    return call(row("count_nonzero"), (values > values[..., :1] * limit,), {"axis": -1})  # type: ignore[no-any-return]


def multi_dot(arrays: list[ArrayLike], /) -> Tensor:
    """The product of several matrices, in the cheaper direction."""
    return linalg_rows.np_multi_dot(as_tensors(*arrays))  # type: ignore[no-any-return]


def norm(x: ArrayLike, /, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """numpy's ``linalg.norm``: of vectors or matrices, as `axis` and `ord` say."""
    return norms.norm(as_tensor(x), ord=ord, axis=axes_of(axis), keepdims=keepdims)  # type: ignore[no-any-return]


def pinv(x: ArrayLike, /, rtol: float | None = None) -> Tensor:
    """Moore-Penrose pseudo-inverses of matrices."""
    return call(row("pinv"), (_matrix("pinv", x),), {"rtol": rtol})  # type: ignore[no-any-return]


def qr(x: ArrayLike, /, mode: str = "reduced") -> QRResult:
    """``x = Q @ R`` with orthonormal columns in Q and an upper triangular R."""
    matrix = _matrix("qr", x)
    if mode == "complete" and matrix.shape[-2] > matrix.shape[-1] and not matrix.requires_grad:  # nothing is asked of a derivative
        return QRResult(*map(make, np.linalg.qr(host_array(matrix), "complete")))
    return decomposition.qr(matrix, mode=mode)


def slogdet(x: ArrayLike, /) -> SlogdetResult:
    """Signs and logarithms of the magnitudes of determinants."""
    return SlogdetResult(*slogdet_row(_matrix("slogdet", x, square=True)))


def solve(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """The solution of ``x1 @ out = x2``."""
    first, second = as_tensors(x1, x2)
    return call(row("solve"), (_matrix("solve", first, square=True), second), {})  # type: ignore[no-any-return]


def svd(x: ArrayLike, /, full_matrices: bool = True) -> SVDResult:
    """The singular value decomposition ``x = U @ diag(S) @ Vh``, S descending."""
    return decomposition.svd(_matrix("svd", x), full_matrices=full_matrices)


def svdvals(x: ArrayLike, /) -> Tensor:
    """Singular values, descending."""
    return call(row("svdvals"), (_matrix("svdvals", x),), {})  # type: ignore[no-any-return]


def vector_norm(x: ArrayLike, /, ord: float = 2, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Norms of vectors along axes: Euclidean, or of order 0, 1, p, inf, -inf."""
    return norms.vector_norm(as_tensor(x), axis=axes_of(axis), keepdims=keepdims, ord=ord)  # type: ignore[no-any-return]


# Beyond the standard.


def eig(x: ArrayLike, /) -> EigResult:
    """Eigenvalues and eigenvectors (in columns, of length 1) of square matrices, always complex; no order is promised."""
    return EigResult(*matrix_functions.eig_row(_matrix("eig", x, square=True)))


def eigvals(x: ArrayLike, /) -> Tensor:
    """Eigenvalues of square matrices, always complex; no order is promised."""
    return call(row("eigvals"), (_matrix("eigvals", x, square=True),), {})  # type: ignore[no-any-return]


def expm(x: ArrayLike, /) -> Tensor:
    """The exponentials of square matrices, ``I + x + x @ x / 2 + ...``."""
    return call(row("expm"), (_matrix("expm", x, square=True),), {})  # type: ignore[no-any-return]


#: PyTorch's name
matrix_exp = expm


def solve_triangular(x1: ArrayLike, x2: ArrayLike, /, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """The solution of ``x1 @ out = x2`` (``out @ x1 = x2`` unless `left`) of matrices of which one triangle is read.

    Args:
        x1: (..., N, N); with `unitriangular` its diagonal counts as ones.
        x2: (..., N, K), of (..., K, N) unless `left`.
        upper: the upper triangle is read, else the lower one.
        left: the unknown stands on the right of `x1`.
        unitriangular: see `x1`.

    Returns:
        The solution, of the shape of `x2`.
    """
    first, second = as_tensors(x1, x2)
    matrix = _matrix("solve_triangular", first, square=True)
    return matrix_functions.solve_triangular(matrix, second, upper=upper, left=left, unitriangular=unitriangular)  # type: ignore[no-any-return]


def cholesky_solve(x1: ArrayLike, x2: ArrayLike, /, upper: bool = False) -> Tensor:
    """The solution of ``A @ out = x1``, `x2` being the Cholesky factor of A, lower or `upper`."""
    right, factor = as_tensors(x1, x2)
    return matrix_functions.cholesky_solve(right, _matrix("cholesky_solve", factor, square=True), upper=upper)  # type: ignore[no-any-return]


def lstsq(x1: ArrayLike, x2: ArrayLike, /, rcond: float | None = None) -> LstsqResult:
    """The shortest of the solutions of ``x1 @ out = x2`` with the smallest squared error, the error, the rank and the singular values."""
    first, second = as_tensors(x1, x2)
    return matrix_functions.lstsq(_matrix("lstsq", first), second, rcond)


def cond(x: ArrayLike, /, ord: Any = None) -> Tensor:
    """Condition numbers: the largest singular value over the smallest, or the product of the norms of the matrix and its inverse."""
    return matrix_functions.np_cond(_matrix("cond", x), ord)  # type: ignore[no-any-return]


def logdet(x: ArrayLike, /) -> Tensor:
    """The logarithms of positive determinants."""
    sign, logabsdet = slogdet(x)
    return where(sign > 0, logabsdet, np.nan)
