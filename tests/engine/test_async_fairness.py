"""A pass shares the loop: it computes for one budget at most between two pauses, however many passes there are and whatever they consist of.

Time is not measured here. The engine's clock ticks once per reading, so a budget is a number of readings, and the loop's own steps tell what
else got its turn.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.engine import loop_budget
from aiograd.engine.plan import DISCOVER_STRIDE
from aiograd.engine.run import engine as engine_module
from aiograd.errors import EngineClosedError, GraphFreedError
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.engine.cases import Switch, chain, function, number, rounds
from tests.support import assert_awaiting_raises, cancel, leaf
from tests.sweeps import swept

#: readings of the clock between two pauses
BUDGET = 5
#: readings that are not answered by a pause at once: the one that opens the budget, the one that finds it spent, hand-overs
SLACK = 4


class Clock:
    """Ticks once per reading."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


class Heart:
    """A task that wants a turn in every round of the loop, and notes how far the clock got between two of them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.beats = 0
        self.longest = 0
        self.is_over = False

    async def beat(self) -> None:
        last = self.clock.now
        while not self.is_over:
            await asyncio.sleep(0)
            self.beats += 1
            self.longest = max(self.longest, self.clock.now - last)
            last = self.clock.now


def beside_a_heart(work: Callable[[], Coroutine[Any, Any, Any]], budget: int = BUDGET, **options: Any) -> Heart:
    """Run `work` beside a heart, on an engine with a ticking clock."""
    clock = Clock()
    heart = Heart(clock)

    async def main() -> None:
        beating = asyncio.create_task(heart.beat())
        async with ag.Engine(clock=clock, budget=budget, **options):
            await work()
        heart.is_over = True
        await beating

    simulated_run(main)
    return heart


# -------------------------------------------------------------------- one pass


async def long_chain() -> None:
    await chain(leaf(1.0), 5000).backward()


async def long_chain_with_hooks() -> None:
    x = leaf(1.0)
    y = chain(x * 2.0, 2000)
    y.register_hook(lambda g: None)
    await y.backward()


async def long_chain_recorded() -> None:
    x = leaf(1.0)
    await ag.grad(chain(x, 1500), x, create_graph=True)


async def wide() -> None:
    x = leaf(1.0)
    total = x
    for _ in range(3000):
        total = total + x * 2.0
    await total.backward()


async def many_roots() -> None:
    x = leaf(1.0)
    await ag.backward([x * float(i % 5) for i in range(2000)])


async def inputs_deep_down() -> None:
    x = leaf(1.0)
    middle = x * 2.0
    y = chain(middle, 4000) + chain(leaf(1.0), 4000)
    await ag.grad(y, middle)


async def inline_rules() -> None:
    x = leaf(1.0)
    rule = function(lambda ctx, g: g, inline=True)
    for _ in range(600):
        x = rule(x)
    await x.backward()


async def short_coroutines() -> None:
    async def rule(ctx: Any, g: Any) -> Any:
        return g

    x = leaf(1.0)
    for _ in range(600):
        x = function(rule)(x)
    await x.backward()


async def many_coroutines_that_end_at_once() -> None:
    leave = Switch()

    async def rule(ctx: Any, g: Any) -> Any:
        await leave
        return g

    x = leaf(1.0)
    total = function(rule)(x)
    for _ in range(300):
        total = total + function(rule)(x)
    task = asyncio.create_task(total.backward())
    await rounds(2000)
    leave.on()
    await task
    assert number(x.grad) == 301.0


async def many_jobs() -> None:
    x = leaf(1.0)
    total = x * 0.0
    rule = function(lambda ctx, g: g)
    for _ in range(300):
        total = total + rule(x)
    await total.backward()


async def many_callbacks() -> None:
    x = leaf(1.0)
    y = x * 2.0

    def queue(g: Any) -> None:
        for _ in range(500):
            ag.graph.queue_callback(lambda: None)

    y.register_hook(queue)
    await (y * 1.0).backward()


async def many_post_accumulate_hooks() -> None:
    leaves = [leaf(1.0) for _ in range(500)]
    total = leaves[0] * 1.0
    for child in leaves:
        child.register_post_accumulate_grad_hook(lambda t: None)
        total = total + child
    await total.backward()


@pytest.mark.parametrize(
    "work",
    [
        long_chain, long_chain_with_hooks, long_chain_recorded, wide, many_roots, inputs_deep_down, inline_rules, short_coroutines,
        many_coroutines_that_end_at_once, many_jobs, many_callbacks, many_post_accumulate_hooks,
    ],
    ids=lambda work: work.__name__,
)  # fmt: skip
@pytest.mark.parametrize("budget", swept([5, 1, 40]))
def test_one_pass_never_computes_longer_than_its_budget(work: Callable[[], Coroutine[Any, Any, Any]], budget: int) -> None:
    heart = beside_a_heart(work, budget)
    assert heart.longest <= budget + SLACK
    readings = heart.clock.now
    assert readings > 2 * budget, "too little work to say anything"
    assert heart.beats >= readings // (budget + SLACK)


@pytest.mark.parametrize("path", ["walk", "general"])
async def test_the_clock_is_read_often_enough(virtual_clock: VirtualClock, path: str) -> None:
    """A budget is only as good as the distance between two readings: so many nodes at most."""
    clock = Clock()
    x = leaf(1.0)
    y = chain(x * 1.0, 3000)
    if path == "general":
        y.register_hook(lambda g: None)
    async with ag.Engine(clock=clock, budget=1e9):
        before = clock.now
        await y.backward()
    nodes = 3000
    assert clock.now - before >= (nodes // 16 if path == "walk" else nodes // DISCOVER_STRIDE + nodes)


def test_a_failed_pass_releases_its_graph_in_slices() -> None:
    async def work() -> None:
        def fails(ctx: Any, g: Any) -> Any:
            raise ValueError

        y = function(fails, inline=True)(chain(leaf(1.0), 8000))
        await assert_awaiting_raises(ValueError, None, y.backward())

    heart = beside_a_heart(work, budget=1)
    assert heart.longest <= 1 + SLACK
    assert heart.beats >= 2 * 8000 // DISCOVER_STRIDE // (1 + SLACK)


# -------------------------------------------------------------------- many passes


def test_a_thousand_passes_in_flight_hold_the_loop_up_no_longer_than_one() -> None:
    async def work() -> None:
        x = leaf(1.0)

        async def one() -> None:
            await chain(x, 20).backward()

        await asyncio.gather(*(one() for _ in range(1000)))
        assert number(x.grad) == 1000.0

    heart = beside_a_heart(work)
    assert heart.longest <= BUDGET + SLACK
    assert heart.beats >= heart.clock.now // (BUDGET + SLACK)


def test_a_thousand_passes_cost_few_rounds_of_the_loop() -> None:
    """While the budget lasts a turn goes from hand to hand, so passes wait for each other, not for the loop."""

    async def main(count: int) -> None:
        x = leaf(1.0)
        graphs = [chain(x, 20) for _ in range(count)]
        async with ag.Engine(clock=Clock(), budget=100):
            await asyncio.gather(*(graph.backward() for graph in graphs))

    few, many = simulated_run(main, 100).steps, simulated_run(main, 1000).steps
    assert (many - few) / 900 < 6


def test_a_pass_is_made_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are started together begin in one round of the loop, so each may do next to nothing in it."""
    made = 0
    new_graph_task = engine_module.new_graph_task

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        return new_graph_task(*args, **options)

    async def main() -> tuple[int, int]:
        x = leaf(1.0)
        graphs = [chain(x, 20) for _ in range(500)]
        async with ag.Engine(clock=Clock(), budget=BUDGET) as engine:
            tasks = [asyncio.create_task(graph.backward()) for graph in graphs[::2]]
            tasks += [asyncio.create_task(ag.grad(graph, x)) for graph in graphs[1::2]]
            await rounds(2)
            first, begun = made, engine.statistics().in_flight + engine.statistics().committed
            await asyncio.gather(*tasks)
        assert number(x.grad) == 250.0
        return first, begun

    monkeypatch.setattr(engine_module, "new_graph_task", counting)
    first, begun = simulated_run(main).value
    assert made == begun == 500
    assert first <= BUDGET + SLACK


