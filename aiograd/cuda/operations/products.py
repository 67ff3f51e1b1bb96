"""Products of vectors and matrices: numpy's functions and the rows for them. How they are computed is in `multiplying`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, as_cuda, check_same, device_of, empty, zeros
from aiograd.cuda.layout import contiguous_strides
from aiograd.cuda.operations.multiplying import multiply
from aiograd.errors import ShapeError
from aiograd.ops import einsum as einsums
from aiograd.ops import linalg


def product(x1: CudaArray, x2: CudaArray, bias: CudaArray | None = None) -> Any:
    """The matrix product, as numpy has it, plus a number for each column.

    Args:
        x1: (..., M, K) or (K,).
        x2: (..., K, N) or (K,).
        bias: (N,) or None.

    Returns:
        (..., M, N) without the axis that a vector does not have; NotImplemented for dtypes that no kernel takes.

    Raises:
        ShapeError: the shapes do not fit.
    """
    if not x1.ndim or not x2.ndim or x1.shape[-1] != x2.shape[-2 if x2.ndim > 1 else 0]:
        raise ShapeError(f"matmul: found shapes {list(x1.shape)} and {list(x2.shape)}; expected (..., M, K) and (..., K, N)")
    dtype = x1.dtype
    if x2.dtype is not dtype or (bias is not None and bias.dtype is not dtype):
        dtype = np.result_type(*[array.dtype for array in (x1, x2, bias) if array is not None])
    if dtype.kind not in ("fiub" if bias is None else "f") or dtype.itemsize > 8:
        return NotImplemented
    device = x1.device
    check_same(device, "matmul", (x1, x2, bias))
    a, b = (x.astype(dtype, copy=False) for x in (x1, x2))
    a, b = a if a.ndim > 1 else a.reshape(1, -1), b if b.ndim > 1 else b.reshape(-1, 1)
    leading = a.shape[:-2]
    try:
        if b.shape[:-2] != leading:
            leading = np.broadcast_shapes(leading, b.shape[:-2])
    except ValueError as error:
        raise ShapeError(f"matmul: the leading axes of shapes {list(x1.shape)} and {list(x2.shape)} cannot be broadcast together") from error
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    shape = (*leading, *((m,) if x1.ndim > 1 else ()), *((n,) if x2.ndim > 1 else ()))
    if bias is not None:
        bias = bias.astype(dtype, copy=False)
    if not math.prod(shape) or not k:
        return zeros(device, shape, dtype) if bias is None else zeros(device, shape, dtype) + bias
    if k == 1 and dtype.kind == "f":
        result = (a * b).reshape(shape)  # pending, like any element-wise operation
        return result if bias is None else result + bias
    result = empty(device, shape, dtype)
    out = result.view((*leading, m, n), contiguous_strides((*leading, m, n), dtype.itemsize))
    return result if multiply(out, a, b, bias) else result + bias


@tables.row("matmul")
def matmul(x1: Any, x2: Any) -> Any:
    """The row, and the numpy functions without options."""
    device = device_of(x1, x2)
    return product(as_cuda(device, x1), as_cuda(device, x2))


@tables.row("linear")
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """The row: ``x @ weight.T + bias``; shapes that do not fit are left to the row, which says so."""
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    device = device_of(x, weight, bias)
    return product(as_cuda(device, x), as_cuda(device, weight).T, None if bias is None else as_cuda(device, bias))


@tables.row("vecdot")
def vecdot(x1: Any, x2: Any, axis: int = -1) -> Any:
    """The row, and numpy's ``vecdot``: dot products along an axis.

    Raises:
        ShapeError: the shapes do not fit.
    """
    device = device_of(x1, x2)
    x1, x2 = as_cuda(device, x1), as_cuda(device, x2)
    if x1.dtype.kind == "c" or not x1.ndim or not x2.ndim:
        return NotImplemented
    if axis != -1:
        x1, x2 = np.moveaxis(x1, axis, -1), np.moveaxis(x2, axis, -1)
    if x1.shape[-1] != x2.shape[-1]:
        raise ShapeError(f"vecdot: found shapes {list(x1.shape)} and {list(x2.shape)}; expected the same length along axis {axis}")
    found = product(x1[..., None, :], x2[..., None])
    return found if found is NotImplemented else found[..., 0, 0]


tables.FUNCTIONS[np.matmul] = tables.FUNCTIONS[np.linalg.matmul] = lambda x1, x2, /, **kwargs: NotImplemented if kwargs else matmul(x1, x2)
tables.FUNCTIONS[np.vecdot] = lambda x1, x2, /, *, axis=-1, **kwargs: NotImplemented if kwargs else vecdot(x1, x2, axis)


def matvec(x1: Any, x2: Any, /, **kwargs: Any) -> Any:
    """numpy's ``matvec``: matrices (..., M, N) times vectors (..., N)."""
    device = device_of(x1, x2)
    x1, x2 = as_cuda(device, x1), as_cuda(device, x2)
    if kwargs or x1.ndim < 2 or not x2.ndim:
        return NotImplemented
    found = product(x1, x2[..., None])
    return found if found is NotImplemented else found[..., 0]


def vecmat(x1: Any, x2: Any, /, **kwargs: Any) -> Any:
    """numpy's ``vecmat``: vectors (..., M) times matrices (..., M, N)."""
    device = device_of(x1, x2)
    x1, x2 = as_cuda(device, x1), as_cuda(device, x2)
    if kwargs or x2.ndim < 2 or not x1.ndim:
        return NotImplemented
    found = product(x1[..., None, :], x2)
    return found if found is NotImplemented else found[..., 0, :]


for _name, _implementation in (("matvec", matvec), ("vecmat", vecmat)):
    if hasattr(np, _name):  # since numpy 2.2
        tables.FUNCTIONS[getattr(np, _name)] = _implementation


@tables.function(np.einsum)
def einsum(subscripts: Any, /, *operands: Any, optimize: Any = False, **kwargs: Any) -> Any:
    """numpy's ``einsum``, put together from rows; always in the cheapest order found."""
    return NotImplemented if kwargs or not isinstance(subscripts, str) else einsums.einsum(subscripts, *operands)


def _composed(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """A function composed of rows, as an implementation for arrays and numbers (lists are left to the host)."""

    def answer(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        known = all(hasattr(value, "shape") or isinstance(value, (int, float, complex)) for value in (a, b))
        return implementation(a, b, *args, **kwargs) if known else NotImplemented

    return answer


for _function, _implementation in (
    (np.dot, linalg.np_dot),
    (np.inner, linalg.np_inner),
    (np.outer, linalg.np_outer),
    (np.linalg.outer, linalg.np_outer),
    (np.vdot, linalg.np_vdot),
    (np.linalg.vecdot, linalg.np_linalg_vecdot),
    (np.tensordot, einsums.np_tensordot),
    (np.linalg.tensordot, einsums.np_linalg_tensordot),
):
    tables.FUNCTIONS[_function] = _composed(_implementation)
