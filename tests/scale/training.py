"""Training a pipeline in many replicas while workers are lost.

Each replica is a `Pipeline` of its own, with one stage on each of its workers; each stage has a group of the workers that have it. The driver lets
every replica carry out its part of the batch, asks every group for its sum and every worker for its step, and puts a spare worker in the
place of one that was lost: with the parameters of the same stage of another replica, which does not come by way of the driver.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import CollectiveError, CommitUnknown, DeadlineError, DistributedError, ReferenceLostError, WorkerLostError
from aiograd.pipeline import Pipeline, make_schedule
from aiograd.testing import simulated_run
from tests.scale.cluster import CENTRES, DRIVER, SimulatedCluster
from tests.scale.stages import ROWS, WIDTH, Stage, service

#: virtual seconds between two losses, and between two looks for a spare worker
CHURN, PAUSE = 10.0, 0.5
#: objects that may be made between two looks of the garbage collector: a thousand workers in one process make many that live long
BETWEEN_COLLECTIONS = 100_000
#: what a step of a group or worker ends with while somebody is lost
LOST = (WorkerLostError, CollectiveError, DeadlineError, ReferenceLostError)


class Size(NamedTuple):
    """How much of everything."""

    stages: int
    replicas: int
    #: workers in all; those without a stage are spares
    workers: int
    microbatches: int
    steps: int
    #: virtual seconds between two losses; 0: none is lost
    churn: float


@dataclass
class Figures:
    """The cost of a run."""

    size: Size
    joined_in: float = 0.0
    #: virtual seconds that the steps took, and when each ended
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
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
        self.driver: dist.Worker
        self.figures = Figures(size)
        self.random = Random(f"{seed}:churn")
        #: (stage, replica) -> module
        self.modules: dict[tuple[int, int], dist.RemoteModule] = {}
        self.pipelines: list[Pipeline] = []
        #: the places of lost workers that nobody has taken
        self.broken: set[tuple[int, int]] = set()
        self.spares: list[str] = []
        #: stages whose groups have to be formed, and how often each was
        self.to_form = set(range(size.stages))
        self.formed: Counter[int] = Counter()
        self.step_number = 0

    async def run(self, cluster: SimulatedCluster) -> Figures:
        """All steps; workers are lost meanwhile."""
        loop = asyncio.get_running_loop()
        self.driver = cluster.cluster.driver
        cluster.on_lost, cluster.on_return = self.was_lost, self.spares.append
        self.figures.joined_in = cluster.joined_in
        await self.place()
        await self.form_groups()
        before = self.sent()
        begun = loop.time()
        churn = loop.create_task(self.lose_workers())
        try:
            while self.step_number < self.size.steps:
                started = loop.time()
                self.figures.losses.append(await self.step(self.step_number + 1))
                self.figures.times.append(loop.time() - started)
                self.step_number += 1
        finally:
            churn.cancel()
        self.figures.seconds = loop.time() - begun
        self.count(before)
        self.figures.digests = await self.everywhere("digest")
        return self.figures

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

    # ---------------------------------------------------------------- where everything is

    async def place(self) -> None:
        """Make every stage on a worker, and the pipelines."""
        size = self.size
        names = [home(stage, replica) for replica in range(size.replicas) for stage in range(size.stages)]
        self.spares += [name for name in self.cluster.names if name not in set(names)]
        places = [(stage, replica) for replica in range(size.replicas) for stage in range(size.stages)]
        modules = await asyncio.gather(*(self.make(stage, name) for (stage, _), name in zip(places, names, strict=True)))
        self.modules = dict(zip(places, modules, strict=True))
        self.pipelines = [self.pipeline(replica) for replica in range(size.replicas)]

    def pipeline(self, replica: int) -> Pipeline:
        """A pipeline of the workers that a replica has now."""
        stages, count = [self.modules[stage, replica] for stage in range(self.size.stages)], self.size.microbatches
        schedule = make_schedule("GPipe", len(stages), count)
        return Pipeline(stages, schedule, worker=self.driver, respawn=lambda stage: self.replace(stage, replica))

    async def make(self, stage: int, name: str) -> dist.RemoteModule:
        """A stage on a worker."""
        return await self.driver.remote_module(name, Stage, stage, stage == self.size.stages - 1)

    def was_lost(self, name: str) -> None:
        """A worker is lost, and with it its stage; when it is back it is a spare."""
        self.broken |= {place for place, module in self.modules.items() if module.peer == name}
        if name in self.spares:
            self.spares.remove(name)

    async def replace(self, stage: int, replica: int) -> dist.RemoteModule:
        """The stage of a lost worker, on a spare one."""
        while True:
            while not self.spares:  # until somebody is back
                await asyncio.sleep(PAUSE)
            name = self.spares.pop(0)
            others = ((stage, other) for other in range(self.size.replicas) if other != replica)
            donor = next(self.modules[place] for place in others if place not in self.broken)
            try:
                module = await self.make(stage, name)
                await module.ref.call("copy", donor.ref)
            except LOST:
                continue  # one more was lost meanwhile
            self.modules[stage, replica] = module
            self.broken.discard((stage, replica))
            self.to_form.add(stage)
            self.figures.counts["replaced"] += 1
            return module

    async def form_groups(self) -> None:
        """Let the workers of each stage whose members have changed join a group."""
        while self.to_form:
            stages = sorted(self.to_form)
            outcomes = await asyncio.gather(*map(self.form_group, stages), return_exceptions=True)
            failed = {stage for stage, outcome in zip(stages, outcomes, strict=True) if isinstance(outcome, BaseException)}
            for outcome in outcomes:
                if isinstance(outcome, BaseException) and not isinstance(outcome, LOST):
                    raise outcome
            self.to_form = failed
            if failed:
                return

    async def form_group(self, stage: int) -> None:
        """One of them."""
        self.formed[stage] += 1
        modules = self.of_stage(stage)
        names, name = [module.peer for module in modules], f"stage{stage}.{self.formed[stage]}"
        await self.all_of(module.ref.call("join", names, name) for module in modules)

    def of_stage(self, stage: int) -> list[dist.RemoteModule]:
        """The modules of a stage, by replica."""
        return [self.modules[stage, replica] for replica in range(self.size.replicas)]

    # ---------------------------------------------------------------- a step

    def batch(self, step: int, replica: int) -> tuple[ag.Tensor, ag.Tensor]:
        """A replica's part of the batch of a step, and its targets."""
        random = np.random.default_rng([step, replica])
        rows = ROWS * self.size.microbatches
        x, y = (ag.tensor(random.standard_normal((rows, WIDTH)).astype(np.float32)) for _ in range(2))
        return x, y

    async def step(self, step: int) -> float:
        """One step of all replicas; returns the mean loss."""
        losses = await asyncio.gather(*(self.forward_backward(step, replica) for replica in range(self.size.replicas)))
        waiting = set(range(self.size.stages))
        while waiting:
            await self.form_groups()
            stages = sorted(waiting - self.to_form)
            asked = (self.all_of(module.ref.call("reduce", step) for module in self.of_stage(stage)) for stage in stages)
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException) and not isinstance(outcome, LOST):
                    raise outcome
            waiting -= {stage for stage, outcome in zip(stages, outcomes, strict=True) if not isinstance(outcome, BaseException)}
            if waiting:
                self.figures.counts["sums taken again"] += 1
                self.to_form |= waiting
                await self.mend(step)
                waiting |= self.to_form
        outcomes = await asyncio.gather(*(module.ref.call("apply", step) for module in self.modules.values()), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not True and not isinstance(outcome, DistributedError):
                raise outcome if isinstance(outcome, BaseException) else DistributedError(f"a worker did not take step {step}")
        return float(np.mean([loss.item() for each in losses for loss in each]))

    async def forward_backward(self, step: int, replica: int) -> list[Any]:
        """A replica's part of a step: afterwards its workers have their gradients."""
        while True:
            try:
                return await self.pipelines[replica].step(*self.batch(step, replica))
            except CommitUnknown:
                self.figures.counts["commits unknown"] += 1
                await self.renew(replica)
            except LOST:
                self.figures.counts["steps of replicas failed"] += 1
            await self.forget(replica)

    async def renew(self, replica: int) -> None:
        """A worker was lost at the moment of the commit, and a pipeline whose step is in doubt for good takes no other: make another pipeline."""
        await self.pipelines[replica].aclose()
        for stage, _ in sorted(place for place in self.broken if place[1] == replica):
            await self.replace(stage, replica)
        self.pipelines[replica] = self.pipeline(replica)

    async def forget(self, replica: int) -> None:
        """Drop what the workers of a replica have of this step."""
        calls = (self.modules[stage, replica].ref.call("forget") for stage in range(self.size.stages))
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, LOST):
                raise outcome

    async def mend(self, step: int) -> None:
        """Workers were lost after their replicas had computed: let these replicas compute again, which puts others in their places."""
        broken = sorted({replica for _, replica in self.broken})
        self.figures.counts["replicas that computed again"] += len(broken)
        for replica in broken:
            await self.forget(replica)
        await asyncio.gather(*(self.forward_backward(step, replica) for replica in broken))

    # ---------------------------------------------------------------- helpers

    async def all_of(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        """The answers of several workers; all are waited for, and the first error is raised."""
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return list(outcomes)

    async def everywhere(self, method: str) -> list[Any]:
        """The answers of all workers that have a stage, by stage and replica."""
        return await self.all_of(self.modules[place].ref.call(method) for place in sorted(self.modules))

    async def lose_workers(self) -> None:
        """Kill a worker now and then, half of them without a word, as when the power fails."""
        while self.size.churn:
            await asyncio.sleep(self.size.churn)
            name = self.random.choice([module.peer for place, module in sorted(self.modules.items()) if place not in self.broken])
            self.cluster.network.kill(name, silent=self.random.random() < 0.5)
            self.figures.lost += 1


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
