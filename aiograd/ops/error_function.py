"""erf and erfc on arrays, which numpy lacks, to the last bit or two of float64 and float32.

Note [Approximation]
    Four rational functions, each a minimax fit of relative error below a quarter of the last bit:

    ==========  ============================  ==============================
    near        ``erf(x) / x - 1`` of x**2    ``|x| <= 1``
    middle      ``exp(x**2) erfc(x)`` of x    ``1/2 <= x <= 6``
    far         ``x exp(x**2) erfc(x)``       ``x >= 6``, of ``1 / x**2``
    single      ``erf(x) / x`` of ``x**2``    ``|x| <= 4``, for float32
    ==========  ============================  ==============================

    Coefficients of one sign lose nothing when they are evaluated; the numerator of `near` has both signs, but the number that it adds to x is small.
    The rounding of ``x**2`` would spoil ``exp(-x**2)`` for large x, so erfc splits x into a part z of few bits, with an exact square:
    ``exp(-x**2) = exp(-z**2) exp((z - x) (z + x))``.

Arrays of a few elements are left to ``math.erf``; a ufunc call costs more than that. Large ones go in blocks that stay in the cache.

Rejected: scipy at run time, a large dependency for two functions; a single fit for all x, which takes twice the terms.

Source: the division of the line follows W. J. Cody, Rational Chebyshev approximations for the error function, Math. Comp. 23 (1969).
The coefficients were computed anew, by Lawson's iteration on linearised least squares in 50 digits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.running.types import Array

Coefficients = tuple[float, ...]

# lowest power first; numerator, denominator
NEAR: tuple[Coefficients, Coefficients] = (
    (0.12837916709551256, -0.317006132749887, -0.04832947239281694, -0.008815670613962698, -0.0004956138661670988, -2.0732557766237813e-05),
    (1.0, 0.4605128512632114, 0.09381309303128858, 0.010693083882822474, 0.0006924986838080955, 2.081027871481009e-05),
)
MIDDLE: tuple[Coefficients, Coefficients] = (
    (
        0.9999999998163168, 1.78472633846311, 1.5764855520942376, 0.8608903388474191, 0.3103172475148174, 0.07369025020153291,
        0.01074052685863689, 0.000754904636697094,
    ),
    (
        1.0, 2.913105502784678, 3.863573132626506, 3.059612960418786, 1.5905396193080887, 0.5595403937069412, 0.13128165196350375,
        0.019037085694704275, 0.0013380336742638361,
    ),
)
FAR: tuple[Coefficients, Coefficients] = (
    (0.5641895835477562, 8.857353887909357, 38.9657305600789, 48.69441730391891, 8.317037751682173),
    (1.0, 16.199251007457516, 76.41458468850385, 114.24146149233839, 38.36246439303264),
)
SINGLE: tuple[Coefficients, Coefficients] = (
    (1.12837914134518, 0.19326382548960472, 0.05306296954138917, 0.00387097499740346, 0.00028423640662560617, 1.9881905817877414e-06),
    (1.0, 0.5046082138137198, 0.11523235110792529, 0.015182361160471627, 0.0011824860600152221, 3.7417705404467136e-05),
)

#: elements up to which math.erf, one by one, is faster
FEW = 320
#: elements per block
BLOCK = 8192


def erf(x: Array, /) -> Array:
    """The error function ``2 / sqrt(pi) * integral of exp(-t**2) from 0 to x``.

    Args:
        x: real, any shape; integers are taken as float64.

    Returns:
        An array of the shape and floating dtype of `x`, within 2 units in the last place (5 in float32).
    """
    return _apply(np.asarray(x), math.erf, _erf_block, np.float32)


def erfc(x: Array, /) -> Array:
    """The complementary error function ``1 - erf(x)``, with its full relative accuracy for large `x` too.

    Args:
        x: real, any shape; integers are taken as float64.

    Returns:
        An array of the shape and floating dtype of `x`, within 6 units in the last place (1 in float32).
    """
    return _apply(np.asarray(x), math.erfc, _erfc_block, np.float64)


def _apply(x: Array, scalar: Callable[[float], float], block: Callable[[Array], Array], single: Any) -> Array:
    """`scalar` on the elements of a small array, `block` on blocks of a large one; `single` is the dtype float32 is worked out in."""
    dtype = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
    flat = x.reshape(-1)
    if x.size <= FEW:
        return np.fromiter(map(scalar, flat.tolist()), dtype, x.size).reshape(x.shape)
    out = np.empty(x.size, dtype)
    working = single if dtype.itemsize <= 4 else np.float64
    for i in range(0, x.size, BLOCK):
        out[i : i + BLOCK] = block(flat[i : i + BLOCK].astype(working, copy=False))
    return out.reshape(x.shape)


@functools.cache
def _constants(coefficients: Coefficients, dtype: np.dtype[Any]) -> tuple[Array, ...]:
    """Highest power first, as arrays: a ufunc takes an array of no dimensions faster than a Python number."""
    return tuple(np.array(c, dtype) for c in reversed(coefficients))


def _ratio(fit: tuple[Coefficients, Coefficients], x: Array) -> Array:
    numerator, denominator = (_horner(_constants(c, x.dtype), x) for c in fit)
    return np.divide(numerator, denominator, out=numerator)


def _horner(constants: tuple[Array, ...], x: Array) -> Array:
    total = np.multiply(x, constants[0])
    for c in constants[1:-1]:
        np.add(total, c, out=total)
        np.multiply(total, x, out=total)
    return np.add(total, constants[-1], out=total)


def _near(x: Array, square: Array) -> Array:
    return x + x * _ratio(NEAR, square)


def _erf_block(x: Array) -> Array:
    if x.dtype == np.float32:
        inside = np.clip(x, -4.0, 4.0)
        out = _ratio(SINGLE, inside * inside)
        np.multiply(out, inside, out=out)
        return np.clip(out, -1.0, 1.0, out=out)
    x = np.clip(x, -6.0, 6.0)  # erf(6) is 1 in float64
    size = np.abs(x)
    square = size * size
    near = size < 1.0
    if near.all():
        return _near(x, square)
    rest = 1.0 - np.exp(-square) * _ratio(MIDDLE, size)
    np.copysign(rest, x, out=rest)
    return np.where(near, _near(x, square), rest) if near.any() else rest


def _erfc_block(x: Array) -> Array:
    x = np.clip(x, -28.0, 28.0)  # erfc(28) is 0 in float64
    size = np.abs(x)
    near = size < 0.5
    if near.all():
        return 1.0 - _near(x, size * size)
    short = np.trunc(size * 16.0) * 0.0625
    scale = np.exp(-short * short) * np.exp((short - size) * (short + size))
    out = scale * _scaled(size)
    out = np.where(x < 0.0, 2.0 - out, out)
    return np.where(near, 1.0 - _near(x, size * size), out) if near.any() else out


def _scaled(size: Array) -> Array:
    """``exp(x**2) erfc(x)`` from 1/2 on."""
    far = size >= 6.0
    if not far.any():
        return _ratio(MIDDLE, size)
    inverse = 1.0 / np.maximum(size, 1.0)
    return np.where(far, inverse * _ratio(FAR, inverse * inverse), _ratio(MIDDLE, np.minimum(size, 6.0)))


def erfcx(x: Array) -> Array:
    """The scaled complementary error function ``exp(x**2) * erfc(x)``.

    Args:
        x: real, float64.
    """
    flat = x.reshape(-1)
    size = np.absolute(flat)
    square = size * size
    near = np.exp(np.minimum(square, 1.0)) * (1.0 - _near(np.clip(flat, -0.5, 0.5), np.minimum(square, 0.25)))
    far = _scaled(np.maximum(size, 0.5))
    return np.where(size < 0.5, near, np.where(flat < 0.0, 2.0 * np.exp(square) - far, far)).reshape(x.shape)


def ndtri(p: Array) -> Array:
    """The number below which a standard normal is with probability `p`: a closed form to three digits, then Newton's steps on `log_ndtr`.

    Args:
        p: float64; NaN outside of [0, 1].
    """
    lower = p < 0.5
    inside = (p > 0.0) & (p < 1.0)
    tail = np.where(inside, np.where(lower, p, 1.0 - p), 0.5)
    log = np.log(tail)
    t = np.sqrt(-2.0 * log)
    x = (2.515517 + t * (0.802853 + t * 0.010328)) / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308))) - t
    for _ in range(4):
        now = log_ndtr(x)
        x = np.minimum(x - (now - log) * np.exp(now + 0.5 * x * x) * math.sqrt(2.0 * math.pi), 0.0)
    return np.where(inside, np.where(lower, x, -x), np.where(p == 0.0, -np.inf, np.where(p == 1.0, np.inf, np.nan)))


def erfinv(x: Array, /) -> Array:
    """The inverse of `erf`, infinite at -1 and 1 and NaN beyond: a closed form to three digits, then three of Halley's steps.

    Args:
        x: real, any shape; integers are taken as float64.
    """
    x = np.asarray(x)
    if x.dtype.kind == "c":
        raise TypeError("complex numbers, expected real ones")
    dtype = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
    y = x.astype(np.float64)
    size = np.absolute(y)
    inside = size < 1.0
    target = np.where(inside, size, 0.5)
    rest = np.log1p(-target * target)
    half = 2.0 / (math.pi * 0.147) + 0.5 * rest
    z = np.sqrt(np.sqrt(half * half - rest / 0.147) - half)
    for _ in range(3):
        # beyond 1/2 the distance from 1 has the digits, and is exact
        off = np.where(target > 0.5, (1.0 - target) - erfc(z), erf(z) - target)
        step = off / (2.0 / math.sqrt(math.pi) * np.exp(-z * z))
        z = z - step / (1.0 + z * step)
    out = np.where(inside, np.copysign(z, y), np.where(size == 1.0, np.copysign(np.inf, y), np.nan))
    return np.asarray(out, dtype)


def log_ndtr(x: Array, /) -> Array:
    """The logarithm of the probability that a standard normal is below `x`.

    Args:
        x: real, any shape; integers are taken as float64.
    """
    x = np.asarray(x)
    if x.dtype.kind == "c":
        raise TypeError("complex numbers, expected real ones")
    dtype = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
    z = x.astype(np.float64).reshape(-1) * -math.sqrt(0.5)
    tail = np.maximum(z, 6.0)
    inverse = np.minimum(1.0 / tail, 1.0)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        far = np.log(0.5 * inverse * _ratio(FAR, inverse * inverse)) - tail * tail
        near = np.minimum(z, 6.0)
        middle = np.where(near < 0.0, np.log1p(-0.5 * erfc(np.absolute(near))), np.log(0.5 * erfc(near)))
    return np.where(z > 6.0, far, middle).astype(dtype).reshape(x.shape)


def _gap_series() -> list[float]:
    """The coefficients of ``mills_gap(-z)`` in ``z**-1, z**-3, ...``; they make the series satisfy ``gap' = 1 + (x - gap) gap``."""
    series = [1]
    for m in range(1, 22):
        series.append(-(2 * m - 1) * series[-1] - sum(series[i] * series[m - 1 - i] for i in range(m)))
    return list(map(float, series))


GAP = _gap_series()


def mills_gap(x: Array, /, order: int = 0) -> Array:
    """``x + h(x)`` for negative x, where h is the derivative of `log_ndtr`, or the derivative of that sum of some order: far out the two cancel.

    Args:
        x: float64; positive numbers count as 0.
        order: of the derivative.
    """
    far = x < -12.0
    near = np.where(far, -12.0, np.minimum(x, 0.0))
    slope = math.sqrt(2.0 / math.pi) / erfcx(near * -math.sqrt(0.5))
    gaps, slopes = [near + slope], [slope]
    for n in range(order):
        gaps.append(np.where(n == 0, 1.0, 0.0) - sum(math.comb(n, k) * slopes[k] * gaps[n - k] for k in range(n + 1)))
        slopes.append(gaps[-1] - (1.0 if n == 0 else 0.0))
    inverse = 1.0 / np.where(far, -x, 12.0)
    factors = [c * math.prod(range(2 * k + 1, 2 * k + 1 + order)) for k, c in enumerate(GAP)]
    square, series = inverse * inverse, np.zeros_like(inverse)
    for factor in factors[::-1]:
        series = series * square + factor
    return np.where(far, series * inverse ** (order + 1), np.where(np.isnan(x), x, gaps[order]))
