"""Gradients that travel as payloads: the bits of one process, and residuals that change with the commit of a pass or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.coordination import compressed_pass
from aiograd.distributed.data_parallel.reducer import GradientReducer
from aiograd.errors import ArgumentError, ArgumentTypeError, CollectiveError, DistributedError, ProtocolError, RemoteError, WorkerLostError
from tests.distributed.data_parallel.compressing import Ranks, serial_replicas, summed_gradients
from tests.distributed.data_parallel.models import BatchNet, Net, all_bits, batches, module_of, replicas_behind
from tests.distributed.data_parallel.models import bits as state_bits
from tests.distributed.data_parallel.replicas import bits, cancelled_pass, gradients, loss_of, net, shard
from tests.distributed.data_parallel.simulated import World
from tests.distributed.data_parallel.test_data_parallel import replicated
from tests.distributed.data_parallel.test_distributed_data_parallel import Normalized
from tests.distributed.groups import everywhere, groups
from tests.toy_device import ToyDevice

NAMES = ("w0", "w1", "w2")
COMPRESSORS = (dist.TopK(1 / 4, bits=4, block=64), dist.TopK(1 / 8, block=64, decay=0.9), dist.Blockwise(8), dist.Blockwise(4, block=64))
TOP = COMPRESSORS[0]


async def grads_of(model: Any, rank: int, step: int = 0) -> list[Any]:
    """The gradients of one rank's shard."""
    model.zero_grad()
    await loss_of(model, rank, step).backward()
    return [p.grad.numpy().copy() for p in model.parameters()]


async def serial_step(model: Any, optimizer: Any, ranks: Ranks, names: Any, step: int) -> None:
    """A step of one process."""
    found = ranks.combined({rank: await grads_of(model, rank, step) for rank in names})
    for p, grad in zip(model.parameters(), found, strict=True):
        p.grad = ag.tensor(grad)
    optimizer.step()


async def train(ddp: Any, optimizer: Any, rank: int, steps: Any) -> None:
    """Steps of a member."""
    for step in steps:
        optimizer.zero_grad()
        await (await ddp(shard(rank, step))).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