async def test_a_pass_that_is_cancelled_before_its_first_turn_is_as_cancelled_as_any(virtual_clock: VirtualClock) -> None:
    before = chain(leaf(1.0), 2000)
    x = leaf(1.0)
    y = chain(x, 20)
    async with ag.Engine(clock=Clock(), budget=2) as engine:
        first = asyncio.create_task(before.backward())
        second = asyncio.create_task(y.backward())
        await rounds(2)
        await cancel(second)
        assert not first.done()
        await first
        counted = engine.statistics()
        assert (counted.begun, counted.committed, counted.cancelled, counted.in_flight) == (2, 1, 1, 0)
        assert x.grad is None
        await assert_awaiting_raises(GraphFreedError, "ended with: CancelledError", y.backward())


async def test_closing_the_engine_fails_a_pass_that_waits_for_its_first_turn(virtual_clock: VirtualClock) -> None:
    graphs = [chain(leaf(1.0), 2000) for _ in range(3)]
    async with ag.Engine(clock=Clock(), budget=2) as engine:
        tasks = [asyncio.create_task(graph.backward()) for graph in graphs]
        await rounds(2)
    assert engine.statistics().failed == 3
    for task in tasks:
        await assert_awaiting_raises(EngineClosedError, "closed while a pass was running", task)


