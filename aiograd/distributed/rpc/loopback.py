"""Loopback: requests that a worker makes to itself. No channel and no session, but the same codec, deadlines and errors as for any other."""

from __future__ import annotations

import asyncio
from typing import Any

from aiograd.distributed.error_wire import from_wire
from aiograd.distributed.rpc.codec import decode, encode
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.peer import LocalEndpoint
from aiograd.distributed.rpc.timers import call_at, running_task
from aiograd.errors import DeadlineError, DistributedError


class Loopback:
    """A worker's requests to itself.

    Args:
        owner: its endpoint.
    """

    __slots__ = ("_owner", "_tasks")

    def __init__(self, owner: LocalEndpoint) -> None:
        self._owner = owner
        self._tasks: dict[asyncio.Task[None], asyncio.Future[tuple[bytearray, bool]]] = {}

    async def request(self, kind: int, value: Any, timeout: float, principal: str) -> Any:
        """See `Endpoint.request`."""
        owner = self._owner
        message = bytearray().join(encode(value, owner.limits))
        answer: asyncio.Future[tuple[bytearray, bool]] = owner.loop.create_future()
        task = owner.loop.create_task(self._serve(answer, kind, message, timeout, principal), context=owner.context.copy())
        self._tasks[task] = answer
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
            if isinstance(error, GeneratorExit) and (task is None or self._tasks.get(task) is not answer):
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
        del self._tasks[task]
        if not task.cancelled():
            task.exception()  # of an abandoned handler: its error is not awaited

    def close(self) -> list[asyncio.Task[None]]:
        """Fail what waits and cancel what runs; returns the tasks to wait for."""
        for task, answer in self._tasks.items():
            _fail(answer, DistributedError(f"worker {self._owner.name!r} is being closed"))
            task.cancel()
        return list(self._tasks)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
