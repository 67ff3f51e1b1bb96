"""Batcher: requests that meet run as one batch. TaskPool: a Batcher around a function of Tensors."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Any

import numpy as np

from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentError, DeadlineError, DistributedError, DrainingError, LoopError, QueueFullError, ServingError
from aiograd.serving.batching import BatchQueue, Task, TaskBatch
from aiograd.tensors.core import TensorCore, make


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function: on the loop if it is ``async def``, else on the executor."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(*args)
    result = await current_engine().offload(lambda: function(*args))
    if inspect.isawaitable(result) and not isinstance(result, TensorCore):
        result = await result
    return result


class Batcher:
    """Collects rows of requests and runs them in batches, one after the other; while one runs, the next fills. See Note [Batches].

    Requests that are admitted in one turn of the loop meet. A batch is cancelled when none of its tasks is waited for any more. `run` is called on
    the loop with a `TaskBatch` and returns an awaitable of a Tensor, or of a tuple of Tensors, with ``batch.size`` rows. Batches run in `context`,
    or in a copy of the context of the request that starts them.
    """

    def __init__(
        self, run: Callable[[TaskBatch], Awaitable[Any]], *, max_batch: int, min_batch: int = 1, max_rows: int | None = None, max_delay: float = 0.0,
        name: str, closed_error: Callable[[str], Exception] = DrainingError, output_error: Callable[[str], Exception] = ArgumentError,
        context: contextvars.Context | None = None, isolates: bool = False,
    ) -> None:  # fmt: skip
        self._queue = BatchQueue(max_batch, min_batch=min_batch, max_rows=max_rows, max_delay=max_delay)
        self._run, self._context = run, context
        self._name, self._closed_error, self._output_error = name, closed_error, output_error
        self._isolates = isolates
        #: batches that have run or run, and their rows
        self.batches = self.rows = 0
        #: tasks: refused for lack of room, late, cancelled, of a batch that raised
        self.refused = self.expired = self.cancelled = self.failed = 0
        self.is_draining = self.is_closed = False
        self._worker: asyncio.Task[None] | None = None
        #: set by a change in the queue; the worker waits for it while no batch is due
        self._changed = asyncio.Event()
        #: set when no rows wait
        self._emptied = asyncio.Event()
        #: for the earliest deadline, or for one that was earlier
        self._timer: asyncio.TimerHandle | None = None
        self._running: TaskBatch | None = None
        self._is_abandoned = False
        #: rows of the last batches and the seconds that they took, recent ones counting more
        self._recent_rows = self._recent_seconds = self._ended = 0.0

    @property
    def queued(self) -> int:
        """Rows that wait."""
        return self._queue.rows

    @property
    def rate(self) -> float:
        """Rows per second of the last batches, idle time left out; 0 before the first batch has ended."""
        return self._recent_rows / self._recent_seconds if self._recent_seconds else 0.0

    def require_room(self, size: int) -> None:
        """Refuse so many rows as `admit` does; for a request of several tasks, before its first is admitted."""
        if self.is_closed:
            raise ServingError(f"{self._name}: closed; it takes no more requests")
        queue = self._queue
        if self.is_draining:
            raise DrainingError(f"{self._name}: draining; it takes no more requests. Try again elsewhere or after the restart")
        if not queue.has_room(size):
            if size > (limit := queue.max_rows or 0):
                raise ArgumentError(f"{self._name}: {size} rows; expected at most the {limit} rows that may wait at once")
            self.refused += 1
            seconds = min(60.0, (queue.rows + size - limit) / self.rate) if self.rate else 1.0
            text = f"{self._name}: {queue.rows} of {limit} rows wait, no room for {size}; try again in {seconds:.3g} s"
            raise QueueFullError(text, retry_after=seconds)

    def admit(self, rows: tuple[Any, ...], *, group: Hashable = None, deadline: float | None = None) -> Task:
        """Let rows wait for their batch, until `deadline` in the time of the loop; returns the task, for `wait`."""
        queue, size = self._queue, _size_of(rows)
        if size is None:
            raise ArgumentError(f"{self._name}: expected Tensors with the same number of rows")
        if size > queue.max_batch:
            raise ArgumentError(f"{self._name}: {size} rows; a task is not split, so expected at most max_batch={queue.max_batch}")
        if self.is_draining or queue.max_rows is not None:
            self.require_room(size)
        loop = asyncio.get_running_loop()
        if self._worker is not None and not self._worker.done() and self._worker.get_loop() is not loop:
            raise LoopError(f"{self._name}: runs batches on another event loop; use one for each loop, or asyncio.run_coroutine_threadsafe")
        now = loop.time()
        if deadline is not None and deadline <= now:
            self.expired += 1
            raise DeadlineError(f"{self._name}: the deadline of the request passed {now - deadline:.3g} s before it was admitted")
        task = Task(rows, size, group=group, arrived=now, deadline=deadline, answer=loop.create_future())
        earliest = queue.deadline
        queue.add(task)
        if deadline is not None and (earliest is None or deadline < earliest):
            self._set_timer(loop)
        self._changed.set()
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work(loop), name=f"aiograd:{self._name}", context=self._context)
        return task

    async def wait(self, task: Task) -> Any:
        """The part of the outputs for an admitted task, a Tensor or a tuple of Tensors; cancelling takes its rows out or drops their result."""
        try:
            return await task.answer
        finally:
            if task.answer.cancelled():
                self.cancel(task)
            del task  # an error refers to this frame, and the task to the error

    def cancel(self, task: Task) -> None:
        """Take out a task that is not answered: nothing waits for it any more."""
        task.answer.cancel()
        if task.answer.cancelled() and not task.is_cancelled:
            task.is_cancelled = True
            self.cancelled += 1
            self._drop(task)

    def regroup(self, function: Callable[[Any], Hashable]) -> None:
        """Put the waiting tasks of each group into the group ``function(group)``."""
        self._queue.regroup(function)
        self._changed.set()

    async def idle(self, timeout: float | None = None) -> bool:
        """Wait until no rows wait; returns False if `timeout` seconds passed before."""
        if self.queued:
            self._emptied.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._emptied.wait()
        return not self.queued

    async def drain(self, timeout: float | None = None) -> bool:
        """Answer the admitted requests without further delay, and refuse others; returns False if `timeout` seconds did not suffice."""
        self.is_draining = True
        self._queue.hasten()
        self._changed.set()
        if self._worker is None or self._worker.done():
            return True
        await asyncio.wait([self._worker], timeout=timeout)
        return self._worker.done()

    async def aclose(self) -> None:
        """Refuse new rows; waiting rows get an error, a running batch is cancelled. Idempotent."""
        self.is_draining = self.is_closed = True
        self._fail(self._queue.clear(), self._closed_error(f"this {self._name} has been closed"))
        if self._worker is not None and not self._worker.done():
            self._worker.cancel()
            await asyncio.wait([self._worker])

    async def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run batches until nothing waits."""
        queue = self._queue
        try:
            while len(queue):
                now = loop.time()
                if (deadline := queue.deadline) is not None and deadline <= now:
                    self._expire(loop)
                batch = queue.take(now)
                if not queue.rows:
                    self._emptied.set()
                if batch is not None:
                    await self._run_apart(await self._run_batch(batch, loop), loop)
                    await asyncio.sleep(0)  # callers get their answers, and may ask again
                elif len(queue):
                    self._changed = asyncio.Event()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(queue.wait(now)):
                            await self._changed.wait()
        except BaseException:
            self._fail(queue.clear(), self._closed_error(f"{self._name}: the task that runs batches was cancelled"))
            raise
        finally:
            self._emptied.set()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def _run_apart(self, tasks: list[Task], loop: asyncio.AbstractEventLoop) -> None:
        """Run the tasks of a batch that has failed as batches of their own, so that rows of one caller do not fail those of others."""
        try:
            for task in tasks:
                await asyncio.sleep(0)
                if not task.answer.done():
                    await self._run_batch(TaskBatch([task], loop.time()), loop)
        except BaseException:
            self._fail(tasks, self._closed_error("the batch of this task was cancelled"))
            raise

    async def _run_batch(self, batch: TaskBatch, loop: asyncio.AbstractEventLoop) -> list[Task]:
        """Run a batch and answer its tasks; returns the tasks that are to run again, each apart, as the batch of them has raised."""
        apart: list[Task] = []
        self._running = batch
        self.batches += 1
        self.rows += batch.size
        try:
            self._answer(batch, await self._run(batch))
        except Exception as error:
            if self._isolates and len(batch.tasks) > 1:
                apart = [task for task in batch.tasks if not task.answer.done()]
            else:
                self.failed += self._fail(batch.tasks, error)
        except asyncio.CancelledError:
            if self._worker is not None and self._worker.cancelling() > self._is_abandoned:  # from outside
                self._fail(batch.tasks, self._closed_error("the batch of this task was cancelled"))
                raise
            text = f"{self._name}: the function that runs batches was cancelled, by itself or by something it waits for"
            self.failed += self._fail(batch.tasks, ServingError(text))
        except BaseException as error:
            self.failed += self._fail(batch.tasks, ServingError(f"{self._name}: the function that runs batches was ended by {type(error).__name__}"))
            raise
        finally:
            self._running = None
            if self._is_abandoned and self._worker is not None:
                self._worker.uncancel()
            self._is_abandoned = False
            self._settle(batch, loop.time(), apart)
        return apart

    def _settle(self, batch: TaskBatch, now: float, apart: list[Task]) -> None:
        """Count a batch that has ended, and let go of its tasks: they refer to it, so they would live until the collector finds them."""
        self._recent_rows = 0.9 * self._recent_rows + batch.size
        self._recent_seconds = 0.9 * self._recent_seconds + max(0.0, now - max(self._ended, batch.tasks[0].arrived))
        self._ended = now
        if not apart:  # they keep their deadlines
            for task in batch.tasks:
                self._queue.discard(task)
        batch.tasks = []

    def _answer(self, batch: TaskBatch, result: Any) -> None:
        is_tuple = isinstance(result, (tuple, list))
        outputs = tuple(result) if is_tuple else (result,)
        if outputs and _size_of(outputs) != batch.size:
            raise self._output_error(f"{self._name}: the function returned other than Tensors of {batch.size} rows for a batch of {batch.size}")
        is_single = len(batch.tasks) == 1
        start = 0
        for task in batch.tasks:
            stop = start + task.size
            if not task.answer.done():
                parts = outputs if is_single else tuple([_part(output, start, stop) for output in outputs])
                task.answer.set_result(parts if is_tuple else parts[0])
            start = stop

    def _fail(self, tasks: Iterable[Task], error: Exception) -> int:
        """Answer tasks by an error, and count them."""
        count = 0
        for task in tasks:
            self._queue.discard(task)
            if not task.answer.done():
                task.answer.set_exception(error)
                count += 1
        return count

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer the tasks that are late by an error."""
        now = loop.time()
        for task in self._queue.expire(now):
            if not task.answer.done():
                self.expired += 1
                place = "in the queue" if task.batch is None else f"in a batch of {task.batch.size} rows"
                task.answer.set_exception(DeadlineError(f"{self._name}: no answer after {now - task.arrived:.3g} s; the deadline passed {place}"))
                self._drop(task)
        self._set_timer(loop)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._queue.deadline
        self._timer = None if deadline is None else loop.call_at(deadline, self._expire, loop)

    def _drop(self, task: Task) -> None:
        """A task needs no answer any more."""
        self._queue.discard(task)
        self._changed.set()  # there may be nothing left to wait for
        if task.batch is not None and task.batch is self._running and not task.batch.has_waiters:
            task.answer.get_loop().call_soon(self._abandon, task.batch)  # not at once: the function itself may have cancelled the task

    def _abandon(self, batch: TaskBatch) -> None:
        """Cancel the function of a batch: no task waits for it."""
        if self._running is batch and self._worker is not None and not self._is_abandoned:
            self._is_abandoned = True
            self._worker.cancel()


def _part(output: Any, start: int, stop: int) -> Any:
    """Rows of the outputs of a batch; an array outside of any graph is sliced by itself, which is cheaper."""
    data = output._data
    return output[start:stop] if output._node is not None or data.__class__ is not np.ndarray else make(data[start:stop])


def _size_of(tensors: tuple[Any, ...]) -> int | None:
    """The number of rows; None where there are no Tensors or different numbers."""
    size: int | None = None
    for tensor in tensors:
        if not isinstance(tensor, TensorCore) or not (shape := tensor.shape) or (size is not None and size != shape[0]):
            return None
        size = shape[0]
    return size


class TaskPool:
    """Collects rows and hands them to a function in batches.

    Args:
        fn: called with one Tensor per argument, rows along the first dimension; returns a Tensor or a tuple of Tensors with as many rows.
            ``def`` runs on the executor, ``async def`` on the loop.
        max_batch_size, min_batch_size: rows per batch.

    Raises:
        ArgumentError, ArgumentTypeError: sizes that cannot be.

    >>> pool = dist.moe.TaskPool(lambda x: x * 2, max_batch_size=8)
    >>> await asyncio.gather(pool.submit(ag.ones(1)), pool.submit(ag.zeros(1)))
    [tensor([2.]), tensor([0.])]
    >>> pool.batches
    1
    """

    def __init__(self, fn: Callable[..., Any], max_batch_size: int, min_batch_size: int = 1) -> None:
        self.fn = fn
        self.max_batch_size = max_batch_size
        self.min_batch_size = min_batch_size
        self._batcher = Batcher(
            lambda batch: call(fn, *batch.columns()), max_batch=max_batch_size, min_batch=min_batch_size, name="TaskPool",
            closed_error=DistributedError,
        )  # fmt: skip

    @property
    def batches(self) -> int:
        """Batches that have run."""
        return self._batcher.batches

    async def submit(self, *rows: Any) -> Any:
        """Run `fn` on these rows, together with other callers' rows, as one batch.

        Cancelling takes the rows out. If their batch has begun, their result is dropped, and a batch of cancelled tasks only is cancelled.

        Args:
            rows: a Tensor per argument of `fn`, or one tuple of them; all with the same number of rows.

        Returns:
            The output of `fn` for these rows: a Tensor or a tuple of Tensors.

        Raises:
            ArgumentError: more rows than `max_batch_size`, no Tensors, or different numbers of rows. DistributedError: the pool is closed.
            Exceptions of `fn`.

        >>> pool = dist.moe.TaskPool(lambda x: x * 2, max_batch_size=8)
        >>> await pool.submit(ag.ones(1))
        tensor([2.])
        """
        if self._batcher.is_closed:
            raise DistributedError("submit: this TaskPool has been closed")
        given = tuple(rows[0]) if len(rows) == 1 and isinstance(rows[0], (tuple, list)) else rows
        return await self._batcher.wait(self._batcher.admit(given))

    async def aclose(self) -> None:
        """Refuse new rows; waiting rows get an error, a running batch is cancelled. Idempotent.

        >>> pool = dist.moe.TaskPool(lambda x: x * 2, max_batch_size=8)
        >>> await pool.aclose()
        """
        await self._batcher.aclose()
