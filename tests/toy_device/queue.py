"""The two queues a toy device can have: a thread of its own, or jobs on a simulated loop's virtual clock.

Note [Held queues]
    A test that waits for "the device is busy now" by sleeping is a test that sometimes fails. So a queue can be held: it takes jobs and
    starts none, until it is released for good or for a number of jobs. Events while a device is slow are then a matter of order,
    not of time.

Note [A simulated device]
    On a simulated loop a job runs between two steps of the loop, at a virtual time that the delays decide, with no running loop and in no
    context of anybody's, as it would be on a thread. Runs with one seed are then equal to the step. Where nobody runs the loop (a
    plain program reads a value that is pending) the queue is worked off on the spot.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, Protocol

from aiograd.errors import DeviceError
from aiograd.testing.clock import SimulatedLoop

Job = tuple[Callable[[], Any], "Future[Any]", Callable[[], None] | None]


class Queue(Protocol):
    """Runs jobs one after the other, in order of submission."""

    #: the number of jobs that were started
    started: int
    #: True if a thread runs them, so that a simulated loop has to be told to wait for it
    on_thread: bool

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Append a job."""

    def is_current(self) -> bool:
        """True if the calling code is part of a job of this queue."""

    def wait(self, future: Future[Any]) -> None:
        """Block until a job is done."""

    def hold(self) -> None:
        """Start no further job."""

    def release(self, jobs: int | None) -> None:
        """Start so many jobs, or go on for good."""

    def close(self) -> None:
        """Fail what is queued and end. Idempotent."""


class ThreadQueue:
    """A daemon thread, started with the first job.

    Args:
        name: of the thread.
        delay: called before each job; seconds to wait.
    """

    on_thread = True

    def __init__(self, name: str, delay: Callable[[], float]) -> None:
        self.started = 0
        self._name = name
        self._delay = delay
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._permits: int | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Append a job. On a simulated loop that loop is told to expect an answer from outside."""
        future: Future[Any] = Future()
        job = (function, future, _expected(asyncio._get_running_loop()))
        with self._changed:
            if self._closing.is_set():
                raise DeviceError(f"{self._name} has been closed")
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return future

    def is_current(self) -> bool:
        """True if the calling thread is the device's."""
        return threading.current_thread() is self._thread

    def wait(self, future: Future[Any]) -> None:
        """Block until a job is done; its exception stays in the future."""
        future.exception()

    def hold(self) -> None:
        """Start no further job."""
        with self._changed:
            self._permits = 0

    def release(self, jobs: int | None) -> None:
        """Start so many jobs, or go on for good."""
        with self._changed:
            self._permits = None if jobs is None else (self._permits or 0) + jobs
            self._changed.notify_all()

    def close(self) -> None:
        """Fail what is queued, let the running job end, join the thread."""
        with self._changed:
            self._closing.set()
            jobs, thread = list(self._jobs), self._thread
            self._jobs.clear()
            self._changed.notify_all()
        for job in jobs:
            _fail(job, self._name)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._closing.is_set():
                if self._jobs and self._permits != 0:
                    if self._permits is not None:
                        self._permits -= 1
                    return self._jobs.popleft()
                self._changed.wait()
        return None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            delay = self._delay()
            if delay:
                self._closing.wait(delay)
            self.started += 1
            _run(job)
            del job  # it refers to its arguments and results


class SimulatedQueue:
    """Jobs on the virtual clock of a simulated loop; see Note [A simulated device].

    Args:
        name: for messages.
        delay: virtual seconds that each job takes.
        loop: where they run.
    """

    on_thread = False

    def __init__(self, name: str, delay: Callable[[], float], loop: SimulatedLoop) -> None:
        self.started = 0
        self._name = name
        self._delay = delay
        self._loop = loop
        self._jobs: deque[Job] = deque()
        self._permits: int | None = None
        self._timer: asyncio.Handle | None = None
        self._current = False
        self._closed = False

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Append a job."""
        if self._closed:
            raise DeviceError(f"{self._name} has been closed")
        future: Future[Any] = Future()
        self._jobs.append((function, future, None))
        self._schedule()
        return future

    def is_current(self) -> bool:
        """True if a job of this queue is what runs now."""
        return self._current

    def wait(self, future: Future[Any]) -> None:
        """Work off the queue until a job is done."""
        while not future.done():
            if not self._jobs or self._permits == 0:
                raise DeviceError(f"{self._name} is held: waiting for it here would never end. Release it first, or `await` the tensor.")
            self._step()

    def hold(self) -> None:
        """Start no further job."""
        self._permits = 0

    def release(self, jobs: int | None) -> None:
        """Start so many jobs, or go on for good."""
        self._permits = None if jobs is None else (self._permits or 0) + jobs
        self._schedule()

    def close(self) -> None:
        """Fail what is queued."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        while self._jobs:
            _fail(self._jobs.popleft(), self._name)

    def _schedule(self) -> None:
        if self._timer is None and self._jobs and self._permits != 0 and not self._loop.is_closed():
            self._timer = self._loop.call_later(self._delay(), self._due, context=contextvars.Context())

    def _due(self) -> None:
        self._timer = None
        if self._jobs and self._permits != 0:
            running = asyncio._get_running_loop()
            asyncio._set_running_loop(None)
            try:
                self._step()
            finally:
                asyncio._set_running_loop(running)
        self._schedule()

    def _step(self) -> None:
        if self._permits is not None:
            self._permits -= 1
        self.started += 1
        self._current = True
        try:
            _run(self._jobs.popleft())
        finally:
            self._current = False


def _run(job: Job) -> None:
    function, future, answered = job
    try:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:  # everything goes to whoever waits for the job
            future.set_exception(error)
        else:
            future.set_result(result)
    finally:
        if answered is not None:
            answered()


def _fail(job: Job, name: str) -> None:
    _, future, answered = job
    if future.set_running_or_notify_cancel():
        future.set_exception(DeviceError(f"{name} was closed before it came to this job"))
    if answered is not None:
        answered()


def _expected(loop: asyncio.AbstractEventLoop | None) -> Callable[[], None] | None:
    """Tell a simulated loop that a thread will call it; returns what to call once that has happened."""
    if not isinstance(loop, SimulatedLoop):
        return None
    work = loop.external_work()
    work.__enter__()

    def answered() -> None:
        try:
            loop.call_soon_threadsafe(work.__exit__, None, None, None)
        except RuntimeError:  # the loop is closed and waits for nobody
            return

    return answered


async def wait_for(future: Future[Any], queue: Queue) -> None:
    """Wait until a job is done, without retrieving what came of it. Cancelling stops the waiting only."""
    if future.done():
        return
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def done(_: Future[Any]) -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:  # the waiting loop is gone
            return

    expected = loop.external_work() if queue.on_thread and isinstance(loop, SimulatedLoop) else nullcontext()
    with expected:
        future.add_done_callback(done)
        await waiter
