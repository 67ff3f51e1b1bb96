"""Local steps: the bytes of rounds and of steps that average every gradient, for real, and the frontier of loss over bytes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.testing import Faults, SimulatedNetwork, simulated_run
from tests.benchmarks.frontier import (
    AVERAGED_BYTES,
    INT4,
    MEMBERS,
    POINTS,
    RESULTS,
    STRONG,
    TOP4,
    TOP8,
    Point,
    Sweep,
    round_payloads,
    shown,
    trained,
)  # fmt: skip
from tests.benchmarks.harness import Settings, Table, goal_cells, threads

NAMES = tuple(f"m{index}" for index in range(MEMBERS))
#: the width of the layer that bytes are measured with, and the number of its parameters
WIDTH = 500
MEASURED = WIDTH * WIDTH + WIDTH
#: points of a run that says whether it works
TINY = (Point(total=4, steps=2, compress=TOP8, answer=INT4), Point(total=4, steps=2, outer=STRONG))
SECRET = bytes(range(32))
service = dist.Service()


# -------------------------------------------------------------------- bytes


@service.reference
class Wide(nn.Module):
    """A layer, and a loss that takes its time."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, generator=ag.Generator(0))
        self.width, self.seconds = width, seconds

    def forward(self, rows: Any) -> Any:
        return self.layer(rows)

    def data(self) -> Any:
        rows = np.random.default_rng(0).standard_normal((64, self.width)).astype(np.float32)
        return ag.data.DataLoader(list(rows), batch_size=2, generator=ag.Generator(1))

    async def loss(self, rows: Any) -> Any:
        await asyncio.sleep(self.seconds)
        return (self(rows) ** 2).mean()


def members_bytes(network: SimulatedNetwork) -> int:
    """The bytes that the members have sent and received, sealed frames and heartbeats included."""
    return sum(found.bytes * sum(host in NAMES for host in pair) for pair, found in network.statistics().items())


class Lines:
    """Four members and a driver on a simulated network.

    Args:
        width: of the layer that they train.
        seconds: that the loss of a step takes.
    """

    def __init__(self, width: int, seconds: float) -> None:
        self.network = SimulatedNetwork(1, faults=Faults(latency=(0.01, 0.02)))
        self.width, self.seconds = width, seconds

    def worker(self, name: str) -> dist.Worker:
        peers = {other: f"sim://{other}" for other in (*NAMES, "driver") if other != name}
        return dist.Worker(name, service=service, peers=peers, secret=SECRET, transport=self.network.transport(name))

    async def run(self, mains: Mapping[str, Any]) -> Any:
        """Run what each host does; returns the result of the last, after which the others are cancelled."""
        running = [self.network.spawn(name, main) for name, main in mains.items()]
        result = await running[-1]
        for each in running[:-1]:
            each.cancel()
        await asyncio.gather(*running[:-1], return_exceptions=True)
        return result

    async def serve(self, name: str) -> None:
        async with self.worker(name):
            await asyncio.Event().wait()

    async def local(self, steps: int, rounds: int, compress: Any, answer: Any) -> float:
        """The bytes of a round."""

        async def drive() -> float:
            async with self.worker("driver") as driver:
                options: dict[str, Any] = {"steps": steps, "compress": compress, "answer": answer}
                training = await dist.LocalSteps.create(driver, NAMES, Wide, self.width, self.seconds, **options)
                async with training:
                    await training.round()
                    before = members_bytes(self.network)
                    for _ in range(rounds):
                        await training.round()
                    return (members_bytes(self.network) - before) / rounds

        return float(await self.run({name: self.serve(name) for name in NAMES} | {"driver": drive()}))

    async def averaged(self, steps: int) -> float:
        """The bytes of so many steps of DistributedDataParallel."""
        marks: list[int] = []

        async def train(name: str) -> float:
            async with self.worker(name) as worker:
                group = await dist.join_group(worker, list(NAMES))
                module = Wide(self.width, self.seconds)
                ddp = dist.DistributedDataParallel(module, group)
                await ddp.synchronize()
                optimizer = ag.optim.SGD(module.parameters(), lr=0.01)
                rows = ag.tensor(np.ones((2, self.width), np.float32))
                for step in range(steps + 1):
                    if step == 1:
                        await group.barrier()
                        marks.append(members_bytes(self.network))
                    optimizer.zero_grad()
                    await asyncio.sleep(self.seconds)
                    await (ddp(rows) ** 2).mean().backward()
                    optimizer.step()
                await group.barrier()
                marks.append(members_bytes(self.network))
                await group.barrier()
            return float(marks[MEMBERS] - marks[0])

        return float(await self.run({name: train(name) for name in NAMES}))


def bytes_table(settings: Settings) -> tuple[Table, tuple[float, float]]:
    """The bytes of 30 steps and of a round; the bytes beyond payloads of a round and member, and of each step, heartbeats above all."""
    width, steps = settings.of(WIDTH, 20), settings.of(30, 2)
    size = width * width + width
    averaged = simulated_run(lambda: Lines(width, 0.3).averaged(steps)).value
    table = Table(
        f"Bytes sent and received, {MEMBERS} members, {size:,} parameters, 0.3 s a step, frames and heartbeats included",
        ["side", "bytes", "of it payloads", "ratio", "target", "beyond", "verdict"],
    )
    table.add(f"DistributedDataParallel, {steps} steps", f"{averaged:,.0f}", f"{AVERAGED_BYTES * size * MEMBERS * steps:,}", "1", "", "", "")
    sides = [(steps, *each) for each in ((dist.TopK(), None), (TOP4, None), (TOP8, None), (TOP8, TOP8), (INT4, None), (INT4, INT4), (None, None))]
    beyond: dict[int, float] = {}
    for count, compress, answer in [(3 * steps, dist.TopK(), None), *sides]:
        found = simulated_run(lambda each=(count, 2, compress, answer): Lines(width, 0.3).local(*each)).value
        payloads = round_payloads([width * width, width], compress, answer)
        beyond.setdefault(count, (found - payloads) / MEMBERS)
        ratio = averaged * count / steps / found
        target = 1000.0 if (count, compress, answer) == sides[0] else None
        cells = goal_cells(None if settings.tiny else ratio, target, None, higher=True)
        name = f"LocalSteps, a round of {count}, {shown(compress)}, answer {shown(answer)}"
        table.add(name, f"{found:,.0f}", f"{payloads:,}", f"{ratio:,.0f}", *cells)
    each_step = (beyond[3 * steps] - beyond[steps]) / (2 * steps)
    table.notes.append(
        f"beyond its payloads a round takes {beyond[steps] - steps * each_step:,.0f} bytes a member, and {each_step:.0f} for each of its steps"
    )
    return table, (beyond[steps] - steps * each_step, each_step)


def run(settings: Settings) -> Iterator[Table]:
    """Bytes, and the frontier. The sweep goes on where it was stopped, and takes hours."""
    with threads(1):
        table, beyond = bytes_table(settings)
    yield table
    with tempfile.TemporaryDirectory() as folder:
        sweep, points = (Sweep(Path(folder) / "points.jsonl", 20_000, 8), TINY) if settings.tiny else (Sweep(RESULTS), POINTS)
        trained(sweep, points)
    yield sweep.table(points, beyond, MEASURED)
