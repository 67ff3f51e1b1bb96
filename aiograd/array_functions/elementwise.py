"""Elementwise functions of the Python Array API standard: arithmetic, exponentials, trigonometry, rounding, extrema.

Signatures are the standard's; a few that numpy and PyTorch users miss there (`erf`, `exp2`, `rsqrt`, ...) are in the same style.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, row, scaled, two, two_plain
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

_add, _subtract, _multiply, _divide = two("add"), two("sub"), two("mul"), two("div")
_remainder, _fmod, _pow, _floor_divide = two("remainder"), two("fmod"), two("pow"), two_plain("floor_divide")
_copysign, _hypot, _logaddexp, _xlogy, _atan2 = two("copysign"), two("hypot"), two("logaddexp"), two("xlogy"), two("atan2")
_maximum, _minimum, _nextafter = two("maximum"), two("minimum"), two_plain("nextafter")
_negative, _positive, _abs, _sign = unary(row("neg")), unary(row("positive")), unary(row("abs")), unary(row("sgn"))
_reciprocal, _square, _sqrt, _rsqrt, _cbrt = (unary(row(name)) for name in ("reciprocal", "square", "sqrt", "rsqrt", "cbrt"))
_exp, _exp2, _expm1 = (unary(row(name)) for name in ("exp", "exp2", "expm1"))
_log, _log1p, _log2, _log10 = (unary(row(name)) for name in ("log", "log1p", "log2", "log10"))
_sin, _cos, _tan, _asin, _acos, _atan = (unary(row(name)) for name in ("sin", "cos", "tan", "asin", "acos", "atan"))
_sinh, _cosh, _tanh, _asinh, _acosh, _atanh = (unary(row(name)) for name in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"))
_deg2rad, _rad2deg, _erf, _erfc = (unary(row(name)) for name in ("deg2rad", "rad2deg", "erf", "erfc"))
_floor, _ceil, _trunc = (unary(row(name)) for name in ("floor", "ceil", "trunc"))
_fmax, _fmin, _heaviside, _ldexp = two("fmax"), two("fmin"), two("heaviside"), two("ldexp")
_float_power, _logaddexp2, _gcd, _lcm = two("float_power"), two("logaddexp2"), two_plain("gcd"), two_plain("lcm")
_conj, _angle = unary(row("conj")), unary(row("angle"))


# Arithmetic.


def add(x1: ArrayLike, x2: ArrayLike, /, *, alpha: complex = 1) -> Tensor:
    """Sums of elements: ``x1 + alpha * x2``."""
    return _add(x1, scaled(x2, alpha))


def subtract(x1: ArrayLike, x2: ArrayLike, /, *, alpha: complex = 1) -> Tensor:
    """Differences of elements: ``x1 - alpha * x2``."""
    return _subtract(x1, scaled(x2, alpha))


def multiply(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 * x2``, element by element."""
    return _multiply(x1, x2)


def divide(x1: ArrayLike, x2: ArrayLike, /, *, rounding_mode: str | None = None) -> Tensor:
    """Quotients of elements; rounded down with `rounding_mode` "floor", towards zero with "trunc"."""
    if rounding_mode is None:
        return _divide(x1, x2)
    if rounding_mode not in ("floor", "trunc"):
        raise ArgumentError(f"divide(rounding_mode={rounding_mode!r}): expected None, 'floor' or 'trunc'")
    if rounding_mode == "floor":
        return _floor_divide(x1, x2)
    quotient = trunc(_divide(x1, x2))
    return quotient.astype(np.result_type(*(x.dtype if hasattr(x, "dtype") else x for x in (x1, x2))), copy=False)


