"""Buffer: a piece of device memory that is promised when an operation is called and there when the device came to it.

Note [Life of a buffer]
    Made on any thread, by the operation that will fill it; no driver is called. It is *pending* while what fills it is an expression that
    nobody has launched (`aiograd.cuda.expression`), *queued* while its commands wait for the device's thread, and *written* from then on,
    which says that the device was asked, not that it is done. When the last array lets go of it, the memory goes back to the device's thread,
    which frees it behind everything that uses it.

Note [One thread writes]
    ``memory``, ``error``, ``writer``, ``used`` are written by the device's thread alone; others only read them. ``expression`` and
    ``readers`` belong to whoever holds the device's lock.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiograd.cuda.command import Command, Lane
    from aiograd.cuda.device import CudaDevice
    from aiograd.cuda.expression import Expression


class Buffer:
    """`nbytes` of memory of a device, for one array and its views.

    Args:
        device: where it is.
        nbytes: how much.
    """

    __slots__ = ("device", "nbytes", "memory", "error", "expression", "readers", "last", "writer", "home", "used", "keeps", "__weakref__")

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        #: the driver's handle, None until something is written
        self.memory: Any = None
        #: why there are no values
        self.error: BaseException | None = None
        #: what would fill it, if somebody needed it
        self.expression: Expression | None = None
        #: pending expressions that read it, which must be launched before it is written again
        self.readers: list[weakref.ref[Expression]] = []
        #: the last command that writes to it, as of now on the caller's side
        self.last: Command | None = None
        #: the lane and its count when it was last written
        self.writer: tuple[Lane, int] | None = None
        #: where its memory was allocated
        self.home: Lane | None = None
        #: lane -> its count when that lane last used it
        self.used: dict[Lane, int] = {}
        #: whose memory this is, where it is not the device's pool (another library's array)
        self.keeps: Any = None

    def __del__(self) -> None:
        if self.memory is not None and self.keeps is None:
            self.device.release(self.memory, self.home, self.used)

    @property
    def is_ready(self) -> bool:
        """Whether nothing that fills it is outstanding (also where it failed)."""
        if self.expression is not None:
            return False
        return self.last is None or self.last.is_done()
