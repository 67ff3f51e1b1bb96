"""Reading batches ahead of their consumer, on threads if wanted, delivered in order.

Note [Backpressure]
    At most ``1 + prefetch`` batches are read or wait to be taken; the next is begun when one is taken. Batches of a sequence are read at the same
    time, batches of a stream one after the other. Delivery follows the order of the batches, not of their readiness.

Note [Threads end with their epoch]
    Threads cannot be interrupted. When an epoch ends early, reads that have not begun are dropped, running ones are waited for without holding the
    loop up, and then the threads end: nothing of an epoch outlives it.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple


class LoadedBatch(NamedTuple):
    """A batch, and the state of its source after it was read, where the source has one."""

    value: Any
    source_state: Any = None


#: reads one batch; None where the stream has ended
Read = Callable[[], Awaitable[LoadedBatch | None]]


class ReaderThreads:
    """Threads that read, or none: then reads happen on the event loop."""

    def __init__(self, workers: int) -> None:
        self._executor = ThreadPoolExecutor(workers, "aiograd-data") if workers else None
        self._running: set[Future[Any]] = set()

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function, awaited where it is a coroutine."""
        if self._executor is None:
            result = function(*args)
        else:
            call = functools.partial(contextvars.copy_context().run, function, *args)
            future = self._executor.submit(call)
            self._running.add(future)
            future.add_done_callback(self._running.discard)
            result = await asyncio.wrap_future(future)
        return await result if inspect.isawaitable(result) and inspect.iscoroutine(result) else result

    async def aclose(self) -> None:
        """Wait for what runs and end the threads; see Note [Threads end with their epoch]."""
        if self._executor is None:
            return
        self._executor.shutdown(wait=False, cancel_futures=True)
        running = [asyncio.wrap_future(future) for future in list(self._running) if not future.done()]
        if running:
            await asyncio.wait(running)
        for each in running:
            if not each.cancelled():
                each.exception()
        self._executor.shutdown(wait=True)


async def read_ahead(reads: Iterator[Read], prefetch: int) -> AsyncIterator[LoadedBatch]:
    """Batches in the order of `reads`, up to `prefetch` of them read ahead; see Note [Backpressure]."""
    pending: deque[asyncio.Task[LoadedBatch | None]] = deque()
    try:
        while True:
            while len(pending) <= prefetch and (read := next(reads, None)) is not None:
                pending.append(asyncio.ensure_future(_of(read)))
            if not pending:
                return
            loaded = await pending[0]
            pending.popleft()
            if loaded is None:
                return
            while len(pending) < prefetch and (read := next(reads, None)) is not None:  # while the consumer works
                pending.append(asyncio.ensure_future(_of(read)))
            yield loaded
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _of(read: Read) -> LoadedBatch | None:
    return await read()
