"""Statistics composed of rows: quantiles, covariances, sums without NaN, weighted counts."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from aiograd.errors import ArgumentError, ShapeError
from aiograd.ops.creation import astype, refuse
from aiograd.ops.elementwise import conj
from aiograd.ops.indexing import getitem, take, take_adjoint
from aiograd.ops.joining import cat
from aiograd.ops.linalg import matmul
from aiograd.ops.masking import where
from aiograd.ops.op import answer, implements
from aiograd.ops.reduction import Axis, mean, normalize_axes, sum_
from aiograd.ops.shape import diagonal, matrix_transpose, moveaxis, np_atleast_2d, reshape, unsqueeze
from aiograd.ops.sorting import sort
from aiograd.running.types import Array


class MinMax(NamedTuple):
    """The result of `aminmax`."""

    min: Array
    max: Array


#: where between two neighbours the quantile lies, by the fraction of the way
_BETWEEN: dict[str, Callable[[Any], Any]] = {
    "linear": lambda fraction: fraction,
    "lower": lambda fraction: np.zeros_like(fraction),
    "higher": lambda fraction: np.ceil(fraction),
    "midpoint": lambda fraction: np.where(fraction == 0, 0.0, 0.5),
    "nearest": lambda fraction: np.where(fraction == 0.5, np.nan, np.round(fraction)),
}


def quantile(x: Array, q: Any, /, *, axis: Axis = None, keepdims: bool = False, method: str = "linear", skip_nan: bool = False) -> Array:
    """Quantiles over `axis`, without a gradient for `q`.

    Args:
        x: real, any shape.
        q: numbers between 0 and 1, of any shape.
        axis: the axes to reduce.
        keepdims: leave reduced axes in place, with length 1.
        method: between two neighbours: "linear", "lower", "higher", "midpoint" or "nearest".
        skip_nan: leave NaN out, rather than give NaN where there is one.

    Returns:
        The axes of `q`, then the axes that were not reduced.
    """
    wanted = np.asarray(q, np.float64)
    if not np.all((wanted >= 0) & (wanted <= 1)):
        raise ArgumentError("quantile: expected numbers between 0 and 1")
    if method not in _BETWEEN:
        raise ArgumentError(f"quantile: method is {method!r}, expected one of {', '.join(map(repr, _BETWEEN))}")
    if x.dtype.kind in "iub":
        x = astype(x, dtype=np.float64)
    shape = tuple(x.shape)
    axes = normalize_axes(axis, len(shape))
    others = tuple(shape[a] for a in range(len(shape)) if a not in axes)
    length = math.prod(shape[a] for a in axes)
    if not length:
        raise ArgumentError(f"quantile over axes {axes} of shape {list(shape)}: there is nothing to choose from")
    ordered = sort(reshape(moveaxis(x, axes, tuple(range(len(others), len(shape)))), shape=(*others, length)), axis=-1)
    if skip_nan:
        number = unsqueeze(sum_(np.logical_not(np.isnan(ordered)), axis=-1), axis=-1)
        position = wanted.reshape(-1) * astype(np.maximum(number - 1, 0), dtype=np.float64)
        low = astype(np.floor(position), dtype=np.int64)
        fraction = astype(_between(method, low, position), dtype=x.dtype)
        below, above = np.take_along_axis(ordered, low, -1), np.take_along_axis(ordered, np.minimum(low + 1, length - 1), -1)
    else:
        position = wanted.reshape(-1) * (length - 1)
        low = np.floor(position).astype(np.int64)
        fraction = _between(method, low, position).astype(x.dtype)
        below, above = take(ordered, low, axis=-1), take(ordered, np.minimum(low + 1, length - 1), axis=-1)
    found = below + where(fraction > 0, above - below, 0) * fraction
    if not skip_nan and x.dtype.kind == "f":
        last = getitem(ordered, index=(..., slice(-1, None)))  # NaN comes last
        found = where(np.isnan(last), last, found)
    kept = tuple(1 if a in axes else n for a, n in enumerate(shape)) if keepdims else others
    return reshape(moveaxis(found, -1, 0), shape=(*wanted.shape, *kept))


def _between(method: str, low: Array, position: Array) -> Any:
    fraction = _BETWEEN[method](position - low)
    # halves go to the even neighbour
    return np.where(np.isnan(fraction), low % 2, fraction) if method == "nearest" else fraction


def covariance(x: Array, /, *, correction: float = 1.0, fweights: Any = None, aweights: Any = None) -> Array:
    """The covariances of variables (rows) over observations (columns), each counted `fweights` times and weighted by `aweights`."""
    x = np_atleast_2d(x)
    weights = None
    for given in (fweights, aweights):
        if given is not None:
            weights = given if weights is None else weights * given
    if weights is None:
        deviation = x - mean(x, axis=1, keepdims=True)
        total: Any = x.shape[1]
        product = matmul(deviation, conj(matrix_transpose(deviation)))
        freedom = total - correction
    else:
        total = sum_(weights)
        deviation = x - unsqueeze(sum_(x * weights, axis=1), axis=1) / total
        product = matmul(deviation * weights, conj(matrix_transpose(deviation)))
        freedom = total - correction if aweights is None else total - correction * sum_(weights * aweights) / total
    return np.squeeze(product / (freedom if weights is not None or freedom > 0 else math.nan))


def checked_weights(name: str, weights: Any, count: int) -> Any:
    """The weights as an array, one for each of `count` observations.

    Raises:
        ArgumentError: they are not, or are plain numbers below 0, or counts (``fweights``) that are not whole.
    """
    if weights is None:
        return None
    given = weights if hasattr(weights, "shape") else np.asarray(weights)
    if tuple(given.shape) != (count,):
        raise ShapeError(f"cov({name}=...): found shape {list(given.shape)}, expected ({count},), a number for each observation")
    whole = name == "fweights"
    if given.__class__ is np.ndarray and (given.dtype.kind not in "iufb" or (given < 0).any() or (whole and (given != given.round()).any())):
        raise ArgumentError(f"cov({name}={reprlib.repr(weights)}): expected {'whole' if whole else 'real'} numbers of at least 0")
    return given


def correlations(covariances: Array, /) -> Array:
    """The correlation coefficients of variables with these covariances."""
    if not covariances.shape:
        return covariances / covariances
    spread = np.sqrt(np.real(diagonal(covariances)))
    return covariances / unsqueeze(spread, axis=1) / spread


def bincount(x: Array, weights: Array | None = None, /, *, minlength: int = 0) -> Array:
    """How often each of 0, 1, ... occurs in a vector of integers, or the sums of the weights of those elements."""
    plain = np.asarray(x)
    if plain.ndim != 1 or plain.dtype.kind not in "iub" or (plain.dtype.kind == "i" and plain.size and plain.min() < 0):
        found = f"{plain.dtype} {list(plain.shape)}" + (f" from {plain.min()} on" if plain.size else "")
        raise ArgumentError(f"bincount: found {found}, expected a vector of integers from 0 on. Cast it with .astype(), or reshape it.")
    if weights is not None and tuple(weights.shape) != plain.shape:
        raise ShapeError(f"bincount: {list(plain.shape)} integers with weights of shape {list(weights.shape)}, expected one weight each")
    if weights is None:
        return np.bincount(plain.astype(np.intp, copy=False), minlength=minlength)
    size = max(int(plain.max()) + 1 if plain.size else 0, minlength)
    return take_adjoint(weights, plain, shape=(size,), axis=0)


# numpy's functions, with numpy's arguments


def _quantiles(name: str, scale: float, skip_nan: bool) -> Any:
    def function(
        a: Array, q: Any, axis: Any = None, out: Any = None, overwrite_input: Any = False, method: str = "linear", keepdims: Any = False, *,
        weights: Any = None,
    ) -> Array:  # fmt: skip
        refuse(name, out=out, weights=weights, overwrite_input=overwrite_input)
        axis, flag = tuple(axis) if isinstance(axis, list) else axis, bool(keepdims) and keepdims is not np._NoValue
        return quantile(a, np.asarray(q) * scale, axis=axis, keepdims=flag, method=method, skip_nan=skip_nan)

    return function


implements(np.quantile)(_quantiles("quantile", 1.0, False))
implements(np.percentile)(_quantiles("percentile", 0.01, False))
implements(np.nanquantile)(_quantiles("nanquantile", 1.0, True))
implements(np.nanpercentile)(_quantiles("nanpercentile", 0.01, True))


@implements(np.nanmedian)
def np_nanmedian(a: Array, axis: Any = None, out: Any = None, overwrite_input: Any = False, keepdims: Any = False) -> Array:
    """numpy's ``nanmedian``."""
    refuse("nanmedian", out=out, overwrite_input=overwrite_input)
    return quantile(a, 0.5, axis=axis, keepdims=bool(keepdims) and keepdims is not np._NoValue, skip_nan=True)


