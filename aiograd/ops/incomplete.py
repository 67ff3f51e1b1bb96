"""The regularized incomplete gamma and beta functions on arrays.

Note [Ways to integrate]
    =======================  =========================================================================================
    P, ``x <= a + 1``          the power series, for a below 100
    Q, ``x > a + 1``           the continued fraction, for a below 100
    Q, ``x <= 1``              1 less the first term of the power series by expm1, so that a small a loses no digits
    a of at least 100        Gauss and Legendre's rule on the tail that `x` cuts off
    betainc                  of the side of the mean where x is: the continued fraction, or for an argument of at least 100 the power series
                             (the other up to 10) or Gauss and Legendre's rule in the logarithm of the odds
    =======================  =========================================================================================

    All begin with the integrand at `x`. For large a and b it is taken as its distance from its peak, ``log(1 + u) - u``, since the powers and
    the gamma functions cancel. Relative errors are some 1e-13.

Source: Abramowitz and Stegun, 6.5.29, 6.5.31, 26.5.8; Lentz's evaluation of continued fractions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from aiograd.ops.gamma import HALF_LOG_2PI, STIRLING, betaln, gammaln, in_float64, polynomial
from aiograd.ops.op import Op, define, no_derivative
from aiograd.ops.special import xlog1py, xlogy
from aiograd.running.types import Array

#: a from which on the tail is integrated, and arguments from which on Stirling's series is exact to rounding
TAIL_FROM, STIRLING_FROM = 100.0, 12.0
_TINY = 1e-300
_MOST_STEPS = 20000
_BLOCK = 4096


def _stirling(x: Array) -> Array:
    """The logarithm of the gamma function, less ``(x - 1/2) log(x) - x + log(2 pi) / 2``."""
    return polynomial(STIRLING, 1.0 / (x * x)) / x


def _log1pmx(u: Array, ratio: Array) -> Array:
    """``log(1 + u) - u``, `ratio` being 1 + u."""
    near = np.absolute(u) < 0.5
    small = np.where(near, u, 0.0)
    r = small / (2.0 + small)
    square, series = r * r, np.zeros_like(u)
    for k in range(35, 1, -2):
        series = series * square + 1.0 / k
    return np.where(near, r * (2.0 * square * series - small), np.log(np.where(near, 1.0, ratio)) - u)


def _expm1mx(w: Array) -> Array:
    """``exp(w) - 1 - w``."""
    near = np.absolute(w) < 2.0
    small, series = np.where(near, w, 0.0), np.ones_like(w)
    for k in range(28, 2, -1):
        series = 1.0 + series * small / k
    return np.where(near, 0.5 * small * small * series, np.expm1(w) - w)


def _front(a: Array, x: Array) -> Array:
    """``x**a exp(-x) / gamma(a + 1)``."""
    large = a > STIRLING_FROM
    big, small = np.where(large, a, STIRLING_FROM), np.where(large, 1.0, a)
    far = big * _log1pmx((x - big) / big, x / big) - HALF_LOG_2PI - 0.5 * np.log(big) - _stirling(big)
    return np.exp(np.where(large, far, small * np.log(x) - x - gammaln.forward(small + 1.0)))


def _gamma_series(a: Array, x: Array) -> Array:
    total, term = np.ones_like(x), np.ones_like(x)
    for k in range(1, _MOST_STEPS):
        term = term * (x / (a + k))
        total = total + term
        if not (term > 1e-17 * total).any():
            break
    return total * _front(a, x)


def _gamma_fraction(a: Array, x: Array) -> Array:
    b = x + 1.0 - a
    c, d = np.full_like(x, 1.0 / _TINY), 1.0 / b
    value = d
    for k in range(1, _MOST_STEPS):
        factor = -k * (k - a)
        b = b + 2.0
        d = factor * d + b
        d = 1.0 / np.where(np.absolute(d) < _TINY, _TINY, d)
        c = b + factor / c
        c = np.where(np.absolute(c) < _TINY, _TINY, c)
        value = value * (c * d)
        if not (np.absolute(c * d - 1.0) > 2e-15).any():
            break
    return value * a * _front(a, x)


def _gamma_small(a: Array, x: Array) -> Array:
    """Q for x of at most 1."""
    total, term = np.zeros_like(x), np.ones_like(x)
    for k in range(1, 22):
        term = term * (-x / k)
        total = total + term / (a + k)
    log = a * np.log(x) - gammaln.forward(a + 1.0)
    return -np.expm1(log) - a * np.exp(log) * total


def _in_blocks(function: Callable[..., Array], *arrays: Array) -> Array:
    """`function` of one-dimensional arrays, in blocks, so that its arrays of nodes by elements stay small."""
    parts = [function(*(x[i : i + _BLOCK] for x in arrays)) for i in range(0, arrays[0].size, _BLOCK)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@functools.cache
def _rule() -> tuple[Array, Array]:
    """Nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    return (nodes + 1.0) / 2.0, weights / 2.0


