"""Backward across workers: which edges a pass needs, what it costs, and how passes go side by side."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.autograd import discovery
from aiograd.distributed.kinds import Kind
from aiograd.errors import DeadlineError, GraphFreedError, PassAbortedError, RemoteError
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.passes_kit import GRAPHS, WASTEFUL, Function, Log, Stage, Suspend, before, passes, same
from tests.distributed.workers import busy, context_here, leaf, settled, until, values, view, workers
from tests.support import cancel
from tests.tolerance import assert_close

EVERY = [*GRAPHS, *WASTEFUL]


def graph_of(name: str) -> Function:
    return GRAPHS[name] if name in GRAPHS else WASTEFUL[name][0]


# -------------------------------------------------------------------- the right gradients, whatever is not needed


@pytest.mark.parametrize("predicted", [0, discovery.PREDICTED_NODES], ids=["asked", "predicted"])
@pytest.mark.parametrize("name", EVERY)
async def test_gradients_are_those_of_the_same_graph_in_one_process(name: str, predicted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "PREDICTED_NODES", predicted)
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
async def test_a_message_per_edge_and_worker_and_no_more(virtual_clock: VirtualClock, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk asks b once for all of its edges; b's edges to a go back in the answers, and b is told of the commit once.

    On the virtual clock: gradients that are held back for an answer leave by themselves where the engine has used up its time.
    """
    monkeypatch.setattr(discovery, "PREDICTED_NODES", 0)

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


async def test_no_gradient_leaves_a_worker_before_everybody_knows_what_to_wait_for(
    virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "PREDICTED_NODES", 0)

    stage = Stage("abc")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, _, c = opened
        y = await a.call("b", "weigh", stage.x)
        z = await a.call("c", "weigh", stage.x)
        log = Log().watch(*opened)
        with before(c, Kind.MARK, lambda: asyncio.sleep(5)):
            running = asyncio.ensure_future(ctx.backward((y + z).sum()))
            await asyncio.sleep(4)
            assert log.count() == {"MARK": 2} and passes(opened) == [1, 1, 0] and not running.done()
            await running
        assert log.count() == {"GRADIENT": 2, "COMMIT": 2}


async def test_calls_that_are_made_during_a_pass_have_no_part_in_it() -> None:
    stage = Stage("ab")
    made: list[Any] = []

    async def call_again(g: Any) -> Any:
        with ag.enable_grad():
            made.append(await dist.current_worker().call("b", "weigh", stage.x))
        return g

    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        y = Suspend.apply(await a.call("b", "weigh", stage.x), call_again)
        await ctx.backward(y.sum())
        assert values(view(b, ctx).grads[stage.weights["b"]]) == values(stage.x)
        await ctx.backward(made[0].sum())
        assert values(view(b, ctx).grads[stage.weights["b"]]) == values(stage.x * 2)


async def test_a_worker_that_is_reached_in_several_ways_is_walked_once() -> None:
    """Two workers find out about c, from both sides at a time, and the part of its graph behind both edges is one."""
    stage = Stage("abc")

    async def shared(here: Any, x: Any) -> Any:
        y = await here.call("c", "weigh", x)
        return [y * here.weight, y * 2]

    async def cross(here: Any, x: Any) -> Any:
        p, q = await here.call("b", "shared", x)
        return await here.call("c", "sums", [p, q, p * q])

    stage.functions.update(shared=shared, cross=cross)

    async def graph(here: Any, x: Any) -> Any:
        return ((await here.call("c", "cross", x)) + await here.call("b", "weigh", x)).sum()

    wanted = await stage.reference(graph)
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await graph(stage.here(opened[0]), stage.x)
        for worker in opened[1:]:  # every question takes a while, so they meet
            worker._core.handlers = dict(worker._core.handlers)
        with before(opened[1], Kind.MARK, lambda: asyncio.sleep(0)), before(opened[2], Kind.MARK, lambda: asyncio.sleep(0)):
            await ctx.backward(loss)
        same(stage.found(ctx, opened), wanted)


async def test_a_long_graph_between_calls_is_walked_to_its_end() -> None:
    async with workers("a", "b", service=_long()) as (a, b), a.context() as ctx:
        x = leaf(1)
        y = await a.call("b", "long", x * 1, 3000)
        for _ in range(3000):
            y = y + 1
        y = await a.call("b", "long", y, 3000)
        await ctx.backward(y.sum())
        assert values(ctx.grads[x]) == [1] and not b.statistics().passes