@implements(np.cov)
def np_cov(
    m: Array, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: int | None = None, fweights: Any = None, aweights: Any = None, *,
    dtype: Any = None,
) -> Array:  # fmt: skip
    """numpy's ``cov``."""
    x = np_atleast_2d(m)
    if not rowvar and len(m.shape) > 1:
        x = matrix_transpose(x)
    if y is not None:
        other = np_atleast_2d(y)
        x = cat(x, matrix_transpose(other) if not rowvar and len(y.shape) > 1 else other, axis=0)
    x = x if dtype is None else astype(x, dtype=dtype)
    correction = ddof if ddof is not None else 0 if bias else 1
    weights = [checked_weights(name, given, x.shape[1]) for name, given in (("fweights", fweights), ("aweights", aweights))]
    return covariance(x, correction=correction, fweights=weights[0], aweights=weights[1])


@implements(np.nansum)
def np_nansum(a: Array, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, initial: Any = None, where: Any = True) -> Array:
    """numpy's ``nansum``."""
    refuse("nansum", out=out, initial=initial, where=where)
    return np.sum(_zero_for_nan(a), axis=axis, dtype=dtype, keepdims=bool(keepdims) and keepdims is not np._NoValue)


@implements(np.nanmean)
def np_nanmean(a: Array, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True) -> Array:
    """numpy's ``nanmean``."""
    refuse("nanmean", out=out, where=where)
    flag = bool(keepdims) and keepdims is not np._NoValue
    total = np.sum(_zero_for_nan(a), axis=axis, dtype=dtype, keepdims=flag)
    return total / astype(sum_(np.logical_not(np.isnan(a)), axis=axis, keepdims=flag), dtype=total.dtype)


def _zero_for_nan(a: Array) -> Array:
    return where(np.isnan(a), 0, a) if a.dtype.kind in "fc" else a


answer({
    np.corrcoef: lambda x, y=None, rowvar=True, *, dtype=None: correlations(np_cov(x, y, rowvar, dtype=dtype)),
    np.bincount: lambda x, /, weights=None, minlength=0: bincount(x, weights, minlength=minlength),
})  # fmt: skip
