"""FuturesInFlight: the futures that a running pass waits for."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from aiograd.graph.node import Node


class FuturesInFlight:
    """The futures that a pass waits for, each with the function that takes its result, and the waiting for the first of them."""

    __slots__ = ("callbacks", "done", "_waker")

    def __init__(self) -> None:
        #: future -> callback for its result
        self.callbacks: dict[asyncio.Future[Any], Callable[[asyncio.Future[Any]], None]] = {}
        #: futures that have ended and wait for `settle`
        self.done: deque[asyncio.Future[Any]] = deque()
        self._waker: asyncio.Future[None] | None = None

    def watch(self, future: asyncio.Future[Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
        """Wait for a future; `settle` calls `then` with it."""
        self.callbacks[future] = then
        future.add_done_callback(self._on_done)

    def _on_done(self, future: asyncio.Future[Any]) -> None:
        self.done.append(future)
        self.wake()

    def settle(self) -> None:
        """Hand the future that ended first to its callback."""
        future = self.done.popleft()
        then = self.callbacks.pop(future, None)
        if then is not None:
            then(future)

    async def wait(self) -> None:
        """Wait until a future ends, or `wake` is called. Cancelling only ends the waiting."""
        self._waker = asyncio.get_running_loop().create_future()
        try:
            await self._waker
        finally:
            self._waker = None

    def wake(self) -> None:
        """End the waiting."""
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def nodes(self) -> list[Node]:
        """The nodes that the futures belong to."""
        return [then.args[0] for then in self.callbacks.values() if isinstance(then, functools.partial)]

    def drop(self) -> list[asyncio.Future[Any]]:
        """Call no callback any more; returns the futures."""
        futures = list(self.callbacks)
        self.callbacks.clear()
        self.done.clear()
        return futures
