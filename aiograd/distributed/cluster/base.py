"""BaseCluster: the part that all clusters have in common: a roster while the ``async with`` block lasts, and the order in which things end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType

from aiograd.distributed.cluster.roster import Roster
from aiograd.distributed.waits import WaitReport
from aiograd.distributed.worker import Worker
from aiograd.errors import EngineClosedError


class BaseCluster:
    """A coordinator and its workers, by name.

    A subclass makes `_roster` when it is entered, and registers its clean-up in `_exits`.

    Args:
        names: of the workers that it will have; empty where they are not known beforehand.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = tuple(names)
        self._roster: Roster | None = None
        self._exits = contextlib.AsyncExitStack()

    @property
    def driver(self) -> Worker:
        """The worker in this process, named ``driver``, which knows all others.

        Raises:
            EngineClosedError: outside of the ``async with`` block.
        """
        return self._open().driver

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers."""
        return self._names if self._roster is None else self._roster.names

    @property
    def urls(self) -> dict[str, str]:
        """URL of each worker that has listened so far, by name.

        Raises:
            EngineClosedError: outside of the ``async with`` block.
        """
        return self._open().urls

    @property
    def dashboard_url(self) -> str | None:
        """The URL of the coordinator's dashboard, with the token that opens it; None where it has none.

        Raises:
            EngineClosedError: outside of the ``async with`` block.
        """
        return self._open().driver.dashboard_url

    async def why(self, timeout: float = 1.0) -> WaitReport:
        """Ask the coordinator and all workers for their waits; see `Worker.why`. Cancelling stops the asking.

        Raises:
            EngineClosedError: outside of the ``async with`` block. Otherwise as `Worker.why`.
        """
        return await self._open().driver.why(timeout=timeout)

    async def wait_lost(self, name: str) -> int:
        """Wait until this worker, as it now is, has ended; returns a status other than 0. Cancelling changes nothing.

        Raises:
            UnknownPeerError: no such worker.
        """
        return await self._open().wait_lost(name)

    async def aclose(self) -> None:
        """Close the coordinator, and end the workers or tell them that the cluster is closed, as leaving the block does. Idempotent.

        Cancelled, it kills those workers that this cluster has started and that have not ended by themselves; others may not have been told.
        """
        await self._exits.aclose()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave as `aclose` does."""
        await self._exits.__aexit__(kind, error, trace)

    def _open(self) -> Roster:
        if self._roster is None:
            raise EngineClosedError(f"{type(self).__name__}: this exists inside of the cluster's `async with` block only")
        return self._roster
