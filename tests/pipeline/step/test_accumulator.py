"""The gradients of a step are added in one order, whatever the order in which they are made."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.engine.input_buffer import FOLD_INLINE_BYTES
from aiograd.errors import GraphError
from aiograd.pipeline.step.accumulator import GradientAccumulator

#: numbers whose sum depends on the order
VALUES = [1e8, 1.0, -1e8, 3.0, 1e-3, 7e7, -7e7, 0.1]


def leaf(size: int = 1, grad: float | None = None) -> Any:
    tensor = ag.tensor(np.zeros(size, np.float32), requires_grad=True)
    if grad is not None:
        tensor.grad = ag.tensor(np.full(size, grad, np.float32))
    return tensor


def full(value: float, size: int = 1) -> Any:
    return np.full(size, value, np.float32)


def in_order(*values: float) -> Any:
    total = np.float32(values[0])
    for value in values[1:]:
        total = np.float32(total + np.float32(value))
    return total


@pytest.mark.parametrize("base", [None, 5.0])
@pytest.mark.parametrize("size", [1, FOLD_INLINE_BYTES // 4 + 1])
async def test_microbatches_in_any_order(base: float | None, size: int) -> None:
    for order in random.Random(1).sample(list(itertools.permutations(range(4))), 8 if size == 1 else 2):
        tensor = leaf(size, base)
        before = tensor.grad
        accumulator = GradientAccumulator({0: frozenset([tensor._node])}, 4)
        for i, microbatch in enumerate(order):
            accumulator.deliver(0, microbatch, {tensor._node: full(VALUES[microbatch], size)})
            await accumulator.fold()
            prefix = next(n for n in range(5) if n not in order[: i + 1])
            assert accumulator.waiting == sum(each >= prefix for each in order[: i + 1])  # everything before the first gap has been folded
            assert tensor.grad is before
        await accumulator.prepare()
        assert tensor.grad is before
        accumulator.commit()
        expected = in_order(*([] if base is None else [base]), *VALUES[:4])
        assert np.all(tensor.grad.numpy() == expected)


async def test_later_stages_come_first_within_a_microbatch() -> None:
    for order in itertools.permutations([(stage, microbatch) for stage in range(2) for microbatch in range(2)]):
        shared, own = leaf(), leaf()
        for known in (
            {0: frozenset([shared._node]), 1: frozenset([shared._node, own._node])},
            {0: None, 1: None},
            {0: frozenset([shared._node]), 1: None},
        ):
            shared.grad = own.grad = None
            accumulator = GradientAccumulator(known, 2)
            for stage, microbatch in order:
                grads = {shared._node: full(VALUES[2 * microbatch + (1 - stage)])}
                if stage == 1:
                    grads[own._node] = full(VALUES[microbatch])
                accumulator.deliver(stage, microbatch, grads)
                await accumulator.fold()
            await accumulator.prepare()
            accumulator.commit()
            sums = [in_order(*VALUES[2 * i : 2 * i + 2]) for i in range(2)]
            assert shared.grad.numpy() == in_order(*sums) and own.grad.numpy() == in_order(*VALUES[:2])


async def test_a_stage_that_keeps_a_leaf_to_itself() -> None:
    """Another stage's leaf that a stage uses without telling: nothing is lost, and its own microbatches keep their order."""
    tensor = leaf()
    accumulator = GradientAccumulator({0: frozenset([tensor._node]), 1: frozenset()}, 2)
    for stage, microbatch, value in ((0, 0, VALUES[0]), (0, 1, VALUES[1]), (1, 1, VALUES[3]), (1, 0, VALUES[2])):
        accumulator.deliver(stage, microbatch, {tensor._node: full(value)})
        await accumulator.fold()
    await accumulator.prepare()
    accumulator.commit()
    assert tensor.grad.numpy() == in_order(*VALUES[:4]) != in_order(*VALUES[:2], VALUES[3], VALUES[2])


async def test_a_leaf_of_one_stage_never_waits_for_others() -> None:
    first, last = leaf(), leaf()
    accumulator = GradientAccumulator({0: frozenset([first._node]), 1: frozenset([last._node])}, 3)
    for microbatch in range(3):
        accumulator.deliver(1, microbatch, {last._node: full(1)})
        await accumulator.fold()
        assert accumulator.waiting == 0


