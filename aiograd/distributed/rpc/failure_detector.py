"""FailureDetector: when a peer from which nothing comes counts as lost. Pure.

Note [When a peer is silent]
    A peer that works sends something each sixth of the silence (`Limits.silence`), one that is idle each heartbeat. So the time that is waited is
    estimated from the gaps between arrivals, as TCP estimates its timeout from round trips: their mean, with a weight of 1/8, four times their
    mean deviation, with a weight of 1/4, and one heartbeat. It is never less than half of the silence, and never more than all of it.

    A loop may be held up: by a computation, a slow import, a debugger. Half of the silence would be too little for that; so it holds for peers that
    have shown that they can tell, see Note [Pulses] in `pulse`. All others have the whole silence, which is what a session assumes to begin with
    (`is_patient`). Of a peer that tells, the next frame is waited for until its loop has been held up for `Limits.held`.

Source: Van Jacobson, "Congestion avoidance and control" (1988), and RFC 6298, from which the weights are. Phi accrual detectors (Hayashibara and
others, 2004) need a distribution and a threshold instead.
"""

from __future__ import annotations

import math
from typing import Any

from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ArgumentTypeError

#: weights of the latest gap in the mean, and of its difference from the mean in the deviation; and how many deviations are waited for
MEAN_WEIGHT, DEVIATION_WEIGHT, DEVIATIONS = 1 / 8, 1 / 4, 4


class FailureDetector:
    """Waits for one peer; see Note [When a peer is silent]. Times are seconds on any clock that never goes back.

    Args:
        limits: `heartbeat`, `missed_heartbeats` and `held`.
        now: when the waiting begins.

    Raises:
        ArgumentTypeError: `limits` or a time is something else.

    Attributes:
        last: when the peer was last heard.
        mean_gap, gap_deviation: mean and mean deviation of the gaps between arrivals, seconds.
        is_patient: True if the whole silence is waited for, however regular the arrivals are.
        held_at: when the peer last said that its loop is held up; None where nothing has come since that would not come from such a loop.
        held_seconds, held_line: for how long the loop had been held up by then, and the line of the user's code that it stands at.

    >>> detector = dist.FailureDetector(dist.Limits(heartbeat=0.5, missed_heartbeats=3), 0.0)
    >>> detector.deadline
    1.5
    >>> for number in range(1, 101):
    ...     detector.heard(0.25 * number)
    >>> 25.75 < detector.deadline < 25.76
    True
    >>> detector.held(25.4, 0.4, "app/train.py:12")
    >>> detector.deadline
    55.0
    """

    __slots__ = (
        "last", "mean_gap", "gap_deviation", "is_patient", "held_at", "held_seconds", "held_line", "_heartbeat", "_silence", "_held", "_held_since",
    )  # fmt: skip

    def __init__(self, limits: Limits, now: float) -> None:
        if not isinstance(limits, Limits):
            raise ArgumentTypeError(f"FailureDetector: expected dist.Limits, found {type(limits).__name__}")
        self._heartbeat = limits.heartbeat
        self._silence = limits.silence
        self._held = limits.held
        self._held_since = math.inf
        self.is_patient: bool = False
        self.held_at: float | None = None
        self.held_seconds: float = 0.0
        self.held_line: str = ""
        self.begin(now)

    def begin(self, now: float) -> None:
        """Count from `now`, and know nothing of gaps: there is a new way to the peer.

        Args:
            now: seconds.
        """
        self.last: float = _checked("begin", now)
        self._let_go()
        self.forget()

    def forget(self) -> None:
        """Forget the gaps: the way to the peer is gone, and the whole silence is left to find another."""
        self.mean_gap: float = self._silence
        self.gap_deviation: float = 0.0

    def heard(self, now: float) -> None:
        """Something came from the peer. A time before the last one counts for nothing.

        Args:
            now: when it came, seconds.

        Raises:
            ArgumentTypeError: it is no number.
        """
        try:
            gap = now - self.last
            is_later = 0 <= gap < math.inf
        except TypeError:
            is_later = False
        if not is_later:
            _checked("heard", now)
            return
        self.last = now
        off = gap - self.mean_gap
        self.mean_gap += MEAN_WEIGHT * off
        self.gap_deviation += DEVIATION_WEIGHT * ((off if off > 0 else -off) - self.gap_deviation)
        if self.held_at is not None and now > self.held_at:
            self._let_go()

    def held(self, now: float, seconds: float, line: str) -> None:
        """The peer says that its loop is held up. A time before the last one counts for nothing.

        Args:
            now: when it says so, seconds.
            seconds: since when.
            line: the line of code that the loop stands at, or "".
        """
        _checked("held", seconds)
        if _checked("held", now) < self.last or (self.held_at is not None and now < self.held_at):
            return
        self._held_since = min(self._held_since, now - seconds)  # what it says may have been under way for long
        self.held_at, self.held_seconds, self.held_line = now, now - self._held_since, line

    def excuse(self, until: float) -> None:
        """Count a time in which nothing could be heard here neither as a gap nor as silence.

        Args:
            until: seconds.
        """
        self.last = max(self.last, _checked("excuse", until))

    @property
    def deadline(self) -> float:
        """When the peer is lost, if nothing comes from it before, seconds."""
        silence = self._silence
        wait = silence if self.is_patient else min(max(self.mean_gap + DEVIATIONS * self.gap_deviation + self._heartbeat, silence / 2), silence)
        return self.last + wait if self.held_at is None else max(self.last + wait, self._held_since + self._held)

    def reason(self, now: float) -> str:
        """The reason for the loss of the peer, which ends a sentence.

        Args:
            now: seconds.

        Returns:
            The reason.
        """
        _checked("reason", now)
        if self.held_at is None:
            return f"nothing was heard from it for {now - self.last:.1f} s"
        at = f" at {self.held_line}" if self.held_line else ""
        return f"its event loop was held up for {now - self._held_since:.1f} s{at} (Limits.held={self._held:g}); move such work to ag.offload"

    def _let_go(self) -> None:
        self.held_at, self.held_seconds, self.held_line, self._held_since = None, 0.0, "", math.inf


def _checked(what: str, seconds: Any) -> float:
    """A time."""
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        raise ArgumentTypeError(f"FailureDetector.{what}: expected seconds of the loop's clock, found {seconds!r}")
    return seconds
