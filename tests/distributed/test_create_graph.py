"""Passes that record a graph across workers: gradients can be differentiated again, as if everything had been computed in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.codec import WireTensor
from aiograd.errors import ProtocolError, RemoteError
from tests.distributed.passes_kit import GRAPHS, WASTEFUL, Here, Misbehave, Slowly, Stage, Suspend, passes, same
from tests.distributed.workers import context_here, leaf, simulate, values, view, workers
from tests.support import custom_function


async def cube(here: Here, x: Any) -> Any:
    return x * x * x * here.weight


async def gradient_of_weight(here: Here) -> Any:
    """The gradient that an earlier pass has left for this worker's weight."""
    return context_here().grads[here.weight]


def penalised(stage: Stage) -> Stage:
    stage.functions.update(cube=cube, gradient_of_weight=gradient_of_weight)
    return stage


async def second(stage: Stage, graph: Any) -> dict[str, list[Any]]:
    """In one process: the gradients of (∂loss/∂x)² + Σ (∂loss/∂w)², by worker."""
    everything = [known for leaves in stage.leaves.values() for known in leaves]
    loss = await graph(Here("a", stage.weights["a"], stage.local), stage.x)
    first = await ag.grad(loss, everything, create_graph=True, allow_unused=True)
    penalty = sum((g * g).sum() for g in first if g is not None)
    grads = list(await ag.grad(penalty, everything, allow_unused=True))
    totals = [None if g is None else g.detach() if h is None else g.detach() + h for g, h in zip(first, grads, strict=True)]
    return {name: [None if (total := totals.pop(0)) is None else total.numpy() for _ in leaves] for name, leaves in stage.leaves.items()}


async def across(stage: Stage, graph: Any, opened: Any, ctx: Any) -> None:
    """The same over workers: gradients of the first pass stay where they are, and are fetched as remote results."""
    a = opened[0]
    loss = await graph(stage.here(a), stage.x)
    await ctx.backward(loss, create_graph=True)
    grads = [ctx.grads[known] for known in stage.leaves["a"] if known in ctx.grads]
    for worker in opened[1:]:
        if any(stage.weights[worker.name] in context.grads for context in worker._contexts if context.key == ctx.key):
            grads.append(await a.call(worker.name, "gradient_of_weight"))
    penalty = sum((g * g).sum() for g in grads)
    await ctx.backward(penalty)


def close(found: dict[str, list[Any]], wanted: dict[str, list[Any]], rtol: float) -> None:
    for name, grads in wanted.items():
        for grad, want in zip(found[name], grads, strict=True):
            assert (grad is None) == (want is None)
            if want is not None:
                np.testing.assert_allclose(grad, want, rtol=rtol, atol=1e-12)


# -------------------------------------------------------------------- the right numbers


@pytest.mark.parametrize("name", [*GRAPHS, *WASTEFUL])
async def test_second_derivatives_are_those_of_one_process(name: str) -> None:
    graph = GRAPHS[name] if name in GRAPHS else WASTEFUL[name][0]
    stage = penalised(Stage(whole=True))
    wanted = await second(stage, graph)
    async with stage.open() as opened, opened[0].context() as ctx:
        await across(stage, graph, opened, ctx)
        same(stage.found(ctx, opened), wanted)
        assert passes(opened) == [0, 0, 0, 0]


async def test_the_gradient_of_a_gradient() -> None:
    stage = penalised(Stage("ab", whole=True))
    x, w = stage.x, stage.weights["b"]
    async with stage.open() as opened, opened[0].context() as ctx:
        y = await opened[0].call("b", "cube", x)
        await ctx.backward(y.sum(), create_graph=True)
        g = ctx.grads[x]
        assert g.requires_grad and values(g) == values(3 * x * x * w)
        await ctx.backward((g * g).sum())  # 9 x⁴ w²
        assert values(ctx.grads[x]) == values(3 * x * x * w + 36 * x * x * x * w * w)
        assert values(view(opened[1], ctx).grads[w]) == values(x * x * x + 18 * x * x * x * x * w)


