"""A driver that compiles what it is asked to launch and runs nothing.

Programs run through it on real shapes compile exactly the kernels, for exactly the types, that a device would be given: whatever numba
cannot type or lower shows on a machine without a device. Values are zeros, so programs must not branch on them.

Source: numba-cuda's ``compile`` needs NVVM, not a driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from aiograd.cuda.driver.protocol import Properties
from aiograd.cuda.driver.signature import key_of, signature_of
from aiograd.errors import DeviceError


class CompileOnlyDriver:
    """A `aiograd.cuda.driver.protocol.Driver` with the sizes of a large device, memory of zeros and no kernels that run.

    Args:
        capability: compute capability to compile for.
    """

    def __init__(self, ordinal: int = 0, *, capability: tuple[int, int] = (9, 0), threads: int = 256) -> None:
        self.ordinal = ordinal
        self.properties = Properties("compiler", capability, 80 * 2**30, 132, 48 * 1024, threads, 132 * 16, is_simulated=False)
        #: (name, types) -> PTX
        self.compiled: dict[tuple[Any, ...], str] = {}
        #: name and seconds of each compilation
        self.timings: list[tuple[str, float]] = []
        self.launches = 0
        self._zeros = np.zeros(0, np.uint8)

    def allocate(self, nbytes: int, stream: Any) -> int:
        return nbytes

    def free(self, memory: int, stream: Any) -> None:
        pass

    def memory_stats(self) -> dict[str, int]:
        return {}

    def trim(self) -> None:
        pass

    def host_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        return np.empty(shape, dtype)

    def upload(self, memory: int, offset: int, host: np.ndarray[Any, Any], stream: Any) -> None:
        pass

    def download(self, host: np.ndarray[Any, Any], memory: int, offset: int, stream: Any) -> None:
        host.fill(0)

    def copy(self, target: int, target_offset: int, source: int, source_offset: int, nbytes: int, stream: Any) -> None:
        pass

    def fill_zero(self, memory: int, offset: int, nbytes: int, stream: Any) -> None:
        pass

    def launch(
        self, kernel: Callable[..., None], grid: tuple[int, int, int], block: tuple[int, int, int], args: tuple[Any, ...], stream: Any
    ) -> None:
        self.launches += 1
        key = (kernel, *key_of(args))
        if key in self.compiled:
            return
        started = time.perf_counter()
        try:
            ptx, _ = cuda.compile_ptx(kernel, signature_of(args), cc=self.properties.capability)
        except Exception as error:
            raise DeviceError(f"kernel {kernel.__name__} does not compile for {signature_of(args)}: {error}") from error
        self.compiled[key] = ptx
        self.timings.append((kernel.__name__, time.perf_counter() - started))

    def create_stream(self, priority: int = 0) -> object:
        return object()

    def close_stream(self, stream: Any) -> None:
        pass

    def record(self, stream: Any, *, timing: bool = False) -> object:
        return self

    def wait_for(self, stream: Any, event: Any) -> None:
        pass

    def is_done(self, event: Any) -> bool:
        return True

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return 0.0

    def wait(self, event: Any) -> None:
        pass

    def notify(self, stream: Any, event: Any, callback: Callable[[], None]) -> None:
        callback()

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass
