"""Training a pipeline in many replicas while workers are lost.

One `Pipeline` has all replicas, and one `DistributedOptimizer` the parameters on all workers. When a worker is lost its replica is removed, a spare
worker gets the lost stage, and the replica is added again, with parameters and momenta of another one. Then the step that was given up is
taken again, with as many replicas as before, so it has the same bits.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import resource
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import CommitUnknown, StepError, WorkerLostError
from aiograd.pipeline import Pipeline, make_schedule
from aiograd.testing import simulated_run
from tests.scale import stages
from tests.scale.cluster import CENTRES, DRIVER, SimulatedCluster
from tests.scale.stages import ROWS, WIDTH, Stage, service

#: virtual seconds between two losses, and between two looks for a spare worker
CHURN, PAUSE = 10.0, 0.5
#: objects that may be made between two looks of the garbage collector: a thousand workers in one process make many that live long
BETWEEN_COLLECTIONS = 100_000
OPTIONS = {"lr": 0.05, "momentum": 0.9}


class Size(NamedTuple):
    """How much of everything."""

    stages: int
    replicas: int
    #: workers in all; those without a stage are spares
    workers: int
    microbatches: int
    steps: int
    #: virtual seconds between two losses; 0: none is lost
    churn: float = 0.0
    #: the step whose commit one worker does not live to confirm; 0: none
    unconfirmed: int = 0


@dataclass
class Figures:
    """The cost of a run."""

    size: Size
    joined_in: float = 0.0
    #: virtual seconds that the steps took, and when each ended
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    #: mean loss of each step; nan where the step was committed but not confirmed
    losses: list[float] = field(default_factory=list)
    #: what all links have carried, and what the driver sent, during the steps
    bytes_sent: int = 0
    driver_frames: int = 0
    driver_bytes: int = 0
    driver_connections: int = 0
    mean_connections: float = 0.0
    most_connections: int = 0
    #: processor seconds of the simulation, real, and the most memory of its process in MiB
    processor: float = 0.0
    memory: float = 0.0
    lost: int = 0
    digests: list[bytes] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Training:
    """The driver's side.

    Args:
        cluster: whose workers train.
        size: of the model and the run.
        seed: of the losses.
    """

    def __init__(self, cluster: SimulatedCluster, size: Size, seed: int = 0) -> None:
        self.cluster = cluster
        self.size = size
        self.figures = Figures(size)
        self.random = Random(f"{seed}:churn")
        self.driver: dist.Worker
        self.pipeline: Pipeline
        self.optimizer: dist.DistributedOptimizer
        #: replicas that have lost workers; None in the place of a lost stage
        self.broken: list[list[dist.RemoteModule | None]] = []
        self.spares: list[str] = []

    async def run(self, cluster: SimulatedCluster) -> Figures:
        """All steps; workers are lost meanwhile."""
        loop, figures, size = asyncio.get_running_loop(), self.figures, self.size
        self.driver = cluster.cluster.driver
        cluster.on_lost, cluster.on_return = self.was_lost, self.spares.append
        figures.joined_in, stages.end_process = cluster.joined_in, cluster.network.kill
        replicas = [[home(stage, replica) for stage in range(size.stages)] for replica in range(size.replicas)]
        self.spares += cluster.names[size.stages * size.replicas :]
        modules = await asyncio.gather(*(self.make(stage, name) for replica in replicas for stage, name in enumerate(replica)))
        placed = [list(modules[first : first + size.stages]) for first in range(0, len(modules), size.stages)]
        self.optimizer = dist.DistributedOptimizer(self.driver, ag.optim.SGD, modules, **OPTIONS)
        async with Pipeline(placed, make_schedule("GPipe", size.stages, size.microbatches), worker=self.driver) as self.pipeline:
            before, begun = self.sent(), loop.time()
            churn = loop.create_task(self.lose_workers())
            try:
                for number in range(1, size.steps + 1):
                    started = loop.time()
                    figures.losses.append(await self.step(number))
                    figures.times.append(loop.time() - started)
            finally:
                churn.cancel()
            figures.seconds = loop.time() - begun
            self.count(before)
            where = [module for replica in self.pipeline.replicas for module in replica]
            figures.digests = await asyncio.gather(*(module.ref.call("digest") for module in where))
        return figures

    async def make(self, stage: int, name: str) -> dist.RemoteModule:
        """A stage on a worker."""
        return await self.driver.remote_module(name, Stage, stage, stage == self.size.stages - 1)

    # ---------------------------------------------------------------- a step

    async def step(self, number: int) -> float:
        """A step of the pipeline and of the optimizer; returns the mean loss."""
        random = np.random.default_rng(number)
        rows = ROWS * self.size.microbatches * self.size.replicas
        x, y = (ag.tensor(random.standard_normal((rows, WIDTH)).astype(np.float32)) for _ in range(2))
        if number == self.size.unconfirmed:
            await self.pipeline.replicas[1][0].ref.call("end_at_commit")
            self.figures.lost += 1
        mean = math.nan
        while True:
            try:
                mean = float(np.mean([loss.item() for loss in await self.pipeline.step(x, y)]))
                break
            except WorkerLostError as error:
                self.figures.counts["given up"] += 1
                await self.mend([error.worker])
            except CommitUnknown as error:  # the other replicas have taken it
                self.figures.counts["unconfirmed"] += 1
                await self.mend(error.workers)
                break
        try:
            await self.optimizer.step()
        except StepError as error:  # the other workers have taken it
            await self.mend(error.failed)
        return mean

    async def mend(self, lost: Iterable[str]) -> None:
        """Remove the replicas of lost workers, and add them again with spare workers in these places."""
        for name in lost:
            await self.remove(name)
        while self.broken:
            replica = self.broken[0]
            try:
                for stage, module in enumerate(replica):
                    replica[stage] = module or await self.replace(stage)
                await self.pipeline.add(replica)
                self.broken.remove(replica)
            except WorkerLostError as error:
                await self.remove(error.worker)

    async def remove(self, name: str) -> None:
        """Go on without a lost worker."""
        for replica in self.pipeline.replicas:
            if any(module.peer == name for module in replica):
                await self.pipeline.remove(name)
                self.broken.append(list(replica))
        for broken in self.broken:
            for stage, module in enumerate(broken):
                if module is not None and module.peer == name:
                    broken[stage] = None
                    await self.optimizer.remove(name)

    async def replace(self, stage: int) -> dist.RemoteModule:
        """A stage on a spare worker."""
        while not self.spares:  # until somebody is back
            await asyncio.sleep(PAUSE)
        name = self.spares[0]
        module = await self.make(stage, name)
        await self.optimizer.add([module], like=self.pipeline.replicas[0][stage].peer)
        self.spares.remove(name)
        self.figures.counts["replaced"] += 1
        return module

    # ---------------------------------------------------------------- losses, and the cost

    async def lose_workers(self) -> None:
        """Kill a worker now and then, half of them without a word, as when the power fails."""
        while self.size.churn:
            await asyncio.sleep(self.size.churn)
            name = self.random.choice([module.peer for replica in self.pipeline.replicas for module in replica])
            self.cluster.network.kill(name, silent=self.random.random() < 0.5)
            self.figures.lost += 1

    def was_lost(self, name: str) -> None:
        """A worker is lost; when it is back it is a spare."""
        if name in self.spares:
            self.spares.remove(name)

    def sent(self) -> tuple[int, int, int]:
        """Bytes of all, and frames and bytes of the driver, so far."""
        links = self.cluster.network.statistics()
        own = [link for (source, _), link in links.items() if source == DRIVER]
        return sum(link.bytes for link in links.values()), sum(link.sent for link in own), sum(link.bytes for link in own)

    def count(self, before: tuple[int, int, int]) -> None:
        """Counts of frames sent meanwhile, and of connections now."""
        figures, hosts = self.figures, [self.cluster.network.find(name) for name in self.cluster.names]
        figures.bytes_sent, figures.driver_frames, figures.driver_bytes = (now - then for now, then in zip(self.sent(), before, strict=True))
        driver = self.cluster.network.find(DRIVER)
        figures.driver_connections = 0 if driver is None else len(driver.channels)
        counts = [len(host.channels) for host in hosts if host is not None and not host.owner.is_dead]
        figures.mean_connections, figures.most_connections = sum(counts) / len(counts), max(counts)


def home(stage: int, replica: int) -> str:
    """The worker that has a stage of a replica in the beginning."""
    return f"s{stage:02}r{replica:02}"


def centre_of(name: str) -> int:
    """Replicas lie in data centres of their own, so pipelines do not cross them and sums do; spares are spread over all."""
    return int(name[-2:]) % CENTRES


def new_cluster(size: Size, seed: int = 0) -> SimulatedCluster:
    """A cluster of so many workers."""
    names = [home(stage, replica) for replica in range(size.replicas) for stage in range(size.stages)]
    names += [f"spare{number:03}" for number in range(size.workers - len(names))]
    return SimulatedCluster(names, service, centre_of, seed)


async def train(size: Size, seed: int) -> Figures:
    """A whole run.

    Args:
        size: how much of everything.
        seed: of network and losses.
    """
    cluster = new_cluster(size, seed)
    figures: Figures = await cluster.run(Training(cluster, size, seed).run)
    return figures


def run_training(size: Size, seed: int = 0) -> Figures:
    """One run of `train`, with what it took of this process."""
    prepare()
    begun = time.process_time()
    figures: Figures = simulated_run(train, size, seed, seed=seed).value
    figures.processor, figures.memory = time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return figures


def prepare() -> None:
    """Prepare a process: losses are meant to happen, and are no news."""
    logging.disable(logging.CRITICAL)
    gc.set_threshold(BETWEEN_COLLECTIONS, 20, 100)
