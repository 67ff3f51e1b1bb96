"""A whole graph that is run in one walk, to its end or until something needs the general path, gives what the general path gives, to the bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.run import current_engine, new_graph_task, runner
from aiograd.engine.walk import GraphWalk
from aiograd.errors import GraphError, GraphFreedError, ModifiedError
from aiograd.graph import get_gradient_edge
from aiograd.graph.node import Node
from tests.engine.cases import chain, ticking
from tests.engine.test_plan import new_general_task, program
from tests.support import assert_awaiting_raises, bits, cancel, leaf

SEEDS = 150


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[GraphWalk]:
    """The walks that have been begun and left."""
    begun: list[GraphWalk] = []

    class Spy(GraphWalk):
        __slots__ = ()

        def run(self) -> Iterator[None]:
            begun.append(self)
            yield from super().run()

    monkeypatch.setattr(runner, "GraphWalk", Spy)
    return begun


async def run(make: Callable[..., GraphTask], loss: Any, seed: Any = None) -> GraphTask:
    task = make([get_gradient_edge(loss)], [np.ones(()) if seed is None else seed], keep_graph=True)
    await current_engine().run(task)
    return task


def hooked(seed: int, log: list[Any]) -> tuple[list[Any], Any]:
    """A program with hooks on some of its tensors and leaves, which write what they see."""
    draw = random.Random(-seed)
    leaves, made, loss = program(seed)
    for number, tensor in enumerate((*leaves, *made)):
        if draw.random() < 1.5 / (len(leaves) + len(made)) and tensor.requires_grad:
            tensor.register_hook(lambda g, number=number: log.append((number, g.numpy().tobytes())))
    if draw.random() < 0.3:
        first = draw.choice(leaves)
        first.register_post_accumulate_grad_hook(lambda t: log.append(("leaf", t.grad.numpy().tobytes())))
    return leaves, loss


async def test_hooks_anywhere(walks: list[GraphWalk]) -> None:
    """The work done before the first hook is handed over, and hooks see the same in the same order."""
    handed_over = complete = 0
    for seed in range(SEEDS):
        logs: list[list[Any]] = []
        found = []
        for make in (new_graph_task, new_general_task):
            logs.append([])
            leaves, loss = hooked(seed, logs[-1])
            for _ in range(2):  # a second time onto what is there
                await run(make, loss)
            found.append(bits(*(tensor.grad for tensor in leaves)))
        assert found[0] == found[1], seed
        assert logs[0] == logs[1], seed
        handed_over += sum(walk.has_begun and not walk.is_complete for walk in walks)
        complete += sum(walk.is_complete for walk in walks)
        walks.clear()
    assert handed_over > SEEDS / 3 and complete > SEEDS / 3


@pytest.mark.parametrize("inline_ns", [4.0, 10.0, 20.0])
async def test_expensive_nodes_anywhere(walks: list[GraphWalk], inline_ns: float) -> None:
    """Work for the executor may be in the middle; here "expensive" is a matter of nanoseconds."""
    handed_over = 0
    async with ag.Engine(inline_ns=inline_ns):
        for seed in range(SEEDS // 3):
            found = []
            for make in (new_graph_task, new_general_task):
                leaves, _, loss = program(seed)
                await run(make, loss)
                found.append(bits(*(tensor.grad for tensor in leaves)))
            assert found[0] == found[1], seed
            handed_over += sum(walk.has_begun and not walk.is_complete for walk in walks)
            walks.clear()
    assert handed_over


async def test_several_roots_and_a_root_with_several_inputs(walks: list[GraphWalk]) -> None:
    x, w = leaf([2.0, 3.0]), leaf([5.0, 7.0])
    first, second = ag.unstack(x * w)
    hidden = first * second
    await ag.backward([hidden, second, hidden])
    assert (x.grad.tolist(), w.grad.tolist()) == ([2 * 5.0 * 21.0, 2 * 10.0 * 7.0 + 7.0], [2 * 2.0 * 21.0, 2 * 10.0 * 3.0 + 3.0])
    assert [walk.is_complete for walk in walks] == [True]


async def test_a_pass_that_was_walked_knows_its_graph(walks: list[GraphWalk]) -> None:
    x, w = leaf([2.0]), leaf([3.0])
    hidden = x * w
    loss = hidden.sum()
    task = await run(new_graph_task, loss)
    assert walks[0].is_complete
    assert task.nodes_in_graph == {hidden.grad_fn, x._node, w._node}
    assert task.will_run(hidden.grad_fn) and not task.will_run(leaf([1.0])._node)
    assert task.execution_order() == [loss.grad_fn, hidden.grad_fn, x._node, w._node]


async def test_an_error_in_a_walk_changes_no_gradient_and_spends_the_whole_graph(walks: list[GraphWalk]) -> None:
    x, w = leaf([2.0], grad=[1.0]), leaf([3.0])
    early = x * w
    product = early * w
    loss = product.sum()
    with ag.no_grad():
        w += 1.0
    raised = await assert_awaiting_raises(ModifiedError, None, loss.backward())
    assert not walks[0].is_complete
    assert any("in the backward of MulBackward" in line for line in raised.__notes__)
    assert (x.grad.item(), w.grad) == (1.0, None)
    for tensor in (loss, product, early):
        await assert_awaiting_raises((GraphFreedError, ModifiedError), "ModifiedError|already", tensor.sum().backward())


async def test_a_walk_that_is_cancelled_spends_the_graph(walks: list[GraphWalk]) -> None:
    x = leaf([2.0])
    loss = chain(x, 400)
    async with ag.Engine(clock=ticking(), budget=3):
        waiting = asyncio.ensure_future(loss.sum().backward())
        for _ in range(3):
            await asyncio.sleep(0)
        await cancel(waiting)
        assert len(walks) == 1 and not walks[0].is_complete
        assert x.grad is None
        await assert_awaiting_raises(GraphFreedError, None, loss.sum().backward())


async def test_edges_against_the_order_of_numbers_are_counted_not_walked(walks: list[GraphWalk]) -> None:
    x, w = leaf([2.0]), leaf([3.0])
    early = x * 5.0
    late = w * 7.0
    early.grad_fn.set_next_edge(0, get_gradient_edge(late))
    await (early + late).sum().backward()
    assert not walks
    assert (x.grad, w.grad.item()) == (None, 42.0)


async def test_nodes_without_the_order_of_recording_are_an_error(walks: list[GraphWalk]) -> None:
    """Nothing else in the package makes them; a sum that is wrong in silence would be worse."""
    x = leaf([2.0])
    hidden = x * 3.0
    loss = hidden.sum()
    hidden.grad_fn._seq = loss.grad_fn._seq + 1
    await assert_awaiting_raises(GraphError, "not numbered in the order of recording", loss.backward())
    assert x.grad is None


async def test_leaves_that_were_reached_before_the_walk_ended_are_staged_first() -> None:
    """As on the general path: by the time the hook of the last leaf is awaited nothing else is left to do, so it is awaited in the caller's task."""
    tasks: list[Any] = []

    async def hook(g: Any) -> None:
        tasks.append(asyncio.current_task())

    x, y = leaf([1.0, 2.0]), leaf([1.0, 2.0])
    x.register_hook(hook)
    for reordered in (False, True):
        Node.any_reordered = reordered
        await (x * 2.0 + y * 1.0).sum().backward()
    assert tasks == [asyncio.current_task()] * 2
