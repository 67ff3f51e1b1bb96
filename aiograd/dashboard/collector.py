"""Collector: asks every worker how it is, again and again while the page is open."""

from __future__ import annotations

import asyncio
import time

from aiograd.coordination.message_form import encode
from aiograd.dashboard.board import Board, WorkerState, read_report
from aiograd.dashboard.reporter import Reporter
from aiograd.distributed.dashboard_options import DashboardOptions
from aiograd.distributed.messages.library import ReportRequest
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import DeadlineError, DistributedError, Overloaded, UnknownPeerError
from aiograd.running.scalars import LOG

#: seconds after its last question at which the page counts as closed; and that a worker has to answer
OPEN_SECONDS, PATIENCE = 5.0, 2.0
#: workers that are asked in one round; of more, each is asked less often
AT_ONCE = 64
#: rounds from one drawing of the graph to the next
GRAPH_EVERY = 4
#: events per second that all workers together record
ALL_RATE = 4000


class Collector:
    """Fills a board while the page is open.

    Args:
        core: the worker that serves the dashboard.
        reporter: of that worker.
        options: of the dashboard.
    """

    def __init__(self, core: WorkerCore, reporter: Reporter, options: DashboardOptions) -> None:
        self.board = Board(core.name)
        self._core = core
        self._reporter = reporter
        self._options = options
        self._asked_at = -OPEN_SECONDS
        self._task: asyncio.Task[None] | None = None
        self._rounds = 0
        self._next = 0

    @property
    def is_running(self) -> bool:
        """True while workers are asked."""
        return self._task is not None and not self._task.done()

    def page_asked(self) -> None:
        """The page is open."""
        self._asked_at = self._core.loop.time()
        if not self.is_running:
            self._task = self._core.spawn(self._run(), "dashboard")

    async def aclose(self) -> None:
        """Ask no more. Cancelling it skips the waiting."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _run(self) -> None:
        while self._core.loop.time() - self._asked_at < OPEN_SECONDS:
            await self.ask_round()
            await asyncio.sleep(self._options.interval)

    async def ask_round(self) -> None:
        """Ask every worker once, or the next `AT_ONCE` of them. Cancelling it cancels the questions."""
        self._rounds += 1
        with_graphs = self._rounds % GRAPH_EVERY == 1
        names = self._names()
        for name in self.board.workers.keys() - {*names, self._core.name}:
            self.board.forget(name)
        self._ask_here(with_graphs)
        for name in names:
            self.board.worker(name)
        chosen = [names[(self._next + i) % len(names)] for i in range(min(AT_ONCE, len(names)))]
        self._next += len(chosen)
        await asyncio.gather(*(self._ask(name, with_graphs) for name in chosen))
        if with_graphs:
            self.board.draw_graph(time.time())
            self.board.draw_step()

    def _rate(self) -> int:
        """Events per second for each worker to record: all together make no more than the page can take."""
        return max(1, min(self._options.events_per_second, ALL_RATE // max(1, len(self.board.workers))))

    def _names(self) -> list[str]:
        """The other workers: the ones with a known URL, and the ones of this principal that have dialled."""
        endpoint, core = self._core.endpoint, self._core
        foreign = {peer.name for peer in endpoint.statistics().peers if peer.principal != core.principal}
        own = {peer.name for peer in endpoint.statistics().peers if peer.principal == core.principal}
        return [name for name in endpoint.peers if name != core.name and (name in own or name not in foreign)]

    def _ask_here(self, with_graphs: bool) -> None:
        worker = self.board.worker(self._core.name)
        now = time.time()
        worker.url = self._core.endpoint.url or ""
        self.board.arrived(worker.name, self._reporter.report(self._request(worker, with_graphs)), now, now)

    def _request(self, worker: WorkerState, with_graphs: bool, asker: str = "") -> ReportRequest:
        return ReportRequest(worker.cursor, with_graphs, worker.scalar_cursor, asker, self._rate())

    async def _ask(self, name: str, with_graphs: bool) -> None:
        worker = self.board.worker(name)
        asked = time.time()
        try:
            values = encode(self._request(worker, with_graphs, LOG.process))
            text = await self._core.worker.call_apart(name, ReportRequest.form.name, *values, timeout=PATIENCE)
        except (DeadlineError, Overloaded) as error:
            self.board.failed(name, "silent", str(error), time.time())
        except UnknownPeerError:
            self.board.failed(name, "lost", "it has left, and cannot be dialled", time.time())
        except DistributedError as error:
            self.board.failed(name, "lost", str(error), time.time())
        else:
            self.board.arrived(name, read_report(text), asked, time.time())

