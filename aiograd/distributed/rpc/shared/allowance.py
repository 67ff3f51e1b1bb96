"""SharedMemory: how much shared memory one worker sets up for its peers of the same machine."""

from __future__ import annotations

from aiograd.distributed.rpc.limits import Limits


class SharedMemory:
    """The shared memory of one worker.

    Args:
        limits: `shared_bytes` bounds the rings through which peers send to it; a ring is handed over within `handshake_timeout`, and a peer that
            copies nothing out of one for `unread_seconds` is dropped.

    Attributes:
        limits: see above.
        held: bytes of the rings that there are.
    """

    __slots__ = ("limits", "held")

    def __init__(self, limits: Limits) -> None:
        self.limits: Limits = limits
        self.held: int = 0

    def reserve(self, size: int) -> bool:
        """Take `size` bytes; False, and nothing taken, where too few are left."""
        if self.held + size > self.limits.shared_bytes:
            return False
        self.held += size
        return True

    def release(self, size: int) -> None:
        """Give `size` bytes back."""
        self.held -= size
