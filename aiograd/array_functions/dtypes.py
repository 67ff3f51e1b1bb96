"""Data types and constants of the standard, and questions about them.

The types are ``np.dtype`` objects, as ``Tensor.dtype`` returns them, so they compare, hash and print alike.
"""

from __future__ import annotations

import builtins
import math
from typing import Any, Final, NamedTuple

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.tensors.core import TensorCore
from aiograd.tensors.creation import asarray
from aiograd.tensors.tensor import Tensor

__all__ = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64", "complex128",
    "e", "pi", "inf", "nan", "newaxis", "astype", "can_cast", "finfo", "iinfo", "isdtype", "result_type", "half", "float", "double", "short",
    "int", "long", "cfloat", "cdouble",
]  # fmt: skip

bool: Final = np.dtype(np.bool_)
int8: Final = np.dtype(np.int8)
int16: Final = np.dtype(np.int16)
int32: Final = np.dtype(np.int32)
int64: Final = np.dtype(np.int64)
uint8: Final = np.dtype(np.uint8)
uint16: Final = np.dtype(np.uint16)
uint32: Final = np.dtype(np.uint32)
uint64: Final = np.dtype(np.uint64)
float16: Final = np.dtype(np.float16)
float32: Final = np.dtype(np.float32)
float64: Final = np.dtype(np.float64)
complex64: Final = np.dtype(np.complex64)
complex128: Final = np.dtype(np.complex128)
# PyTorch's names
half: Final = float16
float: Final = float32
double: Final = float64
short: Final = int16
int: Final = int32
long: Final = int64
cfloat: Final = complex64
cdouble: Final = complex128
# constants
e: Final = math.e
pi: Final = math.pi
inf: Final = math.inf
nan: Final = math.nan
newaxis: Final = None

_KINDS = {
    "bool": "b",
    "signed integer": "i",
    "unsigned integer": "u",
    "integral": "iu",
    "real floating": "f",
    "complex floating": "c",
    "numeric": "iufc",
}


def astype(x: Any, dtype: Any, /, *, copy: builtins.bool = True, device: str | None = None) -> Tensor:
    """`x` with another dtype, and on another device where one is given; gradients go back the same way."""
    source = asarray(x)
    return (source if device is None else source.to(device)).astype(dtype, copy=copy)


def can_cast(from_: Any, to: Any, /) -> builtins.bool:
    """True if a dtype, or the dtype of a Tensor, can become another without loss."""
    return np.can_cast(from_.dtype if isinstance(from_, TensorCore) else from_, to)


class FloatLimits(NamedTuple):
    """Limits of a floating dtype, as Python numbers; of a complex dtype, the limits of its parts."""

    bits: builtins.int
    eps: builtins.float
    max: builtins.float
    min: builtins.float
    smallest_normal: builtins.float
    tiny: builtins.float
    resolution: builtins.float
    dtype: np.dtype[Any]


def finfo(type: Any, /) -> FloatLimits:
    """Limits of a floating dtype, or of the dtype of a Tensor."""
    try:
        found = np.finfo(type.dtype if isinstance(type, TensorCore) else type)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"finfo(): {error}; expected a floating or complex dtype. Use iinfo() of integers.") from None
    names = ("eps", "max", "min", "smallest_normal", "tiny", "resolution")
    numbers: Any = {name: builtins.float(getattr(found, name)) for name in names}
    return FloatLimits(bits=found.bits, dtype=found.dtype, **numbers)


def iinfo(type: Any, /) -> np.iinfo[Any]:
    """Limits of an integer dtype, or of the dtype of a Tensor."""
    try:
        return np.iinfo(type.dtype if isinstance(type, TensorCore) else type)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"iinfo(): {error}; expected an integer dtype. Use finfo() of floats.") from None


def isdtype(dtype: Any, kind: Any) -> builtins.bool:
    """True if a dtype is of a kind: a dtype, a name such as "real floating", or a tuple of them."""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, one) for one in kind)
    if isinstance(kind, str):
        if kind not in _KINDS:
            raise ArgumentError(f"isdtype(): kind {kind!r}, expected a dtype or one of {', '.join(map(repr, _KINDS))}")
        return np.dtype(dtype).kind in _KINDS[kind]
    return builtins.bool(np.dtype(dtype) == np.dtype(kind))


def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """The dtype that an operation on these gives."""
    return np.result_type(*(x.dtype if isinstance(x, TensorCore) else x for x in arrays_and_dtypes))
