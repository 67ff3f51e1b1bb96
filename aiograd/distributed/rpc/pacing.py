"""FramePacer: how large the frames on one link are, so that none occupies it for longer than `LONGEST` seconds.

Note [Slow links]
    Frames go out one after the other, so an urgent one waits for the frame before it: on a link of 100 kB/s ten seconds for a
    frame of 1 MiB. A link therefore begins with frames of `SMALLEST` bytes. The channel says how many of the bytes that it took have not left. Where
    all has left at once, the next frame is twice as large; where some of it waits, the bytes that left since the last look tell the rate, and a frame
    gets the bytes that leave in `LONGEST` seconds at that rate, at most twice as much as before. The channel takes two frames ahead (`Channel.pace`),
    so that the link never runs dry.
"""

from __future__ import annotations

import math

#: seconds that a frame may occupy a link
LONGEST = 0.25
#: bytes of the first frame of a link, and of a frame at least, where the peer takes as many
SMALLEST = 4 << 10


class FramePacer:
    """Measures one link; see Note [Slow links]. Times are seconds on any clock that never goes back.

    Args:
        limit: bytes of the longest frame that the peer takes.

    Attributes:
        frame_bytes: bytes of the next frame, at most.
    """

    __slots__ = ("frame_bytes", "_limit", "_total", "_began", "_left_before", "_is_idle")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.frame_bytes = min(SMALLEST, limit)
        #: bytes that the channel has taken
        self._total = 0
        #: the last look: when, and bytes that had left by then
        self._began = 0.0
        self._left_before = 0
        #: True if nothing was on its way at the last look
        self._is_idle = True

    def taken(self, size: int) -> None:
        """The channel has taken `size` bytes that are too few to tell anything."""
        self._total += size

    def note(self, size: int, unsent: int, now: float) -> bool:
        """The channel has taken `size` more bytes, or has room again where `size` is 0.

        Args:
            size: bytes of the frame.
            unsent: bytes that it has taken, as far as is known, and that have not left.
            now: seconds.

        Returns:
            True if `frame_bytes` has changed.
        """
        before = self.frame_bytes
        if self._is_idle or 0 < unsent <= size:
            if not self._is_idle:  # what went before has left, and may have been quicker than that
                self._grow(self._total - self._left_before, now - self._began)
            self._began, self._left_before = now, self._total
        self._total += size
        gone = self._total - unsent - self._left_before
        seconds = now - self._began
        self._is_idle = unsent <= 0
        if unsent <= 0:
            self._grow(gone, seconds)
        elif gone >= before or (gone > 0 and seconds >= LONGEST):
            self._set(gone * LONGEST / seconds if seconds else math.inf)
        else:
            return self.frame_bytes != before  # too little to tell anything
        self._began, self._left_before = now, self._total - unsent
        return self.frame_bytes != before

    def _grow(self, gone: int, seconds: float) -> None:
        """So many bytes took no longer than `seconds`."""
        if gone >= self.frame_bytes:
            self._set(max(gone * LONGEST / seconds if seconds else math.inf, self.frame_bytes))

    def _set(self, carried: float) -> None:
        """The link carries so many bytes in `LONGEST` seconds."""
        self.frame_bytes = min(max(int(min(carried, 2 * self.frame_bytes)), SMALLEST), self._limit)
