"""``ag.__array_namespace_info__()``: questions of the Python Array API standard about the namespace."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.array_functions.dtypes import isdtype
from aiograd.errors import DeviceError
from aiograd.running.devices import known_devices
from aiograd.running.modes import get_default_dtype

#: the version of the standard that names and signatures of the namespace follow
__array_api_version__ = "2024.12"

_DTYPES = {
    name: np.dtype(name)
    for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128".split()
}  # fmt: skip


class NamespaceInfo:
    """Answers about the namespace, as the standard asks them."""

    __slots__ = ()

    def capabilities(self) -> dict[str, Any]:
        """Boolean indexing, results with a shape that depends on values, and the highest number of axes."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """The device that arrays are made on."""
        return "cpu"

    def devices(self) -> list[str]:
        """The names of the devices that are known in this process."""
        return known_devices()

    def default_dtypes(self, *, device: str | None = None) -> dict[str, np.dtype[Any]]:
        """The dtypes of numbers without one, by their kind."""
        _check(device)
        real = get_default_dtype()
        return {
            "real floating": real,
            "complex floating": np.result_type(real, np.complex64),
            "integral": np.dtype(np.int64),
            "indexing": np.dtype(np.int64),
        }

    def dtypes(self, *, device: str | None = None, kind: Any = None) -> dict[str, np.dtype[Any]]:
        """The dtypes of the standard by name; of one kind, where it is given."""
        _check(device)
        return {name: dtype for name, dtype in _DTYPES.items() if kind is None or isdtype(dtype, kind)}


def _check(device: str | None) -> None:
    if device is not None and device not in known_devices():
        raise DeviceError(f"device {device!r}: known are {', '.join(known_devices())}")


def __array_namespace_info__() -> NamespaceInfo:
    """An object that answers questions about the namespace."""
    return NamespaceInfo()
