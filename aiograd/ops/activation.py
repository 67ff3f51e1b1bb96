"""Activation functions of neural networks, elementwise.

`relu` itself goes to the compiled kernel where an array is large: the kernel gives the same bits, so there is nothing to keep apart. `gelu` and
`silu` have kernels that agree to a tolerance, as `Fused`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.kernels import activation as kernels
from aiograd.kernels.selection import THRESHOLD
from aiograd.ops.elementwise import clamp
from aiograd.ops.masking import where
from aiograd.ops.op import Fused, define
from aiograd.ops.special import erfc, sigmoid
from aiograd.running.types import Array

SQRT_HALF = math.sqrt(0.5)
INVERSE_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
CUBIC = 0.044715
#: beyond it gelu is 0, or its argument, in every dtype, and its third power is a number in every dtype
FAR = 40.0


_ZERO = {np.dtype(dtype): np.zeros((), dtype) for dtype in (np.float32, np.float64)}


def _relu(x: Array, /) -> Array:
    """``max(x, 0)``."""
    if x.size >= THRESHOLD and x.__class__ is np.ndarray:
        return kernels.relu(x)
    return np.maximum(x, _ZERO.get(x.dtype, 0))


def _relu_vjp(g: Array, out: Array) -> Array:
    if out.__class__ is not np.ndarray:
        return g * (out > 0)
    if out.size >= THRESHOLD:
        return kernels.relu_grad(g, out)
    return g * np.sign(out)  # of numpy's choices the fastest; only an infinite gradient could tell it from a proper one


def _gelu(x: Array, /, approximate: str = "none") -> Array:
    """``x * P(N(0, 1) <= x)``.

    Args:
        x: real floating, any shape.
        approximate: ``none``: exact, by erf; ``tanh``: the approximation of the paper.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units.
    """
    _check_approximation(approximate)
    if approximate == "tanh":
        return x * sigmoid(_twice_inner(clamp(x, min=-FAR, max=FAR)))
    return 0.5 * x * erfc(x * -SQRT_HALF)


def _check_approximation(approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"gelu: approximate is {approximate!r}, expected 'none' or 'tanh'")


def _fused_gelu(x: Array, approximate: Any) -> tuple[Array]:
    _check_approximation(approximate)
    return (kernels.gelu(x, approximate),)


def _gelu_vjp(g: Array, x: Array, approximate: str) -> Array:
    x = clamp(x, min=-FAR, max=FAR)
    if approximate == "tanh":
        s = sigmoid(_twice_inner(x))
        return g * (s + x * (s - s * s) * (2.0 * SQRT_2_OVER_PI * (1 + (3 * CUBIC) * (x * x))))
    return g * (0.5 * erfc(x * -SQRT_HALF) + x * np.exp(-0.5 * (x * x)) * INVERSE_SQRT_2PI)


def _twice_inner(x: Array) -> Array:
    """Twice the argument of tanh in the approximation of gelu: ``(1 + tanh(u)) / 2`` is ``sigmoid(2 * u)``, which does not cancel."""
    return 2.0 * SQRT_2_OVER_PI * (x + CUBIC * (x * x * x))


def _silu(x: Array, /) -> Array:
    """``x * sigmoid(x)``, also called swish."""
    return x * sigmoid(x)


def _silu_vjp(g: Array, x: Array) -> Array:
    s = sigmoid(x)
    return g * (s + x * (s - s * s))


def _elu(x: Array, /, alpha: float = 1.0) -> Array:
    """`x` where it is positive, ``alpha * (exp(x) - 1)`` elsewhere."""
    return where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def _leaky_relu(x: Array, /, negative_slope: float = 0.01) -> Array:
    """`x` where it is positive, ``negative_slope * x`` elsewhere."""
    return where(x > 0, x, negative_slope * x)


relu = define("relu", _relu, x=_relu_vjp, jvp="rule", cost=0.7)
gelu = define(
    "gelu", _gelu, x=_gelu_vjp,
    jvp="rule", cost=6.0, fused=Fused(_fused_gelu, (), {"x": lambda g, x, approximate: kernels.gelu_grad(g, x, approximate)})
)
silu = define(
    "silu", _silu, x=_silu_vjp, jvp="rule", cost=4.0, fused=Fused(lambda x: (kernels.silu(x),), (), {"x": lambda g, x: kernels.silu_grad(g, x)})
)
elu = define("elu", _elu, x=lambda g, x, alpha: where(x > 0, g, g * (alpha * np.exp(np.minimum(x, 0)))), jvp="rule", cost=3.0)
leaky_relu = define("leaky_relu", _leaky_relu, x=lambda g, x, negative_slope: where(x > 0, g, g * negative_slope), jvp="rule", cost=2.0)


def _softsign_vjp(g: Array, x: Array) -> Array:
    whole = 1 + np.absolute(x)
    return g / whole / whole


#: ``x / (1 + |x|)``
softsign = define("softsign", lambda x, /: x / (1 + np.absolute(x)), x=_softsign_vjp, jvp="rule", cost=2.0)
