"""The gamma function and its relatives on arrays: gammaln, digamma, Hurwitz's zeta function (the polygamma functions), beta.

Note [Approximation]
    `gammaln`: Taylor's series around 2 where an argument between 0.5 and 2.5 is, and Stirling's series above; arguments between are
    stepped down to the first, so that nothing cancels near the zeros 1 and 2. `gamma`: Stirling's series, arguments below 12 stepped up. `digamma`:
    its asymptotic series, arguments below 10 stepped up; absolute error 1e-15 near its zero at 1.46. `zeta`: Euler and Maclaurin's summation
    behind the first 12 terms. Negative arguments are reflected. All is computed in float64, to some 1e-14.

Source: Abramowitz and Stegun, chapter 6; the coefficients of the Taylor series are ``(zeta(k) - 1) (-1)**k / k``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from aiograd.ops.creation import zeros_like
from aiograd.ops.masking import where
from aiograd.ops.op import Op, define
from aiograd.running.types import Array

#: of ``log(gamma(2 + d)) / d``, lowest power first
TAYLOR = (
    0.42278433509846713, 0.3224670334241132, -0.0673523010531981, 0.020580808427784546, -0.007385551028673986, 0.0028905103307415234,
    -0.001192753911703261, 0.0005096695247430425, -0.00022315475845357939, 9.945751278180853e-05, -4.492623673813314e-05,
    2.050721277567069e-05, -9.439488275268397e-06, 4.374866789907488e-06, -2.039215753801366e-06, 9.55141213040742e-07,
    -4.492469198764566e-07, 2.1207184805554665e-07, -1.0043224823968099e-07, 4.7698101693639804e-08, -2.2711094608943164e-08,
    1.0838659214896955e-08, -5.183475041970047e-09, 2.4836745438024785e-09, -1.1921401405860912e-09, 5.731367241678862e-10,
)  # fmt: skip
#: of Stirling's series in ``1 / x``, ``B(2k) / (2k (2k - 1))``
STIRLING = (
    0.08333333333333333, -0.002777777777777778, 0.0007936507936507937, -0.0005952380952380953, 0.0008417508417508417, -0.0019175269175269176,
    0.00641025641025641, -0.029550653594771242,
)  # fmt: skip
#: of digamma in ``1 / x**2``, ``B(2k) / 2k``
PSI = (
    0.08333333333333333, -0.008333333333333333, 0.003968253968253968, -0.004166666666666667, 0.007575757575757576, -0.021092796092796094,
    0.08333333333333333, -0.4432598039215686,
)  # fmt: skip
#: ``B(2k) / (2k)!``
MACLAURIN = (
    0.08333333333333333, -0.001388888888888889, 3.306878306878307e-05, -8.267195767195768e-07, 2.08767569878681e-08, -5.284190138687493e-10,
    1.3382536530684679e-11, -3.3896802963225827e-13, 8.586062056277845e-15, -2.174868698558062e-16, 5.5090028283602295e-18,
)  # fmt: skip
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
#: gamma overflows beyond
LARGEST = 171.7


def polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """The polynomial of `x`; the lowest power's coefficient is the first."""
    total = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        total = total * x + c
    return total


def in_float64(function: Callable[..., Array], *arrays: Array) -> Array:
    """`function` of arrays, computed in float64; the result in the dtype of the floating ones among them, in float64 of integers."""
    if any(hasattr(x, "dtype") and x.dtype.kind == "c" for x in arrays):
        raise TypeError("complex numbers, expected real ones")
    floating = [x.dtype for x in arrays if hasattr(x, "dtype") and x.dtype.kind == "f"]  # a number takes the dtype of the array beside it
    wanted = np.result_type(*floating) if floating else np.dtype(np.float64)
    with np.errstate(all="ignore"):
        return np.asarray(function(*(np.asarray(x, np.float64) for x in arrays)), wanted)


