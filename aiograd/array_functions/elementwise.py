"""Elementwise functions of the Python Array API standard: arithmetic, exponentials, trigonometry, rounding, extrema.

Signatures are the standard's; a few that numpy and PyTorch users miss there (`erf`, `exp2`, `rsqrt`, ...) are in the same style.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, Binary, Unary, as_tensor, calling, one, row, scaled, two, two_plain
from aiograd.errors import ArgumentError
from aiograd.ops import elementwise
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor
from aiograd.tensors.unrolled import unary

__all__ = [
    "add", "subtract", "multiply", "divide", "floor_divide", "remainder", "fmod", "pow", "negative", "positive", "abs", "sign", "copysign",
    "reciprocal", "square", "sqrt", "rsqrt", "cbrt", "hypot", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "logaddexp", "xlogy",
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "deg2rad", "rad2deg", "erf", "erfc",
    "sinc", "floor", "ceil", "trunc", "round", "maximum", "minimum", "clip", "nan_to_num", "nextafter", "signbit", "conj", "real", "imag",
    "angle", "fmax", "fmin", "frac", "heaviside", "logaddexp2", "ldexp", "float_power", "gcd", "lcm",
]  # fmt: skip

_add, _subtract, _divide = two("add"), two("subtract", row_name="sub"), two("divide", row_name="div")

# Arithmetic.


def add(x1: ArrayLike, x2: ArrayLike, /, *, alpha: complex = 1) -> Tensor:
    """Sums of elements: ``x1 + alpha * x2``."""
    return _add(x1, scaled(x2, alpha))


def subtract(x1: ArrayLike, x2: ArrayLike, /, *, alpha: complex = 1) -> Tensor:
    """Differences of elements: ``x1 - alpha * x2``."""
    return _subtract(x1, scaled(x2, alpha))


multiply: Binary = two("multiply", "``x1 * x2``, element by element.", row_name="mul")


def divide(x1: ArrayLike, x2: ArrayLike, /, *, rounding_mode: str | None = None) -> Tensor:
    """Quotients of elements; rounded down with `rounding_mode` "floor", towards zero with "trunc"."""
    if rounding_mode is None:
        return _divide(x1, x2)
    if rounding_mode not in ("floor", "trunc"):
        raise ArgumentError(f"divide(rounding_mode={rounding_mode!r}): expected None, 'floor' or 'trunc'")
    if rounding_mode == "floor":
        return floor_divide(x1, x2)
    quotient = trunc(_divide(x1, x2))
    return quotient.astype(np.result_type(*(x.dtype if hasattr(x, "dtype") else x for x in (x1, x2))), copy=False)


floor_divide: Binary = two_plain("floor_divide", "Quotients rounded down; without a gradient.")
remainder: Binary = two("remainder", "Remainders with the sign of the divisor.")
fmod: Binary = two("fmod", "Remainders with the sign of the dividend.")
pow: Binary = two("pow", "`x1` to the power `x2`.")
gcd: Binary = two_plain("gcd", "Greatest common divisors of integers.")
lcm: Binary = two_plain("lcm", "Least common multiples of integers.")
negative: Unary = one("negative", "Elements with the other sign.", unary(row("neg")))
positive: Unary = one("positive", "The elements as they are.")
abs: Unary = one("abs", "Absolute values; magnitudes of complex numbers.")
sign: Unary = one("sign", "-1, 0 or 1 as the elements are; ``x / |x|`` of complex numbers.", unary(row("sgn")))
copysign: Binary = two("copysign", "Magnitudes of `x1` with the signs of `x2`.")
reciprocal: Unary = one("reciprocal", "One divided by each element.")
square: Unary = one("square", "Squares.")
sqrt: Unary = one("sqrt", "Square roots.")
rsqrt: Unary = one("rsqrt", "One divided by the square root of each element.")
cbrt: Unary = one("cbrt", "Cube roots.")
hypot: Binary = two("hypot", "``sqrt(x1**2 + x2**2)`` without overflow.")

# Exponentials and logarithms.
exp: Unary = one("exp", "e to the power of each element.")
exp2: Unary = one("exp2", "2 to the power of each element.")
expm1: Unary = one("expm1", "``exp(x) - 1``, accurate near 0.")
log: Unary = one("log", "Natural logarithms.")
log1p: Unary = one("log1p", "``log(1 + x)``, accurate near 0.")
log2: Unary = one("log2", "Logarithms to base 2.")
log10: Unary = one("log10", "Logarithms to base 10.")
logaddexp: Binary = two("logaddexp", "``log(exp(x1) + exp(x2))`` without overflow.")
logaddexp2: Binary = two("logaddexp2", "``log2(2**x1 + 2**x2)`` without overflow.")


def ldexp(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 * 2**x2``; exact where `x2` has integers."""
    base = as_tensor(x1)
    exponents = as_tensor(x2) if np.ndim(x2) or hasattr(x2, "dtype") or isinstance(x2, int) else as_tensor(x2, np.result_type(base.dtype, np.float16))
    return call(elementwise.ldexp, (base, exponents), {}) if exponents.dtype.kind in "iub" else multiply(base, exp2(exponents))


