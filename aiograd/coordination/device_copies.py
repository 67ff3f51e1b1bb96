"""Copies of arrays between a device and the host, made on the device's thread, for arrays that are sent.

Note [Arrays that stay]
    An array of a level (`aiograd.running.devices.AdoptsTensors`: of `vmap`, or of forward mode) stands for more than one value: for one of every
    example, or for a value and its tangent. Its value alone would cross without an error and leave the rest behind, which is a gradient dropped in
    silence. So a level's arrays are refused wherever arrays are sent.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np

from aiograd.errors import ArgumentTypeError
from aiograd.running import devices
from aiograd.running.types import Array


class LevelArrayError(ArgumentTypeError):
    """An array of a level would be sent."""


#: advice in place of sending an array of a level
STAYS = "Take the part that another worker computes out of the function that vmap, jvp or a Jacobian is taken of"


def level_of(array: Array) -> str | None:
    """The name of the level that an array belongs to, None for an array of the host or of a device; see Note [Arrays that stay]."""
    name = devices.device_name_of(array)
    return name if devices.adopts(name) else None


async def on_host(array: Array) -> np.ndarray[Any, Any]:
    """The values of a device array, copied on its device's thread.

    Raises:
        LevelArrayError: the array belongs to a level.
    """
    if isinstance(array, (np.ndarray, np.generic)):  # the gradient of a 0-d value may be a scalar of numpy
        return np.asarray(array)
    level = level_of(array)
    if level is not None:
        raise LevelArrayError(
            f"sending a tensor of {level}, shape {list(array.shape)}: it stands for more than one value, and only a plain one can be sent. {STAYS}"
        )
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
