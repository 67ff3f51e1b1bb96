"""Any number of shards on any number of replicas: the shards decide the bits."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.data_parallel.coordinator import ReplicaCoordinator
from aiograd.distributed.data_parallel.replica_step import ReplicaStep
from aiograd.distributed.data_parallel.shard_gradients import ShardGradients, dealt, dealt_again
from aiograd.errors import ArgumentError, CollectiveError
from tests.distributed.data_parallel.compressing import Ranks, serial_replicas
from tests.distributed.data_parallel.models import BatchNet, Counting, Net, PartlyUsed, batches, bits, comparable, module_of, serial
from tests.distributed.data_parallel.simulated import World
from tests.distributed.groups import everywhere, groups
from tests.sweeps import swept

COUNT, STEPS = 12, 4
#: uneven ones, of which one is empty
ROWS = (3, 1, 4, 1, 5, 2, 0, 2, 3, 2, 4, 1)
SGD: dict[str, Any] = {"optimizer": ag.optim.SGD, "optimizer_options": {"lr": 0.1, "momentum": 0.9}}
ADAMW: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.05}}
#: module, its arguments, options
TRAININGS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "SGD": (Net, (), SGD),
    "AdamW": (Net, (), ADAMW),
    "clip": (Net, (), {**SGD, "clip_norm": 0.05}),
    "accumulate": (Net, (), {**ADAMW, "accumulate": 2}),
    "shard_optimizer": (Net, (), {**ADAMW, "shard_optimizer": True}),
    "all of them": (Net, (), {**ADAMW, "shard_optimizer": True, "accumulate": 2, "clip_norm": 0.05, "bucket_bytes": 1}),
    "buckets": (Net, (), {**SGD, "bucket_bytes": 1}),
    "wide": (Net, (0, 3000), SGD),
    "batch norm": (BatchNet, (), SGD),
    "dropout and batch norm": (BatchNet, (0.5,), ADAMW),
    "a loss that reads its buffers": (Counting, (), SGD),
    "layers that not every shard uses": (PartlyUsed, (), SGD),
}


def names(count: int) -> tuple[str, ...]:
    return tuple(f"w{number}" for number in range(count))


def given(module: Any, steps: int = STEPS) -> list[list[Any]]:
    if module is PartlyUsed:
        return [[(np.full((2, 2), (step + shard // 5) % 3, np.float32),) for shard in range(COUNT)] for step in range(steps)]
    rows = [max(each, 2) for each in ROWS] if module is BatchNet else ROWS
    return batches(steps, rows)


def trained(name: str, size: int) -> Any:
    """Losses, states of all replicas and the state of the optimizer after some steps of so many replicas."""
    module, arguments, options = TRAININGS[name]

    async def main(world: World) -> Any:
        replicas = world.replicas
        losses = [[each.item() for each in await replicas.step(shards)] for shards in given(module)]
        states = [bits(module_of(world.host(each)).state_dict()) for each in replicas.names]
        assert states == states[:1] * size
        return np.array(losses).tobytes(), states[0], comparable(await replicas.optimizer_state_dict())

    return World(names(size), module=module, arguments=arguments, **options).simulate(main)


@pytest.mark.sim
@pytest.mark.parametrize("name", swept(TRAININGS, keep=4))
@pytest.mark.parametrize("sizes", [(1, 3, 5), (1, 2, 4, 12)], ids=str)
def test_the_shards_decide_the_bits_and_the_number_of_workers_does_not(name: str, sizes: tuple[int, ...]) -> None:
    found = [trained(name, size) for size in sizes]
    assert found == found[:1] * len(sizes)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_twelve_shards_have_the_bits_of_one_process(size: int) -> None:
    async def main(world: World) -> None:
        for shards in batches(3, ROWS):
            await world.replicas.step(shards)
        alone = Net()
        filled = [[shard for shard in shards if len(shard[0])] for shards in batches(3, ROWS)]
        await serial(alone, ag.optim.AdamW(alone.parameters(), lr=0.05), filled)
        assert world.states == [bits(alone.state_dict())] * size

    World(names(size)).simulate(main)


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_more_or_fewer_shards_in_each_step(count: int) -> None:
    """Replicas without a shard take the steps of the others."""

    async def main(world: World) -> None:
        history = []
        for number in (count, 3, count, 1, 7):
            history += batches(1, (2,) * number, seed=number)
            assert len(await world.replicas.step(history[-1])) == number
            assert len(await world.replicas.eval([x for x, _ in history[-1]])) == number
        alone = Net()
        await serial(alone, ag.optim.AdamW(alone.parameters(), lr=0.05), history)
        assert world.states == [bits(alone.state_dict())] * 3
        x = ag.asarray(batches(1, (6,))[0][0][0])
        parts = [each.numpy() for each in await world.replicas.eval([x[:1], x[1:4], x[4:5], x[5:]])]
        np.testing.assert_allclose(np.concatenate(parts), alone(x).detach().numpy(), rtol=1e-5)

    World().simulate(main)


@pytest.mark.parametrize("compress", [dist.TopK(1 / 4, bits=4, block=64), dist.Blockwise(4, block=64)], ids=repr)
def test_compressed_gradients_of_several_shards(compress: Any) -> None:
    """A replica sends one payload for its shards, and all stay equal."""

    async def main(world: World) -> None:
        steps = batches(4, (3,) * 7)
        for shards in steps:
            await world.replicas.step(shards)
        model = Net()
        expected, _ = await serial_replicas(model, steps, Ranks(compress, range(3)), 1, ag.optim.AdamW(model.parameters(), lr=0.05))
        assert world.states == [expected] * 3

    World(compress=compress).simulate(main)


# ---------------------------------------------------------------- sums in turn


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (1, 0, 2), (1, 2, 1, 4)])
@pytest.mark.parametrize("count", [0, 1, 7, 50_000])
async def test_sums_in_turn_are_associated_by_list(sizes: Sequence[int], count: int) -> None:
    random = np.random.default_rng(count)
    given = [[[random.standard_normal(count), random.standard_normal((2, 1)).astype(np.float32)] for _ in range(max(each, 1))] for each in sizes]
    expected = [np.array(each, copy=True) for each in given[0][0]]
    for more in [each for lists in given[1:] for each in lists]:
        expected = [one + two for one, two in zip(expected, more, strict=True)]
    async with groups(*names(len(sizes))) as (_, joined):
        for found in await everywhere(joined, lambda group: group.sum_in_turn(given[group.rank])):
            assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]


async def test_lists_that_cannot_be_summed_in_turn() -> None:
    one = [np.ones(2)]
    async with groups("w0", "w1") as (_, (first, second)):
        for group, lists in ((first, []), (second, []), (first, [one, one]), (second, [one, [np.ones(3)]]), (second, [one, [*one, *one]])):
            with pytest.raises(ArgumentError, match="sum_in_turn: got lists of .* arrays on rank .; expected one list"):
                group.sum_in_turn(lists)
        assert [each[0].tolist() for each in await everywhere([first, second], lambda group: group.sum_in_turn([one]))] == [[2.0, 2.0]] * 2
        results = await everywhere([first, second], lambda group: group.sum_in_turn([one]) if group.rank else group.all_reduce(one))
        assert all(isinstance(each, CollectiveError) for each in results)


# ---------------------------------------------------------------- dealing


def test_shards_are_dealt_in_contiguous_runs_as_even_as_possible() -> None:
    for count, size in itertools.product(range(20), range(1, 8)):
        runs = dealt(count, size)
        assert [shard for run in runs for shard in run] == list(range(count)) and len(runs) == size
        assert [len(run) for run in runs] == [len(each) for each in np.array_split(np.arange(count), size)]


def test_shards_of_lost_replicas_go_to_the_replicas_beside_them() -> None:
    for count, size in itertools.product(range(14), range(1, 7)):
        for lost in itertools.product((False, True), repeat=size):
            runs = [run for run, is_lost in zip(dealt(count, size), lost, strict=True) if not is_lost]
            if not runs:
                continue
            again = dealt_again(runs, count)
            assert [shard for run in again for shard in run] == list(range(count))
            assert all(set(run) <= set(more) for run, more in zip(runs, again, strict=True)), "nothing is computed twice"
            if lost.count(True) == 1 and 0 < lost.index(True) < size - 1:
                left, right = again[lost.index(True) - 1 : lost.index(True) + 1]
                assert abs(len(left) - len(right)) <= 1


# ---------------------------------------------------------------- memory


def test_three_shards_on_a_replica_take_the_memory_of_two_more_gradients() -> None:
    width = 20_000
    gradients = 4 * (4 * width + width + 3 * width + 3 + 3)

    def peak(count: int) -> int:
        async def main(world: World) -> int:
            shards = batches(1, (2,) * count)[0]
            await world.replicas.step(shards)
            tracemalloc.start()
            try:
                await world.replicas.step(shards)
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

        found: int = World(names(2), arguments=(0, width), **SGD).simulate(main)
        return found

    one, three = peak(2), peak(6)
    # the first replica adds up its shards; the second keeps them apart
    assert three - one < 3.2 * gradients, (one, three, gradients)


# ---------------------------------------------------------------- ablations


def _sum_by_worker() -> Any:
    """A replica adds up the gradients of its shards, and the replicas their sums."""
    addends = ShardGradients.addends

    def summed(self: ShardGradients, parameter: int, shards: range, *, is_one: bool, is_kept: bool) -> Any:
        found = addends(self, parameter, shards, is_one=is_one, is_kept=is_kept)
        return [sum(found[1:], found[0]), *[None] * (len(found) - 1)] if found[0] is not None else found

    return mock.patch.object(ShardGradients, "addends", summed)


def _draw_by_worker() -> Any:
    """Random numbers are those of the replica."""
    init = ReplicaStep.__init__

    def begun(self: ReplicaStep, replica: Any, group: Any, run: Any) -> None:
        init(self, replica, group, run)
        object.__setattr__(run, "seed", [*run.seed, group.rank])

    return mock.patch.object(ReplicaStep, "__init__", begun)


@contextmanager
def _buffers_of_the_shard_before() -> Iterator[None]:
    """A shard begins with the buffers as the shard before has left them."""
    with mock.patch("aiograd.distributed.data_parallel.replica_step.BufferSnapshot.restore", lambda self: None):
        yield


def _deal_otherwise() -> Any:
    """Shards in another order."""
    step = ReplicaCoordinator.step

    async def turned(self: ReplicaCoordinator, shards: Any, weights: Any, seed: Any) -> Any:
        return await step(self, *([*each[1:], each[0]] if len(self.remotes) % 2 else each for each in (shards, weights)), seed)  # type: ignore[misc]

    return mock.patch.object(ReplicaCoordinator, "step", turned)


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (_sum_by_worker, "SGD"),
        (_draw_by_worker, "dropout and batch norm"),
        (_buffers_of_the_shard_before, "a loss that reads its buffers"),
        (_deal_otherwise, "dropout and batch norm"),
    ],
)
def test_a_missing_protection_is_noticed(broken: Callable[[], Any], name: str) -> None:
    with broken():
        one, *others = [trained(name, size) for size in (1, 4, 5)]
    assert any(each[1] != one[1] for each in others)