async def test_members_train_as_one_process_would(
    compressor: Any, count: int, bucket_bytes: int, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not inline:
        monkeypatch.setattr(compressed_pass, "INLINE_BYTES", 0)
    steps, alone, ranks = 5, net(), Ranks(compressor, range(count))
    optimizer: Any = ag.optim.AdamW(alone.parameters(), lr=0.01)
    for step in range(steps):
        await serial_step(alone, optimizer, ranks, range(count), step)
    async with groups(*NAMES[:count]) as (_, joined):

        async def member(group: dist.Group) -> tuple[Any, Any]:
            ddp = dist.DistributedDataParallel(net(group.rank), group, compress=compressor, bucket_bytes=bucket_bytes)
            await train(ddp, ag.optim.AdamW(ddp.parameters(), lr=0.01), group.rank, range(steps))
            state = ddp.compression_state_dict()
            assert list(state) == [name for name, _ in ddp.named_parameters()]
            return bits(ddp.parameters()), bits(state.values())

        assert await everywhere(joined, member) == [(bits(alone.parameters()), ranks.bits(rank)) for rank in range(count)]
        assert len(set(map(tuple, map(ranks.bits, range(count))))) == count


async def test_payloads_take_few_bytes() -> None:
    compressor = dist.TopK()
    async with groups(*NAMES[:2]) as (_, joined):
        sent = []

        async def member(group: dist.Group) -> None:
            x = ag.zeros((200_000,), requires_grad=True)
            gather = group.all_gather
            group.all_gather = lambda array, **options: sent.append(array.nbytes) or gather(array, **options)  # type: ignore[method-assign]
            GradientReducer(group, [x], compress=compressor).attach()
            await (x * ag.tensor(np.random.default_rng(group.rank).standard_normal(200_000).astype(np.float32))).sum().backward()

        await everywhere(joined, member)
        assert sent == [2 + compressor.packed_size(200_000)] * 2 and sent[0] < 200_000 * 4 / 190


async def test_a_parameter_that_a_rank_does_not_use_sends_its_residual_and_one_that_none_uses_keeps_it() -> None:
    """The first pass uses both parameters; the second each rank another one; the third only the first parameter."""
    used = [[(0, 1), (0, 1)], [(0,), (1,)], [(0,), ()]]
    values = np.random.default_rng(0).standard_normal((3, 2, 2, 300)).astype(np.float32)
    ranks = Ranks(TOP, range(2))
    expected = [
        ranks.combined({rank: [values[step, rank, index] if index in each else None for index in range(2)] for rank, each in enumerate(uses)})
        for step, uses in enumerate(used)
    ]
    assert expected[1][0] is not None and expected[2][1] is None
    async with groups(*NAMES[:2]) as (_, joined):

        async def member(group: dist.Group) -> Any:
            parameters = [ag.zeros((300,), requires_grad=True) for _ in range(2)]
            other = ag.zeros((1,), requires_grad=True)
            reducer = GradientReducer(group, [*parameters, other], compress=TOP)
            reducer.attach()
            found = []
            for step, uses in enumerate(used):
                for each in parameters:
                    each.grad = None
                terms = [(parameters[index] * ag.tensor(values[step, group.rank, index])).sum() for index in uses[group.rank]]
                await sum(terms, other.sum()).backward()
                found.append([None if each.grad is None else each.grad.numpy().tobytes() for each in parameters])
            return found, [each.tobytes() for each in reducer.residuals[:2]]  # type: ignore[union-attr]

        wanted = [[None if each is None else each.tobytes() for each in step] for step in expected]
        assert await everywhere(joined, member) == [(wanted, ranks.bits(rank)) for rank in range(2)]


async def test_passes_that_accumulate_alone_travel_together() -> None:
    async def summed(rank: int) -> list[Any]:
        model = net()
        for number in range(2):
            await loss_of(model, rank, number).backward()
        return [p.grad.numpy() for p in model.parameters()]

    expected = Ranks(TOP, range(2)).combined({rank: await summed(rank) for rank in range(2)})
    async with groups(*NAMES[:2]) as (_, joined):

        async def member(group: dist.Group) -> list[Any]:
            ddp = dist.DistributedDataParallel(net(), group, compress=TOP)
            await ddp.synchronize()
            with ddp.no_sync():
                await loss_of(ddp, group.rank).backward()
            assert not ddp.compression_state_dict()
            await loss_of(ddp, group.rank, 1).backward()
            return gradients(ddp)

        assert await everywhere(joined, member) == [[each.tobytes() for each in expected]] * 2


async def test_buffers_travel_beside_payloads() -> None:
    alone = Normalized()
    for step in range(2):
        alone(shard(0, step))
    async with groups(*NAMES) as (_, joined):

        async def member(group: dist.Group) -> list[Any]:
            ddp = dist.DistributedDataParallel(Normalized(), group, compress=TOP, bucket_bytes=1)
            for step in range(2):
                await (await ddp(shard(group.rank, step))).square().mean().backward()
            return bits(ddp.buffers())

        assert await everywhere(joined, member) == [bits(alone.buffers())] * 3


@pytest.mark.parametrize("launches_ahead", [False, True])
async def test_gradients_of_a_device_are_compressed_on_the_host(launches_ahead: bool) -> None:
    alone, ranks = net(), Ranks(TOP, range(2))
    optimizer: Any = ag.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(2):
        await serial_step(alone, optimizer, ranks, range(2), step)
    with ToyDevice("toy:0", launches_ahead=launches_ahead):
        async with groups(*NAMES[:2]) as (_, joined):

            async def member(group: dist.Group) -> Any:
                ddp = dist.DistributedDataParallel(net().to("toy:0" if group.rank else "cpu"), group, compress=TOP)
                optimizer = ag.optim.SGD(ddp.parameters(), lr=0.1)
                for step in range(2):
                    optimizer.zero_grad()
                    await (await ddp(shard(group.rank, step).to("toy:0" if group.rank else "cpu"))).square().mean().backward()
                    optimizer.step()
                for p in ddp.parameters():
                    await p
                return bits(p.to("cpu") for p in ddp.parameters()), bits(ddp.compression_state_dict().values())

            assert await everywhere(joined, member) == [(bits(alone.parameters()), ranks.bits(rank)) for rank in range(2)]


# -------------------------------------------------------------------- passes that fail


async def test_a_pass_that_fails_leaves_residuals_and_a_new_group_goes_on_to_the_bits_of_one_process() -> None:
    """Rank 1 fails in its second pass. The group is made anew, and the pass taken again."""
    alone, ranks = net(), Ranks(TOP, range(3))
    optimizer: Any = ag.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        await serial_step(alone, optimizer, ranks, range(3), step)
    async with groups(*NAMES) as (opened, joined):
        models = [net() for _ in joined]

        async def fails(group: dist.Group) -> Any:
            ddp = dist.DistributedDataParallel(models[group.rank], group, compress=TOP, bucket_bytes=1)
            optimizer = ag.optim.SGD(ddp.parameters(), lr=0.1)
            await train(ddp, optimizer, group.rank, [0])
            before = bits(ddp.compression_state_dict().values())
            optimizer.zero_grad()
            hidden = models[group.rank][1](models[group.rank][0](shard(group.rank, 1)))

            def fail(grad: Any) -> None:
                raise ZeroDivisionError("not here")

            if group.rank == 1:  # after the last layer has sent its payloads
                hidden.register_hook(fail)
            with pytest.raises((ZeroDivisionError, CollectiveError), match="not here"):
                await models[group.rank][2](hidden).square().mean().backward()
            assert gradients(ddp) == [None] * 4
            assert bits(ddp.compression_state_dict().values()) == before != []
            ddp.detach()
            return ddp.compression_state_dict()

        states = await everywhere(joined, fails)
        again = await asyncio.gather(*(dist.join_group(worker, NAMES, name="again") for worker in opened))

        async def goes_on(group: dist.Group) -> Any:
            ddp = dist.DistributedDataParallel(models[group.rank], group, compress=TOP)
            ddp.load_compression_state_dict(states[group.rank])
            await train(ddp, ag.optim.SGD(ddp.parameters(), lr=0.1), group.rank, range(1, 4))
            return bits(ddp.parameters()), bits(ddp.compression_state_dict().values())

        assert await everywhere(again, goes_on) == [(bits(alone.parameters()), ranks.bits(rank)) for rank in range(3)]
        await asyncio.gather(*(group.aclose() for group in again))


async def test_survivors_of_a_lost_member_go_on_with_their_residuals() -> None:
    alone, ranks = net(), Ranks(TOP, range(3))
    optimizer: Any = ag.optim.SGD(alone.parameters(), lr=0.1)
    for step, names in enumerate((range(3), range(3), (0, 2), (0, 2))):
        await serial_step(alone, optimizer, ranks, names, step)
    async with groups(*NAMES) as (opened, joined):

        async def member(group: dist.Group) -> Any:
            model = net()
            ddp = dist.DistributedDataParallel(model, group, compress=TOP)
            await train(ddp, ag.optim.SGD(ddp.parameters(), lr=0.1), group.rank, range(2))
            if group.rank == 1:
                await opened[1].aclose()
                return None
            with pytest.raises((CollectiveError, WorkerLostError)):
                await train(ddp, ag.optim.SGD(ddp.parameters(), lr=0.1), group.rank, [2])
            rank, state = group.rank, ddp.compression_state_dict()
            ddp = dist.DistributedDataParallel(model, await group.without("w1"), compress=TOP)
            ddp.load_compression_state_dict(state)
            await train(ddp, ag.optim.SGD(ddp.parameters(), lr=0.1), rank, range(2, 4))
            await ddp.group.aclose()
            return bits(ddp.parameters()), bits(ddp.compression_state_dict().values())

        found = await everywhere(joined, member)
        assert [found[0], found[2]] == [(bits(alone.parameters()), ranks.bits(rank)) for rank in (0, 2)]


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("moment", range(1, 60, 3))
async def test_a_pass_that_is_cancelled_changes_residuals_on_all_members_or_on_none(
    moment: int, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not inline:
        monkeypatch.setattr(compressed_pass, "INLINE_BYTES", 0)
    async with groups(*NAMES[:2]) as (_, joined):
        models = [net() for _ in joined]
        outcomes, reducers = await cancelled_pass(moment, joined, models, compress=TOP)
        if not outcomes:
            return
        changed = [[each is not None for each in reducer.residuals] for reducer in reducers]
        is_committed = outcomes == ["committed"] * 2
        assert changed == [[is_committed] * 4] * 2
        assert [[each is not None for each in gradients(model)] for model in models] == changed
        assert is_committed or outcomes == ["failed", "cancelled"], outcomes


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
async def test_a_gradient_that_is_not_finite_fails_the_pass_on_all_members(bucket_bytes: int) -> None:
    async with groups(*NAMES[:2]) as (_, joined):

        async def member(group: dist.Group) -> str:
            x, y = (ag.ones((3, 2), requires_grad=True) for _ in range(2))
            reducer = GradientReducer(group, [x, y], compress=TOP, bucket_bytes=bucket_bytes)
            reducer.attach()
            factor = np.ones((3, 2), np.float32)
            if group.rank:
                factor[2, 1] = np.inf
            with pytest.raises((ArgumentError, CollectiveError)) as caught:
                await (x * ag.tensor(factor) + y).sum().backward()
            assert x.grad is None and y.grad is None and reducer.residuals == [None] * 2
            return str(caught.value)

        found = await everywhere(joined, member)
        assert "gradient of parameter 0, float32[3, 2], on rank 1" in found[1] and "the value at index (2, 1) is inf" in found[1]
        assert "backward pass on w1" in found[0] and "index (2, 1) is inf" in found[0]


@pytest.mark.parametrize("row", ["short", "flags", "garbage", "float"])
async def test_rows_from_anywhere_fail_the_pass(row: str) -> None:
    async with groups(*NAMES[:2]) as (_, joined):

        def spoilt(array: Any) -> Any:
            if row == "float":
                return array.astype(np.float64)
            if row == "short":
                return array[:-1]
            array = array.copy()
            array[slice(0, 1) if row == "flags" else slice(2, None)] = 255
            return array

        async def member(group: dist.Group) -> str:
            x = ag.ones((300,), requires_grad=True)
            reducer = GradientReducer(group, [x], compress=TOP)
            reducer.attach()
            if group.rank:
                gather = group.all_gather
                group.all_gather = lambda array, **options: gather(spoilt(array), **options)  # type: ignore[method-assign]
            with pytest.raises(ProtocolError) as caught:
                await (x * (group.rank + 1)).sum().backward()
            assert x.grad is None and reducer.residuals == [None]
            return str(caught.value)

        for found in await everywhere(joined, member):
            assert ("block 0 of the payload is malformed" if row == "garbage" else "rank 1 of group 'default' sent") in found


# -------------------------------------------------------------------- states and arguments


async def test_a_state_of_residuals_is_a_copy_and_is_checked() -> None:
    async with groups("w0") as (_, (group,)):
        ddp = dist.DistributedDataParallel(net(), group, compress=TOP)
        await train(ddp, ag.optim.SGD(ddp.parameters(), lr=0.1), 0, [0])
        state, before = ddp.compression_state_dict(), bits(ddp.compression_state_dict().values())
        for each in state.values():
            each.fill_(0)
        assert bits(ddp.compression_state_dict().values()) == before
        for wrong, text in (
            ({"other": ag.zeros(3)}, "found other, which are no parameters here; expected some of 0.weight"),
            (state | {"2.bias": ag.zeros(4)}, r"2.bias is float32\[4\]; expected float32\[3\]"),
            (state | {"2.bias": ag.zeros(3, dtype=np.float64)}, "2.bias is float64"),
            (state | {"2.bias": ag.full((3,), np.nan)}, "2.bias has values that are not finite"),
        ):
            with pytest.raises(ArgumentError, match=text):
                ddp.load_compression_state_dict(wrong)
        with pytest.raises(ArgumentTypeError, match="expected the result of compression_state_dict"):
            ddp.load_compression_state_dict([1])  # type: ignore[arg-type]
        assert bits(ddp.compression_state_dict().values()) == before
        ddp.load_compression_state_dict({"2.bias": np.ones(3, np.float32)})
        assert ddp.compression_state_dict()["2.bias"].tolist() == [1.0] * 3 and len(ddp.compression_state_dict()) == 1
        ddp.detach()
        plain = dist.DistributedDataParallel(net(), group)
        plain.load_compression_state_dict({})
        assert plain.compression_state_dict() == {}
        with pytest.raises(ArgumentError, match="made without compress="):
            plain.load_compression_state_dict(state)


async def test_what_cannot_be_compressed_is_refused() -> None:
    async with groups("w0") as ((worker,), (group,)):
        for wrong in ("topk", 8, dist.TopK):
            with pytest.raises(ArgumentTypeError, match=r"DistributedDataParallel\(compress=.*expected dist.TopK"):
                dist.DistributedDataParallel(net(), group, compress=wrong)  # type: ignore[arg-type]
            with pytest.raises(ArgumentTypeError, match=r"DataParallel\(compress=.*expected dist.TopK"):
                await dist.DataParallel.create(worker, ["w0"], "Net", compress=wrong)  # type: ignore[arg-type]
        module = ag.nn.Linear(2, 1, dtype=np.float16)
        with pytest.raises(ArgumentTypeError, match="weight is float16; every parameter has to be float32 or float64"):
            dist.DistributedDataParallel(module, group, compress=TOP)


async def test_members_with_different_compressors_are_told() -> None:
    async with groups(*NAMES[:2]) as (_, joined):

        async def member(group: dist.Group) -> str:
            ddp = dist.DistributedDataParallel(net(), group, compress=COMPRESSORS[group.rank])
            with pytest.raises(ArgumentError) as caught:
                await ddp.synchronize()
            return str(caught.value)

        for found in await everywhere(joined, member):
            assert f"compress={COMPRESSORS[1]} on w1" in found and f"compress={COMPRESSORS[0]} on w0" in found and "the same compressor" in found


# -------------------------------------------------------------------- DataParallel


async def one_step(model: Any, optimizer: Any, ranks: Ranks, shards: Any) -> None:
    """A step of one process for the shards of all replicas."""
    for p, grad in zip(model.parameters(), await summed_gradients(model, ranks, shards), strict=True):
        p.grad = None if grad is None else ag.tensor(grad)
    optimizer.step()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
async def test_steps_of_replicas_have_the_bits_of_one_process(compressor: Any, accumulate: int) -> None:
    given, ranks = batches(6, (4, 3, 5)), Ranks(compressor, range(3))
    async with replicated(Net, compress=compressor, accumulate=accumulate, bucket_bytes=100) as (replicas, opened):
        for shards in given:
            await replicas.step(shards)
        found = all_bits(replicas, opened)
        residuals = [[each.tobytes() for each in host._replica.residuals if each is not None] for host in replicas_behind(replicas, opened)]
    assert found == [(await serial_replicas(Net(), given, ranks, accumulate))[0]] * 3
    assert residuals == [ranks.bits(rank) for rank in range(3)]


async def test_a_step_that_fails_leaves_residuals_of_replicas() -> None:
    given, ranks = batches(4, (4, 4, 4)), Ranks(TOP, range(3))
    async with replicated(Net, compress=TOP) as (replicas, opened):
        hosts = replicas_behind(replicas, opened)

        def residuals() -> list[list[Any]]:
            return [[None if each is None else each.tobytes() for each in host._replica.residuals] for host in hosts]

        await replicas.step(given[0])
        before = residuals()
        module_of(hosts[1]).fails = True
        for _ in range(2):
            with pytest.raises(RemoteError, match="by nought"):
                await replicas.step(given[1])
            assert residuals() == before
        module_of(hosts[1]).fails = False
        for shards in given[1:]:
            await replicas.step(shards)
        found = all_bits(replicas, opened)
    assert found == [(await serial_replicas(Net(), given, ranks))[0]] * 3


async def test_a_replica_with_another_state_begins_without_residuals() -> None:
    given = batches(3, (4, 4, 4))
    async with replicated(BatchNet, compress=TOP) as (replicas, opened):
        await replicas.step(given[0])
        assert all(any(each is not None for each in host._replica.residuals) for host in replicas_behind(replicas, opened))
        await replicas.remove("w1")
        await replicas.add("w1")
        first, second, added = replicas_behind(replicas, opened)
        assert added._replica.residuals == [None] * 6 and all(each is not None for each in first._replica.residuals)
        await replicas.step(given[1])
        assert all(each is not None for each in added._replica.residuals)
        assert len({tuple(each) for each in all_bits(replicas, opened)}) == 1
        await replicas.load_state_dict(await replicas.state_dict())
        assert [each._replica.residuals for each in (first, second, added)] == [[None] * 6] * 3
        await replicas.step(given[2])
        assert len({tuple(each) for each in all_bits(replicas, opened)}) == 1


@pytest.mark.sim
@pytest.mark.parametrize("block", range(4))
def test_replicas_that_are_killed_and_steps_that_are_cancelled_at_any_moment(block: int) -> None:
    """A step has changed parameters and residuals of all replicas that are left, or of none; a replica with a state from others has no residuals."""
    outcomes: Counter[str] = Counter()
    for seed in range(4 * block, 4 * block + 4):
        outcomes += life_of_replicas(seed)
    assert outcomes["kill, taken"] and outcomes["kill, not taken"] and outcomes["cancel, not taken"], outcomes


def life_of_replicas(seed: int) -> Counter[str]:
    """Train; returns the outcome."""
    random, given, names = Random(seed), batches(8, (4, 4, 4)), ["w0", "w1", "w2"]
    outcomes: Counter[str] = Counter()

    async def main(world: World) -> None:
        alone, oracle = Net(), Ranks(TOP, names)
        optimizer = ag.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)

        def residuals(name: str) -> list[bytes]:
            return [each.tobytes() for each in world.host(name)._replica.residuals if each is not None]

        for shards in given:
            while True:
                taken, committed = [world.host(name)._replica.taken for name in names], True
                stepping = asyncio.ensure_future(world.replicas.step(shards))
                kind, moment = random.choice(("kill", "cancel", "nothing")), random.uniform(0, 0.03)
                victim = random.choice(names)
                trouble = {"kill": functools.partial(world.network.kill, victim), "cancel": stepping.cancel}.get(kind, int)
                asyncio.get_running_loop().call_later(moment, trouble)
                try:
                    await stepping
                    await asyncio.sleep(0.05)  # the trouble may come after the step
                except (DistributedError, asyncio.CancelledError) as error:
                    committed = bool(getattr(error, "committed", False))
                outcomes[f"{kind}, {'taken' if committed else 'not taken'}"] += 1
                if kind == "kill":
                    world.restart(victim)
                    while True:
                        try:
                            await world.replicas.add(victim)
                            break
                        except DistributedError:
                            await asyncio.sleep(0.5)
                    with contextlib.suppress(DistributedError):
                        await world.replicas._coordinator.get_ready()
                if committed:
                    await one_step(alone, optimizer, oracle, shards)
                assert len(set(taken)) == 1
                for name in names:
                    if not residuals(name):
                        oracle.residuals[name] = {}
                    assert residuals(name) == oracle.bits(name), (seed, name, kind, committed)
                    assert world.state(name) == state_bits(alone.state_dict())
                if committed:
                    break

    World(names, compress=TOP, optimizer=ag.optim.SGD, optimizer_options={"lr": 0.1, "momentum": 0.9}).simulate(main, seed=seed)
    return outcomes
