"""Objects and functions of CPython and numpy that native functions use, by address; and built-in functions made of addresses.

Note [Layouts]
    Objects begin with a count of references and their type; an array's memory is behind that, as are the items of a tuple. `layout_problem` looks
    that this is so before the first native function is made, and says why there can be none otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: places in the table of functions that numpy exports, the same since numpy 1.7
_NUMPY = {"PyArray_NewFromDescr": 94, "PyArray_SetBaseObject": 282}
_FASTCALL = 0x80


class _MethodDef(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


@functools.cache
def layout_problem() -> str | None:
    """Why native functions cannot be used in this process; None if they can."""
    if sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info[:2] <= (3, 14):
        return f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]} has an unknown layout of objects"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this build of Python has no interpreter lock"
    if struct.calcsize("P") != 8 or sys.byteorder != "little":
        return "addresses are not of 64 bits, lowest byte first"
    array = np.arange(3.0)
    if _word(id(array) + 8) != id(np.ndarray) or _word(id(array) + 16) != array.ctypes.data:
        return f"numpy {np.__version__} has an unknown layout of arrays"
    items = (array, None)
    if _word(id(items) + 24) != id(array) or _word(id(items) + 32) != id(None):
        return "tuples have an unknown layout"
    listed = [array]
    if _word(_word(id(listed) + 24)) != id(array):
        return "lists have an unknown layout"
    if _numpy_table() is None or _word(_numpy_table() + 16) != id(np.ndarray):  # type: ignore[operator]
        return f"numpy {np.__version__} has an unknown table of functions"
    return None


def _word(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


@functools.cache
def _numpy_table() -> int | None:
    capsule = getattr(np._core._multiarray_umath, "_ARRAY_API", None)  # type: ignore[attr-defined]
    take = ctypes.pythonapi.PyCapsule_GetPointer
    take.restype, take.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return None if capsule is None else take(capsule, None)


@functools.cache
def function_address(name: str) -> int:
    """The address of a function of CPython or numpy."""
    if name in _NUMPY:
        return _word((_numpy_table() or 0) + 8 * _NUMPY[name])
    return int(ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0)


def is_told(flags: int) -> bool:
    """True if floating-point errors have happened that a warning or an error is due for.

    Args:
        flags: 1 for an invalid operation, 4 for a division by zero, 8 for an overflow, 16 for an underflow; 256 times that for errors that are told
            under every state of `numpy.geterr`.
    """
    if flags >> 8:
        return True
    ways = np.geterr()
    return any([flags & bit and ways[name] != "ignore" for name, bit in (("invalid", 1), ("divide", 4), ("over", 8), ("under", 16))])  # type: ignore[literal-required]


class Holder:
    """Keeps the objects that a native function uses for as long as the function lives.

    Args:
        *things: the objects.
    """

    __slots__ = ("things",)

    def __init__(self, *things: Any) -> None:
        self.things = things


def builtin_function(name: str, address: int, things: Sequence[Any]) -> Callable[..., Any]:
    """A built-in function that runs machine code.

    Args:
        name: of the function.
        address: of the code; it takes an object, an array of arguments and their number.
        things: that the code uses.
    """
    definition = _MethodDef(name.encode(), address, _FASTCALL, None)
    make = ctypes.pythonapi.PyCMethod_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p)
    function: Callable[..., Any] = make(ctypes.addressof(definition), Holder(definition, *things), None, None)
    return function