def floor_divide(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """Quotients rounded down; without a gradient."""
    return _floor_divide(x1, x2)


def remainder(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """Remainders with the sign of the divisor."""
    return _remainder(x1, x2)


def fmod(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """Remainders with the sign of the dividend."""
    return _fmod(x1, x2)


def pow(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """`x1` to the power `x2`."""
    return _pow(x1, x2)


def gcd(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """Greatest common divisors of integers."""
    return _gcd(x1, x2)


def lcm(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """Least common multiples of integers."""
    return _lcm(x1, x2)


def negative(x: ArrayLike, /) -> Tensor:
    """Elements with the other sign."""
    return _negative(as_tensor(x))  # type: ignore[no-any-return]


def positive(x: ArrayLike, /) -> Tensor:
    """The elements as they are."""
    return _positive(as_tensor(x))  # type: ignore[no-any-return]


def abs(x: ArrayLike, /) -> Tensor:
    """Absolute values; magnitudes of complex numbers."""
    return _abs(as_tensor(x))  # type: ignore[no-any-return]


def sign(x: ArrayLike, /) -> Tensor:
    """-1, 0 or 1 as the elements are; ``x / |x|`` of complex numbers."""
    return _sign(as_tensor(x))  # type: ignore[no-any-return]


def copysign(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """Magnitudes of `x1` with the signs of `x2`."""
    return _copysign(x1, x2)


def reciprocal(x: ArrayLike, /) -> Tensor:
    """One divided by each element."""
    return _reciprocal(as_tensor(x))  # type: ignore[no-any-return]


def square(x: ArrayLike, /) -> Tensor:
    """Squares."""
    return _square(as_tensor(x))  # type: ignore[no-any-return]


def sqrt(x: ArrayLike, /) -> Tensor:
    """Square roots."""
    return _sqrt(as_tensor(x))  # type: ignore[no-any-return]


def rsqrt(x: ArrayLike, /) -> Tensor:
    """One divided by the square root of each element."""
    return _rsqrt(as_tensor(x))  # type: ignore[no-any-return]


def cbrt(x: ArrayLike, /) -> Tensor:
    """Cube roots."""
    return _cbrt(as_tensor(x))  # type: ignore[no-any-return]


def hypot(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``sqrt(x1**2 + x2**2)`` without overflow."""
    return _hypot(x1, x2)


# Exponentials and logarithms.


def exp(x: ArrayLike, /) -> Tensor:
    """e to the power of each element."""
    return _exp(as_tensor(x))  # type: ignore[no-any-return]


def exp2(x: ArrayLike, /) -> Tensor:
    """2 to the power of each element."""
    return _exp2(as_tensor(x))  # type: ignore[no-any-return]


def expm1(x: ArrayLike, /) -> Tensor:
    """``exp(x) - 1``, accurate near 0."""
    return _expm1(as_tensor(x))  # type: ignore[no-any-return]


def log(x: ArrayLike, /) -> Tensor:
    """Natural logarithms."""
    return _log(as_tensor(x))  # type: ignore[no-any-return]


def log1p(x: ArrayLike, /) -> Tensor:
    """``log(1 + x)``, accurate near 0."""
    return _log1p(as_tensor(x))  # type: ignore[no-any-return]


def log2(x: ArrayLike, /) -> Tensor:
    """Logarithms to base 2."""
    return _log2(as_tensor(x))  # type: ignore[no-any-return]


def log10(x: ArrayLike, /) -> Tensor:
    """Logarithms to base 10."""
    return _log10(as_tensor(x))  # type: ignore[no-any-return]


def logaddexp(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``log(exp(x1) + exp(x2))`` without overflow."""
    return _logaddexp(x1, x2)


def logaddexp2(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``log2(2**x1 + 2**x2)`` without overflow."""
    return _logaddexp2(x1, x2)


def ldexp(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 * 2**x2``."""
    return _ldexp(x1, x2)


def float_power(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """`x1` to the power `x2` in float64 or complex128."""
    return _float_power(x1, x2)


def xlogy(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 * log(x2)``, 0 where `x1` is 0."""
    return _xlogy(x1, x2)


# Trigonometric and hyperbolic functions.


def sin(x: ArrayLike, /) -> Tensor:
    """Sines of angles in radians."""
    return _sin(as_tensor(x))  # type: ignore[no-any-return]


def cos(x: ArrayLike, /) -> Tensor:
    """Cosines of angles in radians."""
    return _cos(as_tensor(x))  # type: ignore[no-any-return]


def tan(x: ArrayLike, /) -> Tensor:
    """Tangents of angles in radians."""
    return _tan(as_tensor(x))  # type: ignore[no-any-return]


def asin(x: ArrayLike, /) -> Tensor:
    """Inverse sines, in radians."""
    return _asin(as_tensor(x))  # type: ignore[no-any-return]


def acos(x: ArrayLike, /) -> Tensor:
    """Inverse cosines, in radians."""
    return _acos(as_tensor(x))  # type: ignore[no-any-return]


def atan(x: ArrayLike, /) -> Tensor:
    """Inverse tangents, in radians."""
    return _atan(as_tensor(x))  # type: ignore[no-any-return]


def atan2(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """Angles of the points (x2, x1), in radians from -pi to pi."""
    return _atan2(x1, x2)


def sinh(x: ArrayLike, /) -> Tensor:
    """Hyperbolic sines."""
    return _sinh(as_tensor(x))  # type: ignore[no-any-return]


def cosh(x: ArrayLike, /) -> Tensor:
    """Hyperbolic cosines."""
    return _cosh(as_tensor(x))  # type: ignore[no-any-return]


def tanh(x: ArrayLike, /) -> Tensor:
    """Hyperbolic tangents."""
    return _tanh(as_tensor(x))  # type: ignore[no-any-return]


def asinh(x: ArrayLike, /) -> Tensor:
    """Inverse hyperbolic sines."""
    return _asinh(as_tensor(x))  # type: ignore[no-any-return]


def acosh(x: ArrayLike, /) -> Tensor:
    """Inverse hyperbolic cosines."""
    return _acosh(as_tensor(x))  # type: ignore[no-any-return]


def atanh(x: ArrayLike, /) -> Tensor:
    """Inverse hyperbolic tangents."""
    return _atanh(as_tensor(x))  # type: ignore[no-any-return]


def deg2rad(x: ArrayLike, /) -> Tensor:
    """Degrees as radians."""
    return _deg2rad(as_tensor(x))  # type: ignore[no-any-return]


def rad2deg(x: ArrayLike, /) -> Tensor:
    """Radians as degrees."""
    return _rad2deg(as_tensor(x))  # type: ignore[no-any-return]


# Special functions.


def erf(x: ArrayLike, /) -> Tensor:
    """The error function."""
    return _erf(as_tensor(x))  # type: ignore[no-any-return]


def erfc(x: ArrayLike, /) -> Tensor:
    """``1 - erf(x)``, accurate for large `x`."""
    return _erfc(as_tensor(x))  # type: ignore[no-any-return]


def sinc(x: ArrayLike, /) -> Tensor:
    """``sin(pi x) / (pi x)``, 1 at 0."""
    return call(row("sinc"), (as_tensor(x),), {})  # type: ignore[no-any-return]


# Rounding, extrema and parts.


def floor(x: ArrayLike, /) -> Tensor:
    """The largest integers not above the elements."""
    return _floor(as_tensor(x))  # type: ignore[no-any-return]


def ceil(x: ArrayLike, /) -> Tensor:
    """The smallest integers not below the elements."""
    return _ceil(as_tensor(x))  # type: ignore[no-any-return]


def trunc(x: ArrayLike, /) -> Tensor:
    """The elements without their digits behind the decimal point."""
    return _trunc(as_tensor(x))  # type: ignore[no-any-return]


def round(x: ArrayLike, /, decimals: int = 0) -> Tensor:
    """The nearest numbers with so many decimals; halves go to the even neighbour."""
    return call(row("round"), (as_tensor(x),), {"decimals": decimals})  # type: ignore[no-any-return]


def maximum(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """The larger elements; where two are equal each gets half of the gradient."""
    return _maximum(x1, x2)


def minimum(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """The smaller elements; where two are equal each gets half of the gradient."""
    return _minimum(x1, x2)


def clip(x: ArrayLike, /, min: ArrayLike | None = None, max: ArrayLike | None = None) -> Tensor:
    """Elements limited to [min, max]; the limits broadcast, and take gradients where they are Tensors."""
    source = as_tensor(x)
    limits: list[Any] = [as_tensor(limit, source.dtype) if isinstance(limit, (list, tuple, np.ndarray)) else limit for limit in (min, max)]
    return elementwise.clip(source, *limits)  # type: ignore[no-any-return]


def fmax(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """The larger elements, the other where one is NaN; where two are equal the first gets the gradient."""
    return _fmax(x1, x2)


def fmin(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """The smaller elements, the other where one is NaN; where two are equal the first gets the gradient."""
    return _fmin(x1, x2)


def frac(x: ArrayLike, /) -> Tensor:
    """The digits behind the decimal point, with the sign of the element."""
    source = as_tensor(x)
    return source - trunc(source)


def heaviside(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """0 where `x1` is negative, 1 where it is positive, `x2` where it is zero."""
    return _heaviside(x1, x2)


def nan_to_num(x: ArrayLike, /, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """NaN and the infinities replaced by numbers; by the largest and smallest of the dtype where none is given."""
    return call(row("nan_to_num"), (as_tensor(x),), {"nan": nan, "posinf": posinf, "neginf": neginf})  # type: ignore[no-any-return]


def nextafter(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """The next representable number from `x1` towards `x2`."""
    return _nextafter(x1, x2)


def signbit(x: ArrayLike, /) -> Tensor:
    """True if the sign bit is set, as in -0.0."""
    return call(row("signbit"), (as_tensor(x),), {})  # type: ignore[no-any-return]


def conj(x: ArrayLike, /) -> Tensor:
    """Complex conjugates."""
    return _conj(as_tensor(x))  # type: ignore[no-any-return]


def real(x: ArrayLike, /) -> Tensor:
    """Real parts of complex numbers."""
    return call(row("real"), (as_tensor(x),), {})  # type: ignore[no-any-return]


def imag(x: ArrayLike, /) -> Tensor:
    """Imaginary parts; zeros of real numbers."""
    return call(row("imag"), (as_tensor(x),), {})  # type: ignore[no-any-return]


def angle(x: ArrayLike, /) -> Tensor:
    """Arguments of complex numbers, in radians."""
    return _angle(as_tensor(x))  # type: ignore[no-any-return]
