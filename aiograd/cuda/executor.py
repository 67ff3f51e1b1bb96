"""The thread of a device: does every allocation, launch and free, in the order in which they were asked for.

Note [Jobs]
    A job is the performing of a command, with errors kept in the buffers that it writes, or a function, with its result for a future. Functions
    may read arrays; commands asked for by the thread itself, from within a function, are performed on the spot, which is their place in the
    order. Functions that only read finished data (`urgent`) go before all others.

Note [Waiting]
    To wait for an array, a caller gives the thread a last job: record an event behind the queued work and tell the driver to call back. The driver
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

from aiograd.cuda.driver.protocol import DeviceDriver
from aiograd.cuda.stream_state import StreamState
from aiograd.errors import DeviceError

log = logging.getLogger("aiograd.cuda")

_DeviceJob = Callable[[], None]


class DeviceThread:
    """A daemon thread, started with the first job.

    Args:
        name: of the thread.
        driver: the driver of the device.
        stream_states: the streams of the device, marked whenever there is nothing to do.
    """

    def __init__(self, name: str, driver: DeviceDriver, stream_states: weakref.WeakSet[StreamState]) -> None:
        self.name = name
        self._driver = driver
        self._stream_states = stream_states
        self._jobs: SimpleQueue[_DeviceJob | None] = SimpleQueue()
        self._urgent: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    def is_current(self) -> bool:
        """True if the calling thread is this one."""
        return threading.current_thread() is self._thread

    def perform(self, job: _DeviceJob) -> None:
        """Run a function for its effect, in its order; returns at once, except on the thread itself."""
        if self.is_current():
            job()
        else:
            self._put(job)

    def release(self, function: Callable[[], None]) -> None:
        """Run a function that gives something back, after everything before; may be called from a finalizer on any thread."""
        if not self._closed:
            self._jobs.put(function)

    def submit(self, function: Callable[[], Any], *, urgent: bool = False) -> Future[Any]:
        """Run a function on the thread.

        Args:
            urgent: before the queue: for a function that only reads finished data.

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
            except BaseException as error:  # the waiting caller gets every error
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

    def when_done(self, stream_and_count: Callable[[], tuple[StreamState, int] | None], callback: Callable[[], None]) -> None:
        """Call back, from some thread, once the device has done the work that was queued before."""

        def job() -> None:
            place = stream_and_count()
            if place is None:
                callback()
                return
            stream_state, count = place
            try:
                if stream_state.is_done(count):
                    callback()
                else:
                    self._driver.notify(stream_state.handle, stream_state.mark(), callback)
            except BaseException:  # the device is lost: reading the array will raise that
                callback()

        self.perform(job)

    async def wait(self, stream_and_count: Callable[[], tuple[StreamState, int] | None]) -> None:
        """As `when_done`, for a coroutine. Cancelling stops the waiting only: the device goes on, and keeps the memory that it uses."""
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

        self.when_done(stream_and_count, callback)
        await waiter

    def block(self, stream_and_count: Callable[[], tuple[StreamState, int] | None]) -> None:
        """As `when_done`, blocking the calling thread."""
        if self.is_current():
            place = stream_and_count()
            if place is not None:
                self._driver.wait(place[0].mark())
            return
        done = threading.Event()
        self.when_done(stream_and_count, done.set)
        done.wait()

    def close(self) -> None:
        """Finish the queued jobs, then end the thread. Idempotent."""
        self._closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._jobs.put(None)
            thread.join()

    def _put(self, job: _DeviceJob) -> None:
        if self._closed:
            raise DeviceError(f"{self.name} has been closed")
        self._jobs.put(job)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                    self._thread.start()

    def _work(self) -> None:
        jobs, urgent = self._jobs, self._urgent
        while True:
            if jobs.empty():
                _attempt(self._mark)
            job = jobs.get()
            while urgent:
                urgent.popleft()()
            if job is None:
                return
            _attempt(job)
            del job  # it refers to its arguments

    def _mark(self) -> None:
        for stream_state in list(self._stream_states):
            if stream_state.count > stream_state.completed and stream_state.error is None:
                stream_state.mark()


def _attempt(function: Callable[[], None]) -> None:
    """Run a job without a waiting caller: recording events while idle, and releasing.

    A lost device fails at that; its thread goes on, since waiting callers have to be told.
    """
    try:
        function()
    except DeviceError:
        log.debug("a device that has failed", exc_info=True)
    except Exception:
        log.exception("something that no task waits for failed on the thread of a device")


def _nothing() -> None:
    pass


def _expected() -> Callable[[], None]:
    """Tell a simulated loop (with a virtual clock) that a thread will call it; returns a function to call once it has."""
    loop: Any = asyncio._get_running_loop()
    external_work = getattr(loop, "external_work", None)
    if external_work is None:
        return _nothing
    work = external_work()
    work.__enter__()

    def answered() -> None:
        try:
            loop.call_soon_threadsafe(work.__exit__, None, None, None)
        except RuntimeError:  # the loop is closed and waits for no thread
            return

    return answered
