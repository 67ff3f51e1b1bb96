"""Activations as functions. PyTorch's parameter ``dim`` may be called ``axis`` as well."""

from __future__ import annotations

import sys
from typing import Any

from aiograd.array_functions import activation as functions
from aiograd.array_functions.comparison import greater
from aiograd.array_functions.conversion import ArrayLike, as_tensor
from aiograd.array_functions.elementwise import expm1
from aiograd.array_functions.elementwise import tanh as _tanh
from aiograd.array_functions.manipulation import split
from aiograd.array_functions.searching import where
from aiograd.array_functions.special import logit as _logit
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn.functional.documentation import document
from aiograd.ops.shape import checked_axis
from aiograd.tensors.tensor import Tensor

#: of `selu`
SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def relu(input: ArrayLike) -> Tensor:
    """``max(x, 0)``."""
    return functions.relu(input)


def gelu(input: ArrayLike, approximate: str = "none") -> Tensor:
    """``x`` times the probability of a standard normal below it; `approximate` is "none" or "tanh"."""
    return functions.gelu(input, approximate=approximate)


def silu(input: ArrayLike) -> Tensor:
    """``x * sigmoid(x)``."""
    return functions.silu(input)


def elu(input: ArrayLike, alpha: float = 1.0) -> Tensor:
    """`x` where positive, ``alpha * (exp(x) - 1)`` elsewhere."""
    return functions.elu(input, alpha=alpha)


def leaky_relu(input: ArrayLike, negative_slope: float = 0.01) -> Tensor:
    """`x` where positive, ``negative_slope * x`` elsewhere."""
    return functions.leaky_relu(input, negative_slope=negative_slope)


def softplus(input: ArrayLike, beta: float = 1.0, threshold: float | None = None) -> Tensor:
    """``log(1 + exp(beta * x)) / beta``, without overflow."""
    x = as_tensor(input)
    out = functions.softplus(x, beta=beta)
    return out if threshold is None else where(x * beta > threshold, x, out)


def softsign(input: ArrayLike) -> Tensor:
    """``x / (1 + |x|)``."""
    return functions.softsign(input)


def sigmoid(input: ArrayLike) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    return functions.sigmoid(input)


def logsigmoid(input: ArrayLike) -> Tensor:
    """``log(sigmoid(x))``, accurate for large negative `x`."""
    return functions.log_sigmoid(input)


def tanh(input: ArrayLike) -> Tensor:
    """Hyperbolic tangents."""
    return _tanh(input)


def selu(input: ArrayLike) -> Tensor:
    """``scale * elu(x, alpha)`` with the two numbers that keep mean 0 and variance 1 from layer to layer.

    Source: Klambauer et al., Self-normalizing neural networks (2017).
    """
    return functions.elu(input, alpha=SELU_ALPHA) * SELU_SCALE


def celu(input: ArrayLike, alpha: float = 1.0) -> Tensor:
    """`x` where positive, ``alpha * (exp(x / alpha) - 1)`` elsewhere.

    Raises:
        ArgumentError: `alpha` is 0.
    """
    if alpha == 0:
        raise ArgumentError("celu(alpha=0): expected another number than 0")
    x = as_tensor(input)
    positive = greater(x, 0.0)
    out: Tensor = where(positive, x, expm1(where(positive, 0.0, x) / alpha) * alpha)
    return out


def mish(input: ArrayLike) -> Tensor:
    """``x * tanh(softplus(x))``."""
    x = as_tensor(input)
    return x * _tanh(functions.softplus(x))


def tanhshrink(input: ArrayLike) -> Tensor:
    """``x - tanh(x)``."""
    x = as_tensor(input)
    return x - _tanh(x)


def logit(input: ArrayLike, eps: float | None = None) -> Tensor:
    """``log(x / (1 - x))``, the inverse of `sigmoid`."""
    return _logit(input, eps)


def glu(input: ArrayLike, dim: int | None = None, *, axis: int | None = None) -> Tensor:
    """The first half along an axis (the last by default) times the sigmoid of the second half.

    Raises:
        ShapeError: the length is odd.
    """
    x, along = as_tensor(input), axis_of("glu", dim, axis)
    if x.shape[checked_axis(along, x.ndim)] % 2:
        raise ShapeError(f"glu: found shape {list(x.shape)}, expected an even length along axis {along}")
    first, second = split(x, 2, axis=along)
    return first * functions.sigmoid(second)


def softmin(input: ArrayLike, dim: int | None = None, *, axis: int | None = None) -> Tensor:
    """``softmax(-x)`` along an axis, the last by default."""
    return functions.softmax(-as_tensor(input), axis=axis_of("softmin", dim, axis))


def axis_of(name: str, dim: int | None, axis: int | None, default: int = -1) -> int:
    """The axis that was meant by ``dim`` or ``axis``.

    Raises:
        ArgumentError: they disagree.
    """
    if dim is not None and axis is not None and dim != axis:
        raise ArgumentError(f"{name}: dim={dim} and axis={axis} are two names of one argument: give one")
    chosen = axis if dim is None else dim
    return default if chosen is None else chosen


def softmax(input: ArrayLike, dim: int | None = None, *, axis: int | None = None, dtype: Any = None) -> Tensor:
    """``exp(x) / sum(exp(x))`` along an axis, the last by default."""
    x = as_tensor(input)
    return functions.softmax(x if dtype is None else x.astype(dtype, copy=False), axis=axis_of("softmax", dim, axis))


def log_softmax(input: ArrayLike, dim: int | None = None, *, axis: int | None = None, dtype: Any = None) -> Tensor:
    """``log(softmax(x))`` along an axis, the last by default."""
    x = as_tensor(input)
    return functions.log_softmax(x if dtype is None else x.astype(dtype, copy=False), axis=axis_of("log_softmax", dim, axis))


document(sys.modules[__name__])
