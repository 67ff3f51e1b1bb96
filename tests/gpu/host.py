"""The cost of operations in Python, on a device that does nothing: what a GPU waits for. ``python -m tests.gpu.host``, on any machine.

The driver is the one for hardware, on calls that return at once, with kernels that are never compiled. Two figures for each operation: the time
that the calling thread is held up, and the time until the device's thread has handed everything over, both for one operation of many in a row.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

import aiograd as ag
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.driver.cublas import Cublas
from aiograd.cuda.driver.hardware import HardwareDriver
from aiograd.ops.op import ROWS
from aiograd.running.devices import register_device
from tests.gpu.measuring import ROUNDS, table


class Calls:
    """Calls of a driver whose device is done with everything at once; host memory is real, memory of the device is numbers."""

    def __init__(self) -> None:
        self._addresses = itertools.count(1 << 40, 1 << 36)
        self._pinned: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _nothing

    def name(self, device: Any) -> str:
        return "nothing"

    def attribute(self, name: str, device: Any) -> int:
        return {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132}.get(name, 48 << 10)

    def total_memory(self, device: Any) -> int:
        return 80 << 30

    def allocate(self, nbytes: int) -> int:
        return next(self._addresses)

    def allocate_host(self, nbytes: int) -> int:
        block = np.zeros(nbytes, np.uint8)
        self._pinned[block.ctypes.data] = block
        return block.ctypes.data

    def free_host(self, address: int) -> None:
        del self._pinned[address]

    def create_stream(self, priority: int) -> int:
        return next(self._addresses)

    def is_done(self, event: Any) -> bool:
        return True


def _nothing(*args: Any) -> int:
    return 0


class _Library:
    """A cuBLAS that does nothing."""

    def __getattr__(self, name: str) -> Any:
        function = self.__dict__[name] = lambda *args: 0
        return function


def make_device(library: bool = True) -> CudaDevice:
    """A device that does nothing."""
    return CudaDevice(
        HardwareDriver(
            0,
            Calls(),  # type: ignore[arg-type]
            lambda kernel, args, capability: SimpleNamespace(name=kernel.__name__, cubin=b""),
            blas=(lambda driver: Cublas(_Library(), driver)) if library else None,
            wait_in_threads=True,
        )
    )


def measure(device: CudaDevice, call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Seconds of an operation: in the calling thread, and in all."""
    called, finished = [], []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        for _ in range(count):
            result = call()
            if hasattr(result, "flush"):
                result.flush()
            del result
        called.append(time.perf_counter() - started)
        device.synchronize()
        finished.append(time.perf_counter() - started)
    return min(called[1:]) / count, min(finished[1:]) / count


def operations(device: CudaDevice, tiny: bool = False) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Name, what to call, how often."""
    x = device.from_host(np.ones(64, np.float32))
    table_ = device.from_host(np.ones((64, 64), np.float32))
    m = device.from_host(np.ones((512, 512), np.float32))
    image, weight = device.from_host(np.ones((8, 16, 14, 14), np.float32)), device.from_host(np.ones((16, 16, 3, 3), np.float32))
    many = 3 if tiny else 1000
    yield "x + 1, 64 elements", lambda: x + 1, many
    yield "x + x", lambda: x + x, many
    yield "table + x, broadcast", lambda: table_ + x, many
    yield "a chain of ten", lambda: x * 2 + 1 - x * 3 + 4 - x * 5 + 6, many
    yield "m @ m, 512×512", lambda: m @ m, many
    yield "sum along rows", lambda: np.sum(table_, axis=1), many
    yield "softmax", lambda: ROWS["softmax"](table_, axis=-1), many
    yield "conv2d", lambda: ROWS["conv2d"](image, weight, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1), many // 5 + 1
    small = np.ones(64, np.float32)
    yield "to the device, 64 elements", lambda: device.from_host(small), many
    yield "to the host, 64 elements", lambda: device.to_host(x) is None, many
    for name, nbytes in (("4 MB", 4 << 20), ("64 MB", 64 << 20)):
        host = np.ones(4096 if tiny else nbytes, np.uint8)
        array = device.from_host(host)
        yield f"to the device, {name}", lambda host=host: device.from_host(host), many // 100 + 1
        yield f"to the host, {name}", lambda array=array: device.to_host(array) is None, many // 100 + 1


async def passes(count: int) -> float:
    """Seconds of forward and backward of (x · x).sum()."""
    x = ag.tensor(np.ones(64, np.float32), device="cuda:0", requires_grad=True)
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(count):
            await (x * x).sum().backward()
            x.grad = None
        found.append((time.perf_counter() - started) / count)
    return min(found)


async def waits(count: int) -> float:
    """Median of the seconds of an awaited x + 1."""
    x = ag.tensor(np.ones(64, np.float32), device="cuda:0")
    found = []
    for _ in range(count):
        started = time.perf_counter()
        await (x + 1)
        found.append(time.perf_counter() - started)
    return sorted(found)[count // 2]


def run(tiny: bool = False) -> Iterator[str]:
    """The table, line by line."""
    device = make_device()
    register_device(device)

    def rows() -> Iterator[tuple[str, str, str]]:
        for name, call, count in operations(device, tiny):
            called, finished = measure(device, call, count)
            yield name, f"{called * 1e6:.1f}", f"{finished * 1e6:.1f}"
        yield "forward and backward of (x · x).sum()", "", f"{asyncio.run(passes(2 if tiny else 300)) * 1e6:.0f}"
        yield "await of x + 1, median", "", f"{asyncio.run(waits(3 if tiny else 1000)) * 1e6:.0f}"

    return table("Cost in Python, µs", ("operation", "calling thread", "in all"), rows())


if __name__ == "__main__":
    for line in run():
        print(line, flush=True)
