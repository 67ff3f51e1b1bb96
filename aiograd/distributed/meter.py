"""Meter: counts and durations of the exchanges of one worker with others, since it was made. Always on: an exchange costs a microsecond here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

#: upper bounds of the buckets of durations, in seconds
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: kinds of exchanges: see the categories of `aiograd.profiler.Event`; "pass": a distributed backward pass that began on this worker
EXCHANGES = ("call", "serve", "send", "receive", "commit", "pass")


class DurationHistogram:
    """Durations of one kind of exchange, in seconds.

    Attributes:
        counts: by bucket of `BOUNDS`; the last one is of longer ones.
        total: the sum of all durations.
        failed: exchanges that ended with an exception.
    """

    __slots__ = ("counts", "total", "failed")

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(BOUNDS) + 1)
        self.total: float = 0.0
        self.failed: int = 0

    @property
    def count(self) -> int:
        """The number of exchanges that have ended."""
        return sum(self.counts)

    def add(self, seconds: float, has_failed: bool) -> None:
        """Count an exchange that has ended."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds
        self.failed += has_failed


class Meter:
    """The histograms of one worker, by kind of exchange."""

    __slots__ = ("histograms",)

    def __init__(self) -> None:
        self.histograms: Mapping[str, DurationHistogram] = {name: DurationHistogram() for name in EXCHANGES}
