"""Passes that want some inputs, across workers: the gradients of one process, to the bit, and nothing accumulated anywhere."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.kinds import Kind
from aiograd.errors import (
    ContextError,
    ContextReleasedError,
    DeadlineError,
    GraphFreedError,
    PassAbortedError,
    ProtocolError,
    RemoteError,
    UnusedInputError,
    WorkerLostError,
)
from aiograd.testing import SimulatedLoop
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.passes_kit import GRAPHS, WASTEFUL, Here, Log, Misbehave, Net, Stage, Suspend, before, passes, same
from tests.distributed.workers import leaf, settled, values, view, workers
from tests.sweeps import swept

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


CASES = [*swept(itertools.product(EVERY, ("ctx.grad", "ag.grad")), 15), *swept(((name, "fast") for name in GRAPHS), 5)]


@pytest.mark.parametrize(("name", "way"), CASES)
async def test_gradients_are_those_of_one_process(name: str, way: str) -> None:
    stage = Stage(seed=3)
    wanted = await mine(stage, EVERY[name])
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await EVERY[name](stage.here(opened[0]), stage.x)
        grads = await ask(way, ctx, loss, stage.leaves["a"], allow_unused=True)
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


# -------------------------------------------------------------------- the functional transforms


def cubes(stage: Stage) -> Stage:
    async def cube(here: Here, x: Any) -> Any:
        return x * x * x * here.weight

    stage.functions["cube"] = cube
    return stage


async def transformed(call: Any, w: Any, x: Any) -> list[Any]:
    """The results of all transforms of a function that calls another worker."""

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


# -------------------------------------------------------------------- passes in passes, functions and several contexts


async def test_a_function_differentiates_what_its_caller_sent() -> None:
    """On b, through the worker that called and one that b calls; nothing of this is left for the caller's own pass to trip over."""
    stage = Stage("abc", seed=12)

    async def inner(here: Here, x: Any) -> Any:
        h = x * here.weight
        y = await here.call("c", "weigh", h)
        (gradient,) = await ag.grad(y.sum(), [h], retain_graph=True)
        (again,) = await ag.grad((y * y).sum(), [here.weight], retain_graph=True)
        return y * gradient + again

    async def graph(here: Here, x: Any) -> Any:
        return ((await here.call("b", "inner", x * here.weight)) * here.weight).sum()

    stage.functions["inner"] = inner
    wanted = await stage.reference(graph)
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await graph(stage.here(opened[0]), stage.x)
        found = await ag.grad(loss, stage.leaves["a"], retain_graph=True)
        same({"a": [grad.numpy() for grad in found]}, {"a": wanted["a"]})
        untouched(stage, ctx, opened)
        await ctx.backward(loss)
        same(stage.found(ctx, opened), wanted)


async def test_a_rule_that_differentiates_through_workers_itself() -> None:
    """In a pass of the context, and in a local one inside of that: neither waits for the pass that waits for it."""
    stage = Stage("ab", seed=13)
    seen: list[Any] = []
    async with stage.open() as opened, opened[0].context() as ctx:
        x = leaf(1.0, 2.0, 3.0)
        within = (await opened[0].call("b", "weigh", x)).sum()

        async def rule(g: Any) -> Any:
            (found,) = await ag.grad(within, [x], retain_graph=True)
            seen.append(values(found))
            return g

        async def deep(g: Any) -> Any:
            with ag.enable_grad():
                inner = Suspend.apply(leaf(1.0), rule).sum()
            await inner.backward()
            return g

        y = await opened[0].call("b", "weigh", stage.x)
        await asyncio.wait_for(ctx.backward((Suspend.apply(y, rule) + Suspend.apply(y, deep)).sum()), 20)
        assert seen == [values(stage.weights["b"])] * 2 and stage.x in ctx.grads and x not in ctx.grads


