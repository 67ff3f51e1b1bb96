"""DeviceCore: the lock, the thread and the streams of a device; all that buffers, commands and arrays stand on."""

from __future__ import annotations

import contextvars
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from aiograd.cuda.driver.protocol import DeviceDriver, Properties
from aiograd.cuda.executor import DeviceThread
from aiograd.cuda.stream_state import StreamState
from aiograd.graph import current_node


@dataclass(frozen=True)
class CudaStatistics:
    """Figures of a device since it was first used."""

    #: commands queued for the device
    commands: int
    #: operations that had no kernel and were computed on the host
    host_fallbacks: int
    #: name of such an operation -> number of times it ran
    fallbacks: dict[str, int]
    #: arrays copied from the host, and to it
    uploads: int
    downloads: int


class DeviceCore:
    """A device without its arrays.

    Args:
        driver: the driver of the device.
    """

    def __init__(self, driver: DeviceDriver) -> None:
        self.driver = driver
        self.properties: Properties = driver.properties
        #: ``cuda:ordinal``
        self.name: str = f"cuda:{driver.ordinal}"
        #: held while pending expressions are looked at or changed, and while commands are queued
        self.lock: threading.RLock = threading.RLock()
        self._stream_states: weakref.WeakSet[StreamState] = weakref.WeakSet()
        self.thread: DeviceThread = DeviceThread(f"aiograd-{self.name}", driver, self._stream_states)
        self.default_stream_state: StreamState = StreamState(driver, None, "default")
        self._stream_states.add(self.default_stream_state)
        #: the stream of the caller, where it chose one
        self.stream_state_of_caller: contextvars.ContextVar[StreamState | None] = contextvars.ContextVar(f"aiograd-{self.name}", default=None)
        #: finished data is read on a stream of its own, behind nothing else
        self._reading: StreamState | None = None
        #: kernels with their arguments, see `aiograd.cuda.expression.chain`
        self.plans: dict[Any, Any] = {}
        self.commands = self.uploads = self.downloads = 0
        self._fallbacks: dict[str, int] = {}

    def current_stream_state(self) -> StreamState:
        """The stream for the caller's work: its own, or the one that the running node's forward work went to."""
        chosen = self.stream_state_of_caller.get()
        if chosen is not None:
            return chosen
        node = current_node()
        recorded = None if node is None else getattr(node, "stream", None)
        return recorded if isinstance(recorded, StreamState) and recorded.driver is self.driver else self.default_stream_state

    def new_stream_state(self, name: str, priority: int = 0) -> StreamState:
        """Another stream; made on the device's thread."""
        made = StreamState(self.driver, self.thread.submit(lambda: self.driver.create_stream(priority)).result(), name)
        self._stream_states.add(made)
        return made

    def reading_stream_state(self) -> StreamState:
        """The stream on which finished data is read; on the device's thread only."""
        if self._reading is None:
            self._reading = StreamState(self.driver, self.driver.create_stream(), "reading")
            self._stream_states.add(self._reading)
        return self._reading

    def release(self, memory: Any, home: StreamState | None, used: dict[StreamState, int]) -> None:
        """Give memory back, behind everything that uses it; any thread, finalizers included."""

        def free() -> None:
            if home is not None:
                for user, count in used.items():
                    home.follow(user, count)
            self.driver.free(memory, None if home is None else home.handle)

        self.thread.release(free)

    def finish(self) -> None:
        """Wait for the device; on its thread only."""
        for each in list(self._stream_states):
            each.mark()  # so that everything is known to be done afterwards
        self.driver.synchronize()

    def close(self) -> None:
        """Finish the queued work, end the thread and release everything. Idempotent."""
        self.thread.close()
        self.driver.close()

    def fell_back(self, name: str) -> None:
        """Count an operation that is computed on the host."""
        with self.lock:
            self._fallbacks[name] = self._fallbacks.get(name, 0) + 1

    def statistics(self) -> CudaStatistics:
        """Figures as of now."""
        with self.lock:
            return CudaStatistics(self.commands, sum(self._fallbacks.values()), dict(self._fallbacks), self.uploads, self.downloads)
