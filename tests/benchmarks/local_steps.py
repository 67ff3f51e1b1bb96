"""Local steps: the held-out loss over the bytes that members exchange, beside steps that average every gradient, and the bytes of both for real.

Note [One process]
    The members of the frontier are `LocalTraining` objects of this process, and payloads, means and outer steps are the library's. So a point has the
    bits of a training over workers, and costs its local steps only. Bytes are `packed_size` and the measured bytes of a round of workers beyond it.

Note [Equal samples]
    Both sides read the same batches: a step of the averaged side reads the batches of one local step of all four members. The optimizer is
    the same class with the same options, its decay included.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.distributed.local_steps.local_training import LocalTraining
from aiograd.testing import Faults, SimulatedNetwork, simulated_run
from tests.benchmarks.harness import Settings, Table, goal_cells, threads
from tests.benchmarks.text_model import BATCH, DecayingAdamW, Learner, Text

MEMBERS = 4
NAMES = tuple(f"m{index}" for index in range(MEMBERS))
#: bytes that a member sends and receives for each parameter and step where every gradient is averaged: in a ring of four 3/4 of all float32 twice
AVERAGED_BYTES = 12
#: the width of the layer that bytes are measured with, and the number of its parameters
WIDTH = 500
MEASURED = WIDTH * WIDTH + WIDTH
SECRET = bytes(range(32))
service = dist.Service()

TOP4, TOP8, INT4 = dist.TopK(1 / 16, bits=4), dist.TopK(1 / 8, bits=4), dist.Blockwise(4)
PLAIN: dict[str, Any] = {"lr": 1.0}
MILD: dict[str, Any] = {"lr": 0.9, "momentum": 0.5, "nesterov": True}
HEAVY: dict[str, Any] = {"lr": 0.9, "momentum": 0.5}
FIRM: dict[str, Any] = {"lr": 0.9, "momentum": 0.8, "nesterov": True}
STRONG: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@dataclass(frozen=True, slots=True)
class Point:
    """One training of the frontier: `LocalSteps.create` with these arguments.

    Attributes:
        decays: the inner learning rate falls with a cosine.
    """

    steps: int
    compress: dist.Compressor | None
    answer: dist.Compressor | None = None
    outer: Mapping[str, Any] = field(default_factory=lambda: MILD)
    decays: bool = True


#: the order of the sweep: the promising ones first
POINTS = (
    Point(100, INT4, INT4),
    Point(100, INT4, INT4, FIRM),
    Point(30, TOP8, TOP8),
    Point(100, None),
    Point(100, TOP8),
    Point(100, INT4, INT4, STRONG),
    Point(30, None),
    Point(100, INT4, INT4, PLAIN),
    Point(167, INT4, INT4),
    Point(100, TOP8, TOP8),
    Point(30, TOP4),
    Point(30, TOP4, TOP4),
    Point(30, dist.TopK()),
    Point(167, INT4),
    Point(167, TOP8),
    Point(100, TOP4),
    Point(100, TOP8, None, STRONG),
    Point(100, TOP8, None, PLAIN),
    Point(100, TOP8, None, HEAVY),
    Point(100, INT4, INT4, MILD, decays=False),
    Point(100, TOP8, None, MILD, decays=False),
    Point(100, None, None, STRONG),
    Point(167, None),
    Point(100, dist.TopK()),
    Point(167, TOP4),
    Point(167, dist.TopK()),
)


# -------------------------------------------------------------------- the two sides


async def held_out(module: Learner, windows: Any) -> float:
    """The mean loss of the held-out windows."""
    with ag.no_grad():
        losses = [module.predictor(part).item() for part in np.array_split(windows, max(1, len(windows) // 128))]
    return float(np.mean(losses))


def member_of(text: Text, point: Point, total: int) -> LocalTraining:
    """A member that has adopted its first base."""
    module = Learner(text)
    inner = DecayingAdamW(module.parameters(), total=total if point.decays else None)
    holders = (SimpleNamespace(optimizer=each) for each in (inner, ag.optim.SGD(module.parameters(), **point.outer)))
    training = LocalTraining(module, *holders, "loss", "data", None, (point.compress, point.answer))
    training.adopt(0, (0,), {}, is_new=True)
    return training


async def by_local_steps(text: Text, point: Point, steps: int, windows: Any) -> tuple[float, LocalTraining]:
    """The held-out loss after about so many local steps of each member, and a member."""
    rounds = max(1, round(steps / point.steps))
    trainings = [member_of(text, point, rounds * point.steps) for _ in range(MEMBERS)]
    read = 0
    rest: list[Any] = []
    for number in range(rounds):
        results = []
        for training in trainings:
            batches = [(0, read + index) for index in range(point.steps)]
            results.append(await training.compute(number, batches, is_fresh=False, carried=None, overlap=0))
            read += point.steps
        payloads, rows = [each.payload for each in results], [each.rows for each in results]
        kind, answer, rest = trainings[0].form.formed(payloads, rows, rest)
        digests = set()
        for training in trainings:
            digests.add(training.base.stage(training.form.means(kind, answer, rows), {}))
            training.base.commit()
            training.exchanged(training.contribution(number))
        assert len(digests) == 1, "members have different bases"
    first = trainings[0]
    first._reset(False)
    return await held_out(first.module, windows), first


async def by_averages(text: Text, decays: bool, steps: int, windows: Any) -> float:
    """The held-out loss after so many steps with the mean gradient of all four batches."""
    module = Learner(text)
    optimizer = DecayingAdamW(module.parameters(), total=steps if decays else None)
    training = member_of(text, Point(1, None), steps)
    for step in range(steps):
        indices = [index for member in range(MEMBERS) for index in training.order.indices(0, step * MEMBERS + member)]
        loss = await module.loss(await training.loader.read(indices))
        optimizer.zero_grad()
        await loss.backward()
        optimizer.step()
    return await held_out(module, windows)


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


def round_payloads(sizes: list[int], compress: dist.Compressor | None, answer: dist.Compressor | None) -> int:
    """The bytes of the payloads of a round: each member sends its own, and gets the answer, or all of them, or the mean where that is shorter."""
    whole = 4 * sum(sizes)
    payload = whole if compress is None else sum(map(compress.packed_size, sizes))
    return MEMBERS * (payload + (min(whole, MEMBERS * payload) if answer is None else sum(map(answer.packed_size, sizes))))


# -------------------------------------------------------------------- the frontier


@dataclass(slots=True)
class Row:
    """The results of a point.

    Attributes:
        payloads: bytes of the averaged side over bytes of the payloads.
        ratio: the same, over all bytes of members with `MEASURED` parameters.
        share: the loss over the loss of the averaged side.
    """

    point: Point
    payloads: float
    ratio: float
    loss: float
    share: float


async def frontier(settings: Settings, beyond: tuple[float, float]) -> Table:
    """The held-out loss of every point. All of a step runs on the loop: it is short, and a change of threads costs more."""
    ag.tune_malloc()
    text = Text.read(settings.of(4_000_000, 20_000))
    windows = text.windows(settings.of(1024, 8))
    steps = settings.of(3000, 4)
    points = list(POINTS)
    if settings.tiny:
        points = [Point(2, TOP8, INT4), Point(2, None, None, STRONG)]
    averages: dict[bool, float] = {}
    rows: list[Row] = []
    sizes: list[int] = []
    for point in points:
        began = time.perf_counter()
        if point.decays not in averages:
            averages[point.decays] = await by_averages(text, point.decays, steps, windows)
            progress(f"mean gradients, decays={point.decays}: {averages[point.decays]:.4f}", began, settings)
            began = time.perf_counter()
        loss, member = await by_local_steps(text, point, steps, windows)
        sizes = [each.size for each in member.base.arrays]
        payloads = round_payloads(sizes, point.compress, point.answer) / MEMBERS / sum(sizes)
        others = (beyond[0] + point.steps * beyond[1]) / MEASURED
        gradients = point.steps * AVERAGED_BYTES
        row = Row(point, gradients / payloads, gradients / (payloads + others), loss, loss / averages[point.decays])
        rows.append(row)
        progress(f"{point}: {row.payloads:.0f} x, {row.ratio:.0f} x, {loss:.4f}, {row.share:.4f}", began, settings)
    return frontier_table(rows, averages, sum(sizes), steps)


def frontier_table(rows: list[Row], averages: Mapping[bool, float], size: int, steps: int) -> Table:
    """Rows by ratio; a mark for each row that no other row beats in both ratio and loss."""
    table = Table(
        f"Held-out loss over bytes, {MEMBERS} members, {size:,} parameters, {steps:,} steps of {BATCH} windows each",
        ["H", "compressor", "answer", "outer optimizer", "inner rate", "DDP / payloads", "DDP / all bytes", "loss", "/ DDP", "frontier"],
    )
    for row in sorted(rows, key=lambda each: each.ratio):
        outer = ", ".join(f"{name} {value}" for name, value in row.point.outer.items() if value is not True)
        outer += ", Nesterov" if row.point.outer.get("nesterov") else ""
        beaten = any(other.ratio >= row.ratio and other.share < row.share for other in rows)
        cells = f"{row.payloads:,.0f}", f"{row.ratio:,.0f}", f"{row.loss:.4f}", f"{row.share:.4f}", "" if beaten else "*"
        table.add(row.point.steps, shown(row.point.compress), shown(row.point.answer), outer, shown_rate(row.point.decays), *cells)
    found = ", ".join(f"{loss:.4f} ({shown_rate(decays)} rate)" for decays, loss in averages.items())
    table.notes.append(f"all bytes: with frames and heartbeats at {MEASURED:,} parameters and 0.3 s a step; DDP without either")
    table.notes.append(f"DDP: {found}; wanted: at least 1,000 times fewer bytes at a loss of at most 1.01 times")
    return table


def shown(compress: dist.Compressor | None) -> str:
    """A compressor in a cell."""
    if isinstance(compress, dist.TopK):
        return f"TopK(1/{1 / compress.fraction:.0f}, bits={compress.bits})"
    return "none" if compress is None else f"Blockwise({compress.bits})"


def shown_rate(decays: bool) -> str:
    """The course of the inner learning rate in a cell."""
    return "cosine" if decays else "constant"


def progress(text: str, began: float, settings: Settings) -> None:
    """Say on standard error how far the sweep is: it takes an hour."""
    if not settings.tiny:
        print(f"{text} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)


def run(settings: Settings) -> Iterator[Table]:
    """Bytes, and the frontier."""
    with threads(1):
        table, beyond = bytes_table(settings)
        yield table
        yield ag.run(_on_the_loop(settings, beyond))


async def _on_the_loop(settings: Settings, beyond: tuple[float, float]) -> Table:
    async with ag.Engine(inline_ns=1e9):
        return await frontier(settings, beyond)
