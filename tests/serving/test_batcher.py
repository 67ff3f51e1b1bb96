"""A batcher: limits, deadlines, delays, cancelling, draining and closing, on virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, DeadlineError, DrainingError, QueueFullError, ServingError
from aiograd.serving.batcher import Batcher
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock


def rows(*values: float, width: int = 1) -> tuple[Any, ...]:
    return (ag.tensor([[value] * width for value in values]),)


def numbers(answer: Any) -> list[float]:
    return answer.numpy()[:, 0].tolist()  # type: ignore[no-any-return]


class Doubler:
    """Doubles rows, `seconds` per batch, and notes what it saw and when."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.seen: list[tuple[float, list[float]]] = []
        self.cancelled: list[float] = []

    async def __call__(self, batch: Any) -> Any:
        loop = asyncio.get_running_loop()
        (x,) = batch.columns()
        self.seen.append((loop.time(), numbers(x)))
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(loop.time())
            raise
        return x * 2


async def ask(batcher: Batcher, given: tuple[Any, ...], **options: Any) -> Any:
    return await batcher.wait(batcher.admit(given, **options))


# ---------------------------------------------------------------- batches


async def test_rows_that_meet_run_as_one_batch_and_the_next_fills_meanwhile(virtual_clock: VirtualClock) -> None:
    run = Doubler()
    batcher = Batcher(run, max_batch=3, name="test")
    first = [asyncio.ensure_future(ask(batcher, rows(value))) for value in (0, 1)]
    await asyncio.sleep(0.5)
    second = [asyncio.ensure_future(ask(batcher, rows(value, value))) for value in (2, 3)]
    assert [numbers(await each) for each in (*first, *second)] == [[0], [2], [4, 4], [6, 6]]
    assert run.seen == [(0, [0, 1]), (1, [2, 2]), (2, [3, 3])]
    assert (batcher.batches, batcher.rows, batcher.queued) == (3, 6, 0)
    assert all(each.result().shape[1] == 1 for each in first)


async def test_outputs_come_back_as_the_function_gives_them(virtual_clock: VirtualClock) -> None:
    async def run(batch: Any) -> Any:
        batch.served = "version 3"
        (x,) = batch.columns()
        return x + 1, x.sum(axis=1)

    batcher = Batcher(run, max_batch=8, name="test")
    tasks = [batcher.admit(rows(value)) for value in (1, 2)]
    answers = [await batcher.wait(task) for task in tasks]
    assert [(numbers(x), total.numpy().tolist()) for x, total in answers] == [([2], [1]), ([3], [2])]
    assert tasks[0].batch is tasks[1].batch is not None
    assert (tasks[0].batch.size, tasks[0].batch.served) == (2, "version 3")


async def test_a_batch_that_could_run_waits_for_more_rows_and_not_at_all_when_full(virtual_clock: VirtualClock) -> None:
    run = Doubler(0)
    batcher = Batcher(run, max_batch=3, max_delay=0.5, name="test")
    early = asyncio.ensure_future(ask(batcher, rows(1)))
    await asyncio.sleep(0.25)
    late = asyncio.ensure_future(ask(batcher, rows(2)))
    await asyncio.gather(early, late)
    assert run.seen == [(0.5, [1, 2])]
    await asyncio.gather(*(ask(batcher, rows(value)) for value in (3, 4, 5)))
    assert run.seen[1:] == [(0.5, [3, 4, 5])]


async def test_groups_do_not_meet_until_they_are_one(virtual_clock: VirtualClock) -> None:
    run = Doubler()
    batcher = Batcher(run, max_batch=8, name="test")
    asked = [asyncio.ensure_future(ask(batcher, rows(value), group=group)) for value, group in ((0, None), (1, 17), (2, 18), (3, 17), (4, None))]
    await asyncio.sleep(0.5)
    batcher.regroup(lambda group: None)
    await asyncio.gather(*asked)
    assert run.seen == [(0, [0, 4]), (1, [1, 2, 3])]


async def test_regrouping_wakes_a_batch_that_gets_its_least_size(virtual_clock: VirtualClock) -> None:
    run = Doubler()
    batcher = Batcher(run, max_batch=8, min_batch=2, name="test")
    asked = [asyncio.ensure_future(ask(batcher, rows(group), group=group)) for group in (1, 2)]
    await asyncio.sleep(3)
    assert run.seen == []
    batcher.regroup(lambda group: 1)
    await asyncio.gather(*asked)
    assert run.seen == [(3, [1, 2])]


