"""Products of matrices and vectors and Einstein summation, with the standard's signatures; `linalg` has the rest of linear algebra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.array_functions.conversion import ArrayLike, as_tensor, as_tensors, row, two
from aiograd.errors import ShapeError
from aiograd.ops import einsum as einsum_rows
from aiograd.ops import linalg as linalg_rows
from aiograd.ops import windows
from aiograd.tensors.constants import checked_dtype
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

__all__ = [
    "matmul", "tensordot", "vecdot", "einsum", "dot", "inner", "outer", "kron", "trace", "vdot", "convolve", "correlate",
]  # fmt: skip

_matmul = two("matmul")


def matmul(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """Matrix products; leading axes broadcast, vectors are rows on the left and columns on the right."""
    return _matmul(*as_tensors(x1, x2))


def tensordot(x1: ArrayLike, x2: ArrayLike, /, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Tensor:
    """Sums of products over pairs of axes: so many at the end of `x1` and start of `x2`, or the axes of two lists."""
    return einsum_rows.tensordot(*as_tensors(x1, x2), axes=axes)  # type: ignore[no-any-return]


def vecdot(x1: ArrayLike, x2: ArrayLike, /, *, axis: int = -1) -> Tensor:
    """Dot products of vectors along an axis, counted from the end; the first is conjugated."""
    if axis >= 0:
        raise ShapeError(f"vecdot(axis={axis}): expected an axis counted from the end, -1 for the last")
    return call(row("vecdot"), tuple(as_tensors(x1, x2)), {"axis": axis})  # type: ignore[no-any-return]


def einsum(subscripts: Any, /, *operands: Any) -> Tensor:
    """Einstein summation in numpy's notation, such as ``"bij,bjk->bik"``, or with lists of axes behind the operands."""
    text, *arrays = einsum_rows.as_string(subscripts, *operands)
    if len(arrays) == 1 and isinstance(arrays[0], (tuple, list)) and "," in text:  # PyTorch also takes the operands as one list
        arrays = list(arrays[0])
    return einsum_rows.einsum(text, *as_tensors(*arrays))  # type: ignore[no-any-return]


def dot(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """numpy's ``dot``: of vectors the dot product, of matrices the matrix product."""
    return linalg_rows.np_dot(*as_tensors(x1, x2))  # type: ignore[no-any-return]


def inner(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """Sums of products over the last axes."""
    return linalg_rows.np_inner(*as_tensors(x1, x2))  # type: ignore[no-any-return]


def outer(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """All products of the elements of two vectors."""
    return linalg_rows.outer(*as_tensors(x1, x2))  # type: ignore[no-any-return]


def kron(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """Kronecker product: `x2` scaled by each element of `x1`."""
    return linalg_rows.np_kron(*as_tensors(x1, x2))  # type: ignore[no-any-return]


def trace(x: ArrayLike, /, offset: int = 0, *, dtype: Any = None) -> Tensor:
    """Sums of the diagonals of matrices."""
    wanted = None if dtype is None else checked_dtype(dtype)
    return linalg_rows.trace(as_tensor(x), offset=offset, dtype=wanted)  # type: ignore[no-any-return]


def vdot(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """The dot product of the flattened arrays, the first conjugated."""
    return linalg_rows.np_vdot(*as_tensors(x1, x2))  # type: ignore[no-any-return]


def convolve(x1: ArrayLike, x2: ArrayLike, /, mode: str = "full") -> Tensor:
    """The convolution of two vectors: "full", "same" (as long as the longer one) or "valid" (where they overlap completely)."""
    return windows.np_convolve(*as_tensors(x1, x2), mode)  # type: ignore[no-any-return]


def correlate(x1: ArrayLike, x2: ArrayLike, /, mode: str = "valid") -> Tensor:
    """Sums of products of two vectors at every distance; the second is conjugated. Modes as in `convolve`."""
    return windows.np_correlate(*as_tensors(x1, x2), mode)  # type: ignore[no-any-return]
