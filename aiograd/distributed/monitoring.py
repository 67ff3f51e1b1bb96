"""Monitoring of a worker: its dashboard, its reports to dashboards of peers, and its metrics.

The package above this one, `aiograd.dashboard`, does it: the top of the package registers it here, and it is imported at the first request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from aiograd.distributed.calls import Calls
from aiograd.distributed.dashboard_options import DashboardOptions
from aiograd.distributed.messages.library import ReportRequest
from aiograd.distributed.rpc.http import HttpTransport
from aiograd.distributed.rpc.http.naming import NamePage
from aiograd.distributed.rpc.http.pages import Page, PageRequest
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import ArgumentError, DistributedError


class WorkerMonitor(Protocol):
    """The monitor of one worker, see `aiograd.dashboard.monitor`."""

    #: the URL of the page, with the token; None where there is no page
    url: str | None

    def show(self, options: DashboardOptions) -> None:
        """Serve the page."""

    async def report(self, caller: PeerIdentity, request: ReportRequest) -> str:
        """The report of this worker for a peer's dashboard, as JSON."""

    def metrics(self, request: PageRequest) -> Page:
        """The metrics for Prometheus."""

    async def aclose(self) -> None:
        """End its tasks."""


_makers: list[Callable[[WorkerCore], WorkerMonitor]] = []


def register_face(make: Callable[[Any], WorkerMonitor]) -> None:
    """Set the maker of monitors for all workers of the process.

    Args:
        make: makes the monitor of a worker from its `WorkerCore`.
    """
    _makers[:] = [make]


class LazyMonitor:
    """The monitor of one worker, which is made when it is first needed.

    Args:
        core: the worker.
        calls: serve the questions of dashboards.
        options: of the worker's dashboard; None: it has none.
    """

    def __init__(self, core: WorkerCore, calls: Calls, options: DashboardOptions | None) -> None:
        self._core = core
        self._options = options
        self._made: WorkerMonitor | None = None
        calls.register({ReportRequest: self._report})

    def open(self) -> None:
        """The worker listens.

        Raises:
            ArgumentError: a dashboard is wanted and the transport is not HTTP.
        """
        transport = self._core.endpoint.transport
        if isinstance(transport, HttpTransport):
            transport.site.metrics = self
            transport.site.name = NamePage(self._core.name, self._core.endpoint.keyring)
        elif self._options is not None:
            raise ArgumentError(f"Worker({self._core.name!r}, dashboard=...): a dashboard needs the HTTP transport, which is the default")
        if self._options is not None:
            self._monitor().show(self._options)

    @property
    def url(self) -> str | None:
        """The URL of the dashboard, with the token; None where there is none."""
        return None if self._made is None else self._made.url

    def answer(self, request: PageRequest) -> Page:
        """Answers ``/metrics``."""
        return self._monitor().metrics(request)

    async def aclose(self) -> None:
        """End its tasks. Cancelling it skips the waiting."""
        if self._made is not None:
            await self._made.aclose()

    async def _report(self, caller: PeerIdentity, request: ReportRequest) -> str:
        return await self._monitor().report(caller, request)

    def _monitor(self) -> WorkerMonitor:
        if self._made is None:
            if not _makers:
                raise DistributedError("this program has imported only a part of aiograd, which has no dashboard; `import aiograd` brings it")
            self._made = _makers[0](self._core)
        return self._made
