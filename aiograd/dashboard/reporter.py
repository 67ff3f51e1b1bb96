"""Reporter: a worker's reports for its own dashboard or a peer's: counts, loop lag, memory, and the events that were sampled.

A worker that was not asked for `WATCHED_SECONDS` records nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import resource
import sys
import time
from typing import Any, NamedTuple

from aiograd.dashboard.sampling import Sampler
from aiograd.dashboard.servers import server_rows
from aiograd.dashboard.wait_board import wait_rows
from aiograd.distributed import asking
from aiograd.distributed.messages.library import ReportRequest
from aiograd.distributed.waits import WaitReport
from aiograd.distributed.worker_core import WorkerCore
from aiograd.profiler.event import Event
from aiograd.running import scalars

#: seconds after the last question at which recording stops
WATCHED_SECONDS = 3.0
#: seconds between two looks at the allowance
TICK = 0.05
#: events that are kept, and events and characters of a text in one report
RING, MOST_EVENTS, TEXT = 10_000, 3000, 160
#: seconds that the loop has to tell its waits to another thread
LOOP_SECONDS = 0.5
#: the most events per second that a dashboard may ask for
MOST_RATE = 100_000


class Reporter:
    """The reports of a worker.

    Args:
        core: the worker.
    """

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self.sampler = Sampler(1, RING)
        self._watched_until = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def recorder(self, is_recorded: bool) -> Any:
        """See `aiograd.distributed.worker_core.Watch`."""
        return None if self._handle is None else self.sampler.recorder(is_recorded)

    @property
    def is_watched(self) -> bool:
        """True if a dashboard has asked lately."""
        return self._handle is not None

    def watch(self, rate: int) -> None:
        """Record for a while from now on, so many events per second."""
        self._watched_until = self._core.loop.time() + WATCHED_SECONDS
        self._core.loop_lag.sample(self._core.loop, WATCHED_SECONDS)
        self.sampler.allowance.rate = rate
        if self._handle is None:
            self.sampler.allowance.restart(rate)
            self._core.watch = self
            self._tick()

    def stop(self) -> None:
        """Record nothing more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._core.watch is self:
            self._core.watch = None
        self.sampler.close()

    def _tick(self) -> None:
        now = self._core.loop.time()
        if now >= self._watched_until:
            self.stop()
            return
        self.sampler.tick(now)
        self._handle = self._core.loop.call_at(now + TICK, self._tick)

    def report(self, request: ReportRequest) -> dict[str, Any]:
        """The report for one request, for JSON.

        Args:
            request: the numbers of the report before.
        """
        after = request.after
        self.watch(min(request.rate, MOST_RATE))
        events = self.sampler.ring.after(after, MOST_EVENTS)
        ahead = time.time_ns() - time.perf_counter_ns()
        is_other = request.asker != scalars.LOG.process  # entries without a worker are reported once per process
        also = (None,) if is_other else ()
        logged = scalars.LOG.after(request.scalars_after, MOST_EVENTS, self._core.name, *also)
        return {
            "now": time.time_ns() // 1000,
            "cursor": events[-1][0] if events else after,
            "dropped": events[0][0] - after - 1 if events and after else 0,
            "state": self._state(),
            "windows": [[(begin + ahead) // 1000, (end + ahead) // 1000 if end else 0] for begin, end in list(self.sampler.windows)],
            "events": [_row(event, ahead) for _, event in events],
            "graphs": self.sampler.graphs.rows() if request.with_graphs else None,
            "steps": self.sampler.steps.rows(ahead) if request.with_graphs else None,
            "waits": wait_rows(waits_here(self._core, self._core.principal)),
            "servers": server_rows(self._core.name, with_others=is_other),
            "scalars": [[entry.number, entry.worker, entry.name, entry.step, entry.value, entry.time] for entry in logged],
        }

    def _state(self) -> dict[str, Any]:
        statistics = self._core.worker.statistics()
        meter = self._core.meter.histograms
        return {
            "pid": os.getpid(),
            "contexts": statistics.contexts,
            "passes": statistics.passes,
            "committed": statistics.passes_committed,
            "aborted": statistics.passes_aborted,
            "calls": statistics.calls,
            "served": meter["serve"].count,
            "failed": meter["serve"].failed,
            "bytes_held": statistics.bytes_held,
            "memory": resident_bytes(),
            "device_memory": device_bytes(),
            "lag50": self._core.loop_lag.quantile(0.5) * 1e3,
            "lag99": self._core.loop_lag.quantile(0.99) * 1e3,
            "peers": [
                [name, link.is_connected, link.bytes_in, link.bytes_out, None if link.round_trip is None else link.round_trip * 1e3, link.requests]
                for name, link in links_of(self._core).items()
            ],
        }


def waits_here(core: WorkerCore, principal: str | None = None) -> WaitReport:
    """The waits of a worker and the loops of peers that it knows to be held up; no peer is asked. May be called from any thread.

    Args:
        core: the worker.
        principal: only works of this principal; None: all.

    Returns:
        The report; in a thread besides the worker's loop an empty one where the loop is held up for longer than `LOOP_SECONDS` or is closed.
    """

    def read() -> WaitReport:
        return WaitReport(asking.waits(core, principal), asking.held_loops(core, principal))

    with contextlib.suppress(RuntimeError):  # no loop runs here
        if asyncio.get_running_loop() is core.loop:
            return read()
    found: concurrent.futures.Future[WaitReport] = concurrent.futures.Future()
    with contextlib.suppress(RuntimeError, TimeoutError):
        core.loop.call_soon_threadsafe(lambda: found.set_result(read()))
        return found.result(LOOP_SECONDS)
    return WaitReport()


class Link(NamedTuple):
    """Figures of the connections of a worker to one peer."""

    is_connected: bool
    bytes_in: int
    bytes_out: int
    #: seconds, see `PeerStatistics`
    round_trip: float | None
    #: that run on either side
    requests: int


def links_of(core: WorkerCore) -> dict[str, Link]:
    """Each peer of a worker's principal once: of two sessions with one name, one may be ending."""
    found: dict[str, Link] = {}
    for peer in core.worker.statistics().peers:
        if peer.principal == core.principal:
            before = found.get(peer.name, Link(False, 0, 0, None, 0))
            trips = [trip for trip in (before.round_trip, peer.round_trip) if trip is not None]
            found[peer.name] = Link(
                before.is_connected or peer.is_connected,
                before.bytes_in + peer.bytes_in,
                before.bytes_out + peer.bytes_out,
                min(trips, default=None),
                before.requests + peer.outstanding + peer.running,
            )
    return found


def _row(event: Event, ahead: int) -> list[Any]:
    """An event for JSON; times in microseconds of the wall clock."""
    shapes = None if event.shapes is None else " ".join("×".join(map(str, shape)) or "scalar" for shape in event.shapes)[:TEXT]
    line = event.line if event.line is None else event.line[-TEXT:]
    return [
        event.name[:TEXT], event.category, event.operation[:TEXT], (event.start + ahead) // 1000, event.duration / 1000, event.thread_name[:40],
        event.task, event.sequence_nr, event.graph_task, shapes, event.nbytes, line, event.peer,
    ]  # fmt: skip


def resident_bytes() -> int:
    """Bytes of memory that this process has now; the most that it had where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def device_bytes() -> int:
    """Bytes that this process has allocated on the current CUDA device; 0 where it has not used one."""
    if "aiograd.cuda.device" not in sys.modules:
        return 0
    with contextlib.suppress(Exception):  # a device that fails is no reason to report nothing
        return int(sys.modules["aiograd.cuda"].memory_stats()["allocated"])
    return 0
