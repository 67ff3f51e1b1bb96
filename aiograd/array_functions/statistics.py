"""Statistics and numerical calculus: numpy's functions and PyTorch's, each composed of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, Axis, as_tensor, as_tensors, axes_of, values_of
from aiograd.array_functions.linalg import vector_norm
from aiograd.array_functions.reduction import max as largest
from aiograd.array_functions.reduction import min as smallest
from aiograd.errors import ArgumentError
from aiograd.ops import calculus, statistics
from aiograd.ops.statistics import MinMax
from aiograd.tensors.core import make
from aiograd.tensors.tensor import Tensor

__all__ = [
    "aminmax", "bincount", "cdist", "corrcoef", "cov", "cumulative_trapezoid", "dist", "gradient", "histc", "interp", "nanmean", "nanmedian",
    "nanquantile", "nansum", "percentile", "quantile", "trapezoid",
]  # fmt: skip


def aminmax(x: ArrayLike, /, *, axis: int | None = None, keepdims: bool = False) -> MinMax:
    """The smallest and the largest elements."""
    return MinMax(smallest(x, axis, keepdims), largest(x, axis, keepdims))


def quantile(x: ArrayLike, q: ArrayLike, /, axis: Axis = None, keepdims: bool = False, *, method: str = "linear") -> Tensor:
    """Quantiles over axes: `q` in [0, 1]; `method` says which number between two neighbours is meant, as in numpy."""
    return statistics.quantile(as_tensor(x), values_of(q), axis=axes_of(axis), keepdims=keepdims, method=method)  # type: ignore[no-any-return]


def nanquantile(x: ArrayLike, q: ArrayLike, /, axis: Axis = None, keepdims: bool = False, *, method: str = "linear") -> Tensor:
    """`quantile` of the elements that are not NaN."""
    return statistics.quantile(as_tensor(x), values_of(q), axis=axes_of(axis), keepdims=keepdims, method=method, skip_nan=True)  # type: ignore[no-any-return]


def percentile(x: ArrayLike, q: ArrayLike, /, axis: Axis = None, keepdims: bool = False, *, method: str = "linear") -> Tensor:
    """`quantile` with `q` in percent."""
    return quantile(x, values_of(q) * 0.01, axis, keepdims, method=method)


def nanmedian(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Medians of the elements that are not NaN."""
    return nanquantile(x, 0.5, axis, keepdims)


def nansum(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Sums of the elements that are not NaN."""
    return statistics.np_nansum(as_tensor(x), axes_of(axis), keepdims=keepdims)  # type: ignore[no-any-return]


def nanmean(x: ArrayLike, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Means of the elements that are not NaN."""
    return statistics.np_nanmean(as_tensor(x), axes_of(axis), keepdims=keepdims)  # type: ignore[no-any-return]


def cov(x: ArrayLike, /, *, correction: float = 1, fweights: ArrayLike | None = None, aweights: ArrayLike | None = None) -> Tensor:
    """The covariances of variables (rows) over observations (columns), counted `fweights` times and weighted by `aweights`."""
    source = as_tensor(x)
    dtype = source.dtype if source.dtype.kind in "fc" else np.dtype(np.float64)
    counts, weights = [
        None if given is None else as_tensor(statistics.checked_weights(name, given, source.shape[-1] if source.shape else 1), dtype)
        for name, given in (("fweights", fweights), ("aweights", aweights))
    ]
    return statistics.covariance(source, correction=correction, fweights=counts, aweights=weights)  # type: ignore[no-any-return]


def corrcoef(x: ArrayLike, /) -> Tensor:
    """The correlation coefficients of variables (rows) over observations (columns)."""
    return statistics.correlations(statistics.covariance(as_tensor(x)))  # type: ignore[no-any-return]


def bincount(x: ArrayLike, /, weights: ArrayLike | None = None, minlength: int = 0) -> Tensor:
    """The number of times that each of 0, 1, ... occurs in a vector of integers, or the sums of the weights of those elements."""
    given = None if weights is None else as_tensor(weights)
    counts = statistics.bincount(values_of(x), given, minlength=minlength)
    return counts if given is not None else make(counts)  # type: ignore[no-any-return]


def histc(x: ArrayLike, /, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """The number of elements in each of `bins` intervals between `min` and `max` (the extremes of the elements where both are equal)."""
    values = as_tensor(x).detach().numpy()
    ends = (values.min(), values.max()) if min == max and values.size else (min, max)
    if bins < 1 or ends[0] > ends[1]:
        raise ArgumentError(f"histc(bins={bins}, min={min}, max={max}): expected at least one bin, and min not above max")
    counts, _ = np.histogram(values, bins, ends)
    return make(counts.astype(values.dtype))  # type: ignore[no-any-return]


def dist(x1: ArrayLike, x2: ArrayLike, /, ord: float = 2) -> Tensor:
    """The norm of the difference, of all elements."""
    first, second = as_tensors(x1, x2)
    return vector_norm(first - second, ord=ord)


def cdist(x1: ArrayLike, x2: ArrayLike, /, ord: float = 2) -> Tensor:
    """The distances of the rows (..., M, K) of one from the rows (..., N, K) of another: (..., M, N)."""
    first, second = as_tensors(x1, x2)
    return vector_norm(first[..., :, None, :] - second[..., None, :, :], axis=-1, ord=ord)


def trapezoid(y: ArrayLike, x: ArrayLike | None = None, /, dx: float = 1.0, axis: int = -1) -> Tensor:
    """The integral of `y` along an axis by the trapezoidal rule, at the points `x` or `dx` apart."""
    heights, *points = as_tensors(y) if x is None else as_tensors(y, x)
    return calculus.np_trapezoid(heights, *points, dx=dx, axis=axis)  # type: ignore[no-any-return]


def cumulative_trapezoid(y: ArrayLike, x: ArrayLike | None = None, /, dx: float = 1.0, axis: int = -1) -> Tensor:
    """The integral up to each point but the first, by the trapezoidal rule."""
    heights, *points = as_tensors(y) if x is None else as_tensors(y, x)
    return calculus.cumulative_trapezoid(heights, *points, dx=dx, axis=axis)  # type: ignore[no-any-return]


def gradient(x: ArrayLike, /, *spacing: ArrayLike, axis: int | Sequence[int] | None = None, edge_order: int = 1) -> Any:
    """Derivatives along axes by differences, as ``np.gradient``: a Tensor for one axis, a tuple of them for several."""
    source = as_tensor(x)
    steps = (s if np.ndim(s) == 0 else as_tensor(s, source.dtype) for s in spacing)
    return calculus.np_gradient(source, *steps, axis=axis, edge_order=edge_order)


def interp(
    x: ArrayLike, xp: ArrayLike, fp: ArrayLike, /, left: float | None = None, right: float | None = None, period: float | None = None
) -> Tensor:
    """Piecewise linear interpolation between the points (xp, fp), `xp` ascending; gradients for all three."""
    return calculus.np_interp(*as_tensors(x, xp, fp), left, right, period)  # type: ignore[no-any-return]