def _gamma_tail(a: Array, x: Array) -> Array:
    """Q where x is at least a, P where it is not, for large a."""
    upper = np.where(x >= a, 1.0, -1.0)
    gap = np.absolute(x - a)
    # where the integrand, in the logarithm of its argument, has fallen by exp(-40)
    length = 80.0 / (gap + np.sqrt(gap * gap + np.where(upper > 0.0, 80.0, 50.0) * x))
    nodes, weights = _rule()
    w = (upper * length)[..., np.newaxis] * nodes
    exponent = (a - x)[..., np.newaxis] * w - x[..., np.newaxis] * _expm1mx(w)
    return (np.exp(exponent) * weights).sum(-1) * length * a * _front(a, x)


def _gammas(a: Array, x: Array) -> tuple[Array, Array]:
    """P and Q."""
    a, x = np.broadcast_arrays(a, x)
    p, q = np.full(x.shape, np.nan), np.full(x.shape, np.nan)
    fair = (a >= 0.0) & (x >= 0.0)
    low, high = fair & ((x == 0.0) & (a > 0.0)), fair & (((a == 0.0) & (x > 0.0)) | (np.isinf(x) & np.isfinite(a)))
    p[low], q[low], p[high], q[high] = 0.0, 1.0, 1.0, 0.0
    inner = (a > 0.0) & (x > 0.0) & np.isfinite(a) & np.isfinite(x)
    tail = inner & (a >= TAIL_FROM)
    below = inner & ~tail & (x <= a + 1.0)
    above = inner & ~tail & ~below
    for mask, function, lower in ((tail & (x < a), _gamma_tail, True), (tail & (x >= a), _gamma_tail, False),
                                  (below, _gamma_series, True), (above, _gamma_fraction, False)):  # fmt: skip
        if mask.any():
            value = _in_blocks(function, a[mask], x[mask])
            p[mask], q[mask] = (value, 1.0 - value) if lower else (1.0 - value, value)
    small = below & (x <= 1.0)
    if small.any():
        q[small] = _gamma_small(a[small], x[small])
    return p, q


def _gammainc(x1: Array, x2: Array, /) -> Array:
    """The regularized lower incomplete gamma function, the integral of ``t**(x1 - 1) exp(-t) / gamma(x1)`` from 0 to `x2`.

    Args:
        x1: at least 0.
        x2: at least 0; NaN elsewhere.
    """
    return in_float64(lambda a, x: _gammas(a, x)[0], x1, x2)


def _log_beta(a: Array, b: Array) -> Array:
    """The logarithm of the beta function, without the digits that large arguments lose in a difference of gamma functions."""
    small, large = np.minimum(a, b), np.maximum(a, b)
    whole = small + large
    big = np.maximum(large, STIRLING_FROM)
    ratio = -(big - 0.5) * np.log1p(small / big) - small * np.log(small + big) + small + _stirling(big) - _stirling(small + big)
    return gammaln.forward(small) + np.where(large > STIRLING_FROM, ratio, gammaln.forward(large) - gammaln.forward(whole))


