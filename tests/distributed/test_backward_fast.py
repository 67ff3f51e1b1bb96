"""Fast mode: no walk, and a gradient is waited for on every edge of the context."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.distributed.kinds import Kind
from aiograd.errors import DeadlineError, RemoteError
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.passes_kit import GRAPHS, WASTEFUL, Here, Log, Misbehave, Net, Stage, Suspend, before, passes, same
from tests.distributed.workers import leaf, values, view
from tests.support import cancel


@pytest.mark.parametrize("name", GRAPHS)
async def test_gradients_are_those_of_the_same_graph_in_one_process(name: str) -> None:
    stage = Stage()
    wanted = await stage.reference(GRAPHS[name])
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await GRAPHS[name](stage.here(opened[0]), stage.x)
        log = Log().watch(*opened)
        await ctx.backward(loss, mode="fast")
        assert "MARK" not in log.count(), "that is the round trip which is saved"
        same(stage.found(ctx, opened), wanted)
        assert passes(opened) == [0, 0, 0, 0]


@pytest.mark.parametrize("name", [name for name in WASTEFUL if name not in ("without_grad", "dropped")])
async def test_an_unused_result_fails_at_the_deadline_and_names_the_message(virtual_clock: VirtualClock, name: str) -> None:
    """The same graph that a smart pass differentiates; and it still can."""
    graph, _ = WASTEFUL[name]

    stage = Stage()
    wanted = await stage.reference(graph)
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await graph(stage.here(opened[0]), stage.x)
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineError, match=r"gradients of message (\d+) that was sent to (\w)") as caught:
            await ctx.backward(loss, mode="fast", retain_graph=True, timeout=3)
        took = asyncio.get_running_loop().time() - began
        assert 2.5 < took <= 3.5
        text = str(caught.value)
        assert "In fast mode every remote result has to be used; mode='smart' needs only those the roots depend on" in text
        edge, peer = _named(text)
        assert any(node.peer == peer for worker in opened for node in _sends(worker, ctx) if node.edge == edge), "there is such a message"
        assert passes(opened) == [0, 0, 0, 0]
        assert not any(grad is not None for grads in stage.found(ctx, opened).values() for grad in grads)
        await ctx.backward(loss)
        same(stage.found(ctx, opened), wanted)


def _named(text: str) -> tuple[int, str]:
    words = text.split("gradients of message ", 1)[1].split()
    return int(words[0]), words[5].rstrip(",.:")


def _sends(worker: dist.Worker, ctx: Any) -> list[Any]:
    return [node for context in worker._contexts if context.key == ctx.key for node in context.send_nodes.values()]


async def test_a_result_that_came_without_grad_is_not_waited_for() -> None:
    graph, _ = WASTEFUL["without_grad"]
    stage = Stage()
    wanted = await stage.reference(graph)
    async with stage.open() as opened, opened[0].context() as ctx:
        await ctx.backward(await graph(stage.here(opened[0]), stage.x), mode="fast")
        same(stage.found(ctx, opened), wanted)


async def test_edges_of_an_earlier_pass_are_waited_for_as_well() -> None:
    """That is what fast mode means: one graph per context, differentiated as a whole."""
    stage = Stage("ab")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        await ctx.backward((await a.call("b", "weigh", stage.x)).sum(), mode="fast")
        with pytest.raises(DeadlineError):
            await ctx.backward((await a.call("b", "weigh", stage.x)).sum(), mode="fast", timeout=0.1)
        assert passes(opened) == [0, 0] and values(view(b, ctx).grads[stage.weights["b"]]) == values(stage.x)


@pytest.mark.parametrize("where", "abcd")
async def test_an_error_ends_the_pass_on_every_worker(where: str) -> None:
    """Also on those that the initiator does not know of: it learns who takes part from the answers only."""
    stage = Stage(whole=True)
    fail = [True]

    def boom(g: Any) -> Any:
        if fail[0]:
            raise ValueError("boom")
        return g

    async def via(here: Any, path: str, x: Any) -> Any:
        x = x * here.weight
        if here.name == where:
            x = Misbehave.apply(x, boom)
        return await here.call(path[0], "via", path[1:], x) if path else x

    stage.functions["via"] = via

    async def graph(here: Any, x: Any) -> Any:
        # every worker has a send node to every other, so that all of them wait for something
        ys = await asyncio.gather(*(here.call(path[0], "via", path[1:], x) for path in ("bcd", "dcb", "cab")))
        return (ys[0] + ys[1] + ys[2]).sum()

    fail[0] = False
    wanted = await stage.reference(graph)
    fail[0] = True
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await graph(stage.here(opened[0]), stage.x)
        with pytest.raises(ValueError if where == "a" else RemoteError, match="boom"):
            await ctx.backward(loss, mode="fast", retain_graph=True)
        assert passes(opened) == [0, 0, 0, 0]
        assert not any(grad is not None for grads in stage.found(ctx, opened).values() for grad in grads)
        fail[0] = False
        await ctx.backward(loss, mode="fast", retain_graph=True)
        same(stage.found(ctx, opened), wanted)


async def test_a_chain_of_workers_that_do_not_know_each_other_hears_of_an_abort(virtual_clock: VirtualClock) -> None:
    """d is known to c only, and c to b only."""

    stage = Stage()
    async with stage.open() as opened, opened[0].context() as ctx:
        d = opened[3]
        loss = await GRAPHS["chain"](stage.here(opened[0]), stage.x)
        reached = asyncio.Event()

        async def hold() -> None:
            reached.set()
            await asyncio.sleep(1000)

        with before(d, Kind.GRADIENT, hold):
            running = asyncio.ensure_future(ctx.backward(loss, mode="fast", retain_graph=True))
            await reached.wait()
            assert passes(opened) == [1, 1, 1, 0]
            await cancel(running)
        assert passes(opened) == [0, 0, 0, 0]
        await ctx.backward(loss, mode="fast")
    assert virtual_clock.time() < 10


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_everybody_is_idle_when_a_pass_that_was_given_up_returns(virtual_clock: VirtualClock, how: str) -> None:
    """Along a chain of six, where messages take a while and everybody knows only the next."""
    board = Net()

    async def wait(g: Any) -> Any:
        await asyncio.sleep(1000)

    async def fail(g: Any) -> Any:
        await asyncio.sleep(2 if how == "failed" else 1000)
        raise ValueError("boom")

    async def via(here: Here, path: str, x: Any) -> Any:
        y = x * here.weight
        if not path:
            return Suspend.apply(y, wait)
        z = await here.call(path[0], "via", path[1:], y)
        return z + Suspend.apply(y, fail) if here.name == "b" else z

    stage = Stage("abcdef")
    stage.functions["via"] = via
    async with stage.open(board, idle=False) as opened, opened[0].context() as ctx:
        loss = (await opened[0].call("b", "via", "cdef", stage.x)).sum()
        board.latency = 0.1
        running = asyncio.ensure_future(ctx.backward(loss, mode="fast"))
        await asyncio.sleep(1.0)
        assert passes(opened) == [1] * 6
        if how == "cancelled":
            running.cancel()
        with pytest.raises((asyncio.CancelledError, RemoteError)):
            await running
        assert passes(opened) == [0] * 6
        board.latency = 0.0


async def test_fast_passes_of_many_contexts_at_the_same_time() -> None:
    stage = Stage(whole=True)
    wanted = await stage.reference(GRAPHS["forked"])
    async with stage.open() as opened:

        async def train() -> None:
            async with opened[0].context() as ctx:
                loss = await GRAPHS["forked"](stage.here(opened[0]), stage.x)
                await ctx.backward(loss, mode="fast")
                same(stage.found(ctx, opened), wanted)

        await asyncio.gather(*(asyncio.create_task(train(), context=contextvars.Context()) for _ in range(20)))


async def test_fast_and_smart_passes_take_turns() -> None:
    stage = Stage("abc", whole=True)
    async with stage.open() as opened, opened[0].context() as ctx:
        y = await opened[0].call("b", "via", "c", stage.x)
        loss = y.sum()
        await asyncio.gather(*(ctx.backward(loss, mode=mode, retain_graph=True) for mode in ("fast", "smart") * 5))
        w = stage.weights
        assert values(ctx.grads[stage.x]) == values(w["b"] * w["c"] * 10)
        assert leaf(1) not in ctx.grads
