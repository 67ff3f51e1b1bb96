"""Notification that a device has come to an event, without polling and without Python on a thread of the driver.

Note [A C function of the right shape]
    The driver can call a C function ``void (void *)`` when a stream has come to a place. It does so holding a lock of its own, so that
    Python there, which needs the interpreter's lock, would sooner or later wait for a thread that holds that and wants the driver's.
    ``sem_post`` of the C library takes one pointer, never blocks and takes no lock: the driver calls it on a semaphore that one thread of ours waits
    for. That thread looks at the oldest event of each stream and calls back for each completed event.

Note [A device that fails]
    A stream that fails never comes to its host functions. So the thread also looks at the events each `HEARTBEAT` seconds while it has any, and
    calls back for events that report an error: a read of the data raises it.

Rejected: Python callbacks on the driver's thread (the two locks); a compiled function that writes to an eventfd (the same, for the price of
a compiler at the start of each process: one that has three arguments to fill in is needed); one blocking wait for each event (a thread each).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

log = logging.getLogger("aiograd.cuda")

#: seconds between looks at events without a notification
HEARTBEAT = 0.5
#: bytes that hold a semaphore on every platform of glibc and musl
_SEMAPHORE_SIZE = 64

_Callback = Callable[[], None]


class Completions(Protocol):
    """Calls functions back when events complete."""

    def notify(self, stream: Any, event: Any, callback: _Callback) -> None:
        """Call back once the device has reached an event just recorded on a stream, or has failed."""

    def close(self) -> None:
        """End the threads after the outstanding callbacks. Idempotent."""


class Semaphore:
    """A semaphore of the C library, which C code may post to by address."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._memory = ctypes.create_string_buffer(_SEMAPHORE_SIZE)
        self.address = ctypes.addressof(self._memory)
        self._wait_until = library.sem_timedwait
        self._wait_until.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._post = library.sem_post
        self._post.argtypes = (ctypes.c_void_p,)
        library.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        if library.sem_init(self.address, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init failed")
        #: of a C function that posts
        self.post_address = ctypes.cast(library.sem_post, ctypes.c_void_p).value or 0

    def post(self) -> None:
        """Let one `wait` go on."""
        self._post(self.address)

    def wait(self, seconds: float) -> None:
        """Return after a post, or after so many seconds; other Python threads run."""
        deadline = time.time_ns() + int(seconds * 1e9)
        self._wait_until(self.address, ctypes.byref((ctypes.c_long * 2)(*divmod(deadline, 10**9))))


class HostFunctionCompletions:
    """Completions reported by the device: a host function behind each event.

    Args:
        call_on_host: lets a stream call a C function by address, with an argument.
        is_done: returns True if an event has completed; raises if the device has failed.
        name: of the thread.
        heartbeat: seconds.
    """

    def __init__(
        self, call_on_host: Callable[[Any, int, int], None], is_done: Callable[[Any], bool], name: str, heartbeat: float = HEARTBEAT
    ) -> None:
        self._call_on_host = call_on_host
        self._is_done = is_done
        self._name = name
        self._heartbeat = heartbeat
        self._semaphore = Semaphore()
        self._lock = threading.Lock()
        #: stream -> what waits for it, oldest first
        self._waiting: dict[int, deque[tuple[Any, _Callback]]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def notify(self, stream: Any, event: Any, callback: _Callback) -> None:
        """See `Completions`. On the device's thread.

        Raises:
            CallError: the device refused; nothing is outstanding then.
        """
        entry = (event, callback)
        with self._lock:
            waiting = self._waiting.setdefault(id(stream), deque())
            waiting.append(entry)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._call_on_host(stream, self._semaphore.post_address, self._semaphore.address)
        except BaseException:
            with self._lock:
                if entry in waiting:
                    waiting.remove(entry)
                else:
                    return  # called back already, for the same reason
            raise

    def close(self) -> None:
        """See `Completions`. Everything on the device has been waited for, or is lost."""
        self._closed = True
        self._semaphore.post()
        if self._thread is not None:
            self._thread.join()
        for _, callback in self._take(lambda event: True):
            _call(callback)

    def _work(self) -> None:
        while not self._closed:
            self._semaphore.wait(self._heartbeat)
            for _, callback in self._take(self._has_come):
                _call(callback)

    def _has_come(self, event: Any) -> bool:
        try:
            return self._is_done(event)
        except Exception:  # the device failed: a read of the data raises it
            return True

    def _take(self, has_come: Callable[[Any], bool]) -> list[tuple[Any, _Callback]]:
        taken: list[tuple[Any, _Callback]] = []
        with self._lock:
            for stream, waiting in list(self._waiting.items()):
                while waiting and has_come(waiting[0][0]):
                    taken.append(waiting.popleft())
                if not waiting:
                    del self._waiting[stream]
        return taken


class WaitingThreads:
    """Completions on every platform: a thread for each stream that blocks on its events in turn.

    Args:
        wait: blocks until an event has come to pass, other Python threads running; raises where the device failed.
        name: of the threads.
    """

    def __init__(self, wait: Callable[[Any], None], name: str) -> None:
        self._wait = wait
        self._name = name
        self._threads: dict[int, tuple[threading.Thread, SimpleQueue[tuple[Any, _Callback] | None]]] = {}

    def notify(self, stream: Any, event: Any, callback: _Callback) -> None:
        """See `Completions`."""
        found = self._threads.get(id(stream))
        if found is None:
            queue: SimpleQueue[tuple[Any, _Callback] | None] = SimpleQueue()
            thread = threading.Thread(target=self._work, args=(queue,), name=f"{self._name}-{len(self._threads)}", daemon=True)
            found = self._threads[id(stream)] = (thread, queue)
            thread.start()
        found[1].put((event, callback))

    def close(self) -> None:
        """See `Completions`."""
        for _, queue in self._threads.values():
            queue.put(None)
        for thread, _ in self._threads.values():
            thread.join()
        self._threads.clear()

    def _work(self, queue: SimpleQueue[tuple[Any, _Callback] | None]) -> None:
        while (job := queue.get()) is not None:
            try:
                self._wait(job[0])
            except Exception:  # the device failed: a read of the data raises it
                log.debug("waiting for the device failed", exc_info=True)
            _call(job[1])
            del job


def _call(callback: _Callback) -> None:
    try:
        callback()
    except Exception:
        log.exception("what was to be called when the device was done failed")
