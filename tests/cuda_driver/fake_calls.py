"""A CUDA driver made of ordinary memory, at the seam of `aiograd.cuda.driver.bindings`: it logs calls, fails on demand and notices leaks.

Work is done when asked for, or, with ``deferred=True``, when a test says `run`: streams then are queues, as on a device.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from aiograd.cuda.driver.bindings import INVALID_CONTEXT, OUT_OF_MEMORY, CallError


class FakeStream:
    """A queue of work."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.work: deque[Callable[[], None]] = deque()

    def __int__(self) -> int:
        return self.address


class FakeEvent:
    """How often it was recorded, and up to which of those the device has come."""

    def __init__(self, timing: bool) -> None:
        self.timing = timing
        self.recorded = self.reached = 0


class FakeCalls:
    """See `aiograd.cuda.driver.bindings.Bindings`.

    Args:
        memory: bytes of the device.
        deferred: work waits for `run`.
    """

    def __init__(self, memory: int = 1 << 30, *, deferred: bool = False) -> None:
        self.memory = memory
        self.deferred = deferred
        self.log: list[tuple[Any, ...]] = []
        #: name of a call -> codes with which its next calls fail
        self.failures: dict[str, list[int]] = {}
        #: once set, every call fails with it
        self.sticky: int | None = None
        self.device_memory: dict[int, Any] = {}
        self.host_memory: dict[int, Any] = {}
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []
        self.launched: list[tuple[str, Any, Any, int, bytes]] = []
        self.contexts = 0
        self.strict_contexts = True
        self._current = threading.local()
        self._next_stream = 100

    # ---- what tests do

    def run(self, stream: Any = None, steps: int | None = None) -> None:
        """Let the device work."""
        for queue in self.streams if stream is None else [stream]:
            for _ in range(len(queue.work) if steps is None else steps):
                queue.work.popleft()()

    def bytes_at(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    @property
    def names(self) -> list[str]:
        return [entry[0] for entry in self.log]

    @property
    def leaks(self) -> dict[str, int]:
        found = {
            "device": len(self.device_memory), "host": len(self.host_memory), "streams": len(self.streams), "events": len(self.events),
            "contexts": self.contexts,
        }  # fmt: skip
        return {name: count for name, count in found.items() if count}

    # ---- what the driver does

    def _call(self, name: str, *args: Any, context: bool = True) -> None:
        self.log.append((name, *args))
        failures = self.failures.get(name)
        if failures:
            raise CallError(name, failures.pop(0), "on purpose")
        if self.sticky is not None:
            raise CallError(name, self.sticky, "on purpose")
        if context and self.strict_contexts and not getattr(self._current, "stack", None):
            raise CallError(name, INVALID_CONTEXT, "no context")

    def _later(self, stream: FakeStream, work: Callable[[], None]) -> None:
        if stream not in self.streams and stream.address > 2:
            raise CallError("stream", 400, "no such stream")
        if self.deferred:
            stream.work.append(work)
        else:
            work()

    def device(self, ordinal: int) -> Any:
        self._call("device", ordinal, context=False)
        return ordinal

    def name(self, device: Any) -> str:
        return "fake"

    def attribute(self, name: str, device: Any) -> int:
        return {
            "MULTIPROCESSOR_COUNT": 10, "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MAX_SHARED_MEMORY_PER_BLOCK": 49152,
        }[name]  # fmt: skip

    def total_memory(self, device: Any) -> int:
        return self.memory

    def retain_context(self, device: Any) -> Any:
        self._call("retain_context", context=False)
        self.contexts += 1
        return "context"

    def release_context(self, device: Any) -> None:
        self._call("release_context", context=False)
        self.contexts -= 1

    def enter_context(self, context: Any) -> None:
        self._call("enter_context", context=False)
        self._current.stack = [context]

    def push_context(self, context: Any) -> None:
        self._call("push_context", context=False)
        self._current.stack = [*getattr(self._current, "stack", []), context]

    def pop_context(self) -> None:
        self._call("pop_context")
        self._current.stack.pop()

    def synchronize(self) -> None:
        self._call("synchronize")
        self.run()

    def memory_info(self) -> tuple[int, int]:
        return self.memory - sum(ctypes.sizeof(m) for m in self.device_memory.values()), self.memory

    def allocate(self, nbytes: int) -> int:
        self._call("allocate", nbytes)
        if nbytes > self.memory_info()[0]:
            raise CallError("cuMemAlloc", OUT_OF_MEMORY, "out of memory")
        memory = ctypes.create_string_buffer(b"\xff" * nbytes, nbytes)
        self.device_memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        self._call("free", address)
        del self.device_memory[address]

    def allocate_host(self, nbytes: int) -> int:
        self._call("allocate_host", nbytes)
        memory = ctypes.create_string_buffer(nbytes)
        self.host_memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free_host(self, address: int) -> None:
        self._call("free_host", address)
        del self.host_memory[address]

    def is_pinned(self, address: int) -> bool:
        return any(start <= address < start + ctypes.sizeof(memory) for start, memory in self.host_memory.items())

    def _check_device(self, address: int, nbytes: int) -> None:
        inside = any(start <= address and address + nbytes <= start + ctypes.sizeof(m) for start, m in self.device_memory.items())
        if not inside:
            raise CallError("copy", 1, "not memory of the device")

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._call("copy_to_device", nbytes, "pinned" if self.is_pinned(source) else "pageable")
        self._check_device(target, nbytes)
        self._later(stream, lambda: ctypes.memmove(target, source, nbytes))

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._call("copy_to_host", nbytes, "pinned" if self.is_pinned(target) else "pageable")
        self._check_device(source, nbytes)
        self._later(stream, lambda: ctypes.memmove(target, source, nbytes))
        if not self.is_pinned(target):
            self.run(stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._call("copy", nbytes)
        self._check_device(target, nbytes)
        self._check_device(source, nbytes)
        self._later(stream, lambda: ctypes.memmove(target, source, nbytes))

    def fill(self, target: int, value: int, nbytes: int, stream: Any) -> None:
        self._call("fill", nbytes)
        self._check_device(target, nbytes)
        self._later(stream, lambda: ctypes.memset(target, value, nbytes))

    def create_stream(self, priority: int) -> Any:
        self._call("create_stream", priority)
        self._next_stream += 1
        self.streams.append(FakeStream(self._next_stream))
        return self.streams[-1]

    def foreign_stream(self, address: int) -> Any:
        return FakeStream(address)

    def destroy_stream(self, stream: Any) -> None:
        self._call("destroy_stream", int(stream))
        self.streams.remove(stream)

    def create_event(self, timing: bool) -> Any:
        self._call("create_event", timing)
        self.events.append(FakeEvent(timing))
        return self.events[-1]

    def destroy_event(self, event: Any) -> None:
        self._call("destroy_event")
        self.events.remove(event)

    def record(self, event: Any, stream: Any) -> None:
        self._call("record", int(stream))
        event.recorded += 1
        count = event.recorded
        self._later(stream, lambda: setattr(event, "reached", count))

    def is_done(self, event: Any) -> bool:
        self._call("is_done")
        return bool(event.reached == event.recorded)

    def wait(self, event: Any) -> None:
        self._call("wait")
        while event.reached != event.recorded:
            for stream in self.streams:
                if stream.work:
                    stream.work.popleft()()

    def wait_for(self, stream: Any, event: Any) -> None:
        self._call("wait_for", int(stream))

    def elapsed_ms(self, start: Any, end: Any) -> float:
        self._call("elapsed_ms")
        return 2.5

    def call_on_host(self, stream: Any, function: int, argument: int) -> None:
        self._call("call_on_host", int(stream))
        self._later(stream, lambda: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument))

    def load(self, cubin: bytes, name: str) -> Any:
        self._call("load", name)
        return name

    def launch(self, function: Any, grid: Any, block: Any, stream: Any, parameters: int) -> None:
        self._call("launch", function)
        self.launched.append((function, grid, block, int(stream), b""))
