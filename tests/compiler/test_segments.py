"""Long programs are cut into segments: same bits, failures that name the line, and work that leaves the loop where it is heavy."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.compiler import steps
from aiograd.engine.placement import INLINE_NS
from aiograd.errors import GraphFreedError
from aiograd.testing.virtual_clock import VirtualClock
from tests.compiler.test_random_programs import bits, make, run
from tests.engine.cases import ticking
from tests.support import assert_awaiting_raises, cancel
from tests.support import random_leaf as leaf

rng = np.random.default_rng(2)


def nodes_of(tensor: Any) -> list[Any]:
    """The nodes of a graph that are no leaves."""
    found: list[Any] = []
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and not node.is_leaf and node not in found:
            found.append(node)
            stack += node.next_nodes
    return found


@pytest.mark.one_loop
@pytest.mark.parametrize("limit", [0.0, 900.0])
@pytest.mark.parametrize("seed", range(40))
async def test_random_programs_in_segments(seed: int, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SEGMENT_NS", limit)
    function, kinds, leaves = make(seed)
    compiled = ag.compile(function)
    numbers = np.random.default_rng(seed)
    for n in range(3):
        inputs = [ag.tensor(numbers.standard_normal(shape).astype(dtype), requires_grad=True) for shape, dtype in kinds]
        expected = await run(function, inputs, leaves, outside=bool(n))
        assert await run(compiled, inputs, leaves, outside=bool(n)) == expected
    assert compiled.statistics().runs == 2


async def test_heavy_statements_take_their_segment_to_the_executor_and_light_ones_stay_on_the_loop() -> None:
    w = leaf(256, 256)

    @ag.compile
    def f(x: Any) -> Any:
        for _ in range(8000):
            x = x * 1.001
        y = (x * ag.ones((512, 256))) @ w @ w @ w
        return (y * 1e-6).sum()

    x = leaf(1, 256)
    f(x)
    nodes = nodes_of(f(x))
    heavy = [node for node in nodes if node.estimate() > INLINE_NS]
    assert len(nodes) > 2 and 1 <= len(heavy) < len(nodes)
    assert all(node.estimate() <= INLINE_NS for node in nodes if node not in heavy)
    assert sum(len(part.code.program.statements) for part in f._all()[0]._parts) == len(f.programs[0].statements)


async def test_a_long_pass_pauses_between_segments_and_can_be_cancelled_there(virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SEGMENT_NS", 3000.0)
    w = ag.tensor(np.ones(3, np.float32), requires_grad=True)

    @ag.compile
    def f(x: Any) -> Any:
        for _ in range(3000):
            x = x * w
        return x.sum()

    x, beats = leaf(3), [0]
    f(x)
    loss = f(x)

    async def beat() -> None:
        while True:
            await asyncio.sleep(0)
            beats[0] += 1

    async with ag.Engine(clock=ticking(), budget=3):
        beating = asyncio.ensure_future(beat())
        running = asyncio.ensure_future(loss.backward())
        for _ in range(10):
            await asyncio.sleep(0)
        await cancel(running)
        cancelled = beats[0]
        assert x.grad is None and w.grad is None
        await f(x).backward()
        beating.cancel()
    assert x.grad is not None
    whole = beats[0] - cancelled
    assert cancelled < 40 < whole, (cancelled, whole)


async def test_a_failure_in_a_segment_names_statement_line_and_operation() -> None:
    f = ag.compile(lambda x: ag.log(x).sum() * 2)
    positive = ag.tensor(np.ones(3, np.float32), requires_grad=True)
    for _ in range(3):
        await f(positive).backward()
    zero = ag.tensor(np.zeros(3, np.float32), requires_grad=True)
    with np.errstate(divide="ignore"):
        loss = f(zero)
    with np.errstate(all="raise"), pytest.raises(FloatingPointError) as caught:
        await loss.backward()
    text = "\n".join(caught.value.__notes__)
    assert "log" in text and "test_segments.py" in text and "ag.log(x).sum() * 2" in text and "in the compiled function" in text
    assert zero.grad is None


async def test_outputs_are_differentiated_one_after_the_other_where_they_share_nothing() -> None:
    def f(x: Any, y: Any) -> tuple[Any, ...]:
        shared = ag.exp(x * y)
        return ag.sin(x).sum(), ag.cos(y).sum(), shared.sum(), (shared * shared).sum()

    compiled, x, y = ag.compile(f), leaf(4), leaf(4)
    compiled(x, y)
    for order in ((0, 1, 2), (1, 0, 3), (2, 0, 1)):
        found = []
        for call in (f, compiled):
            x.grad = y.grad = None
            outputs = call(x, y)
            for i in order:
                await outputs[i].backward()
            found.append(bits(x.grad, y.grad))
        assert found[0] == found[1]
    for call in (f, compiled):
        outputs = call(x, y)
        await outputs[2].backward()
        await assert_awaiting_raises(GraphFreedError, "second time", outputs[3].backward())
        await outputs[0].backward()
        await assert_awaiting_raises(GraphFreedError, "second time", outputs[0].backward())
    outputs = compiled(x, y)
    await outputs[3].backward()
    assert sum(array is not None for array in outputs[1].grad_fn._saved) < len(outputs[1].grad_fn._saved), "what is not needed any more is dropped"
