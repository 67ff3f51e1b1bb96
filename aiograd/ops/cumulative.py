"""Cumulative extrema and cumulative logsumexp.

Note [Where the extrema come from]
    Of equal elements the last counts, and a NaN is larger and smaller than every number and stays, as in PyTorch. The indices come out with
    the values, so the rule has nothing to look up: the gradient of each value goes to the element that it is.

Note [Gradients of a cumulative logsumexp]
    Element k has the weight ``exp(x[k] - out[j])`` in every later output j. With ``h[k] = g[k] + exp(out[k] - out[k+1]) * h[k+1]``, a linear
    recurrence with factors of at most 1, its gradient is ``exp(x[k] - out[k]) * h[k]``: nothing overflows, and no sum over pairs is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.ops.indexing import gather, gather_adjoint
from aiograd.ops.masking import where
from aiograd.ops.op import Op, define
from aiograd.ops.scan import linear_scan, shift
from aiograd.running.types import Array, Shape


def _extremum(x: Array, accumulate: Any, axis: int) -> tuple[Array, Array]:
    x = np.asarray(x)
    if not x.ndim:
        return x.copy(), np.zeros((), np.int64)
    values = accumulate(x, axis)
    along = [1] * x.ndim
    along[axis] = -1
    positions = np.arange(x.shape[axis]).reshape(along)
    is_new = (x == values) | np.isnan(x) if x.dtype.kind == "f" else x == values
    return values, np.maximum.accumulate(np.where(is_new, positions, 0), axis)


def _cummax(x: Array, /, axis: int = -1) -> tuple[Array, Array]:
    """The largest of the elements up to each, and its index along `axis`; see Note [Where the extrema come from].

    Args:
        x: real, any shape.
        axis: where to accumulate.

    Returns:
        values, indices (int64).
    """
    return _extremum(x, np.maximum.accumulate, axis)


def _cummin(x: Array, /, axis: int = -1) -> tuple[Array, Array]:
    """The smallest of the elements up to each, and its index along `axis`; as `_cummax`."""
    return _extremum(x, np.minimum.accumulate, axis)


def _extremum_vjp(g: tuple[Array | None, Array | None], out: tuple[Array, Array], x_shape: Shape, axis: int) -> Array | None:
    if g[0] is None or not x_shape:
        return g[0]
    return gather_adjoint(g[0], out[1], shape=x_shape, axis=axis)


def _extremum_jvp(t: Array, out: tuple[Array, Array], axis: int) -> tuple[Array, None]:
    return (gather(t, out[1], axis=axis) if t.shape else t), None


def _logcumsumexp(x: Array, /, axis: int = -1) -> Array:
    """``log(cumsum(exp(x)))`` without overflow.

    Args:
        x: real floating, any shape.
        axis: where to accumulate.
    """
    return np.logaddexp.accumulate(x, axis) if x.ndim else x.copy()


def _logcumsumexp_vjp(g: Array, x: Array, out: Array, axis: int) -> Array:
    if not x.shape:
        return g
    following = shift(out, axis=axis, by=-1)
    falls = _difference(out, following)
    return np.exp(_difference(x, out)) * linear_scan(g, np.exp(np.minimum(falls, 0.0)), axis=axis, reverse=True)


def _logcumsumexp_jvp(t: Array, x: Array, out: Array, axis: int) -> Array:
    if not x.shape:
        return t
    falls = _difference(shift(out, axis=axis, by=1), out)
    return linear_scan(np.exp(_difference(x, out)) * t, np.exp(np.minimum(falls, 0.0)), axis=axis)


def _difference(smaller: Array, larger: Array) -> Array:
    """``smaller - larger``, and -inf where both are."""
    nothing = np.isneginf(smaller)
    return where(nothing, smaller, where(nothing, 0.0, smaller) - where(nothing, 0.0, larger))


cummax: Op = define("cummax", _cummax, x=_extremum_vjp, jvp=_extremum_jvp, outputs=2, differentiable_outputs=(0,), cost=5.0)
cummin: Op = define("cummin", _cummin, x=_extremum_vjp, jvp=_extremum_jvp, outputs=2, differentiable_outputs=(0,), cost=5.0)
logcumsumexp: Op = define("logcumsumexp", _logcumsumexp, x=_logcumsumexp_vjp, jvp=_logcumsumexp_jvp, cost=20.0)
