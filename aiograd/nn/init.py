"""Initial values of parameters, drawn from an explicit `Generator`; each function fills a Tensor in place and returns it.

Version counters notice, and it works on leaves that require grad: initialising is not part of any graph.

Source: Glorot and Bengio (2010) for ``xavier``, He et al. (2015) for ``kaiming``; the defaults are PyTorch's.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.nn.functional.documentation import document
from aiograd.running.lazy import on_first_use
from aiograd.running.random import Generator, default_generator
from aiograd.tensors import inplace
from aiograd.tensors.core import make
from aiograd.tensors.tensor import Tensor

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

T = TypeVar("T", bound=Tensor)

_GAINS = {
    "linear": 1.0, "conv1d": 1.0, "conv2d": 1.0, "conv3d": 1.0, "sigmoid": 1.0, "tanh": 5.0 / 3.0, "relu": math.sqrt(2.0), "selu": 0.75,
}  # fmt: skip


def _fill(tensor: T, values: Any) -> T:
    if not isinstance(values, Tensor):
        values = make(np.asarray(values))
    inplace.write(tensor, values.detach().to(tensor.device)._data)
    return tensor


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """The factor that keeps variances from layer to layer under a nonlinearity.

    Args:
        nonlinearity: "linear", "conv2d", "sigmoid", "tanh", "relu", "leaky_relu" or "selu".
        param: the slope of "leaky_relu", 0.01 by default.

    Returns:
        The factor.

    Raises:
        ArgumentError: another nonlinearity.
    """
    if nonlinearity == "leaky_relu":
        return math.sqrt(2.0 / (1.0 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in _GAINS:
        raise ArgumentError(f"calculate_gain({nonlinearity!r}): expected 'leaky_relu' or one of {', '.join(map(repr, _GAINS))}")
    return _GAINS[nonlinearity]


def _fans(tensor: Tensor) -> tuple[int, int]:
    """Inputs and outputs of one unit: (fan in, fan out)."""
    if tensor.ndim < 2:
        raise ShapeError(f"fan in and fan out of a tensor of shape {list(tensor.shape)}: expected at least two axes, (out, in, ...)")
    field = math.prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


def uniform_(tensor: T, a: float = 0.0, b: float = 1.0, generator: Generator | None = None) -> T:
    """Uniform in [a, b)."""
    return _fill(tensor, (generator or default_generator()).uniform(tensor.shape, low=a, high=b, dtype=tensor.dtype))


def normal_(tensor: T, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None) -> T:
    """Normal with a mean and a standard deviation."""
    return _fill(tensor, (generator or default_generator()).normal(tensor.shape, mean=mean, std=std, dtype=tensor.dtype))


def trunc_normal_(tensor: T, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Generator | None = None) -> T:
    """Normal, cut off outside of [a, b] by drawing again.

    Raises:
        ArgumentError: no such interval, or one too far from the mean.
    """
    low, high = ((a - mean) / std, (b - mean) / std) if std > 0 else (0.0, 0.0)
    if not low < high or (min(abs(low), abs(high)) > 4 and low * high > 0):
        raise ArgumentError(f"trunc_normal_(mean={mean}, std={std}, a={a}, b={b}): expected std above 0 and an interval within 4 std of the mean")
    source = generator or default_generator()
    values = source.normal(tensor.shape, dtype=np.float64).numpy()
    outside = (values < low) | (values > high)
    while outside.any():
        values[outside] = source.normal(int(outside.sum()), dtype=np.float64).numpy()
        outside = (values < low) | (values > high)
    return _fill(tensor, np.clip(values * std + mean, a, b).astype(tensor.dtype))


def constant_(tensor: T, val: float) -> T:
    """Set every element to one number."""
    return _fill(tensor, np.full(tensor.shape, val, tensor.dtype))


def zeros_(tensor: T) -> T:
    """Set every element to 0."""
    return constant_(tensor, 0.0)


def ones_(tensor: T) -> T:
    """Set every element to 1."""
    return constant_(tensor, 1.0)


def eye_(tensor: T) -> T:
    """A matrix with ones on the diagonal.

    Raises:
        ShapeError: something else.
    """
    if tensor.ndim != 2:
        raise ShapeError(f"eye_() of shape {list(tensor.shape)}: expected a matrix")
    return _fill(tensor, np.eye(tensor.shape[0], tensor.shape[1], dtype=tensor.dtype))


def xavier_uniform_(tensor: T, gain: float = 1.0, generator: Generator | None = None) -> T:
    """Uniform with variance ``gain**2 * 2 / (fan in + fan out)``."""
    bound = gain * math.sqrt(6.0 / sum(_fans(tensor)))
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: T, gain: float = 1.0, generator: Generator | None = None) -> T:
    """Normal with variance ``gain**2 * 2 / (fan in + fan out)``."""
    return normal_(tensor, 0.0, gain * math.sqrt(2.0 / sum(_fans(tensor))), generator)


def _kaiming_std(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ArgumentError(f"kaiming initialisation: mode {mode!r}, expected 'fan_in' or 'fan_out'")
    fan = _fans(tensor)[mode == "fan_out"]
    return calculate_gain(nonlinearity, a) / math.sqrt(max(fan, 1))


def kaiming_uniform_(tensor: T, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", generator: Generator | None = None) -> T:
    """Uniform with variance ``gain**2 / fan``; `a` is the negative slope of the rectifier that follows."""
    bound = math.sqrt(3.0) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, generator)


def kaiming_normal_(tensor: T, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", generator: Generator | None = None) -> T:
    """Normal with variance ``gain**2 / fan``; `a` is the negative slope of the rectifier that follows."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity), generator)


def orthogonal_(tensor: T, gain: float = 1.0, generator: Generator | None = None) -> T:
    """A matrix (out, in * ...) with orthonormal rows or columns, whichever are fewer, times `gain`.

    Raises:
        ArgumentTypeError: fewer axes, or another dtype.
    """
    if tensor.ndim < 2 or tensor.dtype.kind != "f":
        raise ArgumentTypeError(f"orthogonal_() of shape {list(tensor.shape)}, dtype {tensor.dtype}: expected at least two axes, real floating")
    rows, columns = tensor.shape[0], math.prod(tensor.shape[1:])
    drawn = (generator or default_generator()).normal((max(rows, columns), min(rows, columns)), dtype=np.float64).numpy()
    q, r = np.linalg.qr(drawn)
    q = q * np.sign(np.diagonal(r))  # makes the factor unique, so that it is uniformly distributed
    return _fill(tensor, (gain * (q.T if rows < columns else q)).reshape(tensor.shape).astype(tensor.dtype))


document(sys.modules[__name__])