async def test_ten_thousand_at_once() -> None:
    async def run(batch: Any) -> Any:
        assert batch.size <= 64
        return batch.columns()[0] * 2

    batcher = Batcher(run, max_batch=64, max_rows=10_000, name="test")
    loop = asyncio.get_running_loop()
    answers = await asyncio.gather(*(ask(batcher, rows(value), deadline=loop.time() + 3600) for value in range(10_000)))
    assert [answer.item() for answer in answers] == [2 * value for value in range(10_000)]
    assert (batcher.batches, batcher.rows, batcher.queued) == (157, 10_000, 0)


async def test_batches_that_do_not_wait_leave_the_loop_to_others(virtual_clock: VirtualClock) -> None:
    async def run(batch: Any) -> Any:
        return batch.columns()[0]

    batcher = Batcher(run, max_batch=1, name="test")
    tasks = [batcher.admit(rows(value)) for value in range(5)]
    seen = []
    while batcher.queued:
        await asyncio.sleep(0)
        seen.append(batcher.batches)
    assert seen == [1, 2, 3, 4, 5]
    await asyncio.gather(*map(batcher.wait, tasks))


# ---------------------------------------------------------------- the queue's limit


async def test_a_full_queue_refuses_and_says_when_there_is_room(virtual_clock: VirtualClock) -> None:
    batcher = Batcher(Doubler(), max_batch=4, max_rows=6, name="test")
    asked = [asyncio.ensure_future(ask(batcher, rows(*range(3)))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="6 of 6 rows wait, no room for 1") as raised:
        batcher.admit(rows(0))
    assert raised.value.retry_after == 1 and batcher.rate == 0  # nothing is measured yet
    await asyncio.gather(*asked)
    assert batcher.rate == pytest.approx(3) and batcher.queued == 0
    asked = [asyncio.ensure_future(ask(batcher, rows(*range(3)))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError) as raised:
        batcher.require_room(2)
    assert raised.value.retry_after == pytest.approx(2 / 3)
    assert batcher.refused == 2
    with pytest.raises(ArgumentError, match="at most the 6 rows that may wait"):
        batcher.require_room(7)
    assert [numbers(answer) for answer in await asyncio.gather(*asked)] == [[0, 2, 4]] * 2


async def test_the_rate_follows_the_batches_and_leaves_idle_time_out(virtual_clock: VirtualClock) -> None:
    run = Doubler(0.5)
    batcher = Batcher(run, max_batch=4, name="test")
    await ask(batcher, rows(1, 2))
    await asyncio.sleep(1000)
    await ask(batcher, rows(1, 2))
    assert batcher.rate == pytest.approx(4)
    run.seconds = 0.125
    for _ in range(60):
        await ask(batcher, rows(1, 2))
    assert batcher.rate == pytest.approx(16, rel=0.01)


@pytest.mark.parametrize("given", [(), (3,), (ag.tensor(1.0),), (ag.ones((1, 2)), ag.ones((2, 2))), (ag.ones((5, 1)),)], ids=str)
async def test_rows_that_make_no_batch_are_refused(given: Any, virtual_clock: VirtualClock) -> None:
    batcher = Batcher(Doubler(), max_batch=4, name="test")
    with pytest.raises(ArgumentError, match="^test: .*expected"):
        batcher.admit(given)
    assert batcher.queued == 0


# ---------------------------------------------------------------- deadlines


async def test_a_deadline_in_the_queue_is_kept_and_its_rows_are_not_computed(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    run = Doubler()
    batcher = Batcher(run, max_batch=2, name="test")
    first = asyncio.ensure_future(ask(batcher, rows(1, 1)))
    late = asyncio.ensure_future(ask(batcher, rows(2), deadline=0.75))
    other = asyncio.ensure_future(ask(batcher, rows(3), deadline=5))
    with pytest.raises(DeadlineError, match="no answer after 0.75 s; the deadline passed in the queue"):
        await late
    assert loop.time() == 0.75
    await asyncio.gather(first, other)
    assert run.seen == [(0, [1, 1]), (1, [3])] and batcher.expired == 1


async def test_a_deadline_in_a_batch_is_kept_and_the_others_get_their_rows(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    run = Doubler()
    batcher = Batcher(run, max_batch=4, name="test")
    asked = [asyncio.ensure_future(ask(batcher, rows(value), deadline=deadline)) for value, deadline in ((1, 9), (2, 0.5), (3, None), (4, 0.25))]
    for late, seconds in ((asked[3], 0.25), (asked[1], 0.5)):
        with pytest.raises(DeadlineError, match="in a batch of 4 rows"):
            await late
        assert loop.time() == seconds
    assert [numbers(await each) for each in (asked[0], asked[2])] == [[2], [6]]
    assert loop.time() == 1 and run.cancelled == [] and batcher.expired == 2


async def test_a_batch_whose_tasks_are_all_late_is_cancelled_and_the_next_begins(virtual_clock: VirtualClock) -> None:
    run = Doubler(10)
    batcher = Batcher(run, max_batch=2, name="test")
    asked = [asyncio.ensure_future(ask(batcher, rows(value), deadline=deadline)) for value, deadline in ((1, 2), (2, 3), (3, None))]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["DeadlineError", "DeadlineError", "Tensor"]
    assert run.cancelled == [3] and run.seen == [(0, [1, 2]), (3, [3])]
    assert (batcher.expired, batcher.failed, batcher.cancelled) == (2, 0, 0)


async def test_a_deadline_that_passes_while_the_loop_is_held_up_is_kept_before_the_batch(virtual_clock: VirtualClock) -> None:
    run = Doubler()
    batcher = Batcher(run, max_batch=1, name="test")
    late, other = batcher.admit(rows(1), deadline=2), batcher.admit(rows(2))
    virtual_clock.advance(5)
    with pytest.raises(DeadlineError, match="after 5 s"):
        await batcher.wait(late)
    await batcher.wait(other)
    assert run.seen == [(5, [2])]
    with pytest.raises(DeadlineError, match="1 s before it was admitted"):
        batcher.admit(rows(1), deadline=5)
    assert batcher.expired == 2


async def test_deadlines_are_kept_in_any_order_by_one_timer(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    batcher = Batcher(Doubler(), max_batch=100, min_batch=100, name="test")
    late: list[float] = []

    async def wait(deadline: float) -> None:
        with pytest.raises(DeadlineError):
            await ask(batcher, rows(1), deadline=deadline)
        assert loop.time() == deadline
        late.append(deadline)

    deadlines = [float(value) for value in np.random.default_rng(0).permutation(50) + 1]
    await asyncio.gather(*map(wait, deadlines))
    assert late == sorted(deadlines) and batcher.queued == 0 and batcher.expired == 50


async def test_a_deadline_ends_a_real_wait() -> None:
    batcher = Batcher(Doubler(3600), max_batch=1, name="test")
    deadline = asyncio.get_running_loop().time() + 0.01
    results = await asyncio.gather(*(ask(batcher, rows(value), deadline=deadline) for value in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [DeadlineError] * 3
    await batcher.aclose()


# ---------------------------------------------------------------- cancelling


async def test_cancelling_takes_the_rows_out_of_the_queue(virtual_clock: VirtualClock) -> None:
    run = Doubler()
    batcher = Batcher(run, max_batch=2, max_rows=4, name="test")
    asked = [asyncio.ensure_future(ask(batcher, rows(value))) for value in range(4)]
    await asyncio.sleep(0.5)
    asked[2].cancel()
    await asyncio.sleep(0)
    assert batcher.queued == 1
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["Tensor", "Tensor", "CancelledError", "Tensor"]
    assert run.seen == [(0, [0, 1]), (1, [3])] and batcher.cancelled == 1


async def test_a_batch_is_cancelled_when_no_task_waits_for_it(virtual_clock: VirtualClock) -> None:
    run = Doubler(10)
    batcher = Batcher(run, max_batch=2, name="test")
    asked = [asyncio.ensure_future(ask(batcher, rows(value))) for value in range(3)]
    for seconds, each in ((1, asked[0]), (2, asked[1])):
        await asyncio.sleep(1)
        assert run.cancelled == [] and asyncio.get_running_loop().time() == seconds
        each.cancel()
    assert numbers(await asked[2]) == [4]
    assert run.cancelled == [2] and run.seen == [(0, [0, 1]), (2, [2])]
    assert (batcher.cancelled, batcher.failed) == (2, 0)


@pytest.mark.parametrize("ending", ["returns", "raises"])
async def test_a_function_that_does_not_let_itself_be_cancelled_holds_up_the_next_batch_only(ending: str, virtual_clock: VirtualClock) -> None:
    async def run(batch: Any) -> Any:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            await asyncio.sleep(5)
            if ending == "raises":
                raise ValueError("cancelled") from None
        return batch.columns()[0]

    batcher = Batcher(run, max_batch=1, name="test")
    cancelled, other = (asyncio.ensure_future(ask(batcher, rows(value))) for value in (1, 2))
    await asyncio.sleep(1)
    cancelled.cancel()
    assert numbers(await other) == [2]
    assert asyncio.get_running_loop().time() == 11 and batcher.failed == 0
    assert numbers(await ask(batcher, rows(3))) == [3]


async def test_a_function_may_cancel_the_tasks_of_its_batch(virtual_clock: VirtualClock) -> None:
    async def run(batch: Any) -> Any:
        for task in batch.tasks:
            batcher.cancel(task)
        return batch.columns()[0]

    batcher = Batcher(run, max_batch=2, name="test")
    results = await asyncio.gather(*(ask(batcher, rows(value)) for value in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 3
    assert batcher.cancelled == 3 and batcher.batches == 2


async def test_cancelling_a_task_by_hand_counts_once_and_leaves_an_answered_one(virtual_clock: VirtualClock) -> None:
    run = Doubler()
    batcher = Batcher(run, max_batch=1, name="test")
    answered, dropped = batcher.admit(rows(1)), batcher.admit(rows(2), deadline=9)
    waiting = asyncio.ensure_future(batcher.wait(dropped))
    await asyncio.sleep(0.5)
    batcher.cancel(dropped)
    batcher.cancel(dropped)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert numbers(await batcher.wait(answered)) == [2]
    batcher.cancel(answered)
    assert numbers(await batcher.wait(answered)) == [2]
    assert batcher.cancelled == 1 and run.seen == [(0, [1])]


async def _requests(victim: int, step: int) -> int:
    """Five requests, of which one is cancelled at a step of the loop; returns the cancelled ones."""
    loop: Any = asyncio.get_running_loop()
    run = Doubler()
    batcher = Batcher(run, max_batch=3, max_rows=8, max_delay=0.25, name="test")

    async def later(seconds: float, value: float, size: int, deadline: float | None) -> Any:
        await asyncio.sleep(seconds)
        return await ask(batcher, rows(*[value] * size), deadline=deadline)

    requests = ((0.0, 1, 1, None), (0.125, 2, 1, 9.0), (0.5, 3, 2, None), (0.5, 4, 1, 1.125), (0.75, 5, 1, 9.0))
    asked = [asyncio.ensure_future(later(*request)) for request in requests]
    if victim >= 0 and step >= loop.steps + 1:
        loop.at_step(step, asked[victim].cancel)
    results = await asyncio.gather(*asked, return_exceptions=True)
    for (_, value, size, _), result in zip(requests, results, strict=True):
        if isinstance(result, ag.Tensor):
            assert numbers(result) == [2 * value] * size
    names = [type(result).__name__ for result in results]
    others = names[:victim] + names[victim + 1 :] if victim >= 0 else names
    assert "CancelledError" not in others
    assert others.count("DeadlineError") <= batcher.expired <= 1
    seen = [value for _, values in run.seen for value in values]
    assert all(seen.count(value) in ((0, size) if name != "Tensor" else (size,)) for (_, value, size, _), name in zip(requests, names, strict=True))
    assert batcher.queued == 0 and batcher.failed == 0
    assert numbers(await ask(batcher, rows(7))) == [14]
    await batcher.aclose()
    assert batcher.cancelled <= names.count("CancelledError")
    return names.count("CancelledError")


@pytest.mark.parametrize("seed", range(3))
def test_a_request_cancelled_at_every_turn_disturbs_no_other(seed: int) -> None:
    undisturbed = simulated_run(_requests, -1, 0, seed=seed, order="permuted")
    cancelled = 0
    for victim in range(5):
        for step in range(2, undisturbed.steps + 1):
            found = simulated_run(_requests, victim, step, seed=seed, order="permuted")
            assert not found.leftover_tasks
            cancelled += found.value
    assert cancelled > 40


@pytest.mark.parametrize("ending", ["drain", "aclose"])
def test_drain_and_aclose_cancelled_at_every_turn_can_be_asked_again(ending: str) -> None:
    async def main(step: int) -> bool:
        loop: Any = asyncio.get_running_loop()
        batcher = Batcher(Doubler(), max_batch=2, name="test")
        tasks = [batcher.admit(rows(value)) for value in range(3)]
        await asyncio.sleep(0.5)
        end = getattr(batcher, ending)
        first = asyncio.ensure_future(end())
        if step > loop.steps:
            loop.at_step(step, first.cancel)
        await asyncio.wait([first])
        await end()
        found = await asyncio.gather(*map(batcher.wait, tasks), return_exceptions=True)
        assert [type(each) for each in found] == [ag.Tensor if ending == "drain" else DrainingError] * 3
        return first.cancelled()

    steps = simulated_run(main, 0).steps
    cancelled = 0
    for step in range(1, steps + 1):
        simulation = simulated_run(main, step)
        assert not simulation.leftover_tasks
        cancelled += simulation.value
    assert cancelled >= 2


# ---------------------------------------------------------------- errors


async def test_an_error_is_of_its_batch_only(virtual_clock: VirtualClock) -> None:
    async def run(batch: Any) -> Any:
        if 13 in numbers(batch.columns()[0]):
            raise ValueError("thirteen")
        return batch.columns()[0]

    batcher = Batcher(run, max_batch=2, name="test")
    results = await asyncio.gather(*(ask(batcher, rows(value)) for value in (1, 13, 3)), return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["ValueError", "ValueError", "Tensor"]
    assert batcher.failed == 2 and batcher.batches == 2


@pytest.mark.parametrize("result", [None, 3, ag.ones((1, 1)), (ag.ones((2, 1)), ag.ones((3, 1))), ag.tensor(1.0)], ids=str)
async def test_outputs_of_other_rows_are_an_error_of_the_batch(result: Any, virtual_clock: VirtualClock) -> None:
    async def run(batch: Any) -> Any:
        return result

    batcher = Batcher(run, max_batch=2, name="test")
    results = await asyncio.gather(*(ask(batcher, rows(value)) for value in range(2)), return_exceptions=True)
    assert [type(each) for each in results] == [ArgumentError] * 2 and "Tensors of 2 rows" in str(results[0])
    assert batcher.failed == 2


@pytest.mark.parametrize("after_a_cancelled_batch", [False, True])
async def test_a_function_that_is_cancelled_by_itself_fails_its_batch_and_the_next_runs(
    after_a_cancelled_batch: bool, virtual_clock: VirtualClock
) -> None:
    async def run(batch: Any) -> Any:
        (value,) = numbers(batch.columns()[0])
        await asyncio.sleep(value)
        if value == 13:
            raise asyncio.CancelledError
        return batch.columns()[0]

    batcher = Batcher(run, max_batch=1, name="test")
    asked = [asyncio.ensure_future(ask(batcher, rows(value))) for value in (5, 13, 2)]
    await asyncio.sleep(1)
    if after_a_cancelled_batch:
        asked[0].cancel()
    results = await asyncio.gather(*asked, return_exceptions=True)
    first = asyncio.CancelledError if after_a_cancelled_batch else ag.Tensor
    assert [type(result) for result in results] == [first, ServingError, ag.Tensor] and "was cancelled" in str(results[1])
    assert (batcher.failed, batcher.cancelled) == (1, after_a_cancelled_batch)


@pytest.mark.parametrize("min_batch", [1, 4])
async def test_a_worker_that_is_cancelled_from_outside_fails_what_waits_and_the_next_request_starts_another(
    min_batch: int, virtual_clock: VirtualClock
) -> None:
    run = Doubler()
    batcher = Batcher(run, max_batch=4, min_batch=min_batch, name="test")
    tasks = [batcher.admit(rows(value, value)) for value in range(3 if min_batch == 1 else 1)]
    await asyncio.sleep(0.5)
    (worker,) = [task for task in asyncio.all_tasks() if task.get_name() == "aiograd:test"]
    worker.cancel()
    results = await asyncio.gather(*map(batcher.wait, tasks), return_exceptions=True)
    assert {type(result) for result in results} == {DrainingError} and "was cancelled" in str(results[-1])
    assert worker.cancelled() and batcher.queued == 0
    assert numbers(await ask(batcher, rows(1, 2, 3, 4))) == [2, 4, 6, 8]


async def test_a_batch_and_its_rows_are_freed_without_the_collector(virtual_clock: VirtualClock, no_collector: None) -> None:
    async def run(batch: Any) -> Any:
        if batch.size == 1:
            raise ValueError("one")
        return batch.columns()[0] * 2

    batcher = Batcher(run, max_batch=2, name="test")
    dead: list[weakref.ref[Any]] = []

    async def request(size: int) -> None:
        given = rows(*range(size))
        dead.append(weakref.ref(given[0]))
        try:
            answer = await ask(batcher, given, deadline=1000)
        except ValueError:
            return
        dead.append(weakref.ref(answer))

    await asyncio.gather(request(1), request(2))
    await asyncio.sleep(0)
    assert len(dead) == 3 and [ref() for ref in dead] == [None] * 3


async def test_the_context_of_batches_is_that_of_the_first_request_or_a_given_one(virtual_clock: VirtualClock) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outside")

    async def run(batch: Any) -> Any:
        seen.append(variable.get())
        return batch.columns()[0]

    async def request(batcher: Batcher) -> None:
        variable.set("request")
        await ask(batcher, rows(1))

    seen: list[str] = []
    await asyncio.create_task(request(Batcher(run, max_batch=1, name="test")))
    await asyncio.create_task(request(Batcher(run, max_batch=1, name="test", context=contextvars.copy_context())))
    assert seen == ["request", "outside"]


# ---------------------------------------------------------------- the end


async def test_draining_answers_the_admitted_at_once_and_refuses_others(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    run = Doubler()
    batcher = Batcher(run, max_batch=8, min_batch=4, max_delay=100, name="test")
    asked = [asyncio.ensure_future(ask(batcher, rows(value, width=width))) for value, width in ((1, 1), (2, 1), (3, 2))]
    await asyncio.sleep(5)
    assert run.seen == []
    draining = asyncio.ensure_future(batcher.drain())
    await asyncio.sleep(0.5)
    with pytest.raises(DrainingError, match="draining") as raised:
        batcher.admit(rows(1))
    assert raised.value.retry_after > 0 and not draining.done()
    assert await draining and loop.time() == 7
    assert [numbers(each.result()) for each in asked] == [[2], [4], [6]]
    assert run.seen == [(5, [1, 2]), (6, [3])] and await batcher.drain()


async def test_draining_gives_up_after_its_time_and_closing_ends_the_rest(virtual_clock: VirtualClock) -> None:
    loop = asyncio.get_running_loop()
    run = Doubler(10)
    batcher = Batcher(run, max_batch=1, name="test")
    asked = [asyncio.ensure_future(ask(batcher, rows(value), deadline=1000)) for value in range(3)]
    await asyncio.sleep(0)
    assert not await batcher.drain(timeout=15) and loop.time() == 15
    await asyncio.gather(batcher.aclose(), batcher.aclose())
    await batcher.aclose()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["Tensor", "DrainingError", "DrainingError"]
    assert loop.time() == 15 and run.cancelled == [15] and batcher.queued == 0
    with pytest.raises(ServingError, match="closed") as raised:
        batcher.admit(rows(1))
    assert not isinstance(raised.value, DrainingError)


async def test_closing_without_a_request_or_in_mid_turn(virtual_clock: VirtualClock) -> None:
    run = Doubler()
    batcher = Batcher(run, max_batch=1, name="test")
    assert await batcher.drain()
    await batcher.aclose()
    batcher = Batcher(run, max_batch=1, name="test")
    task = batcher.admit(rows(1), deadline=5)
    await batcher.aclose()
    with pytest.raises(DrainingError, match="has been closed"):
        await batcher.wait(task)
    assert run.seen == []