def _beta_front(a: Array, b: Array, x: Array, y: Array) -> Array:
    """``x**a y**b / (a beta(a, b))``, y being 1 - x."""
    large = np.minimum(a, b) > STIRLING_FROM
    big_a, big_b = np.where(large, a, STIRLING_FROM), np.where(large, b, STIRLING_FROM)
    whole = big_a + big_b
    off = np.where(x <= 0.5, x * whole - big_a, big_b - y * whole)  # from the peak
    far = big_a * _log1pmx(off / big_a, x * whole / big_a) + big_b * _log1pmx(-off / big_b, y * whole / big_b)
    far = far + _stirling(whole) - _stirling(big_a) - _stirling(big_b)
    far = far + 0.5 * np.log(big_b / (big_a * whole)) - HALF_LOG_2PI
    near_a, near_b = np.where(large, 1.0, a), np.where(large, 1.0, b)
    logs = near_a * np.where(x <= 0.5, np.log(x), np.log1p(-y)) + near_b * np.where(x <= 0.5, np.log1p(-x), np.log(y))
    return np.exp(np.where(large, far, logs - np.log(near_a) - _log_beta(near_a, near_b)))


def _beta_fraction(a: Array, b: Array, x: Array, y: Array) -> Array:
    """betainc for x up to its mean, by Lentz's evaluation of two terms at a time."""
    c = np.ones_like(x)
    d = 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / np.where(np.absolute(d) < _TINY, _TINY, d)
    value = d
    for m in range(1, _MOST_STEPS):
        for factor in (m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m)), -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))):
            d = 1.0 + factor * d
            d = 1.0 / np.where(np.absolute(d) < _TINY, _TINY, d)
            c = 1.0 + factor / c
            c = np.where(np.absolute(c) < _TINY, _TINY, c)
            value = value * (c * d)
        if not (np.absolute(c * d - 1.0) > 2e-15).any():
            break
    return value * _beta_front(a, b, x, y)


def _beta_series(a: Array, b: Array, x: Array, y: Array) -> Array:
    total, term = np.ones_like(x), np.ones_like(x)
    for k in range(_MOST_STEPS):
        term = term * ((a + b + k) * x / (a + 1.0 + k))
        total = total + term
        if not (term > 1e-17 * total).any():
            break
    return total * _beta_front(a, b, x, y)


def _beta_tail(a: Array, b: Array, x: Array, y: Array) -> Array:
    """betainc for x up to its mean, by the integral over the logarithm of the odds."""
    whole = a + b
    gap = np.where(x <= 0.5, a - whole * x, whole * y - b)
    length = 80.0 / (gap + np.sqrt(gap * gap + 50.0 * whole * x * y))
    nodes, weights = _rule()
    w = -length[..., np.newaxis] * nodes
    moved = x[..., np.newaxis] * np.expm1(w)
    # a w - whole log(1 + moved): their linear parts cancel
    exponent = gap[..., np.newaxis] * w - whole[..., np.newaxis] * (x[..., np.newaxis] * _expm1mx(w) + _log1pmx(moved, 1.0 + moved))
    return (np.exp(exponent) * weights).sum(-1) * length * a * _beta_front(a, b, x, y)


def _beta_left(a: Array, b: Array, x: Array, y: Array) -> Array:
    """betainc for x up to its mean, each way where it serves, see Note [Ways to integrate]."""
    out = np.empty_like(x)
    large = np.maximum(a, b) >= TAIL_FROM
    for mask, way in ((~large, _beta_fraction), (large & (a <= 10.0), _beta_series), (large & (a > 10.0), _beta_tail)):
        if mask.any():
            out[mask] = _in_blocks(way, a[mask], b[mask], x[mask], y[mask])
    return out


