"""Cells: every protocol point meets every kind of fault.

Chance alone never reaches the rare moments, so here a fault is forced right when a host comes to a point: the host is killed or frozen, its
connections are reset or cut, or one of them breaks or goes silent with the next frame that it sends. One run makes one kind of fault at each
point in turn, while the driver runs a program in which every worker takes part in every role.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Literal, NamedTuple, get_args

from aiograd.distributed import failpoints
from aiograd.testing import Faults
from aiograd.testing.network.faults import FaultKind
from aiograd.transaction.tree import FANOUT
from tests.chaos import programs
from tests.chaos.hosts import DRIVER
from tests.chaos.mix import Mix
from tests.chaos.work import Work
from tests.chaos.world import Outcome, World, run_seed

Fault = Literal["kill", "silent kill", "break", "stall", "reset", "cut", "freeze"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
#: what strikes with the next frame
FORCED: dict[Fault, FaultKind] = {"break": "reset", "stall": "stall"}
POINTS = tuple(failpoints.POINTS)
#: seconds that a host is frozen or cut off
LEAST, MOST = 0.05, 2.5
#: part of the faults that happen when the host comes by for the first time; others wait for the second
FIRST = 0.75


class Cell(NamedTuple):
    """A fault at a point."""

    point: str
    fault: Fault


#: an initiator is not the one who is sent the first gradients of its own pass, and neither says that it is prepared nor that it has committed
NOT_THE_INITIATOR = ("bwd.before_compute", "bwd.before_ack", "commit.after_prepare", "commit.before_reply")
CELLS = tuple(Cell(point, fault) for point in POINTS for fault in FAULTS)


def run_cells(fault: Fault, seed: int | str, *, points: tuple[str, ...] = POINTS) -> tuple[Counter[Cell], Outcome]:
    """Run one seed in which `fault` happens at each of these points once, if the host that was drawn comes by.

    Returns:
        How often each cell was met.

    Raises:
        Broken: a promise was not kept.
    """
    name = f"{fault}:{seed}"
    random = Random(f"cells:{name}")
    hits: Counter[Cell] = Counter()
    errands = [partial(visit, cell=Cell(point, fault), random=Random(random.random()), hits=hits) for point in random.sample(points, len(points))]
    mix = Mix(
        order=random.choice(("fifo", "permuted")),
        faults=Faults(latency=(0.0005, 0.003)),
        frame_bytes=80,  # so that answers have two frames
        fanout=random.choice((1, FANOUT)),
    )
    outcome = run_seed(f"cells:{name}", mix=mix, errands=errands)
    return hits, outcome


async def visit(work: Work, *, cell: Cell, random: Random, hits: Counter[Cell]) -> None:
    """Let the fault happen when a host comes to the point, while a context is differentiated."""
    world: World = work.world  # type: ignore[assignment]
    network = world.network
    await world.complete()
    name = random.choice([name for name in world.names if name != DRIVER or cell.point not in NOT_THE_INITIATOR])
    others = [other for other in world.names if other != name]
    forced = FORCED.get(cell.fault)
    before = network.coverage[forced or cell.fault, None]

    def strike() -> None:
        world.notes.tell(f"{name} at {cell.point}: {cell.fault}")
        world.troubles.struck += 1
        if forced is not None:
            for other in others:
                network.force(name, other, forced)
        else:
            hits[cell] += 1
            STRIKES[cell.fault](world, name, others, random)

    visit_number = 1 if random.random() < FIRST else 2
    armed = network.at(cell.point, name, strike, hit=visit_number)
    try:
        program = programs.everywhere(DRIVER, [other for other in work.peers if other != DRIVER])
        await work.context(random, program, passes=2 if visit_number > 1 else 1)
    finally:
        armed.disarm()
        for other in others:
            network.link(name, other).forced.clear()
    if forced is not None and network.coverage[forced, None] > before:
        hits[cell] += 1


def _cut(world: World, name: str, others: list[str], random: Random) -> None:
    both = random.random() < 0.5
    for other in others:
        world.network.cut(name, other, both=both)
    # nobody's timer: it goes off also when the driver is gone
    asyncio.get_running_loop().call_later(random.uniform(LEAST, MOST), world.network.heal_all, context=contextvars.Context())


def _reset(world: World, name: str, others: list[str], random: Random) -> None:
    for other in others:
        world.network.reset(name, other)


def _freeze(world: World, name: str, others: list[str], random: Random) -> None:
    world.troubles.freeze(name, random.uniform(LEAST, MOST))


STRIKES: dict[str, Callable[[World, str, list[str], Random], None]] = {
    "kill": lambda world, name, others, random: world.network.kill(name),
    "silent kill": lambda world, name, others, random: world.network.kill(name, silent=True),
    "reset": _reset,
    "cut": _cut,
    "freeze": _freeze,
}
