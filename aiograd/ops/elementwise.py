"""Elementwise arithmetic, powers, exponentials, trigonometry, rounding and extrema: one row per function.

Note [Complex]
    Rows that are linear with real coefficients (sums, copies, rearrangements) are marked ``explicit``: their rules are right for complex
    gradients as they stand, and the engine need not conjugate anything. Rows that multiply the gradient by a holomorphic derivative are
    marked ``holomorphic``.

Note [Rules for tiny arrays]
    A ufunc on four floats costs 0.25 µs and a Python number among its operands another 0.2 µs, so the rules of the commonest rows are
    written without numbers: ``g - g * out * out`` and not ``g * (1 - out**2)``.

Note [Ties]
    Where two operands of `maximum` are equal each gets half of the gradient; `fmax` gives it to the first. An element that is equal to a limit of
    `clip` is inside, as in PyTorch: it gets the gradient and the limit gets none, whether the limit is a number or a Tensor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.ops.creation import refuse, zeros_like
from aiograd.ops.masking import mask, where
from aiograd.ops.op import Op, define, implements
from aiograd.running.types import Array

LN2 = math.log(2.0)
LN10 = math.log(10.0)


def identity(g: Array) -> Array:
    """The rule of a sum: the gradient goes through as it is. One function for all rows, so that the engine can recognise it."""
    return g


def times_x1(g: Array, x1: Array) -> Array:
    """The rule of the second factor of a product; the engine recognises it and `times_x2`, and calls no function."""
    return g * x1


def times_x2(g: Array, x2: Array) -> Array:
    """The rule of the first factor of a product."""
    return g * x2


def zero(g: Array) -> Array:
    """The rule of a piecewise constant function."""
    return zeros_like(g)


def conj(x: Array) -> Array:
    """The complex conjugate, without a copy where `x` is real."""
    return np.conjugate(x) if x.dtype.kind == "c" else x


# Arithmetic. See Note [Rules for tiny arrays].

add = define("add", np.add, x1=identity, x2=identity, complex="explicit", cost=0.5)
sub = define("sub", np.subtract, x1=identity, x2=lambda g: -g, complex="explicit", cost=0.4)
mul = define("mul", np.multiply, x1=times_x2, x2=times_x1, complex="holomorphic", cost=0.6)
div = define("div", np.divide, x1=lambda g, x2: g / x2, x2=lambda g, x2, out: -(g * out / x2), complex="holomorphic", cost=2.0)
neg = define("neg", np.negative, x=lambda g: -g, complex="explicit", cost=0.3)
positive = define("positive", np.positive, x=identity, complex="explicit", cost=0.1)
square = define("square", np.square, x=lambda g, x: g * (x + x), complex="holomorphic", cost=0.6)
reciprocal = define("reciprocal", np.reciprocal, x=lambda g, out: -(g * out * out), complex="holomorphic", cost=0.8)
sqrt = define("sqrt", np.sqrt, x=lambda g, out: g / (out + out), complex="holomorphic", cost=1.0)
rsqrt = define(
    "rsqrt", lambda x, /: np.reciprocal(np.sqrt(x)), x=lambda g, out: -0.5 * (g * out * out * out), jvp="rule", complex="holomorphic", cost=2.0
)
cbrt = define("cbrt", np.cbrt, x=lambda g, out: g / (3.0 * out * out), cost=2.0)
remainder = define("remainder", np.remainder, x1=identity, x2=lambda g, x1, x2: -(g * np.floor_divide(x1, x2)), cost=20.0)
fmod = define("fmod", np.fmod, x1=identity, x2=lambda g, x1, x2: -(g * np.trunc(x1 / x2)), cost=4.0)
divmod_ = define(
    "divmod",
    np.divmod,
    outputs=2,
    differentiable_outputs=(1,),
    x1=lambda g: g[1],
    x2=lambda g, out: None if g[1] is None else -(g[1] * out[0]),
    jvp=lambda t, out: (None, t[0] if t[1] is None else -(t[1] * out[0]) if t[0] is None else t[0] - t[1] * out[0]),
    cost=4.0,
)
ldexp = define("ldexp", np.ldexp, x1=lambda g, x2: np.ldexp(g, x2), cost=2.0)

# Powers.


#: exponents of floating arrays for which there is something much faster than a power
_SHORT_CUTS: dict[float, Any] = {2.0: np.square, 3.0: lambda x: x * x * x, 1.0: np.positive, 0.5: np.sqrt, -1.0: np.reciprocal}


def _number(x: Any) -> float | None:
    """The value of an exponent that is a plain number, which no gradient of a gradient will ask about."""
    kind = x.__class__
    if kind is np.ndarray:
        return None if x.ndim or x.dtype.kind not in "iuf" else x.item()
    if kind is float or kind is int:
        return x  # type: ignore[no-any-return]
    return x.item() if isinstance(x, np.generic) and x.dtype.kind in "iuf" else None


def _pow(x1: Array, x2: Array, /) -> Array:
    """`x1` to the power `x2`.

    Args:
        x1, x2: arrays or Python numbers that broadcast. Single exponents 1/2, -1, 1, 2 and 3 take short cuts.
    """
    exponent = _number(x2)
    if exponent is not None:
        short = _SHORT_CUTS.get(exponent)
        if short is not None and x1.dtype.kind in "fc" and (type(x2) in (int, float) or x2.dtype == x1.dtype):
            return short(x1)
    return x1**x2


def _pow_x1(g: Array, x1: Array, x2: Array) -> Array:
    exponent = _number(x2)
    if exponent is not None:
        if exponent == 2:
            return g * (x1 + x1)
        if exponent == 1:
            return g
        if exponent == 0:
            return zeros_like(g)
        return g * (exponent * _pow(x1, exponent - 1))
    # 0 times x1**-1 at x2 = 0 would be NaN for x1 = 0: raise to 0 there
    return g * (x2 * x1 ** (where(x2 == 0, 1, x2) - 1))


def _pow_x2(g: Array, x1: Array, x2: Array, out: Array) -> Array:
    # where x1 = 0 the power is constant in x2 >= 0, and log(x1) is not wanted; elsewhere the logarithm stands as it is
    at_zero = np.logical_and(x1 == 0, np.real(x2) >= 0 if x2.dtype.kind == "c" else x2 >= 0)
    return g * (out * np.log(where(at_zero, 1, x1)))


pow_ = define("pow", _pow, x1=_pow_x1, x2=_pow_x2, jvp="rule", complex="holomorphic", cost=10.0, numpy=(np.power,))
float_power = define("float_power", np.float_power, x1=_pow_x1, x2=_pow_x2, complex="holomorphic", cost=15.0)

# Exponentials and logarithms.

exp = define("exp", np.exp, x=lambda g, out: g * out, complex="holomorphic", cost=1.0)
exp2 = define("exp2", np.exp2, x=lambda g, out: g * out * LN2, complex="holomorphic", cost=1.5)
expm1 = define("expm1", np.expm1, x=lambda g, out: g * out + g, complex="holomorphic", cost=1.5)
log = define("log", np.log, x=lambda g, x: g / x, complex="holomorphic", cost=1.0)
log2 = define("log2", np.log2, x=lambda g, x: g / (x * LN2), complex="holomorphic", cost=1.5)
log10 = define("log10", np.log10, x=lambda g, x: g / (x * LN10), complex="holomorphic", cost=1.5)
log1p = define("log1p", np.log1p, x=lambda g, x: g / (x + 1), complex="holomorphic", cost=1.5)

# Trigonometric and hyperbolic functions, under PyTorch's names.

sin = define("sin", np.sin, x=lambda g, x: g * np.cos(x), complex="holomorphic", cost=4.0)
cos = define("cos", np.cos, x=lambda g, x: -(g * np.sin(x)), complex="holomorphic", cost=4.0)
tan = define("tan", np.tan, x=lambda g, out: g + g * out * out, complex="holomorphic", cost=0.8)
asin = define("asin", np.arcsin, x=lambda g, x: g / np.sqrt((1 - x) * (1 + x)), complex="holomorphic", cost=3.0)
acos = define("acos", np.arccos, x=lambda g, x: -(g / np.sqrt((1 - x) * (1 + x))), complex="holomorphic", cost=3.0)
atan = define("atan", np.arctan, x=lambda g, x: g / (x * x + 1), complex="holomorphic", cost=2.0)
sinh = define("sinh", np.sinh, x=lambda g, x: g * np.cosh(x), complex="holomorphic", cost=1.5)
cosh = define("cosh", np.cosh, x=lambda g, x: g * np.sinh(x), complex="holomorphic", cost=1.5)
asinh = define("asinh", np.arcsinh, x=lambda g, x: g / np.sqrt(x * x + 1), complex="holomorphic", cost=3.0)
# two roots: the product of the arguments has its branch cut elsewhere
acosh = define("acosh", np.arccosh, x=lambda g, x: g / (np.sqrt(x - 1) * np.sqrt(x + 1)), complex="holomorphic", cost=4.0)
atanh = define("atanh", np.arctanh, x=lambda g, x: g / ((1 - x) * (1 + x)), complex="holomorphic", cost=2.0)


def _tanh_slope(x1: Array, x2: Array, /) -> Array:
    """``x1 * (1 - x2**2)``: a gradient `x1` times the slope of tanh where tanh is `x2`."""
    if x1.__class__ is x2.__class__ is np.ndarray and x2.ndim:
        lost = x1 * x2
        lost *= x2
        return np.subtract(x1, lost, lost)
    return x1 - x1 * x2 * x2


def _tanh_slope_vjp(g: Array, needs: tuple[bool, bool], x1: Array, x2: Array) -> tuple[Array | None, Array | None]:
    return _tanh_slope(g, x2) if needs[0] else None, _tanh_bend(g, x1, x2) if needs[1] else None


def _tanh_bend(x1: Array, x2: Array, x3: Array, /) -> Array:
    """``-2 * x1 * x2 * x3``, which the derivatives of `tanh_slope` and its own are made of."""
    out = x1 * x2
    if out.__class__ is x3.__class__ is np.ndarray and out.shape == x3.shape and out.dtype is x3.dtype:
        out *= x3
        out *= -2.0
        return out
    return out * x3 * -2.0


tanh = define(
    "tanh", np.tanh, x=lambda g, out: g - g * out * out, recorded={"x": lambda g, out: tanh_slope(g, out)},
    jvp=lambda t, out: _tanh_slope(t, out), complex="holomorphic", cost=1.5
)
tanh_slope: Op = define(
    "tanh_slope",
    _tanh_slope,
    joint={("x1", "x2"): _tanh_slope_vjp},
    recorded={"x1": lambda g, x2: tanh_slope(g, x2), "x2": lambda g, x1, x2: tanh_bend(g, x1, x2)},
    jvp="rule", complex="holomorphic",
    cost=2.0,
)
tanh_bend: Op = define(
    "tanh_bend",
    _tanh_bend,
    x1=lambda g, x2, x3: _tanh_bend(g, x2, x3),
    x2=lambda g, x1, x3: _tanh_bend(g, x1, x3),
    x3=lambda g, x1, x2: _tanh_bend(g, x1, x2),
    recorded={
        "x1": lambda g, x2, x3: tanh_bend(g, x2, x3),
        "x2": lambda g, x1, x3: tanh_bend(g, x1, x3),
        "x3": lambda g, x1, x2: tanh_bend(g, x1, x2),
    },
    jvp="forward", complex="holomorphic",
    cost=2.0,
)
deg2rad = define("deg2rad", np.deg2rad, x=lambda g: np.deg2rad(g), cost=1.0, numpy=(np.radians,))
rad2deg = define("rad2deg", np.rad2deg, x=lambda g: np.rad2deg(g), cost=1.0, numpy=(np.degrees,))


def _atan2_vjp(g: Array, other: Array, x1: Array, x2: Array) -> Array:
    square_sum = x1 * x1 + x2 * x2
    return g * (other / where(square_sum == 0, 1, square_sum))


def _hypot_vjp(g: Array, x: Array, out: Array) -> Array:
    return g * (x / where(out == 0, 1, out))


atan2 = define("atan2", np.arctan2, x1=lambda g, x1, x2: _atan2_vjp(g, x2, x1, x2), x2=lambda g, x1, x2: -_atan2_vjp(g, x1, x1, x2), cost=8.0)
hypot = define("hypot", np.hypot, x1=lambda g, x1, out: _hypot_vjp(g, x1, out), x2=lambda g, x2, out: _hypot_vjp(g, x2, out), cost=3.0)

# Rounding: piecewise constant.

floor = define("floor", np.floor, x=zero, cost=0.2)
ceil = define("ceil", np.ceil, x=zero, cost=0.2)
trunc = define("trunc", np.trunc, x=zero, cost=0.2)


def _round(x: Array, /, decimals: int = 0) -> Array:
    """The nearest number with that many decimals; halves go to the even neighbour."""
    return np.rint(x) if decimals == 0 and x.dtype.kind == "f" else np.round(x, decimals)


round_ = define("round", _round, x=zero, jvp="rule", cost=0.2, numpy=(np.rint,))
floor_divide = define("floor_divide", np.floor_divide)
gcd = define("gcd", np.gcd)
lcm = define("lcm", np.lcm)


@implements(np.round, np.around)
def np_round(a: Array, decimals: int = 0, out: Any = None) -> Array:
    """numpy's ``round``."""
    refuse("round", out=out)
    return round_(a, decimals=decimals)


# Sign, magnitude and extrema. See Note [Ties].


def _sgn_vjp(g: Array, x: Array, out: Array) -> Array:
    """Of ``x / |x|``: the part orthogonal to `out`, over the magnitude; 0 at 0."""
    if x.dtype.kind != "c":
        return zeros_like(g)
    size = np.absolute(x)
    return mask((g - out * np.real(g * np.conjugate(out))) / where(size == 0, 1, size), size != 0)


def _abs_vjp(g: Array, x: Array) -> Array:
    return g * (sgn(x) if x.dtype.kind == "c" else np.sign(x))


def _abs_jvp(t: Array, x: Array) -> Array:
    return np.real(t * np.conjugate(sgn(x))) if x.dtype.kind == "c" else t * np.sign(x)


abs_ = define("abs", np.absolute, x=_abs_vjp, jvp=_abs_jvp, complex="explicit", cost=1.5)
fabs = define("fabs", np.fabs, x=lambda g, x: g * np.sign(x), cost=1.5)
sign = define("sign", np.sign, x=zero, cost=0.2)
sgn: Op = define("sgn", lambda x, /: np.sign(x), x=_sgn_vjp, jvp="rule", complex="explicit", cost=2.0)
heaviside = define("heaviside", np.heaviside, x1=zero, x2=lambda g, x1: mask(g, x1 == 0), cost=1.0)
nextafter = define("nextafter", np.nextafter, x1=identity, x2=zero, cost=0.2)
copysign = define("copysign", np.copysign, x1=lambda g, x1, out: g * (np.sign(x1) * np.sign(out)), x2=zero, cost=2.0)


