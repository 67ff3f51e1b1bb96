"""Elementwise activations and their gradients over flat arrays."""

from __future__ import annotations

import math
from typing import Any

from aiograd.kernels.compiled.jit import kernel, reads, writes
from aiograd.kernels.compiled.scalar import exp, normal_cdf, sigmoid, sigmoid_pair

_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
_ROOT = math.sqrt(2.0 / math.pi)
_CUBE = 0.044715
#: beyond it the slopes of gelu are 0 or 1, and no power of a huge number may meet that 0
_FAR = 40.0


@kernel(reads(1), writes(1))
def relu(x: Any, out: Any, block: int, low: int, high: int) -> None:
    """``max(x, 0)``; NaN stays."""
    x, out = x[low:high], out[low:high]
    zero = x.dtype.type(0)
    for i in range(x.size):
        out[i] = zero if x[i] < zero else x[i]


@kernel(reads(1), reads(1), writes(1))
def relu_grad(g: Any, x: Any, out: Any, block: int, low: int, high: int) -> None:
    """`g` where `x` is positive, else 0."""
    g, x, out = g[low:high], x[low:high], out[low:high]
    zero = x.dtype.type(0)
    for i in range(x.size):
        out[i] = g[i] if x[i] > zero else zero


@kernel(reads(1), writes(1))
def gelu(x: Any, out: Any, block: int, low: int, high: int) -> None:
    """``x * normal_cdf(x)``."""
    x, out = x[low:high], out[low:high]
    for i in range(x.size):
        out[i] = x[i] * normal_cdf(x[i])[0]


@kernel(reads(1), reads(1), writes(1))
def gelu_grad(g: Any, x: Any, out: Any, block: int, low: int, high: int) -> None:
    """Gradient of `gelu`."""
    g, x, out = g[low:high], x[low:high], out[low:high]
    scale, far = x.dtype.type(_DENSITY), x.dtype.type(_FAR)
    for i in range(x.size):
        v = min(max(x[i], -far), far)
        cdf, density = normal_cdf(v)
        out[i] = g[i] * (cdf + v * (density * scale))


@kernel(reads(1), writes(1))
def gelu_tanh(x: Any, out: Any, block: int, low: int, high: int) -> None:
    """The tanh approximation of gelu; ``(1 + tanh(u)) / 2`` is ``sigmoid(2 * u)``."""
    x, out = x[low:high], out[low:high]
    root, cube = x.dtype.type(2.0 * _ROOT), x.dtype.type(2.0 * _ROOT * _CUBE)
    for i in range(x.size):
        v = x[i]
        out[i] = v * sigmoid(v * (root + cube * v * v))


@kernel(reads(1), reads(1), writes(1))
def gelu_tanh_grad(g: Any, x: Any, out: Any, block: int, low: int, high: int) -> None:
    """Gradient of `gelu_tanh`."""
    g, x, out = g[low:high], x[low:high], out[low:high]
    root, cube = x.dtype.type(2.0 * _ROOT), x.dtype.type(2.0 * _ROOT * _CUBE)
    three, far = x.dtype.type(3), x.dtype.type(_FAR)
    for i in range(x.size):
        v = min(max(x[i], -far), far)
        s, slope = sigmoid_pair(v * (root + cube * v * v))
        out[i] = g[i] * (s + v * slope * (root + three * cube * v * v))


@kernel(reads(1), writes(1))
def silu(x: Any, out: Any, block: int, low: int, high: int) -> None:
    """``x * sigmoid(x)``."""
    x, out = x[low:high], out[low:high]
    one = x.dtype.type(1)
    for i in range(x.size):
        out[i] = x[i] / (one + exp(-x[i]))


@kernel(reads(1), reads(1), writes(1))
def silu_grad(g: Any, x: Any, out: Any, block: int, low: int, high: int) -> None:
    """Gradient of `silu`."""
    g, x, out = g[low:high], x[low:high], out[low:high]
    for i in range(x.size):
        s, slope = sigmoid_pair(x[i])
        out[i] = g[i] * (s + x[i] * slope)