def _sine_of_pi(x: Array) -> Array:
    """``sin(pi x)``, exact zeros at the integers."""
    nearest = np.round(x)
    return np.sin(math.pi * (x - nearest)) * np.where(np.mod(nearest, 2) == 0, 1.0, -1.0)


def _gammaln_positive(x: Array) -> Array:
    large = x > 12.0
    big = np.where(large, x, 12.0)
    stirling = (big - 0.5) * np.log(big) - big + HALF_LOG_2PI + polynomial(STIRLING, 1.0 / (big * big)) / big
    y = np.where(large | np.isnan(x), 2.0, x)
    product = np.ones_like(y)
    for _ in range(10):
        down = y > 2.5
        y = np.where(down, y - 1.0, y)
        product = np.where(down, product * y, product)
    low = y < 1.5
    very_low = y < 0.5
    # around 2, as gamma(y) = gamma(y + 1) / y
    d = np.where(very_low, y, np.where(low, y - 1.0, y - 2.0))
    near = d * polynomial(TAYLOR, d)
    near = near - np.where(very_low, np.log(y) + np.log1p(y), np.where(low, np.log1p(y - 1.0), 0.0)) + np.log(product)
    return np.where(large, stirling, np.where(np.isnan(x), x, near))


def _gammaln(x: Array, /) -> Array:
    """The logarithm of the magnitude of the gamma function; infinite at 0, -1, -2, ... and at both infinities."""

    def function(x: Array) -> Array:
        negative = x <= 0.0
        value = _gammaln_positive(np.where(negative, 1.0 - x, x))
        sine = np.absolute(_sine_of_pi(x))
        value = np.where(negative, math.log(math.pi) - np.log(sine) - value, value)
        return np.where(np.isinf(x) | (negative & (sine == 0.0)), np.inf, value)

    return in_float64(function, x)


def _gamma_positive(x: Array) -> Array:
    y = np.minimum(x, LARGEST + 1.0)
    product = np.ones_like(y)
    for _ in range(12):
        up = y < 12.0
        product = np.where(up, product * y, product)
        y = np.where(up, y + 1.0, y)
    power = np.power(y, 0.5 * y - 0.25)  # the root of it, which does not overflow before its square does
    series = np.exp(polynomial(STIRLING, 1.0 / (y * y)) / y)
    return math.sqrt(2.0 * math.pi) * power * np.exp(-y) * power * series / product


def _gamma(x: Array, /) -> Array:
    """The gamma function; NaN at -1, -2, ..., infinite at 0."""

    def function(x: Array) -> Array:
        negative = x < 0.5
        value = _gamma_positive(np.where(negative, 1.0 - x, x))
        sine = _sine_of_pi(x)
        value = np.where(negative, math.pi / (sine * value), value)
        value = np.where((x == np.round(x)) & (x < 23.0), np.round(value), value)  # factorials
        value = np.where((x < 0.0) & (sine == 0.0), np.nan, value)
        return np.where(x == 0.0, np.copysign(np.inf, x), np.where(x > LARGEST, np.inf, value))

    return in_float64(function, x)


def _rgamma(x: Array, /) -> Array:
    """``1 / gamma(x)``, 0 at 0, -1, -2, ..."""

    def function(x: Array) -> Array:
        large = np.absolute(x) > 150.0  # where gamma may leave the range before its reciprocal does
        value = 1.0 / _gamma(np.where(large, 1.0, x))
        sine = _sine_of_pi(np.where(large & (x < 0.0), x, 0.5))
        far = np.where(x > 0.0, np.exp(-_gammaln(x)), np.exp(_gammaln(1.0 - x)) * (sine / math.pi))
        value = np.where(large, np.where((x < 0.0) & (sine == 0.0), 0.0, far), value)
        return np.where((x <= 0.0) & (x == np.round(x)), 0.0, value)

    return in_float64(function, x)


