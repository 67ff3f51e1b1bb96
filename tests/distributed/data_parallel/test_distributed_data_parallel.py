"""The same program on every worker of a group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import ArgumentError, ArgumentTypeError, CollectiveError, GraphError
from tests.distributed.data_parallel.replicas import bits, gradients, loss_of, mean_gradients, net, reduced, shard
from tests.distributed.groups import everywhere, groups

NAMES = ("w0", "w1", "w2")


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_members_train_as_one_process_would(count: int) -> None:
    """Equal bits on every member, and with one process that averages the gradients of all shards in the order of the ranks."""
    steps = 4
    serial = net()
    optimizer: Any = ag.optim.AdamW(serial.parameters(), lr=0.01)
    for step in range(steps):
        await reduced(serial, count, step)
        optimizer.step()
    async with groups(*NAMES[:count]) as (_, joined):

        async def train(group: dist.Group) -> list[Any]:
            ddp = dist.DistributedDataParallel(net(group.rank), group)
            optimizer = ag.optim.AdamW(ddp.parameters(), lr=0.01)
            for step in range(steps):
                optimizer.zero_grad()
                loss = (await ddp(shard(group.rank, step))).square().mean()
                await loss.backward()
                optimizer.step()
            return bits(ddp.parameters())

        assert await everywhere(joined, train) == [bits(serial.parameters())] * count


async def test_the_first_call_brings_the_values_of_rank_0() -> None:
    async with groups(*NAMES) as (_, joined):

        async def begin(group: dist.Group) -> list[Any]:
            ddp = dist.DistributedDataParallel(net(group.rank), group)
            first, second = ddp(shard(0)), ddp(shard(1))
            outputs = [await first, await second]
            outputs.append(ddp(shard(0)))  # no coroutine any more
            return bits(outputs)

        model = net(0)
        assert await everywhere(joined, begin) == [bits([model(shard(0)), model(shard(1)), model(shard(0))])] * 3


async def test_private_steps_are_refused_since_they_combine_no_gradients() -> None:
    async with groups("w0") as (_, (group,)):
        ddp = dist.DistributedDataParallel(net(), group)
        optimizer = ag.optim.SGD(ddp.parameters(), lr=0.1)
        private = ag.optim.Private(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, dataset_size=8)
        before = bits(ddp.parameters())
        with pytest.raises(ArgumentError, match="belong to a DistributedDataParallel, and a private step combines no gradients"):
            await private.step(lambda x: ddp.module(x).square().mean(), shard(0))
        assert bits(ddp.parameters()) == before and not private.steps
        ddp.detach()
        await private.step(lambda x: ddp.module(x).square().mean(), shard(0))
        assert private.steps == 1


async def test_synchronize_again_after_rank_0_has_loaded_something() -> None:
    async with groups(*NAMES) as (_, joined):

        async def begin(group: dist.Group) -> list[Any]:
            ddp = dist.DistributedDataParallel(net(), group)
            await ddp.synchronize()
            if group.rank == 0:
                ddp.load_state_dict(net(5).state_dict())
            await ddp.synchronize()
            return bits(ddp.state_dict().values())

        assert await everywhere(joined, begin) == [bits(net(5).state_dict().values())] * 3


class Awaiting(ag.nn.Module):
    """A module whose forward is a coroutine."""

    def __init__(self) -> None:
        self.inner = net()

    async def forward(self, x: Any) -> Any:
        await asyncio.sleep(0)
        return self.inner(x)


async def test_a_forward_that_is_a_coroutine() -> None:
    expected = await mean_gradients(2)
    async with groups(*NAMES[:2]) as (_, joined):

        async def step(group: dist.Group) -> list[Any]:
            ddp = dist.DistributedDataParallel(Awaiting(), group)
            for _ in range(2):
                ddp.zero_grad()
                await (await ddp(shard(group.rank))).square().mean().backward()
            return gradients(ddp)

        assert await everywhere(joined, step) == [expected] * 2


class Normalized(ag.nn.Module):
    """A module with buffers: running statistics, and a constant that its graph saves."""

    def __init__(self) -> None:
        ag.seed(0)
        self.linear = ag.nn.Linear(5, 4)
        self.norm = ag.nn.BatchNorm1d(4)
        self.register_buffer("scale", ag.tensor([2.0, 3.0, 4.0, 5.0]))

    def forward(self, x: Any) -> Any:
        return self.norm(self.linear(x)) * self.scale


@pytest.mark.parametrize("broadcast_buffers", [True, False])
async def test_buffers_are_those_of_rank_0_after_every_pass(broadcast_buffers: bool) -> None:
    alone = Normalized()
    for step in range(2):
        alone(shard(0, step))
    async with groups(*NAMES) as (_, joined):

        async def train(group: dist.Group) -> list[Any]:
            ddp = dist.DistributedDataParallel(Normalized(), group, broadcast_buffers=broadcast_buffers)
            losses = [(await ddp(shard(group.rank, step))).square().mean() for step in range(2)]
            for loss in losses:  # the second graph has saved `scale`, which must not count as modified
                await loss.backward()
            return bits(ddp.buffers())

        found = await everywhere(joined, train)
        assert found[0] == bits(alone.buffers())
        assert (found[1] == found[0]) == (found[2] == found[0]) == broadcast_buffers


async def test_no_sync_leaves_gradients_to_each_member() -> None:
    async with groups(*NAMES[:2]) as (_, joined):

        async def step(group: dist.Group) -> tuple[list[Any], list[Any]]:
            ddp = dist.DistributedDataParallel(net(), group)
            await ddp.synchronize()
            with ddp.no_sync():
                await loss_of(ddp, group.rank).backward()
            alone = gradients(ddp)
            await loss_of(ddp, group.rank, 1).backward()
            return alone, gradients(ddp)

        (alone0, found0), (alone1, found1) = await everywhere(joined, step)
        model = net()
        await loss_of(model, 0).backward()
        assert alone0 == gradients(model) != alone1 and found0 == found1


async def test_it_can_be_used_as_the_module() -> None:
    async with groups("w0") as (_, (group,)):
        model = Normalized()
        ddp = dist.DistributedDataParallel(model, group)
        assert [*ddp.parameters()] == [*model.parameters()] and dict(ddp.named_parameters()).keys() == dict(model.named_parameters()).keys()
        assert [*ddp.buffers()] == [*model.buffers()] and dict(ddp.named_buffers()).keys() == dict(model.named_buffers()).keys()
        assert ddp.training and ddp.eval() is ddp and not model.training and not ddp.training and ddp.train().training
        assert ddp.state_dict().keys() == model.state_dict().keys() and ddp.module is model and "Normalized" in repr(ddp)
        assert not ddp.load_state_dict(model.state_dict()).missing_keys


async def test_modules_of_different_structure() -> None:
    async with groups(*NAMES) as (_, joined):

        async def begin(group: dist.Group) -> None:
            model = ag.nn.Sequential(ag.nn.Linear(5, 7 + (group.rank == 2)))
            await dist.DistributedDataParallel(model, group).synchronize()

        for error in await everywhere(joined, begin):
            assert isinstance(error, ArgumentError) and "0.weight: float32[8, 5] on w2 (rank 2), 0.weight: float32[7, 5] on w0" in str(error), error


async def test_what_it_does_not_take() -> None:
    async with groups("w0") as (_, (group,)):
        with pytest.raises(ArgumentTypeError, match="expected a module"):
            dist.DistributedDataParallel(3, group)
        with pytest.raises(ArgumentTypeError, match="join_group"):
            dist.DistributedDataParallel(net(), "w0")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="nothing to reduce"):
            dist.DistributedDataParallel(net().requires_grad_(False), group)
        with pytest.raises(ArgumentError, match="bucket_bytes"):
            dist.DistributedDataParallel(net(), group, bucket_bytes=0)


async def test_the_others_go_on_in_a_new_group() -> None:
    async with groups(*NAMES) as (opened, joined):
        expected = await mean_gradients(2, lambda model, number: loss_of(model, (0, 2)[number]))
        models = [net() for _ in joined]

        async def member(group: dist.Group) -> Any:
            model = models[group.rank]
            ddp = dist.DistributedDataParallel(model, group)
            await ddp.synchronize()
            if group.rank == 1:
                group.fail(CollectiveError("w1 has had enough"))
                return None
            with pytest.raises(CollectiveError, match="had enough"):
                await loss_of(ddp, group.rank).backward()
            assert gradients(model) == [None] * 4
            rank = group.rank
            async with await group.without("w1") as rest:
                ddp = dist.DistributedDataParallel(model, rest)
                await ddp.synchronize()
                await loss_of(ddp, rank).backward()
                await rest.barrier()
            return gradients(model)

        found = await everywhere(joined, member)
        assert found == [expected, None, expected], found
        assert opened


@pytest.mark.parametrize("compress", [None, dist.Blockwise(8)], ids=repr)
async def test_passes_of_two_models_in_another_order_on_one_member_are_an_error_everywhere(compress: Any) -> None:
    """Both models have the same shapes, so only their labels tell them apart."""
    async with groups(*NAMES[:2]) as (_, joined):

        async def train(group: dist.Group) -> str:
            pair = [dist.DistributedDataParallel(net(seed), group, compress=compress) for seed in (0, 1)]
            for each in pair:
                await each.synchronize()
            for each in pair[:: 1 - 2 * group.rank]:
                try:
                    await loss_of(each, group.rank).backward()
                except CollectiveError as error:
                    assert [gradients(model) for model in pair] == [[None] * 4] * 2
                    return str(error)
            return "no error"

        for text in await everywhere(joined, train):
            assert "model 0" in text and "model 1" in text, text


async def test_passes_of_two_models_in_one_order() -> None:
    expected = [await mean_gradients(2), await mean_gradients(2)]
    async with groups(*NAMES[:2]) as (_, joined):

        async def train(group: dist.Group) -> list[Any]:
            pair = [dist.DistributedDataParallel(net(), group) for _ in range(2)]
            for each in pair:
                await each.synchronize()
            for each in pair:
                await loss_of(each, group.rank).backward()
            return [gradients(each) for each in pair]

        assert await everywhere(joined, train) == [expected] * 2


async def test_passes_of_two_models_at_once_are_refused() -> None:
    async with groups(*NAMES[:2]) as (_, joined):

        async def train(group: dist.Group) -> None:
            pair = [dist.DistributedDataParallel(net(), group) for _ in range(2)]
            for each in pair:
                await each.synchronize()
            found = await asyncio.gather(*(loss_of(each, group.rank).backward() for each in pair), return_exceptions=True)
            assert any(isinstance(each, GraphError) and "passes of two models" in str(each) for each in found), found
            assert [gradients(model) for model in pair] == [[None] * 4] * 2

        assert await everywhere(joined, train) == [None, None]


async def test_parameters_that_are_frozen_and_switched_on_again_are_still_averaged() -> None:
    serial = net()
    await reduced(serial, 2, 0)
    async with groups(*NAMES[:2]) as (_, joined):

        async def train(group: dist.Group) -> list[Any]:
            ddp = dist.DistributedDataParallel(net(group.rank), group)
            ddp.module.requires_grad_(False)
            frozen = await ddp(shard(group.rank))
            assert not frozen.requires_grad
            ddp.module.requires_grad_(True)
            await (await ddp(shard(group.rank))).square().mean().backward()
            return gradients(ddp.module)

        assert await everywhere(joined, train) == [gradients(serial)] * 2


@pytest.mark.parametrize("change", ["replaced", "added", "switched on"])
async def test_a_parameter_that_no_exchange_knows_is_refused(change: str) -> None:
    async with groups(*NAMES[:1]) as (_, (group,)):
        module: Any = net(0)
        first = next(iter(module.children()))
        if change == "switched on":
            first.weight.requires_grad_(False)
        ddp = dist.DistributedDataParallel(module, group)
        await ddp(shard(0))
        if change == "replaced":
            first.weight = ag.nn.Parameter(first.weight.detach() + 1)
        elif change == "added":
            module.scale = ag.nn.Parameter(ag.ones(1))
        else:
            first.weight.requires_grad_(True)
        with pytest.raises(GraphError, match=r"scale was added|weight was added, replaced or switched on.*make a new Distrib"):
            ddp(shard(0))
        ddp.detach()
        assert ddp(shard(0)).requires_grad
