"""Activations that are constant or linear in pieces, or a polynomial in one of them. At the corners slopes are PyTorch's.

Compositions: elementwise chains of rows that a device fuses and a compiled function makes one kernel of.
"""

from __future__ import annotations

import sys

from aiograd.array_functions.comparison import greater, greater_equal, less_equal, logical_and
from aiograd.array_functions.conversion import ArrayLike, as_tensor, as_tensors
from aiograd.array_functions.elementwise import abs
from aiograd.array_functions.searching import where
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn.functional.documentation import document
from aiograd.tensors.tensor import Tensor


def hardtanh(input: ArrayLike, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """`x` between the limits, the nearer limit elsewhere.

    Raises:
        ArgumentError: no such limits.
    """
    if not min_val < max_val:
        raise ArgumentError(f"hardtanh(min_val={min_val}, max_val={max_val}): expected a first limit below the second")
    x = as_tensor(input)
    out: Tensor = where(less_equal(x, min_val), min_val, where(greater_equal(x, max_val), max_val, x))
    return out


def relu6(input: ArrayLike) -> Tensor:
    """``min(max(x, 0), 6)``."""
    return hardtanh(input, 0.0, 6.0)


def hardsigmoid(input: ArrayLike) -> Tensor:
    """``min(max(x / 6 + 1 / 2, 0), 1)``."""
    return hardtanh(input, -3.0, 3.0) / 6.0 + 0.5


def hardswish(input: ArrayLike) -> Tensor:
    """``x * hardsigmoid(x)``."""
    x = as_tensor(input)
    out: Tensor = where(less_equal(x, -3.0), 0.0, where(greater_equal(x, 3.0), x, x * (x / 6.0 + 0.5)))
    return out


def hardshrink(input: ArrayLike, lambd: float = 0.5) -> Tensor:
    """`x` where its magnitude is above `lambd`, 0 elsewhere."""
    x = as_tensor(input)
    out: Tensor = where(less_equal(abs(x.detach()), lambd), 0.0, x)
    return out


def softshrink(input: ArrayLike, lambd: float = 0.5) -> Tensor:
    """`x` moved towards 0 by `lambd`, 0 where that would cross it.

    Raises:
        ArgumentError: `lambd` is below 0.
    """
    if not lambd >= 0:
        raise ArgumentError(f"softshrink(lambd={lambd}): expected a number of at least 0")
    x = as_tensor(input)
    inside = logical_and(less_equal(x, lambd), greater_equal(x, -lambd))
    out: Tensor = where(inside, 0.0, where(greater(x, 0.0), x - lambd, x + lambd))
    return out


def threshold(input: ArrayLike, threshold: float, value: float) -> Tensor:
    """`x` where it is above `threshold`, `value` elsewhere."""
    x = as_tensor(input)
    out: Tensor = where(less_equal(x, threshold), value, x)
    return out


def prelu(input: ArrayLike, weight: ArrayLike) -> Tensor:
    """`x` where positive, `weight` times `x` elsewhere.

    Args:
        input: (N, C, ...), or any shape with one weight.
        weight: () or (1,), or (C,), one per channel.

    Returns:
        A Tensor of the shape of `input`.

    Raises:
        ShapeError: neither one slope nor one per channel.
    """
    x, slopes = as_tensors(input, weight)
    if slopes.size != 1 and (slopes.ndim != 1 or x.ndim < 2 or x.shape[1] != slopes.size):
        raise ShapeError(f"prelu: an input of shape {list(x.shape)} and {slopes.size} slopes; expected one slope, or one per channel of (N, C, ...)")
    slopes = slopes.reshape((-1,) + (1,) * (x.ndim - 2)) if slopes.size != 1 else slopes.reshape(())
    out: Tensor = where(greater(x, 0.0), x, x * slopes)
    return out


document(sys.modules[__name__])
