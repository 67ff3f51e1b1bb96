"""Assembly: one message being put together from fragments that come in any order, more than once, or cut differently than before.

Its memory is allocated once, at the size the first fragment announces; whoever makes an Assembly has checked that size against limits and
budget.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from aiograd.errors import ProtocolError

#: below this, a bytearray (which is cleared first) is cheaper than an array (which is not)
CLEARED = 1 << 16
#: pieces that are not adjacent to each other: a few for any message, more for a large one, so that notes about the pieces never take more
#: than a tenth of the memory of the message
PIECES = 4096
BYTES_PER_PIECE = 1024


class Assembly:
    """A message of which some bytes are there.

    Args:
        total: bytes of the message.

    Attributes:
        message: the bytes; complete once `add` says so.
    """

    __slots__ = ("message", "total", "_view", "_starts", "_ends")

    def __init__(self, total: int) -> None:
        self.total = total
        self.message: bytearray | memoryview = bytearray(total) if total < CLEARED else np.empty(total, np.uint8).data
        self._view = memoryview(self.message)
        # the pieces that are there, ascending, neither overlapping nor adjacent
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, offset: int, body: memoryview) -> bool:
        """Put a fragment in its place.

        Args:
            offset: of its first byte; ``offset + len(body) <= total`` was checked.
            body: its bytes.

        Returns:
            Whether the message is complete.

        Raises:
            ProtocolError: the message arrives in more separate pieces than any sender makes.
        """
        end = offset + len(body)
        self._view[offset:end] = body
        starts, ends = self._starts, self._ends
        if ends and offset == ends[-1]:
            ends[-1] = end
        elif offset < end:
            first = bisect_left(ends, offset)
            last = bisect_right(starts, end)
            if first < last:  # touches or overlaps the pieces from first to last
                starts[first:last] = [min(offset, starts[first])]
                ends[first:last] = [max(end, ends[last - 1])]
            else:
                if len(starts) >= PIECES + self.total // BYTES_PER_PIECE:
                    raise ProtocolError(f"a message of {self.total} bytes came in more than {len(starts)} separate pieces", code="pieces")
                starts.insert(first, offset)
                ends.insert(first, end)
        return (len(ends) == 1 and ends[0] == self.total and not starts[0]) or not self.total
