"""Cluster: the protocol that `LocalCluster`, `RayCluster` and `JoinCluster` satisfy, so that code written for one runs on any."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from aiograd.distributed.waits import WaitReport
from aiograd.distributed.worker import Worker


@runtime_checkable
class Cluster(Protocol):
    """Workers under names, and a coordinator in this process that calls them; used with ``async with``.

    >>> isinstance(cluster, dist.Cluster)
    True
    """

    @property
    def driver(self) -> Worker:
        """The worker in this process, which knows all others."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers."""

    @property
    def urls(self) -> dict[str, str]:
        """The URL of each worker."""

    @property
    def dashboard_url(self) -> str | None:
        """The URL of the coordinator's dashboard, with the token that opens it."""

    async def restart(self, name: str) -> None:
        """Start a worker anew, without its state, and tell all workers its new address.

        Args:
            name: name of the worker.

        Cancelled, the worker may be left ended and not started.

        >>> await cluster.restart("worker0")
        """

    async def add(self, name: str) -> None:
        """Take in another worker.

        Args:
            name: its name.

        Cancelled, it ends the worker again where this cluster starts workers.

        >>> await cluster.add("worker1")
        >>> cluster.workers
        ('worker0', 'worker1')
        """

    async def remove(self, name: str) -> None:
        """End a worker for good.

        Args:
            name: name of the worker.

        Cancelled, a worker that this cluster has started is killed at once.

        >>> await cluster.remove("worker0")
        >>> cluster.workers
        ()
        """

    async def wait_lost(self, name: str) -> int:
        """Wait until this worker, as it now is, has ended; returns its exit status, or 1 where that is not known.

        Args:
            name: name of the worker.

        Returns:
            The exit status.

        Cancelling changes nothing.

        >>> import os
        >>> os.kill(await cluster.driver.call("worker0", "process"), 9)
        >>> await cluster.wait_lost("worker0")
        -9
        """

    async def wait_running(self, name: str) -> None:
        """Wait until this worker runs; raises `WorkerLostError` if it is not started again.

        Args:
            name: name of the worker.

        Cancelling changes nothing.

        >>> await cluster.wait_running("worker0")
        """

    async def why(self, timeout: float = 1.0) -> WaitReport:
        """Ask the coordinator and all workers for their waits; see `Worker.why`.

        Args:
            timeout: seconds for all answers.

        Returns:
            The report.

        Cancelling stops the asking.

        >>> (await cluster.why(timeout=5.0)).waits
        ()
        """

    async def aclose(self) -> None:
        """Close the coordinator and end the workers that the cluster has started.

        Cancelled, it kills the workers that it has started and that have not ended by themselves.

        >>> await cluster.aclose()
        """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
