"""Choosing and limiting elements: all element-wise, so results are pending until they are used."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray
from aiograd.cuda.elementwise import elementwise

_BOOL = np.dtype(np.bool_)
_KINDS = "fiub"


def kind_of(value: Any) -> Any:
    """An operand as dtype promotion takes it: its dtype, or the Python number itself, which adapts to the other operands."""
    return value.dtype if isinstance(value, (CudaArray, np.ndarray, np.generic)) else value


@tables.function(np.where)
@tables.row("where")
def where(condition: Any, x: Any = None, y: Any = None, /) -> Any:
    """Elements of `x` where `condition` holds, of `y` elsewhere."""
    if x is None or y is None:
        return NotImplemented
    dtype = np.result_type(kind_of(x), kind_of(y))
    if dtype.kind not in _KINDS:
        return NotImplemented
    return elementwise("where", (condition, x, y), (_BOOL, dtype, dtype, dtype))


@tables.row("mask")
def mask(x: Any, condition: Any, /) -> Any:
    """`x` where `condition` holds, 0 elsewhere."""
    return where(condition, x, x.dtype.type(0))


@tables.function(np.clip)
def clip(a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, *, min: Any = None, max: Any = None, **kwargs: Any) -> Any:
    """`a` limited to an interval."""
    if kwargs:
        return NotImplemented
    low, high = (second if first is None or first is np._NoValue else first for first, second in ((a_min, min), (a_max, max)))
    result = a
    if low is not None and low is not np._NoValue:
        result = np.maximum(result, low)
    if high is not None and high is not np._NoValue:
        result = np.minimum(result, high)
    return _into(out, result.copy() if result is a else result)


@tables.function(np.nan_to_num)
@tables.row("nan_to_num")
def nan_to_num(x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    """`x` with NaN and the infinities replaced by numbers; always new."""
    if x.dtype.kind in "iub":
        return x.copy()
    if x.dtype.kind != "f":
        return NotImplemented
    limits = np.finfo(x.dtype)
    replacements = (nan, limits.max if posinf is None else posinf, limits.min if neginf is None else neginf)
    return elementwise("nan_to_num", (x, *replacements), (x.dtype,) * 5)


@tables.function(np.round, np.around)
def round_(a: Any, decimals: int = 0, out: Any = None) -> Any:
    """The nearest numbers with so many decimals; halves go to the even neighbour."""
    if a.dtype.kind in "iu":
        return _into(out, a.copy()) if decimals >= 0 else NotImplemented
    if a.dtype.kind != "f":
        return NotImplemented
    if decimals == 0:
        return _into(out, np.rint(a))
    scale = a.dtype.type(10.0 ** abs(decimals))
    return _into(out, np.rint(a * scale) / scale if decimals > 0 else np.rint(a / scale) * scale)


@tables.function(np.isclose)
def isclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Any:
    """True if ``|a - b| <= atol + rtol * |b|``."""
    if "c" in (np.dtype(kind_of(a)).kind if hasattr(a, "dtype") else "f", np.dtype(kind_of(b)).kind if hasattr(b, "dtype") else "f"):
        return NotImplemented
    if hasattr(b, "dtype") and b.dtype.kind != "f":
        b = b.astype(np.float64)
    near = np.logical_and(np.less_equal(np.absolute(np.subtract(a, b)), atol + rtol * np.absolute(b)), np.isfinite(b))
    result = np.logical_or(near, np.equal(a, b))
    return np.logical_or(result, np.logical_and(np.isnan(a), np.isnan(b))) if equal_nan else result


@tables.function(np.tril)
@tables.row("tril")
def tril(m: CudaArray, k: int = 0) -> Any:
    """The lower triangles of matrices."""
    return _triangle(m, k, lower=True)


@tables.function(np.triu)
@tables.row("triu")
def triu(m: CudaArray, k: int = 0) -> Any:
    """The upper triangles of matrices."""
    return _triangle(m, k, lower=False)


def _triangle(m: CudaArray, k: int, *, lower: bool) -> Any:
    if m.ndim < 2 or m.dtype.kind not in _KINDS:
        return NotImplemented
    rows = CudaArray.from_host(m.device, np.arange(m.shape[-2], dtype=np.int32)[:, None])
    columns = CudaArray.from_host(m.device, np.arange(-k, m.shape[-1] - k, dtype=np.int32))
    return where(columns <= rows if lower else columns >= rows, m, m.dtype.type(0))


def _into(out: Any, result: Any) -> Any:
    if out is None:
        return result
    out[...] = result
    return out
