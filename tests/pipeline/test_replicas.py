"""Pipelines in replicas: the gradients of one process, added up between the workers of a stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.collectives.group import Group
from aiograd.errors import ArgumentError, ArgumentTypeError, PipelineError, RemoteError
from aiograd.pipeline import Pipeline, StepRandom, make_schedule
from aiograd.pipeline.step.stage_run import StageRun
from tests.distributed.workers import workers
from tests.pipeline.models import blocks, chunks, data, gradients, mean_square, serial, values
from tests.pipeline.remote import NoisyBlock, NormBlock, behind, place, service
from tests.pipeline.replicas import bits_of, place_replicas, serial_replicas

NAMES = ("a0", "a1", "b0", "b1", "c0", "c1")
TWO = [NAMES[:2], NAMES[2:4]]
THREE = [*TWO, NAMES[4:]]


def real(pipe: Pipeline, opened: Any) -> list[list[Any]]:
    """The modules of each replica, as they are on their workers."""
    return [[behind(module, *opened) for module in replica] for replica in pipe.replicas]


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
@pytest.mark.parametrize("rows", [12, 14, 7])
async def test_the_gradients_are_those_of_one_process(name: str, rows: int) -> None:
    x, target = data(rows)
    alone = blocks(2)
    async with workers("driver", *NAMES, service=service) as opened:
        replicas = await place_replicas(opened[0], THREE)
        held = [worker.statistics().references for worker in opened]
        async with Pipeline(replicas, make_schedule(name, 2, 2), worker=opened[0]) as pipe:
            for _ in range(2):  # the second is added to the first
                assert values(await pipe.step(x, target)) == await serial_replicas(alone, [2, 2, 2], x, target)
                for modules in real(pipe, opened):
                    assert gradients(modules) == gradients(alone)
            assert (await pipe.eval(x)).numpy().tobytes() == np.concatenate([ag.nn.Sequential(*alone)(p).numpy() for p in chunks(x, 6)]).tobytes()
        assert [worker.statistics().references for worker in opened] == held


async def test_shards_weigh_by_their_rows() -> None:
    x, target = data(16)
    cuts = [(0, 1), (1, 3), (3, 9), (9, 16)]
    parts = [(x[first:last], target[first:last]) for first, last in cuts]
    alone = blocks(2)
    losses = await serial_replicas(alone, [2, 2], x, target, parts=parts)
    async with workers("driver", *NAMES[:4], service=service) as opened:
        async with Pipeline(await place_replicas(opened[0], TWO), make_schedule("ZB-H1", 2, 2)) as pipe:
            arrived = await pipe.step(arg_mbs=[(part,) for part, _ in parts], target_mbs=[wanted for _, wanted in parts])
            assert values(arrived) == losses
            assert [gradients(modules) for modules in real(pipe, opened)] == [gradients(alone)] * 2
        for modules in real(pipe, opened):
            for module in modules:
                module.zero_grad()
        sums = blocks(2)
        for part, wanted in parts:
            loss = ((sums[1](sums[0](part)) - wanted) ** 2).mean()
            await loss.backward()
        async with Pipeline(pipe.replicas, make_schedule("1F1B", 2, 2), scale_gradients=False) as pipe:
            await pipe.step(arg_mbs=[(part,) for part, _ in parts], target_mbs=[wanted for _, wanted in parts])
            for found, expected in zip(real(pipe, opened)[1][0].parameters(), sums[0].parameters(), strict=True):
                np.testing.assert_allclose(found.grad.numpy(), expected.grad.numpy(), rtol=1e-5)


async def test_a_worker_with_two_stages() -> None:
    x, target = data(16)
    alone = blocks(4)
    losses = await serial_replicas(alone, [4, 4], x, target)
    async with workers("driver", *NAMES[:4], service=service) as opened:
        replicas = await place_replicas(opened[0], [[a, b, a, b] for a, b in TWO])
        async with Pipeline(replicas, make_schedule("Interleaved1F1B", 2, 4, 2)) as pipe:
            assert values(await pipe.step(x, target)) == losses
            assert [gradients(modules) for modules in real(pipe, opened)] == [gradients(alone)] * 2


async def test_clipping_counts_each_parameter_once() -> None:
    x, target = data(12)
    async with workers("driver", *NAMES[:4], service=service) as opened:
        replicas = await place_replicas(opened[0], TWO)
        everything = [module for replica in replicas for module in replica]
        optimizer = dist.DistributedOptimizer(opened[0], ag.optim.AdamW, everything, lr=0.05)
        alone = blocks(2)
        mine = ag.optim.AdamW([parameter for stage in alone for parameter in stage.parameters()], lr=0.05)
        async with Pipeline(replicas, make_schedule("ZB-H1", 2, 2), clip_norm=0.1) as pipe:
            for step in range(4):
                pipe.clip_norm = None if step == 2 else 0.1
                await pipe.step(x, target)
                await serial_replicas(alone, [2, 2], x, target)
                if step != 2:
                    assert ag.optim.clip_grad_norm_([parameter for stage in alone for parameter in stage.parameters()], 0.1).item() > 0.1
                assert [gradients(modules) for modules in real(pipe, opened)] == [gradients(alone)] * 2
                await optimizer.step()
                mine.step()
                mine.zero_grad()
            assert [bits_of(modules) for modules in real(pipe, opened)] == [bits_of(alone)] * 2
        await optimizer.delete()


@pytest.mark.parametrize("homes", ["...", "a.b", "aab"])
async def test_clipping_without_replicas(homes: str) -> None:
    x, target = data(8)
    alone = blocks(3)
    await serial(alone, 4, x, target)
    norm = ag.optim.clip_grad_norm_([parameter for stage in alone for parameter in stage.parameters()], 0.2)
    assert norm.item() > 0.2
    async with workers("driver", "a", "b", service=service) as opened:
        modules = await place(opened[0], [None if home == "." else home for home in homes])
        async with Pipeline(modules, make_schedule("ZB-H1", 3, 4), loss_fn=mean_square, clip_norm=0.2) as pipe:
            await pipe.step(x, target)
            assert gradients(behind(module, *opened) for module in modules) == gradients(alone)
            with pytest.raises(ArgumentError, match="expected a number above 0"):
                Pipeline(modules, pipe.schedule, loss_fn=mean_square, clip_norm=-1.0)


async def test_random_numbers_are_those_of_one_process() -> None:
    x, target = data(12)
    ag.seed(5)
    alone = [NoisyBlock(0), blocks(2)[1]]
    losses = await serial_replicas(alone, [2, 2], x, target, random=StepRandom())
    async with workers("driver", *NAMES[:4], service=service) as opened:
        ag.seed(5)
        async with Pipeline(await place_replicas(opened[0], TWO, NoisyBlock), make_schedule("1F1B", 2, 2)) as pipe:
            assert values(await pipe.step(x, target)) == losses
            assert [gradients(modules) for modules in real(pipe, opened)] == [gradients(alone)] * 2


async def test_replicas_begin_with_the_first_and_have_its_buffers() -> None:
    x, target = data(16)
    alone = [NormBlock(0), blocks(2)[1]]
    start = {name: value.detach().numpy().copy() for name, value in alone[0].state_dict().items()}
    end: dict[str, Any] = {}

    def restore() -> None:  # each replica begins with the same statistics, and those of the first stay
        end.update({name: value.detach().numpy().copy() for name, value in alone[0].state_dict().items()})
        alone[0].load_state_dict(start)

    async with workers("driver", *NAMES[:4], service=service) as opened:
        replicas = await place_replicas(opened[0], TWO, NormBlock)
        with ag.no_grad():
            behind(replicas[1][0], *opened).inner[0].weight.fill_(3.0)
        async with Pipeline(replicas, make_schedule("ZB-H1", 2, 2)) as pipe:
            for _ in range(2):
                losses = await serial_replicas(alone, [2, 2], x, target, restore=restore)
                alone[0].load_state_dict(end)
                start = dict(end)
                assert values(await pipe.step(x, target)) == losses
                for modules in real(pipe, opened):
                    assert gradients(modules) == gradients(alone) and bits_of(modules) == bits_of(alone)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
async def test_gradients_are_added_up_while_other_stages_compute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[tuple[str, Any]] = []
    reduce, runs = Group.all_reduce, {kind: getattr(StageRun, kind) for kind in ("backward", "backward_weight")}

    def noted_reduce(self: Group, *args: Any, **options: Any) -> Any:
        happened.append(("sum", self.names[self.rank]))
        return reduce(self, *args, **options)

    def noted(kind: str) -> Any:
        async def run(self: StageRun, *args: Any) -> Any:
            result = await runs[kind](self, *args)
            happened.append(("computed", self.index))
            return result

        return run

    monkeypatch.setattr(Group, "all_reduce", noted_reduce)
    for kind in runs:
        monkeypatch.setattr(StageRun, kind, noted(kind))
    x, target = data(16)
    async with workers("driver", *NAMES[:4], service=service) as opened:
        async with Pipeline(await place_replicas(opened[0], TWO), make_schedule(name, 2, 4)) as pipe:
            await pipe.step(x, target)
    assert happened.count(("computed", 0)) == happened.count(("computed", 1)) == 8
    last = max(index for index, event in enumerate(happened) if event == ("computed", 0))
    assert {("sum", "a1"), ("sum", "b1")} <= set(happened[:last])
    assert {("sum", "a0"), ("sum", "b0")} & set(happened)


async def test_what_cannot_be_a_pipeline_in_replicas() -> None:
    order = make_schedule("1F1B", 2, 2)
    async with workers("driver", *NAMES, service=service) as opened:
        driver = opened[0]
        a, b = await place_replicas(driver, TWO)
        for stages, options, message in (
            ([a, b], {"loss_fn": mean_square}, "the last stage computes the loss"),
            ([a, b], {"respawn": print}, "leave out loss_fn and respawn"),
            ([[each.ref for each in a], [each.ref for each in b]], {}, "pass this process's Worker as worker="),
            ([a, b[:1]], {}, "got 1 stages for a schedule of 2"),
            (3, {}, "expected a list of stages, found int"),
            ([a, [a[0], b[1]]], {}, "several replicas on a0;"),
            ([a, [await driver.remote_module("c0", "Block", 0), blocks(2)[1]]], {}, "replica 1 has stages in this process"),
            ([a, [await driver.remote_module("c0", "Block", 0), await driver.remote_module("c0", "Last", 1)]], {}, "have to be divided alike"),
        ):
            with pytest.raises(ArgumentError, match=message):
                Pipeline(stages, order, **options)
        with pytest.raises(ArgumentTypeError, match="not list"):
            Pipeline([a, b[0]], order)
        async with Pipeline([a, b], order) as pipe:
            for stages in (None, 3, "ab"):
                with pytest.raises(ArgumentTypeError, match="expected a list of stages, found"):
                    await pipe.add(stages)  # type: ignore[arg-type]
        other = [await driver.remote_module("c0", "Wide", 0), await driver.remote_module("c1", "Last", 1)]
        async with Pipeline([a, other], order) as pipe:
            with pytest.raises(ArgumentError, match=r"stages 0 differ: .* on c0, number 0 .* as on a0"):
                await pipe.step(*data(8))
        loose = [await driver.remote_module("c0", "Loose", 0), await driver.remote_module("c1", "Last", 1)]
        more = [await driver.remote_module("b0", "Loose", 0), await driver.remote_module("b1", "Last", 1)]
        async with Pipeline([loose, more], order) as pipe:
            with pytest.raises(RemoteError, match=r"leaves of shapes \[5\] that are no parameters"):
                await pipe.step(*data(8))
            assert not any(gradients(modules) != [None] * 4 for modules in real(pipe, opened))
        async with Pipeline(a, order) as pipe:
            with pytest.raises(ArgumentError, match="not made of replicas"):
                await pipe.add(b)
            with pytest.raises(ArgumentError, match="no replica has a stage"):
                await pipe.remove("a0")
            assert pipe.replicas == (tuple(a),)


# ---------------------------------------------------------------- other replicas


async def test_replicas_come_and_go_and_the_optimizer_with_them() -> None:
    x, target = data(12)
    alone = blocks(2)
    mine = ag.optim.AdamW([parameter for stage in alone for parameter in stage.parameters()], lr=0.05)
    async with workers("driver", *NAMES, service=service) as opened:
        driver = opened[0]
        a, b = await place_replicas(driver, TWO)
        optimizer = dist.DistributedOptimizer(driver, ag.optim.AdamW, [*a, *b], lr=0.05)
        async with Pipeline([a, b], make_schedule("ZB-H1", 2, 2)) as pipe:

            async def steps(replicas: int) -> None:
                for _ in range(2):
                    assert values(await pipe.step(x, target)) == await serial_replicas(alone, [2] * replicas, x, target)
                    for modules in real(pipe, opened):
                        assert gradients(modules) == gradients(alone)
                    await optimizer.step()
                    mine.step()
                    mine.zero_grad()
                assert [bits_of(modules) for modules in real(pipe, opened)] == [bits_of(alone)] * replicas

            await steps(2)
            await pipe.remove("a1")
            for name in ("a0", "a1"):
                await optimizer.remove(name)
            await steps(1)
            assert values(await pipe.step(x, target)) == await serial_replicas(alone, [2], x, target)  # gradients wait when the next one comes
            (c,) = await place_replicas(driver, [NAMES[4:]])
            await pipe.add(c)
            for module, like in zip(c, b, strict=True):
                await optimizer.add([module], like.peer)
            assert [gradients(modules) for modules in real(pipe, opened)] == [gradients(alone)] * 2
            await steps(2)
            with pytest.raises(ArgumentError, match="several replicas on b0, b1;"):
                await pipe.add(b)
            with pytest.raises(ArgumentError, match="as like='x'"):
                await optimizer.add([a[0]], "x")
            with pytest.raises(ArgumentError, match="one further worker"):
                await optimizer.add([c[0]], "b0")
            with pytest.raises(ArgumentError, match="there are parameters on b0, b1, c0, c1"):
                await optimizer.remove("a0")
            await steps(2)
            await pipe.remove("c0")
            with pytest.raises(ArgumentError, match="a stage of the last replica"):
                await pipe.remove("b0")
        with pytest.raises(PipelineError, match="has been closed"):
            await pipe.add(a)
        await optimizer.delete()
