"""ComputeExecutor: the threads on which expensive rules run.

Its own rather than ``concurrent.futures``: the threads are daemons, so that a kernel that never returns cannot keep the process from
exiting, and results come back to the loop with one ``call_soon_threadsafe`` and no second future. A loop that has an
``aiograd_submit(function)`` (a simulated one) runs the jobs itself.

Note [Abandoned jobs]
    A job whose future is cancelled while it runs cannot be stopped; it might be stuck for good. Its thread is retired: another may be
    started in its place, and it ends with the job. So passes that were cancelled never keep later ones from the executor.

Note [After a fork]
    A forked child inherits the executor without its threads. It forgets them and what waited for them, and starts threads of its own when it
    is next used, so passes in a child just work.
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

Job: TypeAlias = "tuple[contextvars.Context, Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]"

_names = itertools.count(1)
_executors: weakref.WeakSet[ComputeExecutor] = weakref.WeakSet()


class ComputeExecutor:
    """A number of daemon threads, started when first needed. All methods are for the thread of the loop.

    Args:
        threads: how many jobs may run at once (abandoned ones not counted); by default one per core.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or os.cpu_count() or 1
        self._closed = False
        self._start_afresh()
        _executors.add(self)

    def _start_afresh(self) -> None:
        """No threads and no jobs."""
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lanes: list[_Lane] = []
        #: ends the threads of an executor that nobody refers to any more
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._lanes)
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
        self._start_lane()
        return future

    def _start_lane(self) -> None:
        """Start a thread if a job waits for one and there may be another."""
        if self._jobs.qsize() == 0:
            return
        self._lanes[:] = [lane for lane in self._lanes if lane.is_alive()]
        if sum(not lane.is_retired for lane in self._lanes) < self.threads:
            lane = _Lane(self._jobs)
            self._lanes.append(lane)
            lane.start()

    def _retire(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled() and not self._closed:
            for lane in self._lanes:
                if lane.future is future:
                    lane.is_retired = True
            self._start_lane()

    def close(self) -> list[threading.Thread]:
        """Take no more jobs and end the threads once they are idle; returns those still running."""
        self._closed = True
        self._finalizer()
        return [lane for lane in self._lanes if lane.is_alive()]


def _forget_threads() -> None:
    """In a forked child; see Note [After a fork]."""
    for executor in list(_executors):
        executor._finalizer.detach()
        executor._start_afresh()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


class _Lane(threading.Thread):
    """One thread."""

    def __init__(self, jobs: SimpleQueue[Job | None]) -> None:
        super().__init__(name=f"aiograd-compute-{next(_names)}", daemon=True)
        self._jobs = jobs
        #: of the job that is running
        self.future: asyncio.Future[Any] | None = None
        #: ends with the job that is running
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
            # whoever gets the result is its only owner: nothing here refers to it once `_settle` has emptied the list
            self.future = None
            del context, function, future
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits for the result
                loop.call_soon_threadsafe(_settle, outcome)
        self.future = None
        return True


def _stop(jobs: SimpleQueue[Job | None], lanes: list[_Lane]) -> None:
    for _ in lanes:
        jobs.put(None)


def _settle(outcome: list[Any]) -> None:
    error, result, future = outcome.pop(), outcome.pop(), outcome.pop()
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
