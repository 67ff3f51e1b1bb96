"""The types of a kernel's arguments, as numba names them: one place, so that every machine compiles for the types that a device is given.

Booleans in memory are bytes (numba cannot read a boolean through a pointer): kernels see uint8, 0 or 1, and write the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cuda import types
from numba.cuda.np.numpy_support import from_dtype

from aiograd.cuda.driver.protocol import Pointer


def key_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key that distinguishes the types of arguments; cheap to make and to hash."""
    return tuple([value.dtype if value.__class__ is Pointer else value.__class__ for value in args])


def signature_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """numba's types of `Pointer` and scalar arguments: ints are int64, floats float64, numpy scalars keep their types."""
    return tuple(_type_of(value) for value in args)


def _type_of(value: Any) -> Any:
    if isinstance(value, Pointer):
        return types.CPointer(types.uint8 if value.dtype == np.bool_ else from_dtype(value.dtype))
    if isinstance(value, (bool, np.bool_)):
        return types.boolean
    if isinstance(value, np.generic):
        return from_dtype(value.dtype)
    return types.int64 if isinstance(value, int) else types.float64
