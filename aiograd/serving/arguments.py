"""Numbers that servers, trainers and buffers take, checked: numpy's are as good as Python's, and a bool is none."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError


def checked_count(what: str, count: Any, least: int = 1) -> int:
    """A whole number of at least `least`; error messages name the argument `what`, such as ``Server(keep=)``."""
    expected = f"{what}: expected an int of at least {least}, found {count!r}"
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise ArgumentTypeError(expected)
    if int(count) < least:
        raise ArgumentError(expected)
    return int(count)


def checked_number(what: str, number: Any) -> int:
    """The number of a version."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise ArgumentTypeError(f"{what}: expected the number of a version, found {number!r}")
    return int(number)


def checked_real(what: str, value: Any, expected: str = "seconds, 0 or more", *, is_positive: bool = False, most: float = math.inf) -> float:
    """A finite number, 0 or more or above 0, and at most `most`; `expected` says so."""
    text = f"{what}: expected {expected}, found {value!r}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(text)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (0.0 <= number <= most) or math.isinf(number) or (is_positive and not number):
        raise ArgumentError(text)
    return number


def checked_deadline(deadline: float | None) -> float | None:
    """Seconds above 0 until an answer is due, or None."""
    return None if deadline is None else checked_real("deadline=", deadline, "seconds above 0, or None", is_positive=True)


def checked_timeout(what: str, timeout: float | None) -> float | None:
    """Seconds to wait, 0 or more, or None."""
    return None if timeout is None else checked_real(f"{what}(timeout=)", timeout, "seconds, 0 or more, or None")
