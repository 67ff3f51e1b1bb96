"""Comparisons, logic, bits and tests of numbers, under the standard's names. None has a gradient."""

from __future__ import annotations

import builtins

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, Binary, Unary, as_tensors, calling, one, row, two_plain
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

__all__ = [
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isclose", "allclose", "array_equal", "logical_and", "logical_or",
    "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_invert", "bitwise_left_shift", "bitwise_right_shift",
    "isfinite", "isinf", "isnan", "isposinf", "isneginf", "isreal",
]  # fmt: skip

equal: Binary = two_plain("equal", "``x1 == x2``, element by element.", row_name="eq")
not_equal: Binary = two_plain("not_equal", "``x1 != x2``, element by element.", row_name="ne")
less: Binary = two_plain("less", "``x1 < x2``, element by element.", row_name="lt")
less_equal: Binary = two_plain("less_equal", "``x1 <= x2``, element by element.", row_name="le")
greater: Binary = two_plain("greater", "``x1 > x2``, element by element.", row_name="gt")
greater_equal: Binary = two_plain("greater_equal", "``x1 >= x2``, element by element.", row_name="ge")


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


logical_and: Binary = two_plain("logical_and", "True for elements that are true in both arrays.")
logical_or: Binary = two_plain("logical_or", "True for elements that are true in at least one array.")
logical_xor: Binary = two_plain("logical_xor", "True for elements that are true in exactly one array.")
logical_not: Unary = one("logical_not", "True for elements that are false or zero.", calling("logical_not"))
bitwise_and: Binary = two_plain("bitwise_and", "``x1 & x2``: the bits that are set in both.")
bitwise_or: Binary = two_plain("bitwise_or", "``x1 | x2``: the bits that are set in at least one.")
bitwise_xor: Binary = two_plain("bitwise_xor", "``x1 ^ x2``: the bits that are set in exactly one.")
bitwise_invert: Unary = one("bitwise_invert", "``~x``: every bit the other way round.", calling("bitwise_not"))
bitwise_left_shift: Binary = two_plain("bitwise_left_shift", "``x1 << x2``: bits moved up.")
bitwise_right_shift: Binary = two_plain("bitwise_right_shift", "``x1 >> x2``: bits moved down.")
isfinite: Unary = one("isfinite", "True for elements that are neither infinite nor NaN.", calling("isfinite"))
isinf: Unary = one("isinf", "True for elements that are infinite.", calling("isinf"))
isnan: Unary = one("isnan", "True for elements that are NaN.", calling("isnan"))
isposinf: Unary = one("isposinf", "True for elements that are positive infinity.", lambda x: equal(x, np.inf))
isneginf: Unary = one("isneginf", "True for elements that are negative infinity.", lambda x: equal(x, -np.inf))
isreal: Unary = one("isreal", "True for elements with an imaginary part of zero.", lambda x: equal(call(row("imag"), (x,), {}), 0))