def _long() -> dist.Service:
    service = dist.Service()

    @service.function
    async def long(x: Any, count: int) -> Any:
        for _ in range(count):
            x = x + 1
        return x

    return service


# -------------------------------------------------------------------- roots


async def test_roots_add_up_also_when_one_is_named_twice_or_lies_behind_another() -> None:
    stage = Stage("ab", whole=True)

    async with stage.open() as opened, opened[0].context() as ctx:
        a, _ = opened
        y = await a.call("b", "weigh", stage.x)
        z = await a.call("b", "weigh", y)
        first, second = y.sum(), z.sum()
        await ctx.backward(first, second, first, retain_graph=True)
        found = stage.found(ctx, opened)
        w, x = stage.weights["b"], stage.x
        (gx, gw) = await ag.grad((x * w).sum() * 2 + (x * w * w).sum(), [x, w])
        assert_close(found["a"][1], gx.numpy())
        assert_close(found["b"][0], gw.numpy())
        await ctx.backward(first, (stage.x * 0).sum())  # one of them is purely local
        assert_close(stage.found(ctx, opened)["a"][1], (gx + w).detach().numpy())


async def test_a_root_of_this_worker_that_others_have_used_as_well() -> None:
    stage = Stage("ab")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        loss = (stage.x * 3).sum()
        after = await a.call("b", "keep", loss)
        await ctx.backward(loss, retain_graph=True)
        assert values(ctx.grads[stage.x]) == [3, 3, 3] and not len(view(b, ctx).grads)
        await ctx.backward(after.sum())
        assert stage.weights["b"] in view(b, ctx).grads


# -------------------------------------------------------------------- again and again


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("name", ["ring", "triangle"])
async def test_a_graph_that_is_retained_a_hundred_times(name: str, mode: str) -> None:
    stage = Stage("abcd" if name == "triangle" else "ab")
    wanted = await stage.reference(GRAPHS[name])
    total = wanted
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await GRAPHS[name](stage.here(opened[0]), stage.x)
        for n in range(100):
            await ctx.backward(loss, retain_graph=n < 99, mode=mode)
            if n:
                total = {who: [None if g is None else t + g for t, g in zip(total[who], wanted[who], strict=True)] for who in wanted}
        same(stage.found(ctx, opened), total)
        with pytest.raises((GraphFreedError, RemoteError), match="backward through the graph a second time"):
            await ctx.backward(loss, mode=mode)
        same(stage.found(ctx, opened), total)


async def test_gradients_of_many_graphs_add_up_in_one_context() -> None:
    stage = Stage(whole=True)
    graphs = [graph_of(name) for name in EVERY]
    wanted = [await stage.reference(graph) for graph in graphs]
    async with stage.open() as opened, opened[0].context() as ctx:
        for graph in graphs:
            await ctx.backward(await graph(stage.here(opened[0]), stage.x))
        found = stage.found(ctx, opened)
    for who in found:
        for n, grad in enumerate(found[who]):
            total = sum(each[who][n] for each in wanted if each[who][n] is not None)
            np.testing.assert_allclose(grad, total, rtol=1e-12)


# -------------------------------------------------------------------- side by side


