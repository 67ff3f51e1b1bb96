"""Loopback: requests that a worker makes to itself. No channel and no session, but the same codec, deadlines and errors as for any other."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, NamedTuple

from aiograd.distributed.error_wire import from_wire
from aiograd.distributed.rpc.codec import decode, encode
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.peer import LocalEndpoint
from aiograd.distributed.rpc.timers import call_at, running_task
from aiograd.errors import DeadlineError, DistributedError


class LoopbackRequest(NamedTuple):
    """A request of a worker to itself."""

    answer: asyncio.Future[tuple[bytearray, bool]]
    id: int
    kind: int
    value: Any
    principal: str
    began: float


class Loopback:
    """A worker's requests to itself.

    Args:
        owner: its endpoint.
    """

    __slots__ = ("requests", "_owner", "_ids")

    def __init__(self, owner: LocalEndpoint) -> None:
        self._owner = owner
        #: by the task that serves it
        self.requests: dict[asyncio.Task[None], LoopbackRequest] = {}
        self._ids = itertools.count(1)

    async def request(self, kind: int, value: Any, timeout: float, principal: str) -> Any:
        """See `Endpoint.request`."""
        owner = self._owner
        message = bytearray().join(encode(value, owner.limits))
        answer: asyncio.Future[tuple[bytearray, bool]] = owner.loop.create_future()
        task = owner.loop.create_task(self._serve(answer, kind, message, timeout, principal), context=owner.context.copy())
        self.requests[task] = LoopbackRequest(answer, next(self._ids), kind, value, principal, owner.loop.time())
        task.add_done_callback(self._ended)
        text = f"request {getattr(kind, 'name', f'kind {kind}')} of worker {owner.name!r} to itself did not end within {timeout:g} s; allow more time"
        timer = call_at(owner.context, owner.loop, owner.loop.time() + timeout, _fail, answer, DeadlineError(text))
        try:
            reply, failed = await answer
        except BaseException:
            task.cancel()
            raise
        finally:
            timer.cancel()
        result = decode(reply, owner.limits)
        if failed:
            raise from_wire(result, owner.name)
        return result

    async def _serve(self, answer: asyncio.Future[tuple[bytearray, bool]], kind: int, message: bytearray, left: float, principal: str) -> None:
        owner = self._owner
        value: Any = None
        try:
            value = decode(message, owner.limits)
            identity, prompt, result = PeerIdentity(owner.name, owner.incarnation, principal), owner.prompt_handlers.get(kind), None
            if prompt is not None:
                prompt(identity, value)
            else:
                result = await owner.handler(identity, kind, value, left)
            reply = bytearray().join(encode(result, owner.limits)), False
        except BaseException as error:
            task = running_task()
            if isinstance(error, GeneratorExit) and (task is None or (known := self.requests.get(task)) is None or known.answer is not answer):
                raise  # this coroutine is closed from outside: there is no answer
            if answer.done():
                if isinstance(error, SystemExit):
                    return
                raise
            reply = bytearray().join(owner.failure(error, kind, value)), True
            if isinstance(error, KeyboardInterrupt):  # meant for the process: it leaves the loop, as out of any task
                answer.set_result(reply)
                raise
        if not answer.done():
            answer.set_result(reply)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self.requests[task]
        if not task.cancelled():
            task.exception()  # of an abandoned handler: its error is not awaited

    def close(self) -> list[asyncio.Task[None]]:
        """Fail what waits and cancel what runs; returns the tasks to wait for."""
        for task, request in self.requests.items():
            _fail(request.answer, DistributedError(f"worker {self._owner.name!r} is being closed"))
            task.cancel()
        return list(self.requests)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
