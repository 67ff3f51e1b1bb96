"""An optimizer whose state is divided among the members of a group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import ArgumentError, ArgumentTypeError, CollectiveError, DistributedError
from tests.distributed.data_parallel.models import comparable
from tests.distributed.data_parallel.replicas import bits, gradients, loss_of, net, reduced
from tests.distributed.groups import everywhere, groups
from tests.support import assert_raises
from tests.tolerance import assert_close

NAMES = ("w0", "w1", "w2")
STEPS = 4
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (ag.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (ag.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (ag.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (ag.optim.AdamW, {"lr": 0.01}),
    "RMSprop": (ag.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (ag.optim.Adagrad, {"lr": 0.01}),
    "Adadelta": (ag.optim.Adadelta, {"lr": 0.1}),
    "NAdam": (ag.optim.NAdam, {"lr": 0.01}),
    "RAdam": (ag.optim.RAdam, {"lr": 0.01}),
}


def states(found: dict[str, Any]) -> Any:
    """A state dict as values that can be compared."""
    return comparable(found)[0], found["param_groups"]


async def whole(cls: Any, options: Any, count: int, clip_norm: float | None = None) -> tuple[list[Any], Any]:
    """Weights and state of one process with the whole optimizer, where the members' gradients are averaged in the order of the ranks."""
    model = net()
    optimizer = cls(model.parameters(), **options)
    for step in range(STEPS):
        await reduced(model, count, step)
        if clip_norm is not None:
            ag.optim.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return [p.detach().numpy().copy() for p in model.parameters()], optimizer.state_dict()


async def train(group: dist.Group, cls: Any, options: Any, reduces: bool = False, **more: Any) -> tuple[list[Any], Any, int]:
    """Train; weights, state and bytes of the state on this member."""
    ddp = dist.DistributedDataParallel(net(group.rank), group)
    await ddp.synchronize()
    optimizer = dist.ZeroRedundancyOptimizer(ddp.parameters(), cls, group, reduce_gradients=reduces, **more, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        if reduces:
            with ddp.no_sync():
                await loss_of(ddp, group.rank, step).backward()
        else:
            await loss_of(ddp, group.rank, step).backward()
        await optimizer.step()
    return [p.detach().numpy().copy() for p in ddp.parameters()], await optimizer.state_dict(), optimizer.nbytes


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("count", "reduces"), [(1, False), (2, True), (3, False), (3, True)])
async def test_steps_have_the_bits_of_the_whole_optimizer(name: str, count: int, reduces: bool) -> None:
    cls, options = OPTIMIZERS[name]
    weights, state = await whole(cls, options, count)
    async with groups(*NAMES[:count]) as (_, joined):
        for found, found_state, _ in await everywhere(joined, lambda group: train(group, cls, options, reduces)):
            assert [each.tobytes() for each in found] == [each.tobytes() for each in weights]
            assert states(found_state) == states(state)


async def test_each_member_keeps_its_part_of_the_state() -> None:
    count = sum(p.size for p in net().parameters())
    async with groups(*NAMES) as (_, joined):
        found = [nbytes for _, _, nbytes in await everywhere(joined, lambda group: train(group, ag.optim.AdamW, {}))]
    assert sum(found) == 2 * 4 * count and max(found) - min(found) <= 2 * 4


@pytest.mark.parametrize("clip_norm", [0.01, 1e6])
async def test_gradients_are_clipped_by_their_norm_together(clip_norm: float) -> None:
    options = {"lr": 1.0}
    weights, _ = await whole(ag.optim.SGD, options, 2, clip_norm)
    async with groups(*NAMES[:2]) as (_, joined):
        results = await everywhere(joined, lambda group: train(group, ag.optim.SGD, options, True, clip_norm=clip_norm))
    assert [each.tobytes() for each in results[0][0]] == [each.tobytes() for each in results[1][0]]
    for mine, expected in zip(results[0][0], weights, strict=True):
        assert_close(mine, expected)


async def test_a_state_is_loaded_from_a_whole_one_and_goes_on() -> None:
    async with groups(*NAMES[:2]) as (_, joined):
        cls, options = OPTIMIZERS["AdamW"]
        _, state = await whole(cls, options, 2)

        async def load(group: dist.Group) -> Any:
            model = net()
            optimizer = dist.ZeroRedundancyOptimizer(model.parameters(), cls, group)
            optimizer.load_state_dict(state)
            with pytest.raises(ArgumentError, match="groups of"):
                optimizer.load_state_dict({"state": {}, "param_groups": []})
            with pytest.raises(ArgumentError, match="state_dict"):
                optimizer.load_state_dict({})
            return states(await optimizer.state_dict())

        assert await everywhere(joined, load) == [states(state)] * 2


