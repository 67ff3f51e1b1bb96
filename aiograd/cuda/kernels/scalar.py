"""Functions of one element, by precision: what kernels call instead of ``math``.

On a device they are CUDA's own of that precision; in the simulator numpy's, which follow IEEE 754 where ``math`` raises (``exp(1000)``,
``log(0)``). Multiplication is here as well: ``mul`` is never contracted with an addition into one rounding, so that an expression has
the same bits however its operations were put together into kernels.

Precisions are named as numpy does: ``f4``, ``f8``; half precision is computed in ``f4``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import config
from numba.cuda import libdevice, types

#: True if kernels run in numba's simulator
SIMULATED = bool(config.ENABLE_CUDASIM)

_MATH = {
    "exp": math.exp, "expm1": math.expm1, "log": math.log, "log2": math.log2, "log10": math.log10, "log1p": math.log1p, "sqrt": math.sqrt,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "asin": math.asin, "acos": math.acos, "atan": math.atan, "sinh": math.sinh,
    "cosh": math.cosh, "tanh": math.tanh, "asinh": math.asinh, "acosh": math.acosh, "atanh": math.atanh, "floor": math.floor,
    "ceil": math.ceil, "fabs": math.fabs, "erf": math.erf, "erfc": math.erfc, "atan2": math.atan2, "hypot": math.hypot, "isinf": math.isinf,
    "isfinite": math.isfinite,
}  # fmt: skip
#: names that `_MATH` cannot give in single precision, or not as IEEE 754 has them
_LIBDEVICE = ("exp2", "cbrt", "rint", "trunc", "fmod", "copysign", "nextafter", "pow", "floor", "ceil", "tgamma", "lgamma", "ldexp")

_NUMPY: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt,
    "cbrt": np.cbrt, "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh,
    "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "floor": np.floor, "ceil": np.ceil,
    "rint": np.rint, "trunc": np.trunc, "fabs": np.fabs, "atan2": np.arctan2, "hypot": np.hypot, "fmod": np.fmod, "copysign": np.copysign,
    "nextafter": np.nextafter, "pow": np.power, "ldexp": np.ldexp, "isinf": np.isinf, "isfinite": np.isfinite,
    "erf": math.erf, "erfc": math.erfc, "mul": np.multiply,
}  # fmt: skip


def function(name: str, precision: str) -> Callable[..., Any]:
    """The function of this name for ``f4`` or ``f8``, to be closed over by a kernel."""
    if SIMULATED:
        return _NUMPY[name]
    if name == "mul":
        found: Callable[..., Any] = libdevice.fmul_rn if precision == "f4" else libdevice.dmul_rn
        return found
    if name in _LIBDEVICE:
        return getattr(libdevice, name + ("f" if precision == "f4" else ""))  # type: ignore[no-any-return]
    python: Any = _MATH[name]
    return python  # type: ignore[no-any-return]


def names() -> tuple[str, ...]:
    """Every name that `function` knows."""
    return tuple(_NUMPY)


#: numpy's letters and sizes -> numba's types, which also convert when called
TYPES: dict[str, Any] = {
    "f2": types.float16, "f4": types.float32, "f8": types.float64, "i1": types.int8, "i2": types.int16, "i4": types.int32, "i8": types.int64,
    "u1": types.uint8, "u2": types.uint16, "u4": types.uint32, "u8": types.uint64,
}  # fmt: skip


def precision_of(dtype: np.dtype[Any]) -> str:
    """In which precision elements of a dtype are computed: ``f4`` or ``f8``."""
    return "f8" if dtype == np.float64 else "f4"
