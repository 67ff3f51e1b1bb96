"""ComputeExecutor: the threads on which expensive rules run.

Its own rather than ``concurrent.futures``: the threads are daemons, so that a kernel that never returns cannot keep the process from
exiting, and results come back to the loop with one ``call_soon_threadsafe`` and no second future. A loop that has an
``aiograd_submit(function)`` (a simulated one) runs the jobs itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

from aiograd.errors import EngineClosedError

Job: TypeAlias = "tuple[contextvars.Context, Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]"

_names = itertools.count(1)


class ComputeExecutor:
    """A fixed number of daemon threads, started when first needed.

    Args:
        threads: how many; by default one per core.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or os.cpu_count() or 1
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        #: ends the threads of an executor that nobody refers to any more
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._started)
        self._finalizer.atexit = False

    def submit(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run ``function`` in `context` on a thread; the future belongs to `loop`.

        Cancelling the future abandons the job: it runs to its end and its result is dropped.

        Raises:
            EngineClosedError: after `close`.
        """
        if self._closed:
            raise EngineClosedError("submitting work to an engine that has been closed; enter the Engine again or use the default one")
        simulated = getattr(loop, "aiograd_submit", None)
        if simulated is not None:
            return simulated(lambda: context.run(function))  # type: ignore[no-any-return]
        future = loop.create_future()
        self._jobs.put((context, function, loop, future))
        if len(self._started) < self.threads and self._jobs.qsize() > 0:
            thread = threading.Thread(target=_work, args=(self._jobs,), name=f"aiograd-compute-{next(_names)}", daemon=True)
            self._started.append(thread)
            thread.start()
        return future

    def close(self) -> list[threading.Thread]:
        """Take no more jobs and end the threads once they are idle; returns those still running."""
        self._closed = True
        self._finalizer()
        return [thread for thread in self._started if thread.is_alive()]


def _stop(jobs: SimpleQueue[Job | None], started: list[threading.Thread]) -> None:
    for _ in started:
        jobs.put(None)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        context, function, loop, future = job
        try:
            if future.cancelled():
                continue
            result, error = None, None
            try:
                result = context.run(function)
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                # the loop has been closed: nobody waits for the result
                continue
        finally:
            del job, context, function, loop, future
            result = error = None


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):
        wrapped = RuntimeError("a rule raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)