def _rgamma_vjp(g: Array, x: Array, out: Array) -> Array:
    # left of 1/2 by the reflection formula, which has no pole there
    left = x < 0.5
    other = 1 - where(left, x, 0.5)
    angle = math.pi * other  # sin(pi x) = sin(angle), cos(pi x) = -cos(angle)
    mirrored = -(gamma(other) * (np.cos(angle) + np.sin(angle) * (1 / math.pi) * digamma(other)))
    return g * where(left, mirrored, -(out * digamma(where(left, 1, x))))


def _gammasgn(x: Array, /) -> Array:
    """The sign of the gamma function; NaN at -1, -2, ..."""

    def function(x: Array) -> Array:
        value = np.where((x > 0.0) | (np.mod(np.floor(x), 2.0) == 0.0), 1.0, -1.0)
        value = np.where(x == 0.0, np.copysign(1.0, x), value)
        return np.where(np.isnan(x) | ((x < 0.0) & (x == np.round(x))), np.nan, value)

    return in_float64(function, x)


def _digamma(x: Array, /) -> Array:
    """The derivative of `gammaln`; NaN at the negative integers."""

    def function(x: Array) -> Array:
        negative = x <= 0.0
        y = np.where(negative, 1.0 - x, x)
        total = np.zeros_like(y)
        for _ in range(10):
            small = y < 10.0
            total = total - np.where(small, 1.0 / y, 0.0)
            y = np.where(small, y + 1.0, y)
        square = 1.0 / (y * y)
        value = total + np.log(y) - 0.5 / y - square * polynomial(PSI, square)
        fraction = x - np.round(x)
        value = np.where(negative, value - math.pi / np.tan(math.pi * fraction), value)
        value = np.where(negative & (fraction == 0.0), np.nan, value)
        return np.where(x == 0.0, np.copysign(np.inf, -x), np.where(np.isposinf(x), np.inf, value))

    return in_float64(function, x)


def _zeta_positive(s: Array, q: Array) -> Array:
    terms = 12
    total = np.zeros(np.broadcast_shapes(s.shape, q.shape))
    for k in range(terms):
        total = total + np.power(q + k, -s)
    a = q + terms
    power = np.power(a, -s)
    total = total + np.power(a, 1.0 - s) / (s - 1.0) + 0.5 * power
    s = np.where(power == 0.0, 1.0, s)  # of those nothing is left to add, and their factors may be infinite
    term = power * s / a
    for k, c in enumerate(MACLAURIN):
        total = total + c * term
        term = term * ((s + 2 * k + 1) * (s + 2 * k + 2)) / (a * a)
    return total


def _zeta(x1: Array, x2: Array, /) -> Array:
    """Hurwitz's zeta function, the sum of ``(k + x2) ** -x1`` over k = 0, 1, ...

    Args:
        x1: above 1; an integer where `x2` is negative.
        x2: infinite at 0, -1, -2, ...
    """

    def function(s: Array, q: Array) -> Array:
        s, q = np.broadcast_arrays(s, q)
        negative = q < 0.0
        whole = np.ceil(-q)  # so many terms have a negative base
        first = np.where(negative, q + whole, q)
        last = np.where(negative, 1.0 - first, 1.0)
        value = _zeta_positive(s, np.where(q == 0.0, 1.0, first))
        if negative.any():
            sign = np.where(np.mod(s, 2.0) == 0.0, 1.0, -1.0)
            mirrored = sign * (_zeta_positive(s, last) - _zeta_positive(s, np.where(negative, 1.0 - q, 2.0)))
            value = np.where(negative, np.where(s == np.round(s), value + mirrored, np.nan), value)
        value = np.where((q <= 0.0) & (q == np.round(q)), np.inf, np.where(np.isposinf(q), 0.0, value))
        return np.where(s > 1.0, value, np.where(s == 1.0, np.inf, np.nan))

    return in_float64(function, x1, x2)


