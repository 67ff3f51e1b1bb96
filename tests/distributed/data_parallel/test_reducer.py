"""Gradients that are combined over a group while backward runs."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.coordination.buckets import GradientBuckets, ParameterSpec
from aiograd.distributed.data_parallel.reducer import GradientReducer
from aiograd.errors import ArgumentError, ArgumentTypeError, CollectiveError, GraphError
from tests.distributed.data_parallel.replicas import bits, cancelled_pass, gradients, loss_of, mean_gradients, net, shard
from tests.distributed.groups import everywhere, groups
from tests.distributed.workers import until

NAMES = ("w0", "w1", "w2")


def specs(*sizes: int) -> list[ParameterSpec]:
    return [ParameterSpec((size,), np.dtype(np.float32)) for size in sizes]


def test_buckets_are_filled_from_the_last_parameter() -> None:
    assert GradientBuckets(specs(1, 2, 3, 4), 16).indices == [(3,), (2, 1), (0,)]
    assert GradientBuckets(specs(1, 2, 3, 4), 1).indices == [(3,), (2,), (1,), (0,)]
    buckets = GradientBuckets(specs(1, 2, 3, 4), 1 << 20)
    assert buckets.indices == [(3, 2, 1, 0)] and buckets.bucket_of == dict.fromkeys(range(4), 0)


@pytest.mark.parametrize("bucket_bytes", [0, -1, 1.5, True])
def test_a_bucket_has_a_number_of_bytes(bucket_bytes: Any) -> None:
    with pytest.raises(ArgumentError, match="bucket_bytes"):
        GradientBuckets(specs(1), bucket_bytes)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
async def test_gradients_are_the_mean_in_the_order_of_the_ranks(count: int, bucket_bytes: int) -> None:
    expected = await mean_gradients(count)
    async with groups(*NAMES[:count]) as (_, joined):

        async def step(group: dist.Group) -> list[Any]:
            model = net()
            GradientReducer(group, model.parameters(), bucket_bytes=bucket_bytes).attach()
            await loss_of(model, group.rank).backward()
            return gradients(model)

        assert await everywhere(joined, step) == [expected] * count


async def test_the_sum_of_gradients() -> None:
    async with groups(*NAMES) as (_, joined):

        async def step(group: dist.Group) -> list[float]:
            x = ag.tensor([1.0, 2.0], requires_grad=True)
            GradientReducer(group, [x], op="sum").attach()
            await (x * (group.rank + 1)).sum().backward()
            await (x * 10 ** (group.rank + 1)).sum().backward()
            return x.grad.tolist()  # type: ignore[no-any-return]

        assert await everywhere(joined, step) == [[1116.0] * 2] * 3


def uses(model: Any, layers: Any, rank: int) -> Any:
    """A loss that uses some of the layers."""
    x = shard(rank)
    return sum((model[layer](x) if layer == 0 else model[layer](x.sum() * ag.ones((1, 7)))).square().mean() for layer in layers)


@pytest.mark.parametrize("used", [({0, 2}, {0}), ({2}, {0}), ({0}, {0}), ({2}, {2})])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
async def test_what_a_rank_does_not_use_counts_as_zeros_and_what_none_uses_gets_nothing(used: Any, bucket_bytes: int) -> None:
    expected = await mean_gradients(2, lambda model, rank: uses(model, used[rank], rank))
    assert (None in expected) == (used[0] | used[1] != {0, 2})
    async with groups(*NAMES[:2]) as (_, joined):

        async def step(group: dist.Group) -> list[Any]:
            model = net()
            GradientReducer(group, model.parameters(), bucket_bytes=bucket_bytes).attach()
            await uses(model, used[group.rank], group.rank).backward()
            return gradients(model)

        assert await everywhere(joined, step) == [expected] * 2


@pytest.mark.parametrize("compress", [None, dist.TopK(1 / 4, bits=4, block=64)], ids=repr)
async def test_buckets_travel_while_backward_runs(compress: Any) -> None:
    async with groups(*NAMES[:2]) as (_, joined):
        gates = [asyncio.Event() for _ in joined]
        models = [net() for _ in joined]

        async def step(group: dist.Group) -> None:
            model = models[group.rank]
            GradientReducer(group, model.parameters(), bucket_bytes=1, compress=compress).attach()
            hidden = model[1](model[0](shard(group.rank)))

            async def wait(grad: Any) -> None:
                await gates[group.rank].wait()

            hidden.register_hook(wait)
            await model[2](hidden).square().mean().backward()

        running = asyncio.gather(*map(step, joined))
        under_way = [group.operations for group in joined]
        await until(lambda: all(each.next == 2 and not each.running for each in under_way))  # two operations have begun and are over
        assert not any(map(any, map(gradients, models))), "nothing is written before the pass ends"
        for gate in gates:
            gate.set()
        await running
        assert all(map(all, map(gradients, models)))


async def test_the_order_in_which_gradients_become_ready_changes_nothing() -> None:
    """One rank's graph reaches the parameters in the opposite order."""
    async with groups(*NAMES[:2]) as (_, joined):

        async def step(group: dist.Group) -> list[Any]:
            a, b = (ag.tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
            GradientReducer(group, [a, b], bucket_bytes=1).attach()
            parts = [(a * 3).sum(), (b * 5).sum()]
            if group.rank:
                parts = [(b * 7).sum(), (a * 11).sum()]
            await (parts[0] + parts[1]).backward()
            return [a.grad.tolist(), b.grad.tolist()]

        assert await everywhere(joined, step) == [[[7.0, 7.0], [6.0, 6.0]]] * 2


async def test_passes_that_accumulate_alone() -> None:
    """Two passes on each rank by itself, then one together: the mean of the sums, and the same bits on all."""

    async def serial(rank: int) -> Any:
        model = net()
        for number in range(3):
            await loss_of(model, rank, number).backward()
        return [p.grad.numpy() for p in model.parameters()]

    sums = [await serial(rank) for rank in range(2)]
    expected = [((a + b) / np.float32(2)).tobytes() for a, b in zip(*sums, strict=True)]
    async with groups(*NAMES[:2]) as (_, joined):

        async def step(group: dist.Group) -> tuple[list[Any], list[Any]]:
            model = net()
            reducer = GradientReducer(group, model.parameters())
            reducer.attach()
            reducer.is_enabled = False
            for number in range(2):
                await loss_of(model, group.rank, number).backward()
            alone = gradients(model)
            reducer.is_enabled = True
            await loss_of(model, group.rank, 2).backward()
            return alone, gradients(model)

        (alone0, found0), (alone1, found1) = await everywhere(joined, step)
        assert alone0 != alone1
        assert found0 == found1 == expected


async def test_gradients_that_are_there_are_added_to() -> None:
    first, second = [np.frombuffer(each, np.float32) for each in await mean_gradients(2)], await mean_gradients(2, lambda m, r: loss_of(m, r, 1))
    expected = [(a + np.frombuffer(b, np.float32)).tobytes() for a, b in zip(first, second, strict=True)]
    async with groups(*NAMES[:2]) as (_, joined):

        async def step(group: dist.Group) -> list[Any]:
            model = net()
            GradientReducer(group, model.parameters()).attach()
            await loss_of(model, group.rank).backward()
            await loss_of(model, group.rank, 1).backward()
            return gradients(model)

        assert await everywhere(joined, step) == [expected] * 2


async def test_only_some_members_have_accumulated_alone() -> None:
    async with groups(*NAMES[:2]) as (_, joined):

        async def step(group: dist.Group) -> list[Any]:
            model = net()
            reducer = GradientReducer(group, model.parameters())
            reducer.attach()
            if group.rank:
                reducer.is_enabled = False
                await loss_of(model, group.rank).backward()
                reducer.is_enabled = True
            before = gradients(model)
            with pytest.raises(CollectiveError, match="were not reduced"):
                await loss_of(model, group.rank).backward()
            assert gradients(model) == before
            return before

        assert not any(isinstance(each, BaseException) for each in await everywhere(joined, step))


async def test_a_pass_that_fails_before_it_reaches_a_parameter_fails_on_all_members() -> None:
    """Also where the graph is kept."""
    async with groups(*NAMES) as (_, joined):

        async def step(group: dist.Group) -> str:
            model = net()
            GradientReducer(group, model.parameters()).attach()
            loss = loss_of(model, group.rank)

            def fail(grad: Any) -> None:
                raise ZeroDivisionError("not here")

            if group.rank == 1:
                loss.register_hook(fail)
            try:
                await loss.backward(retain_graph=True)
            except (ZeroDivisionError, CollectiveError) as error:
                assert gradients(model) == [None] * 4
                return f"{type(error).__name__}: {error}"
            return "no error"

        found = await everywhere(joined, step)
        assert found[1] == "ZeroDivisionError: not here"
        for each in (found[0], found[2]):
            assert each.startswith("CollectiveError") and "backward pass on w1" in each and "not here" in each, found


@pytest.mark.parametrize("moment", range(1, 60, 3))
async def test_a_pass_that_is_cancelled_fails_on_all_members_or_on_none(moment: int) -> None:
    async with groups(*NAMES[:2]) as (_, joined):
        models = [net() for _ in joined]
        outcomes, _ = await cancelled_pass(moment, joined, models)
        if not outcomes:
            return
        committed = [all(gradients(model)) for model in models]
        assert committed in ([False, False], [True, True]), outcomes
        assert not any(map(any, map(gradients, models))) or all(committed)
        assert outcomes in (["committed"] * 2, ["failed", "cancelled"]), outcomes


async def test_passes_that_are_not_reduced() -> None:
    """Gradients that are returned, and those of other leaves, are nobody else's business."""
    async with groups(*NAMES[:2]) as (_, joined):
        model = net()
        reducer = GradientReducer(joined[0], model.parameters())
        reducer.attach()
        x = ag.ones((4, 5), requires_grad=True)
        found = await ag.grad(model(x).sum(), list(model.parameters()))
        await model(x).sum().backward(inputs=[x])
        assert x.grad is not None and gradients(model) == [None] * 4 and not joined[0].operations.next
        reducer.detach()
        await model(x).sum().backward()
        assert bits(found) == gradients(model)


async def test_what_cannot_be_reduced_is_refused() -> None:
    async with groups(*NAMES[:1]) as (_, (group,)):
        model = net()
        with pytest.raises(ArgumentError, match="twice"):
            GradientReducer(group, [*model.parameters(), model[0].weight])
        with pytest.raises(ArgumentError, match="does not require grad"):
            GradientReducer(group, [ag.ones(3)])
        with pytest.raises(ArgumentTypeError, match="expected the parameters"):
            GradientReducer(group, [3])
        with pytest.raises(ArgumentError, match="nothing to reduce"):
            GradientReducer(group, [])


@pytest.mark.filterwarnings("ignore:Using backward")
async def test_passes_that_cannot_be_reduced_are_refused() -> None:
    async with groups(*NAMES[:1]) as (_, (group,)):
        model = net()
        GradientReducer(group, model.parameters()).attach()
        with pytest.raises(GraphError, match=r"create_graph=True: .* ag\.grad\(loss, parameters, create_graph=True\)"):
            await loss_of(model, 0).backward(create_graph=True)
        assert gradients(model) == [None] * 4
    async with groups(*NAMES[:1]) as (_, (group,)):
        model, other = net(), net(1)
        for each in (model, other):
            GradientReducer(group, each.parameters()).attach()
        with pytest.raises(GraphError, match="two modules"):
            await (loss_of(model, 0) + loss_of(other, 0)).backward()
    async with groups(*NAMES[:2]) as (_, joined):
        model = net()
        GradientReducer(joined[0], model.parameters()).attach()
        first = asyncio.ensure_future(loss_of(model, 0).backward())
        await until(lambda: joined[0].operations.next)
        with pytest.raises(GraphError, match="two passes"):
            await loss_of(model, 0).backward()
        with pytest.raises(CollectiveError):
            await first