async def test_contexts_side_by_side_and_values_of_two() -> None:
    stage = Stage("abc", seed=14)
    weight = values(stage.weights["b"])
    async with stage.open() as opened:
        a = opened[0]

        async def one(n: int) -> None:
            async with a.context() as ctx:
                x = leaf(*([float(n)] * 3))
                y = await a.call("b", "weigh", x)
                assert values((await ag.grad(y.sum(), [x]))[0]) == weight and not ctx.grads

        await asyncio.gather(*(asyncio.create_task(one(n), context=contextvars.Context()) for n in range(8)))

        x = leaf(1.0, 2.0, 3.0)
        kept: list[Any] = []
        go = asyncio.Event()

        async def other() -> None:
            async with a.context() as ctx:
                kept.extend([ctx, await a.call("b", "weigh", x)])
                await go.wait()

        holding = asyncio.create_task(other(), context=contextvars.Context())
        while not kept:
            await asyncio.sleep(0)
        first, h = kept
        async with a.context() as ctx:
            z = await a.call("c", "weigh", h * stage.x)
            (found,) = await ag.grad(z.sum(), [stage.x], retain_graph=True)  # nothing that the other context sent leads there
            assert values(found) == values(h * stage.weights["c"])
            with pytest.raises(ContextError, match="in two contexts"):
                await ag.grad((z * h).sum(), [x, stage.x])
            with pytest.raises(ContextError, match="in another context"):
                await ctx.grad((z * h).sum(), [x])
            (again,) = await first.grad((h * h).sum(), [x])
            assert values(again) == values(2 * h * stage.weights["b"])
        go.set()
        await holding
        assert passes(opened) == [0, 0, 0]


async def test_a_context_that_has_been_released() -> None:
    stage = Stage("ab", seed=15)
    w = leaf(1.0, 2.0, 3.0)
    async with stage.open() as opened:
        a = opened[0]
        async with a.context():
            y, z = await a.call("b", "weigh", stage.x), await a.call("b", "weigh", stage.x)
        assert values((await ag.grad((y * w).sum(), [y]))[0]) == values(w), "what came before it is no matter"
        for wanted in ([stage.x], [w], [y, z]):
            with pytest.raises(ContextReleasedError, match=r"Do it inside the `async with worker\.context\(\)` block"):
                await ag.grad((y * w * z).sum(), wanted, allow_unused=True)
        async with a.context() as ctx:
            y = await a.call("b", "weigh", stage.x.detach())
        assert ctx.is_released
        assert values((await ag.grad((y * w).sum(), [w]))[0]) == values(y), "nothing was sent, so nothing can lead back"


async def test_an_answer_that_depends_on_what_was_sent_after_the_question() -> None:
    """Numbers say no more what comes after what; a pass over a late input still meets the early answer."""
    stage = Stage("ab", seed=16)
    kept: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def later(here: Here) -> Any:
        return (await kept) * here.weight

    async def put(here: Here, x: Any) -> None:
        kept.set_result(x)

    stage.functions.update(later=later, put=put)
    async with stage.open() as opened, opened[0].context():
        a = opened[0]
        asking = asyncio.ensure_future(a.call("b", "later"))
        while not opened[1].statistics().calls:
            await asyncio.sleep(0)
        for _ in range(3):
            h = stage.x * 2
        await a.call("b", "put", h)
        y = await asking
        assert values((await ag.grad(y.sum(), [h]))[0]) == values(stage.weights["b"])


# -------------------------------------------------------------------- passes that fail


async def loss_of(stage: Stage, opened: Any) -> Any:
    return await GRAPHS["diamond"](stage.here(opened[0]), stage.x)


@pytest.mark.parametrize("way", swept(["ctx.grad", "ag.grad", "backward"]))
@pytest.mark.parametrize("block", range(3))
async def test_cancelled_at_every_step(virtual_clock: VirtualClock, way: str, block: int) -> None:
    """Nothing has accumulated, unless it had been committed; nothing goes on; the same pass then runs in the same context.

    Each block has every third of the steps.
    """
    stage = Stage(seed=17)
    outcomes: list[str] = []

    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    wanted = (await mine(stage, GRAPHS["diamond"]))["a"][1]
    async with stage.open(limits=dist.Limits(default_deadline=10.0)) as opened:
        async with opened[0].context():
            await loss_of(stage, opened)  # opens connections
        step, unscathed = block - 2, 0
        while unscathed < 3:
            step += 3
            stage.x.grad = None
            async with opened[0].context() as ctx:
                loss = await loss_of(stage, opened)
                if way == "backward":
                    running = asyncio.ensure_future(loss.backward(inputs=[stage.x], retain_graph=True))
                else:
                    running = asyncio.ensure_future(ask(way, ctx, loss, [stage.x], retain_graph=True))
                loop.at_step(loop.steps + step, running.cancel)
                try:
                    await running
                    unscathed += 1
                    outcomes.append("done")
                except asyncio.CancelledError as error:
                    unscathed = 0
                    outcomes.append("late" if getattr(error, "committed", False) else "cancelled")
                assert passes(opened) == [0] * 4, f"{outcomes[-1]} at {step}: a pass goes on"
                found = None if stage.x.grad is None else stage.x.grad.numpy()
                same({"a": [found]}, {"a": [wanted if way == "backward" and outcomes[-1] != "cancelled" else None]})
                stage.x.grad = None
                (again,) = await ctx.grad(loss, [stage.x])
                same({"a": [again.numpy()]}, {"a": [wanted]})
                untouched(stage, ctx, opened)
            await settled(*opened)
    assert outcomes.count("cancelled") > 10, outcomes


