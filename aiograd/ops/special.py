"""Special functions: erf, sinc, the logistic function and its relatives, xlogy."""

from __future__ import annotations

import math

import numpy as np

from aiograd.kernels import activation as kernels
from aiograd.ops import error_function
from aiograd.ops.elementwise import LN2
from aiograd.ops.gamma import in_float64
from aiograd.ops.masking import mask, where
from aiograd.ops.op import Op, define, implements
from aiograd.running.types import Array

TWO_OVER_SQRT_PI = 2.0 / math.sqrt(math.pi)


erf = define("erf", error_function.erf, x=lambda g, x: g * np.exp(-(x * x)) * TWO_OVER_SQRT_PI, jvp="rule", cost=3.0)
erfc = define("erfc", error_function.erfc, x=lambda g, x: g * np.exp(-(x * x)) * -TWO_OVER_SQRT_PI, jvp="rule", cost=3.0)


def _sigmoid(x: Array, /) -> Array:
    """The logistic function ``1 / (1 + exp(-x))``, accurate in both tails.

    Args:
        x: any numbers, any shape; integers and booleans count as float64.
    """
    kind = x.dtype.kind
    if kind == "f":
        return kernels.sigmoid(x)
    if kind != "c":
        return kernels.sigmoid(x.astype(np.float64))
    negative = x.real < 0
    small = np.exp(np.where(negative, x, -x))
    return np.where(negative, small, 1) / (1 + small)


def _softplus(x: Array, /, beta: float = 1.0) -> Array:
    """``log(1 + exp(beta * x)) / beta``, safe for large `x`.

    Args:
        x: real floating, any shape.
        beta: sharpness.
    """
    if beta == 1.0:
        return np.maximum(x, 0) + np.log1p(np.exp(-np.absolute(x)))
    return _softplus(x * beta) / beta


sigmoid = define("sigmoid", _sigmoid, x=lambda g, out: g * (out - out * out), jvp="rule", complex="holomorphic", cost=1.5)
#: ``log(sigmoid(x))``, safe for large negative `x`
log_sigmoid = define(
    "log_sigmoid", lambda x, /: np.minimum(x, 0) - np.log1p(np.exp(-np.absolute(x))), x=lambda g, x: g * sigmoid(-x), jvp="rule", cost=2.5
)
softplus = define("softplus", _softplus, x=lambda g, x, beta: g * sigmoid(x if beta == 1.0 else x * beta), jvp="rule", cost=2.5)


def share(x: Array, out: Array) -> Array:
    """``exp(x - out)``, where ``exp(x)`` is a term of ``exp(out)``, also where both are infinite: 1 at infinity, 0 at minus infinity.

    So the gradient of a sum dominated by an infinite term goes to that term, and adding zero probabilities has a gradient.
    """
    infinite = np.isinf(out)
    gap = np.minimum(x - where(infinite, 0, out), 0)
    return mask(np.exp(gap), np.logical_not(np.logical_and(infinite, x != np.inf)))


logaddexp = define("logaddexp", np.logaddexp, x1=lambda g, x1, out: g * share(x1, out), x2=lambda g, x2, out: g * share(x2, out), cost=4.0)
logaddexp2 = define(
    "logaddexp2", np.logaddexp2, x1=lambda g, x1, out: g * share(x1 * LN2, out * LN2), x2=lambda g, x2, out: g * share(x2 * LN2, out * LN2), cost=8.0
)


def _xlogy(x1: Array, x2: Array, /) -> Array:
    """``x1 * log(x2)``, 0 where `x1` is 0 and `x2` is not NaN."""
    zero = np.equal(x1, 0) & ~np.isnan(x2)
    return np.where(zero, 0, x1) * np.log(np.where(zero, 1, x2))


def _xlogy_x1(g: Array, x1: Array, x2: Array) -> Array:
    return g * np.log(where(np.logical_and(x1 == 0, x2 <= 0), 1, x2))


def _xlogy_x2(g: Array, x1: Array, x2: Array) -> Array:
    return g * (x1 / where(np.logical_and(x1 == 0, x2 == 0), 1, x2))


xlogy = define("xlogy", _xlogy, x1=_xlogy_x1, x2=_xlogy_x2, jvp="rule", cost=4.0)


