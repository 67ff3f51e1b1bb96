"""The thread of a device: does every allocation, launch and free, in the order in which they were asked for.

Note [Jobs]
    A job is a command, whose failure stays with the buffers it writes, or a function, whose result goes to a future. Functions may read
    arrays; commands asked for by the thread itself, from within a function, are performed on the spot, which is their place in the order.
    What only reads finished data (`urgent`) goes before everything else.

Note [Waiting]
    Whoever waits for an array gives the thread a last job: record an event behind what is queued and tell the driver to call back. The driver
    does so from wherever it can without holding up the device, and the waiting loop is woken with ``call_soon_threadsafe``.

Source: one thread per device, as in PyTorch's engine (Note [Streaming backwards]), but for forward work as well: finalizers run on any
thread, and a driver called from the event loop would block it whenever it takes its lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from aiograd.cuda.command import Command, Lane
from aiograd.cuda.driver.protocol import Driver
from aiograd.errors import DeviceError

log = logging.getLogger("aiograd.cuda")

_Job = Command | Callable[[], None]


class DeviceThread:
    """A daemon thread, started with the first job.

    Args:
        name: of the thread.
        driver: what it gives commands to.
        lanes: the streams of the device, marked whenever there is nothing to do.
    """

    def __init__(self, name: str, driver: Driver, lanes: weakref.WeakSet[Lane]) -> None:
        self.name = name
        self._driver = driver
        self._lanes = lanes
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._urgent: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.current_thread() is self._thread

    def enqueue(self, command: Command) -> None:
        """Give the device something to do; returns at once, except on the thread itself."""
        if self.is_current():
            command.perform(self._driver)
            return
        self._put(command)

    def release(self, function: Callable[[], None]) -> None:
        """Run a function that gives something back, after everything before; may be called from a finalizer on any thread."""
        if not self._closed:
            self._jobs.put(function)

    def submit(self, function: Callable[[], Any], *, urgent: bool = False) -> Future[Any]:
        """Run a function on the thread.

        Args:
            urgent: before what is queued: for what only reads finished data.

        Raises:
            DeviceError: the device has been closed.
        """
        future: Future[Any] = Future()
        answered = _expected()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                answered()
                return
            try:
                result = function()
            except BaseException as error:  # everything goes to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)
            answered()

        if self.is_current():
            job()
        elif urgent:
            self._urgent.append(job)
            self._put(_nothing)
        else:
            self._put(job)
        return future

    def when_done(self, lane_and_count: Callable[[], tuple[Lane, int] | None], callback: Callable[[], None]) -> None:
        """Call back, from some thread, once the device has come to a place that is known when everything queued before has been given to it."""

        def job() -> None:
            place = lane_and_count()
            if place is None:
                callback()
                return
            lane, count = place
            try:
                if lane.is_done(count):
                    callback()
                else:
                    self._driver.notify(lane.handle, lane.mark(), callback)
            except BaseException:  # the device is lost: whoever waits will find that out by reading
                callback()

        if self.is_current():
            job()
        else:
            self._put(job)

    async def wait(self, lane_and_count: Callable[[], tuple[Lane, int] | None]) -> None:
        """As `when_done`, for a coroutine. Cancelling stops the waiting only: the device goes on, and keeps what it uses."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        answered = _expected()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def callback() -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the waiting loop is gone
                return
            answered()

        self.when_done(lane_and_count, callback)
        await waiter

    def block(self, lane_and_count: Callable[[], tuple[Lane, int] | None]) -> None:
        """As `when_done`, blocking the calling thread."""
        if self.is_current():
            place = lane_and_count()
            if place is not None:
                self._driver.wait(place[0].mark())
            return
        done = threading.Event()
        self.when_done(lane_and_count, done.set)
        done.wait()

    def close(self) -> None:
        """Do what is queued, then end the thread. Idempotent."""
        self._closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._jobs.put(None)
            thread.join()

    def _put(self, job: _Job) -> None:
        if self._closed:
            raise DeviceError(f"{self.name} has been closed")
        self._jobs.put(job)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                    self._thread.start()

    def _work(self) -> None:
        jobs, urgent, driver = self._jobs, self._urgent, self._driver
        while True:
            if jobs.empty():
                _attempt(self._mark)
            job = jobs.get()
            while urgent:
                urgent.popleft()()
            if job is None:
                return
            if isinstance(job, Command):
                job.perform(driver)
            else:
                _attempt(job)
            del job  # it refers to its arguments

    def _mark(self) -> None:
        for lane in list(self._lanes):
            if lane.count > lane.completed and lane.error is None:
                lane.mark()


def _attempt(function: Callable[[], None]) -> None:
    """Run what nobody waits for: events when there is nothing else to do, and giving back. A device that is lost fails at that, and its thread
    goes on, for those who wait have to be told."""
    try:
        function()
    except DeviceError:
        log.debug("a device that has failed", exc_info=True)
    except Exception:
        log.exception("something that nobody waits for failed on the thread of a device")


def _nothing() -> None:
    pass


def _expected() -> Callable[[], None]:
    """Tell a simulated loop, whose clock is virtual, that a thread will call it; returns what to call once it has."""
    loop: Any = asyncio._get_running_loop()
    external_work = getattr(loop, "external_work", None)
    if external_work is None:
        return _nothing
    work = external_work()
    work.__enter__()

    def answered() -> None:
        try:
            loop.call_soon_threadsafe(work.__exit__, None, None, None)
        except RuntimeError:  # the loop is closed and waits for nobody
            return

    return answered
