"""Runs of each method on simulated lines, and their figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.running.cli.wan.modelled_work import ModelledNetwork, layer_sizes, service
from aiograd.testing import AccessLink, Faults, SimulatedNetwork, simulated_run

COORDINATOR = "coordinator"
SECRET = b"one secret of simulated workers."
#: bytes per second of 1 Mbit/s
MBIT = 125_000.0
#: of what members send, and of the answer to a thousand
UP, ANSWER = dist.TopK(1 / 64, bits=2), dist.TopK(1 / 16, bits=4)
#: for everything: a step of DataParallel takes minutes on a slow line
PATIENCE = 1e6
#: steps or rounds that are run; the first is not measured, for connections learn of the speed of a line
RUN = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The work and the lines of a run.

    Attributes:
        parameters: of the network, float32.
        step_seconds: time of a step's loss and backward.
        steps: local steps in a round.
        mbit: Mbit/s of each worker's line, up and down alike.
        coordinator_mbit: of the coordinator's.
        latency: seconds one way.
        loss: part of the packets that are lost.
        seed: of the network.
    """

    parameters: int
    step_seconds: float
    steps: int
    mbit: float
    coordinator_mbit: float
    latency: float
    loss: float
    seed: int


class Measurement(NamedTuple):
    """The figures of a run.

    Attributes:
        seconds: per step.
        bytes: sent and received by a worker, per step.
        coordinator_bytes: sent and received by the coordinator, per step.
        utilisation: part of the time that a worker computes.
    """

    seconds: float
    bytes: float
    coordinator_bytes: float
    utilisation: float


class SimulatedLines:
    """Workers and a coordinator on a simulated network, each behind its own line.

    Args:
        setting: the lines.
        workers: number of workers.
    """

    def __init__(self, setting: Setting, workers: int) -> None:
        self.setting = setting
        self.names = [f"w{number}" for number in range(workers)]
        lines = {COORDINATOR: AccessLink(*[setting.coordinator_mbit * MBIT] * 2)}
        line = AccessLink(*[setting.mbit * MBIT] * 2)
        faults = Faults(latency=(setting.latency, setting.latency), loss=setting.loss)
        self.network = SimulatedNetwork(setting.seed, faults=faults, access=lambda name: lines.get(name, line))
        self._began = 0.0, 0, 0
        self._over = asyncio.Event()

    def worker(self, name: str, peers: Sequence[str]) -> dist.Worker:
        """The worker of a host; deadlines are far away."""
        limits = dist.Limits(default_deadline=PATIENCE, max_deadline=PATIENCE, unread_seconds=PATIENCE, connections=2 * len(self.names) + 2)
        addresses = {peer: f"sim://{peer}" for peer in peers if peer != name}
        return dist.Worker(name, service=service, peers=addresses, secret=SECRET, transport=self.network.transport(name), limits=limits)

    def begin(self) -> None:
        """Begin to measure."""
        self._began = asyncio.get_running_loop().time(), self._bytes(self.names[-1]), self._bytes(COORDINATOR)

    def end(self, steps: int) -> Measurement:
        """The figures since `begin`, of so many steps."""
        now = asyncio.get_running_loop().time(), self._bytes(self.names[-1]), self._bytes(COORDINATOR)
        seconds, sent, coordinator_sent = ((after - before) / steps for before, after in zip(self._began, now, strict=True))
        return Measurement(seconds, sent, coordinator_sent, self.setting.step_seconds / seconds)

    def _bytes(self, host: str) -> int:
        return sum(counts.bytes for link, counts in self.network.statistics().items() if host in link)

    async def coordinate(self, work: Callable[[SimulatedLines, dist.Worker], Coroutine[Any, Any, Measurement]], *, are_peers: bool) -> Measurement:
        """Do the work on the coordinator.

        Args:
            work: returns its figures.
            are_peers: True if the workers know each other.
        """

        async def serve(name: str) -> None:
            async with ag.Engine(), self.worker(name, self.names if are_peers else ()):
                await self._over.wait()

        async def coordinate() -> Measurement:
            ag.seed(self.setting.seed)
            async with ag.Engine(), self.worker(COORDINATOR, self.names) as coordinator:
                return await work(self, coordinator)

        hosts = [self.network.spawn(name, serve(name)) for name in self.names]
        measurement = await self.network.spawn(COORDINATOR, coordinate())
        self._over.set()
        await asyncio.gather(*hosts)
        return measurement


async def data_parallel(lines: SimulatedLines, coordinator: dist.Worker) -> Measurement:
    """Steps of DataParallel."""
    setting, shards = lines.setting, [(np.zeros(1, np.float32),)] * len(lines.names)
    made = dist.DataParallel.create(
        coordinator, lines.names, ModelledNetwork, setting.parameters, setting.step_seconds, 1, optimizer=ag.optim.SGD, timeout=PATIENCE
    )
    async with await made as replicas:
        for _ in range(RUN):
            lines.begin()
            await replicas.step(shards)
        return lines.end(1)


