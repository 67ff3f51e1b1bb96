"""Host memory that a device reads and writes by itself, kept for the next copy.

Note [Copies that overlap]
    A copy from ordinary host memory makes the caller wait, often for everything asked of the stream before it. From pinned memory it does
    not, but getting pinned memory waits for the whole device. So blocks are kept, in sizes that double, and used again when the last
    copy that touched them is done. The number of copies in flight is bounded: beyond it the oldest copy is waited for, so that
    the device sets the pace.

Note [Threads that use a block]
    Blocks are taken and pinned on the device's thread. A block that backs an array comes back when the array is collected, on any thread: it
    is only appended to a queue, and looked at when the next one is taken. Another thread may have a block that is there and free (`Staging.spare`),
    so that it copies an array of the host once and not twice; it never waits, neither for a copy nor for the device's thread.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_KIB = 1 << 10
_MIB = 1 << 20
_SMALLEST = 64 * _KIB
#: copies are made in pieces of this size, so that filling one overlaps with sending another
CHUNK = 4 * _MIB
#: arrays above this size are not pinned
LARGEST_ARRAY = 256 * _MIB
#: pinned bytes of one device
_LIMIT = 512 * _MIB


@dataclass(slots=True, eq=False)
class HostBlock:
    """Pinned memory."""

    address: int
    size: int
    #: behind the last copy that touches it
    event: Any = field(default=None, repr=False)


def size_class(nbytes: int) -> int:
    """The size of the block that is given for so many bytes: a power of two."""
    return max(_SMALLEST, 1 << max(0, nbytes - 1).bit_length())


class Staging:
    """The pinned memory of one device.

    Args:
        allocate, free: by address.
        is_done, wait: as of the driver, for the events of blocks.
        limit: bytes that may be pinned at once; a single block may exceed it.
    """

    def __init__(
        self,
        allocate: Callable[[int], int],
        free: Callable[[int], None],
        is_done: Callable[[Any], bool],
        wait: Callable[[Any], None],
        limit: int = _LIMIT,
    ) -> None:
        self._allocate = allocate
        self._free = free
        self._is_done = is_done
        self._wait = wait
        self._limit = limit
        self._idle: dict[int, deque[HostBlock]] = {}
        self._returned: deque[HostBlock] = deque()
        #: blocks that back arrays, by address
        self._lent: dict[int, HostBlock] = {}
        self.pinned = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> HostBlock:
        """A block that nothing uses. Blocks while too much is in flight."""
        with self._lock:
            return self._take(nbytes)

    def _take(self, nbytes: int) -> HostBlock:
        self._collect()
        size = size_class(nbytes)
        idle = self._idle.setdefault(size, deque())
        if idle and self._is_free(idle[0]):
            return idle.popleft()
        if self.pinned + size > self._limit:
            self._make_room(size)
            if idle:
                block = idle.popleft()
                self._settle(block)
                return block
        block = HostBlock(self._allocate(size), size)
        self.pinned += size
        return block

    def give(self, block: HostBlock, event: Any) -> None:
        """Take a block back that is in use until an event."""
        with self._lock:
            block.event = event
            self._idle.setdefault(block.size, deque()).append(block)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An uninitialised C-contiguous array in pinned memory, which comes back here when the array and its views are gone.

        Very large arrays, empty arrays and arrays beyond the limit are in ordinary memory.
        """
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not 0 < nbytes <= LARGEST_ARRAY or dtype.hasobject:
            return np.empty(shape, dtype)
        with self._lock:
            block = self._free_block(nbytes)
            if block is None and self.pinned + size_class(nbytes) > self._limit:
                self._make_room(size_class(nbytes))
                if self.pinned + size_class(nbytes) > self._limit:
                    return np.empty(shape, dtype)  # arrays that are held keep their memory for as long as they like
            return self._lend(block or self._take(nbytes), nbytes).view(dtype).reshape(shape)

    def spare(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        """Bytes as of `array`, from a block that is free now; None if there is none. Any thread.

        Raises:
            DeviceLostError: the device failed.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            block = self._free_block(nbytes)
            return None if block is None else self._lend(block, nbytes)
        finally:
            self._lock.release()

    def _free_block(self, nbytes: int) -> HostBlock | None:
        """A pinned block of the size for so many bytes that nothing uses."""
        self._collect()
        idle = self._idle.get(size_class(nbytes))
        return idle.popleft() if idle and self._is_free(idle[0]) else None

    def _lend(self, block: HostBlock, nbytes: int) -> np.ndarray[Any, Any]:
        memory = (ctypes.c_byte * nbytes).from_address(block.address)
        self._lent[block.address] = block
        weakref.finalize(memory, self._returned.append, block).atexit = False
        return np.frombuffer(memory, np.uint8)  # type: ignore[call-overload,no-any-return]

    def lent(self, address: int) -> HostBlock | None:
        """The block that backs an array which starts at an address."""
        return self._lent.get(address)

    def trim(self) -> None:
        """Unpin the blocks that are not in use."""
        with self._lock:
            self._collect()
            for idle in self._idle.values():
                for _ in range(len(idle)):
                    block = idle.popleft()
                    if self._is_free(block):
                        self._unpin(block)
                    else:
                        idle.append(block)

    def close(self) -> None:
        """Unpin all blocks except the ones that back arrays, which stay until the process ends. The device has no work left."""
        with self._lock:
            self._collect()
            for idle in self._idle.values():
                while idle:
                    self._unpin(idle.popleft())

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            del self._lent[block.address]
            self._idle.setdefault(block.size, deque()).append(block)

    def _make_room(self, size: int) -> None:
        """Unpin idle blocks of other sizes, the largest first, until a block of `size` may be pinned."""
        for other in sorted(self._idle, reverse=True):
            idle = self._idle[other]
            while other != size and idle and self.pinned + size > self._limit:
                block = idle.popleft()
                self._settle(block)
                self._unpin(block)

    def _settle(self, block: HostBlock) -> None:
        if block.event is not None:
            self._wait(block.event)
            block.event = None

    def _is_free(self, block: HostBlock) -> bool:
        if block.event is not None and self._is_done(block.event):
            block.event = None
        return block.event is None

    def _unpin(self, block: HostBlock) -> None:
        self.pinned -= block.size
        self._free(block.address)
