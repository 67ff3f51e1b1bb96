"""A caller gives up at every single point at which it can: before each step of the loop that a backward pass takes, on whichever host.

Source: trio's checkpoint tests, carried over to a whole network.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

from aiograd.testing import Faults
from tests.chaos import programs
from tests.chaos.hosts import DRIVER
from tests.chaos.mix import Mix, Order
from tests.chaos.oracle import Book
from tests.chaos.work import Work
from tests.chaos.world import Outcome, World, run_seed

#: a pass that takes more steps than this is no pass
MOST = 5000
#: steps tried in one run
BATCH = 50


def cancel_everywhere(seed: int | str = 0, *, order: Order = "fifo", workers: int = 2, every: int = 1) -> tuple[int, int]:
    """Cancel the same backward pass before each of its steps, or before one of so many.

    Returns:
        How many steps there were at least, and how many of the cancelled passes were committed.

    Raises:
        Broken: a promise was not kept.
    """
    mix = Mix(order=order, workers=workers, faults=Faults(latency=(0.0005, 0.003)))
    committed = 0
    for first in itertools.count(1, BATCH * every):
        ended: list[str] = []
        steps = range(first, first + BATCH * every, every)
        outcome: Outcome = run_seed(f"cancel:{seed}:{first}", mix=mix, errands=[partial(cancel_before, step=step, ended=ended) for step in steps])
        committed += outcome.counts["cancelled after the commit"]
        if "undisturbed" in ended or first > MOST:  # the pass was over before that step
            return first + (ended.index("undisturbed") - 1) * every, committed
    raise AssertionError("unreachable")


async def cancel_before(work: Work, *, step: int, ended: list[str]) -> None:
    """Run a pass, and cancel it right before step number `step` of those that follow its start."""
    world, host = work.world, work.host
    if not isinstance(world, World):
        raise TypeError("only simulated runs have steps")
    program = programs.everywhere(DRIVER, [name for name in work.peers if name != DRIVER])
    want = await programs.reference(program, host.name, work.peers)
    async with work.open() as ctx:
        x = programs.new_input()
        book = Book(world, host, ctx, x, want, {name: world.hosts[name] for name in work.hosts()})
        outputs = await programs.execute(program, [x], host.served.leaves, host.served)
        loss = programs.total(outputs)
        raised: list[BaseException] = []

        async def run() -> None:
            try:
                await ctx.backward(loss)
            except BaseException as error:
                raised.append(error)
                raise

        loop = world.jobs._loop
        task = asyncio.create_task(run())
        cancelled_at: list[float] = []
        book.begin(0)

        def cancel() -> None:
            if task.cancel():
                cancelled_at.append(loop.time())

        loop.at_step(loop.steps + step, cancel)  # type: ignore[attr-defined]
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
            book.end(0, is_in=True)
            ended.append("too late" if cancelled_at else "undisturbed")
        else:
            # it tells the others and waits for them, but not for long
            world.notes.expect(loop.time() - cancelled_at[0] <= host.worker.limits.heartbeat, f"cancelled before step {step}: that took too long")
            is_in = bool(raised) and getattr(raised[0], "committed", False)
            doubtful = tuple(name for name in book.held if name != host.name) if ctx.in_doubt else ()
            book.end(0, is_in=is_in, doubtful=doubtful)
            ended.append("cancelled after the commit" if is_in else "cancelled")
        book.check()
    world.notes.count(ended[-1])
