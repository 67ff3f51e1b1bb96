"""DLPack capsules, made and opened through ctypes: how array libraries hand each other memory without copying it.

Nothing here knows a device: addresses, shapes and owners in, capsules out, and back.

Note [Freeing]
    A capsule holds a structure in C that names the memory and a function to call when it is not needed any more. The library that takes the structure
    out renames the capsule, and calls that function in the end, on any thread; a capsule that was never opened calls it when it is collected.
    `_exported` keeps the structure and the owner of the memory until then, since only C refers to them.

Source: dlpack.h of DLPack 1.1, and its Python specification.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, DeviceError
from aiograd.running.types import Shape

CPU = 1
CUDA = 2
CUDA_HOST = 3
CUDA_MANAGED = 13
VERSION = (1, 0)

_READ_ONLY = 1
_COPIED = 2
#: code of a kind of number -> numpy's
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_BFLOAT = 4


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class _Versioned(ctypes.Structure):
    _fields_ = (("version", _Version), ("context", ctypes.c_void_p), ("deleter", _Deleter), ("flags", ctypes.c_uint64), ("tensor", _Tensor))


_PLAIN, _PLAIN_USED = b"dltensor", b"used_dltensor"
_WITH_VERSION, _WITH_VERSION_USED = b"dltensor_versioned", b"used_dltensor_versioned"


@dataclass(frozen=True, slots=True)
class Strided:
    """An array as its capsule describes it."""

    address: int
    shape: Shape
    #: bytes between neighbours along each axis
    strides: Shape
    dtype: np.dtype[Any]
    #: kind of device and its number
    device: tuple[int, int]
    #: keeps the memory
    owner: Any
    is_read_only: bool = False

    def span(self) -> tuple[int, int]:
        """Bytes from the lowest address of an element to `address`, and from there to behind the highest."""
        steps = [(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)]
        return -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + self.dtype.itemsize


#: address of a structure that is out -> what must live as long: the structure, its shape and strides, the owner of the memory, what to call
_exported: dict[int, tuple[Any, Any, Any, Callable[[], None] | None]] = {}

_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))


@_Deleter
def _release(address: int) -> None:
    entry = _exported.pop(address, None)
    if entry is not None and entry[3] is not None:
        entry[3]()


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _capsule_collected(capsule: int) -> None:
    for name in (_PLAIN, _WITH_VERSION):
        if _is_valid(capsule, name):  # it was never opened
            _release(_pointer_of(capsule, name))


_RELEASE_CAPSULE = ctypes.cast(_capsule_collected, ctypes.c_void_p).value


def make_capsule(array: Strided, *, max_version: tuple[int, int] | None, is_copy: bool = False, released: Callable[[], None] | None = None) -> Any:
    """A capsule of an array.

    Args:
        array: its owner is kept until the capsule's structure is done with.
        max_version: newest version of DLPack the other side can read; None: from before there were versions.
        is_copy: True if the array is a copy of its own, which the other side may write to.
        released: called, on any thread, when the other side does not need the memory any more.

    Raises:
        ArgumentError: the dtype has no name in DLPack, or memory that is read-only would go to a side that cannot be told so.
    """
    itemsize = array.dtype.itemsize
    if any(stride % itemsize for stride in array.strides):
        raise ArgumentError(f"handing out an array of {array.dtype} with strides {array.strides} bytes: DLPack counts in elements; copy it first")
    # Kept as arrays of at least one element: some readers take a null pointer for an error.
    shape = (ctypes.c_int64 * max(1, len(array.shape)))(*array.shape)
    strides = (ctypes.c_int64 * max(1, len(array.shape)))(*[stride // itemsize for stride in array.strides])
    tensor = _Tensor(
        array.address, _Device(*array.device), len(array.shape), _data_type(array.dtype),
        ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)), ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)), 0,
    )  # fmt: skip
    managed: _Versioned | _Managed
    if max_version is not None and max_version >= VERSION:
        flags = (_READ_ONLY if array.is_read_only else 0) | (_COPIED if is_copy else 0)
        managed, name = _Versioned(_Version(*VERSION), None, _release, flags, tensor), _WITH_VERSION
    elif array.is_read_only:
        raise ArgumentError("handing out an array that is read-only to a library that knows DLPack before version 1, which cannot say so: copy it")
    else:
        managed, name = _Managed(tensor, None, _release), _PLAIN
    address = ctypes.addressof(managed)
    _exported[address] = (managed, (shape, strides), array.owner, released)
    return _new(address, name, _RELEASE_CAPSULE)


class _Taken:
    """Memory that came out of a capsule; gives it back when collected."""

    __slots__ = ("_address", "_deleter")

    def __init__(self, address: int, deleter: Any) -> None:
        self._address = address
        self._deleter = deleter

    def __del__(self) -> None:
        if self._deleter:
            self._deleter(self._address)


def open_capsule(capsule: Any) -> Strided:
    """Take the array out of a capsule, which cannot be opened again.

    Raises:
        ArgumentError: not a capsule of DLPack, or one that was opened already. DeviceError: a dtype or layout that numpy has no name for.
    """
    if type(capsule).__name__ != "PyCapsule":
        raise ArgumentError(f"taking over an array: expected a DLPack capsule, got {type(capsule).__name__}")
    is_versioned = bool(_is_valid(id(capsule), _WITH_VERSION))
    if not is_versioned and not _is_valid(id(capsule), _PLAIN):
        raise ArgumentError("taking over an array: the DLPack capsule has been opened already, or is none")
    address = _pointer_of(id(capsule), _WITH_VERSION if is_versioned else _PLAIN)
    managed: Any = (_Versioned if is_versioned else _Managed).from_address(address)
    if is_versioned and managed.version.major > VERSION[0]:
        raise DeviceError(f"taking over an array: its DLPack version is {managed.version.major}.{managed.version.minor}; here it is version 1")
    tensor = managed.tensor
    dtype = _numpy_dtype(tensor.dtype)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
    else:
        strides = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) * dtype.itemsize for i in range(tensor.ndim))
    deleter = ctypes.cast(managed.deleter, ctypes.c_void_p).value
    _rename(capsule, _WITH_VERSION_USED if is_versioned else _PLAIN_USED)
    return Strided(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        dtype,
        (tensor.device.type, tensor.device.id),
        _Taken(address, _Deleter(deleter) if deleter else None),
        is_read_only=is_versioned and bool(managed.flags & _READ_ONLY),
    )


def _data_type(dtype: np.dtype[Any]) -> _DataType:
    for code, kind in _KINDS.items():
        if dtype.kind == kind:
            return _DataType(code, 8 * dtype.itemsize, 1)
    if dtype.name == "bfloat16":
        return _DataType(_BFLOAT, 16, 1)
    raise ArgumentError(f"handing out an array of dtype {dtype}: DLPack has numbers and booleans only")


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    kind = _KINDS.get(dtype.code)
    if dtype.lanes == 1 and kind is not None and dtype.bits % 8 == 0:
        try:
            return np.dtype("?" if kind == "b" and dtype.bits == 8 else f"{kind}{dtype.bits // 8}")
        except TypeError:
            pass
    raise DeviceError(f"taking over an array: numpy has no elements of kind {dtype.code} with {dtype.bits} bits and {dtype.lanes} lanes")
