"""Local steps: the held-out loss over the bytes that members exchange, beside steps that average every gradient, and the bytes of both for real.

Note [One process]
    The members of the frontier are `LocalTraining` objects of this process, and payloads, means and outer steps are the library's. So a point has the
    bits of a training over workers, and costs its local steps only. Bytes are `packed_size` and what a round of workers takes beyond, measured.

Note [Equal samples]
    Every side reads the same batches of the same order: a step of the averaged side those that the four members read in one local step each, up
    to their order. The optimizer is the same class with the same options, its decay included.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.distributed.local_steps.local_training import LocalTraining
from aiograd.nn import functional as F
from aiograd.testing import Faults, SimulatedNetwork, simulated_run
from tests.benchmarks.harness import Settings, Table, goal_cells, threads

MEMBERS, BATCH, CONTEXT = 4, 16, 64
NAMES = tuple(f"m{index}" for index in range(MEMBERS))
#: of the inner AdamW
RATE, LAST = 3e-3, 0.02
SECRET = bytes(range(32))
service = dist.Service()

NONE: dict[str, Any] = {"lr": 1.0}
MILD: dict[str, Any] = {"lr": 0.9, "momentum": 0.5, "nesterov": True}
STRONG: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
PLAIN: dict[str, Any] = {"lr": 0.9, "momentum": 0.5}


@dataclass(frozen=True, slots=True)
class Point:
    """One training of the frontier: `LocalSteps.create` with these arguments.

    Attributes:
        decays: the inner learning rate falls with a cosine.
    """

    steps: int
    compress: dist.Compressor | None
    outer: Mapping[str, Any] = field(default_factory=lambda: MILD)
    decays: bool = True


#: the order of the sweep: the promising ones first
POINTS = (
    Point(100, dist.TopK(1 / 8, bits=4)),
    Point(167, dist.Blockwise(4)),
    Point(100, None),
    Point(30, dist.TopK(1 / 16, bits=4)),
    Point(100, dist.TopK(1 / 8, bits=4), STRONG),
    Point(100, dist.TopK(1 / 8, bits=4), NONE),
    Point(167, dist.TopK(1 / 8, bits=4)),
    Point(100, dist.TopK(1 / 16, bits=4)),
    Point(30, dist.TopK(1 / 64, bits=2)),
    Point(167, dist.Blockwise(4), STRONG),
    Point(167, dist.Blockwise(4), NONE),
    Point(100, dist.TopK(1 / 8, bits=4), decays=False),
    Point(100, dist.Blockwise(4)),
    Point(30, None),
    Point(30, dist.Blockwise(4)),
    Point(30, dist.TopK(1 / 8, bits=4)),
    Point(100, dist.TopK(1 / 8, bits=4), PLAIN),
    Point(100, dist.TopK(1 / 64, bits=2)),
    Point(167, None),
    Point(167, dist.TopK(1 / 16, bits=4)),
    Point(167, dist.TopK(1 / 64, bits=2)),
    Point(30, None, STRONG, decays=False),
    Point(100, None, STRONG, decays=False),
    Point(167, dist.Blockwise(4), decays=False),
)


# -------------------------------------------------------------------- the text and the model


@dataclass(frozen=True, slots=True)
class Text:
    """The characters of numpy's own modules as numbers: nine tenths in windows that begin every `stride` characters, the rest held out."""

    train: Any
    held_out: Any
    characters: int
    stride: int = 16

    @classmethod
    def read(cls, limit: int) -> Text:
        """Read at most so many characters."""
        paths = sorted(Path(np.__file__).parent.rglob("*.py"))
        random.Random(0).shuffle(paths)
        text = "".join(path.read_text(encoding="utf-8") for path in paths)[:limit]
        text = "".join(each if each.isascii() and (each.isprintable() or each == "\n") else "?" for each in text)
        characters, numbers = np.unique(np.array(list(text)), return_inverse=True)
        end = len(numbers) * 9 // 10
        return cls(numbers[:end].astype(np.int64), numbers[end:].astype(np.int64), len(characters))

    def __len__(self) -> int:
        return (len(self.train) - CONTEXT - 1) // self.stride

    def __getitem__(self, index: int) -> Any:
        return self.train[index * self.stride : index * self.stride + CONTEXT + 1]

    def windows(self, count: int) -> Any:
        """Windows of the held-out text, evenly spaced."""
        begins = np.linspace(0, len(self.held_out) - CONTEXT - 1, count).astype(np.int64)
        return self.held_out[begins[:, None] + np.arange(CONTEXT + 1)]


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each after a normalisation and around a shortcut."""

    def __init__(self, width: int, heads: int, generator: ag.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.Linear(width, 3 * width, generator=generator)
        self.project = nn.Linear(width, width, generator=generator)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width, generator=generator), nn.GELU(), nn.Linear(4 * width, width, generator=generator))

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        both = self.attend(self.norms[0](x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (both[:, :, index].swapaxes(1, 2) for index in range(3))
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).swapaxes(1, 2).reshape(batch, length, width))
        return x + self.mix(self.norms[1](x))


class Predictor(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, characters: int, width: int = 32, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        generator = ag.Generator(0)
        self.embed = nn.Embedding(characters, width, generator=generator)
        self.place = nn.Parameter(generator.normal((CONTEXT, width)) * 0.1)
        self.blocks = nn.ModuleList([Block(width, heads, generator) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, generator=generator)

    def forward(self, windows: Any) -> Any:
        x = self.embed(windows[:, :-1]) + self.place
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), windows[:, 1:].reshape(-1))


class Learner(nn.Module):
    """The predictor, compiled, with the batches of a text."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        self.predictor = ag.compile(Predictor(text.characters))
        self.text = text

    def data(self) -> Any:
        return ag.data.DataLoader(self.text, batch_size=BATCH, shuffle=True, drop_last=True, generator=ag.Generator(1))

    async def loss(self, windows: Any) -> Any:
        return self.predictor(windows)


