"""Home: what a worker gives to an adapter that lives on it, beside the objects that the adapter is made around.

An adapter answers requests, and each of them runs on behalf of whoever asked and with what is left of its deadline. What an adapter does by
itself, because nobody has asked for too long, belongs to no request: it runs here, on behalf of the principal that had the adapter made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from aiograd.distributed.scope import SCOPE, Scope

if TYPE_CHECKING:
    from aiograd.distributed.driver.office import Office


class Home:
    """A worker, as an adapter sees it.

    Args:
        office: the worker.
        principal: who had the adapter made.
    """

    __slots__ = ("_office", "_principal")

    def __init__(self, office: Office, principal: str) -> None:
        self._office = office
        self._principal = principal

    @property
    def name(self) -> str:
        """The worker's name."""
        return self._office.name

    @property
    def lease(self) -> float:
        """Seconds for which the worker keeps something for a peer that it does not hear from."""
        return self._office.limits.lease_seconds

    def keep(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something apart from any request. It is cancelled when the worker closes; what it raises goes to the log."""
        context = self._office.endpoint.context.copy()
        context.run(SCOPE.set, Scope(self._office.worker, None, self._principal))
        return self._office.keep(coroutine, name, context)
