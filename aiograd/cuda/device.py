"""CudaDevice: a CUDA device as the engine sees it. See `aiograd.running.devices` for the protocol of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, zeros
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.importing import from_dlpack
from aiograd.cuda.operations import creation, dropout, optimizer
from aiograd.errors import DeviceMismatchError
from aiograd.ops.op import Fused
from aiograd.running.types import Array, Shape


class CudaDevice(DeviceCore):
    """A device ``cuda:ordinal``; an `aiograd.running.devices.Device`.

    Args:
        driver: the driver of the device.
    """

    def __repr__(self) -> str:
        return f"<CudaDevice {self.name}: {self.properties.name}>"

    @property
    def launches_ahead(self) -> bool:
        """Operations only queue work, so the rules of rows stay on the loop."""
        return True

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run on the device's thread, in order of submission."""
        return self.thread.submit(function)

    def fused(self, row: str) -> Fused | None:
        """The device's own kernels for a row."""
        return tables.FUSED.get(row)

    def update_parameters(self, kind: str, members: Sequence[tuple[Array, Array, Sequence[Array]]], options: Mapping[str, Any]) -> bool:
        """A step of an optimizer for many parameters in few launches; see `aiograd.running.devices.UpdatesParameters`."""
        return optimizer.update(self, kind, members, options)

    def sum_of_squares(self, arrays: Sequence[Array]) -> Array | None:
        """See `aiograd.running.devices.ScalesGradients`."""
        return optimizer.sum_of_squares(self, arrays)

    def scaled(self, arrays: Sequence[Array], scale: Array) -> Sequence[Array] | None:
        """See `aiograd.running.devices.ScalesGradients`."""
        return optimizer.scaled(self, arrays, scale)

    def dropout_mask(self, seed: tuple[int, int], shape: Shape, p: float, dtype: Any) -> Array:
        """See `aiograd.running.devices.DrawsMasks`."""
        return dropout.dropout_mask(self, seed, shape, p, dtype)

    def filled(self, shape: Shape, value: Any, dtype: Any) -> CudaArray:
        """See `aiograd.running.devices.FillsArrays`."""
        if not any(np.asarray(value, dtype).tobytes()):
            return zeros(self, shape, dtype)
        result = creation.constant(self, shape, value, dtype)
        result.flush()
        return result

    def from_host(self, array: np.ndarray[Any, Any]) -> CudaArray:
        """A device array with the values of `array`, which are copied at once."""
        return CudaArray.from_host(self, array)

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """A copy of the values; waits for them.

        Raises:
            NotReadyError: they are pending and an event loop is running. DeviceError: they could not be computed, or are lost.
            DeviceMismatchError: an array of another device.
        """
        if not isinstance(array, CudaArray) or array.device is not self:
            raise DeviceMismatchError(f"copying an array from {self.name} to the host: it lives elsewhere")
        return array.to_host()

    def from_dlpack(self, source: Any) -> CudaArray:
        """The array of another library in the memory it has on this device; see `aiograd.cuda.importing`."""
        return from_dlpack(self, source)

    def memory_stats(self) -> dict[str, int]:
        """Bytes and counts of the memory pool; see `aiograd.cuda.memory_stats`."""
        return self.driver.memory_stats()

    def synchronize(self) -> None:
        """Block until everything asked for so far is done.

        Raises:
            DeviceLostError: the device failed.
        """
        self.thread.submit(self.finish).result()