@pytest.mark.parametrize("kind", [Kind.MARK, Kind.GRADIENT, Kind.COMMIT])
async def test_a_worker_that_is_lost_at_any_message(virtual_clock: VirtualClock, kind: Kind) -> None:
    """An error until the gradients are complete; where only the end of the pass could not be told they are, and nothing is in doubt."""

    board = Net()
    stage = Stage("abc", seed=18)
    async with stage.open(board, idle=False) as opened, opened[0].context() as ctx:
        a, b, c = opened
        loss = (await a.call("b", "via", "c", stage.x)).sum()
        with before(c, kind, lambda: board.kill("c")):
            if kind == Kind.COMMIT:
                (found,) = await ctx.grad(loss, [stage.x])
                assert values(found) == values(stage.weights["b"] * stage.weights["c"])
            else:
                with pytest.raises(WorkerLostError):
                    await ctx.grad(loss, [stage.x])
        assert passes((a, b)) == [0, 0] and not ctx.in_doubt and not view(b, ctx).in_doubt
        y = await a.call("b", "weigh", stage.x)
        assert values((await ag.grad(y.sum(), [stage.x]))[0]) == values(stage.weights["b"])
        await ctx.backward((await a.call("b", "weigh", stage.x)).sum())
    assert virtual_clock.time() < 60


async def test_a_rule_that_fails_on_another_worker_and_a_deadline(virtual_clock: VirtualClock) -> None:
    stage = Stage("abc", seed=19)

    def fail(g: Any) -> Any:
        raise ValueError("boom")

    async def failing(here: Here, x: Any) -> Any:
        return Misbehave.apply(x, fail)

    async def stuck(here: Here, x: Any) -> Any:
        return Suspend.apply(x, lambda g: asyncio.sleep(100, g))

    stage.functions.update(failing=failing, stuck=stuck)
    async with stage.open() as opened, opened[0].context() as ctx:
        a = opened[0]
        y = await a.call("c", "weigh", stage.x)
        with pytest.raises(RemoteError, match="boom"):
            await ag.grad((await a.call("b", "failing", y)).sum(), [stage.x])
        with pytest.raises(DeadlineError, match="backward|grad"):
            await ctx.grad((await a.call("b", "stuck", y)).sum(), [stage.x], timeout=3)
        untouched(stage, ctx, opened)
        (found,) = await ag.grad((await a.call("b", "weigh", stage.x)).sum(), [stage.x])
        assert values(found) == values(stage.weights["b"])
    assert virtual_clock.time() < 10


async def test_malformed_walks() -> None:
    stage = Stage("ab", seed=20)
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        y = await a.call("b", "weigh", stage.x)
        edge, sent = y.grad_fn.edge, next(iter(ctx.send_nodes))
        pass_id = (ctx.key, "a", 99)
        for value, error, text in (
            ((*pass_id, [edge], 7), ProtocolError, "malformed MARK: field direction is 7 of type int; expected 0 or 1"),
            ((*pass_id, [edge], 0, 0), ProtocolError, "malformed MARK: it is a tuple of 6 values"),
            ((*pass_id, [sent], 1), PassAbortedError, "the pass was aborted here"),
        ):
            with pytest.raises(error, match=text):
                await a.endpoint.request("b", Kind.MARK, value, 5)
        await a.endpoint.request("b", Kind.MARK, (*pass_id, [edge], 0), 5)
        for edges in ([edge], [sent + 1]):
            with pytest.raises(ProtocolError, match="the pass does not depend on message"):
                await a.endpoint.request("b", Kind.MARK, (*pass_id, edges, 1), 5)
        assert await a.endpoint.request("b", Kind.MARK, (*pass_id, [sent], 1), 5) == ([], [edge])
        await a.endpoint.request("b", Kind.ABORT, (*pass_id, "enough"), 5)
        assert passes(opened) == [0, 0]
