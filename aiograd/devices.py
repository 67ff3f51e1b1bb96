"""The device seam: what a device must offer, and where it is found by name.

A device is a kind of array that speaks numpy's protocols (``__array_ufunc__``, ``__array_function__``) plus an executor. Nothing in the op
tables or the engine knows any particular one.

Note [What a device array must have]
    ``shape``, ``dtype``, arithmetic operators, numpy's protocols, and ``__aiograd_device__``, the name of its device (``"toy:0"``). It may
    define ``__aiograd_op__(op, args, kwargs)`` and ``__aiograd_priority__`` to run a row with a kernel of its own, and
    ``__aiograd_wait__()``, which returns an awaitable that is done when the data is there, with ``__aiograd_is_ready__()`` beside it.
    The rules of nodes whose gradients live on a device run through the device's ``submit``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import numpy as np

from aiograd.errors import ArgumentError, DeviceError
from aiograd.types import Array


@runtime_checkable
class Device(Protocol):
    """What the engine and ``Tensor.to`` need of a device."""

    @property
    def name(self) -> str:
        """``kind:ordinal``."""

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run on the device's own thread, in order of submission."""

    def from_host(self, array: np.ndarray[Any, Any]) -> Array:
        """A device array with the same values; must not keep a reference to `array`'s memory."""

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """The values as a numpy array; waits for them. Called on the device's thread or outside a running loop."""


_devices: dict[str, Device] = {}
_factories: dict[str, Callable[[int], Device]] = {}


def register_device(device: Device) -> None:
    """Make a device known under its name; replaces one of the same name."""
    _devices[device.name] = device


def unregister_device(name: str) -> None:
    """Forget a device."""
    _devices.pop(name, None)


def register_device_kind(kind: str, factory: Callable[[int], Device]) -> None:
    """Make devices ``kind:ordinal`` on first use; the factory raises `DeviceError` where there is none."""
    _factories[kind] = factory


def device(name: str) -> Device | None:
    """The device of this name; None for ``"cpu"``.

    Raises:
        DeviceError: no such device, with the names that exist. ArgumentError: not a device name.
    """
    if name == "cpu":
        return None
    found = _devices.get(name)
    if found is not None:
        return found
    kind, _, ordinal = name.partition(":")
    if not kind or (ordinal and not ordinal.isdecimal()):
        raise ArgumentError(f"device({name!r}): expected 'cpu' or 'kind:ordinal' such as 'cuda:0'")
    factory = _factories.get(kind)
    if factory is None:
        known = ", ".join(sorted({"cpu", *_devices, *_factories}))
        raise DeviceError(f"device({name!r}): no such device; known are {known}. Import the package that provides it first.")
    found = _devices[f"{kind}:{ordinal or 0}"] = factory(int(ordinal or 0))
    return found


def device_name_of(array: Array) -> str:
    """Name of the device an array lives on."""
    return "cpu" if isinstance(array, (np.ndarray, np.generic)) else getattr(array, "__aiograd_device__", "cpu")
