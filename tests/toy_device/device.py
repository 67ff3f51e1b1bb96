"""ToyDevice: a device made of numpy and a thread, slow and broken on demand.

It joins aiograd as any device does (`aiograd.running.devices`), and exists to test code against one: the engine's own seam, and a user's service
that must stay responsive while a device is slow and must survive its failures.

Note [Kernels]
    What a device does is a sequence of kernels: a numpy function or ufunc called on its arrays, a row of the op tables, a write. By default
    it has a kernel for every row, the row's own numpy forward, launched as one; `kernels` puts others in their place, and
    rows named in `composed` have none, so that their forward runs as it would on the host and each numpy function in it is a kernel.

Source: the fault kinds follow what a GPU does: a launch that fails, memory that is full, and an error after which nothing works any more.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from aiograd.errors import ArgumentError, DeviceError
from aiograd.graph.current import current_node
from aiograd.ops.op import Fused
from aiograd.running.devices import register_device, unregister_device
from aiograd.testing.clock import SimulatedLoop
from tests.toy_device.array import ToyArray
from tests.toy_device.queue import Queue, SimulatedQueue, ThreadQueue

#: ``error``: the kernel fails; ``memory``: no memory is left for it; ``dead``: it fails, as does everything after it; ``shape``: its result
#: has the wrong shape
FaultKind = Literal["error", "memory", "dead", "shape"]


class ToyError(DeviceError):
    """A kernel failed because a test wanted it to."""


class ToyMemoryError(ToyError, MemoryError):
    """No memory left on a toy device."""


@dataclass(frozen=True, slots=True)
class ToyStatistics:
    """Counts of a toy device: its work so far, and the arrays that live on it.

    Attributes:
        kernels: kernels run.
        jobs: jobs: launches from elsewhere, and rules of nodes.
        allocations: arrays that own memory.
        bytes: their bytes.
        uploads: arrays copied from the host.
        downloads: arrays copied to the host.
        threads: names of the threads that kernels ran on.
    """

    kernels: int
    jobs: int
    allocations: int
    bytes: int
    uploads: int
    downloads: int
    threads: tuple[str, ...]


class ToyDevice:
    """A device whose arrays are numpy arrays behind a queue. ``with ToyDevice() as device:`` makes it known under its name.

    Args:
        name: ``kind:ordinal``.
        delay: how long each job takes: seconds, or a function of the device's random numbers that gives them.
        seed: of those random numbers.
        fail: kernels that fail, by number (counted from 1) or name; see `fail` and `FaultKind`.
        memory: how many bytes fit on it; None for no limit.
        kernels: row name -> function of numpy arrays to run in place of the row's forward.
        fused: row name -> kernels of its own for forward and backward, on device arrays.
        composed: names of rows it has no kernel for; see Note [Kernels].
        launches_ahead: let the engine run the rules of rows on the loop, where they only queue kernels.
        loop: simulate the device on this loop instead of on a thread of its own.
    """

    def __init__(
        self,
        name: str = "toy:0",
        *,
        delay: float | Callable[[Random], float] = 0.0,
        seed: int = 0,
        fail: Mapping[int | str, FaultKind] | None = None,
        memory: int | None = None,
        kernels: Mapping[str, Callable[..., Any]] | None = None,
        fused: Mapping[str, Fused] | None = None,
        composed: Collection[str] = (),
        launches_ahead: bool = False,
        loop: SimulatedLoop | None = None,
    ) -> None:
        self._name = name
        self._delay = delay
        self._random = Random(seed)
        self._memory = memory
        self._own_kernels = dict(kernels or {})
        self._fused = dict(fused or {})
        self._composed = frozenset(composed)
        self._launches_ahead = launches_ahead
        self._faults: dict[int | str, FaultKind] = {}
        self._lock = threading.RLock()  # arrays are freed wherever the garbage collector runs
        self._kernels = self._uploads = self._downloads = self._allocations = self._bytes = 0
        self._threads: dict[str, None] = {}
        self._dead: BaseException | None = None
        #: names of the latest kernels, in order
        self.history: deque[str] = deque(maxlen=10_000)
        self.queue: Queue
        if loop is None:
            self.queue = ThreadQueue(f"aiograd-{name}", self._next_delay)
        else:
            self.queue = SimulatedQueue(f"aiograd-{name}", self._next_delay, loop)
        for kernel, kind in (fail or {}).items():
            self.fail(kernel, kind)

    def __repr__(self) -> str:
        return f"<ToyDevice {self._name}>"

    def __enter__(self) -> Self:
        register_device(self, computing=(__package__,))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        unregister_device(self._name)
        self.close()

    def close(self) -> None:
        """Let the running kernel end, fail what is queued, end the thread. Idempotent."""
        self.queue.close()

    # ---------------------------------------------------------------- what the engine needs

    @property
    def name(self) -> str:
        """``kind:ordinal``."""
        return self._name

    @property
    def launches_ahead(self) -> bool:
        """True if rules of rows run on the loop."""
        return self._launches_ahead

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run on the device's thread, in order of submission.

        Args:
            function: called without arguments.

        Returns:
            A future of its result; a cancellation stops who waits for it, and not the function.
        """
        return self.queue.submit(function)

    def fused(self, row: str) -> Fused | None:
        """Kernels of its own for forward and backward of a row.

        Args:
            row: name of the row.

        Returns:
            The kernels; None where there are none.
        """
        return self._fused.get(row)

    def from_host(self, array: np.ndarray[Any, Any]) -> ToyArray:
        """A device array with the same values, pending until the device has come to it.

        Args:
            array: the values, which are copied.

        Returns:
            The array.
        """
        values = np.array(array, copy=True)
        result = ToyArray(self, values.shape, values.dtype, values.strides, None)

        def upload() -> None:
            try:
                self._uploads += 1
                result.own(self.compute("from_host", lambda: values))
            except BaseException as error:
                result._error = error

        if self.queue.is_current():
            upload()
        else:
            result._made = self.enqueue(upload)
        return result

    def to_host(self, array: ToyArray) -> np.ndarray[Any, Any]:
        """A copy of the values; waits for them.

        Args:
            array: an array of this device.

        Returns:
            A numpy array.

        Raises:
            NotReadyError: they are pending and an event loop is running. DeviceError: they were never computed, or are lost.
        """
        values = array.read().copy()
        self._downloads += 1
        return values

    # ---------------------------------------------------------------- what tests need

    def hold(self) -> None:
        """Start no further job until `release`."""
        self.queue.hold()

    def release(self, jobs: int | None = None) -> None:
        """Start so many jobs; without a number, go on for good.

        Args:
            jobs: how many; None: all.
        """
        self.queue.release(jobs)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the device within the block.

        Returns:
            A context manager.
        """
        self.hold()
        try:
            yield
        finally:
            self.release()

    def fail(self, kernel: int | str, kind: FaultKind = "error") -> None:
        """Let a kernel that is yet to come fail, once.

        Args:
            kernel: a number, counted from 1 for the next one, or a name such as ``"matmul"``.
            kind: how; see `FaultKind`.

        Raises:
            ArgumentError: no such kernel or kind.
        """
        if kind not in ("error", "memory", "dead", "shape"):
            raise ArgumentError(f"fail(kind={kind!r}): expected 'error', 'memory', 'dead' or 'shape'")
        if isinstance(kernel, int) and kernel < 1:
            raise ArgumentError(f"fail({kernel}): kernels are counted from 1, the next one to run")
        with self._lock:
            self._faults[kernel if isinstance(kernel, str) else self._kernels + kernel] = kind

    @property
    def is_dead(self) -> bool:
        """True if a kernel failed in a way after which nothing works any more."""
        return self._dead is not None

    def statistics(self) -> ToyStatistics:
        """Figures as of now.

        Returns:
            The counts.
        """
        with self._lock:
            return ToyStatistics(
                self._kernels, self.queue.started, self._allocations, self._bytes, self._uploads, self._downloads, tuple(self._threads)
            )

    # ---------------------------------------------------------------- what its arrays need

    def kernel_of(self, op: Any) -> Callable[..., Any] | None:
        """The kernel for a row of the op tables, None where it has none.

        Args:
            op: the row.

        Returns:
            The kernel, or None.
        """
        own = self._own_kernels.get(op.name)
        if own is not None:
            return own
        return None if op.name in self._composed or op.name == "to_device" else op.forward

    def enqueue(self, function: Callable[[], None]) -> Future[Any]:
        """Run in a copy of the caller's context.

        Args:
            function: called without arguments.

        Returns:
            A future of its end; a cancellation stops who waits for it, and not the function.
        """
        context = contextvars.copy_context()
        return self.queue.submit(lambda: context.run(function))

    def compute(self, name: str, function: Callable[[], Any]) -> Any:
        """Run a kernel; on the device's thread only.

        Args:
            name: of the kernel, for `history` and the faults that were asked for.
            function: the kernel, called without arguments.

        Returns:
            Its result.

        Raises:
            ToyError: it was to fail. DeviceError: the device is dead.
            ToyMemoryError: it was to run out of memory.
        """
        with self._lock:
            self._kernels += 1
            number = self._kernels
            self.history.append(name)
            self._threads[threading.current_thread().name] = None
            kind = self._faults.pop(number, None) or self._faults.pop(name, None)
        node = current_node()
        kernel = f"kernel {name} on {self._name} (number {number}{'' if node is None else f', for {node.name}'})"
        self.check_alive(kernel)
        if kind == "memory":
            raise ToyMemoryError(f"{kernel}: out of memory, as asked for")
        if kind in ("error", "dead"):
            error = ToyError(f"{kernel} failed, as asked for")
            if kind == "dead":
                self._dead = error
            raise error
        result = function()
        return np.stack([result, result], axis=-1) if kind == "shape" else result

    def check_alive(self, what: str) -> None:
        """Raise if the device is dead.

        Args:
            what: the operation, for the message.

        Raises:
            DeviceError
        """
        if self._dead is not None:
            raise DeviceError(f"{what}: {self._name} is dead since an earlier kernel failed: {self._dead}") from self._dead

    def allocated(self, size: int) -> None:
        """Count memory that an array owns.

        Args:
            size: bytes.

        Raises:
            ToyMemoryError: it does not fit.
        """
        with self._lock:
            if self._memory is not None and self._bytes + size > self._memory:
                raise ToyMemoryError(f"{self._name}: out of memory: asked for {size} bytes, {self._memory - self._bytes} of {self._memory} are free")
            self._allocations += 1
            self._bytes += size

    def freed(self, size: int) -> None:
        """Count memory that an array no longer owns.

        Args:
            size: bytes.
        """
        with self._lock:
            self._allocations -= 1
            self._bytes -= size

    def _next_delay(self) -> float:
        return self._delay(self._random) if callable(self._delay) else self._delay