float_power: Binary = two("float_power", "`x1` to the power `x2` in float64 or complex128.")
xlogy: Binary = two("xlogy", "``x1 * log(x2)``, 0 where `x1` is 0.")

# Trigonometric and hyperbolic functions.
sin: Unary = one("sin", "Sines of angles in radians.")
cos: Unary = one("cos", "Cosines of angles in radians.")
tan: Unary = one("tan", "Tangents of angles in radians.")
asin: Unary = one("asin", "Inverse sines, in radians.")
acos: Unary = one("acos", "Inverse cosines, in radians.")
atan: Unary = one("atan", "Inverse tangents, in radians.")
atan2: Binary = two("atan2", "Angles of the points (x2, x1), in radians from -pi to pi.")
sinh: Unary = one("sinh", "Hyperbolic sines.")
cosh: Unary = one("cosh", "Hyperbolic cosines.")
tanh: Unary = one("tanh", "Hyperbolic tangents.")
asinh: Unary = one("asinh", "Inverse hyperbolic sines.")
acosh: Unary = one("acosh", "Inverse hyperbolic cosines.")
atanh: Unary = one("atanh", "Inverse hyperbolic tangents.")
deg2rad: Unary = one("deg2rad", "Degrees as radians.")
rad2deg: Unary = one("rad2deg", "Radians as degrees.")

# Special functions.
erf: Unary = one("erf", "The error function.")
erfc: Unary = one("erfc", "``1 - erf(x)``, accurate for large `x`.")
sinc: Unary = one("sinc", "``sin(pi x) / (pi x)``, 1 at 0.", calling("sinc"))

# Rounding, extrema and parts.
floor: Unary = one("floor", "The largest integers not above the elements.")
ceil: Unary = one("ceil", "The smallest integers not below the elements.")
trunc: Unary = one("trunc", "The elements without their digits behind the decimal point.")


def round(x: ArrayLike, /, decimals: int = 0) -> Tensor:
    """The nearest numbers with so many decimals; halves go to the even neighbour."""
    return call(row("round"), (as_tensor(x),), {"decimals": decimals})  # type: ignore[no-any-return]


maximum: Binary = two("maximum", "The larger elements; where two are equal each gets half of the gradient.")
minimum: Binary = two("minimum", "The smaller elements; where two are equal each gets half of the gradient.")


def clip(x: ArrayLike, /, min: ArrayLike | None = None, max: ArrayLike | None = None) -> Tensor:
    """Elements limited to [min, max]; the limits broadcast, and take gradients where they are Tensors."""
    source = as_tensor(x)
    limits: list[Any] = [as_tensor(limit, source.dtype) if isinstance(limit, (list, tuple, np.ndarray)) else limit for limit in (min, max)]
    return elementwise.clip(source, *limits)  # type: ignore[no-any-return]


fmax: Binary = two("fmax", "The larger elements, the other where one is NaN; where two are equal the first gets the gradient.")
fmin: Binary = two("fmin", "The smaller elements, the other where one is NaN; where two are equal the first gets the gradient.")


def frac(x: ArrayLike, /) -> Tensor:
    """The digits behind the decimal point, with the sign of the element."""
    source = as_tensor(x)
    return source - trunc(source)


heaviside: Binary = two("heaviside", "0 where `x1` is negative, 1 where it is positive, `x2` where it is zero.")


def nan_to_num(x: ArrayLike, /, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """NaN and the infinities replaced by numbers; by the largest and smallest of the dtype where none is given."""
    return call(row("nan_to_num"), (as_tensor(x),), {"nan": nan, "posinf": posinf, "neginf": neginf})  # type: ignore[no-any-return]


nextafter: Binary = two_plain("nextafter", "The next representable number from `x1` towards `x2`.")
signbit: Unary = one("signbit", "True if the sign bit is set, as in -0.0.", calling("signbit"))
conj: Unary = one("conj", "Complex conjugates.")
real: Unary = one("real", "Real parts of complex numbers.", calling("real"))
imag: Unary = one("imag", "Imaginary parts; zeros of real numbers.", calling("imag"))
angle: Unary = one("angle", "Arguments of complex numbers, in radians.")