class Spans:
    """Notes when a rule begins and ends, for `Suspend`."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.spans: list[tuple[float, float]] = []
        self.most = self.now = 0

    async def rule(self, g: Any) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        began = asyncio.get_running_loop().time()
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.now -= 1
        self.spans.append((began, asyncio.get_running_loop().time()))
        return g


async def test_passes_of_one_context_run_one_after_the_other(virtual_clock: VirtualClock) -> None:
    spans = Spans()
    stage = Stage("ab", whole=True)
    stage.suspend("slowly", spans.rule)

    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        loss = (await a.call("b", "slowly", stage.x)).sum()
        await asyncio.gather(*(ctx.backward(loss * float(1 << n), retain_graph=True) for n in range(4)))
        assert spans.most == 1 and len(spans.spans) == 4
        assert values(ctx.grads[stage.x]) == values(stage.weights["b"] * 15)
        assert values(view(b, ctx).grads[stage.weights["b"]]) == values(stage.x * 15)
    assert virtual_clock.time() == pytest.approx(4, abs=0.1)


async def test_a_pass_that_waits_for_another_has_a_deadline_of_its_own(virtual_clock: VirtualClock) -> None:
    spans = Spans(5.0)
    stage = Stage("ab")
    stage.suspend("slowly", spans.rule)

    async with stage.open() as opened, opened[0].context() as ctx:
        loss = (await opened[0].call("b", "slowly", stage.x)).sum()
        first = asyncio.ensure_future(ctx.backward(loss, retain_graph=True))
        await asyncio.sleep(1)
        with pytest.raises(DeadlineError, match=r"another pass in context .* did not end before this one's deadline"):
            await ctx.backward(loss, timeout=1)
        third = asyncio.ensure_future(ctx.backward(loss, retain_graph=True))
        await asyncio.sleep(1)
        await cancel(third)
        assert not first.done()
        await first
        await ctx.backward(loss)
        assert len(spans.spans) == 2 and values(ctx.grads[stage.x]) == values(stage.weights["b"] * 2)


async def test_passes_of_several_contexts_on_shared_parameters_run_at_the_same_time(virtual_clock: VirtualClock) -> None:
    spans = Spans()
    stage = Stage("ab", whole=True)
    stage.suspend("slowly", spans.rule)

    async with stage.open() as opened:
        a, b = opened

        async def train(n: int) -> None:
            async with a.context() as ctx:
                await ctx.backward((await a.call("b", "slowly", stage.x)).sum() * float(1 << n))
                assert values(ctx.grads[stage.x]) == values(stage.weights["b"] * float(1 << n))
                assert values(view(b, ctx).grads[stage.weights["b"]]) == values(stage.x * float(1 << n))

        await asyncio.gather(*(asyncio.create_task(train(n), context=contextvars.Context()) for n in range(8)))
        assert spans.most == 8
    assert virtual_clock.time() < 2


async def test_passes_that_different_workers_start_in_one_context_are_each_exact(virtual_clock: VirtualClock) -> None:
    """The originator differentiates its loss while two callees differentiate theirs, over the same parameters."""
    spans = Spans()
    stage = Stage("abc", whole=True)
    stage.suspend("slowly", spans.rule)

    async def own_loss(here: Any, factor: float, x: Any) -> None:
        y = await here.call("c" if here.name == "b" else "b", "slowly", x)
        await context_here().backward(y.sum() * factor)

    stage.functions["own_loss"] = own_loss
    async with stage.open() as opened, opened[0].context() as ctx:
        a = opened[0]
        loss = (await a.call("b", "slowly", stage.x)).sum()
        losses = [a.call(name, "own_loss", factor, stage.x) for name, factor in (("b", 2.0), ("c", 4.0), ("c", 8.0))]
        await asyncio.gather(ctx.backward(loss), *losses)
        assert spans.most == 3, "passes that one worker has started wait for each other, those of others do not"
        w, x = stage.weights, stage.x
        found = stage.found(ctx, opened)
        assert found["a"][1].tolist() == values(w["b"] * 1 + w["c"] * 2 + w["b"] * 4 + w["b"] * 8)
        assert found["b"][0].tolist() == values(x * 13) and found["c"][0].tolist() == values(x * 2)


async def test_a_pass_within_a_rule_of_another_pass_of_the_context() -> None:
    """Rules on the initiator's and on another worker start a pass of their own, and wait for it."""
    stage = Stage("abc", whole=True)
    depths: list[str] = []

    async def within(g: Any) -> Any:
        ctx, worker = context_here(), dist.current_worker()
        depths.append(worker.name)
        with ag.enable_grad():
            loss = (await worker.call("c", "weigh", stage.x)).sum()
        await ctx.backward(loss)
        return g

    stage.suspend("nested", within)
    async with stage.open() as opened, opened[0].context() as ctx:
        a = opened[0]
        y = await a.call("b", "nested", Suspend.apply(stage.x * 1, within))
        async with asyncio.timeout(20):
            await ctx.backward(y.sum())
        assert sorted(depths) == ["a", "b"]
        w, x = stage.weights, stage.x
        assert values(ctx.grads[x]) == values(w["b"] + w["c"])
        assert values(view(opened[1], ctx).grads[x]) == values(w["c"]), "what b differentiates by is a leaf of b"
        assert values(view(opened[2], ctx).grads[w["c"]]) == values(x * 2)


