"""Gates of passes: slices of a pass wait for other work of the loop, each for a bounded time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import aiograd as ag
from aiograd.engine.loop_budget import GATE_PAUSE
from aiograd.testing.virtual_clock import VirtualClock
from tests.engine.cases import chain, number, ticking
from tests.support import cancel, leaf

#: nodes of a pass, and readings of the clock per slice
LENGTH, BUDGET = 2000, 5


class Gate:
    """Returns `seconds` while it is closed, and notes when it was asked."""

    def __init__(self, seconds: float, loop: Any) -> None:
        self.seconds = seconds
        self.asked: list[float] = []
        self._loop = loop

    def __call__(self) -> float:
        self.asked.append(self._loop.time())
        return self.seconds

    def holds(self) -> list[float]:
        """How long the slices of one pass waited, apart from those that were let through at once."""
        starts = [0, *[n for n in range(1, len(self.asked)) if self.asked[n] - self.asked[n - 1] < GATE_PAUSE / 2], len(self.asked)]
        return [self.asked[stop - 1] - self.asked[start] for start, stop in itertools.pairwise(starts)]


def engine() -> ag.Engine:
    return ag.Engine(clock=ticking(), budget=BUDGET)


async def run_pass() -> float:
    x = leaf(1.0)
    await chain(x, LENGTH, 1.001).backward()
    return number(x.grad)


async def test_no_gates_by_default(virtual_clock: VirtualClock) -> None:
    async with engine() as made:
        assert made.pass_gates == []
        await run_pass()
    assert virtual_clock.time() == 0.0


async def test_an_open_gate_changes_nothing(virtual_clock: VirtualClock) -> None:
    gate = Gate(0.0, virtual_clock.loop)
    async with engine():
        without = await run_pass()
        steps = virtual_clock.loop.steps
        without = await run_pass()
        steps = virtual_clock.loop.steps - steps
    async with engine() as made:
        made.pass_gates.append(gate)
        await run_pass()
        begun = virtual_clock.loop.steps
        assert await run_pass() == without
        assert virtual_clock.loop.steps - begun == steps, "not one round of the loop more"
    assert virtual_clock.time() == 0.0 and len(gate.asked) > 10


async def test_gates_are_asked_only_while_passes_wait(virtual_clock: VirtualClock) -> None:
    gate = Gate(1.0, virtual_clock.loop)
    async with ag.Engine(budget=1.0) as made:
        made.pass_gates.append(gate)
        await run_pass()
        await asyncio.sleep(0.1)
    assert gate.asked == []


async def test_a_gate_that_never_opens_delays_each_slice_by_its_seconds(virtual_clock: VirtualClock) -> None:
    gate = Gate(0.05, virtual_clock.loop)
    async with engine() as made:
        without = await run_pass()
        made.pass_gates.append(gate)
        assert await run_pass() == without
    holds = gate.holds()
    assert len(holds) > 10 and all(0.05 <= seconds < 0.05 + 2 * GATE_PAUSE for seconds in holds)
    assert virtual_clock.time() == pytest.approx(sum(holds), rel=0.05)


async def test_passes_run_as_soon_as_the_gate_opens(virtual_clock: VirtualClock) -> None:
    gate = Gate(10.0, virtual_clock.loop)
    async with engine() as made:
        made.pass_gates.append(gate)
        running = asyncio.ensure_future(run_pass())
        await asyncio.sleep(3.0)
        assert not running.done()
        gate.seconds = 0.0
        await running
    assert virtual_clock.time() <= 3.0 + 2 * GATE_PAUSE


@pytest.mark.parametrize("seconds", [(0.05, 0.03, 0.07), (0.05, 0.05), (0.0, 0.04, 0.0)])
async def test_several_gates_hold_as_long_as_the_longest(virtual_clock: VirtualClock, seconds: tuple[float, ...]) -> None:
    gates = [Gate(each, virtual_clock.loop) for each in seconds]
    async with engine() as made:
        made.pass_gates.extend(gates)
        await run_pass()
    longest = max(seconds)
    assert all(longest <= found < longest + 2 * GATE_PAUSE for found in gates[0].holds())


async def test_a_gate_that_is_removed_holds_no_more(virtual_clock: VirtualClock) -> None:
    gate = Gate(10.0, virtual_clock.loop)
    async with engine() as made:
        made.pass_gates.append(gate)
        running = asyncio.ensure_future(run_pass())
        await asyncio.sleep(3.0)
        made.pass_gates.remove(gate)
        await running
        assert virtual_clock.time() <= 3.0 + 2 * GATE_PAUSE
        gate.asked.clear()
        gate.seconds = 1.0
        made.pass_gates.append(gate)
        await run_pass()
    assert gate.holds()[0] >= 1.0, "the first slice of the next pass waits as long as any"


async def test_a_pass_is_cancelled_while_a_gate_holds_it(virtual_clock: VirtualClock) -> None:
    gate = Gate(10.0, virtual_clock.loop)
    async with engine() as made:
        without = await run_pass()
        made.pass_gates.append(gate)
        running = asyncio.ensure_future(run_pass())
        await asyncio.sleep(3.0)
        gate.seconds = 0.05
        await cancel(running)
        assert virtual_clock.time() < 3.0 + 10 * 0.05, "the slices that release the graph are held too"
        gate.seconds = 0.0
        assert await run_pass() == without


async def test_other_tasks_run_while_passes_wait(virtual_clock: VirtualClock) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    gates: list[Callable[[], float]] = [lambda: 0.05]
    async with engine() as made:
        made.pass_gates.extend(gates)
        other = asyncio.ensure_future(tick())
        await asyncio.gather(*(run_pass() for _ in range(3)))
        await cancel(other)
    assert ticks == pytest.approx(virtual_clock.time() / 0.001, abs=2) and ticks > 100
