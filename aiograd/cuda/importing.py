"""Arrays of other libraries as arrays of a device, in the memory they have; see `aiograd.cuda.interop` for the protocols."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.cuda.array import CudaArray
from aiograd.cuda.buffer import Buffer
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.dlpack import Strided
from aiograd.cuda.interop import follow_foreign, open_cuda_array, open_dlpack
from aiograd.errors import ArgumentError, DeviceError


def from_dlpack(device: DeviceCore, source: Any) -> CudaArray:
    """The array of another library (anything with ``__dlpack__``), in its memory; one on the host is copied over.

    Raises:
        DeviceMismatchError: it is on another device. ArgumentError: no array, or one that is read-only.
    """
    found = open_dlpack(device, source)
    return CudaArray.from_host(device, found) if isinstance(found, np.ndarray) else _adopt(device, found, None)


def from_cuda_array(device: DeviceCore, source: Any) -> CudaArray:
    """As `from_dlpack`, for anything with ``__cuda_array_interface__`` on this device.

    Raises:
        ArgumentError: no array, or one that is read-only.
    """
    return _adopt(device, *open_cuda_array(device, source))


def _adopt(device: DeviceCore, found: Strided, stream: int | None) -> CudaArray:
    if found.is_read_only:
        raise ArgumentError("taking over an array that its library calls read-only: aiograd may write to arrays; copy it first")
    before, behind = found.span()
    if 0 in found.shape:
        return CudaArray.make(device, found.shape, found.dtype)
    driver: Any = device.driver
    if not hasattr(driver, "adopt"):
        raise DeviceError(f"taking over an array on {device.name}: the device has no memory that other libraries could share")
    stream_state = device.current_stream_state()
    buffer = Buffer(device, before + behind)
    buffer.memory = driver.adopt(found.address - before, before + behind, found.owner)
    buffer.home = stream_state

    def follow() -> None:
        if stream is not None:
            follow_foreign(driver, stream_state, stream)
        stream_state.count += 1
        buffer.writer = (stream_state, stream_state.count)  # so that other streams wait as well

    device.thread.submit(follow).result()
    return CudaArray(buffer, before, found.shape, found.strides, found.dtype, None)
