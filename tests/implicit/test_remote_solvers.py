"""Implicit functions whose solver or residual runs on other workers, in a simulated network, and their figures on the metrics page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import aiograd as ag
from aiograd import distributed as dist
from aiograd import implicit
from aiograd.dashboard.metrics import metrics_page
from aiograd.errors import ConvergenceError, DistributedError, WorkerLostError
from aiograd.implicit.solvers import IMPLICIT_COUNTS
from aiograd.testing import SimulatedNetwork, simulated_run
from tests.distributed.workers import settled, until, workers

service = dist.Service()
TARGET = np.array([4.0, 9.0])


class Part:
    """The state of a worker: a parameter of the residual, and a gate that its solver waits at."""

    weight = ag.tensor(np.array([2.0, 3.0]), requires_grad=True)
    waits = False


@service.function
async def excess(x: ag.Tensor, a: ag.Tensor) -> ag.Tensor:
    return Part.weight * x * x - a


@service.function
async def newton(x: ag.Tensor, a: ag.Tensor) -> ag.Tensor:
    for _ in range(30):
        x = x - (Part.weight * x * x - a) / (2 * Part.weight * x)
        if Part.waits:
            await asyncio.sleep(1.0)
    return x


def leaf() -> Any:
    return ag.tensor(TARGET, requires_grad=True)


def start() -> Any:
    return ag.ones(2, dtype=np.float64)


def simulate(main: Any, seed: int = 0) -> None:
    """Run ``main(network, a, b)`` with two workers on virtual time."""

    async def run() -> None:
        network = SimulatedNetwork(seed=seed)
        async with opened(network, "b") as b, opened(network, "a", peers={"b": "sim://b"}) as a:
            await main(network, a, b)

    simulated_run(run, seed=seed)


@contextlib.asynccontextmanager
async def opened(network: SimulatedNetwork, name: str, **options: Any) -> AsyncIterator[dist.Worker]:
    with contextlib.suppress(WorkerLostError):
        async with dist.Worker(name, service=service, secret=b"x" * 32, transport=network.transport(name), **options) as worker:
            yield worker


@pytest.mark.sim
def test_a_solver_on_a_worker_needs_no_context() -> None:
    async def main(network: Any, a: dist.Worker, b: dist.Worker) -> None:
        weight = ag.tensor(np.array([2.0, 3.0]), requires_grad=True)

        @implicit.root(lambda x, t: weight * x * x - t)
        async def solve(x: Any, t: Any) -> Any:
            return await a.call("b", "newton", x, t)

        t = leaf()
        x = await solve(start(), t)
        await (x * x).sum().backward()
        np.testing.assert_allclose(t.grad.numpy(), [1 / 2, 1 / 3])
        np.testing.assert_allclose(weight.grad.numpy(), -TARGET / np.array([4.0, 9.0]))

    simulate(main)


@pytest.mark.sim
def test_a_worker_that_is_killed_while_it_solves() -> None:
    async def main(network: Any, a: dist.Worker, b: dist.Worker) -> None:
        @implicit.root(lambda x, t: x * x - t)
        async def solve(x: Any, t: Any) -> Any:
            return await a.call("b", "newton", x, t)

        asyncio.get_running_loop().call_later(5.5, network.kill, "b")
        with pytest.raises(DistributedError):
            await solve(start(), leaf())

    Part.waits = True
    try:
        simulate(main)
    finally:
        Part.waits = False


@pytest.mark.parametrize("way", ["ctx.backward", "ag.grad"])
async def test_the_residual_on_a_worker_gives_its_parameters_their_gradients(way: str) -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:

        @implicit.root(lambda x, t: a.call("b", "excess", x, t))
        async def solve(x: Any, t: Any) -> Any:
            return await a.call("b", "newton", x, t)

        t = leaf()
        x = await solve(start(), t)
        loss = (x * x).sum()
        if way == "ag.grad":
            (found,) = await ag.grad(loss, [t])
        else:
            await ctx.backward(loss)
            there = next(context for context in b._contexts if context.key == ctx.key)
            np.testing.assert_allclose(there.grads[Part.weight].numpy(), -TARGET / np.array([4.0, 9.0]))
            assert len(there.grads) == 1 and len(ctx.grads) == 1, "the answer is no leaf"
            found = ctx.grads[t]
        np.testing.assert_allclose(found.numpy(), [1 / 2, 1 / 3])


async def test_forward_mode_through_a_solver_and_a_residual_on_a_worker() -> None:
    async with workers("a", "b", service=service) as (a, _):

        @implicit.root(lambda x, t: a.call("b", "excess", x, t))
        async def solve(x: Any, t: Any) -> Any:
            return await a.call("b", "newton", x, t)

        x, product = await ag.jvp(lambda t: solve(start(), t), ag.asarray(TARGET), ag.asarray(TARGET))
        np.testing.assert_allclose(product.numpy(), x.numpy() / 2)


@service.function
async def solved_here(a: ag.Tensor) -> Any:
    return await implicit.root(lambda x, a: Part.weight * x * x - a)(newton)(start(), a)


async def test_several_solves_in_one_distributed_pass_and_one_within_a_remote_function() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:

        @implicit.root(lambda x, t: a.call("b", "excess", x, t))
        async def solve(x: Any, t: Any) -> Any:
            return await a.call("b", "newton", x, t)

        t = leaf()
        found = await asyncio.gather(*(solve(start(), t * i) for i in (1.0, 2.0, 3.0)), a.call("b", "solved_here", t * 4))
        await ctx.backward(sum((x * x).sum() for x in found))
        np.testing.assert_allclose(ctx.grads[t].numpy(), 10 / np.array([2.0, 3.0]))


@pytest.mark.sim
def test_a_worker_that_is_killed_in_the_linear_solve_changes_nothing() -> None:
    async def main(network: Any, a: dist.Worker, b: dist.Worker) -> None:
        @implicit.root(lambda x, t: a.call("b", "excess", x, t))
        async def solve(x: Any, t: Any) -> Any:
            return await a.call("b", "newton", x, t)

        t, other = leaf(), ag.tensor(2.0, requires_grad=True)
        async with a.context() as ctx:
            x = await solve(start(), t)
            before = IMPLICIT_COUNTS.iterations

            def kill(gradient: Any) -> None:
                if IMPLICIT_COUNTS.iterations == before + 2:
                    network.kill("b")

            x.grad_fn.next_edges[0].node.register_prehook(kill)
            with pytest.raises(DistributedError):
                await ctx.backward((x * ag.asarray([1.0, 5.0])).sum() * other)
            assert IMPLICIT_COUNTS.iterations == before + 2 and not len(ctx.grads)

    simulate(main)


async def test_a_solve_that_fails_rolls_the_distributed_pass_back() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:

        @implicit.root(lambda x, t: a.call("b", "excess", x, t), maxiter=1)
        async def solve(x: Any, t: Any) -> Any:
            return await a.call("b", "newton", x, t)

        t, other = leaf(), ag.tensor(2.0, requires_grad=True)
        x = await solve(start(), t)
        there = next(context for context in b._contexts if context.key == ctx.key)
        with pytest.raises(ConvergenceError):
            await ctx.backward((x * ag.asarray([1.0, 5.0])).sum() * other)
        assert not len(ctx.grads) and not len(there.grads)
        await until(lambda: not b.statistics().passes)
    await settled(a, b)


async def test_the_metrics_page_counts_solves_iterations_and_failures() -> None:
    def count(worker: dist.Worker) -> list[float]:
        families = {family.name: family for family in text_string_to_metric_families(metrics_page(worker._core).body.decode())}
        return [families[f"aiograd_implicit_{name}"].samples[0].value for name in ("solves", "iterations", "failures")]

    solve = implicit.root(lambda x, t: x * x - t)(lambda x, t: np.sqrt(t))
    async with workers("a", service=service) as (a,):
        before = count(a)
        await (await solve(start(), leaf())).sum().backward()
        with pytest.raises(ConvergenceError):
            await (await solve(start(), leaf()) * np.nan).sum().backward()
        after = count(a)
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 3, 1]
    assert after == [IMPLICIT_COUNTS.solves, IMPLICIT_COUNTS.iterations, IMPLICIT_COUNTS.failures]