async def test_stages_without_gradients_do_not_hold_up_anybody() -> None:
    tensor = leaf()
    accumulator = GradientAccumulator({0: None, 1: None}, 2)
    for stage, microbatch in ((0, 0), (0, 1)):
        accumulator.deliver(stage, microbatch, {tensor._node: full(1)})
        await accumulator.fold()
    assert accumulator.waiting == 2  # stage 1 may still have something to say
    accumulator.deliver(1, 1, {})
    await accumulator.fold()
    assert accumulator.waiting == 2
    accumulator.deliver(1, 0, {})
    await accumulator.fold()
    assert accumulator.waiting == 0


@pytest.mark.parametrize("size", [1, FOLD_INLINE_BYTES // 4 + 1])
@pytest.mark.parametrize("base", [None, 5.0])
async def test_a_gradient_that_changes_meanwhile_is_not_lost(base: float | None, size: int) -> None:
    tensor = leaf(size, base)
    accumulator = GradientAccumulator({0: None}, 2)
    accumulator.deliver(0, 0, {tensor._node: full(1, size)})
    await accumulator.fold()
    tensor.grad = ag.tensor(full(100, size))
    accumulator.deliver(0, 1, {tensor._node: full(2, size)})
    await accumulator.prepare()
    assert size == 1 or not any(entry.is_stale for entry in accumulator._sums.values())  # large sums are not left to the commit
    await (tensor.sum()).backward()
    accumulator.commit()
    assert np.all(tensor.grad.numpy() == 104)
    tensor.grad = None
    accumulator.commit()
    assert np.all(tensor.grad.numpy() == 3)


async def test_a_step_that_is_not_complete_cannot_be_committed() -> None:
    tensor = leaf()
    accumulator = GradientAccumulator({0: None, 1: None}, 2)
    for stage, microbatch in ((0, 0), (0, 1), (1, 1)):
        accumulator.deliver(stage, microbatch, {tensor._node: full(1)})
    with pytest.raises(GraphError, match="before every stage"):
        await accumulator.prepare()


async def test_a_commit_that_fails_writes_nothing() -> None:
    tensors = [leaf(), leaf()]
    accumulator = GradientAccumulator({0: None}, 1)
    accumulator.deliver(0, 0, {tensor._node: full(1) for tensor in tensors})
    await accumulator.prepare()
    tensors[1]._node.grad = "no gradient"
    with pytest.raises(TypeError):
        accumulator.commit()
    assert tensors[0].grad is None


async def test_gradients_are_delivered_once() -> None:
    tensor = leaf()
    accumulator = GradientAccumulator({0: None}, 3)
    for microbatch in (0, 2):
        accumulator.deliver(0, microbatch, {tensor._node: full(1)})
        assert [accumulator.has(0, each) for each in range(3)] == [True, False, microbatch == 2]
        with pytest.raises(GraphError, match=f"stage 0, microbatch {microbatch}, are delivered twice"):
            accumulator.deliver(0, microbatch, {tensor._node: full(1)})


@pytest.mark.parametrize("done", [(), (0,), (2, 0), (1, 0, 3)])
async def test_an_accumulator_goes_on_where_another_one_came_to(done: tuple[int, ...]) -> None:
    tensor = leaf()
    first = GradientAccumulator({0: {tensor._node: None}}, 4, Parts([tensor._node]))
    for microbatch in done:
        first.deliver(0, microbatch, {tensor._node: full(VALUES[microbatch])})
        await first.fold()
    kept = first.copied()
    first.clear()
    assert kept is not None
    parts = Parts([tensor._node])
    second = kept.copied(parts)
    assert second is not None
    for microbatch in range(4):
        if microbatch not in done:
            assert not parts.taken
            second.deliver(0, microbatch, {tensor._node: full(VALUES[microbatch])})
            await second.fold()
    assert parts.taken[tensor._node] == in_order(*VALUES[:4])


async def test_sums_that_were_cut_short_are_not_kept() -> None:
    size = FOLD_INLINE_BYTES // 4 + 1
    tensor = leaf(size)
    accumulator = GradientAccumulator({0: None}, 2)
    accumulator.deliver(0, 0, {tensor._node: full(1, size)})
    await accumulator.fold()
    assert accumulator.copied() is not None
    accumulator.deliver(0, 1, {tensor._node: full(1, size)})
    folding = asyncio.ensure_future(accumulator.fold())
    await asyncio.sleep(0)
    folding.cancel()
    await asyncio.wait([folding])
    assert accumulator.copied() is None


class Parts:
    """Takes the gradients of one replica, as a `Reduction` does."""

    def __init__(self, leaves: list[Any]) -> None:
        self.leaves = leaves
        self.taken: dict[Any, Any] = {}

    def take(self, leaf: Any, grad: Any) -> None:
        self.taken[leaf] = grad

    async def results(self) -> dict[Any, Any]:
        return self.taken
