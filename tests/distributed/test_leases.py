"""Contexts whose originator is gone: the other workers drop them by themselves, and not before; and those of a living one last."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ContextError, ContextReleasedError, DistributedError, WorkerLostError
from tests.distributed.passes_kit import GRAPHS, Here, Net, Stage, forever, passes, same, scaled
from tests.distributed.workers import context_here, knows, settled, values

pytestmark = pytest.mark.usefixtures("virtual_clock")

LEASE = 30.0
LIMITS = Limits(default_deadline=10.0, lease=LEASE)
#: a sweep looks every third of a lease
SWEEP = LEASE / 3


def known(ctx: Any, opened: Any) -> str:
    """The workers that have a context."""
    return "".join(worker.name for worker in opened if knows(worker, ctx))


async def forsaken(stage: Stage, opened: Any, graph: str) -> Any:
    """A context of a worker that is about to die, with gradients in it; its block is never left in good order."""
    ctx = await opened[0].context().__aenter__()
    loss = await GRAPHS[graph](stage.here(opened[0]), stage.x)
    await ctx.backward(loss, retain_graph=True)
    return ctx


@pytest.mark.parametrize("graph", ["chain", "triangle", "forked"])
@pytest.mark.parametrize("silent", [False, True])
async def test_contexts_of_a_dead_worker_are_dropped_when_their_lease_ends(silent: bool, graph: str) -> None:
    """Also where workers know them from each other only, and in a ring."""

    board = Net()
    stage = Stage()
    async with stage.open(board, limits=LIMITS, idle=False) as opened:
        ctx = await forsaken(stage, opened, graph)
        rest = known(ctx, opened)[1:]
        assert rest in ("bc", "bcd")
        board.cut("a")
        if not silent:
            board.kill("a")
        await asyncio.sleep(LEASE - SWEEP - 1)
        assert known(ctx, opened[1:]) == rest, "it may come back until then"
        await asyncio.sleep(3 * SWEEP + 5)
        assert known(ctx, opened[1:]) == ""
        for worker in opened[1:]:
            figures = worker.statistics()
            assert (figures.contexts, figures.passes, figures.calls, figures.bytes_held) == (0, 0, 0, 0)


async def test_a_context_that_is_idle_for_long_is_kept_while_its_originator_lives() -> None:
    stage = Stage(whole=True)
    wanted = await stage.reference(GRAPHS["triangle"])
    async with stage.open(limits=LIMITS) as opened, opened[0].context() as ctx:
        loss = await GRAPHS["triangle"](stage.here(opened[0]), stage.x)
        for n in range(1, 6):
            await asyncio.sleep(2.5 * LEASE)
            assert known(ctx, opened) == "abc"
            await ctx.backward(loss, retain_graph=True)
            same(stage.found(ctx, opened), scaled(wanted, n))


@pytest.mark.parametrize("seconds", [LEASE / 2, 2 * LEASE])
async def test_an_originator_that_comes_back(seconds: float) -> None:
    """In time: all is as it was. Too late: it is told, and a new context works."""

    board = Net()
    stage = Stage(whole=True)
    wanted = await stage.reference(GRAPHS["chain"])
    async with stage.open(board, limits=LIMITS) as opened:
        a = opened[0]
        async with a.context() as ctx:
            loss = await GRAPHS["chain"](stage.here(a), stage.x)
            await ctx.backward(loss, retain_graph=True)
            board.cut("a")
            await asyncio.sleep(seconds)
            board.heal("a")
            if seconds < LEASE:
                assert known(ctx, opened) == "abcd"
                await ctx.backward(loss)
                same(stage.found(ctx, opened), scaled(wanted, 2))
            else:
                assert known(ctx, opened) == "a"
                with pytest.raises(ContextReleasedError, match="Error on Node b: "):
                    await ctx.backward(loss)
                with pytest.raises(ContextReleasedError):
                    await a.call("b", "weigh", stage.x)
                assert passes(opened) == [0, 0, 0, 0]
        async with a.context() as ctx:
            await ctx.backward(await GRAPHS["chain"](stage.here(a), stage.x))
            same(stage.found(ctx, opened), wanted)


async def test_a_worker_of_the_same_name_does_not_keep_what_its_forerunner_opened() -> None:
    board = Net()
    stage = Stage("ab")
    async with stage.open(board, limits=LIMITS, idle=False) as opened:
        _, b = opened
        old = await forsaken_pair(stage, opened)
        board.kill("a")
        transport = board.transport("a")
        async with dist.Worker("a", service=stage.service(), secret=b"0123456789abcdef" * 2, transport=transport, limits=LIMITS) as successor:
            successor.add_peer("b", b.url)
            async with successor.context() as ctx:
                for _ in range(4):
                    await asyncio.sleep(SWEEP)
                    await successor.call("b", "weigh", stage.x)
                assert not knows(b, old) and knows(b, ctx) and b.statistics().contexts == 1
            await settled(successor)
        assert b.statistics().contexts == 0


async def forsaken_pair(stage: Stage, opened: Any) -> Any:
    ctx = await opened[0].context().__aenter__()
    await ctx.backward((await opened[0].call("b", "weigh", stage.x)).sum())
    assert knows(opened[1], ctx)
    return ctx


async def test_other_contexts_do_not_notice() -> None:
    """d has a context over the same workers and parameters, and differentiates in it while that of a dies."""

    board = Net()
    stage = Stage(whole=True)
    async with stage.open(board, limits=LIMITS, idle=False) as opened:
        d = opened[3]
        ctx = await forsaken(stage, opened, "triangle")
        board.kill("a")

        async def work() -> None:
            async with d.context() as mine:
                x = stage.x.detach().requires_grad_(True)
                y = await d.call("b", "via", "c", x)
                for n in range(1, 13):
                    await mine.backward(y.sum(), retain_graph=True)
                    w = stage.weights
                    assert values(mine.grads[x]) == values(w["b"] * w["c"] * n)
                    await asyncio.sleep(SWEEP)
                assert known(mine, opened) == "bcd" and known(ctx, opened[1:]) == ""

        await asyncio.create_task(work(), context=contextvars.Context())


async def test_a_pass_that_a_callee_runs_ends_when_its_context_does() -> None:
    """a has died; b, which works for it, is told by the loss of a, and all is quiet long before the lease ends."""

    board = Net()
    stage = Stage("abc")
    stage.suspend("slow", forever)
    ended = stage.differentiates("slow", timeout=1000)
    limits = Limits(default_deadline=1000.0, lease=LEASE)
    async with stage.open(board, limits=limits, idle=False) as opened:
        a = opened[0]
        await a.context().__aenter__()
        calling = asyncio.ensure_future(a.call("b", "differentiate", stage.x.detach()))
        await asyncio.sleep(1)
        assert passes(opened) == [0, 1, 1]
        board.kill("a")
        await asyncio.sleep(5)
        assert passes(opened[1:]) == [0, 0] and ended == ["CancelledError"]
        await asyncio.sleep(LEASE + SWEEP)
        assert [worker.statistics().contexts for worker in opened[1:]] == [0, 0]
        with contextlib.suppress(DistributedError):
            await calling


async def test_a_pass_ends_with_the_lease_of_its_context() -> None:
    """b differentiates in a context of a by itself, in a task that nobody cancels; a is gone, and the context goes."""

    board = Net()
    stage = Stage("abc")
    tasks: list[asyncio.Task[None]] = []

    async def start(here: Here, x: Any) -> None:
        tasks.append(asyncio.ensure_future(context_here().backward((await here.call("c", "slow", x)).sum(), timeout=900)))

    stage.suspend("slow", forever)
    stage.functions["start"] = start
    limits = Limits(default_deadline=1000.0, lease=LEASE)
    async with stage.open(board, limits=limits, idle=False) as opened:
        a = opened[0]
        await a.context().__aenter__()
        await a.call("b", "start", stage.x.detach())
        await asyncio.sleep(1)
        assert passes(opened) == [0, 1, 1]
        board.kill("a")
        await asyncio.sleep(LEASE / 2)
        assert passes(opened[1:]) == [1, 1], "a has no part in it"
        await asyncio.sleep(LEASE)
        assert passes(opened[1:]) == [0, 0] and [worker.statistics().contexts for worker in opened[1:]] == [0, 0]
        with pytest.raises(ContextError, match="was released while a backward pass was running in it"):
            await tasks[0]


@pytest.mark.parametrize("end", ["killed", "cut off"])
async def test_leaving_a_context_does_not_wait_for_workers_that_were_lost(end: str) -> None:
    board = Net()
    stage = Stage("abc")
    async with stage.open(board, limits=LIMITS, idle=False) as opened:
        a = opened[0]
        loop = asyncio.get_running_loop()
        async with a.context() as ctx:
            await a.call("b", "weigh", stage.x)
            await a.call("c", "weigh", stage.x)
            if end == "killed":
                board.kill("b")
            else:
                board.cut("b")
            with pytest.raises(WorkerLostError):
                await a.call("b", "weigh", stage.x)
            left = loop.time()
        assert loop.time() - left < 0.01
        assert not knows(opened[2], ctx), "the others were told, and waited for"
        if end == "cut off":
            board.heal("b")
            await asyncio.sleep(2 * LIMITS.silence)
            async with a.context() as ctx:
                await a.call("b", "weigh", stage.x)
                assert knows(opened[1], ctx)
            assert not knows(opened[1], ctx), "one that is back is waited for again"
