"""Passes that want some inputs, across workers: the gradients of one process, to the bit, and nothing accumulated anywhere."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ContextError, ContextReleasedError, GraphFreedError, RemoteError, UnusedInputError
from tests.distributed.passes_kit import GRAPHS, WASTEFUL, Here, Log, Stage, passes, same
from tests.distributed.workers import leaf, values, view, workers

EVERY = {**GRAPHS, **{name: graph for name, (graph, _) in WASTEFUL.items()}}
#: how a user asks for gradients: with the context in hand, or without
WAYS = ("ctx.grad", "fast", "ag.grad")


async def ask(way: str, ctx: Any, *arguments: Any, **options: Any) -> tuple[Any, ...]:
    if way == "ag.grad":
        return await ag.grad(*arguments, **options)  # type: ignore[no-any-return]
    return await ctx.grad(*arguments, mode="fast" if way == "fast" else "smart", **options)  # type: ignore[no-any-return]


def untouched(stage: Stage, ctx: Any, opened: Any) -> None:
    """Fail unless no pass has accumulated anything."""
    same(stage.found(ctx, opened), {name: [None] * len(leaves) for name, leaves in stage.leaves.items()})
    assert all(known.grad is None for leaves in stage.leaves.values() for known in leaves)
    assert passes(opened) == [0] * len(opened)


async def mine(stage: Stage, graph: Any) -> dict[str, list[Any]]:
    """In one process: the gradients of the first worker's leaves."""
    return {"a": (await stage.reference(graph))["a"]}


# -------------------------------------------------------------------- the right numbers


@pytest.mark.parametrize("way", ["ctx.grad", "ag.grad"])
@pytest.mark.parametrize("name", EVERY)
async def test_gradients_are_those_of_one_process(name: str, way: str) -> None:
    stage = Stage(seed=3)
    wanted = await mine(stage, EVERY[name])
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await EVERY[name](stage.here(opened[0]), stage.x)
        grads = await ask(way, ctx, loss, stage.leaves["a"], allow_unused=True)
        same({"a": [None if grad is None else grad.numpy() for grad in grads]}, wanted)
        untouched(stage, ctx, opened)


@pytest.mark.parametrize("name", GRAPHS)
async def test_the_fast_mode_gives_the_same(name: str) -> None:
    stage = Stage(seed=4)
    wanted = await mine(stage, GRAPHS[name])
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await GRAPHS[name](stage.here(opened[0]), stage.x)
        grads = await ask("fast", ctx, loss, stage.leaves["a"], allow_unused=True)
        same({"a": [None if grad is None else grad.numpy() for grad in grads]}, wanted)
        untouched(stage, ctx, opened)


async def test_inputs_that_are_no_leaves_and_outputs_that_are_no_scalars() -> None:
    stage = Stage("abc", seed=5)
    g = np.array([0.5, -2.0, 3.0], np.float32)

    async def graph(here: Here, x: Any) -> tuple[Any, ...]:
        h = x * here.weight
        y = await here.call("b", "weigh", h)
        z = await here.call("c", "weigh", y) * h
        return z, y, h

    def asked(z: Any, y: Any, h: Any) -> tuple[Any, ...]:
        return [z, y], [h, stage.x, y, h], [ag.tensor(g), ag.tensor(2 * g)]

    wanted = await ag.grad(*asked(*await graph(Here("a", stage.weights["a"], stage.local), stage.x)))
    async with stage.open() as opened, opened[0].context() as ctx:
        outputs = await graph(stage.here(opened[0]), stage.x)
        for way in WAYS:
            found = await ask(way, ctx, *asked(*outputs), retain_graph=True)
            assert [values(grad) for grad in found] == [values(grad) for grad in wanted], way
        untouched(stage, ctx, opened)


@pytest.mark.parametrize("way", WAYS)
async def test_what_no_output_depends_on(way: str) -> None:
    stage = Stage("ab", seed=6)
    other = leaf(1.0, 2.0)
    async with stage.open() as opened, opened[0].context() as ctx:
        y = await opened[0].call("b", "weigh", stage.x)
        with pytest.raises(UnusedInputError, match="the input at index 1"):
            await ask(way, ctx, y.sum(), [stage.x, other])
        assert passes(opened) == [0, 0]
        assert (await ask(way, ctx, y.sum(), [stage.x, other], allow_unused=True, retain_graph=True))[1] is None
        (_, zeros) = await ask(way, ctx, y.sum(), [stage.x, other], materialize_grads=True)
        assert values(zeros) == [0.0, 0.0]


