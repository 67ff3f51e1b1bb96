"""Checks of what random numbers are asked for: shapes, and the parameters of distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.running.types import Shape


def checked_shape(shape: Any) -> Shape:
    """A shape as a tuple of ints.

    Raises:
        ArgumentError: it is none.
    """
    extents = (shape,) if isinstance(shape, (int, np.integer)) and not isinstance(shape, bool) else shape
    if not isinstance(extents, (tuple, list)) or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in extents):
        raise ArgumentError(f"shape {shape!r}: expected an int of at least 0, or a sequence of them")
    return tuple(map(int, extents))


def check(call: str, expected: str, is_right: Callable[[], Any]) -> None:
    """Raise unless the parameters of a call are right.

    Args:
        call: with its arguments, for the message.
        expected: the parameters that are right, for the message.
        is_right: compares them; may raise where they are no numbers.

    Raises:
        ArgumentError: they are not.
    """
    try:
        passed = bool(is_right())
    except (TypeError, ValueError):
        passed = False
    if not passed:
        raise ArgumentError(f"{call}: expected {expected}")


def check_probability(what: str, p: Any) -> None:
    """Raise unless `p` is a probability."""
    check(f"{what}(p={p})", "a probability between 0 and 1", lambda: 0 <= p <= 1)


def check_interval(what: str, low: Any, high: Any) -> None:
    """Raise unless these are the ends of an interval."""
    check(f"{what}(low={low}, high={high})", "finite numbers with low <= high", lambda: low <= high and math.isfinite(high - low))


def check_normal(what: str, mean: Any, std: Any) -> None:
    """Raise unless there is a normal distribution with this mean and standard deviation."""
    check(
        f"{what}(mean={mean}, std={std})", "finite numbers, std at least 0", lambda: std >= 0 and math.isfinite(std) and math.isfinite(mean)
    )


def in_unit_steps(uniform: Any, wanted: np.dtype[Any]) -> Any:
    """Numbers in [0, 1) that `wanted` holds without rounding them up to 1: multiples of its distance of numbers below 1."""
    if wanted.itemsize >= uniform.dtype.itemsize:
        return uniform
    steps = uniform.dtype.type(2.0 / np.finfo(wanted).eps)
    return np.floor(uniform * steps) / steps