async def test_a_third_and_a_fourth_derivative() -> None:
    stage = penalised(Stage("ab", whole=True))
    x, w = stage.x, stage.weights["b"]
    async with stage.open() as opened, opened[0].context() as ctx:
        y = await opened[0].call("b", "cube", x)
        total = 0.0
        derivatives = [3 * x * x * w, 6 * x * w, 6 * w]
        root = y.sum()
        for wanted in derivatives:
            before = ctx.grads[x] if x in ctx.grads else None
            await ctx.backward(root, create_graph=True)
            gained = ctx.grads[x] if before is None else ctx.grads[x] - before
            assert values(gained) == values(wanted)
            total = total + wanted
            root = gained.sum()
        assert values(ctx.grads[x]) == values(total)


async def test_a_hessian_vector_product_through_a_chain_of_workers() -> None:
    stage = penalised(Stage(whole=True))

    async def graph(here: Here, x: Any) -> Any:
        y = await here.call("b", "cube", x)
        return ((await here.call("c", "cube", y)) * here.weight).sum()

    v = ag.tensor(np.array([1.0, 2.0, 3.0]))
    (first,) = await ag.grad(await graph(Here("a", stage.weights["a"], stage.local), stage.x), [stage.x], create_graph=True)
    (wanted,) = await ag.grad((first * v).sum(), [stage.x])
    async with stage.open() as opened, opened[0].context() as ctx:
        await ctx.backward(await graph(stage.here(opened[0]), stage.x), create_graph=True)
        gradient = ctx.grads[stage.x]
        await ctx.backward((gradient * v).sum())
        np.testing.assert_allclose((ctx.grads[stage.x] - gradient).detach().numpy(), wanted.numpy(), rtol=1e-12)


async def test_a_penalty_beside_the_loss_itself() -> None:
    """As it is used: the penalty is part of the loss, and both passes go into one context."""
    stage = penalised(Stage("abc", whole=True))
    x = stage.x

    async def graph(here: Here, x: Any) -> Any:
        return (await here.call("b", "via", "c", await here.call("c", "cube", x))).sum()

    loss = await graph(Here("a", stage.weights["a"], stage.local), x)
    (first,) = await ag.grad(loss, [x], create_graph=True)
    everything = [x, stage.weights["b"], stage.weights["c"]]
    wanted = await ag.grad(loss + (first * first).sum(), everything)
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await graph(stage.here(opened[0]), x)
        await ctx.backward(loss, create_graph=True)
        gradient = ctx.grads[x]
        before = stage.found(ctx, opened)
        await ctx.backward(loss + (gradient * gradient).sum())
        found = stage.found(ctx, opened)
        gained = [found[who][n] - before[who][n] for who, n in (("a", 1), ("b", 0), ("c", 0))]
        for grad, want in zip(gained, wanted, strict=True):
            np.testing.assert_allclose(grad, want.numpy(), rtol=1e-12)


# -------------------------------------------------------------------- graphs and modes


async def test_a_pass_that_records_keeps_the_graph_and_a_plain_one_records_nothing() -> None:
    stage = penalised(Stage("ab", whole=True))
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = (await opened[0].call("b", "cube", stage.x)).sum()
        await ctx.backward(loss, create_graph=True)
        edges = [len(view(worker, ctx).send_nodes) for worker in opened]
        assert edges == [1, 2], "for the two messages of the call, and for the gradient that came back; what went there was constant"
        recorded = ctx.grads[stage.x]
        await ctx.backward(loss, retain_graph=True)
        assert [len(view(worker, ctx).send_nodes) for worker in opened] == edges
        assert recorded.requires_grad and not ctx.grads[stage.x].requires_grad
        await ctx.backward(loss)
        assert values(ctx.grads[stage.x]) == values(9 * stage.x * stage.x * stage.weights["b"])


