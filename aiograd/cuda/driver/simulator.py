"""The driver of numba's simulator: kernels run in Python, thread by thread, on numpy memory.

Note [The extent of the simulation]
    Everything is done when the call returns, so order, events and streams are trivial; tests of kernels see their results, the memory that they
    touch, and everything above the driver. Memory that was never written is full of bytes 0xFF (NaN, −1, true), memory that was
    freed is filled with them again, and a pointer reaches exactly as far as its array: reading past it raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.cuda.driver import simulated_block
from aiograd.cuda.driver.protocol import Pointer, Properties
from aiograd.errors import DeviceError, DeviceLostError, DeviceMemoryError

TOTAL_MEMORY = 256 * 2**20
_POISON = 0xFF
#: the simulator knows one running kernel in the whole process
_one_at_a_time = threading.Lock()


class _Stream:
    """A stream without outstanding work."""

    __slots__ = ("priority",)

    def __init__(self, priority: int) -> None:
        self.priority = priority


class SimulatorDriver:
    """A `aiograd.cuda.driver.protocol.Driver` with this process as its device.

    Args:
        ordinal: number of the device.
        total_memory: bytes that may be allocated at the same time.
        threads: threads in a block.
    """

    def __init__(self, ordinal: int = 0, *, total_memory: int = TOTAL_MEMORY, threads: int = 8) -> None:
        self.ordinal = ordinal
        self.properties = Properties("simulator", (9, 0), total_memory, 2, 48 * 1024, threads, 2, is_simulated=True)
        #: names of the kernels that ran, the newest last
        self.history: list[str] = []
        #: name of a kernel -> what to raise instead of running it, once
        self.faults: dict[str, Exception] = {}
        self._lost: DeviceLostError | None = None
        self._stats = dict.fromkeys(
            ("allocated", "reserved", "peak_allocated", "peak_reserved", "allocations", "frees", "out_of_memory"), 0
        )  # fmt: skip

    def allocate(self, nbytes: int, stream: Any) -> np.ndarray[Any, Any]:
        self._check()
        stats = self._stats
        free = self.properties.total_memory - stats["allocated"]
        if nbytes > free:
            stats["out_of_memory"] += 1
            raise DeviceMemoryError(
                f"allocating {nbytes} bytes on cuda:{self.ordinal}: {free} bytes of {self.properties.total_memory} are free", asked=nbytes, free=free
            )
        stats["allocations"] += 1
        stats["allocated"] += nbytes
        stats["reserved"] = stats["allocated"]
        stats["peak_allocated"] = stats["peak_reserved"] = max(stats["peak_allocated"], stats["allocated"])
        return np.full(nbytes, _POISON, np.uint8)

    def free(self, memory: np.ndarray[Any, Any], stream: Any) -> None:
        memory.fill(_POISON)
        self._stats["frees"] += 1
        self._stats["allocated"] -= memory.nbytes
        self._stats["reserved"] = self._stats["allocated"]

    def memory_stats(self) -> dict[str, int]:
        return dict(self._stats)

    def trim(self) -> None:
        pass

    def host_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        return np.empty(shape, dtype)

    def upload(self, memory: np.ndarray[Any, Any], offset: int, host: np.ndarray[Any, Any], stream: Any) -> None:
        self._check()
        memory[offset : offset + host.nbytes] = host.reshape(-1).view(np.uint8)

    def download(self, host: np.ndarray[Any, Any], memory: np.ndarray[Any, Any], offset: int, stream: Any) -> None:
        self._check()
        host.reshape(-1).view(np.uint8)[...] = memory[offset : offset + host.nbytes]

    def copy(self, target: Any, target_offset: int, source: Any, source_offset: int, nbytes: int, stream: Any) -> None:
        self._check()
        target[target_offset : target_offset + nbytes] = source[source_offset : source_offset + nbytes].copy()

    def fill_zero(self, memory: np.ndarray[Any, Any], offset: int, nbytes: int, stream: Any) -> None:
        self._check()
        memory[offset : offset + nbytes] = 0

    def launch(
        self, kernel: Callable[..., None], grid: tuple[int, int, int], block: tuple[int, int, int], args: tuple[Any, ...], stream: Any
    ) -> None:
        self._check()
        self.history.append(kernel.__name__)
        fault = self.faults.pop(kernel.__name__, None)
        if fault is not None:
            if isinstance(fault, DeviceLostError):
                self._lost = fault
            raise fault
        run(kernel, grid, block, tuple(_argument(value) for value in args))

    def create_stream(self, priority: int = 0) -> _Stream:
        return _Stream(priority)

    def close_stream(self, stream: Any) -> None:
        pass

    def record(self, stream: Any, *, timing: bool = False) -> object:
        self._check()
        return self

    def wait_for(self, stream: Any, event: Any) -> None:
        self._check()

    def is_done(self, event: Any) -> bool:
        self._check()
        return True

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return 0.0

    def wait(self, event: Any) -> None:
        self._check()

    def notify(self, stream: Any, event: Any, callback: Callable[[], None]) -> None:
        self._check()
        callback()

    def synchronize(self) -> None:
        self._check()

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self._lost is not None:
            raise DeviceLostError(f"cuda:{self.ordinal} is lost since an earlier kernel failed: {self._lost}") from self._lost


def run(kernel: Callable[..., None], grid: tuple[int, int, int], block: tuple[int, int, int], args: tuple[Any, ...]) -> None:
    """Run a kernel on numpy arrays and scalars, to its end.

    Raises:
        DeviceError: it raised, for instance because it reached past an array.
    """
    try:
        with _one_at_a_time:
            simulated_block.run(kernel, grid, block, args)
    except Exception as error:
        raise DeviceError(f"kernel {kernel.__name__} failed: {error}") from error


def _argument(value: Any) -> Any:
    if not isinstance(value, Pointer):
        return value
    memory: np.ndarray[Any, Any] = value.memory
    return memory[value.offset : value.offset + value.extent * value.dtype.itemsize].view(
        np.uint8 if value.dtype == np.bool_ else value.dtype
    )
