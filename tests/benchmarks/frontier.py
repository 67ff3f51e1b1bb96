"""The frontier of local steps: the held-out loss over the bytes that members exchange, beside steps that average every gradient.

``python -m tests.benchmarks.frontier --hours 1`` trains the points that are not in ``frontier.jsonl`` yet, in the order of `POINTS`; each is a line
of that file, so the sweep goes on where it was stopped, and its points add up over runs.

Note [One process]
    The members of the frontier are `LocalTraining` objects of this process, and payloads, means and outer steps are the library's. So a point has the
    bits of a training over workers, and costs its local steps only. Bytes are `packed_size` and the measured bytes of a round of workers beyond it.

Note [Equal samples]
    Both sides read the same batches: a step of the averaged side reads the batches of one local step of all four members. The optimizer is
    the same class with the same decay. A point is compared with the best averaged side of as many steps, whatever its learning rate.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.local_steps.local_training import LocalTraining
from tests.benchmarks.harness import Table, threads
from tests.benchmarks.text_model import BATCH, RATE, DecayingAdamW, Learner, Text
from tests.chaos.ledger import LineFile, current_commit

MEMBERS = 4
#: bytes that a member sends and receives for each parameter and step where every gradient is averaged: in a ring of four 3/4 of all float32 twice
AVERAGED_BYTES = 12
#: the points that are done
RESULTS = Path(__file__).with_name("frontier.jsonl")
#: windows of the held-out text, and characters of the whole
WINDOWS, CHARACTERS = 1024, 4_000_000

TOP4, TOP8, INT4 = dist.TopK(1 / 16, bits=4), dist.TopK(1 / 8, bits=4), dist.Blockwise(4)
HALF, THIRD, THIRD4 = dist.TopK(1 / 2, bits=2), dist.TopK(1 / 3, bits=2), dist.TopK(1 / 3, bits=4)
PLAIN: dict[str, Any] = {"lr": 1.0}
MILD: dict[str, Any] = {"lr": 0.9, "momentum": 0.5, "nesterov": True}
HEAVY: dict[str, Any] = {"lr": 0.9, "momentum": 0.5}
FIRM: dict[str, Any] = {"lr": 0.9, "momentum": 0.8, "nesterov": True}
STRONG: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@dataclass(frozen=True, slots=True)
class Averaged:
    """The side that averages every gradient.

    Attributes:
        rate: the largest of the inner learning rate.
        decays: the rate falls with a cosine.
        total: steps.
    """

    rate: float = RATE
    decays: bool = True
    total: int = 3000

    @property
    def piece(self) -> dict[str, Any]:
        """The name in the file: its rate, decay and steps, and what else differs from the defaults."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default}
        given = {"rate": self.rate, "decays": self.decays, "total": self.total} | found
        return {"side": type(self).__name__} | {name: repr(each) if isinstance(each, dist.Compressor) else each for name, each in given.items()}


@dataclass(frozen=True, slots=True)
class Point(Averaged):
    """One training of the frontier: `LocalSteps.create` with these arguments.

    Attributes:
        total: local steps of each member, at least.
    """

    steps: int = 30
    compress: dist.Compressor | None = None
    answer: dist.Compressor | None = None
    outer: Mapping[str, Any] = field(default_factory=lambda: MILD)

    @property
    def rounds(self) -> int:
        """Rounds, the last one whole."""
        return math.ceil(self.total / self.steps)


def both(steps: int, compress: dist.Compressor | None, outer: Mapping[str, Any] = MILD, **options: Any) -> Point:
    """A point with one compressor for both ways."""
    return Point(steps=steps, compress=compress, answer=compress, outer=outer, **options)


def up(steps: int, compress: dist.Compressor | None, outer: Mapping[str, Any] = MILD, **options: Any) -> Point:
    """A point with answers that are not compressed."""
    return Point(steps=steps, compress=compress, outer=outer, **options)


#: the order of the sweep: the promising ones first
POINTS = (
    both(57, HALF, FIRM),
    both(60, HALF, FIRM),
    both(43, THIRD, FIRM),
    both(57, HALF, {**FIRM, "momentum": 0.7}),
    both(57, THIRD4, FIRM),
    both(57, HALF, FIRM, rate=4e-3),
    both(91, INT4, FIRM, rate=4.5e-3),
    both(91, INT4, STRONG),
    both(100, INT4, FIRM),
    up(30, None, FIRM),
    both(57, HALF, FIRM, total=9000),
    both(100, INT4),
    both(30, TOP8),
    up(100, None),
    up(100, TOP8),
    up(30, None),
    both(100, INT4, PLAIN),
    both(167, INT4),
    both(100, TOP8),
    up(30, TOP4),
    both(30, TOP4),
    up(30, dist.TopK()),
    up(167, INT4),
    up(167, TOP8),
    up(100, TOP4),
    up(100, TOP8, STRONG),
    up(100, TOP8, PLAIN),
    up(100, TOP8, HEAVY),
    both(100, INT4, decays=False),
    up(100, TOP8, decays=False),
    up(100, None, STRONG),
    up(167, None),
    up(100, dist.TopK()),
    up(167, TOP4),
    up(167, dist.TopK()),
)


