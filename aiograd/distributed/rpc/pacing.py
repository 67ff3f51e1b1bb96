"""FramePacer: how many bytes are on their way over one connection, and how large its frames are, so that an urgent frame never waits for long.

Note [Slow links]
    Frames go out one after the other, so an urgent one waits for all bytes before it: on a link of 100 kB/s ten seconds for 1 MiB. Where these
    bytes wait is not known: in the socket, in a router, in a proxy. So the sender asks: it puts a `PING` behind its frames, with the time on its
    clock, and the receiver answers with a `PONG`, which says how much longer the ping took than the quickest of late (`FrameAge`). That is how
    long the bytes before it had to wait, however long the pong takes. As many bytes are on their way as pass in the time from ping to pong if
    the ping has to wait for `LONGEST` seconds (the *window*); the others wait in the outbox of the session, where urgent frames overtake
    them. A frame is a quarter of the window, and at most half of the bytes that wait, so that the link never runs dry.

    A connection begins with a window of `FIRST` bytes. While nothing waits for longer than `LONGEST` / 2, the window grows with what has passed, to
    `GROWTH` times the bytes that were on their way together. Bytes that were sent before the last answer came may have arrived long ago, and do not
    count. A ping follows each long frame, half a window where none is unanswered: on a fast link that is one each few megabytes.

    Heartbeats and other control frames go at once, whether the window is full or not: the answer to a ping may have to wait for longer than a peer
    may be silent.

Note [Paced frames]
    Where both directions of a link are busy, pongs wait behind frames, and several arrive at once. If each released bytes, these would leave in
    bursts, the pongs of the other side would wait behind them, and the directions would take turns while half of the link idles. So on a busy link
    frames leave at its rate, and no pong releases them. The rate is told by pings alone: one departs when it has waited, and between the departures
    of two pings as many bytes leave the queue as were sent between them, however long the pongs take. A frame is sent when the bytes before it
    need at most `LONGEST` seconds at this rate, and each pong corrects the count of these bytes. A ping that waits for its own frame alone tells that
    the link has been idle, and the rate is raised, once per round trip. The window is what leaves from ping to pong and in
    `LONGEST` seconds more, and a frame takes a quarter of `LONGEST`.

Note [Drained links]
    On a link that is never idle no ping is quick, and the quickest of late is forgotten after 30 to 60 seconds, since routes change. So where pings
    have to wait, each `DRAIN` seconds nothing is sent until all has arrived and one more ping is answered.

Source: the delay-based congestion control of TCP Vegas (Brakmo and Peterson, 1995), and of LEDBAT (RFC 6817), which measures one way as well; BBR
(Cardwell and others, 2016) drains likewise, and paces. Acknowledgements in bursts: "ACK-compression" (Zhang, Shenker and Clark, 1991).
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Final

#: seconds that bytes wait on the way at most, and more than a frame occupies a link
LONGEST: Final = 0.2
#: bytes of a frame at least, where the peer takes as many
SMALLEST: Final = 4 << 10
#: bytes of the window: the first, the least, the most
FIRST, LEAST, MOST = 16 << 10, 2 * SMALLEST, 64 << 20
#: seconds after which a link is drained
DRAIN: Final = 25.0
#: seconds after which a large frame is followed by a ping in any case
OFTEN: Final = 0.1
#: a window that is too large is divided by this at most where less than half of it was in use: the peer may have been slow, not the link
SHRINK: Final = 8
#: the window over the bytes that have just passed, at most: a frame may be twice as long as what passed before
GROWTH: Final = 8
#: a link is busy until a ping waits for less, seconds
QUIET: Final = LONGEST / 8
#: seconds between the departures of two pings that measure the rate, at least, since pongs tell milliseconds; and the weight of the latest measure
SPAN, WEIGHT = 0.02, 0.3
#: bytes per second that a busy link takes at least: a peer whose answers say less has been held up
SLOWEST: Final = 500.0
#: the rate is multiplied by this where the link has been idle, and the window of a busy link at least by that with each pong
FASTER, FADE = 1.4, 0.97
#: bytes that may be on their way over a drained link: answers to pings of the peer
DRAINED: Final = 1 << 10
#: records that ask how long the way takes, with the sender's clock in ms, and that answer with the time that the ping had to wait, in ms
PING, PONG = b"AGPI", b"AGPO"
PING_FORM: Final = struct.Struct("<4sI")


class FramePacer:
    """Measures one direction of a connection; see Note [Slow links]. Times are seconds on any clock that never goes back.

    Args:
        limit: bytes of the longest frame that the peer takes.
        now: seconds.

    Attributes:
        frame_bytes: bytes of the next frame, at most.
        is_full: True while nothing more is to be sent.
        ping_due: when a large frame is to be followed by a ping, seconds.
        rate: bytes per second that a busy link takes; 0: the link is not busy, and frames are not paced.
    """

    __slots__ = (
        "frame_bytes", "is_full", "ping_due", "rate", "_raised_at", "_measured", "_clear_at",
        "_limit", "_window", "_step", "_sent", "_arrived", "_latest", "_ping_at", "_pings", "_drain_at", "_is_draining",
    )  # fmt: skip

    def __init__(self, limit: int, now: float) -> None:
        self.ping_due = now + OFTEN
        self._limit = limit
        #: bytes that were sent, and of these, as far as is known, that have arrived
        self._sent = self._arrived = 0
        #: bytes of the latest frame
        self._latest = 0
        #: pings that are not answered: bytes sent by then, its time, bytes that may be on their way, bytes that surely are, and bytes of the
        #: frame before it
        self._pings: deque[tuple[int, float, int, int, int]] = deque()
        self.rate = 0.0
        #: when the rate was raised
        self._raised_at = now
        #: the latest ping that counts for the rate: when it departed, and bytes sent by then
        self._measured = now, 0
        #: when the last byte that was sent leaves the queue of a busy link
        self._clear_at = now
        self._drain_at = now + DRAIN
        self._is_draining = False
        self._resize(FIRST, 0.0)

    def sent(self, size: int) -> bool:
        """So many bytes were sent; returns True if a ping is to follow."""
        self._sent = sent = self._sent + size
        self._latest = size
        return sent >= self._ping_at or (size >= self._step and self.frame_bytes < self._limit)

    def next_at(self, size: int, now: float) -> float:
        """A frame of so many bytes was sent over a busy link, or none with 0; returns when the next may follow, seconds."""
        self._clear_at = max(self._clear_at, now) + size / self.rate
        return self._clear_at - LONGEST

    def pinged(self, size: int, now: float) -> None:
        """A ping of `size` bytes is sent."""
        pings, sent = self._pings, self._sent
        flight = sent - self._arrived
        pings.append((sent + size, now, flight, min(flight, sent - pings[0][0] + pings[0][3] if pings else self._latest), self._latest))
        self._sent = sent + size
        self.ping_due = now + OFTEN
        self._look()

    def ponged(self, waited: float, now: float) -> bool | None:
        """A ping was answered.

        Args:
            waited: seconds that it had to wait on its way to the peer, as the peer says.
            now: seconds.

        Returns:
            True if another ping is to be sent now; None if no ping was unanswered.
        """
        if not self._pings:
            return None
        self._arrived, began, flight, surely, last = self._pings.popleft()
        seconds = max(now - began, waited, 1e-6)
        if now >= self._drain_at:
            self._drain_at, self._is_draining = now + DRAIN, waited > LONGEST / 2
        was_draining, self._is_draining = self._is_draining, self._is_draining and flight > DRAINED
        departed, (before, sent) = min(began + waited, now), self._measured
        is_measured = departed - before >= SPAN
        if is_measured:
            self._measured = departed, self._arrived
        part, window = 1 + (LONGEST - waited) / seconds, float(self._window)
        if was_draining and self.rate:
            self._clear_at, self._measured = now, (now, self._arrived)  # the link has been idle, and is as fast as before
        elif waited > (QUIET if self.rate else LONGEST / 2) and (self.rate or 2 * flight >= window):
            if not self.rate:
                self.rate, window = surely / seconds, 0.0  # the other bytes may have left long ago
            elif waited <= QUIET + last / self.rate:
                if began >= self._raised_at:
                    self.rate, self._raised_at = FASTER * self.rate, now
            elif is_measured:
                self.rate += WEIGHT * ((self._arrived - sent) / (departed - before) - self.rate)
            self.rate = max(self.rate, SLOWEST)
            self._clear_at = departed + (self._sent - self._arrived) / self.rate
            window = max(self.rate * (seconds + LONGEST), FADE * window)  # the first of several pongs has taken longest
        elif waited <= LONGEST / 2:
            self.rate = 0.0
            window = max(window, min(surely * part, GROWTH * surely))
        else:
            window = max(flight * part, window / SHRINK)
        self._resize(window, seconds - waited)
        return (self.is_full or self._is_draining) and not self._pings

    def _resize(self, window: float, travel: float) -> None:
        """Set the window; a ping and its answer take `travel` seconds besides what the ping has to wait."""
        self._window = int(min(max(window, LEAST), MOST))
        self._step = int(self.rate * LONGEST / 4 if self.rate else self._window * min(1 / 4, LONGEST / 2 / (travel + LONGEST)))
        self.frame_bytes = min(max(self._step, SMALLEST), self._limit)
        self._look()

    def _look(self) -> None:
        """The window, or the number of bytes on their way, has changed."""
        self.is_full = self._is_draining or self._sent - self._arrived >= self._window
        self._ping_at = self._pings[-1][0] + self._step if self._pings else self._arrived + min(max(self._window // 2, FIRST), self._window)
