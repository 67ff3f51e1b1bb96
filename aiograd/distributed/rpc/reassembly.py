"""Assembly: one message being put together from its fragments, which come one after the other.

Its memory is allocated once, at the size the first fragment announces; the maker of an Assembly has checked that size against limits and budget.

Note [Bodies in place]
    The body of a large frame is decrypted where it belongs, which saves a copy. Its header says where that is, and neither is
    authenticated before all of the frame is decrypted. So only memory is given out that holds no part of the message yet; nothing
    else changes until `add` is called with that memory, and a frame that turns out to be forged closes the channel, which drops the Assembly.
"""

from __future__ import annotations

import numpy as np

from aiograd.errors import ProtocolError

#: below this, a bytearray (which is cleared first) is cheaper than an array (which is not)
CLEARED = 1 << 16


class Assembly:
    """A message of which the first bytes are there.

    Args:
        total: bytes of the message.

    Attributes:
        message: the bytes; complete once `add` says so.
        filled: how many of them are there.
    """

    __slots__ = ("message", "total", "filled", "_view", "_placed")

    def __init__(self, total: int) -> None:
        self.total: int = total
        self.filled: int = 0
        self.message: bytearray | memoryview = bytearray(total) if total < CLEARED else np.empty(total, np.uint8).data
        self._view = memoryview(self.message)
        #: the memory that `place` gave out last
        self._placed: memoryview | None = None

    def place(self, offset: int, length: int) -> memoryview | None:
        """Memory for the body of the next fragment; None if this is not the next one. See Note [Bodies in place]."""
        end = offset + length
        self._placed = self._view[offset:end] if offset == self.filled and length and end <= self.total else None
        return self._placed

    def add(self, offset: int, body: memoryview) -> bool:
        """Take the next fragment.

        Args:
            offset: of its first byte; ``offset + len(body) <= total`` was checked.
            body: its bytes; memory that `place` gave out last holds them already.

        Returns:
            Whether the message is complete.

        Raises:
            ProtocolError: it is not the next one.
        """
        if offset != self.filled:
            raise ProtocolError(f"a fragment at {offset} of a message of {self.total} bytes, of which {self.filled} have come", code="order")
        self.filled = end = offset + len(body)
        if body is not self._placed:
            self._view[offset:end] = body
        self._placed = None
        return end == self.total
