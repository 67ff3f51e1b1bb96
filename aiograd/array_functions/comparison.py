"""Comparisons, logic, bits and tests of numbers, under the standard's names. None has a gradient."""

from __future__ import annotations

import builtins

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, as_tensors, row, two_plain
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

__all__ = [
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isclose", "allclose", "array_equal", "logical_and", "logical_or",
    "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_invert", "bitwise_left_shift", "bitwise_right_shift",
    "isfinite", "isinf", "isnan", "isposinf", "isneginf", "isreal",
]  # fmt: skip

_equal, _not_equal, _less, _less_equal = two_plain("eq"), two_plain("ne"), two_plain("lt"), two_plain("le")
_greater, _greater_equal = two_plain("gt"), two_plain("ge")
_logical_and, _logical_or, _logical_xor = two_plain("logical_and"), two_plain("logical_or"), two_plain("logical_xor")
_bitwise_and, _bitwise_or, _bitwise_xor = two_plain("bitwise_and"), two_plain("bitwise_or"), two_plain("bitwise_xor")
_left_shift, _right_shift = two_plain("bitwise_left_shift"), two_plain("bitwise_right_shift")


def equal(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 == x2``, element by element."""
    return _equal(x1, x2)


def not_equal(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 != x2``, element by element."""
    return _not_equal(x1, x2)


def less(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 < x2``, element by element."""
    return _less(x1, x2)


def less_equal(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 <= x2``, element by element."""
    return _less_equal(x1, x2)


def greater(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 > x2``, element by element."""
    return _greater(x1, x2)


def greater_equal(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 >= x2``, element by element."""
    return _greater_equal(x1, x2)


def isclose(x1: ArrayLike, x2: ArrayLike, /, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    """``|x1 - x2| <= atol + rtol * |x2|``, element by element."""
    return call(row("isclose"), (x1, x2), {"rtol": rtol, "atol": atol, "equal_nan": equal_nan})  # type: ignore[no-any-return]


def allclose(x1: ArrayLike, x2: ArrayLike, /, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> builtins.bool:
    """True if `isclose` holds everywhere."""
    return bool(call(row("all"), (isclose(x1, x2, rtol, atol, equal_nan),), {}))


def array_equal(x1: ArrayLike, x2: ArrayLike, /) -> builtins.bool:
    """True if shapes and all elements are equal."""
    first, second = as_tensors(x1, x2)
    return first.shape == second.shape and bool(call(row("all"), (equal(first, second),), {}))


def logical_and(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """True for elements that are true in both arrays."""
    return _logical_and(x1, x2)


def logical_or(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """True for elements that are true in at least one array."""
    return _logical_or(x1, x2)


def logical_xor(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """True for elements that are true in exactly one array."""
    return _logical_xor(x1, x2)


def logical_not(x: ArrayLike, /) -> Tensor:
    """True for elements that are false or zero."""
    return call(row("logical_not"), (as_tensor(x),), {})  # type: ignore[no-any-return]


def bitwise_and(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 & x2``: the bits that are set in both."""
    return _bitwise_and(x1, x2)


def bitwise_or(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 | x2``: the bits that are set in at least one."""
    return _bitwise_or(x1, x2)


def bitwise_xor(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 ^ x2``: the bits that are set in exactly one."""
    return _bitwise_xor(x1, x2)


def bitwise_invert(x: ArrayLike, /) -> Tensor:
    """``~x``: every bit the other way round."""
    return call(row("bitwise_not"), (as_tensor(x),), {})  # type: ignore[no-any-return]


def bitwise_left_shift(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 << x2``: bits moved up."""
    return _left_shift(x1, x2)


def bitwise_right_shift(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
    """``x1 >> x2``: bits moved down."""
    return _right_shift(x1, x2)


def isfinite(x: ArrayLike, /) -> Tensor:
    """True for elements that are neither infinite nor NaN."""
    return call(row("isfinite"), (as_tensor(x),), {})  # type: ignore[no-any-return]


def isinf(x: ArrayLike, /) -> Tensor:
    """True for elements that are infinite."""
    return call(row("isinf"), (as_tensor(x),), {})  # type: ignore[no-any-return]


def isnan(x: ArrayLike, /) -> Tensor:
    """True for elements that are NaN."""
    return call(row("isnan"), (as_tensor(x),), {})  # type: ignore[no-any-return]


def isposinf(x: ArrayLike, /) -> Tensor:
    """True for elements that are positive infinity."""
    return _equal(x, np.inf)


def isneginf(x: ArrayLike, /) -> Tensor:
    """True for elements that are negative infinity."""
    return _equal(x, -np.inf)


def isreal(x: ArrayLike, /) -> Tensor:
    """True for elements with an imaginary part of zero."""
    return _equal(call(row("imag"), (as_tensor(x),), {}), 0)
