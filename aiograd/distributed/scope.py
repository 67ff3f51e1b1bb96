"""Which worker and distributed context the running code belongs to: a ContextVar, so it follows child tasks, gather and executor hops."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from aiograd.errors import DistributedError

if TYPE_CHECKING:
    from aiograd.distributed.context import Context


class Scope(NamedTuple):
    """Where the running code is."""

    #: the Worker
    worker: Any
    context: Context | None
    #: whose requests the running code serves; its own requests are made in that name
    principal: str | None = None
    #: time of the loop at which the request that is being served expires
    deadline: float | None = None
    #: place of that request in the order in which the whole graph is recorded; see Note [Places] in `context`
    place: tuple[float, ...] = ()
    #: whether it is a rule or hook of a pass of this context
    is_in_pass: bool = False


SCOPE: ContextVar[Scope | None] = ContextVar("aiograd_distributed_scope", default=None)


def current_worker() -> Any:
    """The Worker whose handler, or whose context's block, is running.

    Raises:
        DistributedError: neither is.
    """
    scope = SCOPE.get()
    if scope is None:
        raise DistributedError("current_worker(): this code runs neither in a handler of a worker nor inside `async with worker.context()`")
    return scope.worker


def current_context() -> Context | None:
    """The distributed context of the running code, or None."""
    scope = SCOPE.get()
    return None if scope is None else scope.context