async def test_gradients_that_depend_on_nothing_make_no_edge() -> None:
    """Of a linear function without parameters the gradient is a constant."""
    own = dist.Service()
    own.function("double")(lambda x: x * 2)
    async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
        x = leaf(1, 2)
        await ctx.backward((await a.call("b", "double", x)).sum(), create_graph=True)
        assert not ctx.grads[x].requires_grad and len(view(b, ctx).send_nodes) == len(view(a, ctx).send_nodes) == 1


async def test_rules_of_users_and_hooks_take_part_in_what_is_recorded() -> None:
    stage = Stage("ab", whole=True)

    async def pause(g: Any) -> Any:
        await asyncio.sleep(0)
        return g * g

    async def squared(here: Here, x: Any) -> Any:
        y = Suspend.apply(x * here.weight, pause)
        y.register_hook(lambda g: g * 3)
        return y

    stage.functions["squared"] = squared
    x, w = stage.x, stage.weights["b"]
    async with stage.open() as opened, opened[0].context() as ctx:
        y = await opened[0].call("b", "squared", x)
        await ctx.backward((y * stage.weights["a"]).sum(), create_graph=True)
        a = stage.weights["a"]
        assert values(ctx.grads[x]) == values(9 * a * a * w)
        gradient = ctx.grads[x]
        known = ctx.grads[a].detach()
        await ctx.backward(gradient.sum())
        assert values(ctx.grads[a] - known) == values(18 * a * w)
        assert values(view(opened[1], ctx).grads[w]) == values(9 * a * a * x + 9 * a * a)


