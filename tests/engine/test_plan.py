"""Passes over a part of a plain graph are swept too, and give what the general path gives, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.pass_hooks import PassHooks
from aiograd.engine.placement import RulePlacement
from aiograd.engine.plan import SORT_NODES
from aiograd.engine.run import current_engine, engine, new_graph_task, runner
from aiograd.engine.walk import GraphWalk
from aiograd.errors import UnusedInputError
from aiograd.graph import get_gradient_edge
from tests.support import assert_awaiting_raises, bits, leaf

SEEDS = 200


def new_general_task(*args: Any, **options: Any) -> GraphTask:
    """One that is never swept."""
    task = new_graph_task(*args, **options)
    task.may_walk = False
    return task


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[GraphTask]:
    """The passes that were run in one walk."""
    tasks: list[GraphTask] = []

    class Spy(GraphWalk):
        __slots__ = ()

        def run(self) -> Iterator[None]:
            if self.task.plan.is_plain:
                tasks.append(self.task)
            yield from super().run()
            if self.is_complete and not self.task.plan.is_plain:
                tasks.append(self.task)

    monkeypatch.setattr(runner, "GraphWalk", Spy)
    return tasks


def program(seed: int) -> tuple[list[Any], list[Any], Any]:
    """Leaves, what was made of them, and a loss."""
    draw = random.Random(seed)
    values = np.random.default_rng(seed)
    leaves = [leaf(values.uniform(-1.0, 1.0, (3, 3))) for _ in range(draw.randint(1, 4))]
    pool = list(leaves)
    rows: list[Callable[[Any, Any], Any]] = [
        lambda a, b: a @ b, lambda a, b: a * b + a, lambda a, b: np.tanh(a), lambda a, b: a + b[0], lambda a, b: ag.concat([a[:1], b[1:]], axis=0),
        lambda a, b: ag.stack(list(ag.unstack(a))), lambda a, b: ag.nn.functional.layer_norm(a, (3,), b[0], b[1]), lambda a, b: a * 2.0,
    ]  # fmt: skip
    for _ in range(draw.randint(1, 12)):
        pool.append(draw.choice(rows)(draw.choice(pool), draw.choice(pool)))
    made = pool[len(leaves) :]
    return leaves, made, (made[-1] * draw.choice(pool)).sum()


async def test_gradients_of_some_inputs(swept: list[GraphTask], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = 0
    for seed in range(SEEDS):
        results = []
        for make in (new_graph_task, new_general_task):
            leaves, made, loss = program(seed)
            inputs = random.Random(seed).sample([*leaves, *made, loss], 1 + seed % 3)
            with monkeypatch.context() as patch:
                patch.setattr(engine, "new_graph_task", make)
                task = current_engine().execute([get_gradient_edge(loss)], [np.ones(())], inputs=[get_gradient_edge(t) for t in inputs])
            results.append(bits(*await task.future))
            if make is new_graph_task:
                assert swept.pop() is task
                parts += bool(task.plan.special)
            assert not swept
        assert results[0] == results[1], seed
    assert parts > SEEDS / 4


async def test_leaves_that_are_named_accumulate_and_others_do_not(swept: list[GraphTask]) -> None:
    x, w, v = leaf([[2.0]]), leaf([[3.0]]), leaf([[5.0]])
    hidden = x @ w
    hidden.retain_grad()
    loss = (hidden @ v).sum()
    await ag.backward(loss, inputs=[x, v], retain_graph=True)
    assert not swept  # a retained gradient is user code
    assert (x.grad.item(), w.grad, v.grad.item()) == (15.0, None, 6.0)
    loss = ((x @ w) @ v).sum()
    await ag.backward(loss, inputs=[x, v], retain_graph=True)
    assert len(swept) == 1
    assert (x.grad.item(), w.grad, v.grad.item()) == (30.0, None, 12.0)
    await loss.backward()  # what the first pass did not run is still there, and so is what it kept
    assert (x.grad.item(), w.grad.item(), v.grad.item()) == (45.0, 10.0, 18.0)


async def test_accumulating_into_what_is_no_leaf_writes_nothing(swept: list[GraphTask]) -> None:
    x = leaf([2.0])
    hidden = x * 3.0
    edges = [get_gradient_edge(hidden.sum())], [get_gradient_edge(hidden)]
    assert await current_engine().execute(edges[0], [np.ones(())], inputs=edges[1], accumulate=True).future == []
    assert not swept
    assert x.grad is None


async def test_the_gradient_of_a_tensor_in_the_middle_is_kept(swept: list[GraphTask]) -> None:
    x, w = leaf([2.0]), leaf([3.0])
    hidden = x * w
    loss = (hidden * hidden).sum()
    await ag.backward(loss, inputs=[hidden, x])
    assert len(swept) == 1
    assert (hidden.grad.item(), x.grad.item(), w.grad) == (12.0, 36.0, None)


async def test_a_part_of_several_roots(swept: list[GraphTask]) -> None:
    x, w = leaf([2.0]), leaf([3.0])
    (dx,) = await ag.grad([x * 2.0, w * 5.0, x * w], [x], [leaf([1.0]).detach()] * 3)
    assert dx.item() == 5.0
    assert len(swept) == 1


async def test_where_the_loss_is_the_input(swept: list[GraphTask]) -> None:
    x = leaf([2.0])
    loss = (x * x).sum()
    (dloss,) = await ag.grad(loss, [loss])
    assert dloss.item() == 1.0
    assert len(swept) == 1


async def test_what_does_not_run_is_not_released(swept: list[GraphTask]) -> None:
    x, w = leaf([2.0]), leaf([3.0])
    hidden = x * w
    loss = (hidden * hidden).sum()
    await ag.grad(loss, [hidden])
    await hidden.backward()
    assert len(swept) == 2
    assert (x.grad.item(), w.grad.item()) == (3.0, 2.0)
    await assert_awaiting_raises(ag.errors.GraphFreedError, None, loss.backward())


async def test_an_unused_input_is_an_error_before_anything_runs(swept: list[GraphTask]) -> None:
    x, w = leaf([2.0]), leaf([3.0])
    loss = (x * x).sum()
    await assert_awaiting_raises(UnusedInputError, None, ag.grad(loss, [w]))
    assert not swept
    assert await ag.grad(loss, [w], allow_unused=True) == (None,)
    assert len(swept) == 1


async def test_a_rule_that_fails_in_a_part_of_a_graph(swept: list[GraphTask]) -> None:
    x, w = leaf([2.0]), leaf([3.0])
    product = x * w
    loss = product.sum()
    with ag.no_grad():
        w += 1.0
    raised = await assert_awaiting_raises(ag.errors.ModifiedError, "x2 of mul ", ag.grad(loss, [x]))
    assert len(swept) == 1
    assert any("in the backward of MulBackward" in line for line in raised.__notes__)
    await assert_awaiting_raises(ag.errors.GraphFreedError, "ModifiedError", loss.backward())


@pytest.mark.parametrize("is_plain", [True, False])
async def test_a_failed_pass_that_had_nothing_to_run_leaves_the_graph_alone(is_plain: bool) -> None:
    x, y = leaf([2.0]), leaf([3.0])
    output = x * x
    make = new_graph_task if is_plain else new_general_task
    task = make([get_gradient_edge(output)], [np.ones(1)], inputs=[get_gradient_edge(y)])
    for _ in task.discover(RulePlacement()):
        pass
    task.fail(RuntimeError("not today"))
    for _ in task.release_graph():
        pass
    task.finish()
    await output.backward()
    assert x.grad.item() == 4.0


async def test_large_parts_take_the_general_path(swept: list[GraphTask]) -> None:
    x, w = leaf([1.0]), leaf([1.0])
    y = x
    for _ in range(SORT_NODES):
        y = y + w
    (dx,) = await ag.grad(y.sum(), [x])
    assert dx.item() == 1.0
    assert not swept


async def test_gradients_go_where_hooks_say(swept: list[GraphTask]) -> None:
    x, w = leaf([2.0]), leaf([3.0])
    boxes: dict[Any, Any] = {}

    class Box:
        grad: Any = None

    class Hooks(PassHooks):
        def grad_target(self, leaf: Any) -> Any:
            return boxes.setdefault(leaf.leaf(), Box())

    loss = (x * w).sum()
    task = new_graph_task([get_gradient_edge(loss)], [np.ones(())], hooks=Hooks())
    await current_engine().run(task)
    assert swept == [task]
    assert (boxes[x].grad.item(), boxes[w].grad.item(), x.grad, w.grad) == (3.0, 2.0, None, None)
