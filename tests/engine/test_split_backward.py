"""The two halves of a pass as passes of the engine: all leaves at once, gradient targets, and what they say about themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiograd as ag
from aiograd.engine.pass_hooks import PassHooks
from aiograd.engine.run import current_engine, new_graph_task
from aiograd.engine.split_backward import InputPlan, WeightPlan
from aiograd.errors import ArgumentError, GraphFreedError
from aiograd.graph import current
from tests.support import assert_raises, leaf


class Box:
    """Where a gradient arrives."""

    def __init__(self) -> None:
        self.grad: Any = None


class Boxes(PassHooks):
    """A place of its own for the gradient of each leaf."""

    runs_post_accumulate_hooks = False

    def __init__(self) -> None:
        self.boxes: dict[Any, Box] = {}

    def grad_target(self, leaf: Any) -> Box:
        return self.boxes.setdefault(leaf, Box())


async def first_half(output: Any, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    plan = InputPlan([(output._node, output._nr)], [np.ones(output.shape)], [(x._node, x._nr) for x in inputs])
    results = await current_engine().run(new_graph_task(plan=plan))
    return results, plan.groups()


async def second_half(groups: list[Any], **options: Any) -> None:
    await current_engine().run(new_graph_task(plan=WeightPlan(groups), **options))


async def test_by_default_every_leaf_but_the_inputs_is_a_weight() -> None:
    x, v, w = leaf([2.0]), leaf([3.0]), leaf([5.0])
    (dx,), groups = await first_half(x * v * w, [x])
    assert dx.item() == 15.0
    assert {tensor for group in groups for tensor in group.params} == {v, w}
    hooks = Boxes()
    await second_half(groups, hooks=hooks)
    assert {node.leaf(): box.grad.item() for node, box in hooks.boxes.items()} == {v: 10.0, w: 6.0}
    assert (v.grad, w.grad) == (None, None)


async def test_groups_say_what_they_hold() -> None:
    x, w, b = leaf([[2.0]]), leaf([[3.0]]), leaf([[5.0]])
    _, groups = await first_half(x @ w + b, [x])
    assert [repr(group) for group in groups] == ["<ParameterGroup of 1 weights: 1 nodes to run again, 0 gradients>"] * 2
    assert sorted(node.name for group in groups for node in group.intermediates) == ["AddBackward", "MatmulBackward"]
    await second_half(groups)
    assert [repr(group) for group in groups] == ["<ParameterGroup of 1 weights: spent>"] * 2
    assert_raises(GraphFreedError, "second time", WeightPlan, groups)
    assert_raises(ArgumentError, "no parameter groups", WeightPlan, [])


async def test_user_code_sees_what_runs_in_its_half() -> None:
    x, w = leaf([2.0]), leaf([3.0])
    hidden = x * w
    output = ag.tanh(hidden)
    seen: dict[str, Any] = {}

    def look(name: str, *nodes: Any) -> Any:
        def hook(*_: Any) -> None:
            seen[name] = ([node.name for node in current.execution_order()], [current.will_run(node) for node in nodes])

        return hook

    nodes = (output.grad_fn, hidden.grad_fn, x._node, w._node)
    x.register_hook(look("input", *nodes))
    w.register_hook(look("weight", *nodes))
    _, groups = await first_half(output, [x])
    del output, hidden
    await second_half(groups)
    assert seen == {
        "input": (["TanhBackward", "MulBackward"], [True, True, False, False]),
        "weight": (["ReleasingRoot", "MulBackward", "AccumulateGrad"], [False, True, False, True]),
    }