def _winner(g: Array, better: Array, as_good: Array) -> Array:
    half = g * 0.5
    return mask(half, better) + mask(half, as_good)


maximum = define(
    "maximum", np.maximum, x1=lambda g, x1, x2: _winner(g, x1 > x2, x1 >= x2), x2=lambda g, x1, x2: _winner(g, x2 > x1, x2 >= x1), cost=6.0
)
minimum = define(
    "minimum", np.minimum, x1=lambda g, x1, x2: _winner(g, x1 < x2, x1 <= x2), x2=lambda g, x1, x2: _winner(g, x2 < x1, x2 <= x1), cost=6.0
)
fmax = define(
    "fmax",
    np.fmax,
    x1=lambda g, x1, x2: mask(g, np.logical_or(x1 >= x2, np.isnan(x2))),
    x2=lambda g, x1, x2: mask(g, np.logical_not(np.logical_or(x1 >= x2, np.isnan(x2)))),
    cost=2.0,
)
fmin = define(
    "fmin",
    np.fmin,
    x1=lambda g, x1, x2: mask(g, np.logical_or(x1 <= x2, np.isnan(x2))),
    x2=lambda g, x1, x2: mask(g, np.logical_not(np.logical_or(x1 <= x2, np.isnan(x2)))),
    cost=2.0,
)


