"""Cumulative sums and products, linear recurrences, and products of all others.

Note [Levels]
    Lines are cut into chunks, one thread each. The ends of the chunks are scanned in their turn, as lines of their own, so a line of a million
    elements takes three levels of two launches. Where there are lines enough to keep the device busy, or they are short, one launch is all.
    The order of operations follows from the shape.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, as_cuda, empty
from aiograd.cuda.kernels import scan as kernels
from aiograd.cuda.launching import launch, spread
from aiograd.cuda.operations.reducing import is_supported

#: elements of a chunk
_CHUNK = 64
_PRECISIONS = {"f4": np.float32, "f8": np.float64, "i8": np.int64, "u8": np.uint64}


def scan(
    kind: str, x: CudaArray, axis: int, result: Any, *, factor: CudaArray | None = None, reverse: bool = False, exclusive: bool = False
) -> CudaArray:
    """The scan of `x` along an axis.

    Args:
        kind: ``sum``, ``prod`` or ``linear``.
        x: any shape with at least one axis.
        axis: where.
        result: dtype of the result.
        factor: the factors of a linear recurrence, of the shape of `x`.
        reverse: start from the end.
        exclusive: leave out each element itself.
    """
    result = np.dtype(result)
    out = empty(x.device, x.shape, result)
    if x.size:
        axis %= x.ndim
        n, inner = x.shape[axis], math.prod(x.shape[axis + 1 :])
        precision = {"f": "f8" if result.itemsize == 8 else "f4", "u": "u8"}.get(result.kind, "i8")
        x, factor = x.contiguous(), None if factor is None else factor.contiguous()
        _lines(kind, precision, out, x, factor, x.size // n, n, inner, reverse=reverse, exclusive=exclusive, guarded=False)
    return out


def _lines(
    kind: str, precision: str, out: CudaArray, x: CudaArray, factor: CudaArray | None, m: int, n: int, inner: int, *,
    reverse: bool, exclusive: bool, guarded: bool,
) -> None:  # fmt: skip
    device = x.device
    properties = device.properties
    is_busy = m >= properties.threads * properties.multiprocessors * 4
    length = n if n <= 2 * _CHUNK or is_busy else _CHUNK
    chunks = math.ceil(n / length)
    stored = f"{out.dtype.kind}{out.itemsize}"
    f = x if factor is None else factor
    carry = x
    if chunks > 1:
        end = empty(device, (chunks, m), _PRECISIONS[precision])
        through = empty(device, (chunks, m), _PRECISIONS[precision]) if kind == "linear" else None
        launch(
            kernels.ends(kind, precision, reverse), *spread(device, m * chunks), end, end if through is None else through, x, f, m, n, inner, length,
            writes=(end,) if through is None else (end, through),
        )  # fmt: skip
        carry = empty(device, (chunks, m), _PRECISIONS[precision])
        _lines(kind, precision, carry, end, through, m, chunks, m, reverse=False, exclusive=False, guarded=True)
    kernel = kernels.apply(kind, precision, stored, reverse, exclusive, chunks > 1, guarded)
    launch(kernel, *spread(device, m * chunks), out, x, f, carry, m, n, inner, length, writes=(out,))


# ---------------------------------------------------------------- numpy's functions

_KINDS: dict[np.ufunc, str] = {np.add: "sum", np.multiply: "prod"}


@functools.lru_cache(maxsize=1024)
def _result_dtype(ufunc: np.ufunc, dtype: np.dtype[Any], asked: np.dtype[Any] | None) -> np.dtype[Any]:
    result: np.dtype[Any] = ufunc.accumulate(np.ones(1, dtype), dtype=asked).dtype
    return result


def _accumulate(ufunc: np.ufunc, x: Any, axis: int | None, dtype: Any = None, *, reverse: bool = False) -> Any:
    if not isinstance(x, CudaArray) or not is_supported(x.dtype):
        return NotImplemented
    asked = None if dtype is None else np.dtype(dtype)
    result = _result_dtype(ufunc, x.dtype, asked)
    if result.kind == "b" or not is_supported(result):
        return NotImplemented
    if axis is None:
        x, axis = x.reshape(-1), 0
    if not -x.ndim <= axis < x.ndim:
        raise np.exceptions.AxisError(axis, x.ndim)
    if asked is not None and x.dtype != result:
        x = x.astype(result)
    return scan(_KINDS[ufunc], x, axis, result, reverse=reverse)


def _register(ufunc: np.ufunc, cumulate: Any, cumulative: Any, row: str) -> None:
    def accumulate(array: Any, axis: int = 0, dtype: Any = None) -> Any:
        return _accumulate(ufunc, array, axis, dtype)

    def along(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
        return _accumulate(ufunc, a, axis, dtype) if out is None else NotImplemented

    def standard(x: Any, /, *, axis: int | None = None, dtype: Any = None, out: Any = None, include_initial: bool = False) -> Any:
        if out is not None or include_initial or (axis is None and np.ndim(x) > 1):
            return NotImplemented
        return _accumulate(ufunc, x, 0 if axis is None else axis, dtype)

    def of_row(x: CudaArray, /, axis: int = -1, *, reverse: bool = False) -> Any:
        return _accumulate(ufunc, x, axis, reverse=reverse)

    tables.method(ufunc, "accumulate")(accumulate)
    tables.function(cumulate)(along)
    tables.function(cumulative)(standard)
    tables.row(row)(of_row)


_register(np.add, np.cumsum, np.cumulative_sum, "cumsum")
_register(np.multiply, np.cumprod, np.cumulative_prod, "cumprod")


@tables.row("linear_scan")
def linear_scan(x: Any, factor: Any, /, axis: int = -1, *, reverse: bool = False) -> Any:
    """The row of that name."""
    dtype = np.result_type(x.dtype, factor.dtype)
    device = x.device if isinstance(x, CudaArray) else factor.device
    x, factor = as_cuda(device, x), as_cuda(device, factor)
    if dtype.kind != "f" or not is_supported(x.dtype, factor.dtype) or x.shape != factor.shape:
        return NotImplemented
    return scan("linear", x, axis, dtype, factor=factor, reverse=reverse)


@tables.row("prod_others")
def prod_others(x: CudaArray, /) -> Any:
    """The row of that name: for each element the product of all others."""
    if x.dtype.kind != "f" or not is_supported(x.dtype):
        return NotImplemented
    return scan("prod", x, -1, x.dtype, exclusive=True) * scan("prod", x, -1, x.dtype, reverse=True, exclusive=True)
