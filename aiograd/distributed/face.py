"""Face: what a worker shows of itself: a dashboard, an account for dashboards of peers, and metrics.

All of that is a part of the package above this one, which the top of the package introduces and which is imported when somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from aiograd.distributed.calls import Calls
from aiograd.distributed.dashboard_options import DashboardOptions
from aiograd.distributed.messages.library import ReportRequest
from aiograd.distributed.rpc.http import HttpTransport
from aiograd.distributed.rpc.http.pages import Page, PageRequest
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import ArgumentError, DistributedError


class WorkerFace(Protocol):
    """The part above: see `aiograd.dashboard.face`."""

    #: the URL of the page, with the token; None where there is no page
    url: str | None

    def show(self, options: DashboardOptions) -> None:
        """Serve the page."""

    async def report(self, caller: PeerIdentity, request: str) -> str:
        """Tell a peer's dashboard what happens here."""

    def metrics(self, request: PageRequest) -> Page:
        """Tell Prometheus."""

    async def aclose(self) -> None:
        """End what runs for it."""


_makers: list[Callable[[WorkerCore], WorkerFace]] = []


def register_face(make: Callable[[Any], WorkerFace]) -> None:
    """Set the part above, for all workers of the process.

    Args:
        make: makes the face of a worker from its `WorkerCore`.
    """
    _makers[:] = [make]


class LazyFace:
    """The face of one worker, which is made when it is first needed.

    Args:
        core: the worker.
        calls: serve the questions of dashboards.
        options: of the worker's dashboard; None: it has none.
    """

    def __init__(self, core: WorkerCore, calls: Calls, options: DashboardOptions | None) -> None:
        self._core = core
        self._options = options
        self._made: WorkerFace | None = None
        calls.register({ReportRequest: self._report})

    def open(self) -> None:
        """The worker listens.

        Raises:
            ArgumentError: a dashboard is wanted and the transport is not HTTP.
        """
        transport = self._core.endpoint.transport
        if isinstance(transport, HttpTransport):
            transport.site.metrics = self
        elif self._options is not None:
            raise ArgumentError(f"Worker({self._core.name!r}, dashboard=...): a dashboard needs the HTTP transport, which is the default")
        if self._options is not None:
            self._face().show(self._options)

    @property
    def url(self) -> str | None:
        """The URL of the dashboard, with the token; None where there is none."""
        return None if self._made is None else self._made.url

    def answer(self, request: PageRequest) -> Page:
        """Answers ``/metrics``."""
        return self._face().metrics(request)

    async def aclose(self) -> None:
        """End what runs for it. Cancelling it skips the waiting."""
        if self._made is not None:
            await self._made.aclose()

    async def _report(self, caller: PeerIdentity, request: ReportRequest) -> str:
        return await self._face().report(caller, request.question)

    def _face(self) -> WorkerFace:
        if self._made is None:
            if not _makers:
                raise DistributedError("this program has imported only a part of aiograd, which has no dashboard; `import aiograd` brings it")
            self._made = _makers[0](self._core)
        return self._made
