"""FrameAge: how long a frame has been on its way, measured without a common clock.

Note [Deadlines]
    A request says how long its caller waits, counted from the moment in which the frame was made. The time on its way counts too: a request that
    the network holds up must not run on when its caller has gone. Each frame therefore says when it was made, on a clock of its sender that
    began with the channel. The time of its arrival, less that, is the moment at which the sender's clock began, plus the time on the way. Of frames
    of late the quickest tells that moment best, and what another took longer is its age. So a deadline here is never before the caller's, and
    after it by no more than the quickest frame took: half of a round trip. Only frames of late count, since clocks drift.
"""

from __future__ import annotations

import math

#: seconds for which the quickest frame counts, at least; at most twice as many
WINDOW = 30.0
_TURN = 1 << 32


class FrameAge:
    """Measures one direction of a channel; see Note [Deadlines].

    Args:
        zero: time at which something came that the peer sent when its clock began, seconds; infinite where nothing has.
        now: seconds.
    """

    __slots__ = ("_latest", "_recent", "_before", "_until")

    def __init__(self, zero: float, now: float) -> None:
        #: the sender's clock in the last frame, milliseconds, of which a frame says the rest by 2 ** 32
        self._latest = 0
        #: the earliest moments at which the sender's clock may have begun, by frames of this window and of the one before
        self._recent = zero
        self._before = math.inf
        self._until = now + WINDOW

    def of(self, sent_ms: int, now: float) -> float:
        """Seconds that a frame was on its way longer than the quickest of late.

        Args:
            sent_ms: as the frame says.
            now: when it came.
        """
        if not sent_ms:  # it does not say
            return 0.0
        ahead = (sent_ms - self._latest) % _TURN
        self._latest += ahead if ahead < _TURN // 2 else ahead - _TURN
        zero = now - self._latest / 1000
        if now >= self._until:
            self._before, self._recent, self._until = self._recent, zero, now + WINDOW
        elif zero < self._recent:
            self._recent = zero
        return zero - min(self._recent, self._before)


def clock(now: float, epoch: float) -> int:
    """The time since `epoch` as a frame says it: whole milliseconds, the rest by 2 ** 32, and never 0."""
    return int((now - epoch) * 1000) % _TURN or 1
