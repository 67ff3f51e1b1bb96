"""Executor jobs on a simulated loop: run inline at a virtual time drawn at random, or run by real threads.

Note [Inline jobs are tested as jobs of a thread]
    Inline jobs run on the thread of the loop, between two of its steps, yet code that would be wrong in a thread must stay wrong: they
    run in an empty context (a thread inherits no ContextVar, so a forgotten ``copy_context`` shows) that holds only the owner of the job,
    with no running loop (so ``get_running_loop`` raises in them as it does in a thread), and their errors end up in the future. A job
    cancelled before its start never runs; one cancelled later runs to its end and its result is dropped. Both windows are real, since
    start and delivery are two separate moments of virtual time.

Rejected: running the job inside ``submit``, before the caller went on. No thread does that, so a caller that is not yet ready for the
answer would be tested against something that cannot happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar

from aiograd.running.exceptions import for_future
from aiograd.testing.owner import bare_context

T = TypeVar("T")

#: mean of the drawn waits before a job starts and before its result arrives, in virtual seconds
MEAN_WAIT = 1e-3


class JobRunner(Protocol):
    """Runs the jobs of a `SimulatedLoop`. Implement it to inject faults: jobs that fail, come late or never come back.

    >>> def make(loop: ag.testing.SimulatedLoop) -> ag.testing.JobRunner:
    ...     return ag.testing.InlineJobs(loop)
    >>> loop = ag.testing.SimulatedLoop(executor=make)
    >>> loop.run_until_complete(loop.run_in_executor(None, len, "abc"))
    3
    >>> loop.close()
    """

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Arrange for `job` to run; never runs it before returning.

        Args:
            job: called without arguments.

        Returns:
            A future of the loop with what `job` returned or raised.

        Cancelling the future drops the result; a job that has begun runs to its end.
        """
        ...


class InlineJobs:
    """Runs each job on the loop's own thread, at a virtual time of its own.

    Args:
        loop: where jobs run.
        draws: source of the two waits of each job (exponential, mean 1 ms of virtual time), or None for jobs that take no time.

    >>> loop = ag.testing.SimulatedLoop(seed=1, executor=ag.testing.InlineJobs)
    >>> loop.run_until_complete(loop.run_in_executor(None, sum, [1, 2]))
    3
    >>> loop.close()
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, draws: Random | None = None) -> None:
        self._loop = loop
        self._draws = draws

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run `job` later, between two steps of the loop. See Note [Inline jobs are tested as jobs of a thread].

        Args:
            job: called without arguments.

        Returns:
            A future of its result. Cancelling it drops the result; a job that has begun runs to its end.
        """
        result: asyncio.Future[T] = self._loop.create_future()
        self._later(self._start, job, result)
        return result

    def _later(self, callback: Callable[..., object], *args: Any) -> None:
        if self._draws is None:
            self._loop.call_soon(callback, *args, context=bare_context())
        else:
            self._loop.call_later(self._draws.expovariate(1 / MEAN_WAIT), callback, *args, context=bare_context())

    def _start(self, job: Callable[[], T], result: asyncio.Future[T]) -> None:
        if result.cancelled():
            return
        outcome: Callable[[], None]
        asyncio.events._set_running_loop(None)
        try:
            outcome = partial(result.set_result, job())
        except BaseException as error:  # as a worker thread does: every error goes to the awaiter of the future
            outcome = partial(result.set_exception, for_future(error, "a job"))
        finally:
            asyncio.events._set_running_loop(self._loop)
        self._later(self._deliver, outcome, result)
        del job, outcome, result  # a traceback may hold on to this frame

    def _deliver(self, outcome: Callable[[], None], result: asyncio.Future[Any]) -> None:
        if not result.done():
            outcome()
