"""The queue of a batcher, against one that looks at all its tasks each time."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiograd as ag
from aiograd.errors import ArgumentError
from aiograd.serving.batching import BatchQueue, Task


class Answer:
    """A future, as far as a queue looks at it."""

    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done


def task(size: int, *, width: int = 1, now: float = 0.0, group: Any = None, deadline: float | None = None) -> Task:
    return Task((ag.zeros((size, width)),), size, group=group, arrived=now, deadline=deadline, answer=Answer())


class PlainQueue:
    """A list of tasks and the rules of Note [Batches], without any index."""

    def __init__(self, max_batch: int, min_batch: int, max_delay: float) -> None:
        self.max_batch, self.min_batch, self.max_delay = max_batch, min_batch, max_delay
        self.tasks: list[Task] = []

    def candidates(self) -> list[tuple[list[Task], float]]:
        """The next batch of each kind with the time from which it is due, the oldest head first."""
        kinds: defaultdict[Any, list[Task]] = defaultdict(list)
        for each in self.tasks:
            if each.size:
                kinds[each.kind].append(each)
        found = [([each], -1.0) for each in self.tasks if not each.size]
        for tasks in kinds.values():
            batch: list[Task] = []
            for each in tasks:
                if sum(chosen.size for chosen in batch) + each.size > self.max_batch:
                    break
                batch.append(each)
            size = sum(each.size for each in batch)
            if len(batch) < len(tasks) or size == self.max_batch:
                found.append((batch, -1.0))
            elif size >= self.min_batch:
                found.append((batch, batch[0].arrived + self.max_delay))
        return found

    def take(self, now: float) -> list[Task] | None:
        batch = next((batch for batch, due in self.candidates() if due <= now), None)
        if batch is not None:
            self.tasks = [each for each in self.tasks if each not in batch]
        return batch

    def wait(self, now: float) -> float | None:
        return min((max(0.0, due - now) for _, due in self.candidates()), default=None)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 4), st.sampled_from([1, 2]), st.sampled_from([None, 7]), st.sampled_from([None, 1, 3, 20])),
        st.tuples(st.just("discard"), st.integers(0, 30)),
        st.tuples(st.just("answer"), st.integers(0, 30)),
        st.tuples(st.just("advance"), st.integers(1, 4)),
        st.tuples(st.just("take")),
        st.tuples(st.just("expire")),
        st.tuples(st.just("regroup")),
        st.tuples(st.just("hasten")),
    ),
    max_size=60,
)


@given(operations=OPERATIONS, max_batch=st.integers(4, 6), min_batch=st.integers(1, 4), max_delay=st.sampled_from([0, 2, 5]))
def test_the_queue_gives_the_batches_of_a_plain_one(operations: list[tuple[Any, ...]], max_batch: int, min_batch: int, max_delay: int) -> None:
    queue, plain = BatchQueue(max_batch, min_batch=min_batch, max_delay=max_delay), PlainQueue(max_batch, min_batch, max_delay)
    timed: list[Task] = []
    now = 0

    def compare(batch: Any) -> None:
        plain.tasks = [each for each in plain.tasks if not each.answer.done()]
        expected = plain.take(now)
        assert (batch and batch.tasks) == expected
        if batch is not None:
            assert batch.size == sum(each.size for each in batch.tasks) <= max_batch and batch.group == batch.tasks[0].group
            assert all(each.batch is batch and each.line is None for each in batch.tasks) and batch.began == now
            for column in batch.columns():
                assert column.shape[0] == batch.size
        else:
            wait = queue.wait(now)
            assert wait is None or wait > 0

    for name, *arguments in operations:
        if name == "add":
            size, width, group, seconds = arguments
            added = task(size, width=width, group=group, now=now, deadline=None if seconds is None else now + seconds)
            queue.add(added)
            plain.tasks.append(added)
            timed += [added] if added.deadline is not None else []
        elif name == "discard" and plain.tasks:
            dropped = plain.tasks.pop(arguments[0] % len(plain.tasks))
            queue.discard(dropped)
            queue.discard(dropped)
            timed = [each for each in timed if each is not dropped]
        elif name == "answer" and plain.tasks:
            plain.tasks[arguments[0] % len(plain.tasks)].answer.is_done = True
        elif name == "advance":
            now += arguments[0]
        elif name == "take":
            compare(queue.take(now))
        elif name == "expire":
            late = queue.expire(now)
            assert sorted(late, key=id) == sorted((each for each in timed if each.deadline <= now), key=id)  # type: ignore[operator]
            assert [each.deadline for each in late] == sorted(each.deadline for each in late)  # type: ignore[type-var]
            timed = [each for each in timed if each not in late]
            plain.tasks = [each for each in plain.tasks if each not in late]
            assert queue.deadline == min((each.deadline for each in timed), default=None)  # type: ignore[type-var]
        elif name == "regroup":
            queue.regroup(lambda group: 7 if group is None else None)
            assert all(each.group in (None, 7) for each in plain.tasks)
        elif name == "hasten":
            queue.hasten()
            plain.min_batch, plain.max_delay = 1, 0
        if len(queue) == len(plain.tasks) and not any(each.answer.done() for each in plain.tasks):
            assert queue.wait(now) == plain.wait(now)
    queue.hasten()
    plain.min_batch, plain.max_delay = 1, 0
    while (batch := queue.take(now)) is not None:
        compare(batch)
    compare(None)
    assert queue.rows == 0 and len(queue) == 0 and queue.wait(now) is None


def test_full_batches_do_not_wait_behind_an_older_one_that_does() -> None:
    queue = BatchQueue(4, max_delay=5)
    queue.add(task(1, group="old"))
    for size in (2, 2, 4, 3, 2):
        queue.add(task(size, group="full", now=1))
    found = [queue.take(1) for _ in range(4)]
    assert [batch and (batch.group, batch.size) for batch in found] == [("full", 4), ("full", 4), ("full", 3), None]
    assert queue.wait(1) == 4
    assert [batch and (batch.group, batch.size) for batch in (queue.take(6), queue.take(6))] == [("old", 1), ("full", 2)]


def test_rows_of_another_dtype_or_group_wait_in_a_line_of_their_own() -> None:
    queue = BatchQueue(8)
    for rows, group in ((np.float32, None), (np.float64, None), (np.float32, 1), (np.float32, None)):
        queue.add(Task((ag.tensor(np.ones((1, 2), rows)),), 1, group=group, answer=Answer()))
    found = [queue.take(0) for _ in range(4)]
    assert [(batch.size, batch.group, batch.columns()[0].dtype) for batch in found if batch] == [
        (2, None, np.float32), (1, None, np.float64), (1, 1, np.float32)]  # fmt: skip
    assert found[3] is None


def test_the_columns_of_a_batch_are_the_rows_in_order_of_arrival() -> None:
    queue = BatchQueue(8)
    for start, size in ((0, 1), (1, 3), (4, 2)):
        rows = np.arange(start, start + size, dtype=np.float32)[:, None]
        queue.add(Task((ag.tensor(rows), ag.tensor(rows * 10)), size, answer=Answer()))
    batch = queue.take(0)
    assert batch is not None
    np.testing.assert_array_equal(batch.columns()[0].numpy()[:, 0], range(6))
    np.testing.assert_array_equal(batch.columns()[1].numpy()[:, 0], range(0, 60, 10))


def test_a_batch_has_waiters_until_its_last_task_is_answered() -> None:
    queue = BatchQueue(8)
    tasks = [task(1) for _ in range(3)]
    for each in tasks:
        queue.add(each)
    batch = queue.take(0)
    assert batch is not None
    for each in (tasks[1], tasks[0], tasks[2]):
        assert batch.has_waiters
        each.answer.is_done = True
    assert not batch.has_waiters


def test_room_is_counted_in_rows() -> None:
    queue = BatchQueue(4, max_rows=5)
    queue.add(task(3))
    assert queue.has_room(2) and not queue.has_room(3)
    assert queue.take(0) is not None
    assert queue.has_room(5) and not queue.has_room(6)
    assert BatchQueue(4).has_room(10**9)


@pytest.mark.parametrize(
    "options",
    [{"max_batch": 0}, {"max_batch": 2, "min_batch": 3}, {"max_batch": 2, "min_batch": 0}, {"max_batch": 2, "max_rows": 0},
     {"max_batch": 2, "max_delay": -1.0}, {"max_batch": 2, "max_delay": float("nan")}, {"max_batch": 2, "max_delay": float("inf")}],
)  # fmt: skip
def test_limits_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="expected"):
        BatchQueue(**options)


def _calls(function: Callable[[], object]) -> int:
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kinds", [1, 7, 1000])
@pytest.mark.parametrize("discarding", [False, True])
def test_the_cost_of_a_task_does_not_grow_with_the_tasks_that_wait(kinds: int, discarding: bool) -> None:
    def run(count: int) -> None:
        queue = BatchQueue(8, min_batch=2, max_delay=1)
        tasks = [task(1, group=i % kinds, now=i / count, deadline=2 + i / count) for i in range(count)]
        for each in tasks:
            queue.add(each)
        if discarding:
            for each in tasks[::2]:
                queue.discard(each)
        for i in range(count // 10):
            queue.wait(i)
            queue.take(2)
        assert len(queue.expire(3)) >= count // 4

    assert _calls(lambda: run(4000)) < 4.5 * _calls(lambda: run(1000))


def test_tasks_that_come_and_go_leave_nothing_behind() -> None:
    queue = BatchQueue(8, min_batch=2, max_delay=1)
    queue.add(task(2, group="waits"))
    queue.add(task(1, group="half"))
    for i in range(5000):  # the head of "half" stays, and its line crosses the least size each time
        for group in (i, i, "half"):
            each = task(1, group=group, deadline=1e6 + i)
            queue.add(each)
            queue.discard(each)
    assert len(queue._ripe) == 1 and not queue._full and not queue._deadlines and not queue._timed
    assert len(queue) == 2 and len(queue._lines) == 2 and queue.rows == 3