async def test_a_rule_that_can_be_differentiated_once_says_so_from_where_it_is() -> None:
    @custom_function(lambda x: x * x, saves=True)
    @ag.once_differentiable
    def once(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * g * x

    own = dist.Service()
    own.function("once")(lambda x: once.apply(x))
    async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
        x = leaf(1, 2)
        await ctx.backward((await a.call("b", "once", x)).sum(), create_graph=True)
        gradient = ctx.grads[x]
        assert values(gradient) == [2, 4]
        with pytest.raises(RemoteError, match="once_differentiable") as caught:
            await ctx.backward(gradient.sum(), retain_graph=True)
        assert caught.value.worker == "b" and caught.value.type_name == "OnceDifferentiableError"
        assert values(ctx.grads[x]) == [2, 4] and passes((a, b)) == [0, 0]


async def test_a_recorded_pass_that_fails_changes_nothing_and_can_be_repeated() -> None:
    fail = [True]

    def rule(g: Any) -> Any:
        if fail[0]:
            raise ValueError("boom")
        return g

    stage = penalised(Stage(whole=True))

    async def weigh(here: Here, x: Any) -> Any:
        y = x * x * here.weight
        return Misbehave.apply(y, rule) if here.name == "d" else y

    stage.functions["weigh"] = weigh
    fail[0] = False
    wanted = await second(stage, GRAPHS["diamond"])
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await GRAPHS["diamond"](stage.here(opened[0]), stage.x)
        edges = [(len(view(w, ctx).send_nodes), len(view(w, ctx).recv_nodes)) for w in opened]
        for _ in range(3):
            fail[0] = True
            with pytest.raises(RemoteError, match="boom"):
                await ctx.backward(loss, create_graph=True)
            assert passes(opened) == [0, 0, 0, 0]
            assert not any(grad is not None for grads in stage.found(ctx, opened).values() for grad in grads)
            assert [(len(view(w, ctx).send_nodes), len(view(w, ctx).recv_nodes)) for w in opened] == edges, "it has taken its own edges back"
        fail[0] = False
        await across(stage, GRAPHS["diamond"], opened, ctx)
        close(stage.found(ctx, opened), wanted, 1e-12)


async def test_contexts_with_recorded_gradients_leave_nothing_behind() -> None:
    stage = penalised(Stage(whole=True))
    async with stage.open() as opened:
        for _ in range(3):
            async with opened[0].context() as ctx:
                await across(stage, GRAPHS["triangle"], opened, ctx)
        assert not any(worker.statistics().contexts for worker in opened)


async def test_a_callee_differentiates_twice() -> None:
    """Both passes are started by a function, over calls that it makes, and their second derivatives reach the caller's leaf."""
    stage = penalised(Stage("abc", whole=True))

    async def twice(here: Here, x: Any) -> None:
        ctx = context_here()
        y = await here.call("c", "cube", x)
        await ctx.backward(y.sum(), create_graph=True)
        gradient = await here.call("c", "gradient_of_weight")
        await ctx.backward((gradient * gradient).sum())

    stage.functions["twice"] = twice
    x = stage.x
    async with stage.open() as opened, opened[0].context() as ctx:
        await opened[0].call("b", "twice", x * 2)
        w = stage.weights["c"]
        wanted = 3 * 4 * x * x * 2 * w + 6 * 32 * x * x * x * x * x * 2  # of (2x)³w and of ((2x)³)², by x
        assert values(ctx.grads[x]) == values(wanted)


@pytest.mark.parametrize("rest", [(), (None, ()), (None, (1,)), (None, (0.5,)), (None, [-1]), (None, (-1,) * 99), (None, "x"), (None, None)])
async def test_a_place_that_makes_no_sense_is_refused(rest: tuple[Any, ...]) -> None:
    stage = penalised(Stage("ab"))
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        y = await a.call("b", "cube", stage.x)
        await a.endpoint.request("b", Kind.MARK, (ctx.key, "a", 99, [y.grad_fn.edge]), 5)
        bundle = (y.grad_fn.edge, [WireTensor(np.ones(3, np.float32), False)], 0)
        with pytest.raises(ProtocolError, match="field place" if rest else "without a place in it"):
            await a.endpoint.request("b", Kind.GRADIENT, (ctx.key, "a", 99, bundle, 4 | 2, [], *rest), 5)
        with pytest.raises(ProtocolError):
            await a.endpoint.request("b", Kind.GRADIENT, (ctx.key, "a", 99, bundle, 2, [], None, (-1,)), 5)
        await a.endpoint.request("b", Kind.ABORT, (ctx.key, "a", 99, "done"), 5)
        assert not b.statistics().passes and stage.weights["b"] not in view(b, ctx).grads


# -------------------------------------------------------------------- whatever the timing


def _on_network(seed: int, scene: Callable[[Any, Any], Any], stage: Stage) -> None:
    async def main() -> None:
        async with stage.open(Slowly(seed), idle=False) as opened, opened[0].context() as ctx:  # type: ignore[arg-type]
            await scene(opened, ctx)

    simulate(main, seed=seed)


@pytest.mark.sim
@pytest.mark.parametrize("name", GRAPHS)
def test_second_derivatives_do_not_depend_on_timing(name: str) -> None:
    """On random networks in float32: close to those of one process, and every time the same to the last bit."""
    results: set[bytes] = set()
    stage = penalised(Stage())
    naps = Random(0)

    async def weigh(here: Here, x: Any) -> Any:
        if here.call != stage.local:
            await asyncio.sleep(naps.uniform(0, 0.05))
        return x * here.weight

    stage.functions["weigh"] = weigh

    async def scene(opened: Any, ctx: Any) -> None:
        await across(stage, GRAPHS[name], opened, ctx)
        found = stage.found(ctx, opened)
        close(found, await second(stage, GRAPHS[name]), 1e-4)
        results.add(b"".join(b"-" if grad is None else grad.tobytes() for who in sorted(found) for grad in found[who]))

    for seed in range(6):
        _on_network(seed, scene, stage)
    assert len(results) == 1