async def distributed_data_parallel(lines: SimulatedLines) -> Measurement:
    """Steps of DistributedDataParallel; the coordinator takes no part."""
    setting, measurements = lines.setting, []
    ends = asyncio.Event()

    async def member(name: str) -> None:
        async with ag.Engine(), lines.worker(name, lines.names) as worker, await dist.join_group(worker, lines.names, timeout=PATIENCE) as group:
            ddp = dist.DistributedDataParallel(ModelledNetwork(setting.parameters, setting.step_seconds, 1), group, timeout=PATIENCE)
            optimizer = ag.optim.SGD(ddp.module.parameters())
            await ddp.synchronize()
            await group.barrier(timeout=PATIENCE)
            for _ in range(RUN):
                if group.rank == len(lines.names) - 1:
                    lines.begin()
                await (await ddp.module.loss(ag.zeros(1))).backward()
                optimizer.step()
                optimizer.zero_grad()
            measurements.append(lines.end(1))
            if len(measurements) == len(lines.names):
                ends.set()
            await ends.wait()

    await asyncio.gather(*(lines.network.spawn(name, member(name)) for name in lines.names))
    return measurements[-1]


async def local_steps(lines: SimulatedLines, coordinator: dist.Worker, overlap: int = 0) -> Measurement:
    """Rounds of LocalSteps."""
    setting, names = lines.setting, lines.names
    batches = 2 * RUN * setting.steps * len(names)
    made = dist.LocalSteps.create(
        coordinator, names, ModelledNetwork, setting.parameters, setting.step_seconds, batches, steps=setting.steps, optimizer=ag.optim.SGD,
        compress=UP, overlap=overlap, timeout=PATIENCE,
    )  # fmt: skip
    async with await made as training:
        for _ in range(RUN + bool(overlap)):  # the first call commits nothing
            lines.begin()
            await training.round()
        return lines.end(setting.steps)


async def payload_round(lines: SimulatedLines, coordinator: dist.Worker, sizes: tuple[int, int]) -> Measurement:
    """The requests of rounds of LocalSteps with payloads of these sizes: the outcome of the last one with local steps, then the answer."""
    setting, (sent, answered) = lines.setting, sizes
    answer = ag.zeros(answered, dtype=ag.uint8)

    async def ask(function: str, *args: Any) -> None:
        await asyncio.gather(*(coordinator.call(name, function, *args) for name in lines.names))

    for number in range(RUN):
        lines.begin()
        told = [ask("commit")] if number else []
        await asyncio.gather(*told, ask("local_steps", setting.steps * setting.step_seconds, sent))
        await ask("prepare", answer)
    return lines.end(setting.steps)


class Method(NamedTuple):
    """A method of training, and how it is run.

    Attributes:
        name: of the method.
        workers: their number.
        run: a description of the run.
        measure: runs it.
    """

    name: str
    workers: int
    run: str
    measure: Callable[[Setting], Measurement]


def _run(workers: int, work: Callable[[SimulatedLines], Coroutine[Any, Any, Measurement]]) -> Callable[[Setting], Measurement]:
    return lambda setting: simulated_run(lambda: work(SimulatedLines(setting, workers))).value


def methods(workers: int, few: int, overlap: int) -> list[Method]:
    """The methods to compare.

    Args:
        workers: of the rounds of payloads.
        few: workers of everything else.
        overlap: of the rounds that overlap.

    Returns:
        The methods, in the order of the table.
    """

    async def payloads(lines: SimulatedLines) -> Measurement:
        layers = layer_sizes(lines.setting.parameters)
        sent, answered = (sum(map(each.packed_size, layers)) for each in (UP, ANSWER))
        return await lines.coordinate(partial(payload_round, sizes=(sent, answered)), are_peers=False)

    steps, rounds = f"{RUN} steps of the library", f"{RUN} rounds of the library, payloads of TopK(1/64, bits=2)"
    requests = f"requests of {RUN} rounds, payloads of TopK(1/64, bits=2), answers of TopK(1/16, bits=4), no parameters"
    overlapping = partial(local_steps, overlap=overlap)
    return [
        Method("DataParallel", few, steps, _run(few, lambda lines: lines.coordinate(data_parallel, are_peers=True))),
        Method("DistributedDataParallel", few, steps, _run(few, distributed_data_parallel)),
        Method("LocalSteps", few, rounds, _run(few, lambda lines: lines.coordinate(local_steps, are_peers=False))),
        Method(f"LocalSteps(overlap={overlap})", few, rounds, _run(few, lambda lines: lines.coordinate(overlapping, are_peers=False))),
        Method("LocalSteps", workers, requests, _run(workers, payloads)),
    ]
