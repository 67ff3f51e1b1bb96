"""Scenarios: rare moments made on purpose, one for each protection that random runs seldom need.

Each is what the driver of a run does; the run's own checks and those here notice what goes wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars

import aiograd as ag
from aiograd.distributed.autograd.context import Context
from aiograd.errors import CommitUnknown, ContextNotFoundError, DeadlineError, DistributedError
from aiograd.testing import Faults
from tests.chaos import programs
from tests.chaos.hosts import DRIVER
from tests.chaos.mix import Mix
from tests.chaos.oracle import Book
from tests.chaos.work import Work
from tests.chaos.world import World

#: nothing happens by itself; decisions go by a tree
CALM = Mix(faults=Faults(latency=(0.001, 0.002)), workers=2, fanout=1)
#: a program for another worker: multiply what is given by a parameter
MULTIPLY = [[["multiply", 0, 0]], [1]]


async def a_worker_that_lost_its_context(work: Work) -> None:
    """A worker is restarted between two calls of one context: the second must not pass for the first one in a new context."""
    world = _world(work)
    async with work.open():
        x = programs.new_input()
        await work.host.served.call("w0", MULTIPLY, [x])
        lost = world.hosts["w0"]
        world.network.kill("w0")
        while world.hosts.get("w0") in (None, lost):
            await asyncio.sleep(0.02)
        try:
            await work.host.served.call("w0", MULTIPLY, [x])
        except ContextNotFoundError:
            return
        except DistributedError as error:
            work.notes.expect(False, f"the second call failed with {error!r}")
        work.notes.expect(False, "a worker serves a context that it has lost")


async def a_commit_whose_answer_is_lost(work: Work) -> None:
    """A worker has committed, and its answer never comes; the caller learns of the doubt, and the initiator tells it again, over a new session."""
    world = _world(work)
    host = work.host

    def cut() -> None:
        world.network.cut(DRIVER, "w0")
        # nobody's timer: see the one of cells
        asyncio.get_running_loop().call_later(1.2 * host.worker.limits.silence, world.network.heal_all, context=contextvars.Context())

    program = [[["call", "w0", [0], MULTIPLY, False]], [1]]
    want = await programs.reference(program, DRIVER, work.peers)
    async with work.open() as ctx:
        x = programs.new_input()
        book = Book(world, host, ctx, x, want, {name: world.hosts[name] for name in work.hosts()})
        (y,) = await programs.execute(program, [x], host.served.leaves, host.served)
        with world.network.at("commit.before_reply", "w0", cut) as armed:
            book.begin(0)
            with contextlib.suppress(CommitUnknown):
                await ctx.backward(y.sum(), timeout=20.0)
            await asyncio.sleep(2 * host.worker.limits.silence)
            book.end(0, is_in=True)
            work.notes.expect(armed.has_fired, "the scenario did not happen")
        book.check()


async def a_commit_by_way_of_another(work: Work) -> None:
    """A worker is told of a commit by another one, which answers for both: when the initiator has that answer both have committed."""
    async with work.open() as ctx:
        book, loss = await _everywhere(work, ctx)
        book.begin(0)
        await ctx.backward(loss, timeout=20.0)
        book.end(0, is_in=True)
        book.check()


async def a_worker_lost_on_the_way_of_a_commit(work: Work) -> None:
    """The worker that would pass a commit on is lost: it is the only one of which nobody knows."""
    world = _world(work)
    async with work.open() as ctx:
        book, loss = await _everywhere(work, ctx)
        with world.network.at("commit.half", "w0", lambda: world.network.kill("w0")) as armed:
            book.begin(0)
            try:
                await ctx.backward(loss, timeout=20.0)
                work.notes.expect(False, "a commit is confirmed by a worker that is dead")
            except CommitUnknown as error:
                work.notes.expect(error.workers == ("w0",), f"in doubt are {error.workers}")
                book.end(0, is_in=True, doubtful=error.workers)
            work.notes.expect(armed.has_fired, "the scenario did not happen")
        book.check()


async def _everywhere(work: Work, ctx: Context) -> tuple[Book, ag.Tensor]:
    """A program in which every worker takes part, run forward."""
    world, host = _world(work), work.host
    program = programs.everywhere(DRIVER, [name for name in work.peers if name != DRIVER])
    want = await asyncio.create_task(programs.reference(program, DRIVER, work.peers), context=contextvars.Context())
    x = programs.new_input()
    book = Book(world, host, ctx, x, want, {name: world.hosts[name] for name in work.hosts()})
    return book, programs.total(await programs.execute(program, [x], host.served.leaves, host.served))


async def a_deadline_on_its_way(work: Work) -> None:
    """A call waits for another that its worker makes: the second ends first, even where nobody can tell it to, and says what was waited for."""
    world = _world(work)
    world.network.loop.call_later(0.2, world.network.cut, "w0", "w1", context=contextvars.Context())
    try:
        await work.host.served.ask("a nap", lambda token, until: work.host.worker.call("w0", "nap", 3.0, "w1", token, until, timeout=1.0), 1.0)
        work.notes.expect(False, "a call has waited for longer than it may")
    except DeadlineError as error:
        work.notes.expect("w1" in str(error), f"the error does not say that w1 was waited for: {error}")
    await asyncio.sleep(0.1)
    left = world.hosts["w1"].worker.statistics().peers
    work.notes.expect(not sum(peer.running for peer in left), "a function runs although its caller's deadline is over")
    world.network.heal_all()


async def a_call_that_nobody_waits_for(work: Work) -> None:
    """A caller gives up, and the function ends."""
    call = asyncio.ensure_future(
        work.host.served.ask("a nap", lambda token, until: work.host.worker.call("w0", "nap", 3.0, "w1", token, until), None)
    )
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.wait([call])
    await asyncio.sleep(4.0)


async def a_context_that_is_left_early(work: Work) -> None:
    """A context is left while a function runs in it; the function ends."""
    async with work.open():
        call = asyncio.ensure_future(
            work.host.served.ask("a nap", lambda token, until: work.host.worker.call("w0", "nap", 3.0, "w1", token, until), None)
        )
        await asyncio.sleep(0.1)
    try:
        await call
        work.notes.expect(False, "a call of a context that is released has succeeded")
    except DistributedError:
        pass
    await asyncio.sleep(4.0)


def _world(work: Work) -> World:
    world = work.world
    if not isinstance(world, World):
        raise TypeError(f"scenarios run in a World, found {type(world).__name__}")
    return world
