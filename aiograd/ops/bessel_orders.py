"""Bessel functions of any order: J and I of real orders, Y of integers, and K of orders 0 and 1.

Note [Orders by recurrence]
    Neighbouring orders are tied by ``f(v - 1) = 2 v / x f(v) -+ f(v + 1)``. It is walked in the direction in which errors do not grow:

    ==========================  ==========================================================================================
    small arguments             the power series, which cancels nothing there
    J, ``x > 25``, ``|v| <= x``   Hankel's expansion for the two orders in [0, 2), then up or down
    J and I elsewhere           Debye's expansion for two orders of at least 60 (for J twice `x` too), then down
    Y                           orders 0 and 1, then up
    ==========================  ==========================================================================================

    A walk downwards rescales, since its first values may be below the smallest number. Orders beyond `LARGEST_ORDER` are refused: a walk has as
    many steps. Relative errors are some 1e-14 of the amplitude, 1e-12 for orders above 100.

Note [K by the trapezoidal rule]
    ``exp(x) K(v, x)`` is the integral of ``exp(-s**2) cosh(v t) / sqrt(s**2 + 2 x)`` over the line, t being ``2 asinh(s / sqrt(2 x))``. For x of at
    least 1 its poles are so far off that steps of 0.2 are exact to rounding. I of a negative order is I of the positive one and a multiple of K.

Source: Abramowitz and Stegun, 9.2.5, 9.3.7, 9.6.10, 9.6.13, 9.6.24, 9.7.7; the polynomials of Debye's expansion are worked out by 9.3.10.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.ops.bessel import i0, i1, y0, y1
from aiograd.ops.gamma import gammaln, in_float64, rgamma
from aiograd.ops.op import Op, define, no_derivative
from aiograd.running.types import Array

#: magnitude up to which orders are taken
LARGEST_ORDER = 5000
#: order from which on Debye's expansion is exact to rounding, and its number of terms
DEBYE_ORDER, DEBYE_TERMS = 60.0, 12
#: a walk rescales its values beyond
_LARGE = 1e150
_EULER = 0.5772156649015329


@functools.cache
def _debye_polynomials() -> tuple[Array, ...]:
    """The polynomials u_k, coefficients with the lowest power first."""
    found = [np.array([1.0])]
    for _ in range(DEBYE_TERMS):
        u = found[-1]
        powers = np.arange(u.size)
        grown = np.zeros(u.size + 3)
        # t**2 (1 - t**2) u' / 2 plus the integral of (1 - 5 t**2) u / 8
        grown[1:-2] += u * (powers / 2 + 1 / (8 * (powers + 1)))
        grown[3:] -= u * (powers / 2 + 5 / (8 * (powers + 3)))
        found.append(grown)
    return tuple(found)


def _debye(order: Array, x: Array, sign: float) -> Array:
    """The logarithm of J (`sign` -1) or of ``exp(-x) I`` (1) for large orders; for J of orders well above x."""
    root = np.sqrt(order * order + sign * x * x)
    t = order / root
    total = np.zeros_like(t)
    for k in range(DEBYE_TERMS, -1, -1):
        total = total + np.polynomial.polynomial.polyval(t, _debye_polynomials()[k]) / order**k
    # of I times exp(-x): the root less x is order**2 over their sum, which does not cancel
    exponent = root if sign < 0 else order * (order / (root + x))
    return exponent + order * np.log(x / (order + root)) - 0.5 * np.log(2.0 * math.pi * root) + np.log(total)


def _down(order: Array, x: Array, sign: float) -> Array:
    """J or ``exp(-x) I`` by a walk down from orders where Debye's expansion holds."""
    start = np.full_like(x, DEBYE_ORDER) if sign > 0 else np.maximum(DEBYE_ORDER, 2.0 * x)
    steps = int(np.max(np.ceil(np.maximum(start - order, 0.0)), initial=0.0))
    top = order + steps
    scale = _debye(top, x, sign)
    above, here = np.exp(_debye(top + 1.0, x, sign) - scale), np.ones_like(x)
    for k in range(steps):
        above, here = here, (2.0 * (top - k) / x) * here + sign * above
        large = np.absolute(here) > _LARGE
        if large.any():
            shrink = np.where(large, 1 / _LARGE, 1.0)
            above, here, scale = above * shrink, here * shrink, scale - np.log(shrink)
    third = np.exp(scale / 3.0)  # in steps, so that no representable result underflows on the way
    return here * third * third * third