def _clamp(x: Array, /, min: Any = None, max: Any = None) -> Array:
    """`x` limited to [min, max].

    Args:
        x: any shape.
        min, max: numbers or arrays that broadcast to the shape of `x`; None: no limit on that side.
    """
    if min is not None:
        x = np.maximum(x, min)
    if max is not None:
        x = np.minimum(x, max)
    return np.positive(x) if min is None and max is None else x


def _clamp_vjp(g: Array, x: Array, min: Any, max: Any) -> Array:
    if min is None:
        return g if max is None else mask(g, x <= max)
    inside = x >= min
    return mask(g, inside if max is None else np.logical_and(inside, x <= max))


clamp = define("clamp", _clamp, x=_clamp_vjp, jvp="rule", cost=1.5)


#: `x` limited from below by `limit`, which broadcasts with it
clamp_min = define(
    "clamp_min", lambda x, limit, /: np.maximum(x, limit),
    x=lambda g, x, limit: mask(g, x >= limit), limit=lambda g, x, limit: mask(g, x < limit), jvp="rule", cost=2.0
)
#: `x` limited from above by `limit`, which broadcasts with it
clamp_max = define(
    "clamp_max", lambda x, limit, /: np.minimum(x, limit),
    x=lambda g, x, limit: mask(g, x <= limit), limit=lambda g, x, limit: mask(g, x > limit), jvp="rule", cost=2.0
)


def clip(x: Array, /, min: Any = None, max: Any = None) -> Array:
    """`x` limited to [min, max]; the limits take gradients too where they are Tensors.

    Args:
        x: any shape.
        min, max: numbers, arrays or Tensors that broadcast with `x`; None: no limit on that side.
    """
    if not any(hasattr(type(limit), "__aiograd_op__") for limit in (min, max)) and np.ndim(min) == np.ndim(max) == 0:
        return clamp(x, min=min, max=max)
    if min is not None:
        x = clamp_min(x, min)
    return x if max is None else clamp_max(x, max)


@implements(np.clip)
def np_clip(a: Array, a_min: Any = None, a_max: Any = None, out: Any = None, *, min: Any = None, max: Any = None, **unsupported: Any) -> Array:
    """numpy's ``clip``."""
    refuse("clip", out=out, **unsupported)
    a_min, a_max = (None if limit is np._NoValue else limit for limit in (a_min, a_max))
    return clip(a, min if a_min is None else a_min, max if a_max is None else a_max)