def _xlog1py(x1: Array, x2: Array, /) -> Array:
    """``x1 * log1p(x2)``, 0 where `x1` is 0 and `x2` is not NaN."""
    zero = np.equal(x1, 0) & ~np.isnan(x2)
    return np.where(zero, 0, x1) * np.log1p(np.where(zero, 0, x2))


def _xlog1py_x1(g: Array, x1: Array, x2: Array) -> Array:
    return g * np.log1p(where(np.logical_and(x1 == 0, x2 <= -1), 0, x2))


def _xlog1py_x2(g: Array, x1: Array, x2: Array) -> Array:
    return g * (x1 / (1 + where(np.logical_and(x1 == 0, x2 == -1), 0, x2)))


xlog1py = define("xlog1py", _xlog1py, x1=_xlog1py_x1, x2=_xlog1py_x2, jvp="rule", cost=4.0)

# The normal distribution and the inverses of erf and of the logistic function.


def _logit(x: Array, /) -> Array:
    """The inverse of the logistic function: ``log(x / (1 - x))``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # near 1/2 the quotient is near 1, and its logarithm would lose digits
        return np.where(np.absolute(x - 0.5) < 0.2, 2 * np.arctanh(np.clip(2 * x - 1, -0.5, 0.5)), np.log(x / (1 - x)))


def _ndtri(x: Array, /) -> Array:
    """The inverse of the distribution function of a standard normal: infinite at 0 and 1, NaN beyond."""
    return in_float64(error_function.ndtri, x)


#: ``exp(x**2) * erfc(x)``, also where one of the two is too large or too small to represent
erfcx = define(
    "erfcx", lambda x, /: in_float64(error_function.erfcx, x), x=lambda g, x, out: g * (2.0 * x * out - TWO_OVER_SQRT_PI), jvp="rule", cost=6.0
)
ndtri = define("ndtri", _ndtri, x=lambda g, out: g * (np.exp(out * out * 0.5) * math.sqrt(2 * math.pi)), jvp="rule", cost=30.0)
erfinv = define("erfinv", error_function.erfinv, x=lambda g, out: g * (np.exp(out * out) * (1 / TWO_OVER_SQRT_PI)), jvp="rule", cost=3.0)


def _mills_gap(x: Array, /, order: int = 0) -> Array:
    """See `aiograd.ops.error_function.mills_gap`; the rows of all orders are closed under differentiation."""
    return in_float64(lambda x: error_function.mills_gap(x, order), x)


def _log_ndtr_vjp(g: Array, x: Array, out: Array) -> Array:
    negative = x < 0
    left, right = where(negative, x, 0), where(negative, 0, x)
    density = np.exp(-0.5 * right * right - where(negative, 0, out)) * (1 / math.sqrt(2 * math.pi))
    return g * where(negative, mills_gap(left) - left, density)


mills_gap: Op = define("mills_gap", _mills_gap, x=lambda g, x, order: g * mills_gap(x, order=order + 1), jvp="rule", cost=20.0)
log_ndtr = define("log_ndtr", error_function.log_ndtr, x=_log_ndtr_vjp, jvp="rule", cost=4.0)


def _logit_vjp(g: Array, x: Array) -> Array:
    variance = x * (1 - x)
    return g / where(variance < 0, math.nan, variance)  # outside of [0, 1] there is no value


logit = define("logit", _logit, x=_logit_vjp, jvp="rule", cost=3.0)


def ndtr(x: Array, /) -> Array:
    """The probability that a standard normal is below `x`."""
    return erfc(x * -math.sqrt(0.5)) * 0.5


def erfcinv(x: Array, /) -> Array:
    """The inverse of erfc."""
    return ndtri(x * 0.5) * -math.sqrt(0.5)


def _rel_entr(x1: Array, x2: Array, /) -> Array:
    """``x1 * log(x1 / x2)``, 0 where `x1` is 0 and `x2` at least 0, infinite where either is below 0 or `x2` alone is 0."""
    some = (np.asarray(x1) > 0) & (np.asarray(x2) > 0)
    with np.errstate(over="ignore", under="ignore"):
        first, second = np.where(some, x1, 1), np.where(some, x2, 1)
        ratio = first / second
        away = (ratio < np.finfo(ratio.dtype).tiny) | np.isinf(ratio)  # the ratio was rounded to 0 or infinity, or lost digits
        logarithm = np.where(away, np.log(first) - np.log(second), np.log(np.where(away, 1, ratio)))
        near = (ratio > 0.5) & (ratio < 2)  # the difference of the two is exact
        value = np.where(some, x1, 0) * np.where(near, np.log1p(np.where(near, first - second, 0) / second), logarithm)
    return np.where(some | (np.equal(x1, 0) & np.greater_equal(x2, 0)) | np.isnan(x1 + x2), np.where(np.isnan(x1 + x2), x1 + x2, value), np.inf)


rel_entr = define(
    "rel_entr", _rel_entr, x1=lambda g, x1, x2: g * (np.log(x1) - np.log(where(x2 == 0, 1, x2)) + 1),
    x2=lambda g, x1, x2: -(g * (x1 / where(np.logical_and(x1 == 0, x2 == 0), 1, x2))), jvp="rule", cost=5.0
)


def entr(x: Array, /) -> Array:
    """``-x * log(x)``, 0 at 0."""
    return -xlogy(x, x)


# (exp(x) - 1) / x and its derivatives, the integrals of t**order exp(x t) over [0, 1], a family that is closed under differentiation.


def _exprel(x: Array, /, order: int = 0) -> Array:
    """``(exp(x) - 1) / x``, 1 at 0, or its derivative of that order.

    Args:
        x: real, any shape.
        order: how often to differentiate.
    """

    def function(x: Array) -> Array:
        # the recurrence cancels for small x: there the power series, of exp(-x) times the integral where x is negative, so that no signs alternate
        near = np.absolute(x) < order + 2.0
        outside, power = np.where(near, 1.0, x), np.exp(x)
        value = np.expm1(outside) / outside
        for n in range(1, order + 1):
            value = (power - n * value) / outside
        size, positive = np.where(near, np.absolute(x), 0.0), x >= 0.0
        term, series = np.full_like(x, 1.0 / (order + 1.0)), np.zeros_like(x)
        for k in range(1, 30 + 6 * order):
            series = series + term
            term = term * size * np.where(positive, (order + k) / (k * (order + k + 1.0)), 1.0 / (order + k + 1.0))
        return np.where(near, np.where(positive, series, series * power), np.where(np.isinf(power), np.inf, value))

    return in_float64(function, x)


# The derivatives of sinc, as one family that is closed under differentiation.


def _sinc(x: Array, /, order: int = 0) -> Array:
    """``sin(pi x) / (pi x)``, 1 at 0, or its derivative of that order.

    Args:
        x: real floating, any shape.
        order: how often to differentiate.
    """
    if order == 0:
        return np.sinc(x)
    u = np.multiply(x, math.pi)
    # near 0 the closed form cancels: there the power series, which terms of (order + 2)**(2k) / (2k)! end quickly
    near = np.absolute(u) < order + 2.0
    outside = np.where(near, 1.0, u)
    value = np.sin(outside) / outside
    for n in range(1, order + 1):
        value = (np.sin(outside + n * (math.pi / 2)) - n * value) / outside
    inside = np.where(near, u, 0.0)
    first = (order + 1) // 2
    # each term from the one before: powers alone leave the range of float32
    term = inside * (-1.0) ** first if order % 2 else np.full_like(inside, (-1.0) ** first)
    series = np.zeros_like(inside)
    for k in range(first, first + 14 + 2 * order):
        power = 2 * k - order
        series = series + term * (1 / (2 * k + 1))
        term = term * (inside * inside) * (-1 / ((power + 1) * (power + 2)))
    return np.asarray(np.where(near, series, value) * math.pi**order, dtype=x.dtype)


exprel: Op = define("exprel", _exprel, x=lambda g, x, order: g * exprel(x, order=order + 1), jvp="rule", cost=100.0)
sinc: Op = define("sinc", _sinc, x=lambda g, x, order: g * sinc(x, order=order + 1), jvp="rule", cost=200.0)


@implements(np.sinc)
def np_sinc(x: Array) -> Array:
    """numpy's ``sinc``."""
    return sinc(x)
