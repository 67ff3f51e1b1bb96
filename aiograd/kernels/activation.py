"""relu, gelu and silu and their gradients, and the logistic function.

All of them keep their relative accuracy where they vanish, so far as the dtype has normal numbers there.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from aiograd.kernels.arrays import flat, quietly
from aiograd.kernels.erfcx import normal_cdf
from aiograd.kernels.pool import run
from aiograd.kernels.selection import compiled

NDArray = npt.NDArray[Any]
Approximation = Literal["none", "tanh"]

_ROOT = math.sqrt(2.0 / math.pi)
_CUBE = 0.044715
_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
#: beyond it the functions are 0, or their argument, in every dtype, and its powers up to the third are numbers in every dtype
_FAR = 40.0
_ONE = {np.dtype(dtype): np.ones((), dtype) for dtype in (np.float32, np.float64)}
_UNSIGNED: dict[np.dtype[Any], type[Any]] = {np.dtype(np.float32): np.uint32, np.dtype(np.float64): np.uint64}


def _map(name: str, *arrays: NDArray) -> NDArray | None:
    """Run the compiled kernel `name` over arrays of one shape; None: there is none to be used."""
    first = arrays[0]
    kernels = compiled(first.size, *arrays)
    if kernels is None:
        return None
    out = np.empty(first.shape, first.dtype)
    run(getattr(kernels.activation, name), first.size, first.size, *map(flat, arrays), out.reshape(-1))
    return out


def relu(x: NDArray) -> NDArray:
    """``max(x, 0)``; NaN stays."""
    out = _map("relu", x)
    return np.maximum(x, 0) if out is None else out


def relu_grad(g: NDArray, x: NDArray) -> NDArray:
    """`g` where `x` is positive, else 0; `x` may also be relu's output."""
    out = _map("relu_grad", g, x)
    if out is not None:
        return out
    unsigned = _UNSIGNED.get(g.dtype) if g.ndim and g.dtype == x.dtype else None
    if unsigned is None:
        return np.where(x > 0, g, g.dtype.type(0))
    # by bits: np.where branches on every element
    bits: NDArray = (x > 0).astype(unsigned)
    np.negative(bits, out=bits)
    np.bitwise_and(bits, g.view(unsigned), out=bits)
    return bits.view(g.dtype)


def sigmoid(x: NDArray) -> NDArray:
    """``1 / (1 + exp(-x))`` of floating `x`; 0 where that is below the dtype's normal numbers (in float16: its smallest)."""
    if x.dtype.char == "e":  # the exponential would leave its range too soon
        return np.asarray(sigmoid(x.astype(np.float32)).astype(np.float16))
    one = _ONE.get(x.dtype, 1)
    out: NDArray
    if x.ndim == 0:
        out = np.reciprocal(quietly(np.exp, -x) + one)
        return out
    out = np.negative(x)
    quietly(np.exp, out, out)
    out += one
    return np.reciprocal(out, out)


def gelu(x: NDArray, approximate: Approximation = "none") -> NDArray:
    """``x * normal_cdf(x)``, or its approximation by tanh.

    Args:
        x: floating point.
        approximate: "none" or "tanh".
    """
    if x.dtype == np.float16:
        return np.asarray(gelu(x.astype(np.float32), approximate).astype(x.dtype))
    out = _map("gelu" if approximate == "none" else "gelu_tanh", x)
    if out is not None:
        return out
    near = np.clip(x, -_FAR, _FAR)
    if approximate == "none":
        return x * normal_cdf(near)[0]
    out = sigmoid(near * (2.0 * _ROOT + (2.0 * _ROOT * _CUBE) * (near * near)))
    out *= x
    return out


def gelu_grad(g: NDArray, x: NDArray, approximate: Approximation = "none") -> NDArray:
    """Gradient of `gelu`."""
    if x.dtype == np.float16:
        return np.asarray(gelu_grad(g.astype(np.float32), x.astype(np.float32), approximate).astype(x.dtype))
    out = _map("gelu_grad" if approximate == "none" else "gelu_tanh_grad", g, x)
    if out is not None:
        return out
    near = np.clip(x, -_FAR, _FAR)
    if approximate == "none":
        cdf, density = normal_cdf(near)
        density *= near
        density *= _DENSITY
        density += cdf
        density *= g
        return density
    square = near * near
    s = sigmoid(near * (2.0 * _ROOT + (2.0 * _ROOT * _CUBE) * square))
    slope: NDArray = near * (2.0 * _ROOT + (6.0 * _ROOT * _CUBE) * square)
    slope *= s * (1.0 - s)
    slope += s
    slope *= g
    return slope


def silu(x: NDArray) -> NDArray:
    """``x * sigmoid(x)``."""
    out = _map("silu", x)
    return x * sigmoid(x) if out is None else out


def silu_grad(g: NDArray, x: NDArray) -> NDArray:
    """Gradient of `silu`."""
    out = _map("silu_grad", g, x)
    if out is not None:
        return out
    s = sigmoid(x)
    return g * (s + x * s * (1.0 - s))
