"""The queue of a batcher: which rows run together, and when. Pure: times are arguments, nothing here waits.

Note [Batches]
    A task is never split. Tasks wait until there are `min_batch` rows and `max_delay` has passed since the oldest of them arrived, or until they
    fill a batch: until there are `max_batch` rows, or the next task would make the batch larger. Of several batches that are due, the one with
    the oldest task runs. Sizes count rows, however many tasks they come in; a task without rows runs at once and alone. An error of a batch is
    the error of its tasks only, or they run again, each alone. Rows are only batched with others of their group, shape, dtype and device: a caller
    that sends rows of another width fails by itself, and float64 of one caller never turns the float32 of another into float64. Tasks that were
    cancelled before their batch began are not in it. The sums of a batch are made in one kernel, so bits may depend on the other rows in it.

Note [Heads]
    The delay is the same for all kinds of rows, and tasks arrive in order. So among the kinds with rows enough for a batch, the delay of the one
    with the oldest head ends first; before that, only full kinds are due. Two sorted lists by the number of the head therefore find the kind that
    is due without a look at the others: one of the kinds with `min_batch` rows, one of the full kinds.

Source: hivemind ``task_pool.py`` and ``runtime.py``.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from aiograd.array_functions import public as af
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.devices import device_name_of


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
        arrays = [tensor._data for tensor in self.rows]
        return (self.group, *[(data.shape[1:], data.dtype, device_name_of(data)) for data in arrays])


class TaskBatch:
    """Tasks that run together."""

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


@dataclass(eq=False, slots=True)
class _Line:
    """The waiting tasks of one kind, in order of arrival."""

    kind: tuple[Any, ...]
    rows: int = 0
    tasks: OrderedDict[Task, None] = field(default_factory=OrderedDict)

    @property
    def head(self) -> Task:
        return next(iter(self.tasks))


class BatchQueue:
    """Waiting tasks, and the batches that they make: see Note [Batches]. No operation on a task goes through the others."""

    def __init__(self, max_batch: int, *, min_batch: int = 1, max_rows: int | None = None, max_delay: float = 0.0) -> None:
        if type(min_batch) is not int or type(max_batch) is not int:
            raise ArgumentTypeError(f"max_batch={max_batch!r}, min_batch={min_batch!r}: expected ints")
        if not 1 <= min_batch <= max_batch:
            raise ArgumentError(f"max_batch={max_batch}, min_batch={min_batch}: expected 1 <= min <= max")
        if max_rows is not None and max_rows < 1:
            raise ArgumentError(f"max_rows={max_rows}: expected a queue with room for a row at least, or None")
        if not 0 <= max_delay < math.inf:
            raise ArgumentError(f"max_delay={max_delay}: expected a number of seconds, 0 or more")
        self.max_batch, self.min_batch = max_batch, min_batch
        self.max_rows, self.max_delay = max_rows, max_delay
        #: rows and tasks that wait
        self.rows = self._waiting = 0
        self._numbers = itertools.count()
        #: by kind; tasks without rows have a line of the kind ``()``
        self._lines: dict[tuple[Any, ...], _Line] = {}
        #: sorted: the lines with `min_batch` rows, and the full ones, each with the number of its head
        self._ripe: list[tuple[int, _Line]] = []
        self._full: list[tuple[int, _Line]] = []
        #: tasks with a deadline that have no answer, by number; sorted: their deadlines and numbers
        self._timed: dict[int, Task] = {}
        self._deadlines: list[tuple[float, int]] = []

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
            insort(self._deadlines, (task.deadline, task.number))
        self._place(task)

    def discard(self, task: Task) -> None:
        """Take out a task that needs no answer any more; its deadline too if it is in a batch."""
        if self._timed.pop(task.number, None) is not None:
            del self._deadlines[bisect_left(self._deadlines, (task.deadline, task.number))]
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
        return max(0.0, self._ripe[0][1].head.arrived + self.max_delay - now) if self._ripe else None

    def expire(self, now: float) -> list[Task]:
        """Take out the tasks that are late, waiting or in a batch, the earliest deadline first."""
        late: list[Task] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            late.append(self._timed[self._deadlines[0][1]])
            self.discard(late[-1])
        return late

    @property
    def deadline(self) -> float | None:
        """The earliest deadline of a task without an answer, waiting or in a batch."""
        return self._deadlines[0][0] if self._deadlines else None

    def regroup(self, function: Callable[[Any], Hashable]) -> None:
        """Put the waiting tasks of each group into the group ``function(group)``; their order is the order of arrival as before."""
        for task in self.clear():
            task.group = function(task.group)
            self._place(task)

    def hasten(self) -> None:
        """No more tasks come: tasks that wait for a fuller batch are due now."""
        self.min_batch, self.max_delay = 1, 0.0
        self._ripe = sorted((line.head.number, line) for line in self._lines.values() if line.rows)

    def clear(self) -> list[Task]:
        """Take out all waiting tasks, in order of arrival; their deadlines stay until they are discarded."""
        tasks = sorted((task for line in self._lines.values() for task in line.tasks), key=lambda task: task.number)
        for line in list(self._lines.values()):
            self._remove(line, list(line.tasks))
        return tasks

    def _place(self, task: Task) -> None:
        kind = task.kind if task.size else ()
        line = task.line = self._lines.get(kind) or self._lines.setdefault(kind, _Line(kind))
        before = line.rows
        line.tasks[task] = None
        line.rows += task.size
        self._waiting += 1
        self.rows += task.size
        for heads, least in ((self._ripe, self.min_batch), (self._full, self.max_batch)):
            if before < least <= line.rows:
                insort(heads, (line.head.number, line))

    def _remove(self, line: _Line, tasks: Iterable[Task]) -> None:
        head, before = (line.head.number,), line.rows
        for task in tasks:
            del line.tasks[task]
            task.line = None
            self._waiting -= 1
            line.rows -= task.size
            self.rows -= task.size
        if not line.tasks:
            del self._lines[line.kind]
        for heads, least in ((self._ripe, self.min_batch), (self._full, self.max_batch)):
            if before >= least:
                del heads[bisect_left(heads, head)]
            if line.rows >= least:
                insort(heads, (line.head.number, line))

    def _due(self, now: float) -> _Line | None:
        """The line of the batch that runs next, see Note [Heads]; tasks without rows go first."""
        line = self._lines.get(())
        if line is None and self._ripe:
            line = self._ripe[0][1]
            if line.rows < self.max_batch and line.head.arrived + self.max_delay > now:
                line = self._full[0][1] if self._full else None
        return line
