"""Cross entropy of probabilities, elementwise, with PyTorch's limits at 0 and 1.

Logarithms are cut off at -100 and the slope's denominator at 1e-12, so a probability that is exactly 0 or 1 has a finite loss and gradient.
"""

from __future__ import annotations

import numpy as np

from aiograd.errors import ArgumentError, ShapeError
from aiograd.ops.op import define
from aiograd.running.types import Array

LOWEST_LOG = -100.0
SMALLEST = 1e-12


def _logs(x: Array) -> tuple[Array, Array]:
    """Logarithms of `x` and of ``1 - x``, cut off."""
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(x), LOWEST_LOG), np.maximum(np.log1p(-x), LOWEST_LOG)


def _binary_cross_entropy(x: Array, target: Array, /) -> Array:
    """``-(target * log(x) + (1 - target) * log(1 - x))`` of each element.

    Args:
        x: probabilities, any shape.
        target: in [0, 1], the same shape.

    Raises:
        ShapeError: the shapes differ. ArgumentError: something on the host is no probability.
    """
    if x.shape != target.shape:
        raise ShapeError(f"binary_cross_entropy: the input has shape {x.shape} and the target {target.shape}; expected the same")
    if type(x) is np.ndarray and x.size and not (x.min() >= 0 and x.max() <= 1) and not np.isnan(x).any():
        raise ArgumentError(f"binary_cross_entropy: the input runs from {x.min()} to {x.max()}, expected 0 to 1; of logits take ..._with_logits")
    on, off = _logs(x)
    return (target - 1.0) * off - target * on


def _x(g: Array, x: Array, target: Array) -> Array:
    return g * ((x - target) / np.maximum(x * (1.0 - x), SMALLEST))


def _target(g: Array, x: Array) -> Array:
    on, off = _logs(x)
    return g * (off - on)


binary_cross_entropy = define("binary_cross_entropy", _binary_cross_entropy, x=_x, target=_target, jvp="rule", cost=6.0)