class DecayingAdamW(ag.optim.AdamW):
    """AdamW with a learning rate that falls with a cosine to `LAST` of it in `total` steps; None: it stays."""

    def __init__(self, params: Any, lr: float = RATE, total: int | None = None) -> None:
        super().__init__(params, lr=lr)
        self._peak, self._total, self._taken = lr, total, 0

    def step(self, *args: Any, **options: Any) -> Any:
        if self._total is not None:
            rate = LAST + (1 - LAST) * (1 + math.cos(math.pi * min(1.0, self._taken / self._total))) / 2
            self.param_groups[0]["lr"] = self._peak * rate
        self._taken += 1
        return super().step(*args, **options)


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
    training = LocalTraining(module, *holders, "loss", "data", None, (point.compress, None))
    training.adopt(0, (0,), {}, is_new=True)
    return training


async def by_local_steps(text: Text, point: Point, steps: int, windows: Any) -> tuple[float, LocalTraining]:
    """The held-out loss after about so many local steps of each member, and a member."""
    rounds = max(1, round(steps / point.steps))
    trainings = [member_of(text, point, rounds * point.steps) for _ in range(MEMBERS)]
    read = 0
    for number in range(rounds):
        results = []
        for training in trainings:
            batches = [(0, read + index) for index in range(point.steps)]
            results.append(await training.compute(number, batches, is_fresh=False, carried=None, overlap=0))
            read += point.steps
        payloads, rows = [each.payload for each in results], [each.rows for each in results]
        kind, answer, _ = trainings[0].form.formed(payloads, rows, [])
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
    """The bytes that the members have sent and received, those of sealed frames and heartbeats included."""
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

    async def local(self, steps: int, rounds: int, compress: Any) -> float:
        """The bytes of a round."""

        async def drive() -> float:
            async with self.worker("driver") as driver:
                training = await dist.LocalSteps.create(driver, NAMES, Wide, self.width, self.seconds, steps=steps, compress=compress)
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


