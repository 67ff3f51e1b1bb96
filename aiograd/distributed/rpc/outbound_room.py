"""OutboundRoom: how many bytes of requests to one peer may be unanswered at a time, and the requests that wait until there are fewer."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable

from aiograd.distributed.rpc.timers import call_at


class OutboundRoom:
    """Room for unanswered requests. A request that is larger than all of it has room when there is no other.

    Args:
        limit: bytes.
    """

    __slots__ = ("_limit", "_taken", "_waiting")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        #: the waiting callers, in order, with their bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_awaited(self) -> bool:
        """True if a request waits for room."""
        return bool(self._waiting)

    def take(self, size: int) -> bool:
        """Take room if there is enough and no other caller waits for it; returns True if it was taken."""
        if self._waiting or (self._taken and self._taken + size > self._limit):
            return False
        self._taken += size
        return True

    def add(self, size: int) -> None:
        """Take room, whether there is some or not."""
        self._taken += size

    async def wait(self, size: int, context: contextvars.Context, until: float, late: BaseException) -> None:
        """Wait for room, and take it. Cancelled, none is taken.

        Args:
            context: for the timer.
            until: time of the loop at which `late` is raised.
        """
        loop = asyncio.get_running_loop()
        room: asyncio.Future[None] = loop.create_future()
        entry = (size, room)
        self._waiting.append(entry)
        timer = call_at(context, loop, until, _expire, room, late)
        try:
            await room
        except BaseException:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif room.done() and not room.cancelled() and room.exception() is None:
                self.release(size)  # it was granted in the same moment
            raise
        finally:
            timer.cancel()

    def release(self, size: int) -> None:
        """Give room back."""
        self._taken -= size
        waiting = self._waiting
        while waiting:
            size, room = waiting[0]
            if self._taken and self._taken + size > self._limit:
                break
            waiting.popleft()
            if not room.done():
                self._taken += size
                room.set_result(None)

    def close(self, loss: Callable[[], BaseException] | None) -> None:
        """Wake the waiting callers without room, or with an error that is made for each."""
        while self._waiting:
            _, room = self._waiting.popleft()
            if room.done():
                continue
            if loss is None:
                room.set_result(None)
            else:
                room.set_exception(loss())


def _expire(room: asyncio.Future[None], error: BaseException) -> None:
    if not room.done():
        room.set_exception(error)
