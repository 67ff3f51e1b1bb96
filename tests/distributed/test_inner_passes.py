"""Transforms that run passes, with functions that call other workers: the gradients of one process, or an error that says what to call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ContextError, PipelineError, StageBackwardError
from aiograd.pipeline import Pipeline, stage_backward, stage_backward_input
from tests.distributed.passes_kit import Here, Stage, passes, same
from tests.distributed.workers import busy, leaf, values

ADVICE = r"Call workers directly .* `await ctx\.backward\(loss\)`; .*dist\.moe\.RemoteExpert"


# -------------------------------------------------------------------- parallel maps and isolated passes


@pytest.mark.parametrize("where", ["here", "in a function"])
@pytest.mark.parametrize("way", ["ctx.backward", "ag.grad", "recorded"])
async def test_a_parallel_map_over_remote_calls(way: str, where: str) -> None:
    """Bits are those of the calls made one after the other in one process: arguments that they share, and what they close over, included."""
    stage = Stage("abc", seed=1, whole=way == "recorded")

    async def mapped(here: Here, x: Any) -> Any:
        def fn(x: Any, factor: float) -> Any:
            return one(x * factor * here.weight)

        async def one(x: Any) -> Any:
            y, z = await asyncio.gather(here.call("b", "via", "c", x), here.call("c", "weigh", x))
            return {"product": y * z}, [x, y]

        sets = [(x, 2.0), (x * 3, 3.0), (x, 4.0)]
        is_local = getattr(here.call, "__func__", None) is Stage.local
        results = [await fn(*each) for each in sets] if is_local else await ag.parallel.map_with_parallel_backward(fn, *sets)
        (first, (p, q)), (second, (r, _)), (third, _) = results
        return (first["product"] * second["product"] + third["product"] * p + q * r * x).sum()

    async def graph(here: Here, x: Any) -> Any:
        return await (mapped(here, x) if where == "here" else here.call("b", "mapped", x))

    stage.functions["mapped"] = mapped
    wanted = await stage.reference(graph)
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await graph(stage.here(opened[0]), stage.x)
        with pytest.raises(ContextError, match=r"`await ctx\.backward\(loss\)`"):
            await loss.backward(retain_graph=True)
        if way == "ctx.backward":
            await ctx.backward(loss)
            same(stage.found(ctx, opened), wanted)
        else:
            grads = await ag.grad(loss, stage.leaves["a"], create_graph=way == "recorded", allow_unused=True)
            same({"a": [None if grad is None else grad.detach().numpy() for grad in grads]}, {"a": wanted["a"]})
        assert stage.x.grad is None and passes(opened) == [0, 0, 0]


async def test_a_parallel_map_that_records_nothing() -> None:
    stage = Stage("ab", seed=1)
    async with stage.open() as opened, opened[0].context():

        async def fn(x: Any) -> Any:
            return await opened[0].call("b", "weigh", x)

        with ag.no_grad():
            ((y,), (z,)) = await ag.parallel.map_with_parallel_backward(fn, (stage.x,), (stage.x * 2,))
        assert values(z) == [2 * each for each in values(y)] and not y.requires_grad


async def test_an_isolated_pass_that_calls_a_worker_says_what_to_call() -> None:
    stage = Stage("ab", seed=1)
    async with stage.open() as opened, opened[0].context():
        a = opened[0]
        for fn in (lambda x: a.call("b", "weigh", x), lambda x: a.call("b", "weigh", x * 2)):
            with pytest.raises(ContextError, match=ADVICE):
                await ag.parallel.run_isolated_forward(fn, stage.x)
        with ag.no_grad():
            run, _ = await ag.parallel.run_isolated_forward(fn, stage.x)
        with pytest.raises(ContextError, match=ADVICE):
            await ag.parallel.run_isolated_backward(fn, run, ag.tensor(np.ones(3, np.float32)))
        assert stage.x.grad is None and passes(opened) == [0, 0]


async def test_what_a_parallel_map_fetches_and_closes_over_has_its_gradients() -> None:
    """Calls that send nothing that requires grad: what comes from the workers is a part of the graph around the map."""
    stage = Stage("ab", seed=2)

    async def mine(here: Here) -> Any:
        return here.weight * 1

    async def graph(here: Here, x: Any) -> Any:
        before = await here.call("b", "weigh", x)

        async def fn(x: Any) -> Any:
            return x * (await here.call("b", "mine")) * before

        ((y,), (z,)) = await ag.parallel.map_with_parallel_backward(fn, (x,), (x * 2,))
        return (y * z).sum()

    stage.functions["mine"] = mine
    wanted = await stage.reference(graph)
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await graph(stage.here(opened[0]), stage.x)
        with pytest.raises(ContextError, match=r"await ctx\.backward\(loss\)"):
            await loss.backward(retain_graph=True)
        (grad,) = await ag.grad(loss, [stage.x], retain_graph=True)
        await ctx.backward(loss)
        same(stage.found(ctx, opened), wanted)
        assert grad.numpy().tobytes() == wanted["a"][1].tobytes()


# -------------------------------------------------------------------- mixtures of experts


@pytest.mark.parametrize("on_loss", ["raise", "drop"])
async def test_experts_that_are_remote_calls_say_what_to_use(on_loss: str) -> None:
    """It is no fault of the expert, so it is not left out either."""
    stage = Stage("ab", seed=3)
    async with stage.open() as opened, opened[0].context():

        async def expert(x: Any) -> Any:
            return await opened[0].call("b", "weigh", x)

        x = ag.tensor(np.ones((2, 3), np.float32), requires_grad=True)
        with pytest.raises(ContextError, match=ADVICE):
            await ag.distributed.moe.call_many([[expert], [expert]], x, on_expert_loss=on_loss, k_min=0)
        with ag.no_grad():
            result = await ag.distributed.moe.call_many([[expert], [expert]], x, on_expert_loss=on_loss)
        assert values(result.outputs[1, 0]) == values(stage.weights["b"])


async def test_an_expert_that_would_need_a_context_is_not_taken_for_lost() -> None:
    stage = Stage("ab", seed=3)
    async with stage.open() as opened:

        async def expert(x: Any) -> Any:
            return await opened[0].call("b", "weigh", x)

        x = ag.tensor(np.ones((2, 3), np.float32), requires_grad=True)
        with pytest.raises(ContextError, match="outside of any context"):
            await ag.distributed.moe.call_many([[expert], [expert]], x, on_expert_loss="drop", k_min=0)


# -------------------------------------------------------------------- pipelines


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "ZB-H2", "ZBVZeroBubble"])
async def test_a_stage_that_calls_a_worker_says_what_to_do(schedule: str) -> None:
    ranks, per_rank = 2, 2 if schedule == "ZBVZeroBubble" else 1
    remote = Stage("ab", seed=4)
    async with remote.open() as opened, opened[0].context() as ctx:

        class Calls(ag.nn.Module):
            def __init__(self) -> None:
                self.weight = ag.nn.Parameter([1.0, 2.0, 3.0])

            async def forward(self, x: Any) -> Any:
                return await opened[0].call("b", "weigh", x * self.weight)

        class Plain(ag.nn.Module):
            def __init__(self) -> None:
                self.weight = ag.nn.Parameter([1.0, 2.0, 3.0])

            def forward(self, x: Any) -> Any:
                return x * self.weight

        stages = [Plain() for _ in range(ranks * per_rank)]
        stages[1] = Calls()  # type: ignore[call-overload]
        pipe = Pipeline(stages, ag.pipeline.make_schedule(schedule, ranks, 4, per_rank), loss_fn=lambda y, t: ((y - t) ** 2).sum())
        x, t = (ag.tensor(np.ones((4, 3), np.float32)) for _ in range(2))
        with pytest.raises(PipelineError, match=r"`await ctx\.backward\(loss\)`"):
            await pipe.step(x, t)
        assert all(stage.weight.grad is None for stage in stages) and not ctx.grads and passes(opened) == [0, 0]


async def test_halves_of_a_stage_that_has_received_values() -> None:
    """A stage ignores the graph before its inputs; calls of its own are part of it."""
    remote = Stage("ab", seed=5)
    w = leaf(1.0, 2.0, 3.0)
    async with remote.open() as opened, opened[0].context():
        received = await opened[0].call("b", "weigh", remote.x)
        inner = received * 1
        (grad,), groups = await stage_backward_input([(inner * w).sum()], None, [inner], [w])
        assert values(grad) == values(w) and len(groups) == 1
        fetched = await opened[0].call("b", "weigh", remote.x.detach())
        with pytest.raises(StageBackwardError, match="a pipeline has no context"):
            await stage_backward_input([(inner * w * fetched).sum()], None, [inner], [w])
        with pytest.raises(StageBackwardError, match=r"`await ctx\.backward\(loss\)`"):
            await stage_backward((inner * w * fetched).sum(), None, [inner])
        assert w.grad is None


# -------------------------------------------------------------------- recomputation


@pytest.fixture
def checkpointed() -> Iterator[Stage]:
    stage = Stage("abc", seed=6)
    stage.functions["forward"] = lambda here, x: here.call("c", "weigh", x * here.weight)
    yield stage


async def test_a_checkpointed_region_that_calls_workers(checkpointed: Stage) -> None:
    """It is computed again in the middle of the pass, calls included; gradients are those of one process, to the bit."""
    stage = checkpointed
    ran: list[int] = []

    async def region(here: Here, x: Any) -> Any:
        ran.append(1)
        y, z = await asyncio.gather(here.call("b", "forward", x * here.weight), here.call("c", "weigh", x))
        return y * z * x

    async def graph(here: Here, x: Any) -> Any:
        return (await ag.checkpoint(region, here, x)).sum()

    wanted = await stage.reference(graph)
    ran.clear()
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await graph(stage.here(opened[0]), stage.x)
        grads = [await ag.grad(loss, stage.leaves["a"], retain_graph=True), await ctx.grad(loss, stage.leaves["a"], retain_graph=True)]
        await ctx.backward(loss)
        assert len(ran) == 4
        same(stage.found(ctx, opened), wanted)
        for found in grads:
            same({"a": [grad.numpy() for grad in found]}, {"a": wanted["a"]})
        assert passes(opened) == [0, 0, 0] and not any(busy(worker).get("calls") for worker in opened)