def test_a_training_loop_of_tiny_passes_leaves_turns_to_others() -> None:
    """None of its passes lasts long enough to be sliced, and none suspends by itself."""

    async def work() -> None:
        w = leaf([1.0, 2.0])
        for _ in range(2000):
            w.grad = None
            await (w * w).sum().backward()

    heart = beside_a_heart(work)
    assert heart.longest <= BUDGET + SLACK
    assert heart.beats > 2000 // (BUDGET + SLACK)


@pytest.mark.parametrize("path", ["walk", "general"])
def test_waiting_passes_have_their_turns_in_order(path: str) -> None:
    """Equal passes end in the order in which they began, whatever is left of a budget when one ends and the next has its turn."""

    async def main(length: int) -> list[int]:
        order: list[int] = []

        async def one(n: int) -> None:
            y = chain(leaf(1.0), length)
            if path == "general":
                y.register_hook(lambda g: None)
            await y.backward()
            order.append(n)

        async with ag.Engine(clock=Clock(), budget=2):
            await asyncio.gather(*(one(n) for n in range(20)))
        return order

    for length in (*range(14, 18), 70, 120, 200, 201, 211) if path == "walk" else range(14, 18):
        assert simulated_run(main, length).value == list(range(20)), length


def test_a_short_pass_is_not_kept_waiting_by_long_ones() -> None:
    """It gets its turn after one slice of each, not after all of them."""

    async def main() -> tuple[int, int]:
        clock = Clock()
        ends: dict[str, int] = {}

        async def one(name: str, length: int) -> None:
            await chain(leaf(1.0), length).backward()
            ends[name] = clock.now

        async with ag.Engine(clock=clock, budget=3):
            tasks = [asyncio.create_task(one(f"long {i}", 5000)) for i in range(5)]
            await rounds(10)
            start = clock.now
            await one("short", 5)
            took = ends["short"] - start
            await asyncio.gather(*tasks)
            return took, min(value for name, value in ends.items() if name != "short") - start

    took, others = simulated_run(main).value
    assert took < others / 10


async def test_a_turn_is_not_held_while_user_code_is_awaited(virtual_clock: VirtualClock) -> None:
    """Passes that wait in a hook, a rule, a callback or a nested pass let all others through."""

    leave = Switch()

    async def waits(*_: Any) -> None:
        await leave

    async def rule(ctx: Any, g: Any) -> Any:
        await leave
        return g

    hooked = leaf(1.0) * 1.0
    hooked.register_hook(waits)
    after = leaf(1.0)
    after.register_post_accumulate_grad_hook(waits)
    calls_back = leaf(1.0) * 1.0
    calls_back.register_hook(lambda g: ag.graph.queue_callback(waits))
    graphs = [hooked * 1.0, after * 1.0, calls_back * 1.0, function(rule)(leaf(1.0)), function(rule)(leaf(1.0)) + function(rule)(leaf(1.0))]
    tasks = [asyncio.create_task(graph.backward()) for graph in graphs]
    await rounds(20)
    assert not any(task.done() for task in tasks)
    async with asyncio.timeout(1):
        for _ in range(50):
            await chain(leaf(1.0), 100).backward()
    leave.on()
    await asyncio.gather(*tasks)


