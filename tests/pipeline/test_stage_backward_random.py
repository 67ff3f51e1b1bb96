"""Input half and weight half of random stages give what the whole gives, to the bit, and no work is done twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from aiograd.engine.halves import InputHalf, WeightHalf
from aiograd.graph.node import Node
from aiograd.pipeline import stage_backward, stage_backward_input, stage_backward_weight
from tests.pipeline.random_stages import Stage

SEEDS = 400


def bits(tensors: Any) -> list[Any]:
    return [None if tensor is None else (tensor.shape, tensor.detach().numpy().tobytes()) for tensor in tensors]


def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[tuple[Node, int]], list[tuple[Node, bool]]]:
    """What both halves compute: how often each output of each node, and which nodes run in which half."""
    made: Counter[tuple[Node, int]] = Counter()
    runs: list[tuple[Node, bool]] = []
    for half in (InputHalf, WeightHalf):

        def complete(self: Any, node: Any, outputs: Any, original: Any = half.complete, is_first: bool = half is InputHalf) -> None:
            if len(outputs) and (node is not self.root or node.num_inputs):
                runs.append((node, is_first))
                made.update([(node, i) for i, output in enumerate(outputs) if output is not None])
            original(self, node, outputs)

        monkeypatch.setattr(half, "complete", complete)
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
