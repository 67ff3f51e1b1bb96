"""Training by data-parallel replicas on networks and workers that fail: no step is lost, taken twice or taken by some.

Note [The oracle]
    The driver notes which steps were taken, with their shards; of a step that ended with `CommitUnknown` it does not know. The replicas must then
    have the bits of one process that has taken exactly these steps, with or without the unknown ones.

Note [When the state of the optimizer may be lost]
    Replicas that divide the state of the optimizer have two copies of each shard. A typed error may say that the state is lost if, and only if, all
    replicas are gone that had one of the shards when they last got ready for a step: their workers were killed or started again, or the driver has
    removed them or put new ones in their place. Then the training goes on as the error advises, with the state from outside: that of one
    process which has taken the same steps.

Note [Residuals]
    A third of the seeds compress gradients. Residuals belong to a replica and change with its steps; a state from another replica, or from outside,
    has none. The driver notes which replicas begin a step, each with the number of states that it has taken from elsewhere; one process then has the
    bits and the residuals of all.

Note [When the training has to get on]
    Some seeds draw a network on which every twentieth frame stalls its connection for good; there a step may fail dozens of times. So no number of
    attempts is promised while the faults last: they end after `PATIENCE` seconds, and from then on the steps that are left have to succeed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from random import Random
from typing import Any
from unittest import mock

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.data_parallel.coordinator import SHARD, ReplicaCoordinator
from aiograd.distributed.data_parallel.replica import Replica
from aiograd.distributed.data_parallel.sharded_optimizer import shards_of
from aiograd.errors import CommitUnknown, DistributedError, WorkerLostError
from tests.distributed.data_parallel.compressing import Ranks, serial_replicas
from tests.distributed.data_parallel.models import Net, batches, bits, module_of
from tests.distributed.data_parallel.simulated import World, whole
from tests.distributed.training_world import SeededRun

STEPS = 6
COMPRESSORS = (None, None, None, None, dist.TopK(1 / 4, bits=4, block=64), dist.Blockwise(4, block=64))
#: seconds of virtual time; see Note [When the training has to get on]
PATIENCE, CALM = 300.0, 60.0


class ReplicaRun(SeededRun):
    """One seed.

    Args:
        seed: decides everything.
        options: of the replicas.
    """

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, "replicas", 6)
        names = tuple(f"w{i}" for i in range(self.random.randint(2, 4)))
        self.given = {count: batches(STEPS, (3,) * count, seed=count) for count in range(1, 6)}
        self.accumulate = self.random.choice((1, 1, 2))
        self.compress = Random(f"{seed}:compressor").choice(COMPRESSORS)
        self.world = World(names, seed=seed, accumulate=self.accumulate, compress=self.compress, **options)
        #: steps that were taken, whether that is known, and the replicas that began them
        self.history: list[tuple[Any, bool, list[Any]]] = []
        #: the replicas that began the last step, in the order of their ranks, see Note [Residuals]
        self.begun: list[Any] = []
        #: how often a replica has dropped its residuals
        self.dropped: Counter[Replica] = Counter()
        #: workers that are killed and not started again
        self.dead: set[str] = set()
        #: by name, the hosts that had the state of the optimizer when the replicas last got ready, in the order of their ranks
        self.holders: dict[str, Any] = {}

    def run(self) -> Counter[str]:
        forget = Replica.forget_residuals

        def noting(replica: Replica) -> None:
            self.dropped[replica] += 1
            forget(replica)

        with mock.patch.object(Replica, "forget_residuals", noting):
            return super().run()

    def residuals_of(self, host: Any) -> tuple[Any, int]:
        """A name for the residuals of a replica, another one for each state that it has taken from elsewhere."""
        return host, self.dropped[host._replica]

    async def train(self, world: World) -> None:
        loop = asyncio.get_running_loop()
        self.note_holders()
        self.seen["compressed"] += self.compress is not None
        troubling = asyncio.ensure_future(self.trouble(world))
        number = 0
        while number < STEPS and loop.time() < PATIENCE:
            number += await self.step(number)
            if self.random.random() < 0.3:
                await asyncio.sleep(self.random.uniform(0, 2.0))
        self.seen["calmed"] += number < STEPS
        await troubling
        world.network.calm()
        for left in (*range(number, STEPS), STEPS - 1):
            calm = loop.time()
            while not await self.step(left, is_cancelled=False):
                assert loop.time() < calm + CALM, (self.seed, "no step succeeds although nothing is wrong any more", dict(self.seen))
        await self.check(world)

    async def step(self, number: int, *, is_cancelled: bool | None = None) -> bool:
        """Try to take a step; returns True if the next one is due."""
        replicas = self.world.replicas
        shards = self.given[len(replicas.names)][number]
        stepping = asyncio.ensure_future(replicas.step(shards))
        if is_cancelled is None and self.random.random() < 0.15:
            asyncio.get_running_loop().call_later(self.random.uniform(0, 0.1), stepping.cancel)
        try:
            await stepping
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self.seen["cancelled"] += 1
            if not getattr(error, "committed", False):
                return False
            self.history.append((shards, False, self.begun))  # decided, and perhaps all had dropped it
            return True
        except CommitUnknown as error:
            self.seen["unknown"] += 1
            if error.committed:
                self.history.append((shards, False, self.begun))
            return error.committed
        except WorkerLostError as error:
            self.seen["lost"] += 1
            await self.recover(error.worker)
            return False
        except DistributedError as error:
            if SHARD[0] in str(error):
                await self.state_lost()
            self.seen[type(error).__name__] += 1
            await asyncio.sleep(0.5)
            return False
        self.seen["taken"] += 1
        self.history.append((shards, True, self.begun))
        return True

    async def recover(self, name: str) -> None:
        """Go on without a lost worker, or with a new replica there."""
        replicas = self.world.replicas
        if name in replicas.names and len(replicas.names) > 2 and self.random.random() < 0.4:  # one may be killed: another has to have the state
            await replicas.remove(name)
            self.seen["removed"] += 1
        await asyncio.sleep(self.random.uniform(0, 1.5))
        with contextlib.suppress(DistributedError):  # it is not back yet
            await replicas.add(name)
            self.seen["added"] += 1

    # ---------------------------------------------------------------- the state of the optimizer

    def note_holders(self) -> None:
        """Note the owners of optimizer states and of residuals each time that the replicas are ready."""
        coordinator: ReplicaCoordinator = self.world.replicas._coordinator
        get_ready = coordinator.get_ready

        async def noting() -> None:
            await get_ready()
            hosts = {name: self.host(name) for name in self.world.replicas.names}
            self.begun = [name if host is None else self.residuals_of(host) for name, host in hosts.items()]
            if coordinator.is_sharded:
                self.holders = hosts

        coordinator.get_ready = noting  # type: ignore[method-assign]

    def host(self, name: str) -> Any:
        """The host of the driver's replica on a worker; None: it is gone."""
        try:
            return None if name in self.dead else self.world.host(name)
        except (AssertionError, KeyError):
            return None

    async def state_lost(self) -> None:
        """See Note [When the state of the optimizer may be lost]."""
        size = len(self.holders)
        kept = [rank for rank, (name, host) in enumerate(self.holders.items()) if host is not None and self.host(name) is host]
        missing = set(range(size)).difference(*(shards_of(rank, size) for rank in kept))
        assert missing, (self.seed, "the state of the optimizer is said to be lost, and it is not", list(self.holders), kept)
        self.seen["state lost"] += 1
        newest = max((host for name in self.world.replicas.names if (host := self.host(name))), key=lambda host: host._replica.version)
        _, state, _ = await self.reference(bits(module_of(newest).state_dict()))
        with contextlib.suppress(DistributedError):  # then the next step says again that it is lost
            await self.world.replicas.load_optimizer_state_dict(state)

    def restart(self, name: str) -> None:
        """Start a worker again."""
        self.world.restart(name)
        self.dead.discard(name)

    async def trouble(self, world: World) -> None:
        later = asyncio.get_running_loop().call_later
        for one, two in itertools.combinations(("driver", *world.names), 2):
            world.network.set_faults(one, two, self.faults)
        for _ in range(0 if self.is_calm else self.random.randint(1, 4)):
            await asyncio.sleep(self.random.uniform(0, 1.0))
            name = self.random.choice(world.names)
            other = self.random.choice([each for each in ("driver", *world.names) if each != name])
            match self.random.choice(("kill", "kill", "reset", "cut", "freeze", "freeze driver")):
                case "kill" if len(world.names) > 1 and not self.seen["killed"]:  # one at a time: the state has to survive somewhere
                    self.seen["killed"] += 1
                    self.dead.add(name)
                    world.network.kill(name, silent=self.random.random() < 0.5)
                    later(self.random.uniform(0.1, 4.0), self.restart, name)
                case "reset":
                    world.network.reset(name, other)
                case "cut":
                    world.network.cut(name, other)
                    later(self.random.uniform(0, 4.0), world.network.heal, name, other)
                case "freeze":
                    world.network.freeze(name, self.random.uniform(0, 4.0))
                case "freeze driver":
                    world.network.freeze("driver", self.random.uniform(0, 4.0))
        await asyncio.sleep(5.0)
        world.network.heal_all()

    async def check(self, world: World) -> None:
        """See Note [The oracle]."""
        states = world.states
        assert all(state == states[0] for state in states), (self.seed, "replicas differ")
        _, _, ranks = await self.reference(states[0])
        hosts = [world.host(name) for name in world.replicas.names]
        ranks.begin(map(self.residuals_of, hosts))
        for host in hosts:
            found = [each.tobytes() for each in host._replica.residuals if each is not None]
            assert found == ranks.bits(self.residuals_of(host)), (self.seed, "a replica has other residuals than one process")

    async def reference(self, state: dict[str, bytes]) -> tuple[dict[str, bytes], Any, Ranks]:
        """Weights, state and residuals of one process that has taken the same steps as replicas of this state."""
        unknown = [index for index, (_, is_known, _) in enumerate(self.history) if not is_known]
        for choice in range(1 << len(unknown)):
            out = {index for place, index in enumerate(unknown) if choice >> place & 1}
            taken = [(shards, begun) for index, (shards, _, begun) in enumerate(self.history) if index not in out]
            found = *await self.alone([shards for shards, _ in taken], [begun for _, begun in taken], ranks := Ranks(self.compress, ())), ranks
            if found[0] == state:
                return found
        raise AssertionError((self.seed, f"no way of taking {len(self.history)} steps leads to this state", dict(self.seen)))

    async def alone(self, given: list[Any], begun: list[list[Any]], ranks: Ranks) -> tuple[dict[str, bytes], Any]:
        """Weights and state of one process that has taken these steps."""
        if self.compress is None:
            return await whole(given, accumulate=self.accumulate)
        model = Net()
        return await serial_replicas(model, given, ranks, self.accumulate, ag.optim.AdamW(model.parameters(), lr=0.05), begun)
