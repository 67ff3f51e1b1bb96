"""Input half and weight half of random stages give what the whole gives, to the bit, and no work is done twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from aiograd.engine.graph_task import GraphTask
from aiograd.engine.run import runner
from aiograd.engine.split_backward import InputPlan, WeightPlan
from aiograd.engine.walk import GraphWalk
from aiograd.graph.node import Node
from aiograd.pipeline import backward, stage_backward, stage_backward_input, stage_backward_weight
from aiograd.tensors.op_node import OpNode
from tests.engine.test_plan import new_general_task
from tests.pipeline.random_stages import Stage

SEEDS = 400


def bits(tensors: Any) -> list[Any]:
    return [None if tensor is None else (tensor.shape, tensor.detach().numpy().tobytes()) for tensor in tensors]


def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[tuple[Node, int]], list[tuple[Node, bool]]]:
    """The computations of both halves: how often each output of each node, and which nodes run in which half."""
    made: Counter[tuple[Node, int]] = Counter()
    runs: list[tuple[Node, bool]] = []
    original = GraphTask.complete

    def complete(task: GraphTask, node: Any, outputs: Any) -> None:
        is_half = isinstance(task.plan, (InputPlan, WeightPlan))
        if is_half and len(outputs) and (node is not task.plan.root or node.num_inputs):
            runs.append((node, isinstance(task.plan, InputPlan)))
            made.update([(node, i) for i, output in enumerate(outputs) if output is not None])
        original(task, node, outputs)

    monkeypatch.setattr(GraphTask, "complete", complete)
    return made, runs


async def test_two_halves_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made, runs = watch(monkeypatch)
    halved = 0
    for seed in range(SEEDS):
        whole = Stage(seed)
        whole_inputs = await stage_backward(*whole.run(), whole.inputs)
        stage = Stage(seed)
        made.clear()
        runs.clear()
        dinputs, groups = await stage_backward_input(*stage.run(), stage.inputs, stage.listed())
        assert bits(dinputs) == bits(whole_inputs), seed
        assert not any(weight.grad is not None for weight in stage.weights), seed
        result = await stage_backward_weight(stage.listed(), groups)
        assert bits(stage.weight_grads()) == bits(whole.weight_grads()), seed
        assert [None if grad is None else id(grad) for grad in result] == [None if w.grad is None else id(w.grad) for w in stage.listed()]
        # every custom function did as much as in the whole pass, and no more
        assert Counter(stage.calls.log) == Counter(whole.calls.log), seed
        assert not made or max(made.values()) == 1, seed
        for node in {node for node, is_first in runs if is_first} & {node for node, is_first in runs if not is_first}:
            halved += 1
            if node.is_builtin:
                first = [i for i in range(node.num_outputs) if (node, i) in made]
                assert not any(node.shares_work([i], [j]) for i in first for j in first if i != j), (seed, node)
    assert halved > SEEDS / 4  # the programs do contain what this is about


async def test_halves_that_are_swept_are_those_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[Any] = []

    def swept(task: Any, *args: Any) -> Any:
        tasks.append(task)
        return GraphWalk(task, *args)

    monkeypatch.setattr(runner, "GraphWalk", swept)
    first_halves = second_halves = halved = undivided = 0
    for seed in range(SEEDS):
        whole = Stage(seed, is_plain=True)
        whole_inputs = await stage_backward(*whole.run(), whole.inputs)
        stage = Stage(seed, is_plain=True)
        outputs, grads = stage.run()
        tasks.clear()
        dinputs, groups = await stage_backward_input(outputs, grads, stage.inputs, stage.listed())
        terms = sum(len(group.terms) for group in groups)
        await stage_backward_weight(stage.listed(), groups)
        assert bits(dinputs) == bits(whole_inputs), seed
        assert bits(stage.weight_grads()) == bits(whole.weight_grads()), seed
        first_halves += sum(isinstance(task.plan, InputPlan) for task in tasks)
        second_halves += sum(isinstance(task.plan, WeightPlan) for task in tasks)
        undivided += terms > 0
        if len(tasks) == 2:
            halved += not set(tasks[0].plan.order).isdisjoint(tasks[1].plan.order)
        with monkeypatch.context() as patch:
            patch.setattr(backward, "new_graph_task", new_general_task)
            stage = Stage(seed, is_plain=True)
            tasks.clear()
            others, groups = await stage_backward_input(*stage.run(), stage.inputs, stage.listed())
            await stage_backward_weight(stage.listed(), groups)
        assert not tasks
        assert bits(others) == bits(dinputs), seed
        assert bits(stage.weight_grads()) == bits(whole.weight_grads()), seed
    # the programs do contain what this is about
    assert min(first_halves, second_halves) > SEEDS * 0.8, (first_halves, second_halves)
    assert halved > SEEDS / 4, halved
    assert undivided > SEEDS / 20, undivided


async def test_swept_halves_do_no_work_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[tuple[Node, int]] = Counter()
    original = OpNode.vjp_part

    def vjp_part(node: Any, g: Any, needs: tuple[bool, ...]) -> Any:
        made.update([(node, i) for i, need in enumerate(needs) if need])
        return original(node, g, needs)

    monkeypatch.setattr(OpNode, "vjp_part", vjp_part)
    parts = 0
    for seed in range(SEEDS):
        stage = Stage(seed, is_plain=True)
        made.clear()
        _, groups = await stage_backward_input(*stage.run(), stage.inputs, stage.listed())
        first = set(made)
        await stage_backward_weight(stage.listed(), groups)
        assert not made or max(made.values()) == 1, seed
        for node, i in first:
            second = [j for other, j in made if other is node and (node, j) not in first]
            assert not second or not node.shares_work([i], second), (seed, node)  # type: ignore[attr-defined]
        parts += len(made)
    assert parts > SEEDS