def bytes_table(settings: Settings) -> tuple[Table, float]:
    """The bytes of 30 steps and of a round, and what a round takes beyond its payloads for each member."""
    width, steps = settings.of(500, 20), settings.of(30, 2)
    size = width * width + width
    averaged = simulated_run(lambda: Lines(width, 0.3).averaged(steps)).value
    table = Table(
        f"Bytes sent and received, {MEMBERS} members, {size:,} parameters, 0.3 s a step, frames and heartbeats included",
        ["side", "bytes", "of it payloads", "ratio", "target", "beyond", "verdict"],
    )
    table.add(f"DistributedDataParallel, {steps} steps", f"{averaged:,.0f}", f"{12 * size * MEMBERS * steps:,}", "1", "", "", "")
    beyond = 0.0
    for compress in (dist.TopK(), dist.TopK(1 / 16, bits=4), dist.TopK(1 / 8, bits=4), dist.Blockwise(4), None):
        found = simulated_run(lambda each=compress: Lines(width, 0.3).local(steps, 2, each)).value
        payloads = round_payloads([width * width, width], compress)
        beyond = beyond or (found - payloads) / MEMBERS
        cells = goal_cells(None if settings.tiny else averaged / found, 1000.0 if compress == dist.TopK() else None, None, higher=True)
        table.add(f"LocalSteps, a round of {steps}, {compress}", f"{found:,.0f}", f"{payloads:,}", f"{averaged / found:,.0f}", *cells)
    return table, beyond


def round_payloads(sizes: list[int], compress: dist.Compressor | None) -> int:
    """The bytes of the payloads of a round: each member sends its own, and gets all of them, or the mean where that is shorter."""
    whole = 4 * sum(sizes)
    payload = whole if compress is None else sum(map(compress.packed_size, sizes))
    return MEMBERS * (payload + min(whole, MEMBERS * payload))


# -------------------------------------------------------------------- the frontier


@dataclass(slots=True)
class Row:
    """What was found for a point."""

    point: Point
    ratio: float
    loss: float
    share: float


async def frontier(settings: Settings, beyond: float) -> Table:
    """The held-out loss of every point."""
    text = Text.read(settings.of(4_000_000, 20_000))
    windows = text.windows(settings.of(1024, 8))
    steps = settings.of(3000, 4)
    points = list(POINTS)
    if settings.tiny:
        points = [Point(2, dist.TopK(1 / 8, bits=4)), Point(2, None, STRONG)]
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
        ratio = point.steps * 12 * sum(sizes) * MEMBERS / (round_payloads(sizes, point.compress) + MEMBERS * beyond)
        rows.append(Row(point, ratio, loss, loss / averages[point.decays]))
        progress(f"{point}: {ratio:.0f} x, {loss:.4f}, {rows[-1].share:.4f}", began, settings)
    return frontier_table(rows, averages, sum(sizes), steps)


def frontier_table(rows: list[Row], averages: Mapping[bool, float], size: int, steps: int) -> Table:
    """Rows by ratio; those that no other beats in both ratio and loss are marked."""
    table = Table(
        f"Held-out loss over bytes, {MEMBERS} members, {size:,} parameters, {steps:,} steps of {BATCH} windows each",
        ["H", "compressor", "outer optimizer", "decays", "bytes of DDP / bytes", "loss", "/ DDP", "frontier"],
    )
    for row in sorted(rows, key=lambda each: each.ratio):
        outer = ", ".join(f"{name} {value}" for name, value in row.point.outer.items())
        beaten = any(other.ratio >= row.ratio and other.share < row.share for other in rows)
        cells = f"{row.ratio:,.0f}", f"{row.loss:.4f}", f"{row.share:.4f}", "" if beaten else "*"
        table.add(row.point.steps, row.point.compress, outer, "yes" if row.point.decays else "no", *cells)
    found = ", ".join(f"{loss:.4f} ({'decays' if decays else 'constant rate'})" for decays, loss in averages.items())
    table.notes.append(f"mean gradients of every step: {found}; wanted: at least 1,000 x with at most 1.01")
    return table


def progress(text: str, began: float, settings: Settings) -> None:
    """Say on standard error how far the sweep is: it takes an hour."""
    if not settings.tiny:
        print(f"{text} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)


def run(settings: Settings) -> Iterator[Table]:
    """Bytes, and the frontier."""
    with threads(1):
        table, beyond = bytes_table(settings)
        yield table
        yield ag.run(frontier(settings, beyond))