gammaln: Op = define("gammaln", _gammaln, x=lambda g, x: g * digamma(x), jvp="rule", cost=60.0)
gamma: Op = define("gamma", _gamma, x=lambda g, x, out: g * out * digamma(x), jvp="rule", cost=60.0)
digamma: Op = define("digamma", _digamma, x=lambda g, x: g * zeta(2.0, x), jvp="rule", cost=100.0)
rgamma: Op = define("rgamma", _rgamma, x=_rgamma_vjp, jvp="rule", cost=200.0)
gammasgn: Op = define("gammasgn", _gammasgn, x=lambda g: zeros_like(g), jvp="rule", cost=0.2)
zeta: Op = define("zeta", _zeta, x2=lambda g, x1, x2: -(g * x1 * zeta(x1 + 1.0, x2)), jvp="rule", cost=100.0)


def polygamma(n: int, x: Array, /) -> Array:
    """The n-th derivative of digamma."""
    return digamma(x) if n == 0 else zeta(n + 1.0, x) * ((-1.0) ** (n + 1) * math.factorial(n))


def betaln(x1: Array, x2: Array, /) -> Array:
    """The logarithm of the magnitude of the beta function.

    Where a number is large, the terms of Stirling's series that cancel are taken together.
    """
    order = x1 >= x2
    large, small = where(order, x1, x2), where(order, x2, x1)
    far = np.logical_and(large >= 12.0, large + small >= 12.0)
    both = np.logical_and(far, small >= 12.0)
    one = np.logical_and(far, small < 12.0)
    plain = gammaln(where(far, 1.0, large)) + gammaln(where(both, 1.0, small)) - gammaln(where(far, 1.0, large + small))
    a, b = where(far, large, 24.0), where(far, small, 12.0)
    rest = _stirling_rest(a) - _stirling_rest(a + b) - (a - 0.5) * np.log1p(b / a)
    first = rest - where(one, b, 0.0) * (np.log(a + b) - 1.0)
    c = where(both, b, 12.0)
    second = rest + _stirling_rest(c) - c * np.log1p(a / c) + HALF_LOG_2PI - 0.5 * np.log(c)
    return where(both, second, where(one, plain + first, plain))


def _stirling_rest(x: Array) -> Array:
    """The logarithm of the gamma function less Stirling's formula, for x of at least 12."""
    inverse = 1.0 / x
    square = inverse * inverse
    total = square * STIRLING[-1]
    for c in STIRLING[-2:0:-1]:
        total = (total + c) * square
    return (total + STIRLING[0]) * inverse


def beta(x1: Array, x2: Array, /) -> Array:
    """The beta function; NaN where the gamma functions above and below the line are infinite."""
    pole = np.logical_or(np.logical_and(x1 <= 0.0, x1 == np.floor(x1)), np.logical_and(x2 <= 0.0, x2 == np.floor(x2)))
    signed = np.logical_and(np.logical_or(x1 < 0.0, x2 < 0.0), np.logical_not(pole))
    near = np.logical_and(signed, np.logical_and(np.absolute(x1) < 8.0, np.absolute(x2) < 8.0))
    a, b = where(near, x1, 1.0), where(near, x2, 1.0)
    sign = where(signed, gammasgn(x1) * gammasgn(x2) * gammasgn(x1 + x2), 1.0)
    # near 0 by the reciprocal of a gamma function, by which the zeros have derivatives
    return where(near, gamma(a) * gamma(b) * rgamma(a + b), sign * np.exp(betaln(where(near, 1.0, x1), where(near, 1.0, x2))))


def multigammaln(x: Array, d: int, /) -> Array:
    """The logarithm of the multivariate gamma function of dimension `d`; NaN where `x` is not above ``(d - 1) / 2``."""
    total = gammaln(x) + 0.25 * d * (d - 1) * math.log(math.pi)
    for k in range(1, d):
        total = total + gammaln(x - 0.5 * k)
    return where(x > 0.5 * (d - 1), total, np.nan)
