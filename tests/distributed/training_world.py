"""Trainings of several workers on a simulated network, in virtual time, and runs of them that a seed decides."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Any

from aiograd import distributed as dist
from aiograd.testing import Faults, SimulatedNetwork, simulated_run
from tests.distributed.workers import SECRET

LEASE = 8.0
LIMITS = dist.Limits(default_deadline=20.0, lease=LEASE)


class TrainingWorld(ABC):
    """A driver with members of one training on workers of a simulated network.

    Args:
        names: of the workers; the first `members` of them have a member.
        members: None: all.
        module: the class of the model.
        seed: of the network.
        options: of the training.
    """

    def __init__(self, names: Sequence[str], members: int | None, module: Any, seed: int, options: Mapping[str, Any]) -> None:
        self.network = SimulatedNetwork(seed, faults=Faults(latency=(0.001, 0.002)))
        self.names = list(names)
        self.first = self.names[: members or len(names)]
        self.module = module
        self.options = dict(options)
        self.over = asyncio.Event()
        self.workers: dict[str, dist.Worker] = {}
        #: the processes of workers, killed ones too
        self.servers: list[asyncio.Future[None]] = []
        self.driver: dist.Worker

    @property
    @abstractmethod
    def coordinator(self) -> Any:
        """The coordinator of the training."""

    @abstractmethod
    def peers(self, name: str) -> list[str]:
        """The names of the workers that this one has a URL of."""

    @abstractmethod
    def service(self, name: str) -> dist.Service:
        """The service of a worker."""

    @abstractmethod
    async def drive(self, main: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run `main` with the training, on the driver."""

    async def serve(self, name: str) -> None:
        async with self.worker(name):
            await self.over.wait()

    def worker(self, name: str) -> dist.Worker:
        peers = {other: f"sim://{other}" for other in self.peers(name)}
        made = dist.Worker(name, service=self.service(name), peers=peers, secret=SECRET, transport=self.network.transport(name), limits=LIMITS)
        self.workers[name] = made
        return made

    def start(self, name: str) -> None:
        self.servers.append(self.network.spawn(name, self.serve(name)))

    def restart(self, name: str) -> None:
        self.network.restart(name)
        self.start(name)

    @contextlib.asynccontextmanager
    async def running(self, main: Callable[[Any], Awaitable[Any]]) -> AsyncIterator[asyncio.Future[Any]]:
        """Run `main` on the driver; the workers are there as long as the block."""
        for name in self.names:
            self.start(name)
        driving = self.network.spawn("driver", self.drive(main))
        try:
            yield driving
        finally:
            driving.cancel()
            self.over.set()
            await asyncio.gather(driving, *self.servers, return_exceptions=True)

    def simulate(self, main: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
        """Run `main` on the driver to its end, and see that nothing is left running."""

        async def run() -> Any:
            async with self.running(main) as driving:
                return await driving

        run_ = simulated_run(run, **options)
        assert not run_.leftover_tasks, run_.leftover_tasks
        return run_.value

    # ---------------------------------------------------------------- members on their workers

    def member(self, name: str) -> Any:
        """The member on a worker, as it is there."""
        remote = self.coordinator.find(name)
        assert remote is not None
        return self.workers[name]._objects.table._held[remote.ref.key].value

    def around(self, name: str, method: str, action: Callable[[], Any], *, is_before: bool) -> None:
        """Do something when a member is asked for something, before it does it or before the answer goes out; once."""
        member = self.member(name)
        original = getattr(member, method)

        async def wrapped(*args: Any) -> Any:
            vars(member).pop(method, None)
            if is_before:
                action()
            result = await original(*args)
            if not is_before:
                action()
            return result

        setattr(member, method, wrapped)


class SeededRun(ABC):
    """One run that its seed decides.

    Args:
        seed: decides everything.
        what: the kind of run; another one has other random numbers.
        calm: one of so many seeds has no faults.
    """

    world: TrainingWorld

    def __init__(self, seed: int, what: str, calm: int) -> None:
        self.random = Random(f"{seed}:{what}")
        self.seed = seed
        self.is_calm = seed % calm == 0
        self.faults = Faults(latency=(1e-4, 5e-3)) if self.is_calm else Faults.drawn(Random(f"{seed}:faults"))
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Train; returns counts of events.

        No garbage is collected meanwhile: a reference that goes tells its worker, and when it goes has to depend on the seed alone.
        """
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self.world.simulate(self.train, seed=self.seed, order=self.random.choice(("fifo", "permuted")))
        finally:
            if was_enabled:
                gc.enable()
            gc.collect()
        return self.seen

    @abstractmethod
    async def train(self, world: Any) -> None:
        """Train, while the network and the workers fail, and see that the promises hold."""
