"""The worker and distributed context of the running code, in a ContextVar: child tasks, gather and executor jobs inherit it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from aiograd.errors import DistributedError
from aiograd.running.log_fields import add_source
from aiograd.running.scalars import LOG

if TYPE_CHECKING:
    from aiograd.distributed.autograd.context import Context


class Scope(NamedTuple):
    """The worker, context and request that the running code belongs to."""

    #: the Worker
    worker: Any
    context: Context | None
    #: the principal of the request that the running code serves; requests of the code itself are made for this principal
    principal: str | None = None
    #: time of the loop at which the request that is being served expires
    deadline: float | None = None
    #: place of that request in the order in which the whole graph is recorded; see Note [Places] in `context`
    place: tuple[float, ...] = ()
    #: True if it is a rule or hook of a pass of this context
    is_in_pass: bool = False


SCOPE: ContextVar[Scope | None] = ContextVar("aiograd_distributed_scope", default=None)


def current_worker() -> Any:
    """The Worker of the running handler, or of the context around the running code.

    Returns:
        The worker.

    Raises:
        DistributedError: there is none.
    """
    scope = SCOPE.get()
    if scope is None:
        raise DistributedError("current_worker(): this code runs neither in a handler of a worker nor inside `async with worker.context()`")
    return scope.worker


def current_context() -> Context | None:
    """The distributed context of the running code, or None.

    Returns:
        The context, or None.
    """
    scope = SCOPE.get()
    return None if scope is None else scope.context


def _served_by() -> str | None:
    scope = SCOPE.get()
    return None if scope is None or scope.deadline is None else str(scope.worker.name)


def _log_fields() -> dict[str, Any]:
    scope = SCOPE.get()
    if scope is None:
        return {}
    return {"worker": scope.worker.name, "context": None if scope.context is None else scope.context.id}


LOG.worker_name = _served_by
add_source(_log_fields)
