"""Training on real processes: three replicas take steps while their workers are killed with SIGKILL and stopped with SIGSTOP, one every few steps.

The weights must be those of one process that has taken the same steps, and a step that fails must say which worker is lost.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from random import Random

import aiograd as ag
from aiograd.distributed import DataParallel, LocalCluster
from aiograd.errors import DistributedError, WorkerLostError
from tests.chaos.processes import Findings
from tests.distributed.data_parallel.models import Net, batches, bits, numbers, serial

SERVICE = "tests.distributed.data_parallel.models:service"
RATE = 0.02
#: steps between two faults; seconds for which a worker is stopped
EVERY, STOPS = 10, (0.2, 3.0)


class Training:
    """One run.

    Args:
        seed: decides about the faults.
        steps: to be taken.
    """

    def __init__(self, seed: int, steps: int) -> None:
        self.random = Random(f"{seed}:training")
        self.given = batches(steps)
        self.findings = Findings()
        self.losses: list[list[float]] = []

    async def run(self) -> Findings:
        """Train, with a fault every few steps, and compare the weights."""
        began = time.monotonic()
        faults: list[asyncio.Task[None]] = []
        async with LocalCluster(3, service=SERVICE, max_restarts=1_000_000) as self.cluster:
            options = {"lr": RATE}
            names = self.cluster.workers
            async with await DataParallel.create(self.cluster.driver, names, Net, optimizer=ag.optim.AdamW, optimizer_options=options) as replicas:
                while len(self.losses) < len(self.given):
                    if len(self.losses) >= EVERY * (len(faults) + 1):
                        faults.append(asyncio.create_task(self.fault()))
                    await self.step(replicas)
                await asyncio.gather(*faults)
                while (state := await self.state(replicas)) is None:
                    pass
        alone = Net()
        losses = await serial(alone, ag.optim.AdamW(alone.parameters(), lr=RATE), self.given)
        if (self.losses, state) != (losses, bits(alone.state_dict())):
            self.findings.wrong.append("replicas on real processes have other bits than one process")
        self.findings.counts["training: steps"] += len(self.losses)
        self.findings.timed("training under faults, a run", time.monotonic() - began)
        return self.findings

    async def step(self, replicas: DataParallel) -> None:
        """Try to take a step; where a worker is lost, put another replica in its place."""
        began = time.monotonic()
        try:
            self.losses.append(numbers(await replicas.step(self.given[len(self.losses)])))
        except WorkerLostError as error:
            self.findings.timed("training: a step that fails", time.monotonic() - began)
            await self.recover(replicas, error.worker)
        except DistributedError as error:
            self.findings.wrong.append(f"a step failed after {time.monotonic() - began:.1f} s without naming a lost worker: {error!r}")

    async def recover(self, replicas: DataParallel, name: str) -> None:
        """Wait until a worker is there, and see that it has a replica."""
        began = time.monotonic()
        while True:
            await self.cluster.wait_running(name)
            try:
                await replicas.add(name)
                break
            except WorkerLostError as error:  # it is stopped yet, or the next fault has come
                name = error.worker if error.worker in replicas.names else name
        self.findings.timed("training: until a lost worker has a replica", time.monotonic() - began)

    async def state(self, replicas: DataParallel) -> dict[str, bytes] | None:
        """The weights, once they can be read."""
        try:
            return bits(await replicas.state_dict())
        except WorkerLostError as error:
            await self.recover(replicas, error.worker)
            return None

    async def fault(self) -> None:
        """Kill or stop a worker at some time within the next steps."""
        name = self.random.choice(self.cluster.workers)
        await asyncio.sleep(self.random.uniform(0, 0.05))
        await self.cluster.wait_running(name)
        pid = self.cluster.pids[name]
        if self.random.random() < 0.5:
            self.findings.counts["training: SIGKILL"] += 1
            os.kill(pid, signal.SIGKILL)
            return
        self.findings.counts["training: SIGSTOP"] += 1
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self.random.uniform(*STOPS))
        finally:
            os.kill(pid, signal.SIGCONT)


async def run_training(runs: int, *, first: int = 0, steps: int = 200) -> Findings:
    """Train some times.

    Args:
        runs: how often.
        first: the first seed.
        steps: of each run.
    """
    findings = Findings()
    for seed in range(first, first + runs):
        findings.add(await Training(seed, steps).run())
    return findings
