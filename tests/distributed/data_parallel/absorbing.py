"""Trainings whose lost workers are absorbed, on networks and workers that fail, seed by seed.

Note [The oracle]
    The driver notes which steps were taken. All replicas then have the bits of one replica on one worker that has taken these steps without any
    trouble: the same shards, which depend neither on the number of workers nor on who was lost when.

Note [No error]
    Two of three seeds have no other trouble than workers that are killed, of which one always lives. No step may raise there. The others have
    networks that fail as well; there a step may raise a typed error, and is taken again unless that says that it is decided.

Note [When the state may be lost]
    A worker that is cut off while a step is committed is left out, and lacks the step. If the last worker that has it is killed then, the state is
    lost, and a typed error says so: that has to be true. The training ends there, as it would go on with a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import aiograd as ag
from aiograd.distributed.data_parallel.coordinator import ReplicaCoordinator
from aiograd.distributed.data_parallel.remote_replica import RemoteReplica
from aiograd.distributed.data_parallel.replica_member import ReplicaMember
from aiograd.errors import CommitUnknown, DistributedError, WorkerLostError
from tests.distributed.data_parallel.models import BatchNet, Net, batches, bits
from tests.distributed.data_parallel.simulated import World
from tests.distributed.training_world import SeededRun

STEPS = 6
#: seconds of virtual time in which the network fails, and in which a step has to succeed afterwards
PATIENCE, CALM = 200.0, 60.0


class StateLost(Exception):
    """See Note [When the state may be lost]."""


def alone(given: Sequence[Any], world: World) -> dict[str, bytes]:
    """The state of one replica that has taken these steps."""
    options = {**world.options, "absorb": False}

    async def main(one: World) -> dict[str, bytes]:
        for shards in given:
            await one.replicas.step(shards)
        return bits(await one.replicas.state_dict())

    found: dict[str, bytes] = World(("w0",), module=world.module, arguments=world.arguments, **options).simulate(main)
    return found


class AbsorbRun(SeededRun):
    """One seed.

    Args:
        seed: decides everything.
        steps: that are taken.
        options: of the replicas.
    """

    world: World

    def __init__(self, seed: int, steps: int = STEPS, **options: Any) -> None:
        super().__init__(seed, "absorb", 6)
        random = self.random
        self.only_kills = seed % 3 > 0
        chosen = {
            "accumulate": random.choice((1, 1, 2)),
            "clip_norm": random.choice((None, 0.1)),
            "bucket_bytes": random.choice((1, 100, 1 << 20)),
            "optimizer": random.choice((ag.optim.AdamW, ag.optim.SGD)),
            **options,
        }
        self.is_sharded = self.only_kills and random.random() < 0.25
        module, arguments = random.choice(((Net, ()), (BatchNet, (0.5,))))
        names = tuple(f"w{i}" for i in range(random.randint(2, 5)))
        self.world = World(names, module=module, arguments=arguments, seed=seed, absorb=True, shard_optimizer=self.is_sharded, **chosen)
        self.given = [batches(1, [random.randint(2, 4) for _ in range(random.randint(1, 8))], seed=number)[0] for number in range(steps)]
        #: steps that were taken, and whether that is known
        self.history: list[tuple[Any, bool]] = []
        self.dead: set[str] = set()
        #: it is over
        self.is_over = False

    def run(self) -> Any:
        try:
            found = super().run()
        except StateLost:
            return self.seen
        states = self.found
        unknown = [index for index, (_, is_known) in enumerate(self.history) if not is_known]
        assert all(state == states[0] for state in states), (self.seed, "replicas differ")
        for count in range(len(unknown) + 1):
            for out in itertools.combinations(unknown, count):
                if alone([shards for index, (shards, _) in enumerate(self.history) if index not in out], self.world) == states[0]:
                    return found
        raise AssertionError((self.seed, f"the bits are not those of {len(self.history)} steps on one worker", dict(self.seen)))

    async def train(self, world: World) -> None:
        loop = asyncio.get_running_loop()
        troubling = asyncio.ensure_future(self.trouble(world))
        number = 0
        while number < len(self.given) and loop.time() < PATIENCE:
            number += await self.step(number)
            await self.take_in(world)
            if self.random.random() < 0.3:
                await asyncio.sleep(self.random.uniform(0, 1.0))
        self.is_over = True
        await troubling
        world.network.calm()
        for left in (*range(number, len(self.given)), len(self.given) - 1):
            calm = loop.time()
            while not await self.step(left):
                assert loop.time() < calm + CALM, (self.seed, "no step succeeds although nothing is wrong any more", dict(self.seen))
        self.found = world.states
        self.seen["absorbed"] += len(world.replicas.lost)

    async def step(self, number: int) -> bool:
        """Try to take a step; returns True if the next one is due."""
        replicas = self.world.replicas
        shards = self.given[number]
        before, names = set(replicas.lost), set(replicas.names)
        try:
            with self.noting_lost() as lost:
                losses = await replicas.step(shards)
        except (DistributedError, asyncio.CancelledError) as error:
            assert not self.only_kills, (self.seed, "an error although one worker always lives", error)
            if isinstance(error, CommitUnknown):
                self.history.append((shards, False))
                self.seen["unknown"] += 1
                return True
            self.seen[type(error).__name__] += 1
            if isinstance(error, WorkerLostError):
                is_behind = str(error).startswith("no replica that can be reached has")  # and `error.worker` may have the state
                assert is_behind or {*lost, error.worker} == names, (self.seed, "a loss was not absorbed", error)
                assert names == {*replicas.names} - before and not replicas.lost, (self.seed, "not all are there again", error)
                self.seen["behind"] += is_behind
                try:
                    await replicas.add(error.worker)
                except DistributedError as failure:
                    self.check_lost(failure)
            await asyncio.sleep(0.5)
            return False
        assert len(losses) == len(shards)
        self.history.append((shards, True))
        self.seen["taken"] += 1
        self.seen["left out in a step"] += len(set(replicas.lost) - before)
        return True

    def check_lost(self, error: DistributedError) -> None:
        """If an error says that the state of all is lost, see that no replica of a living worker has it. See Note [When the state may be lost]."""
        if not str(error).startswith("all replicas that had the state"):
            return
        newest = self.world.coordinator.version
        for name in set(self.world.names) - self.dead:
            for held in self.world.workers[name]._objects.table._held.values():
                if isinstance(held.value, ReplicaMember):
                    replica = held.value._replica
                    assert (replica.loads, replica.taken) < newest, (self.seed, f"the state is said to be lost, and {name} has it", dict(self.seen))
        assert self.seen["killed"]
        self.seen["state lost"] += 1
        raise StateLost from error

    @contextlib.contextmanager
    def noting_lost(self) -> Iterator[list[str]]:
        """The workers that are left out meanwhile."""
        lost: list[str] = []
        leave_out = ReplicaCoordinator._leave_out

        def noting(coordinator: ReplicaCoordinator, replica: RemoteReplica, *loss: Any) -> None:
            lost.append(replica.owner)
            leave_out(coordinator, replica, *loss)

        with mock.patch.object(ReplicaCoordinator, "_leave_out", noting):
            yield lost

    async def take_in(self, world: World) -> None:
        """Take in workers that were left out, and are there again."""
        for name in world.replicas.lost:
            if name not in self.dead and self.random.random() < 0.7:
                with contextlib.suppress(DistributedError):  # it is lost again, or another one
                    await world.replicas.add(name)
                    self.seen["added"] += 1

    # ---------------------------------------------------------------- trouble

    def may_be_killed(self, world: World) -> list[str]:
        """Workers without which the state of all is still there."""
        living = [name for name in world.replicas.names if name not in self.dead and self.has_replica(name)]
        if self.is_sharded and self.seen["killed"]:
            return []
        return living if len(living) > 1 else [name for name in world.names if name not in self.dead and name not in living]

    def has_replica(self, name: str) -> bool:
        """True if a replica of the driver is on a worker, and not of one that was there before a restart."""
        try:
            self.world.host(name)
        except (AssertionError, KeyError):
            return False
        return True

    def kill(self, name: str) -> None:
        self.dead.add(name)
        self.seen["killed"] += 1
        self.world.network.kill(name, silent=self.random.random() < 0.3)
        asyncio.get_running_loop().call_later(self.random.uniform(0.05, 3.0), self.restart, name)

    def restart(self, name: str) -> None:
        self.world.restart(name)
        self.dead.discard(name)

    async def trouble(self, world: World) -> None:
        network = world.network
        if not self.only_kills:
            for one, two in itertools.combinations(("driver", *world.names), 2):
                network.set_faults(one, two, self.faults)
        for _ in range(0 if self.is_calm else self.random.randint(1, 5)):
            await asyncio.sleep(self.random.choice((self.random.uniform(0, 0.05), self.random.uniform(0, 1.0))))
            if self.is_over:
                break
            kind = "kill" if self.only_kills else self.random.choice(("kill", "kill", "reset", "cut", "freeze"))
            name = self.random.choice(world.names)
            other = self.random.choice([each for each in ("driver", *world.names) if each != name])
            match kind:
                case "kill" if candidates := self.may_be_killed(world):
                    self.kill(self.random.choice(candidates))
                case "reset":
                    network.reset(name, other)
                case "cut":
                    network.cut(name, other)
                    asyncio.get_running_loop().call_later(self.random.uniform(0, 4.0), network.heal, name, other)
                case "freeze":
                    network.freeze(name, self.random.uniform(0, 4.0))
        await asyncio.sleep(5.0)
        network.heal_all()