def _betas(a: Array, b: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """betainc and 1 less it, y being 1 - x."""
    a, b, x, y = np.broadcast_arrays(a, b, x, y)
    lower, upper = np.full(x.shape, np.nan), np.full(x.shape, np.nan)
    fair = (a > 0.0) & (b > 0.0) & np.isfinite(a) & np.isfinite(b)
    for mask, value in ((fair & (x == 0.0), 0.0), (fair & (y == 0.0), 1.0)):
        lower[mask], upper[mask] = value, 1.0 - value
    inner = fair & (x > 0.0) & (y > 0.0)
    left = inner & (x <= (a + 1.0) / (a + b + 2.0))
    right = inner & ~left
    lower[left] = _beta_left(a[left], b[left], x[left], y[left])
    upper[right] = _beta_left(b[right], a[right], y[right], x[right])
    lower[right], upper[left] = 1.0 - upper[right], 1.0 - lower[left]
    return lower, upper


def _betainc(x1: Array, x2: Array, x3: Array, /) -> Array:
    """The regularized incomplete beta function, the integral of ``t**(x1 - 1) (1 - t)**(x2 - 1) / beta(x1, x2)`` from 0 to `x3`.

    Args:
        x1, x2: above 0.
        x3: from 0 to 1; NaN elsewhere.
    """
    return in_float64(lambda a, b, x: _betas(a, b, x, 1.0 - x)[0], x1, x2, x3)


def _stdtr(x1: Array, x2: Array, /) -> Array:
    """The probability that Student's t of `x1` degrees of freedom is below `x2`."""

    def function(df: Array, x: Array) -> Array:
        df, x = np.broadcast_arrays(df, x)
        square = np.minimum(x * x, 1e300)
        tail = 0.5 * _betas(0.5 * df, np.full_like(df, 0.5), df / (df + square), square / (df + square))[0]
        return np.where(x < 0.0, tail, 1.0 - tail)

    return in_float64(function, x1, x2)


def _beta_density(x1: Array, x2: Array, x3: Array) -> Array:
    return np.exp(xlogy(x1 - 1.0, x3) + xlog1py(x2 - 1.0, -x3) - betaln(x1, x2))


def _student_density(x1: Array, x2: Array) -> Array:
    return np.exp(np.log1p(x2 * x2 / x1) * (x1 + 1.0) * -0.5 - np.log(x1) * 0.5 - betaln(x1 * 0.5, 0.5))


def _gamma_density(x1: Array, x2: Array) -> Array:
    return np.exp(xlogy(x1 - 1.0, x2) - x2 - gammaln(x1))


gammainc: Op = define(
    "gammainc", _gammainc, x1=no_derivative("gammainc by its first argument"), x2=lambda g, x1, x2: g * _gamma_density(x1, x2), jvp="rule", cost=150.0
)
#: the regularized upper incomplete gamma function, 1 less `gammainc` with full relative accuracy
gammaincc: Op = define(
    "gammaincc", lambda x1, x2, /: in_float64(lambda a, x: _gammas(a, x)[1], x1, x2),
    x1=no_derivative("gammaincc by its first argument"), x2=lambda g, x1, x2: -(g * _gamma_density(x1, x2)), jvp="rule", cost=150.0
)
betainc: Op = define(
    "betainc",
    _betainc,
    x1=no_derivative("betainc by its first argument"),
    x2=no_derivative("betainc by its second argument"),
    x3=lambda g, x1, x2, x3: g * _beta_density(x1, x2, x3),
    jvp="rule", cost=250.0,
)
#: 1 less `betainc`, with full relative accuracy
betaincc: Op = define(
    "betaincc", lambda x1, x2, x3, /: in_float64(lambda a, b, x: _betas(a, b, x, 1.0 - x)[1], x1, x2, x3),
    x1=no_derivative("betaincc by its first argument"),
    x2=no_derivative("betaincc by its second argument"),
    x3=lambda g, x1, x2, x3: -(g * _beta_density(x1, x2, x3)),
    jvp="rule", cost=250.0,
)
stdtr: Op = define(
    "stdtr", _stdtr, x1=no_derivative("stdtr by its degrees of freedom"), x2=lambda g, x1, x2: g * _student_density(x1, x2), jvp="rule", cost=250.0
)
