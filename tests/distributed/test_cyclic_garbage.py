"""Nothing that distributed work leaves behind needs the garbage collector: graphs, saved tensors and messages are free when the work is done.

A collection would stop the loop of a service, and until it comes activations of many passes would lie about.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import DeadlineError, RemoteError
from aiograd.pipeline import Pipeline, make_schedule
from tests.distributed.workers import leaf, settled, workers

service = dist.Service()


@service.function
async def double(x: ag.Tensor) -> ag.Tensor:
    """Twice the sum of the squares."""
    return (x * x * 2).sum()


@service.function
async def fail(x: ag.Tensor) -> ag.Tensor:
    """Fails in its backward."""
    y = x * 3

    def refuse(gradient: Any) -> None:
        raise ValueError("no gradient today")

    y.register_hook(refuse)
    return y


@service.function
async def refuse(x: ag.Tensor) -> ag.Tensor:
    """Fails at once."""
    raise ValueError("not today")


@service.function
async def sleep(x: ag.Tensor) -> ag.Tensor:
    """Does not end."""
    await asyncio.Event().wait()
    return x


@service.reference
class Net(ag.nn.Module):
    """A stage, and a model."""

    def __init__(self) -> None:
        self.inner = ag.nn.Linear(4, 4)

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        return ag.tanh(self.inner(x))

    def loss(self, x: ag.Tensor) -> ag.Tensor:
        return (self(x) ** 2).mean()


def batch(rows: int = 4) -> ag.Tensor:
    return ag.tensor(np.linspace(-1, 1, rows * 4, dtype=np.float32).reshape(rows, 4))


Workers = tuple[dist.Worker, ...]
Step = Callable[[], Awaitable[Any]]


def in_a_context(step: Callable[[dist.Worker, Any], Awaitable[None]]) -> Any:
    """A scenario whose steps run in contexts of their own."""

    @asynccontextmanager
    async def scenario(team: Workers) -> AsyncIterator[Step]:
        async def in_context() -> None:
            async with team[0].context() as ctx:
                await step(team[0], ctx)

        yield in_context

    return scenario


@in_a_context
async def remote_pass(a: dist.Worker, ctx: Any) -> None:
    x = leaf(1, 2)
    await ctx.backward(await a.call("b", "double", x) + await a.call("c", "double", x))
    assert len(ctx.grads) == 1


@in_a_context
async def pass_that_records(a: dist.Worker, ctx: Any) -> None:
    x = leaf(1, 2)
    y = await a.call("b", "double", x)
    (first,) = await ctx.grad(y, [x], create_graph=True)
    await ctx.backward(first.sum())


def erring(name: str, kind: type[BaseException], timeout: float | None = None) -> Any:
    """A pass that fails."""

    @in_a_context
    async def scenario(a: dist.Worker, ctx: Any) -> None:
        x = leaf(1, 2)
        with pytest.raises(kind):
            y = await a.call("b", name, x * 2, timeout=timeout)
            await ctx.backward(y.sum())

    return scenario


@in_a_context
async def cancelled(a: dist.Worker, ctx: Any) -> None:
    task = asyncio.create_task(a.call("b", "sleep", leaf(1, 2) * 2))
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


@asynccontextmanager
async def optimizer(team: Workers) -> AsyncIterator[Step]:
    a, *_ = team
    module = await a.remote_module("b", Net)
    optimizer = dist.DistributedOptimizer(a, "SGD", [module], lr=0.1)

    async def step() -> None:
        async with a.context() as ctx:
            await ctx.backward((await module(batch())).sum())
            await optimizer.step(ctx)

    yield step


@asynccontextmanager
async def group(team: Workers) -> AsyncIterator[Step]:
    names = [each.name for each in team]
    groups = await asyncio.gather(*(dist.join_group(each, names) for each in team))

    async def step() -> None:
        for size in (3, 100_000):
            await asyncio.gather(*(each.all_reduce([np.ones(size, np.float32)]) for each in groups))
        await asyncio.gather(*(each.barrier() for each in groups))

    yield step
    await asyncio.gather(*(each.aclose() for each in groups))


@asynccontextmanager
async def replicas(team: Workers, **options: Any) -> AsyncIterator[Step]:
    a, *_ = team
    async with await dist.DataParallel.create(a, ["b", "c"], Net, optimizer="AdamW", **options) as made:

        async def step() -> None:
            await made.step([(batch(),), (batch(2),)])
            await made.eval([(batch(),), (batch(2),)])

        yield step


@asynccontextmanager
async def sharded(team: Workers) -> AsyncIterator[Step]:
    async with replicas(team, shard_optimizer=True, clip_norm=1.0) as step:
        yield step


@asynccontextmanager
async def pipeline(team: Workers, schedule: str = "1F1B") -> AsyncIterator[Step]:
    a, *_ = team
    stages = [await a.remote_module(name, Net) for name in ("b", "c")]
    async with Pipeline(stages, make_schedule(schedule, 2, 2), loss_fn=ag.nn.functional.mse_loss, worker=a) as pipe:

        async def step() -> None:
            await pipe.step(batch(), batch())
            await pipe.eval(batch())

        yield step


@asynccontextmanager
async def split_backward(team: Workers) -> AsyncIterator[Step]:
    async with pipeline(team, "ZB-H1") as step:
        yield step


SCENARIOS: dict[str, Any] = {
    "a pass": remote_pass,
    "a pass that records a graph": pass_that_records,
    "a call that fails": erring("refuse", RemoteError),
    "a backward that fails": erring("fail", RemoteError),
    "a deadline": erring("sleep", DeadlineError, timeout=0.05),
    "a cancelled call": cancelled,
    "an optimizer step": optimizer,
    "collectives": group,
    "data-parallel replicas": replicas,
    "replicas that divide the optimizer's state": sharded,
    "a pipeline": pipeline,
    "a pipeline whose backward is divided": split_backward,
}


@pytest.mark.parametrize("name", SCENARIOS)
async def test_nothing_is_left_for_the_collector(name: str) -> None:
    async with workers("a", "b", "c", service=service) as team, SCENARIOS[name](team) as step:
        for _ in range(3):
            await step()
        await settled(*team)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await step()
            await settled(*team)
            gc.collect()
            left = sorted({type(item).__qualname__ for item in gc.garbage})
        finally:
            gc.set_debug(0)
            gc.enable()
            gc.garbage.clear()
        assert left == []
