"""Trouble: what happens to hosts and links rather than to frames, at times that a seed draws."""

from __future__ import annotations

import asyncio
from random import Random

from aiograd.distributed import failpoints
from aiograd.distributed.failpoints import Failpoint
from tests.chaos.hosts import World
from tests.chaos.mix import Trouble

POINTS = tuple(failpoints.POINTS)
#: seconds in which a process that is asked to end has to be gone
STOPPED = 5.0


class Troubles:
    """Makes trouble in one run.

    Args:
        world: the run.
        random: decides what and when.
    """

    def __init__(self, world: World, random: Random) -> None:
        self.world = world
        self.random = random
        self.armed: list[Failpoint] = []
        #: faults that no frame has met
        self.struck = 0

    async def run(self) -> None:
        """Make as much trouble as the mix says."""
        world, random = self.world, self.random
        for _ in range(world.mix.troubles):
            await asyncio.sleep(random.uniform(0, 0.6))
            kind, heals = random.choice(world.mix.trouble_kinds), random.random() < 0.5
            await self.make(kind, *random.sample(world.names, 2))
            if heals:
                await asyncio.sleep(random.uniform(0, 2.0))
                world.network.heal_all()
        if world.mix.troubles:
            await asyncio.sleep(random.uniform(0, 1.0))
            world.network.heal_all()

    async def make(self, kind: Trouble, name: str, other: str) -> None:
        """Do one thing."""
        random, network = self.random, self.world.network
        self.struck += 1
        match kind:
            case "cut":
                network.cut(name, other)
            case "cut one way":
                network.cut(name, other, both=False)
            case "reset":
                network.reset(name, other)
            case "freeze":
                self.freeze(name, random.choice((0.2, 1.0, 3.0)))
            case "swizzle":
                await network.swizzle_clog(seconds=1.0)
            case "kill" | "silent kill":
                network.kill(name, silent=kind == "silent kill")
            case "kill at a point":
                point, action = random.choice(POINTS), random.choice(("kill", "kill", "kill silently"))
                self.armed.append(network.at(point, name, action, hit=random.randint(1, 3)))
                kind = f"{action} at {point}"  # type: ignore[assignment]
            case "stop":
                self.stop(name)
        self.world.notes.count(f"trouble: {kind}")
        self.world.notes.tell(f"... {name}, {other}")

    def freeze(self, name: str, seconds: float) -> None:
        """Let a host stand still."""
        now = self.world.notes.clock()
        self.world.notes.frozen(name, now, now + seconds)
        self.world.network.freeze(name, seconds)

    def stop(self, name: str) -> None:
        """Ask a process to end, as SIGTERM does; it closes everything in order."""
        host = self.world.hosts.pop(name, None)  # it begins to forget
        if host is not None and host.main_task is not None:
            begun = self.world.notes.clock()
            host.main_task.add_done_callback(lambda _: self.world.notes.in_time(name, "stopping", begun, STOPPED))
            host.main_task.cancel()

    def end(self) -> None:
        """No more trouble."""
        for failpoint in self.armed:
            failpoint.disarm()
        self.world.network.calm()