# -------------------------------------------------------------------- the two sides


async def held_out(module: Learner, windows: Any) -> float:
    """The mean loss of the held-out windows."""
    with ag.no_grad():
        losses = [module.predictor(part).item() for part in np.array_split(windows, max(1, len(windows) // 128))]
    return float(np.mean(losses))


def member_of(text: Text, point: Point) -> LocalTraining:
    """A member that has adopted its first base."""
    module = Learner(text)
    inner = DecayingAdamW(module.parameters(), point.rate, point.rounds * point.steps if point.decays else None)
    holders = (SimpleNamespace(optimizer=each) for each in (inner, ag.optim.SGD(module.parameters(), **point.outer)))
    training = LocalTraining(module, *holders, "loss", "data", None, (point.compress, point.answer))
    training.adopt(0, (0,), {}, is_new=True)
    return training


async def by_local_steps(text: Text, point: Point, windows: Any) -> float:
    """The held-out loss of the last base."""
    trainings = [member_of(text, point) for _ in range(MEMBERS)]
    read = 0
    rest: list[Any] = []
    for number in range(point.rounds):
        results = []
        for training in trainings:
            batches = [divmod(read + index, training.order.outline.batches) for index in range(point.steps)]
            results.append(await training.compute(number, batches, is_fresh=False, carried=None, overlap=0))
            read += point.steps
        payloads, rows = [each.payload for each in results], [each.rows for each in results]
        kind, answer, rest = trainings[0].form.formed(payloads, rows, rest)
        digests = set()
        for training in trainings:
            digests.add(training.base.stage(training.form.means(kind, answer, rows), {}))
            training.go_on(training.contribution(number))
        assert len(digests) == 1, "members have different bases"
    first = trainings[0]
    first._reset(False)
    return await held_out(first.module, windows)


async def by_averages(text: Text, side: Averaged, windows: Any) -> float:
    """The held-out loss after steps with the mean gradient of all four batches."""
    module = Learner(text)
    optimizer = DecayingAdamW(module.parameters(), side.rate, side.total if side.decays else None)
    training = member_of(text, Point())
    for step in range(side.total):
        places = [divmod(step * MEMBERS + member, training.order.outline.batches) for member in range(MEMBERS)]
        loss = await module.loss(await training.loader.read([index for place in places for index in training.order.indices(*place)]))
        optimizer.zero_grad()
        await loss.backward()
        optimizer.step()
    return await held_out(module, windows)


# -------------------------------------------------------------------- the sweep


class Sweep:
    """The points of the frontier that are done, in a file.

    Args:
        path: of the file.
        characters, windows: of the text, and of the part of it that is held out.

    Attributes:
        losses: by the name of a side.
    """

    def __init__(self, path: Path, characters: int = CHARACTERS, windows: int = WINDOWS) -> None:
        self.text = Text.read(characters)
        self.windows = self.text.windows(windows)
        self.sizes = [each.size for each in Learner(self.text).parameters()]
        digest = hashlib.sha256(self.text.train.tobytes() + self.windows.tobytes()).hexdigest()[:16]
        self.file = LineFile(path, {"text": digest, "numpy": np.__version__, "parameters": sum(self.sizes), "batch": BATCH, "members": MEMBERS})
        self.losses = {str(each["piece"]): float(each["loss"]) for each in self.file.lines}

    async def run(self, points: Iterable[Point], until: float = math.inf) -> None:
        """Train the points that are not done, and the averaged sides that they are compared with.

        Args:
            points: in this order.
            until: no training begins later, on the monotonic clock.
        """
        for point in points:
            for side in (Averaged(point.rate, point.decays, point.total), point):
                if self.file.todo([side.piece]) and time.monotonic() < until:
                    begin = time.process_time()
                    loss = await (by_local_steps if isinstance(side, Point) else by_averages)(self.text, side, self.windows)  # type: ignore[operator]
                    self.losses[str(side.piece)] = loss
                    self.file.add({"piece": side.piece, "loss": loss, "seconds": round(time.process_time() - begin), "commit": current_commit()})
                    share = f", {self.share(side):.4f} of averages" if isinstance(side, Point) else ""
                    print(f"{side.piece}: {loss:.4f}{share}", file=sys.stderr, flush=True)

    def best(self, point: Point) -> float:
        """The least loss of an averaged side with as many steps and the same course of the learning rate."""
        return min(
            float(line["loss"])
            for line in self.file.lines
            if line["piece"]["side"] == "Averaged" and (line["piece"]["decays"], line["piece"]["total"]) == (point.decays, point.total)
        )

    def share(self, point: Point) -> float:
        """The loss of a point over the best averaged one."""
        return self.losses[str(point.piece)] / self.best(point)

    def payloads(self, point: Point) -> float:
        """Bytes of the averaged side over bytes of the payloads."""
        return point.steps * AVERAGED_BYTES / self._bytes(point)

    def ratio(self, point: Point, beyond: tuple[float, float], measured: int) -> float:
        """The same over all bytes of members.

        Args:
            point: the point.
            beyond: bytes of a round of a member beyond its payloads, and of each step in it.
            measured: parameters of the model with which these were measured.
        """
        return point.steps * AVERAGED_BYTES / (self._bytes(point) + (beyond[0] + point.steps * beyond[1]) / measured)

    def _bytes(self, point: Point) -> float:
        return round_payloads(self.sizes, point.compress, point.answer) / MEMBERS / sum(self.sizes)

    def table(self, points: Iterable[Point], beyond: tuple[float, float], measured: int) -> Table:
        """Points that are done, by ratio; a mark for each that no other beats in both ratio and loss."""
        done = [each for each in points if str(each.piece) in self.losses]
        table = Table(
            f"Held-out loss over bytes, {MEMBERS} members, {sum(self.sizes):,} parameters, {BATCH} windows in a batch",
            ["H", "steps", "compressor", "answer", "outer optimizer", "inner rate", "DDP / payloads", "DDP / all bytes", "loss", "/ DDP", "frontier"],
        )
        ratios = {each: (self.ratio(point, beyond, measured), self.share(point)) for each, point in enumerate(done)}
        for each, (ratio, share) in sorted(ratios.items(), key=lambda item: item[1]):
            point = done[each]
            beaten = any(other >= ratio and less < share for other, less in ratios.values())
            outer = ", ".join(f"{name} {value}" for name, value in point.outer.items() if value is not True)
            outer += ", Nesterov" if point.outer.get("nesterov") else ""
            rate = f"{point.rate:g} {'cosine' if point.decays else 'constant'}"
            loss = f"{self.losses[str(point.piece)]:.4f}"
            cells = f"{self.payloads(point):,.0f}", f"{ratio:,.0f}", loss, f"{share:.4f}", "" if beaten else "*"
            table.add(point.steps, point.total, shown(point.compress), shown(point.answer), outer, rate, *cells)
        table.notes.append(f"all bytes: with frames and heartbeats at {measured:,} parameters and 0.3 s a step; DDP without either")
        table.notes += [f"{line['piece']}: {line['loss']:.4f}" for line in self.file.lines if line["piece"]["side"] == "Averaged"]
        table.notes.append("wanted: at least 1,000 times fewer bytes at a loss of at most 1.01 times")
        return table


def round_payloads(sizes: list[int], compress: dist.Compressor | None, answer: dist.Compressor | None) -> int:
    """The bytes of the payloads of a round: each member sends its own, and gets the answer, or all of them, or the mean where that is shorter."""
    whole = 4 * sum(sizes)
    payload = whole if compress is None else sum(map(compress.packed_size, sizes))
    return MEMBERS * (payload + (min(whole, MEMBERS * payload) if answer is None else sum(map(answer.packed_size, sizes))))


def shown(compress: dist.Compressor | None) -> str:
    """A compressor in a cell."""
    if isinstance(compress, dist.TopK):
        return f"TopK(1/{1 / compress.fraction:.0f}, bits={compress.bits})"
    return "none" if compress is None else f"Blockwise({compress.bits})"


def trained(sweep: Sweep, points: Iterable[Point], until: float = math.inf) -> None:
    """Run a sweep, all of it on the loop: a step is short, and a change of threads costs more."""

    async def run() -> None:
        ag.tune_malloc()
        async with ag.Engine(inline_ns=1e9):
            await sweep.run(points, until)

    with threads(1):
        ag.run(run())


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.frontier", description=__doc__)
    parser.add_argument("--hours", type=float, default=math.inf, help="begin no training after so long")
    parser.add_argument("--file", type=Path, default=RESULTS, help="of the points that are done (default %(default)s)")
    options = parser.parse_args()
    trained(Sweep(options.file), POINTS, time.monotonic() + 3600 * options.hours)


if __name__ == "__main__":
    main()
