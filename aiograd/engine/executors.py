"""ComputeExecutor: the threads on which expensive rules run.

Used instead of ``concurrent.futures`` because the threads are daemons, so that a kernel that never returns cannot keep the process from
exiting, and results come back to the loop with one ``call_soon_threadsafe`` and no second future. A loop that has an
``aiograd_submit(function)`` (a simulated one) runs the jobs itself.

Note [Abandoned jobs]
    A job that runs when its future is cancelled cannot be stopped; it might never return. Its thread is retired: another may be
    started in its place, and it ends with the job. So passes that were cancelled never keep later ones from the executor.

Note [After a fork]
    A forked child inherits the executor without its threads. It drops the inherited threads and queued jobs, and starts threads of its own when it
    is next used, so passes in a child work.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

from aiograd.errors import EngineClosedError
from aiograd.running.exceptions import for_future

Job: TypeAlias = "tuple[contextvars.Context, Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]"

_names = itertools.count(1)
_executors: weakref.WeakSet[ComputeExecutor] = weakref.WeakSet()


class ComputeExecutor:
    """A number of daemon threads, started when first needed. All methods are for the thread of the loop.

    Args:
        threads: how many jobs may run at once (abandoned ones not counted); by default one per core.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads: int = threads or os.cpu_count() or 1
        self._closed = False
        self._start_afresh()
        _executors.add(self)

    def _start_afresh(self) -> None:
        """Start with no threads and no jobs."""
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[_ExecutorThread] = []
        #: ends the threads when the executor is garbage-collected
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._threads)
        self._finalizer.atexit = False

    def submit(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run ``function`` in `context` on a thread; the future belongs to `loop`.

        Cancelling the future abandons the job: it runs to its end and its result is dropped. See Note [Abandoned jobs].

        Raises:
            EngineClosedError: after `close`.
        """
        if self._closed:
            raise EngineClosedError("submitting work to an engine that has been closed; enter the Engine again or use the default one")
        simulated = getattr(loop, "aiograd_submit", None)
        if simulated is not None:
            return simulated(functools.partial(context.run, function))  # type: ignore[no-any-return]
        future = loop.create_future()
        future.add_done_callback(self._retire)
        self._jobs.put((context, function, loop, future))
        self._start_thread()
        return future

    def has_waiting(self) -> bool:
        """True if a job waits for a thread."""
        return self._jobs.qsize() > 0

    def _start_thread(self) -> None:
        """Start a thread if a job waits and the limit of threads is not reached."""
        if self._jobs.qsize() == 0:
            return
        self._threads[:] = [thread for thread in self._threads if thread.is_alive()]
        if sum(not thread.is_retired for thread in self._threads) < self.threads:
            thread = _ExecutorThread(self._jobs)
            self._threads.append(thread)
            thread.start()

    def _retire(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled() and not self._closed:
            for thread in self._threads:
                if thread.future is future:
                    thread.is_retired = True
            self._start_thread()

    def close(self) -> list[threading.Thread]:
        """Take no more jobs and end the threads once they are idle; returns those still running."""
        self._closed = True
        self._finalizer()
        return [thread for thread in self._threads if thread.is_alive()]


def _forget_threads() -> None:
    """Drop the inherited threads of every executor in a forked child; see Note [After a fork]."""
    for executor in list(_executors):
        executor._finalizer.detach()
        executor._start_afresh()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


class _ExecutorThread(threading.Thread):
    """A daemon thread of the executor."""

    def __init__(self, jobs: SimpleQueue[Job | None]) -> None:
        super().__init__(name=f"aiograd-compute-{next(_names)}", daemon=True)
        self._jobs = jobs
        #: the future of the job that is running
        self.future: asyncio.Future[Any] | None = None
        #: True if the thread ends with the job that is running
        self.is_retired = False

    def run(self) -> None:
        """Run jobs until told to stop."""
        while not self.is_retired and self._perform():
            pass

    def _perform(self) -> bool:
        job = self._jobs.get()
        if job is None:
            return False
        context, function, loop, future = job
        del job
        self.future = future
        if not future.cancelled():
            outcome: list[Any] = [future]
            try:
                outcome += (context.run(function), None)
            except BaseException as error:
                outcome += (None, error)
            # the receiver of the result is its only owner: nothing here refers to it once `_settle` has emptied the list
            self.future = None
            del context, function, future
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nothing waits for the result
                loop.call_soon_threadsafe(_settle, outcome)
        self.future = None
        return True


def is_executor_thread() -> bool:
    """True if the running code is a job of some executor."""
    return isinstance(threading.current_thread(), _ExecutorThread)


def _stop(jobs: SimpleQueue[Job | None], threads: list[_ExecutorThread]) -> None:
    for _ in threads:
        jobs.put(None)


def _settle(outcome: list[Any]) -> None:
    error, result, future = outcome.pop(), outcome.pop(), outcome.pop()
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(for_future(error, "a rule"))
