"""ContextBlock: opens a context of a worker, makes it the current one, and releases it."""

from __future__ import annotations

from contextvars import Token
from types import TracebackType
from typing import Any

from aiograd.distributed.autograd.context import Context
from aiograd.distributed.scope import SCOPE, Scope
from aiograd.errors import ContextError


class ContextBlock:
    """The ``async with`` block of a context.

    Args:
        worker: the `Worker`.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._context: Context | None = None
        self._token: Token[Scope | None] | None = None

    async def __aenter__(self) -> Context:
        worker = self._worker
        core = worker._core
        if self._context is not None:
            raise ContextError("this context has been entered before: call worker.context() for each block")
        core.check_open()
        outer = SCOPE.get()
        if outer is not None and outer.worker is worker and outer.context is not None and not outer.context.is_released:
            raise ContextError(
                f"worker.context(): the running code has an autograd context already, {outer.context.id}, and contexts do not nest. Leave its block "
                "first; a function that is called remotely has that of its caller."
            )
        principal = core.principal if outer is None or outer.principal is None or outer.worker is not worker else outer.principal
        context: Context = worker._contexts.open(principal)
        self._context = context
        worker._leases.watch()
        scope = outer if outer is not None and outer.worker is worker else Scope(worker, None)
        self._token = SCOPE.set(scope._replace(context=context, principal=principal, is_in_pass=False))
        return context

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        token, self._token = self._token, None
        if token is not None:
            try:
                SCOPE.reset(token)
            except ValueError as wrong:
                raise ContextError("leaving a context in another task than the one it was entered in; it is released all the same") from wrong
            finally:
                if self._context is not None:
                    await self._worker._leases.release(self._context)