async def test_arguments_are_checked_at_once() -> None:
    async with workers("a", service=Stage("a").service()) as (a,), a.context() as ctx:
        x = leaf(1.0, 2.0)
        with pytest.raises(ValueError, match=r"ctx\.grad\(mode='swift'\)"):
            ctx.grad(x.sum(), x, mode="swift")
        with pytest.raises(ValueError, match="seconds above 0"):
            ctx.grad(x.sum(), x, timeout=0)
        with pytest.raises(ValueError, match=r"ctx\.grad\(\) requires non-empty inputs"):
            ctx.grad(x.sum(), [])
        with pytest.raises(ValueError, match="implicitly created only for scalar outputs"):
            ctx.grad(x * 2, x)
        with pytest.raises(RuntimeError, match="does not require grad"):
            ctx.grad(x.sum(), ag.tensor([1.0]))
    with pytest.raises(ContextReleasedError):
        ctx.grad(x.sum(), x)


# -------------------------------------------------------------------- what runs, and what stays


class Counted(ag.Function):
    """The identity, which counts its backward passes; what it saved can be used once."""

    inline = True

    @staticmethod
    def forward(ctx: Any, x: Any, ran: list[str], name: str) -> Any:
        ctx.ran, ctx.name = ran, name
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        ctx.saved_tensors  # noqa: B018 - raises where it has been released
        ctx.ran.append(ctx.name)
        return g, None, None


def counting(stage: Stage, ran: list[str]) -> Stage:
    async def count(here: Here, x: Any, label: str) -> Any:
        return Counted.apply(x, ran, label) * here.weight

    async def beside(here: Here, x: Any, label: str) -> Any:
        """x times something of this worker's own, which nothing of the caller leads to."""
        return x * Counted.apply(here.weight, ran, label)

    stage.functions.update(count=count, beside=beside)
    return stage


async def test_only_what_lies_between_runs_and_is_used_up() -> None:
    ran: list[str] = []
    stage = counting(Stage("abcd", seed=7), ran)
    async with stage.open() as opened, opened[0].context() as ctx:
        a = opened[0]
        h = stage.x * 1
        first = await a.call("b", "count", h, "first")  # before what is wanted
        middle = first * 1
        second = await a.call("c", "count", middle, "second")
        aside = await a.call("d", "count", stage.x * 2, "aside")  # another way to x, and none to `middle`
        own = await a.call("b", "beside", second, "own")
        loss = (own * aside).sum()
        log = Log().watch(*opened)
        await ag.grad(loss, [middle])
        assert ran == ["second"]
        sent = [(who, peer) for who, peer, kind in log.seen if kind == "GRADIENT"]
        assert ("a", "d") not in sent and passes(opened) == [0, 0, 0, 0]
        ran.clear()
        with pytest.raises(GraphFreedError):
            await ctx.backward(loss)
        again = (middle * aside).sum()
        await ctx.backward(again)
        assert sorted(ran) == ["aside", "first"], "what did not run is still there"


async def test_gradients_of_received_values_stay_here() -> None:
    """Nothing that was sent leads to them, so no message is needed, and the workers they came from keep their graph."""
    stage = Stage("abc", seed=8)
    async with stage.open() as opened, opened[0].context() as ctx:
        a = opened[0]
        p, q = await asyncio.gather(a.call("b", "weigh", stage.x), a.call("c", "weigh", stage.x))
        loss = (p * q).sum()
        log = Log().watch(*opened)
        found = await ag.grad(loss, [p, q], retain_graph=True)
        assert [values(grad) for grad in found] == [values(q), values(p)]
        await (p * q).sum().backward(inputs=[p])
        assert values(p.grad) == values(q) and not log.seen
        await ctx.backward(loss)
        assert stage.x in ctx.grads


async def test_a_graph_is_kept_where_that_is_asked_for() -> None:
    stage = Stage("abc", seed=9)
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await GRAPHS["ring"](stage.here(opened[0]), stage.x)
        for way in WAYS:
            kept = await ask(way, ctx, loss, stage.x, retain_graph=True)
        await ctx.backward(loss, retain_graph=True)
        assert values(ctx.grads[stage.x]) == values(kept[0])
        await ctx.grad(loss, stage.x)
        with pytest.raises(RemoteError, match="a second time"):
            await ctx.grad(loss, stage.x)
        assert passes(opened) == [0, 0, 0]


# -------------------------------------------------------------------- backward(inputs=...)


