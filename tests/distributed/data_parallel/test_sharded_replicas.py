"""Replicas that divide the state of the optimizer: the bits of a whole optimizer, a part of the memory, and nothing lost with one replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.data_parallel.parameter_pieces import ParameterPiece, assembled
from aiograd.distributed.data_parallel.sharded_optimizer import covering, shards_of
from aiograd.errors import ArgumentError, ArgumentTypeError, DistributedError, RemoteError, WorkerLostError
from tests.chaos.replicas import STEPS, ReplicaRun
from tests.distributed.data_parallel.models import (
    BatchNet,
    Net,
    PartlyUsed,
    Stepper,
    all_bits,
    batches,
    bits,
    comparable,
    module_of,
    numbers,
    replicas_behind,
    serial,
    service,
)
from tests.distributed.data_parallel.simulated import World, expected, in_world, whole
from tests.distributed.workers import workers

NAMES = ("w0", "w1", "w2", "w3")
ADAMW: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.05}}
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (ag.optim.SGD, {"lr": 0.1}),
    (ag.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (ag.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (ag.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (ag.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (ag.optim.Adagrad, {"lr": 0.01}),
    (ag.optim.NAdam, {"lr": 0.01}),
    (ag.optim.RAdam, {"lr": 0.01}),
]


@contextlib.asynccontextmanager
async def replicated(module: Any, *args: Any, count: int = 3, **options: Any) -> AsyncIterator[tuple[dist.DataParallel, list[dist.Worker]]]:
    """Replicas on workers of this process, with a divided state."""
    async with workers("driver", *NAMES, service=service) as opened:
        made = {**ADAMW, "shard_optimizer": True, **options}
        async with await dist.DataParallel.create(opened[0], NAMES[:count], module, *args, **made) as replicas:
            yield replicas, list(opened)


def optimizers(replicas: dist.DataParallel, opened: list[dist.Worker]) -> list[Any]:
    return [host._replica.optimizer for host in replicas_behind(replicas, opened)]


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 2, 4])
async def test_steps_have_the_bits_of_a_whole_optimizer(count: int, cls: Any, options: dict[str, Any]) -> None:
    given = batches(4, (4,) * count)
    async with replicated(Net, count=count, optimizer=cls, optimizer_options=options) as (replicas, opened):
        for shards in given:
            await replicas.step(shards)
        found, state = all_bits(replicas, opened), await replicas.optimizer_state_dict()
    weights, alone = await whole(given, cls, options)
    assert found == [weights] * count
    assert comparable(state) == comparable(alone)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
async def test_each_replica_has_its_part_of_the_state(count: int) -> None:
    async with replicated(Net, count=count) as (replicas, opened):
        await replicas.step(batches(1, (4,) * count)[0])
        found = [each.nbytes for each in optimizers(replicas, opened)]
        counts = sum(value.size for value in Net().parameters()) - 3  # one parameter has no gradient, and so no state
    total, copies = 2 * 4 * counts, min(2, count)
    assert sum(found) == copies * total
    assert max(found) <= copies * (total / count + 2 * 4 * 4)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("accumulate", [1, 3])
async def test_clipping_and_accumulation(clip_norm: float | None, accumulate: int) -> None:
    given = batches(7, (3, 4, 2))
    more: dict[str, Any] = {"clip_norm": clip_norm, "accumulate": accumulate}
    async with replicated(Net, bucket_bytes=100, **more) as (replicas, opened):
        losses = [numbers(await replicas.step(shards)) for shards in given]
        found = all_bits(replicas, opened)
    weights, _ = await whole(given, **more)
    assert found == [weights] * 3
    alone = Net()
    assert losses == await serial(alone, ag.optim.AdamW(alone.parameters(), lr=0.05), given, **more)


async def test_parameters_that_some_steps_do_not_reach() -> None:
    given = [[(np.full((2, 2), kind, np.float32),) for kind in kinds] for kinds in ((0, 2, 4), (1, 2, 3), (1, 1, 1))]
    async with replicated(PartlyUsed) as (replicas, opened):
        for shards in given:
            await replicas.step(shards)
        found, state = all_bits(replicas, opened), await replicas.optimizer_state_dict()
    weights, alone = await whole(given, module=PartlyUsed)
    assert found == [weights] * 3 and comparable(state) == comparable(alone)


async def test_buffers_are_the_same_as_with_whole_optimizers() -> None:
    given, found = batches(3, (4, 5, 6)), []
    for is_sharded in (True, False):
        async with replicated(BatchNet, shard_optimizer=is_sharded) as (replicas, opened):
            for shards in given:
                await replicas.step(shards)
            found += all_bits(replicas, opened)
    assert found == [found[0]] * 6


# ---------------------------------------------------------------- states


async def test_a_state_is_loaded_from_a_whole_one_and_goes_on() -> None:
    given = batches(5)
    alone = Net()
    optimizer = ag.optim.AdamW(alone.parameters(), lr=0.05)
    await serial(alone, optimizer, given[:2])
    async with replicated(Net) as (replicas, opened):
        await replicas.step(given[4])
        await replicas.load_state_dict(alone.state_dict())
        await replicas.load_optimizer_state_dict(optimizer.state_dict())
        assert comparable(await replicas.optimizer_state_dict()) == comparable(optimizer.state_dict())
        for shards in given[2:]:
            await replicas.step(shards)
        found, state = all_bits(replicas, opened), await replicas.optimizer_state_dict()
        sizes = [each.size for each in optimizers(replicas, opened)]
    await serial(alone, optimizer, given[2:])
    assert found == [bits(alone.state_dict())] * 3 and sizes == [3] * 3
    assert comparable(state) == comparable(optimizer.state_dict())


async def test_a_model_that_is_loaded_leaves_the_state_of_the_optimizer() -> None:
    given = batches(2)
    async with replicated(Net) as (replicas, _):
        await replicas.step(given[0])
        state = comparable(await replicas.optimizer_state_dict())
        await replicas.load_state_dict(Net(5).state_dict())
        assert comparable(await replicas.optimizer_state_dict()) == state


async def test_a_state_that_does_not_fit_changes_nothing() -> None:
    given = batches(3)
    async with replicated(Net) as (replicas, opened):
        await replicas.step(given[0])
        state = await replicas.optimizer_state_dict()
        for bad, match in (
            ({"state": state["state"], "param_groups": []}, "groups of"),
            ({**state, "state": {0: {"step": 1, "exp_avg": ag.ones((7,))}}}, r"exp_avg of parameter 0 has shape \[7\]"),
            ({**state, "state": {99: {"step": 1}}}, "in no group"),
        ):
            with pytest.raises(RemoteError, match=match):
                await replicas.load_optimizer_state_dict(bad)
            assert comparable(await replicas.optimizer_state_dict()) == comparable(state)
        with pytest.raises(ArgumentError, match="param_groups"):
            await replicas.load_optimizer_state_dict({})
        await replicas.step(given[1])
        assert all_bits(replicas, opened) == [(await whole(given[:2]))[0]] * 3


# ---------------------------------------------------------------- who takes part


async def test_the_state_is_divided_anew_when_replicas_come_and_go() -> None:
    given = [*batches(2, (4, 4, 4)), *batches(2, (4, 4, 4, 4)), *batches(2, (4, 4))]
    async with replicated(Net) as (replicas, opened):
        for shards in given[:2]:
            await replicas.step(shards)
        await replicas.add("w3")
        for shards in given[2:4]:
            await replicas.step(shards)
        assert [each.shards for each in optimizers(replicas, opened)] == [(0, 3), (1, 0), (2, 1), (3, 2)]
        await replicas.remove("w1")  # two that have a shard between them, and no step in between
        await replicas.remove("w2")
        for shards in given[4:]:
            await replicas.step(shards)
        found, state = all_bits(replicas, opened), await replicas.optimizer_state_dict()
    weights, alone = await whole(given)
    assert found == [weights] * 2 and comparable(state) == comparable(alone)


FOUR, THREE, TWO = batches(6, (4, 4, 4, 4)), batches(6, seed=1), batches(6, (4, 4), seed=2)


@in_world(NAMES, shard_optimizer=True)
async def test_a_replica_sends_both_of_its_parts(world: World) -> None:
    """After a division that not all have come to use, a replica may have two parts of it that others have lost."""
    replicas = world.replicas
    for shards in FOUR[:2]:
        await replicas.step(shards)
    replica, others = world.host("w0")._replica, [world.host(name)._replica.sharded.flatten() for name in ("w1", "w2")]
    waiting = replica.sharded.divided(4, (2, 1))
    waiting.load_parts(others)
    waiting.loads, waiting.taken = replica.sharded.stamp[:2]
    replica.divide(waiting)
    for name in ("w1", "w2"):
        world.network.kill(name)
    with pytest.raises(WorkerLostError):
        await replicas.step(FOUR[2])
    for name in ("w1", "w2"):
        await replicas.remove(name)
    await replicas.step(TWO[0])
    weights, alone = await whole([*FOUR[:2], TWO[0]])
    assert world.states == [weights] * 2 and comparable(await replicas.optimizer_state_dict()) == comparable(alone)


def test_a_part_of_the_state_that_is_not_whole_is_refused() -> None:
    entries: list[Any] = [(0, 0, 4, "exp_avg", np.ones(4)), (0, 0, 4, "step", 3)]
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 is there for \[\(0, 4\)\] of elements 0 to 6 only"):
        assembled([ParameterPiece(0, 0, 6)], entries)
    found = assembled([ParameterPiece(0, 0, 6)], [*entries, (0, 4, 6, "exp_avg", np.zeros(2)), (0, 0, 4, "exp_avg", np.ones(4))])
    assert found[0]["exp_avg"].tolist() == [1, 1, 1, 1, 0, 0] and found[0]["step"] == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_replica_that_is_lost_takes_no_state_with_it(name: str, comes_back: bool, accumulate: int) -> None:
    history = [*FOUR[:3], *((FOUR if comes_back else THREE)[3:6])]

    async def main(world: World) -> None:
        replicas = world.replicas
        for shards in FOUR[:3]:
            await replicas.step(shards)
        before = world.states[0]
        world.network.kill(name)
        with pytest.raises(WorkerLostError) as caught:
            await replicas.step(FOUR[3])
        assert caught.value.worker == name
        assert [world.state(each) for each in NAMES if each != name] == [before] * 3
        assert comparable(await replicas.optimizer_state_dict()) == comparable((await whole(FOUR[:3], accumulate=accumulate))[1])
        if comes_back:
            world.restart(name)
            await replicas.add(name)
        else:
            await replicas.remove(name)
        for shards in history[3:]:
            await replicas.step(shards)
        assert world.states == [await expected(history, accumulate=accumulate)] * len(replicas.names)

    World(NAMES, shard_optimizer=True, accumulate=accumulate).simulate(main)


@in_world(NAMES, shard_optimizer=True)
async def test_two_that_have_a_shard_between_them_are_lost_at_once(world: World) -> None:
    replicas = world.replicas
    await replicas.step(FOUR[0])
    checkpoint, state = await replicas.state_dict(), await replicas.optimizer_state_dict()
    await replicas.step(FOUR[1])
    for name in ("w1", "w2"):
        world.network.kill(name)
    with pytest.raises(WorkerLostError):
        await replicas.step(FOUR[2])
    await replicas.remove("w1")
    await replicas.remove("w2")
    before = world.states
    for attempt in (replicas.step(TWO[0]), replicas.optimizer_state_dict()):
        with pytest.raises(DistributedError, match="load_optimizer_state_dict"):
            await attempt
    assert world.states == before
    await replicas.load_optimizer_state_dict(state)
    await replicas.load_state_dict(checkpoint)
    await replicas.step(TWO[0])
    assert world.states == [await expected([FOUR[0], TWO[0]])] * 2


@in_world(NAMES, shard_optimizer=True)
async def test_a_shard_that_is_out_of_reach_is_not_called_lost(world: World) -> None:
    """Of the two that have a shard one is lost, and the other may only be slow: its state is there again when it is."""
    replicas = world.replicas
    await replicas.step(FOUR[0])
    state = await replicas.optimizer_state_dict()
    world.network.kill("w1")
    world.network.freeze("w2", 6.0)
    with pytest.raises(WorkerLostError, match="shard of the state .*; w2 may have it, and cannot be reached.* once they can") as caught:
        await replicas.optimizer_state_dict()
    assert caught.value.worker == "w2" and not caught.value.is_gone
    await asyncio.sleep(8.0)
    assert comparable(await replicas.optimizer_state_dict()) == comparable(state)
    world.network.kill("w2")
    with pytest.raises(DistributedError, match="all replicas that had a shard .* are lost: go on with that of a checkpoint") as lost:
        await replicas.optimizer_state_dict()
    assert not isinstance(lost.value, WorkerLostError)


@in_world(NAMES[:2])
async def test_a_state_that_is_out_of_reach_is_not_called_lost(world: World) -> None:
    replicas = world.replicas
    await replicas.step(TWO[0])
    world.network.kill("w0")
    world.network.freeze("w1", 6.0)
    with pytest.raises(WorkerLostError, match="the state after step 1; w1 may have it, and cannot be reached"):
        await replicas.state_dict()
    with pytest.raises(WorkerLostError, match="the state after step 1; w1 may have it, and cannot be reached"):
        await replicas.add("w1")
    await asyncio.sleep(8.0)
    assert await replicas.state_dict()
    await replicas.add("w1")  # it is there
    assert replicas.names == ("w0", "w1")
    world.network.kill("w1")
    with pytest.raises(DistributedError, match="all replicas that had the state after step 1 are lost: make new replicas"):
        await replicas.state_dict()


@pytest.mark.parametrize("method", ["divide", "join"])
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("victim", ["w0", "w2"])
@in_world(NAMES, 3, shard_optimizer=True)
async def test_a_replica_is_lost_while_the_state_is_divided_anew(world: World, victim: str, is_before: bool, method: str) -> None:
    replicas = world.replicas
    for shards in THREE[:2]:
        await replicas.step(shards)
    world.around(victim, method, lambda: world.network.kill(victim), is_before=is_before)
    await replicas.add("w3")
    with pytest.raises(WorkerLostError):
        await replicas.step(FOUR[2])
    await replicas.remove(victim)
    for shards in THREE[2:4]:
        await replicas.step(shards)
    assert world.states == [await expected(THREE[:4])] * 3
    assert comparable(await replicas.optimizer_state_dict()) == comparable((await whole(THREE[:4]))[1])


@in_world((*NAMES, "w4"), 4, shard_optimizer=True)
async def test_the_old_division_is_there_until_all_have_the_new_one(world: World) -> None:
    def fail(divided: Any) -> None:
        raise ZeroDivisionError("by nought")

    replicas = world.replicas
    await replicas.step(FOUR[0])
    troubled = [world.host(name)._replica for name in ("w0", "w1")]
    for each in troubled:
        each.divide = fail
    await replicas.add("w4")
    for each in troubled:
        del each.divide
    await replicas.step(batches(1, (4,) * 5)[0])
    assert world.states == [await expected([FOUR[0], batches(1, (4,) * 5)[0]])] * 5


@in_world(NAMES, shard_optimizer=True)
async def test_before_the_first_step_there_is_no_state_to_lose(world: World) -> None:
    for name in ("w1", "w2"):
        world.network.kill(name)
    for name in ("w1", "w2"):
        await world.replicas.remove(name)
    await world.replicas.step(TWO[0])
    assert world.states == [await expected(TWO[:1])] * 2


@pytest.mark.sim
@pytest.mark.parametrize("block", range(4))
def test_steps_on_networks_and_workers_that_fail(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block, 16, 4):
        seen += ReplicaRun(seed, shard_optimizer=True).run()
    assert seen["taken"] >= 4 * STEPS and seen["lost"] + seen["cancelled"] > 0, seen


# ---------------------------------------------------------------- steps that fail


@pytest.mark.parametrize("name", ["w0", "w2"])
@pytest.mark.parametrize("when", ["loss", "compute", "exchange"])
@in_world(NAMES[:3], shard_optimizer=True)
async def test_a_step_that_fails_on_one_replica_leaves_nothing(world: World, name: str, when: str) -> None:
    replicas = world.replicas
    await replicas.step(THREE[0])
    before, state = world.states, comparable(await replicas.optimizer_state_dict())
    host = world.host(name)
    if when == "loss":
        module_of(host).fails = True
    else:

        def fail(*args: Any) -> Any:
            raise ZeroDivisionError("by nought")

        setattr(host._replica.optimizer, when, fail)
    with pytest.raises(RemoteError, match="by nought"):
        await replicas.step(THREE[1])
    assert world.states == before and comparable(await replicas.optimizer_state_dict()) == state
    module_of(host).fails = False
    vars(host._replica.optimizer).pop(when, None)
    for shards in THREE[1:3]:
        await replicas.step(shards)
    assert world.states == [await expected(THREE[:3])] * 3


@in_world(NAMES[:3], shard_optimizer=True)
async def test_a_parameter_that_cannot_be_written_to(world: World) -> None:
    before = world.states
    module_of(world.host("w1")).first.weight._data.flags.writeable = False
    with pytest.raises(RemoteError, match=r"shape \[6, 4\] is read-only"):
        await world.replicas.step(THREE[0])
    assert world.states == before


# ---------------------------------------------------------------- bad input


class WholeSGD(ag.optim.SGD):
    """An optimizer that looks at whole parameters."""

    is_elementwise = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)


service.reference(WholeSGD)


async def test_what_cannot_be_divided_is_refused() -> None:
    async with workers("driver", "w0", service=service) as opened:
        for cls, options in ((ag.optim.LBFGS, {}), (Stepper, {"lr": 0.1, "momentum": 0.0}), (WholeSGD, {"lr": 0.1})):
            with pytest.raises(ArgumentTypeError, match="cannot be divided"):
                await dist.DataParallel.create(opened[0], ["w0"], Net, optimizer=cls, optimizer_options=options, shard_optimizer=True)
        with pytest.raises(RemoteError, match="WholeSGD cannot be divided"):
            await dist.DataParallel.create(opened[0], ["w0"], Net, optimizer="WholeSGD", optimizer_options={"lr": 0.1}, shard_optimizer=True)
        with pytest.raises(ArgumentTypeError, match="expected True or False"):
            await dist.DataParallel.create(opened[0], ["w0"], Net, **ADAMW, shard_optimizer=1)  # type: ignore[arg-type]


def test_shards_and_who_covers_them() -> None:
    assert [shards_of(rank, 4) for rank in range(4)] == [(0, 3), (1, 0), (2, 1), (3, 2)]
    assert [shards_of(rank, 2) for rank in range(2)] == [(0, 1), (1, 0)] and shards_of(0, 1) == (0,)
    held: list[Any] = [[(0, 5, 3, (0, 2))], [(0, 4, 3, (1, 0))], [(0, 5, 3, (2, 1)), (1, 5, 1, (0,))]]
    assert covering(held, 5) == [(2, (1, 5, 1, (0,)))], "the state that was loaded last"
    assert covering([each[:1] for each in held], 5) == [(0, (0, 5, 3, (0, 2))), (2, (0, 5, 3, (2, 1)))]
    assert covering(held, 4) == [] == covering([[(0, -1, 0, ())]], -1)
