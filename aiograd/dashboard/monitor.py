"""DashboardMonitor: the dashboard's part of a worker: its reports for dashboards of peers, and its own page where it has one."""

from __future__ import annotations

import hmac
import json

from aiograd.dashboard.collector import Collector
from aiograd.dashboard.metrics import metrics_page
from aiograd.dashboard.pages import DashboardPages
from aiograd.dashboard.reporter import Reporter
from aiograd.distributed.dashboard_options import TOKEN_BYTES, DashboardOptions
from aiograd.distributed.messages.library import ReportRequest
from aiograd.distributed.rpc.http import HttpTransport
from aiograd.distributed.rpc.http.pages import Page, PageRequest
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import ArgumentError, NotExposedError

#: the longest report, in characters, each of which is one byte of ASCII
REPORT_CHARACTERS = 500_000


class DashboardMonitor:
    """See `aiograd.distributed.monitoring.WorkerMonitor`.

    Args:
        core: the worker.
    """

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self.reporter = Reporter(core)
        self.collector: Collector | None = None
        self.url: str | None = None
        self._token: str | None = None

    def show(self, options: DashboardOptions) -> None:
        """Serve the page, at the worker's own address.

        Raises:
            ArgumentError: its transport is not HTTP.
        """
        core = self._core
        transport = core.endpoint.transport
        if not isinstance(transport, HttpTransport):
            raise ArgumentError(f"Worker {core.name!r}: a dashboard needs the HTTP transport, which is the default")
        self._token = options.token or core.entropy(TOKEN_BYTES).hex()
        self.collector = Collector(core, self.reporter, options)
        transport.site.dashboard = DashboardPages(core, self.collector, self._token)
        self.url = f"{core.endpoint.url}/dashboard?token={self._token}"

    def metrics(self, request: PageRequest) -> Page:
        """The metrics for Prometheus, where the request has the token or comes from this machine."""
        bearer = request.authorization.removeprefix("Bearer ")
        is_known = self._token is not None and hmac.compare_digest(bearer.encode("utf-8", "replace"), self._token.encode())
        if not request.is_local and not is_known:
            return Page(401, b"unauthorized\n", headers={"WWW-Authenticate": "Bearer"})
        return metrics_page(self._core)

    async def report(self, caller: PeerIdentity, request: ReportRequest) -> str:
        """The report of this worker for a peer's dashboard, as JSON.

        Raises:
            NotExposedError: the peer acts for another principal.
        """
        if caller.principal != self._core.principal:
            raise NotExposedError(f"worker {self._core.name} gives no reports to other principals")
        report = self.reporter.report(request)
        most = min(REPORT_CHARACTERS, self._core.limits.head_bytes // 4)
        while len(text := json.dumps(report, separators=(",", ":"))) > most and (report["events"] or report["scalars"]):
            report["dropped"] += len(report["events"]) - len(report["events"]) // 2
            report["events"] = report["events"][(len(report["events"]) + 1) // 2 :]  # the latest, as many as fit
            report["scalars"] = report["scalars"][(len(report["scalars"]) + 1) // 2 :]
        return text

    async def aclose(self) -> None:
        """End recording and questions. Cancelling it skips the waiting."""
        self.reporter.stop()
        if self.collector is not None:
            await self.collector.aclose()
