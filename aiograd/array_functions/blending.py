"""Sums of products and interpolations under PyTorch's names: each is a composition of arithmetic."""

from __future__ import annotations

from aiograd.array_functions.conversion import ArrayLike, as_tensors, scaled
from aiograd.array_functions.elementwise import add
from aiograd.array_functions.products import matmul, outer
from aiograd.tensors.tensor import Tensor

__all__ = ["addbmm", "addcdiv", "addcmul", "addmm", "addmv", "addr", "baddbmm", "lerp"]


def lerp(x: ArrayLike, end: ArrayLike, weight: ArrayLike, /) -> Tensor:
    """``x + weight * (end - x)``."""
    start, stop, share = as_tensors(x, end, weight)
    return start + share * (stop - start)


def addcmul(x: ArrayLike, first: ArrayLike, second: ArrayLike, /, *, value: float = 1) -> Tensor:
    """``x + value * first * second``."""
    start, one, other = as_tensors(x, first, second)
    return add(start, one * other, alpha=value)


def addcdiv(x: ArrayLike, first: ArrayLike, second: ArrayLike, /, *, value: float = 1) -> Tensor:
    """``x + value * first / second``."""
    start, one, other = as_tensors(x, first, second)
    return add(start, one / other, alpha=value)


def _blend(x: ArrayLike, product: Tensor, beta: float, alpha: float) -> Tensor:
    return add(scaled(x, beta), product, alpha=alpha)


def addmm(x: ArrayLike, first: ArrayLike, second: ArrayLike, /, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * x + alpha * (first @ second)`` of matrices."""
    return _blend(x, matmul(first, second), beta, alpha)


#: of batches of matrices, and of a matrix and a vector
baddbmm = addmm
addmv = addmm


def addbmm(x: ArrayLike, first: ArrayLike, second: ArrayLike, /, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * x + alpha * sum(first @ second)``, summed over the batch of matrices."""
    return _blend(x, matmul(first, second).sum(0), beta, alpha)


def addr(x: ArrayLike, first: ArrayLike, second: ArrayLike, /, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * x + alpha * outer(first, second)``."""
    return _blend(x, outer(first, second), beta, alpha)
