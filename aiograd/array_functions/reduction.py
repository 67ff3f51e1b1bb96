"""Sums, products, means, extrema and their cumulative forms, with the standard's signatures.

Elements that tie for a maximum share its gradient.
"""

from __future__ import annotations

from typing import Any

from aiograd.array_functions.conversion import ArrayLike, Axis, as_tensor, axes_of, row
from aiograd.ops import scan, sorting
from aiograd.ops.joining import np_diff
from aiograd.ops.reduction import in_dtype
from aiograd.tensors.constants import checked_dtype
from aiograd.tensors.core import TensorCore
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

__all__ = [
    "sum", "prod", "mean", "var", "std", "var_mean", "std_mean", "max", "min", "median", "logsumexp", "all", "any", "count_nonzero",
    "cumulative_sum", "cumulative_prod", "cumsum", "cumprod", "diff",
]  # fmt: skip

_SUM = row("sum")


def _reduced(name: str, x: Any, axis: Any, keepdims: bool, dtype: Any = None, **statics: Any) -> Tensor:
    statics.update(axis=axes_of(axis), keepdims=keepdims)
    if dtype is None:
        return call(row(name), (as_tensor(x),), statics)  # type: ignore[no-any-return]
    return in_dtype(row(name), as_tensor(x), checked_dtype(dtype), **statics)  # type: ignore[no-any-return]


def sum(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False, *, dtype: Any = None) -> Tensor:
    """Sums over axes."""
    if dtype is None:  # the commonest reduction goes the short way
        axis = tuple(axis) if axis.__class__ is list else axis
        return call(_SUM, (x if isinstance(x, TensorCore) else as_tensor(x),), {"axis": axis, "keepdims": keepdims})  # type: ignore[no-any-return]
    return _reduced("sum", x, axis, keepdims, dtype)


def prod(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False, *, dtype: Any = None) -> Tensor:
    """Products over axes; the gradient is right where there are zeros too."""
    return _reduced("prod", x, axis, keepdims, dtype)


def mean(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Means over axes."""
    return _reduced("mean", x, axis, keepdims)


def var(x: ArrayLike, /, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """Variances over axes: squared deviations over their number less `correction`."""
    return _reduced("var", x, axis, keepdims, correction=correction)


def std(x: ArrayLike, /, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """Standard deviations over axes."""
    return _reduced("std", x, axis, keepdims, correction=correction)


def var_mean(x: ArrayLike, /, axis: Axis = None, correction: float = 1.0, keepdims: bool = False) -> tuple[Tensor, Tensor]:
    """Variances and means over axes. PyTorch's function: it divides by one less than the number of elements unless `correction` says otherwise."""
    source = as_tensor(x)
    return var(source, axis, correction, keepdims), mean(source, axis, keepdims)


def std_mean(x: ArrayLike, /, axis: Axis = None, correction: float = 1.0, keepdims: bool = False) -> tuple[Tensor, Tensor]:
    """Standard deviations and means over axes, as `var_mean`."""
    source = as_tensor(x)
    return std(source, axis, correction, keepdims), mean(source, axis, keepdims)


def max(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Largest elements over axes."""
    return _reduced("max", x, axis, keepdims)


def min(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Smallest elements over axes."""
    return _reduced("min", x, axis, keepdims)


def median(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Medians over axes: the middle element, or the mean of the middle two."""
    return sorting.median(as_tensor(x), axis=axes_of(axis), keepdims=keepdims)  # type: ignore[no-any-return]


def logsumexp(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """``log(sum(exp(x)))`` over axes, without overflow."""
    return _reduced("logsumexp", x, axis, keepdims)


def all(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """True if all elements over axes are true."""
    return _reduced("all", x, axis, keepdims)


def any(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """True if some element over axes is true."""
    return _reduced("any", x, axis, keepdims)


def count_nonzero(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The number of elements over axes that are not zero."""
    return _reduced("count_nonzero", x, axis, keepdims)


def cumulative_sum(x: ArrayLike, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Tensor:
    """Sums of the elements up to each along an axis, starting with 0 when `include_initial`."""
    wanted = None if dtype is None else checked_dtype(dtype)
    return scan.cumulative_sum(as_tensor(x), axis=axis, dtype=wanted, include_initial=include_initial)  # type: ignore[no-any-return]


def cumulative_prod(x: ArrayLike, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Tensor:
    """Products of the elements up to each along an axis, starting with 1 when `include_initial`."""
    wanted = None if dtype is None else checked_dtype(dtype)
    return scan.cumulative_prod(as_tensor(x), axis=axis, dtype=wanted, include_initial=include_initial)  # type: ignore[no-any-return]


def cumsum(x: ArrayLike, /, axis: int | None = None) -> Tensor:
    """Sums of the elements up to each; of the flattened array when no axis is given (as in numpy)."""
    return scan.np_cumsum(as_tensor(x), axis)  # type: ignore[no-any-return]


def cumprod(x: ArrayLike, /, axis: int | None = None) -> Tensor:
    """Products of the elements up to each; of the flattened array when no axis is given (as in numpy)."""
    return scan.np_cumprod(as_tensor(x), axis)  # type: ignore[no-any-return]


def diff(x: ArrayLike, /, n: int = 1, axis: int = -1, prepend: ArrayLike | None = None, append: ArrayLike | None = None) -> Tensor:
    """Differences of neighbours along an axis, `n` times over."""
    source = as_tensor(x)
    ends = [None if end is None else as_tensor(end, source.dtype) for end in (prepend, append)]
    return np_diff(source, n, axis, *ends)  # type: ignore[no-any-return]
