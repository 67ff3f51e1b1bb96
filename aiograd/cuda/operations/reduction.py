"""Reductions along axes: sums, products, extremes, their positions, truth, means and variances, as numpy's functions, ufuncs' methods and rows.

A mean is one launch; a variance is two: the mean, then squares of deviations from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray
from aiograd.cuda.operations.reducing import axes_of, is_supported, reduce
from aiograd.cuda.reduce_generate import FOLDS
from aiograd.errors import ArgumentTypeError
from aiograd.ops import norms as norms  # fills the table of functions
from aiograd.ops.op import FUNCTIONS

#: ufunc -> fold, fold for booleans, what an empty one gives (None: an error)
_UFUNCS: dict[np.ufunc, tuple[str, str, Any]] = {
    np.add: ("sum", "sum", 0), np.multiply: ("prod", "prod", 1), np.maximum: ("max", "any", None), np.minimum: ("min", "all", None),
    np.fmax: ("fmax", "any", None), np.fmin: ("fmin", "all", None), np.logical_or: ("any", "any", False), np.logical_and: ("all", "all", True),
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _result_dtype(ufunc: np.ufunc, dtype: np.dtype[Any], asked: np.dtype[Any] | None) -> np.dtype[Any]:
    result: np.dtype[Any] = ufunc.reduce(np.ones(1, dtype), dtype=asked).dtype
    return result


def _is_plain(initial: Any, where: Any) -> bool:
    return (initial is None or initial is np._NoValue) and (where is True or where is np._NoValue)


def reduce_ufunc(ufunc: np.ufunc, array: Any, axis: Any, dtype: Any = None, keepdims: Any = False, initial: Any = None, where: Any = True) -> Any:
    """``ufunc.reduce(array, ...)``; NotImplemented if there is no kernel."""
    if not isinstance(array, CudaArray) or not _is_plain(initial, where) or not is_supported(array.dtype):
        return NotImplemented
    asked = None if dtype is None else np.dtype(dtype)
    result = _result_dtype(ufunc, array.dtype, asked)
    fold, fold_of_booleans, nothing = _UFUNCS[ufunc]
    if not is_supported(result) or (result.kind == "b" and fold in ("sum", "prod")):
        return NotImplemented
    axes = axes_of(axis, array.ndim)
    keeps = _flag(keepdims)
    if not array.size:
        return _of_nothing(array, axes, keeps, nothing, result, lambda x: ufunc.reduce(x, axis=axis))
    truth = FOLDS[fold].truth
    if result.kind == "b" and not truth:
        fold = fold_of_booleans
    return reduce(array, fold, axes, keeps, array.dtype if truth or (asked is None and result.kind == "b") else result, result)


def _of_nothing(array: CudaArray, axes: tuple[int, ...], keepdims: bool, value: Any, dtype: Any, function: Callable[[Any], Any]) -> CudaArray:
    """The result of reducing an empty array to `value`; if the reduction has no identity, numpy raises."""
    if value is None:
        function(np.empty(array.shape, array.dtype))  # raises, save where there are no results either
    shape = tuple(1 if axis in axes else extent for axis, extent in enumerate(array.shape) if keepdims or axis not in axes)
    return CudaArray.from_host(array.device, np.full(shape, 0 if value is None else value, dtype))


def _flag(keepdims: Any) -> bool:
    return False if keepdims is np._NoValue else bool(keepdims)


def _into(out: Any, result: Any) -> Any:
    """The result, written to where numpy's caller wants it."""
    if out is None or result is NotImplemented:
        return result
    out[...] = result
    return out


def _register(ufunc: np.ufunc, *functions: Any, takes_dtype: bool) -> None:
    def method(array: Any, axis: Any = 0, dtype: Any = None, keepdims: Any = False, initial: Any = None, where: Any = True) -> Any:
        return reduce_ufunc(ufunc, array, axis, dtype, keepdims, initial, where)

    def function(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, initial: Any = None, where: Any = True) -> Any:
        return _into(out, reduce_ufunc(ufunc, a, axis, dtype, keepdims, initial, where))

    def untyped(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, initial: Any = None, *, where: Any = True) -> Any:
        return function(a, axis, None, out, keepdims, initial, where)

    tables.method(ufunc, "reduce")(method)
    if functions:
        tables.function(*functions)(function if takes_dtype else untyped)


_register(np.add, np.sum, takes_dtype=True)
_register(np.multiply, np.prod, takes_dtype=True)
_register(np.maximum, np.max, np.amax, takes_dtype=False)
_register(np.minimum, np.min, np.amin, takes_dtype=False)
_register(np.fmax, takes_dtype=False)
_register(np.fmin, takes_dtype=False)


