"""Compiled loops spread over a few threads, with results that do not depend on how many.

A kernel is a serial function of a range of rows that releases the GIL. The rows are cut into blocks by count and work alone; the caller
and the pool's threads each take the next block until none is left. A kernel that sums over rows leaves one partial sum per block, and
the caller adds them in order, so the bits are the same as with one thread.

Note [Threads of our own]
    numba can split loops itself, but its ``omp`` layer spins beside BLAS's threads (3 to 5 times slower), its ``workqueue`` layer must not
    be entered from two threads at once, which an executor does, and ``tbb`` is one more library to install. Threads that wait for
    blocks need none of that, and kernels compile several times faster without numba's parallel transformation.

Note [Owner of the threads]
    The kernel set of the process owns one pool. Its threads are daemon threads named ``aiograd-kernels-0``, ``-1`` and so on, which
    `threading.enumerate` lists; they start with the first call that is cut into blocks and hold nothing between calls. `stop_threads`
    ends them, `aiograd.kernels.use` calls it when the process leaves the compiled set, and the interpreter calls it at exit, after
    which calls run in the caller alone. A forked child has no threads until its own first call. Leak checks leave the threads that
    `owned_threads` names alone, and no others.

The caller never waits for a block that no thread has begun: it would take that block itself. So a pool with threads that are all
busy, or gone after a fork, slows no caller down.
"""

from __future__ import annotations

import atexit
import bisect
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

from aiograd.errors import ArgumentError

#: elements of work that make a block worth a thread's attention
GRAIN = 65_536
#: most blocks a call is cut into, so that partial sums stay few
MOST_BLOCKS = 16
#: blocks of a call in a batch are so many times larger, for there are enough
_BATCHED = 8
#: seconds that stopping waits for blocks that are running
STOP_SECONDS = 1.0


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


class _KernelCall(NamedTuple):
    """A kernel, its leading arguments, how many rows there are, and how many make a block."""

    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    rows: int
    step: int

    def run(self, block: int) -> None:
        self.kernel(*self.args, block, block * self.step, min(self.rows, (block + 1) * self.step))


class _BlockJob:
    """Blocks of calls, taken one after the other by each free thread."""

    __slots__ = ("blocks", "calls", "done", "error", "finished", "firsts", "taken")

    def __init__(self, calls: Sequence[_KernelCall]) -> None:
        self.calls = calls
        #: the number of each call's first block, and of all blocks
        *self.firsts, self.blocks = itertools.accumulate((-(-call.rows // call.step) for call in calls), initial=0)
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
                    index = bisect.bisect(self.firsts, block) - 1
                    self.calls[index].run(block - self.firsts[index])
            except BaseException as error:
                self.error = error
            if next(self.finished) == self.blocks:
                self.done.release()


class KernelThreadPool:
    """Threads that run blocks of compiled kernels; they start with the first job. See Note [Owner of the threads].

    Args:
        threads: how many threads share a call, the caller's included.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        #: the running threads
        self.workers: tuple[threading.Thread, ...] = ()
        self._queue: SimpleQueue[_BlockJob | None] | None = None
        self._lock = threading.Lock()

    def run(self, kernel: Callable[..., Any], count: int, step: int, *args: Any) -> None:
        """Call ``kernel(*args, block, low, high)`` for the blocks of `step` rows of `count`.

        Args:
            kernel: releases the GIL, and writes to no place that another block writes to.
            count: rows.
            step: rows per block, from `partition`.
            args: the leading arguments.
        """
        call = _KernelCall(kernel, args, count, step)
        if count <= step or self.threads < 2:
            for block in range(-(-count // step)):
                call.run(block)
        else:
            self.run_calls((call,))

    def run_calls(self, calls: Sequence[_KernelCall]) -> None:
        """Run the blocks of some calls, which write to no place in common, as one job."""
        job = _BlockJob(calls)
        helpers = min(self.threads, job.blocks) - 1
        queue = self._queue
        if queue is None and helpers:
            queue = self._start()
        for _ in range(helpers):
            queue.put(job)  # type: ignore[union-attr]
        job.work()
        job.done.acquire()
        if job.error is not None:
            raise job.error

    def _start(self) -> SimpleQueue[_BlockJob | None]:
        with self._lock:
            if self._queue is None:
                queue: SimpleQueue[_BlockJob | None] = SimpleQueue()
                self.workers = tuple(
                    threading.Thread(target=_serve, args=(queue,), name=f"aiograd-kernels-{index}", daemon=True) for index in range(self.threads - 1)
                )
                for worker in self.workers:
                    worker.start()
                self._queue = queue
            return self._queue

    def stop(self) -> None:
        """End the threads; the next job starts new ones. Jobs that are running are finished by their callers.

        Waits up to `STOP_SECONDS` for the blocks that threads are working on. A thread with a longer block ends after it.
        """
        with self._lock:
            queue, self._queue = self._queue, None
            workers, self.workers = self.workers, ()
        if queue is not None:
            for _ in workers:
                queue.put(None)
            deadline = time.monotonic() + STOP_SECONDS
            for worker in workers:
                worker.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Stop for good: jobs run in their callers from now on."""
        self.threads = 1
        self.stop()


def _serve(queue: SimpleQueue[_BlockJob | None]) -> None:
    while (job := queue.get()) is not None:
        job.work()
        del job  # or its arrays would live until the next one comes


_pool = KernelThreadPool(thread_count())


def _after_fork() -> None:
    global _pool
    _pool = KernelThreadPool(_pool.threads)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    _pool.close()


def stop_threads() -> None:
    """End the threads that share kernels in this process; the next kernel that is large enough starts them again.

    Calls that are running are not disturbed: their callers finish them. Waits up to a second for blocks that threads are working on.
    """
    _pool.stop()


def owned_threads() -> tuple[threading.Thread, ...]:
    """The threads that share kernels in this process now; the kernel set owns them, so they are no leak of the caller.

    Returns:
        The threads.
    """
    return _pool.workers


def run(kernel: Callable[..., Any], count: int, work: int, *args: Any) -> int:
    """Cut `count` rows into blocks and run ``kernel(*args, block, low, high)`` on each; returns how many blocks there were."""
    blocks, step = partition(count, work)
    if blocks:
        _pool.run(kernel, count, step, *args)
    return blocks


class KernelBatch:
    """Calls of kernels that are made as one job at the end, so that no thread waits for another between them.

    Ten steps of Adam on a million parameters each end 0.5 ms earlier than one after the other, in 4.3 ms (bench large_tensors).
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[_KernelCall] = []

    def add(self, kernel: Callable[..., Any], count: int, work: int, *args: Any) -> None:
        """Note down a call for which the size of a block does not matter; the calls of a batch write to no place in common."""
        if count:
            self._calls.append(_KernelCall(kernel, args, count, partition(count, work // _BATCHED)[1]))

    def run(self) -> None:
        """Make the calls."""
        calls, self._calls = self._calls, []
        if calls:
            _pool.run_calls(calls)


def run_pieces(kernel: Callable[..., Any], pieces: int, *args: Any) -> None:
    """Run ``kernel(*args, piece, piece, piece + 1)`` for each of some pieces of work that are a thread's worth each."""
    _pool.run(kernel, pieces, 1, *args)


def shared_by() -> int:
    """How many threads share a call now."""
    return _pool.threads
