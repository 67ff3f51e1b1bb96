"""The arguments of a launch, laid out as the driver reads them: an array of addresses, one for each argument.

The array and the room it points to are made once for each kernel and types; a launch writes its values there and names the array, which
the driver reads before the call returns. Such packing is most of the Python time of a launch, as measurements elsewhere show.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from aiograd.cuda.driver.protocol import Pointer
from aiograd.errors import DeviceError

#: one slot of eight bytes for each argument
_SLOT = 8
_FORMATS = {
    "float64": "d", "float32": "f4x", "float16": "e6x", "bool": "?7x",
    "int64": "q", "int32": "i4x", "int16": "h6x", "int8": "b7x",
    "uint64": "Q", "uint32": "I4x", "uint16": "H6x", "uint8": "B7x",
}  # fmt: skip


class Arguments:
    """Room for the arguments of one kernel with one set of types.

    Args:
        args: the arguments of a first launch: pointers, and scalars as the protocol of drivers has them.

    Raises:
        DeviceError: a kernel cannot be given a value of such a type.
    """

    __slots__ = ("parameters", "_pack", "_values", "_addresses")

    def __init__(self, args: tuple[Any, ...]) -> None:
        layout = struct.Struct("<" + "".join(_format_of(value) for value in args))
        self._values = ctypes.create_string_buffer(max(1, layout.size))
        start = ctypes.addressof(self._values)
        self._addresses = (ctypes.c_void_p * max(1, len(args)))(*[start + _SLOT * i for i in range(len(args))])
        self._pack = layout.pack_into
        #: address of the array of addresses
        self.parameters = ctypes.addressof(self._addresses)

    def fill(self, args: tuple[Any, ...]) -> None:
        """Write the values of a launch."""
        self._pack(self._values, 0, *[value.memory.address + value.offset if value.__class__ is Pointer else value for value in args])

    def read(self) -> bytes:
        """The contents of the slots, for tests and messages."""
        return self._values.raw


def _format_of(value: Any) -> str:
    if isinstance(value, Pointer):
        return "Q"
    if isinstance(value, bool):
        return "?7x"
    if isinstance(value, np.generic):
        found = _FORMATS.get(value.dtype.name)
        if found is None:
            raise DeviceError(f"a kernel was given a scalar of dtype {value.dtype}; it takes {', '.join(_FORMATS)}")
        return found
    if isinstance(value, int):
        return "q"
    if isinstance(value, float):
        return "d"
    raise DeviceError(f"a kernel was given an argument of type {type(value).__name__}; it takes arrays of the device and numbers")
