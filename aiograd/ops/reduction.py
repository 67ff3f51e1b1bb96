"""Reductions along axes, and `spread`, which takes the gradient of a reduction back over the axes it removed.

Note [Axes]
    `axis` is None (all axes), an int or a tuple of ints, negative ones counting from the end, as in numpy. Forwards call the ufuncs'
    ``reduce``, which takes a third of the time of ``np.sum`` on small arrays.

Note [Ties]
    Elements that tie for the maximum share the gradient equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.ops.creation import astype, ones_like, refuse
from aiograd.ops.masking import where
from aiograd.ops.op import Op, define, implements
from aiograd.ops.shape import checked_axis, expand, reshaped
from aiograd.ops.special import share
from aiograd.running.types import Array, Shape

Axis = int | tuple[int, ...] | None

#: the reductions of ufuncs, called as ``(x, axis, dtype, out, keepdims)``
add_reduce: Callable[..., Array] = np.add.reduce
multiply_reduce: Callable[..., Array] = np.multiply.reduce
maximum_reduce: Callable[..., Array] = np.maximum.reduce
minimum_reduce: Callable[..., Array] = np.minimum.reduce


def normalize_axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """The axes as non-negative numbers, in the order given; all of them for None, and all of a number, for any axes.

    Raises:
        IndexRangeError: an array of `ndim` axes does not have one.
    """
    if axis is None or not ndim:
        return tuple(range(ndim))
    return tuple([checked_axis(a, ndim) for a in (axis if isinstance(axis, tuple) else (axis,))])


def kept_shape(shape: Shape, axis: Axis) -> Shape:
    """`shape` with 1 for the reduced axes."""
    if axis is None:
        return (1,) * len(shape)
    kept = list(shape)
    for a in axis if isinstance(axis, tuple) else (axis,):
        kept[a] = 1
    return tuple(kept)


def count(shape: Shape, axis: Axis) -> int:
    """How many elements go into one element of the result."""
    if axis is None or not shape:
        return math.prod(shape)
    return math.prod(shape[a] for a in (axis if isinstance(axis, tuple) else (axis,)))


def restore(reduced: Array, shape: Shape, axis: Axis, keepdims: bool) -> Array:
    """`reduced` with the reduced axes put back as axes of length 1, so that it broadcasts to `shape`."""
    if keepdims or axis is None or reduced.ndim == len(shape):
        return reduced
    return reshaped(reduced, kept_shape(shape, axis))


def spread(g: Array, shape: Shape, axis: Axis, keepdims: bool) -> Array:
    """The gradient of a sum: `g` repeated along the axes that were summed over.

    Args:
        g: gradient of the result of the reduction.
        shape: shape before the reduction.
        axis, keepdims: of the reduction.

    Returns:
        A read-only view of `shape`; no elements are copied.
    """
    kind = type(g)  # a recording array has the class of an array
    if g.size == 1 and (kind is np.ndarray or issubclass(kind, np.generic)):
        # a single element with no strides is five times as fast as broadcast_to
        view = np.ndarray(shape, g.dtype, g, 0, (0,) * len(shape))
        if kind is np.ndarray:
            view.setflags(write=False)
        return view
    return expand(restore(g, shape, axis, keepdims), shape=shape)


def _sum(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """The sum over `axis`."""
    return add_reduce(x, axis, None, None, keepdims)


def _mean(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """The mean over `axis`; NaN, without a warning, where there is nothing to average."""
    number = count(x.shape, axis)
    if not number:
        with np.errstate(invalid="ignore"):
            return add_reduce(x, axis, None, None, keepdims) / number
    if x.dtype == np.float16:
        return np.mean(x, axis=axis, keepdims=keepdims)
    return add_reduce(x, axis, None, None, keepdims) / number


def _var(x: Array, /, axis: Axis = None, *, correction: float = 0.0, keepdims: bool = False) -> Array:
    """The variance over `axis`: squared deviations from the mean over their number less `correction`."""
    return np.var(x, axis=axis, ddof=correction, keepdims=keepdims)


def _std(x: Array, /, axis: Axis = None, *, correction: float = 0.0, keepdims: bool = False) -> Array:
    """The standard deviation over `axis`, the root of `var`."""
    return np.std(x, axis=axis, ddof=correction, keepdims=keepdims)


def _deviation(x: Array, axis: Axis) -> Array:
    return x - mean(x, axis=axis, keepdims=True)


def _var_vjp(g: Array, x: Array, axis: Axis, correction: float, keepdims: bool) -> Array:
    freedom = count(x.shape, axis) - correction
    scale = 2.0 / freedom if freedom > 0 else math.nan
    return restore(g, x.shape, axis, keepdims) * scale * _deviation(x, axis)


def _std_vjp(g: Array, x: Array, out: Array, axis: Axis, correction: float, keepdims: bool) -> Array:
    freedom = count(x.shape, axis) - correction
    scaled = g / (where(out == 0, 1, out) * (freedom if freedom > 0 else math.nan))
    return restore(scaled, x.shape, axis, keepdims) * _deviation(x, axis)


def along(t: Array, slope: Array, axis: Axis, keepdims: bool) -> Array:
    """The tangent of a reduction: the argument's tangent times the gradient of each element, summed over the axes."""
    return sum_(t * (np.conjugate(slope) if slope.dtype.kind == "c" else slope), axis=axis, keepdims=keepdims)


