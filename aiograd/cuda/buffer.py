"""Buffer: a piece of device memory that is promised when an operation is called and there when the device came to it.

Note [Life of a buffer]
    Made on any thread, by the operation that will fill it; no driver is called. It is *pending* while the expression that fills it is not launched
    (`aiograd.cuda.expression`), *queued* while its commands wait for the device's thread, and *written* from then on, which says that the device was
    asked, not that it is done. When the last array lets go of it, the memory goes back to the device's thread, which frees it behind everything that
    uses it.

Note [One thread writes]
    ``memory``, ``error``, ``writer``, ``used`` are written by the device's thread alone; others only read them. ``expression`` and ``readers`` are
    used under the device's lock.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from aiograd.cuda.core import DeviceCore
from aiograd.cuda.stream_state import StreamState


class PendingWork(Protocol):
    """An expression that would fill a buffer."""

    def flush(self) -> None:
        """Launch it, unless that was done."""


class QueuedWork(Protocol):
    """A command that writes to a buffer."""

    def is_done(self) -> bool:
        """True if the device has done it, or failed to."""


class Buffer:
    """`nbytes` of memory of a device, for one array and its views.

    Args:
        device: the device of the memory.
        nbytes: size in bytes.
    """

    __slots__ = ("device", "nbytes", "memory", "error", "expression", "readers", "last", "writer", "home", "used", "keeps", "__weakref__")

    def __init__(self, device: DeviceCore, nbytes: int) -> None:
        self.device: DeviceCore = device
        self.nbytes: int = nbytes
        #: the driver's handle, None until something is written
        self.memory: Any = None
        #: why there are no values
        self.error: BaseException | None = None
        #: the deferred work that fills it when its values are needed
        self.expression: PendingWork | None = None
        #: pending expressions that read it, which must be launched before it is written again
        self.readers: list[weakref.ref[PendingWork]] = []
        #: the last command that writes to it, as of now on the caller's side
        self.last: QueuedWork | None = None
        #: the stream on which it was last written, and its count then
        self.writer: tuple[StreamState, int] | None = None
        #: where its memory was allocated
        self.home: StreamState | None = None
        #: stream -> its count when it last used the buffer
        self.used: dict[StreamState, int] = {}
        #: the owner of the memory, if it is not the device's pool (another library's array)
        self.keeps: Any = None

    def __del__(self) -> None:
        if self.memory is not None and self.keeps is None:
            self.device.release(self.memory, self.home, self.used)

    @property
    def is_ready(self) -> bool:
        """True if nothing that fills it is outstanding (also where it failed)."""
        if self.expression is not None:
            return False
        return self.last is None or self.last.is_done()

    def flush(self) -> None:
        """Launch the pending expression, so that commands that come later find the values."""
        if self.expression is not None:
            self.expression.flush()

    def flush_readers(self) -> None:
        """Launch every pending expression that reads this buffer, which is about to be written; the device's lock is held."""
        if self.readers:
            readers, self.readers = self.readers, []
            for reader in readers:
                expression = reader()
                if expression is not None:
                    expression.flush()
