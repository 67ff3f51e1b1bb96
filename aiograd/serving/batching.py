"""The queue of a batcher: which rows run together, and when. Pure: times are arguments, nothing here waits.

Note [Batches]
    A task is never split. Tasks wait until there are `min_batch` rows and `max_delay` has passed since the oldest of them arrived, or until they
    fill a batch: until there are `max_batch` rows, or the next task would make the batch larger. Of several batches that are due, the one with
    the oldest task runs. Sizes count rows, however many tasks they come in; a task without rows runs at once and alone. An error of a batch is
    the error of its tasks only, so rows are only batched with others of their group, shape, dtype and device: a caller that sends rows of
    another width fails by itself, and float64 of one caller never turns the float32 of another into float64. Tasks that were cancelled before
    their batch began are not in it. The sums of a batch are made in one kernel, so bits may depend on the other rows in it.

Note [Heads]
    The delay is the same for all kinds of rows, and tasks arrive in order. So among the kinds with rows enough for a batch, the delay of the one
    with the oldest head ends first; before that, only full kinds are due. Two heaps by the number of the head therefore find the kind that is
    due without a look at the others: one of the kinds with `min_batch` rows, one of the full kinds.

Source: hivemind ``task_pool.py`` and ``runtime.py``.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

from aiograd.array_functions import public as af
from aiograd.errors import ArgumentError

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Task:
    """Rows of one request, which run in one batch."""

    #: a Tensor per argument of the function, with `size` rows each
    rows: tuple[Any, ...]
    size: int
    _: KW_ONLY
    #: a future of the task's part of the outputs; the queue only calls its ``done()``
    answer: Any
    #: tasks of different groups never meet
    group: Hashable = None
    #: times of the loop
    arrived: float = 0.0
    deadline: float | None = None
    #: the batch in which it runs or ran
    batch: TaskBatch | None = None
    #: its request was cancelled, so it waits no more
    is_cancelled: bool = False
    #: set by the queue: the order of arrival, and the line in which the task waits
    number: int = -1
    line: _Line | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """The group, and the shapes, dtypes and devices that rows must share to be in one batch."""
        return (self.group, *[(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in self.rows])


class TaskBatch:
    """Tasks that run together."""

    __slots__ = ("_first", "began", "group", "served", "size", "tasks")

    def __init__(self, tasks: list[Task], began: float) -> None:
        self.group = tasks[0].group
        #: in order of arrival; empty once they are answered
        self.tasks = tasks
        #: rows
        self.size = sum([task.size for task in tasks])
        self.began = began
        #: for the function that runs the batch, such as the version that answers it
        self.served: Any = None
        self._first = 0
        for task in tasks:
            task.batch = self

    @property
    def has_waiters(self) -> bool:
        """False once every task has its answer, its error or its cancellation."""
        while self._first < len(self.tasks) and self.tasks[self._first].answer.done():
            self._first += 1
        return self._first < len(self.tasks)

    def columns(self) -> tuple[Any, ...]:
        """One Tensor per argument: the rows of all tasks, one below the other."""
        if len(self.tasks) == 1:
            return self.tasks[0].rows
        return tuple([af.concat(parts, axis=0) for parts in zip(*[task.rows for task in self.tasks], strict=True)])


class _Line:
    """The waiting tasks of one kind, in order of arrival."""

    __slots__ = ("kind", "rows", "tasks")

    def __init__(self, kind: tuple[Any, ...]) -> None:
        self.kind = kind
        self.rows = 0
        self.tasks: OrderedDict[Task, None] = OrderedDict()

    @property
    def head(self) -> Task:
        return next(iter(self.tasks))


class _LazyHeap(Generic[T]):
    """Items by key, of which some are no longer current: these are dropped when they come up, or when they are the larger part."""

    def __init__(self, is_current: Callable[[Any, T], bool]) -> None:
        self._is_current = is_current
        self._entries: list[tuple[Any, T]] = []
        self._limit = 64

    def push(self, key: Any, item: T) -> None:
        heapq.heappush(self._entries, (key, item))
        if len(self._entries) > self._limit:
            self._entries = sorted({entry for entry in self._entries if self._is_current(*entry)})
            self._limit = 64 + 2 * len(self._entries)

    def first(self) -> tuple[Any, T] | None:
        """The current entry with the least key."""
        while self._entries and not self._is_current(*self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0] if self._entries else None


def _heads(least: int) -> _LazyHeap[_Line]:
    """Lines of at least so many rows, by the number of their head."""
    return _LazyHeap(lambda number, line: line.rows >= least and line.head.number == number)


class BatchQueue:
    """Waiting tasks, and the batches that they make: see Note [Batches]. Each operation on a task costs the same however many wait."""

    def __init__(self, max_batch: int, *, min_batch: int = 1, max_rows: int | None = None, max_delay: float = 0.0) -> None:
        if not 1 <= min_batch <= max_batch:
            raise ArgumentError(f"max_batch={max_batch}, min_batch={min_batch}: expected 1 <= min <= max")
        if max_rows is not None and max_rows < 1:
            raise ArgumentError(f"max_rows={max_rows}: expected a queue with room for a row at least, or None")
        if not 0 <= max_delay < math.inf:
            raise ArgumentError(f"max_delay={max_delay}: expected a number of seconds, 0 or more")
        self.max_batch = max_batch
        self.min_batch = min_batch
        self.max_rows = max_rows
        self.max_delay = max_delay
        #: waiting
        self.rows = 0
        self._waiting = 0
        self._numbers = itertools.count()
        #: by kind; tasks without rows have a line of the kind ``()``
        self._lines: dict[tuple[Any, ...], _Line] = {}
        self._ripe, self._full = _heads(min_batch), _heads(max_batch)
        #: tasks with a deadline that have no answer, by number; their heap holds numbers only, so it keeps no rows alive
        timed: dict[int, Task] = {}
        self._timed = timed
        self._deadlines: _LazyHeap[int] = _LazyHeap(lambda deadline, number: number in timed)

    def __len__(self) -> int:
        """Tasks that wait."""
        return self._waiting

    def has_room(self, size: int) -> bool:
        """True if so many more rows may wait."""
        return self.max_rows is None or self.rows + size <= self.max_rows

    def add(self, task: Task) -> None:
        """Let a task wait. Tasks are added in the order of their arrival."""
        task.number = next(self._numbers)
        if task.deadline is not None:
            self._timed[task.number] = task
            self._deadlines.push(task.deadline, task.number)
        self._place(task)

    def discard(self, task: Task) -> None:
        """Take out a task that needs no answer any more; its deadline too if it is in a batch."""
        self._timed.pop(task.number, None)
        if task.line is not None:
            self._remove(task.line, [task])

    def take(self, now: float) -> TaskBatch | None:
        """The next batch that is due, or None. Its tasks wait no more."""
        while (line := self._due(now)) is not None:
            tasks: list[Task] = []
            answered: list[Task] = []
            size = 0
            for task in line.tasks:
                if task.answer.done():
                    answered.append(task)
                    continue
                size += task.size or self.max_batch  # a task without rows runs alone
                if size > self.max_batch:
                    break
                tasks.append(task)
            self._remove(line, answered or tasks)
            if not answered:
                return TaskBatch(tasks, now)
        return None

    def wait(self, now: float) -> float | None:
        """Seconds until a batch may be due, 0 if one is; None if only an arrival can make it so."""
        if self._due(now) is not None:
            return 0.0
        entry = self._ripe.first()
        return None if entry is None else max(0.0, entry[1].head.arrived + self.max_delay - now)

    def expire(self, now: float) -> list[Task]:
        """Take out the tasks that are late, waiting or in a batch, the earliest deadline first."""
        late: list[Task] = []
        while (entry := self._deadlines.first()) is not None and entry[0] <= now:
            late.append(self._timed[entry[1]])
            self.discard(late[-1])
        return late

    @property
    def deadline(self) -> float | None:
        """The earliest deadline of a task without an answer, waiting or in a batch."""
        entry = self._deadlines.first()
        return None if entry is None else entry[0]

    def regroup(self, function: Callable[[Any], Hashable]) -> None:
        """Put the waiting tasks of each group into the group ``function(group)``; their order is the order of arrival as before."""
        for task in self.clear():
            task.group = function(task.group)
            self._place(task)

    def hasten(self) -> None:
        """No more tasks come: tasks that wait for a fuller batch are due now."""
        self.min_batch, self.max_delay, self._ripe = 1, 0.0, _heads(1)
        for line in self._lines.values():
            self._ripe.push(line.head.number, line)

    def clear(self) -> list[Task]:
        """Take out all waiting tasks, in order of arrival; their deadlines stay until they are discarded."""
        tasks = sorted((task for line in self._lines.values() for task in line.tasks), key=lambda task: task.number)
        for line in list(self._lines.values()):
            self._remove(line, list(line.tasks))
        self._ripe, self._full = _heads(self.min_batch), _heads(self.max_batch)
        return tasks

    def _place(self, task: Task) -> None:
        kind = task.kind if task.size else ()
        line = task.line = self._lines.get(kind) or self._lines.setdefault(kind, _Line(kind))
        before = line.rows
        line.tasks[task] = None
        line.rows += task.size
        self._waiting += 1
        self.rows += task.size
        for heap, least in ((self._ripe, self.min_batch), (self._full, self.max_batch)):
            if before < least <= line.rows:
                heap.push(line.head.number, line)

    def _remove(self, line: _Line, tasks: Iterable[Task]) -> None:
        head = line.head
        for task in tasks:
            del line.tasks[task]
            task.line = None
            self._waiting -= 1
            line.rows -= task.size
            self.rows -= task.size
        if not line.tasks:
            del self._lines[line.kind]
        elif line.head is not head:
            for heap, least in ((self._ripe, self.min_batch), (self._full, self.max_batch)):
                if line.rows >= least:
                    heap.push(line.head.number, line)

    def _due(self, now: float) -> _Line | None:
        """The line whose head batch runs next: see Note [Heads]; tasks without rows go first."""
        without_rows = self._lines.get(())
        if without_rows is not None:
            return without_rows
        entry = self._ripe.first()
        if entry is not None and entry[1].rows < self.max_batch and entry[1].head.arrived + self.max_delay > now:
            entry = self._full.first()
        return None if entry is None else entry[1]
