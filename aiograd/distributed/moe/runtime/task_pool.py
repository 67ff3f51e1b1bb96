"""TaskPool: batches the rows of several callers, so that an expert runs once for many of them.

Note [Batches]
    A task is never split. Tasks wait until there are `min_batch_size` rows and no more are coming in this turn of the loop, or until the next
    one would make the batch larger than `max_batch_size`; of several batches that are due, the one with the oldest task runs. Sizes count
    rows, however many tasks they come in; a task without rows runs at once and alone. An error of a batch is the error of its tasks only, so rows
    are only batched with others of their shape and dtype: a caller that sends rows of another width fails by itself, and float64 of one caller
    never turns the float32 of another into float64. Tasks that were cancelled before their batch began are not in it. The sums of a batch are
    made in one kernel, so bits may depend on the other rows in it.

Source: hivemind ``task_pool.py`` and ``runtime.py``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiograd.array_functions import public as af
from aiograd.distributed.moe.runtime.functions import call
from aiograd.errors import ArgumentError, DistributedError
from aiograd.tensors.core import TensorCore


@dataclass(eq=False, slots=True)
class _Task:
    rows: tuple[Any, ...]
    size: int
    answer: asyncio.Future[Any]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shapes and dtypes that rows must share to be in one batch."""
        return tuple((tensor.shape[1:], tensor.dtype) for tensor in self.rows)


class TaskPool:
    """Collects rows and hands them to a function in batches.

    Args:
        fn: called with one Tensor per argument, rows along the first dimension; returns a Tensor or a tuple of Tensors with as many rows.
            ``def`` runs on the executor, ``async def`` on the loop.
        max_batch_size, min_batch_size: rows per batch.

    Raises:
        ArgumentError: sizes that cannot be.

    >>> pool = dist.moe.TaskPool(lambda x: x * 2, max_batch_size=8)
    >>> await asyncio.gather(pool.submit(ag.ones(1)), pool.submit(ag.zeros(1)))
    [tensor([2.]), tensor([0.])]
    >>> pool.batches
    1
    """

    def __init__(self, fn: Callable[..., Any], max_batch_size: int, min_batch_size: int = 1) -> None:
        if not 1 <= min_batch_size <= max_batch_size:
            raise ArgumentError(f"TaskPool(max_batch_size={max_batch_size}, min_batch_size={min_batch_size}): expected 1 <= min <= max")
        self.fn = fn
        self.max_batch_size = max_batch_size
        self.min_batch_size = min_batch_size
        #: batches that have run
        self.batches = 0
        self._tasks: list[_Task] = []
        self._worker: asyncio.Task[None] | None = None
        self._arrived: asyncio.Event | None = None
        self._is_closed = False

    async def submit(self, *rows: Any) -> Any:
        """Run `fn` on these rows, together with other callers' rows, as one batch.

        Cancelling takes the rows out unless their batch has begun; then the result is dropped.

        Args:
            rows: a Tensor per argument of `fn`, or one tuple of them; all with the same number of rows.

        Returns:
            What `fn` returned for these rows.

        Raises:
            ArgumentError: more rows than `max_batch_size`, no Tensors, or different numbers of rows. DistributedError: the pool is closed.
            Exceptions of `fn`.

        >>> pool = dist.moe.TaskPool(lambda x: x * 2, max_batch_size=8)
        >>> await pool.submit(ag.ones(1))
        tensor([2.])
        """
        if self._is_closed:
            raise DistributedError("submit: this TaskPool has been closed")
        given = tuple(rows[0]) if len(rows) == 1 and isinstance(rows[0], (tuple, list)) else rows
        sizes = {tensor.shape[0] if isinstance(tensor, TensorCore) and tensor.ndim else None for tensor in given}
        if len(sizes) != 1 or None in sizes:
            raise ArgumentError("TaskPool.submit: expected Tensors with the same number of rows")
        size = sizes.pop() or 0
        if size > self.max_batch_size:
            raise ArgumentError(f"TaskPool.submit: {size} rows; a task is not split, so expected at most max_batch_size={self.max_batch_size}")
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._tasks.append(_Task(given, size, answer))
        if self._worker is None or self._worker.done():
            self._arrived = asyncio.Event()
            self._worker = loop.create_task(self._work(), name="aiograd:task-pool")
        if self._arrived is not None:
            self._arrived.set()
        try:
            return await answer
        finally:
            if answer.cancelled() and self._arrived is not None:
                self._arrived.set()  # there may be nothing left to wait for

    async def aclose(self) -> None:
        """Refuse new rows; waiting rows get an error, a running batch is cancelled. Idempotent.

        >>> pool = dist.moe.TaskPool(lambda x: x * 2, max_batch_size=8)
        >>> await pool.aclose()
        """
        self._is_closed = True
        waiting, self._tasks = self._tasks, []
        for task in waiting:
            if not task.answer.done():
                task.answer.set_exception(DistributedError("this TaskPool has been closed"))
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])

    async def _work(self) -> None:
        while True:
            batch = self._take()
            if batch:
                await self._run(batch)
            elif self._tasks:
                if self._arrived is not None:
                    self._arrived.clear()
                    await self._arrived.wait()
            else:
                await asyncio.sleep(0)
                if not self._tasks:
                    return

    def _take(self) -> list[_Task]:
        """The next batch, or nothing where there are too few rows for one."""
        self._tasks = [task for task in self._tasks if not task.answer.done()]
        empty = next((task for task in self._tasks if not task.size), None)
        if empty is not None:  # it would make no batch any larger
            self._tasks.remove(empty)
            return [empty]
        due: dict[tuple[Any, ...], list[_Task]] = {}
        sizes: Counter[tuple[Any, ...]] = Counter()
        full: set[tuple[Any, ...]] = set()
        for task in self._tasks:
            kind = task.kind
            if kind not in full and sizes[kind] + task.size <= self.max_batch_size:
                due.setdefault(kind, []).append(task)
                sizes[kind] += task.size
            else:
                full.add(kind)
        for kind, batch in due.items():
            if kind in full or sizes[kind] >= self.min_batch_size:
                chosen = set(batch)
                self._tasks = [task for task in self._tasks if task not in chosen]
                return batch
        return []

    async def _run(self, batch: Sequence[_Task]) -> None:
        self.batches += 1
        try:
            columns = [parts[0] if len(parts) == 1 else af.concat(parts, axis=0) for parts in zip(*(task.rows for task in batch), strict=True)]
            result = await call(self.fn, *columns)
            outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
            total = sum(task.size for task in batch)
            for output in outputs:
                if not isinstance(output, TensorCore) or not output.ndim or output.shape[0] != total:
                    raise ArgumentError(f"TaskPool: the function returned other than Tensors of {total} rows for a batch of {total}")
            start = 0
            for task in batch:
                parts = tuple(output[start : start + task.size] for output in outputs)
                start += task.size
                if not task.answer.done():
                    task.answer.set_result(parts if isinstance(result, (tuple, list)) else parts[0])
        except Exception as error:
            for task in batch:
                if not task.answer.done():
                    task.answer.set_exception(error)
        except BaseException:
            for task in batch:
                if not task.answer.done():
                    task.answer.set_exception(DistributedError("the batch of this task was cancelled"))
            raise
