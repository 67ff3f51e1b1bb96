"""LoopLag: how late timers of a worker's event loop fire. Sampled only for a while after it was asked for, by a dashboard or by Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from aiograd.distributed.meter import DurationHistogram

#: seconds between two samples, and samples that `quantile` looks at
INTERVAL, SAMPLES = 0.05, 200


class LoopLag:
    """How late timers of an event loop fire.

    Attributes:
        histogram: all samples so far, in seconds.
    """

    __slots__ = ("histogram", "_latest", "_until", "_handle")

    def __init__(self) -> None:
        self.histogram: DurationHistogram = DurationHistogram()
        self._latest: deque[float] = deque(maxlen=SAMPLES)
        self._until = 0.0
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_sampled(self) -> bool:
        """True while samples are taken."""
        return self._handle is not None

    def sample(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Take samples for so many seconds from now, at least. May be called from any thread.

        Args:
            loop: the loop.
            seconds: how long.
        """
        self._until = max(self._until, loop.time() + seconds)
        if self._handle is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._begin, loop)

    def stop(self) -> None:
        """Take no more samples, unless they are asked for again. To be called on the loop."""
        self._until = 0.0
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def quantile(self, share: float) -> float:
        """A quantile of the latest samples, in seconds; 0 if there are none.

        Args:
            share: from 0 to 1.
        """
        ordered = sorted(self._latest)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._handle is None and self._until > loop.time():
            self._arm(loop)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + INTERVAL
        self._handle = loop.call_at(due, self._tick, loop, due)

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        lag = max(0.0, now - due)
        self._latest.append(lag)
        self.histogram.add(lag, False)
        self._handle = None
        if now < self._until:
            self._arm(loop)