async def test_groups_of_parameters_and_those_without_gradients() -> None:
    def groups_of(model: Any) -> Any:
        return [{"params": [model[0].weight, model[2].bias]}, {"params": [model[0].bias, model[2].weight], "lr": 0.5}]

    expected = net()
    await (expected[0].weight.sum() * 3 + expected[0].bias.sum()).backward()
    ag.optim.AdamW(groups_of(expected), lr=0.1).step()
    async with groups(*NAMES[:2]) as (_, joined):

        async def step(group: dist.Group) -> list[Any]:
            model = net()
            optimizer = dist.ZeroRedundancyOptimizer(groups_of(model), ag.optim.AdamW, group, reduce_gradients=True, lr=0.1)
            loss = model[0].weight.sum() * 6 if group.rank else model[0].bias.sum() * 2
            await loss.backward()
            await optimizer.step()
            assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
            return bits(model.parameters())

        assert await everywhere(joined, step) == [bits(expected.parameters())] * 2


@pytest.mark.parametrize("moment", range(1, 40, 3))
async def test_a_step_that_fails_changes_nothing_on_any_member(moment: int) -> None:
    async with groups(*NAMES[:2]) as (_, joined):
        models = [net() for _ in joined]
        optimizers = [dist.ZeroRedundancyOptimizer(m.parameters(), ag.optim.Adam, g) for m, g in zip(models, joined, strict=True)]
        for model in models:
            await loss_of(model, 0).backward()
        await asyncio.gather(*(each.step() for each in optimizers))
        before = bits(models[0].parameters())
        kept = [states(each._optimizer.state_dict()) for each in optimizers]
        running = [asyncio.ensure_future(each.step()) for each in optimizers]
        for _ in range(moment):
            await asyncio.sleep(0)
        running[1].cancel()
        if moment == 1:
            joined[1].fail(CollectiveError("it never began"))
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        after = [bits(model.parameters()) for model in models]
        assert after[0] == after[1]
        if after[0] == before:
            assert isinstance(outcomes[0], DistributedError) and [states(each._optimizer.state_dict()) for each in optimizers] == kept
        else:
            assert outcomes[0] is None


async def test_no_part_of_a_state_is_dropped() -> None:
    """Numbers of parameters may be texts, as JSON has them, and of any order; what belongs to no parameter is an error."""
    model = net()
    whole_one = ag.optim.Adam(model.parameters(), lr=0.1)
    await loss_of(model, 0).backward()
    whole_one.step()
    state = whole_one.state_dict()
    shift = {number: number + 3 for number in state["state"]}
    groups_of = state["param_groups"]
    shifted = {
        "state": {shift[number]: values for number, values in state["state"].items()},
        "param_groups": [{**each, "params": [shift[number] for number in each["params"]]} for each in groups_of],
    }
    texts = {**state, "state": {str(number): values for number, values in state["state"].items()}}
    async with groups("w0", "w1") as (_, joined):
        for given in (state, shifted, texts):
            optimizers = [dist.ZeroRedundancyOptimizer(net().parameters(), ag.optim.Adam, group, lr=0.1) for group in joined]
            for optimizer in optimizers:
                optimizer.load_state_dict(given)
            found = await asyncio.gather(*(optimizer.state_dict() for optimizer in optimizers))
            assert states(found[0]) == states(found[1]) == states(state)
        optimizer = dist.ZeroRedundancyOptimizer(net().parameters(), ag.optim.Adam, joined[0], lr=0.1)
        for wrong, text in (
            ({**state, "state": {**state["state"], 99: {}}}, "parameter 99, which is in no group"), ({**state, "state": [1]}, "'state' of list"),
            ({**state, "param_groups": [{}]}, "lists of 'params'"), ({**state, "param_groups": 5}, "'param_groups' of int"),
        ):  # fmt: skip
            assert_raises(ArgumentError, text, optimizer.load_state_dict, wrong)


async def test_what_it_does_not_take() -> None:
    assert_raises(ArgumentTypeError, "join_group", dist.ZeroRedundancyOptimizer, net().parameters(), ag.optim.SGD, None)
    async with groups("w0") as (_, (group,)):
        model = net()
        for cls in (ag.optim.LBFGS, dict):
            with pytest.raises(ArgumentTypeError, match="cannot be divided"):
                dist.ZeroRedundancyOptimizer(model.parameters(), cls, group)
        for limit in (-1.0, "a"):
            with pytest.raises(ArgumentError, match="clip_norm"):
                dist.ZeroRedundancyOptimizer(model.parameters(), ag.optim.SGD, group, clip_norm=limit)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="lr"):
            dist.ZeroRedundancyOptimizer(model.parameters(), ag.optim.SGD, group, lr=-1.0)
        optimizer = dist.ZeroRedundancyOptimizer(model.parameters(), ag.optim.SGD, group)
        await loss_of(model, 0).backward()
        assert all(gradients(model)) and "SGD" in repr(optimizer)
        first = asyncio.ensure_future(optimizer.step())
        await asyncio.sleep(0)
        with pytest.raises(ArgumentError, match="under way"):
            await optimizer.step()
        await first