def _max(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """The largest element over `axis`."""
    return maximum_reduce(x, axis, None, None, keepdims)


def _min(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """The smallest element over `axis`."""
    return minimum_reduce(x, axis, None, None, keepdims)


def _extreme_vjp(g: Array, x: Array, out: Array, axis: Axis, keepdims: bool) -> Array:
    tied = x == restore(out, x.shape, axis, keepdims)
    number = astype(sum_(tied, axis=axis, keepdims=True), dtype=g.dtype)
    return (restore(g, x.shape, axis, keepdims) / number) * tied


def _logsumexp(x: Array, /, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """``log(sum(exp(x)))`` over `axis`, safe from overflow; minus infinity where all elements are, or there is none.

    Args:
        x: real floating.
        axis: the axes to reduce.
        keepdims: leave reduced axes in place, with length 1.
    """
    if not count(x.shape, axis):
        return add_reduce(x, axis, None, None, keepdims) - np.inf
    top = maximum_reduce(x, axis, None, None, True)
    top = np.where(np.isfinite(top), top, x.dtype.type(0))
    with np.errstate(divide="ignore", over="ignore"):
        out = np.log(add_reduce(np.exp(x - top), axis, None, None, True)) + top
    return out if keepdims else np.squeeze(out, axis=axis)


def _logsumexp_vjp(g: Array, x: Array, out: Array, axis: Axis, keepdims: bool) -> Array:
    return restore(g, x.shape, axis, keepdims) * share(x, restore(out, x.shape, axis, keepdims))


def _var_jvp(t: Array, x: Array, out: Array, axis: Axis, correction: float, keepdims: bool) -> Array:
    return along(t, _var_vjp(ones_like(out), x, axis, correction, keepdims), axis, keepdims)


def _std_jvp(t: Array, x: Array, out: Array, axis: Axis, correction: float, keepdims: bool) -> Array:
    return along(t, _std_vjp(ones_like(out), x, out, axis, correction, keepdims), axis, keepdims)


def _extreme_jvp(t: Array, x: Array, out: Array, axis: Axis, keepdims: bool) -> Array:
    return along(t, _extreme_vjp(ones_like(out), x, out, axis, keepdims), axis, keepdims)


def _logsumexp_jvp(t: Array, x: Array, out: Array, axis: Axis, keepdims: bool) -> Array:
    return along(t, share(x, restore(out, x.shape, axis, keepdims)), axis, keepdims)


sum_: Op = define("sum", _sum, x=lambda g, x_shape, axis, keepdims: spread(g, x_shape, axis, keepdims), jvp="forward", complex="explicit", cost=0.15)
mean: Op = define(
    "mean",
    _mean,
    x=lambda g, x_shape, axis, keepdims: spread(g / (count(x_shape, axis) or 1), x_shape, axis, keepdims),
    jvp="forward", complex="explicit",
    cost=0.15,
)
var = define("var", _var, x=_var_vjp, jvp=_var_jvp, complex="explicit", cost=1.0)
std = define("std", _std, x=_std_vjp, jvp=_std_jvp, complex="explicit", cost=1.0)
max_ = define("max", _max, x=_extreme_vjp, jvp=_extreme_jvp, complex="explicit", cost=2.0)
min_ = define("min", _min, x=_extreme_vjp, jvp=_extreme_jvp, complex="explicit", cost=2.0)
logsumexp = define("logsumexp", _logsumexp, x=_logsumexp_vjp, jvp=_logsumexp_jvp, cost=1.5)


#: True if all, or some, elements over `axis` are true
all_ = define("all", lambda x, /, axis=None, *, keepdims=False: np.all(x, axis=axis, keepdims=keepdims))
any_ = define("any", lambda x, /, axis=None, *, keepdims=False: np.any(x, axis=axis, keepdims=keepdims))
#: the index of the first of the largest, or smallest, elements
argmax = define("argmax", lambda x, /, axis=None, *, keepdims=False: np.argmax(x, axis=axis, keepdims=keepdims))
argmin = define("argmin", lambda x, /, axis=None, *, keepdims=False: np.argmin(x, axis=axis, keepdims=keepdims))
count_nonzero = define("count_nonzero", lambda x, /, axis=None, *, keepdims=False: np.asarray(np.count_nonzero(x, axis=axis, keepdims=keepdims)))

# numpy's functions, with numpy's arguments


def in_dtype(row: Op, x: Array, dtype: Any, **statics: Any) -> Array:
    """A reduction or accumulation of `x` cast to `dtype` (None: of `x` as it is), with the result in that dtype.

    The ufuncs widen narrow integers; cast back, their results are the same as of arithmetic that wraps around in `dtype`.
    """
    if dtype is None:
        return row(x, **statics)
    result = row(x if x.dtype == dtype else astype(x, dtype=dtype), **statics)
    return result if result.dtype == dtype else astype(result, dtype=dtype)


def _numpy_reduction(name: str, row: Op) -> Callable[..., Array]:
    """numpy's calling convention for `row`."""

    def reduction(
        a: Array, axis: Axis = None, dtype: Any = None, out: Any = None, keepdims: Any = False, initial: Any = None, where: Any = True
    ) -> Array:
        refuse(name, out=out, initial=initial, where=where)
        options: dict[str, Any] = {"axis": _axis(axis), "keepdims": _flag(keepdims)}
        if row is mean and dtype is not None and np.dtype(dtype).kind in "iub":  # the sum wraps around, the quotient is cut off
            return astype(in_dtype(sum_, a, dtype, **options) / count(a.shape, options["axis"]), dtype=dtype)
        return in_dtype(row, a, dtype, **options)

    return reduction


def _numpy_extremum(name: str, row: Op) -> Callable[..., Array]:
    def extremum(a: Array, axis: Axis = None, out: Any = None, keepdims: Any = False, initial: Any = None, where: Any = True) -> Array:
        refuse(name, out=out, initial=initial, where=where)
        return row(a, axis=_axis(axis), keepdims=_flag(keepdims))

    return extremum


def _numpy_index(name: str, row: Op) -> Callable[..., Array]:
    def index(a: Array, axis: int | None = None, out: Any = None, *, keepdims: Any = False) -> Array:
        refuse(name, out=out)
        return row(a, axis=axis, keepdims=_flag(keepdims))

    return index


def _axis(axis: Any) -> Axis:
    return tuple(axis) if isinstance(axis, list) else axis


def _flag(keepdims: Any) -> bool:
    return False if keepdims is np._NoValue else bool(keepdims)


implements(np.sum)(_numpy_reduction("sum", sum_))
implements(np.mean)(_numpy_reduction("mean", mean))
implements(np.max, np.amax)(_numpy_extremum("max", max_))
implements(np.min, np.amin)(_numpy_extremum("min", min_))
implements(np.all)(_numpy_extremum("all", all_))
implements(np.any)(_numpy_extremum("any", any_))
implements(np.argmax)(_numpy_index("argmax", argmax))
implements(np.argmin)(_numpy_index("argmin", argmin))


def _numpy_moment(name: str, row: Op) -> Callable[..., Array]:
    def moment(
        a: Array,
        axis: Axis = None,
        dtype: Any = None,
        out: Any = None,
        ddof: float = 0,
        keepdims: Any = False,
        *,
        where: Any = True,
        mean: Any = None,
        correction: Any = None,
    ) -> Array:
        refuse(name, out=out, where=where, mean=mean)
        if dtype is not None:
            a = astype(a, dtype=dtype)
        correction = ddof if correction is None or correction is np._NoValue else correction
        return row(a, axis=_axis(axis), correction=correction, keepdims=_flag(keepdims))

    return moment


implements(np.var)(_numpy_moment("var", var))
implements(np.std)(_numpy_moment("std", std))


@implements(np.count_nonzero)
def np_count_nonzero(a: Array, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """numpy's ``count_nonzero``."""
    return count_nonzero(a, axis=_axis(axis), keepdims=keepdims)


@implements(np.ptp)
def np_ptp(a: Array, axis: Axis = None, out: Any = None, keepdims: Any = False) -> Array:
    """numpy's ``ptp``: the largest less the smallest element."""
    refuse("ptp", out=out)
    return max_(a, axis=axis, keepdims=_flag(keepdims)) - min_(a, axis=axis, keepdims=_flag(keepdims))


@implements(np.average)
def np_average(a: Array, axis: Axis = None, weights: Any = None, returned: Any = None, *, keepdims: Any = False) -> Array:
    """numpy's ``average``, of weights that broadcast with `a`, or are a vector along a single axis."""
    refuse("average", returned=returned)
    if weights is None:
        return mean(a, axis=axis, keepdims=_flag(keepdims))
    if isinstance(axis, int) and np.ndim(weights) == 1 and np.ndim(a) > 1:
        shape = [1] * np.ndim(a)
        shape[axis] = -1
        weights = np.reshape(weights, tuple(shape))
    weights = np.broadcast_to(weights, np.shape(a))
    return sum_(a * weights, axis=axis, keepdims=_flag(keepdims)) / sum_(weights, axis=axis, keepdims=_flag(keepdims))