@tables.function(np.any)
def any_(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True) -> Any:
    """True if some element is true."""
    return _into(out, reduce_ufunc(np.logical_or, a, axis, None, keepdims, None, where))


@tables.function(np.all)
def all_(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True) -> Any:
    """True if all elements are true."""
    return _into(out, reduce_ufunc(np.logical_and, a, axis, None, keepdims, None, where))


_register(np.logical_or, takes_dtype=False)
_register(np.logical_and, takes_dtype=False)


@tables.function(np.count_nonzero)
@tables.row("count_nonzero")
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    """The number of elements that are not zero."""
    if not isinstance(a, CudaArray) or not is_supported(a.dtype):
        return NotImplemented
    axes = axes_of(axis, a.ndim)
    if not a.size:
        return _of_nothing(a, axes, bool(keepdims), 0, np.int64, np.any)
    return reduce(a, "count_nonzero", axes, bool(keepdims), a.dtype, np.int64)


def _position(name: str, function: Callable[..., Any]) -> None:
    def position(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
        if not isinstance(a, CudaArray) or not is_supported(a.dtype):
            return NotImplemented
        axes = axes_of(axis if axis is None else int(axis), a.ndim)
        if not a.size:
            return _into(out, _of_nothing(a, axes, _flag(keepdims), None, np.int64, lambda x: function(x, axis=axis)))
        return _into(out, reduce(a, name, axes, _flag(keepdims), a.dtype, np.int64))

    tables.function(function)(position)


_position("argmax", np.argmax)
_position("argmin", np.argmin)


@tables.function(np.mean)
def mean(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True) -> Any:
    """The sum over the number of elements, in one launch."""
    if not isinstance(a, CudaArray) or not _is_plain(None, where) or not is_supported(a.dtype):
        return NotImplemented
    taken = np.dtype(dtype) if dtype is not None else a.dtype if a.dtype.kind == "f" else np.dtype(np.float64)
    if taken.kind != "f" or not is_supported(taken):
        return NotImplemented
    return _into(out, _mean(a, axes_of(axis, a.ndim), _flag(keepdims), taken))


def _mean(
    a: CudaArray, axes: tuple[int, ...], keepdims: bool, taken: np.dtype[Any], *, freedom: float | None = None, root: bool = False
) -> CudaArray:
    """Sums over `freedom`, by default the number of elements; and the square root of that."""
    if not a.size:
        return _of_nothing(a, axes, keepdims, math.nan, taken, np.mean)
    count = math.prod(a.shape[axis] for axis in axes) if freedom is None else freedom
    return reduce(a, "sum", axes, keepdims, taken, taken, "divide_root" if root else "divide", count)


tables.ROW_KERNELS["mean"] = lambda x, /, axis=None, *, keepdims=False: mean(x, axis, keepdims=keepdims)


def _moment(root: bool) -> Callable[..., Any]:
    def moment(
        a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = False, *, where: Any = True,
        mean: Any = None, correction: Any = None,
    ) -> Any:  # fmt: skip
        if not isinstance(a, CudaArray) or not _is_plain(mean, where) or not is_supported(a.dtype):
            return NotImplemented
        freedom = ddof if correction is None or correction is np._NoValue else correction
        taken = np.dtype(dtype) if dtype is not None else a.dtype if a.dtype.kind == "f" else np.dtype(np.float64)
        if taken.kind != "f" or not is_supported(taken):
            return NotImplemented
        axes = axes_of(axis, a.ndim)
        single = np.dtype(np.float32) if taken == np.float16 else taken
        deviation = a - _mean(a, axes, True, single)
        left = max(math.prod(a.shape[each] for each in axes) - freedom, 0)
        result = _mean(np.square(deviation), axes, _flag(keepdims), single, freedom=left, root=root)
        return _into(out, result if single == taken else result.astype(taken))

    return moment


tables.function(np.var)(_moment(root=False))
tables.function(np.std)(_moment(root=True))


def _composed(function: Any) -> None:
    """Register aiograd's composition of rows for a function as its implementation for device arrays."""
    composed = FUNCTIONS[function]

    def implementation(*args: Any, **kwargs: Any) -> Any:
        try:
            return composed(*args, **kwargs)
        except ArgumentTypeError:  # an option that rows do not have
            return NotImplemented

    tables.function(function)(implementation)


for _function in (np.ptp, np.average, np.linalg.norm, np.linalg.vector_norm, np.linalg.matrix_norm):
    _composed(_function)
