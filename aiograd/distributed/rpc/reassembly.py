"""Assembly: one message being put together from its fragments, which come one after the other.

Its memory is allocated once, at the size the first fragment announces; whoever makes an Assembly has checked that size against limits and
budget.
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

    __slots__ = ("message", "total", "filled", "_view")

    def __init__(self, total: int) -> None:
        self.total = total
        self.filled = 0
        self.message: bytearray | memoryview = bytearray(total) if total < CLEARED else np.empty(total, np.uint8).data
        self._view = memoryview(self.message)

    def add(self, offset: int, body: memoryview) -> bool:
        """Take the next fragment.

        Args:
            offset: of its first byte; ``offset + len(body) <= total`` was checked.
            body: its bytes.

        Returns:
            Whether the message is complete.

        Raises:
            ProtocolError: it is not the next one.
        """
        if offset != self.filled:
            raise ProtocolError(f"a fragment at {offset} of a message of {self.total} bytes, of which {self.filled} have come", code="order")
        self.filled = end = offset + len(body)
        self._view[offset:end] = body
        return end == self.total
