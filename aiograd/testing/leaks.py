"""LeakCheck: finds asyncio tasks, threads and open file descriptors that a test has left behind.

`LeakCheck` lists them when it is made and compares when asked. It does not depend on pytest; the fixtures are in ``pytest_aiograd``.

Note [What counts as left behind]
    A task that ends within a few turns of the loop, or a thread that ends within the grace period, was on its way out and is no leak.
    Threads are waited for by joining them, so nothing sleeps. Threads that Python only knows as foreign (they belong to BLAS or TBB
    pools that live as long as the process) are not counted, nor are threads of compiled kernels, which belong to the process and are
    stopped by `aiograd.kernels.stop_threads` and at exit, nor the thread that makes native programs, which ends by itself.
    Descriptors are compared as a multiset of their files, since numbers
    are reused; before one is called a leak the garbage collector has its say, because an object in a cycle is late, not lost (that it
    was not closed is a ResourceWarning, which a strict test run reports by itself). Those of the process's own (`LASTING_DESCRIPTORS`) are not
    counted, nor is the pipe for signals that the first loop of uvloop opens for the whole process: the first check makes such a loop beforehand.
    Where neither ``/proc/self/fd`` nor ``/dev/fd`` exists, descriptors are not checked.

Source: the ``clean`` context manager of dask.distributed's test suite.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from aiograd.compiler.native.tiers import compiler
from aiograd.engine.run.main import uvloop_factory
from aiograd.errors import AiogradError
from aiograd.kernels import owned_threads
from aiograd.running.lasting import LASTING_DESCRIPTORS
from aiograd.testing.suspension import describe_task

#: turns of the loop that a cancelled task may take to end
TURNS = 10
#: threads of the test runner's own
RUNNER_THREADS = ("pytest_timeout",)


class LeakError(AiogradError, RuntimeError):
    """Tasks, threads or file descriptors were left behind."""


@dataclass(frozen=True, slots=True)
class Leaks:
    """The leaks, one line each; false if there are none.

    Attributes:
        tasks: descriptions of tasks.
        threads: descriptions of threads.
        descriptors: where file descriptors lead.

    >>> bool(ag.testing.Leaks()), bool(ag.testing.Leaks(tasks=("main",)))
    (False, True)
    """

    tasks: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    descriptors: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tasks or self.threads or self.descriptors)

    def __str__(self) -> str:
        kinds = (("tasks", self.tasks), ("threads", self.threads), ("file descriptors", self.descriptors))
        parts = [f"{kind} left behind ({len(lines)}):" + "".join(f"\n  {line}" for line in lines) for kind, lines in kinds if lines]
        return "\n".join(parts) or "nothing left behind"


class LeakCheck:
    """Takes stock when made; finds later additions. Usable with ``with`` (threads, descriptors) and ``async with`` (tasks too).

    Args:
        grace: how long all new threads together may take to end, in real seconds.

    >>> with ag.testing.LeakCheck():
    ...     sum(range(3))
    3
    """

    def __init__(self, *, grace: float = 2.0) -> None:
        _open_pipe_of_uvloop()
        self._grace = grace
        self._tasks = _tasks()
        self._threads = set(threading.enumerate())
        self._descriptors = _descriptors()

    def find(self) -> Leaks:
        """Threads and descriptors left behind, after the grace period.

        Returns:
            The leaks; false if there are none.
        """
        threads = self._new_threads()
        descriptors = self._new_descriptors()
        if descriptors:
            for thread in compiler.threads():  # it has a file of its cache open now and then
                thread.join(self._grace)
            gc.collect()
            descriptors = self._new_descriptors()
        return Leaks(threads=tuple(map(_describe_thread, threads)), descriptors=tuple(sorted(descriptors.elements())))

    async def find_tasks(self) -> Leaks:
        """Tasks left on the running loop, after a few turns. Cancelling this call changes nothing.

        Returns:
            The leaks; false if there are none.

        >>> check = ag.testing.LeakCheck()
        >>> await check.find_tasks()
        Leaks(tasks=(), threads=(), descriptors=())
        """
        left = _tasks() - self._tasks
        for _ in range(TURNS):
            if not left:
                return Leaks()
            await asyncio.sleep(0)
            left = {task for task in left if not task.done()}
        return Leaks(tasks=tuple(sorted(map(describe_task, left))))

    def _new_threads(self) -> list[threading.Thread]:
        deadline = time.monotonic() + self._grace
        left = []
        known = self._threads.union(owned_threads(), compiler.threads())
        for thread in threading.enumerate():
            if thread in known or isinstance(thread, threading._DummyThread) or thread.name.startswith(RUNNER_THREADS):
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                left.append(thread)
        return left

    def _new_descriptors(self) -> Counter[str]:
        return _descriptors() - self._descriptors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            refuse(self.find())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            tasks = await self.find_tasks()
            rest = self.find()
            refuse(Leaks(tasks.tasks, rest.threads, rest.descriptors))


def refuse(leaks: Leaks) -> None:
    """Raise `LeakError` if anything was left behind."""
    if leaks:
        raise LeakError(f"{leaks}\nAwait or cancel tasks, close engines, loops, sessions and files before the end.")


@functools.cache
def _open_pipe_of_uvloop() -> None:
    make = uvloop_factory()
    if make is not None:
        make().close()


def _tasks() -> set[asyncio.Task[Any]]:
    try:
        return asyncio.all_tasks() - {asyncio.current_task()}
    except RuntimeError:  # no running loop
        return set()


def _describe_thread(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    where = "" if frame is None else f" at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
    return f"{thread.name}{' (daemon)' if thread.daemon else ''}{where}"


def _descriptors() -> Counter[str]:
    """The targets of the open descriptors; empty where the system does not list them."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            numbers = os.listdir(folder)
        except OSError:
            continue
        return Counter(_targets(folder, numbers))
    return Counter()


def _targets(folder: str, numbers: Iterable[str]) -> Iterable[str]:
    for number in numbers:
        if int(number) in LASTING_DESCRIPTORS:
            continue
        try:
            os.fstat(int(number))  # the descriptor that listed the folder is closed by now
        except OSError:
            continue
        try:
            yield os.readlink(f"{folder}/{number}")
        except OSError:  # not links everywhere
            yield f"descriptor {number}"
