"""Memory of a device: blocks from the pool, segments for the pool from the device, and what to do when there are none left.

Note [Out of memory]
    Before an allocation fails, the device is waited for once. After that what any stream freed may serve every stream, segments of which
    nothing is in use go back to the device, and it is asked again, for no more than is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from aiograd.cuda.driver.bindings import OUT_OF_MEMORY, Bindings, CallError
from aiograd.cuda.driver.handles import EventHandle, Foreign
from aiograd.cuda.driver.pool import Block, MemoryPool, segment_sizes
from aiograd.errors import DeviceError, DeviceMemoryError


class DeviceMemory:
    """The memory of one device, on its thread.

    Args:
        name: of the device, for messages.
        calls: the CUDA driver.
        failure: makes an error for users, from a failed call and the attempted operation.
        wait_for_everything: blocks until the device has nothing to do.
        is_done: returns True if an event has completed.
    """

    def __init__(
        self,
        name: str,
        calls: Bindings,
        failure: Callable[[str, CallError], DeviceError],
        wait_for_everything: Callable[[], None],
        is_done: Callable[[EventHandle], bool],
    ) -> None:
        self._name = name
        self._calls = calls
        self._failure = failure
        self._wait_for_everything = wait_for_everything
        self._is_done = is_done
        self._pool = MemoryPool()
        #: memory of others that was freed here while a stream may still use it
        self._leaving: deque[tuple[EventHandle, Any]] = deque()

    def allocate(self, nbytes: int, key: int) -> Block:
        """A block for a stream.

        Raises:
            DeviceMemoryError: there is none. DeviceError: the device failed.
        """
        block = self._pool.take(nbytes, key) or self._from_segment(nbytes, key)
        if block is not None:
            return block
        self._wait_for_everything()
        self.give_back(key)
        block = self._pool.take(nbytes, key) or self._from_segment(nbytes, key)
        if block is not None:
            return block
        self._pool.out_of_memory += 1
        free, total = self._calls.memory_info()
        raise DeviceMemoryError(
            f"allocating {nbytes} bytes on {self._name}: {free} of {total} bytes are free, {self._pool.allocated} are in use by aiograd, "
            f"nothing is left in reserve. Use smaller batches, `checkpoint`, or free tensors.",
            asked=nbytes,
            free=free,
        )

    def free(self, block: Block, key: int) -> None:
        """Take a block back in the order of a stream."""
        self._pool.give(block, key)

    def let_go(self, memory: Foreign, event: EventHandle) -> None:
        """Keep the owner of another library's memory until an event."""
        self._leaving.append((event, memory.owner))
        memory.owner = None
        self.reap()

    def reap(self) -> None:
        """Drop the owners with completed events."""
        while self._leaving and self._is_done(self._leaving[0][0]):
            self._leaving.popleft()

    def stats(self) -> dict[str, int]:
        """Bytes and counts; any thread."""
        return self._pool.stats()

    def stream_closed(self, key: int, successor: int) -> None:
        """Let the free blocks of a finished stream serve another."""
        self._pool.settle(successor, key)

    def give_back(self, key: int) -> None:
        """Give unused segments back to the device, which has no work left; the remaining blocks serve `key`."""
        self._pool.settle(key)
        for address in self._pool.release_idle():
            try:
                self._calls.free(address)
            except CallError as error:
                raise self._failure("giving memory back", error) from error

    def close(self) -> None:
        """Give everything back, in use or not; the device has been waited for."""
        for address in list(self._pool.segments):
            self._calls.free(address)
        self._pool.segments.clear()

    def _from_segment(self, nbytes: int, key: int) -> Block | None:
        self.reap()
        for size in segment_sizes(nbytes):
            try:
                address = self._calls.allocate(size)
            except CallError as error:
                if error.code != OUT_OF_MEMORY:
                    raise self._failure(f"allocating {nbytes} bytes", error) from error
                continue
            self._pool.add(address, size, nbytes, key)
            return self._pool.take(nbytes, key)
        return None
