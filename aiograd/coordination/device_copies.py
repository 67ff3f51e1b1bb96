"""Copies of arrays between a device and the host, made on the device's thread."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np

from aiograd.running import devices
from aiograd.running.types import Array


async def on_host(array: Array) -> np.ndarray[Any, Any]:
    """The values of a device array, copied on its device's thread."""
    if isinstance(array, (np.ndarray, np.generic)):  # the gradient of a 0-d value may be a scalar of numpy
        return np.asarray(array)
    await array.__aiograd_wait__()
    device = devices.device(devices.device_name_of(array))
    if device is None:
        return np.asarray(array)
    copied: np.ndarray[Any, Any] = await asyncio.wrap_future(device.submit(functools.partial(device.to_host, array)))
    return copied


async def on_device(array: np.ndarray[Any, Any], name: str) -> Array:
    """A copy of a host array on a device."""
    device = devices.device(name)
    if device is None:
        return array
    return await asyncio.wrap_future(device.submit(functools.partial(device.from_host, array)))
