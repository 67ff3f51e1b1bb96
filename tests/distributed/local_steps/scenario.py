"""Trainings with local steps on networks and workers that fail, seed by seed.

Note [The oracle]
    The world notes every decision: rounds with their batches, and members that begin anew. One process that takes the same rounds again has to have
    the bits of the training under all faults; and every batch that counts as read was read in exactly one round.

Note [When the training has to get on]
    No number of rounds is promised while the faults last. They end after `PATIENCE` seconds, and from then on the epochs have to be read to the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from aiograd import distributed as dist
from aiograd.errors import DistributedError, QuorumError, RemoteError
from tests.distributed.local_steps.learners import Dropping, Learner
from tests.distributed.local_steps.simulated import World
from tests.distributed.training_world import SeededRun

#: seconds of virtual time; see Note [When the training has to get on]
PATIENCE, CALM = 60.0, 90.0
EPOCHS = 2


class LocalStepsRun(SeededRun):
    """One seed.

    Args:
        seed: decides everything.
        options: of the training.
    """

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, "local steps", 8)
        names = tuple(f"w{i}" for i in range(self.random.randint(2, 4)))
        chosen = {
            "steps": self.random.choice((1, 2, 3)),
            "quorum": self.random.choice((1, 1, 2)),
            "patience": self.random.choice((None, 0.0, 0.2, 1.0)),
            "overlap": self.random.choice((0, 0, 1)),
            "compress": self.random.choice((None, dist.TopK(1 / 8, bits=4, block=64), dist.Blockwise(8, block=64))),
            "answer": self.random.choice((None, None, dist.Blockwise(4, block=64))),
            **options,
        }
        members = self.random.randint(chosen["quorum"], len(names))
        module = self.random.choice((Learner, Dropping))
        self.world = World(names, members, module=module, seed=seed, dials_out=self.random.random() < 0.3, **chosen)

    async def train(self, world: World) -> None:
        now = asyncio.get_running_loop().time
        for name in world.training.names:
            if self.random.random() < 0.3:
                world.model(name).waits = {0: self.random.choice((0.01, 0.3, 2.0))}
        troubling = asyncio.ensure_future(self.trouble(world))
        membership = asyncio.ensure_future(self.change_members(world))
        while world.training.epoch < EPOCHS and now() < PATIENCE:
            await self.round(world)
        self.seen["calmed"] += world.training.epoch < EPOCHS
        await asyncio.gather(troubling, membership)
        world.network.calm()
        calm = now()
        while world.training.epoch < EPOCHS:
            assert now() < calm + CALM, (self.seed, "no round succeeds although nothing is wrong any more", dict(self.seen))
            await self.round(world, is_cancelled=False)
        await world.oracle()
        self.seen["rounds"] += len(world.records)
        self.seen["late"] += sum(len(record.late) for record in world.records)
        self.seen["counted late"] += sum(began < record.number - 1 for record in world.records for began in record.began.values())
        self.seen["left out"] += sum(len(record.lost) for record in world.records)

    async def round(self, world: World, *, is_cancelled: bool = True) -> None:
        training = world.training
        before = training.version, training.digest, len(world.records)
        rounding = asyncio.ensure_future(anext(aiter(training.rounds(EPOCHS - training.epoch)), None))
        if is_cancelled and self.random.random() < 0.15:
            asyncio.get_running_loop().call_later(self.random.uniform(0, 0.2), rounding.cancel)
        is_committed = True
        try:
            record = await rounding
            is_committed = record is not None and bool(record.members)
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self.seen["cancelled"] += 1
            is_committed = getattr(error, "committed", False)
        except QuorumError:
            self.seen["no quorum"] += 1
            is_committed = False
            await self.take_in(world)
        except RemoteError as error:
            assert "by nought" in str(error), (self.seed, error)
            self.seen["loss failed"] += 1
            is_committed = False
        except DistributedError as error:
            self.seen[type(error).__name__] += 1
            is_committed = getattr(error, "committed", False)
            await asyncio.sleep(0.5)
        assert training.version - before[0] == len(world.records) - before[2] == is_committed, (self.seed, "changed, and raised; or the reverse")
        assert is_committed or training.digest == before[1], (self.seed, "nothing may have changed")

    async def take_in(self, world: World) -> None:
        """Take in every worker that can be reached."""
        await asyncio.sleep(self.random.uniform(0, 1.5))
        for name in world.names:
            with contextlib.suppress(DistributedError):  # it is not back yet
                await world.training.add(name)
                self.seen["added"] += 1

    async def change_members(self, world: World) -> None:
        """Members join and leave beside the rounds."""
        for _ in range(self.random.randint(0, 3)):
            await asyncio.sleep(self.random.uniform(0, 2.0))
            name = self.random.choice(world.names)
            try:
                if self.random.random() < 0.7:
                    await world.training.add(name)
                    self.seen["joined"] += 1
                elif name in world.training.names and len(world.training.names) > 1:
                    await world.training.remove(name)
                    self.seen["removed"] += 1
            except DistributedError:
                self.seen["could not join"] += 1
            except ValueError as error:  # it has left meanwhile, or is the last
                assert "remove" in str(error) or "twice" in str(error), (self.seed, error)

    async def trouble(self, world: World) -> None:
        later = asyncio.get_running_loop().call_later
        for name in world.names:
            world.network.set_faults("driver", name, self.faults)
        for _ in range(0 if self.is_calm else self.random.randint(1, 5)):
            await asyncio.sleep(self.random.uniform(0, 1.0))
            name = self.random.choice(world.names)
            match self.random.choice(("kill", "kill", "reset", "cut", "freeze", "freeze driver", "loss", "slow")):
                case "kill" if not self.seen[f"killed {name}"]:
                    self.seen[f"killed {name}"] += 1
                    world.network.kill(name, silent=self.random.random() < 0.5)
                    later(self.random.uniform(0.1, 4.0), world.restart, name)
                case "reset":
                    world.network.reset(name, "driver")
                case "cut":
                    world.network.cut(name, "driver")
                    later(self.random.uniform(0, 4.0), world.network.heal, name, "driver")
                case "freeze":
                    world.network.freeze(name, self.random.uniform(0, 4.0))
                case "freeze driver":
                    world.network.freeze("driver", self.random.uniform(0, 4.0))
                case "loss" | "slow" as what if name in world.training.names:
                    with contextlib.suppress(KeyError, AssertionError):  # its worker was restarted
                        model = world.model(name)
                        if what == "loss":
                            model.fails.append(ZeroDivisionError("by nought"))
                        else:
                            model.waits = {0: self.random.choice((0.0, 0.1, 1.0))}
        await asyncio.sleep(5.0)
        world.network.heal_all()