def test_cancelled_waiters_lose_their_place_and_nobody_else_does() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def one(n: int) -> None:
            await chain(leaf(1.0), 300).backward()
            order.append(n)

        async with ag.Engine(clock=Clock(), budget=2):
            tasks = [asyncio.create_task(one(n)) for n in range(12)]
            for n in range(1, 12, 2):
                await rounds(n)
                tasks[n].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await chain(leaf(1.0), 100).backward()
        return order

    assert sorted(simulated_run(main).value) == [0, 2, 4, 6, 8, 10]
    for seed in range(5):
        assert sorted(simulated_run(main, seed=seed, order="permuted").value) == [0, 2, 4, 6, 8, 10]


def test_between_two_budgets_the_loop_gets_enough_rounds_for_a_timer() -> None:
    """A timer or a socket needs two rounds until the coroutine behind it runs."""
    assert loop_budget.ROUNDS >= 3

    async def main() -> int:
        clock = Clock()
        async with ag.Engine(clock=clock, budget=4):
            task = asyncio.create_task(chain(leaf(1.0), 4000).backward())
            loop = asyncio.get_running_loop()
            fired = 0
            while not task.done():
                future = loop.create_future()
                loop.call_soon(loop.call_soon, future.set_result, None)
                before = clock.now
                await future
                fired += 1
                assert clock.now - before <= 2 * (4 + SLACK)
            await task
            return fired

    assert simulated_run(main).value > 30


async def test_a_pass_within_its_budget_takes_no_round_of_the_loop() -> None:
    x = leaf(2.0)
    y = x * x
    done: list[bool] = []
    async with ag.Engine(clock=lambda: 0.0):
        asyncio.get_running_loop().call_soon(done.append, True)
        await y.backward()
        assert done == []
    assert number(x.grad) == 4.0


# -------------------------------------------------------------------- sizes


async def test_a_hundred_thousand_way_fan_in() -> None:
    """One leaf, one node and one root with so many contributions."""
    n = 100_000
    x = leaf(1.0)
    y = x * 1.0
    with ag.no_grad():
        seed = ag.tensor(np.array(1.0))
    await ag.backward([y] * n, [seed] * n)
    assert number(x.grad) == float(n)


@pytest.mark.one_loop
@pytest.mark.slow
async def test_a_hundred_thousand_contributions_to_one_leaf() -> None:
    n = 100_000
    x = leaf([1.0, 2.0])
    total = x * 1.0
    for _ in range(n - 1):
        total = total + x
    total.register_hook(lambda g: None)  # the general path
    await total.sum().backward()
    assert x.grad.numpy().tolist() == [float(n)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("path", "nodes"), swept([("sweep", 200_000), ("sweep", 1_000_000), ("general", 200_000), ("inputs", 200_000)]))
def test_a_chain_of_a_million_nodes(path: str, nodes: int) -> None:
    async def main() -> None:
        x = leaf(1.0)
        y = x * 1.0
        if path == "general":
            y.register_hook(lambda g: None)
        y = chain(y, nodes)
        if path == "inputs":
            (grad,) = await ag.grad(y, x)
            assert number(grad) == 1.0
        else:
            await y.backward()
            assert number(x.grad) == 1.0
        del y  # freed without recursion

    gc.collect()
    gc.disable()  # nothing here is for the collector
    try:
        ag.run(main())
    finally:
        gc.enable()


@pytest.mark.one_loop
@pytest.mark.slow
async def test_a_deep_graph_whose_pass_is_cancelled() -> None:
    async def waits(ctx: Any, g: Any) -> Any:
        await asyncio.Event().wait()

    x = leaf(1.0, grad=1.0)
    y = chain(function(waits)(x), 100_000)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await y.backward()
    assert number(x.grad) == 1.0
