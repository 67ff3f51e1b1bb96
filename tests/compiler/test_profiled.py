"""Compiled functions under a profiler: scopes with statements inside, same bits."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiograd as ag
from aiograd import nn
from aiograd.profiler import profile
from tests.compiler.test_random_programs import bits, make, run


async def test_a_program_is_one_scope_with_its_statements_inside() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = ag.optim.SGD(model.parameters(), 0.1)

    @ag.compile
    async def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        await loss.backward()
        optimizer.step()
        return loss

    x = ag.ones((3, 4))
    await step(x)
    with profile() as found:
        await step(x)
    assert step.statistics().runs == 1 and step.statistics().eager == 0
    whole = max((event for event in found.events if event.category == "scope" and event.name == "step"), key=lambda event: event.duration)
    names = {event.name for event in found.events if event.category in ("forward", "backward")}
    assert {"linear", "tanh", "LinearBackward", "TanhBackward", "stepBackward"} <= names
    inside = [event for event in found.events if event.category in ("forward", "backward", "pass")]
    assert all(whole.start <= event.start and event.end <= whole.end for event in inside)
    (node,) = [event for event in found.events if event.name == "stepBackward"]
    rules = [event for event in found.events if event.name in ("LinearBackward", "TanhBackward")]
    assert all(node.start <= event.start and event.end <= node.end for event in rules)


def test_random_programs_under_a_profiler() -> None:
    async def main(seed: int) -> None:
        function, kinds, leaves = make(seed)
        compiled = ag.compile(function)
        numbers = np.random.default_rng(seed)
        for n in range(3):
            inputs = [ag.tensor(numbers.standard_normal(shape).astype(dtype), requires_grad=True) for shape, dtype in kinds]
            expected = await run(function, inputs, leaves, outside=True)
            if not n:
                await run(compiled, inputs, leaves, outside=True)
            with profile():
                assert await run(compiled, inputs, leaves, outside=True) == expected
        assert compiled.statistics().runs == 3 and not compiled.statistics().eager

    for seed in range(30):
        ag.run(main(seed), tune_gc=False)


async def test_nothing_is_recorded_under_a_profiler() -> None:
    compiled, x = ag.compile(lambda x: x * 2), ag.ones(3)
    with profile():
        assert bits(compiled(x)) == bits(x * 2)
    assert (compiled.statistics().recordings, compiled.statistics().eager) == (0, 1)
