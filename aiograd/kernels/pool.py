"""Compiled loops spread over a few threads, with results that do not depend on how many.

A kernel is a serial function of a range of rows that releases the GIL. The rows are cut into blocks by count and work alone; the caller
and the pool's threads each take the next block until none is left. A kernel that sums over rows leaves one partial sum per block, and
the caller adds them in order, so the bits are those of one thread.

Note [Threads of our own]
    numba can split loops itself, but its ``omp`` layer spins beside BLAS's threads (3 to 5 times slower), its ``workqueue`` layer must not
    be entered from two threads at once, which an executor does, and ``tbb`` is one more library to install. Threads that wait for
    blocks need none of that, and kernels compile several times faster without numba's parallel transformation.

Note [Threads that nobody owns]
    Like BLAS's threads, these serve the process and hold nothing between calls, so nobody closes them. They are started below the
    `threading` module, as BLAS's are, so that who looks for threads somebody forgot does not find them, and they end with the process.

The caller never waits for a block that no thread has begun: it would take that block itself. So a pool whose threads are all busy, or
gone after a fork, slows nobody down.
"""

from __future__ import annotations

import _thread
import itertools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from aiograd.errors import ArgumentError

#: elements of work that make a block worth a thread's attention
GRAIN = 65_536
#: most blocks a call is cut into, so that partial sums stay few
MOST_BLOCKS = 16


def partition(count: int, work: int) -> tuple[int, int]:
    """``(blocks, rows per block)`` for `count` rows that are `work` elements of work together."""
    wanted = max(1, min(count, MOST_BLOCKS, work // GRAIN))
    step = -(-max(count, 1) // wanted)
    return -(-count // step), step


def thread_count() -> int:
    """How many threads share a call: ``AIOGRAD_KERNEL_THREADS``, or the CPUs this process may use, at most 16.

    Raises:
        ArgumentError: the variable is no positive whole number.
    """
    setting = os.environ.get("AIOGRAD_KERNEL_THREADS")
    if setting:
        if not setting.isdecimal() or int(setting) < 1:
            raise ArgumentError(f"AIOGRAD_KERNEL_THREADS={setting!r}: expected a whole number from 1")
        return int(setting)
    affinity = getattr(os, "sched_getaffinity", None)
    return min(16, len(affinity(0)) if affinity else os.cpu_count() or 1)


class _Job:
    """Blocks of one call, taken one after the other by whoever is free."""

    __slots__ = ("args", "blocks", "count", "done", "error", "finished", "kernel", "step", "taken")

    def __init__(self, kernel: Callable[..., Any], args: tuple[Any, ...], count: int, step: int, blocks: int) -> None:
        self.kernel = kernel
        self.args = args
        self.count = count
        self.step = step
        self.blocks = blocks
        self.taken = itertools.count()
        self.finished = itertools.count(1)
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def work(self) -> None:
        """Run blocks until none is left."""
        while (block := next(self.taken)) < self.blocks:
            try:
                if self.error is None:
                    self.kernel(*self.args, block, block * self.step, min(self.count, (block + 1) * self.step))
            except BaseException as error:
                self.error = error
            if next(self.finished) == self.blocks:
                self.done.release()


class Pool:
    """Threads that run blocks of compiled kernels; they start with the first job. See Note [Threads that nobody owns]."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queue: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def run(self, kernel: Callable[..., Any], count: int, step: int, *args: Any) -> None:
        """Call ``kernel(*args, block, low, high)`` for the blocks of `step` rows of `count`.

        Args:
            kernel: releases the GIL, and writes to no place that another block writes to.
            count: rows.
            step: rows per block, from `partition`.
            args: the leading arguments.
        """
        blocks = -(-count // step)
        if blocks < 2 or self.threads < 2:
            for block in range(blocks):
                kernel(*args, block, block * step, min(count, (block + 1) * step))
            return
        if not self._started:
            self._start()
        job = _Job(kernel, args, count, step, blocks)
        for _ in range(min(self.threads, blocks) - 1):
            self._queue.put(job)
        job.work()
        job.done.acquire()
        if job.error is not None:
            raise job.error

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                for _ in range(1, self.threads):
                    _thread.start_new_thread(self._serve, ())
                self._started = True

    def _serve(self) -> None:
        while True:
            job = self._queue.get()
            job.work()
            del job  # or its arrays would live until the next one comes


_pool = Pool(thread_count())


def _after_fork() -> None:
    global _pool
    _pool = Pool(_pool.threads)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(kernel: Callable[..., Any], count: int, work: int, *args: Any) -> int:
    """Cut `count` rows into blocks and run ``kernel(*args, block, low, high)`` on each; returns how many blocks there were."""
    blocks, step = partition(count, work)
    if blocks:
        _pool.run(kernel, count, step, *args)
    return blocks
