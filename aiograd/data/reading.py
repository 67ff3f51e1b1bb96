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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from aiograd.errors import ArgumentError
from aiograd.running.exceptions import call_for_future

T = TypeVar("T")


class LoadedBatch(NamedTuple):
    """A batch, and the indices of its examples; of a stream, their positions."""

    value: Any
    indices: list[Any]


#: reads one batch; None where the stream has ended
Read = Callable[[], Awaitable[LoadedBatch | None]]


class ReaderThreads:
    """Threads that read, or none: then reads happen on the event loop.

    Args:
        workers: how many.
        is_for_plain_loop: True if a plain ``for`` reads, in which nothing can be waited for.
    """

    def __init__(self, workers: int, is_for_plain_loop: bool = False) -> None:
        self.count = workers
        self.is_for_plain_loop = is_for_plain_loop
        self._executor = ThreadPoolExecutor(workers, "aiograd-data") if workers else None
        self._running: set[Future[Any]] = set()

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function, awaited where it is a coroutine."""
        result = function(*args) if self._executor is None else await asyncio.wrap_future(self.submit(function, *args))
        return await result if inspect.isawaitable(result) and inspect.iscoroutine(result) else result

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call a function on a thread, of which there must be one."""
        if self._executor is None:
            raise ArgumentError("ReaderThreads.submit: there are no threads; call() does without")
        what = "DataLoader: the source or the collate function"
        future = self._executor.submit(contextvars.copy_context().run, call_for_future, what, function, *args)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def abandon(self) -> None:
        """End the threads when what runs has ended, without waiting."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

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
                pending.append(asyncio.ensure_future(outcome_of(read)))
            if not pending:
                return
            loaded = await pending[0]
            pending.popleft()
            if loaded is None:
                return
            while len(pending) < prefetch and (read := next(reads, None)) is not None:  # while the consumer works
                pending.append(asyncio.ensure_future(outcome_of(read)))
            yield loaded
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def outcome_of(read: Callable[[], Awaitable[T]]) -> T:
    """The outcome of a read: with a RuntimeError in the place of StopAsyncIteration, which would pass for the end of the loop over the batches."""
    try:
        return await read()
    except StopAsyncIteration as error:
        raise RuntimeError("DataLoader: the source, the batch sampler or the collate function raised StopAsyncIteration") from error


class ReadAhead:
    """Batches read by number, some of them ahead of being asked for.

    Args:
        read: reads the batch of a number.
        threads: threads that `read` uses; they end with this.
    """

    def __init__(self, read: Callable[[int], Awaitable[LoadedBatch | None]], threads: ReaderThreads) -> None:
        self._read = read
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[LoadedBatch | None]] = {}

    async def batch(self, number: int, ahead: Iterable[int]) -> LoadedBatch | None:
        """A batch; its read goes on if this is cancelled, for the next call.

        Args:
            number: its number.
            ahead: numbers of batches to read beside it.

        Returns:
            The batch; None behind the end, and where this was closed meanwhile. An error of the read is raised once: another call reads again.
        """
        for each in (number, *ahead):
            if each not in self._tasks:
                started = self._loop.create_task(outcome_of(functools.partial(self._read, each)), name=f"aiograd:batch {each}")
                started.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps no call asks for it
                self._tasks[each] = started
        task = self._tasks[number]
        if not task.done():
            await asyncio.wait([task])
        self._tasks.pop(number, None)
        return None if task.cancelled() else task.result()

    def abandon(self) -> None:
        """Cancel the reads without waiting; also from another thread."""
        self._threads.abandon()
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:  # the loop is closed, and has ended its tasks
            pass

    async def aclose(self) -> None:
        """Cancel the reads and wait for their end."""
        tasks = self._cancel()
        self._threads.abandon()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._threads.aclose()

    def _cancel(self) -> list[asyncio.Task[LoadedBatch | None]]:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        return tasks
