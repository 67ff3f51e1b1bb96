"""``aiograd.tuned_gc``: a block in which Python's garbage collector does not hold the event loop up.

Note [Idle]
    Lateness of timers does not tell how busy a loop is: one that runs short callbacks all the time is never late. So the process is called idle when
    it has used next to no CPU time since the last tick, with all of its threads and loops, and no pass is in flight; a pass may wait for a
    device or another worker, and the promise about the loop's lag covers the time it waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from types import TracebackType

from aiograd.engine.run.current import passes_in_flight
from aiograd.engine.run.paced_collector import PROCESS_COLLECTOR, PacedCollector
from aiograd.errors import LoopError

#: seconds between two ticks
INTERVAL = 0.25
#: CPU time, as a share of `INTERVAL`, that an idle process uses at most
IDLE_SHARE = 0.05


class tuned_gc:
    """Keep pauses of Python's garbage collector short: ``async with ag.tuned_gc():`` around the life of a service.

    For services that run an event loop of their own; `aiograd.run` and ``aiograd worker`` do it by themselves. Objects alive at the start are frozen
    (``gc.freeze``), so that no automatic collection looks at them, and so are later ones when they have grown old. Full collections run
    when the process is idle, when its memory has grown by half since the last one, and when ``gc.collect()`` is called.

    The settings belong to the process. Blocks may be nested and may be entered on several loops and threads: the first one sets the parameters
    and the last one restores them. Where automatic collections are switched off (``gc.disable()``), they stay so. ``gc.get_objects()`` and
    ``gc.get_referrers()`` do not see frozen objects.

    Args:
        cpu_time: seconds of CPU time that the process has used.
        collector: the settings to hold.

    Raises:
        LoopError: the block is entered a second time.

    Cancellation inside the block puts the settings back, as any other end does.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> async with ag.tuned_gc():
    ...     await (x * x).sum().backward()
    >>> x.grad
    tensor([2., 4.])
    """

    def __init__(self, *, cpu_time: Callable[[], float] = time.process_time, collector: PacedCollector = PROCESS_COLLECTOR) -> None:
        self._cpu_time = cpu_time
        self._collector = collector
        self._used = 0.0
        self._timer: asyncio.TimerHandle | None = None
        #: of the timer's callbacks: an empty one, so that it keeps nothing alive
        self._context = Context()

    async def __aenter__(self) -> tuned_gc:
        if self._timer is not None:
            raise LoopError("this ag.tuned_gc() block is open already; make another one to nest")
        self._collector.acquire()
        self._start(self._cpu_time())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self._collector.release()

    def _tick(self) -> None:
        """See Note [Idle]."""
        used, before = self._cpu_time(), self._used
        if self._collector.is_worthwhile() and used - before <= IDLE_SHARE * INTERVAL and not passes_in_flight():
            self._collector.collect()
            used = self._cpu_time()
        self._collector.rearm()
        self._start(used)

    def _start(self, used: float) -> None:
        self._used = used
        self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._tick, context=self._context)
