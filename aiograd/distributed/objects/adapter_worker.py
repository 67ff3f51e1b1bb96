"""AdapterWorker: the worker that an adapter lives on, as the adapter sees it.

An adapter answers requests, and each of them runs for its caller and with the rest of its deadline. Work that an adapter does by itself, because no
request has come for too long, belongs to no request: it runs here, for the principal that made the adapter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from aiograd.distributed.collectives.group import Group
from aiograd.distributed.collectives.group_server import GroupServer
from aiograd.distributed.rpc.timers import call_at
from aiograd.distributed.scope import SCOPE, Scope
from aiograd.distributed.worker_core import WorkerCore


class AdapterWorker:
    """A worker, as an adapter sees it.

    Args:
        core: the worker.
        principal: the principal that made the adapter.
    """

    __slots__ = ("_core", "_principal")

    def __init__(self, core: WorkerCore, principal: str) -> None:
        self._core = core
        self._principal = principal

    @property
    def name(self) -> str:
        """The worker's name."""
        return self._core.name

    @property
    def lease(self) -> float:
        """Seconds for which the worker keeps something for a peer that it does not hear from."""
        return self._core.limits.lease_seconds

    def join(self, names: Sequence[str], name: str) -> Coroutine[Any, Any, Group]:
        """See `aiograd.distributed.join_group`."""
        groups: GroupServer = self._core.worker.groups
        return groups.form(names, name, None)

    def keep(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something apart from any request. It is cancelled when the worker closes; an error goes to the log."""
        context = self._core.endpoint.context.copy()
        context.run(SCOPE.set, Scope(self._core.worker, None, self._principal))
        return self._core.spawn(coroutine, name, context)

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call a function at a time of the loop, apart from any request, unless the worker is closed by then."""
        core = self._core
        return call_at(core.endpoint.context, core.loop, when, lambda: None if core.is_closing else callback())