def _series(order: Array, x: Array, sign: float) -> Array:
    """J or I by the power series."""
    square = sign * 0.25 * x * x
    total, term = np.ones_like(x), np.ones_like(x)
    at_least = np.max(-order, initial=0.0)
    for k in range(1, 200 + LARGEST_ORDER):
        term = term * (square / (k * (order + k)))
        total = total + term
        if k > at_least and not (np.absolute(term) > 1e-17 * np.absolute(total)).any():
            break
    small = np.absolute(order) < 100.0
    near = np.where(small, order, 0.0)
    first = np.power(0.5 * x, near) * rgamma.forward(near + 1.0)
    log = np.where(x == 0.0, -np.inf, np.log(np.where(x == 0.0, 1.0, 0.5 * x)))
    far = np.where(small, 1.0, order)
    return total * np.where(small, first, np.exp(far * log - gammaln.forward(far + 1.0)) * np.sign(rgamma.forward(np.minimum(far, 0.0) + 0.5)))


def _hankel(order: Array, x: Array) -> Array:
    """J for x above 25 and an order in [0, 2)."""
    square = 4.0 * order * order
    p, q, term = np.ones_like(x), np.zeros_like(x), np.ones_like(x)
    for k in range(1, 31):
        term = term * ((square - (2 * k - 1) ** 2) / (8.0 * k * x))
        if k % 2:
            q = q + term * (-1.0) ** (k // 2)
        else:
            p = p + term * (-1.0) ** (k // 2)
    phase = (0.5 * order + 0.25) * math.pi  # taken from the cosine and sine of x, since subtracting it from a large x would lose digits
    cos, sin = np.cos(x) * np.cos(phase) + np.sin(x) * np.sin(phase), np.sin(x) * np.cos(phase) - np.cos(x) * np.sin(phase)
    return np.sqrt(2.0 / (math.pi * x)) * (p * cos - q * sin)


def _walk(first: Array, low: Array, high: Array, order: Array, x: Array, turn: float = -1.0) -> Array:
    """J or Y (`turn` -1) or K (1) of `order`, from its values `low` and `high` at the orders `first` and ``first + 1``."""
    count = np.rint(order - first)
    up = count > 0
    steps = np.absolute(count - up)
    sign = np.where(up, 1.0, -1.0)
    behind: Array = np.where(up, low, high)
    here: Array = np.where(up, high, low)
    result, at = here, first + up
    for k in range(int(np.max(steps, initial=0.0))):
        behind, here = here, (2.0 * at / x) * here + turn * behind
        at = at + sign
        result = np.where(steps == k + 1, here, result)
    return result


def _checked(order: Array) -> None:
    if (np.absolute(order) > LARGEST_ORDER).any():
        raise ValueError(f"found an order of {np.max(np.absolute(order)):g}, expected at most {LARGEST_ORDER} in magnitude")


def _everywhere(order: Array, x: Array, parts: list[tuple[Array, Callable[[Array, Array], Array]]]) -> Array:
    """Each function where its mask, and none before it, holds; NaN elsewhere."""
    out, left = np.full(x.shape, np.nan), np.ones(x.shape, bool)
    for chosen, function in parts:
        mask = chosen & left
        left = left & ~mask
        if mask.any():
            out[mask] = function(order[mask], x[mask])
    return out


def _reflected(function: Callable[[Array, Array], Array], odd: float) -> Callable[[Array, Array], Array]:
    """`function` of orders that are no negative integers and of x of at least 0, for all orders and, where they are integers, all x."""

    def compute(order: Array, x: Array) -> Array:
        v, x = np.broadcast_arrays(order, x)
        _checked(v)
        whole = v == np.rint(v)
        turned = np.where(np.mod(v, 2.0) == 1.0, -1.0, 1.0)
        sign = np.where(whole & (x < 0.0), turned, 1.0) * np.where(whole & (v < 0.0), np.where(turned < 0.0, odd, 1.0), 1.0)
        size = np.where(whole, np.absolute(x), x)
        return sign * function(np.where(whole, np.absolute(v), v), size)

    return compute


def _first_kind(order: Array, x: Array) -> Array:
    return _everywhere(order, x, [
        (np.isinf(x) & (x > 0.0), lambda v, x: np.zeros_like(x)),
        ((x >= 0.0) & ((x <= 2.0) | (x * x <= 2.0 * (order + 1.0))), lambda v, x: _series(v, x, -1.0)),
        ((x > 25.0) & (np.absolute(order) <= x), _from_hankel),
        (x > 0.0, lambda v, x: _down(v, x, -1.0)),
    ])  # fmt: skip


def _from_hankel(order: Array, x: Array) -> Array:
    first = order - np.floor(order)
    return _walk(first, _hankel(first, x), _hankel(first + 1.0, x), order, x)


def _modified(order: Array, x: Array, scaled: bool) -> Array:
    def far(v: Array, x: Array) -> Array:
        value = _down(v, x, 1.0)
        if scaled:
            return value
        half = np.exp(0.5 * x)  # in two steps, so that no representable result overflows on the way
        return value * half * half

    def mirrored(v: Array, x: Array) -> Array:
        first, size = np.floor(v) - v, -v
        first = first + 1.0
        k = _walk(first, _k_scaled(first, x), _k_scaled(first + 1.0, x), size, x, 1.0)
        rest = (2.0 / math.pi) * np.sin(math.pi * first) * np.where(np.mod(size - first, 2.0) == 0.0, 1.0, -1.0) * k
        return _modified(size, x, scaled) + rest * np.exp(-2.0 * x if scaled else -x)

    return _everywhere(order, x, [
        (np.isinf(x) & (x > 0.0), lambda v, x: np.full_like(x, 0.0 if scaled else np.inf)),
        ((x > 1.0) & (order < 0.0), mirrored),
        ((x >= 0.0) & (x <= 12.0), lambda v, x: _series(v, x, 1.0) * (np.exp(-x) if scaled else 1.0)),
        (x > 0.0, far),
    ])  # fmt: skip


def _second_kind(order: Array, x: Array) -> Array:
    def function(v: Array, x: Array) -> Array:
        value = _walk(np.zeros_like(v), y0.forward(x), y1.forward(x), v, x)
        # once infinite, the walk would subtract infinities
        return np.where((x == 0.0) | np.isnan(value), -np.inf, value)

    return _everywhere(order, x, [(np.isposinf(x), lambda v, x: np.zeros_like(x)), ((x >= 0.0) & (order == np.rint(order)), function)])


def _jv(x1: Array, x2: Array, /) -> Array:
    """The Bessel function of the first kind of order `x1` at `x2`.

    Args:
        x1: orders, up to 5000 in magnitude.
        x2: any shape; NaN where it is negative and the order is no integer.
    """
    return in_float64(_reflected(_first_kind, -1.0), x1, x2)


def _yn(x1: Array, x2: Array, /) -> Array:
    """The Bessel function of the second kind of integer order `x1` at `x2`.

    Args:
        x1: integers, up to 5000 in magnitude; NaN elsewhere.
        x2: any shape; NaN where it is negative.
    """

    def function(order: Array, x: Array) -> Array:
        return np.where(x < 0.0, np.nan, _reflected(_second_kind, -1.0)(order, x))

    return in_float64(function, x1, x2)


def _iv(x1: Array, x2: Array, /) -> Array:
    """The modified Bessel function of the first kind of order `x1` at `x2`; arguments as of `jv`."""
    return in_float64(_reflected(lambda v, x: _modified(v, x, False), 1.0), x1, x2)


def _k_scaled(order: Array | float, x: Array) -> Array:
    """``exp(x) K`` for x of at least 1 and orders in [0, 2), see Note [K by the trapezoidal rule]."""
    s = 0.2 * np.arange(32.0)
    weight = np.where(s == 0.0, 0.2, 0.4) * np.exp(-s * s)
    twice = 2.0 * x[..., np.newaxis]
    angle = 2.0 * np.arcsinh(s / np.sqrt(twice))
    value: Array = (weight / np.sqrt(s * s + twice) * np.cosh(np.asarray(order)[..., np.newaxis] * angle)).sum(-1)
    return value


def _third_kind(order: int) -> Callable[[Array], Array]:
    def near(x: Array) -> Array:
        square, log = 0.25 * x * x, np.log(0.5 * x) + _EULER
        total, term, harmonic = np.zeros_like(x), np.ones_like(x), 0.0
        for k in range(1, 14):
            # the coefficients are harmonic numbers: H(k) for order 0, H(k - 1) + H(k) for order 1
            before, harmonic = harmonic, harmonic + 1.0 / k
            if order:
                total = total + term * (before + harmonic)
                term = term * (square / (k * (k + 1)))
            else:
                term = term * (square / (k * k))
                total = total + term * harmonic
        return 1.0 / x + log * i1.forward(x) - 0.25 * x * total if order else total - log * i0.forward(x)

    def function(x: Array) -> Array:
        inside = np.where((x > 0.0) & (x <= 1.0), x, 1.0)
        large = np.where(x > 1.0, x, 1.0)
        value = np.where(x <= 1.0, near(inside), _k_scaled(order, large) * np.exp(-large))
        return np.where(x == 0.0, np.inf, np.where(x < 0.0, np.nan, np.where(np.isnan(x), x, value)))

    return function


def _order(name: str) -> Callable[[Any], Any]:
    return no_derivative(f"{name} by its order")


jv: Op = define("bessel_jv", _jv, x1=_order("jv"), x2=lambda g, x1, x2: g * 0.5 * (jv(x1 - 1, x2) - jv(x1 + 1, x2)), jvp="rule", cost=2000.0)
yn: Op = define("bessel_yn", _yn, x1=_order("yn"), x2=lambda g, x1, x2: g * 0.5 * (yn(x1 - 1, x2) - yn(x1 + 1, x2)), jvp="rule", cost=2000.0)
iv: Op = define("bessel_iv", _iv, x1=_order("iv"), x2=lambda g, x1, x2: g * 0.5 * (iv(x1 - 1, x2) + iv(x1 + 1, x2)), jvp="rule", cost=2000.0)
#: `iv` times ``exp(-|x2|)``
ive: Op = define(
    "bessel_ive", lambda x1, x2, /: in_float64(_reflected(lambda v, x: _modified(v, x, True), 1.0), x1, x2),
    x1=_order("ive"), x2=lambda g, x1, x2, out: g * (0.5 * (ive(x1 - 1, x2) + ive(x1 + 1, x2)) - np.sign(x2) * out), jvp="rule", cost=2000.0
)
#: the modified Bessel function of the second kind of order 0
k0: Op = define("bessel_k0", lambda x, /: in_float64(_third_kind(0), x), x=lambda g, x: -(g * k1(x)), jvp="rule", cost=400.0)
#: the modified Bessel function of the second kind of order 1
k1: Op = define("bessel_k1", lambda x, /: in_float64(_third_kind(1), x), x=lambda g, x, out: -(g * (k0(x) + out / x)), jvp="rule", cost=500.0)