async def test_a_nested_pass_that_committed_stays_when_the_outer_one_fails() -> None:
    stage = Stage("ab", whole=True)

    async def commit_and_fail(g: Any) -> Any:
        with ag.enable_grad():
            loss = (await dist.current_worker().call("b", "weigh", stage.x)).sum()
        await context_here().backward(loss)
        raise ValueError("outer")

    async with stage.open() as opened, opened[0].context() as ctx:
        y = await opened[0].call("b", "weigh", Suspend.apply(stage.x * 1, commit_and_fail))
        with pytest.raises(ValueError, match="outer"):
            await ctx.backward(y.sum())
        assert values(ctx.grads[stage.x]) == values(stage.weights["b"])


async def test_a_pass_that_is_started_by_a_rule_elsewhere_waits_for_its_turn_and_says_so(virtual_clock: VirtualClock) -> None:
    """A rule of the pass calls a function of the initiator that starts another: that can never have its turn, and fails by its deadline."""
    stage = Stage("ab")
    found: list[BaseException] = []

    async def back(g: Any) -> Any:
        try:
            await dist.current_worker().call("a", "another", timeout=1.0)
        except DeadlineError as error:
            found.append(error)
        return g

    async def another(here: Any) -> None:
        with ag.enable_grad():
            loss = (stage.x * 1).sum()
        await context_here().backward(loss)

    stage.suspend("calls_back", back)
    stage.functions["another"] = another
    async with stage.open() as opened, opened[0].context() as ctx:
        await ctx.backward((await opened[0].call("b", "calls_back", stage.x)).sum())
        assert "another pass in context" in str(found[0])
        assert values(ctx.grads[stage.x]) == values(stage.weights["b"])


# -------------------------------------------------------------------- odds and ends


async def test_leaving_the_context_right_after_a_pass_leaves_nothing() -> None:
    stage = Stage()
    async with stage.open() as opened:
        for _ in range(5):
            async with opened[0].context() as ctx:
                await ctx.backward(await GRAPHS["forked"](stage.here(opened[0]), stage.x))
            await settled(*opened)
            assert not any(map(busy, opened))


async def test_a_thousand_outcomes_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiograd.distributed.autograd.context.REMEMBERED", 10)
    stage = Stage("ab")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        loss = (await a.call("b", "weigh", stage.x)).sum()
        for _ in range(30):
            await ctx.backward(loss, retain_graph=True)
        assert len(view(a, ctx).history.outcomes) == len(view(b, ctx).history.outcomes) == 10
        for n in range(30):  # nor are those of passes that a peer makes up
            await b.endpoint.request("a", Kind.ABORT, (ctx.key, "b", n, "none"), 5)
        assert len(view(a, ctx).history.outcomes) == 10
        await until(lambda: not busy(b).get("passes"))


async def test_nobody_else_starts_a_pass_in_a_workers_name() -> None:
    stage = Stage("ab")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        y = await a.call("b", "weigh", stage.x)
        (edge,) = view(a, ctx).send_nodes
        with pytest.raises(PassAbortedError, match="a has started no such pass"):
            await b.endpoint.request("a", Kind.MARK, (ctx.key, "a", 77, [edge]), 5)
        assert not a.statistics().passes
        await ctx.backward(y.sum())


async def test_gradients_of_a_context_are_clipped() -> None:
    stage = Stage("ab", whole=True)
    async with stage.open() as opened, opened[0].context() as ctx:
        await ctx.backward((await opened[0].call("b", "weigh", stage.x)).sum())
        before = ctx.grads[stage.x].numpy()
        with pytest.raises(TypeError, match="expected the mapping itself"):
            ag.optim.clip_grad_norm_(ctx.grads.values(), 0.5)
        norm = ag.optim.clip_grad_norm_(ctx.grads, 0.5)
        np.testing.assert_allclose(norm.item(), np.sqrt((before**2).sum()), rtol=1e-12)
        np.testing.assert_allclose(ctx.grads[stage.x].numpy(), before * (0.5 / norm.item()), rtol=1e-5)
        assert stage.x.grad is None
        ag.optim.clip_grad_value_(ctx.grads, 0.01)
        assert values(ctx.grads[stage.x]) == [0.01] * 3
        with pytest.raises(TypeError, match=r"replaced by one like it, a Tensor of float64 \[3\]; found float32 \[1\]"):
            ctx.grads[stage.x] = ag.tensor([1.0])
        with pytest.raises(KeyError, match="no backward pass of this context has reached"):
            ctx.grads[stage.weights["a"]] = ag.tensor([1.0])
