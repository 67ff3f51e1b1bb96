"""The interface of a driver to the thread of a device.

Note [Threads of a driver]
    All methods are called on the thread of the device, one call at a time, except `is_done`, which any thread may call: the event loop polls
    events and does nothing else with a device. Only `synchronize` and `wait` block until the device has finished.

Note [Order]
    Work on one stream is done in the order in which it was asked for. Between streams the caller puts `wait_for`; a driver orders nothing by
    itself. Freed memory may be given to the next caller at once, so it is only freed when no other stream uses it.

Rejected: handing numba's device arrays up (their allocation waits for the device, their finalizers run on any thread); one class for all
drivers with branches (the simulator and the compiler share no needs with the hardware).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Properties:
    """Properties of a device.

    Sizes are in bytes.
    """

    name: str
    #: major and minor compute capability
    capability: tuple[int, int]
    total_memory: int
    #: streaming multiprocessors
    multiprocessors: int
    #: shared memory a block may have without asking for more
    shared_memory: int
    #: the number of threads that kernels should put in a block: a power of two
    threads: int
    #: the largest number of blocks for a kernel with a grid-stride loop
    blocks: int
    #: True if threads run one after the other in Python
    is_simulated: bool


@dataclass(slots=True, eq=False)
class Pointer:
    """An argument of a kernel that points into memory of the device. Made for each launch, so it is not frozen, which takes three times as long."""

    memory: Any
    #: bytes from the start of `memory`
    offset: int
    dtype: np.dtype[Any]
    #: how many elements may be reached behind the pointer
    extent: int


class DeviceDriver(Protocol):
    """One device. `stream`, `event` and `memory` are opaque handles that this driver made; stream None is the device's own first one."""

    ordinal: int
    properties: Properties

    def allocate(self, nbytes: int, stream: Any) -> Any:
        """Memory of at least so many bytes (256-byte aligned, uninitialised), for use on `stream` from now on.

        Raises:
            DeviceMemoryError: there is none, even after what lay in reserve was given back.
        """

    def free(self, memory: Any, stream: Any) -> None:
        """Give memory back in the order of `stream`: earlier work still finds it."""

    def memory_stats(self) -> dict[str, int]:
        """``allocated, reserved, peak_allocated, peak_reserved, allocations, frees, out_of_memory`` in bytes or counts.

        May be called on any thread.
        """

    def trim(self) -> None:
        """Give what lies in reserve back to the device."""

    def host_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An uninitialised C-contiguous host array that `download` and `upload` copy without waiting."""

    def upload(self, memory: Any, offset: int, host: np.ndarray[Any, Any], stream: Any) -> None:
        """Copy a C-contiguous host array into memory. The host array is the driver's to read until the stream has come past this."""

    def download(self, host: np.ndarray[Any, Any], memory: Any, offset: int, stream: Any) -> None:
        """Copy into a C-contiguous host array, which has its values when the stream has come past this."""

    def copy(self, target: Any, target_offset: int, source: Any, source_offset: int, nbytes: int, stream: Any) -> None:
        """Copy within the device."""

    def fill_zero(self, memory: Any, offset: int, nbytes: int, stream: Any) -> None:
        """Set bytes to zero."""

    def launch(
        self, kernel: Callable[..., None], grid: tuple[int, int, int], block: tuple[int, int, int], args: tuple[Any, ...], stream: Any
    ) -> None:
        """Start a kernel, compiling it for the types of its arguments where this is their first time.

        Args:
            kernel: a plain function in numba's language; pointers are indexed flat, ``p[i]``.
            args: `Pointer`, or a scalar: numpy scalars keep their dtype, int is int64, float is float64, bool is a boolean.

        Raises:
            DeviceError: it could not be compiled or started.
        """

    def create_stream(self, priority: int = 0) -> Any:
        """A stream that does not wait for any other."""

    def close_stream(self, stream: Any) -> None:
        """Close a finished stream."""

    def record(self, stream: Any, *, timing: bool = False) -> Any:
        """An event behind everything asked of `stream` so far."""

    def wait_for(self, stream: Any, event: Any) -> None:
        """Make later work on `stream` wait for an event."""

    def is_done(self, event: Any) -> bool:
        """True if the device has come to an event; any thread.

        Raises:
            DeviceLostError: the device failed on the way.
        """

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two events with timing that are done."""

    def wait(self, event: Any) -> None:
        """Block until the device has come to an event, letting other Python threads run.

        Raises:
            DeviceLostError: as `is_done`.
        """

    def notify(self, stream: Any, event: Any, callback: Callable[[], None]) -> None:
        """Call `callback` (quick, from any thread) once the device has come to `event`, recorded on `stream` just before, or has failed."""

    def synchronize(self) -> None:
        """Block until the device has nothing to do.

        Raises:
            DeviceLostError: as `is_done`.
        """

    def close(self) -> None:
        """Give everything back. Idempotent."""