@pytest.mark.parametrize("name", ["chain", "ring", "diamond", "twice", "crossing", "knot", "half_used"])
async def test_backward_into_some_inputs_accumulates_into_them_alone(name: str) -> None:
    stage = Stage(seed=10)
    x, w = stage.x, stage.weights["a"]
    wanted = (await stage.reference(EVERY[name]))["a"]
    async with stage.open() as opened, opened[0].context() as ctx:
        h = x * 1
        loss = await EVERY[name](stage.here(opened[0]), h)
        seen: list[Any] = []
        x.register_post_accumulate_grad_hook(lambda leaf: seen.append(values(leaf.grad)))
        await loss.backward(inputs=[x, h], retain_graph=True)
        same({"a": [w.grad, x.grad.numpy()]}, {"a": [None, wanted[1]]})
        assert values(h.grad) == values(x.grad) == seen[0] and passes(opened) == [0] * 4
        await loss.backward(inputs=[x])
        assert values(x.grad) == [2 * each for each in seen[0]] == seen[1]
        same(stage.found(ctx, opened), {name: [None] * len(leaves) for name, leaves in stage.leaves.items()})


async def test_a_plain_backward_says_what_to_call() -> None:
    stage = Stage("ab", seed=11)
    async with stage.open() as opened, opened[0].context():
        loss = (await opened[0].call("b", "weigh", stage.x)).sum()
        with pytest.raises(ContextError, match=r"`await ctx\.backward\(loss\)`"):
            await loss.backward()
        assert stage.x.grad is None


# -------------------------------------------------------------------- the functional transforms


def cubes(stage: Stage) -> Stage:
    async def cube(here: Here, x: Any) -> Any:
        return x * x * x * here.weight

    stage.functions["cube"] = cube
    return stage


async def transformed(call: Any, w: Any, x: Any) -> list[Any]:
    """What each of the transforms makes of a function that calls another worker."""

    async def vector(x: Any) -> Any:
        h = x * w
        return (await call("b", "cube", h)) * h

    async def scalar(x: Any) -> Any:
        return (await vector(x)).sum()

    async def both(x: Any, y: Any) -> Any:
        p, q = await asyncio.gather(call("b", "cube", x * y), call("c", "weigh", y))
        return (p * q).sum()

    v = ag.tensor(np.array([1.0, -2.0, 4.0], x.dtype))
    return [
        *await ag.value_and_grad(scalar, x),
        *await ag.vjp(vector, x, v),
        await ag.jacobian(vector, x),
        *await ag.jvp(vector, x, v),
        await ag.hessian(scalar, x),
        *(block for row in await ag.hessian(both, (x, v)) for block in row),
        *(await ag.value_and_grad(both, (x, v)))[1],
    ]


async def test_functional_transforms_go_through_workers() -> None:
    stage = cubes(Stage("abc", whole=True))
    wanted = await transformed(stage.local, stage.weights["a"], stage.x)
    async with stage.open() as opened, opened[0].context() as ctx:
        found = await transformed(opened[0].call, stage.weights["a"], stage.x)
        assert [values(each) for each in found] == [values(each) for each in wanted]
        untouched(stage, ctx, opened)


async def test_gradcheck_of_a_function_that_calls_workers() -> None:
    stage = cubes(Stage("ab", whole=True))
    async with stage.open() as opened, opened[0].context() as ctx:
        x = ag.tensor(np.array([0.5, -1.5, 2.0]), requires_grad=True)

        async def fn(x: Any) -> Any:
            return await opened[0].call("b", "cube", x)

        assert await ag.gradcheck(fn, (x,))
        assert await ag.gradgradcheck(fn, (x,))
        untouched(stage, ctx, opened)


async def test_a_gradient_penalty() -> None:
    """The result of a recorded pass is differentiated on, through every worker, with `ctx.grad` and with `ctx.backward`."""
    stage = cubes(Stage("abc", whole=True))
    x = stage.x

    async def graph(here: Here) -> Any:
        return ((await here.call("b", "cube", await here.call("c", "weigh", x))) * here.weight).sum()

    (first,) = await ag.grad(await graph(Here("a", stage.weights["a"], stage.local)), [x], create_graph=True)
    everything = [*stage.leaves["a"], stage.weights["b"], stage.weights["c"]]
    wanted = [values(grad) for grad in await ag.grad((first * first).sum(), everything)]
    async with stage.open() as opened, opened[0].context() as ctx:
        for way in WAYS[::2]:
            loss = await graph(stage.here(opened[0]))
            (grad,) = await ask(way, ctx, loss, [x], create_graph=True)
            assert grad.requires_grad and values(grad) == values(first)
            second = await ask(way, ctx, (grad * grad).sum(), stage.leaves["a"], retain_graph=True)
            assert [values(each) for each in second] == wanted[:2]
        untouched(stage, ctx, opened)
        await ctx.backward((grad * grad).sum())
        owners = [*opened[:1] * 2, *opened[1:]]
        found = [view(worker, ctx).grads[known] for known, worker in zip(everything, owners, strict=True)]
        assert [values(each) for each in found] == wanted
