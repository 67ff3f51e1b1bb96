"""Rows without gradients: comparisons, logic, bits and tests of numbers.

They are in the table so that numpy's functions answer on Tensors, and so that rules may use them.
"""

from __future__ import annotations

import numpy as np

from aiograd.ops.op import answer, define, implements
from aiograd.running.types import Array

eq = define("eq", np.equal)
ne = define("ne", np.not_equal)
lt = define("lt", np.less)
le = define("le", np.less_equal)
gt = define("gt", np.greater)
ge = define("ge", np.greater_equal)

logical_and = define("logical_and", np.logical_and)
logical_or = define("logical_or", np.logical_or)
logical_xor = define("logical_xor", np.logical_xor)
logical_not = define("logical_not", np.logical_not)

bitwise_and = define("bitwise_and", np.bitwise_and)
bitwise_or = define("bitwise_or", np.bitwise_or)
bitwise_xor = define("bitwise_xor", np.bitwise_xor)
bitwise_not = define("bitwise_not", np.invert)
bitwise_left_shift = define("bitwise_left_shift", np.left_shift)
bitwise_right_shift = define("bitwise_right_shift", np.right_shift)

isfinite = define("isfinite", np.isfinite)
isinf = define("isinf", np.isinf)
isnan = define("isnan", np.isnan)
signbit = define("signbit", np.signbit)


#: True if ``|x1 - x2| <= atol + rtol * |x2|``, elementwise
isclose = define("isclose", lambda x1, x2, /, rtol=1e-05, atol=1e-08, equal_nan=False: np.isclose(x1, x2, rtol, atol, equal_nan))


@implements(np.array_equal)
def np_array_equal(a1: Array, a2: Array, equal_nan: bool = False) -> bool:
    """numpy's ``array_equal``."""
    if np.shape(a1) != np.shape(a2):
        return False
    same = eq(a1, a2)
    return bool(np.all(logical_or(same, logical_and(isnan(a1), isnan(a2))) if equal_nan else same))


answer({
    np.isclose: lambda a, b, rtol=1e-05, atol=1e-08, equal_nan=False: isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan),
    np.allclose: lambda a, b, rtol=1e-05, atol=1e-08, equal_nan=False: bool(np.all(isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan))),
    np.isposinf: lambda x, out=None: eq(x, np.inf),
    np.isneginf: lambda x, out=None: eq(x, -np.inf),
    np.isreal: lambda x: eq(np.imag(x), 0),
    np.iscomplex: lambda x: ne(np.imag(x), 0),
})  # fmt: skip
