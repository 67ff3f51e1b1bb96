"""How late a 1 ms heartbeat is beside a backward pass or the forward of a compiled ``async def``, and what the courtesy costs.

The heartbeat sleeps 1 ms at a time on the loop on which the pass is awaited, and notes how much later than that it woke. The pass runs again and
again, with the loop idle in between; only beats that a pass could delay count. "x inline" is the time of the pass with the heartbeat over that of the
same pass without one, on an engine that keeps everything on the loop and never pauses, medians of interleaved runs.

Lateness includes what the system does to the process: the first row is a loop with nothing to do for as long as the first pass takes. It includes
Python's garbage collector too, which stops everything while it looks through all that is alive, graphs included; the longest such stop is in a
column of its own. On `aiograd.run`'s loop there is a table with the collector as it is and one with ``tune_gc``, which is the default.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import kernels
from tests.benchmarks.harness import Settings, Table

BEAT = 0.001
COLUMNS = ["beside", "beats", "lag ms p50", "p99", "max", "gc ms", "pass ms", "x inline", "targets", "beyond", "verdict"]
#: milliseconds of lag (99th percentile, maximum) and share of the time of an inline pass aimed at
TARGET, BEYOND, OVERHEAD = (3.0, 15.0), (1.0, 10.0), 1.10
#: the same with a thousand passes in flight
CROWD = (6.0, 20.0)

Job = Callable[[], Awaitable[Any]]


def run(settings: Settings) -> Iterator[Table]:
    """A table of asyncio's loop, and two of the one that `aiograd.run` chooses (uvloop where it is installed)."""
    if not settings.tiny:
        kernels.warm_up()
    with asyncio.Runner() as runner:
        yield runner.run(_run(settings, "collector as it is"))
    yield ag.run(_run(settings, "collector as it is"), tune_gc=False)
    yield ag.run(_run(settings, "tune_gc"))


async def _run(settings: Settings, collector: str) -> Table:
    loop = asyncio.get_running_loop()
    table = Table(f"Lag of a 1 ms heartbeat, {type(loop).__module__}, {collector}", COLUMNS)
    rounds = settings.of(30, 1)
    large = _large_mlp(settings)
    with _Collections() as collections:
        idle = await lags_beside(lambda: asyncio.sleep(0.02), rounds)
    _row(table, "nothing", idle, collections.longest, None, None, judged=False)
    for name, prepare, count in (
        ("MLP 784-1024-1024-10, batch 256", large, rounds),
        (f"chain of {settings.of(500_000, 200):,} nodes", _chain(settings.of(500_000, 200)), settings.of(3, 1)),
        (f"{settings.of(1000, 10)} passes of 100 nodes at once", _many(settings.of(1000, 10), 100), settings.of(10, 1)),
        (f"compiled forward of {settings.of(100_000, 200):,} statements", _compiled_chain(settings.of(100_000, 200)), rounds),
        (f"compiled forward of 4 products of {settings.of(1200, 16)}", _compiled_products(settings.of(1200, 16)), rounds),
    ):
        job = prepare()
        await job()
        with_beats: list[float] = []
        inline: list[float] = []
        lags: list[float] = []
        longest = 0.0
        for _ in range(count):
            with _Collections() as collections:
                found, seconds = await beside(job)
            lags += found
            with_beats.append(seconds)
            longest = max(longest, collections.longest)
            async with ag.Engine(inline_ns=math.inf, budget=math.inf):
                started = time.perf_counter()
                await job()
                inline.append(time.perf_counter() - started)
        limit = CROWD if "at once" in name else TARGET
        _row(table, name, lags, longest, statistics.median(with_beats), statistics.median(inline), judged=not settings.tiny, limit=limit)
        del job
    if "torch" in settings.peers:
        await _torch_rows(settings, table, rounds)
    return table


def _row(
    table: Table,
    name: str,
    lags: list[float],
    collecting: float,
    seconds: float | None,
    inline: float | None,
    *,
    judged: bool = True,
    limit: tuple[float, float] = TARGET,
) -> None:
    p50, p99, most = (float(np.percentile(lags, q)) * 1e3 for q in (50, 99, 100))
    share = None if seconds is None or inline is None else seconds / inline
    verdict = ""
    if judged and share is not None:
        met = p99 <= limit[0] and most <= limit[1] and share <= OVERHEAD
        beyond = p99 <= BEYOND[0] and most <= BEYOND[1] and share <= OVERHEAD
        verdict = "beyond" if beyond else "met" if met else "missed"
    goals = [f"≤ {limit[0]:g}/{limit[1]:g}, ≤ {OVERHEAD:.2f}", f"{BEYOND[0]:g}/{BEYOND[1]:g}"] if judged else ["", ""]
    times = ["" if seconds is None else f"{seconds * 1e3:.1f}", "" if share is None else f"{share:.2f}"]
    table.add(name, len(lags), f"{p50:.2f}", f"{p99:.2f}", f"{most:.2f}", f"{collecting * 1e3:.1f}", *times, *goals, verdict)


# -------------------------------------------------------------------- the heartbeat


async def lags_beside(job: Job, rounds: int) -> list[float]:
    lags: list[float] = []
    for _ in range(rounds):
        lags += (await beside(job))[0]
    return lags


async def beside(job: Job) -> tuple[list[float], float]:
    """Run `job` beside a heartbeat; returns the lags of the beats it could delay and its own time, both in seconds."""
    clock = time.perf_counter
    lags: list[float] = []
    beaten = asyncio.Event()

    async def beat() -> None:
        while True:
            due = clock() + BEAT
            await asyncio.sleep(BEAT)
            lags.append(clock() - due)
            beaten.set()

    heart = asyncio.ensure_future(beat())
    await asyncio.sleep(4 * BEAT)
    before = len(lags)
    started = clock()
    await job()
    seconds = clock() - started
    count = len(lags)
    beaten.clear()
    await beaten.wait()  # for the beat that was due when the job ended
    heart.cancel()
    await asyncio.gather(heart, return_exceptions=True)
    return lags[before : count + 1], seconds


class _Collections:
    """The longest run of the garbage collector in a block, in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._started = 0.0

    def __enter__(self) -> _Collections:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
        else:
            self.longest = max(self.longest, time.perf_counter() - self._started)


# -------------------------------------------------------------------- what it beats beside


def _arrays(settings: Settings) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    batch, width, hidden = (16, 12, 8) if settings.tiny else (256, 784, 1024)
    x = rng.normal(size=(batch, width)).astype(np.float32)
    weights = [(rng.normal(size=shape) * 0.05).astype(np.float32) for shape in ((width, hidden), (hidden, hidden), (hidden, 10))]
    return x, weights


def _large_mlp(settings: Settings) -> Callable[[], Job]:
    """A backward pass through large matrix products: work for the executor."""
    x, weights = _arrays(settings)

    def prepare() -> Job:
        leaves = [ag.tensor(weight, requires_grad=True) for weight in weights]
        loss = ((((ag.tensor(x) @ leaves[0]).relu() @ leaves[1]).relu() @ leaves[2]) ** 2).mean()
        return lambda: loss.backward(retain_graph=True)

    return prepare


def _chain(nodes: int) -> Callable[[], Job]:
    """A backward pass through nodes that are nothing but Python: work for the loop itself."""

    def prepare() -> Job:
        leaf, factor, term = ag.tensor([1.0] * 4, requires_grad=True), ag.tensor([0.9] * 4), ag.tensor([0.1] * 4)
        y = leaf
        for _ in range(nodes // 2):
            y = y * factor + term
        loss = y.sum()
        return lambda: loss.backward(retain_graph=True)

    return prepare


def _many(passes: int, nodes: int) -> Callable[[], Job]:
    """Passes that are each too short to be noticed."""

    def prepare() -> Job:
        jobs = [_chain(nodes)() for _ in range(passes)]

        async def all_at_once() -> None:
            await asyncio.gather(*[job() for job in jobs])

        return all_at_once

    return prepare


def _compiled_chain(statements: int) -> Callable[[], Job]:
    """The forward of a compiled ``async def`` of numpy calls on four numbers; its first call records."""

    def prepare() -> Job:
        factor, term = ag.tensor([0.9] * 4), ag.tensor([0.1] * 4)

        @ag.compile(tier="numpy")
        async def forward(y: Any) -> Any:
            for _ in range(statements // 2):
                y = y * factor + term
            return y

        return functools.partial(forward, ag.tensor([1.0] * 4, requires_grad=True))

    return prepare


def _compiled_products(width: int) -> Callable[[], Job]:
    """The same of large products."""

    def prepare() -> Job:
        rng = np.random.default_rng(0)
        weights = [ag.tensor((rng.normal(size=(width, width)) / width**0.5).astype(np.float32), requires_grad=True) for _ in range(4)]

        @ag.compile
        async def forward(y: Any) -> Any:
            for weight in weights:
                y = y @ weight
            return y

        return functools.partial(forward, ag.ones((width, width)))

    return prepare


async def _torch_rows(settings: Settings, table: Table, rounds: int) -> None:
    import torch

    x, weights = _arrays(settings)
    leaves = [torch.tensor(weight, requires_grad=True) for weight in weights]
    loss = ((((torch.tensor(x) @ leaves[0]).relu() @ leaves[1]).relu() @ leaves[2]) ** 2).mean()
    loop = asyncio.get_running_loop()

    async def on_the_loop() -> None:
        loss.backward(retain_graph=True)

    async def in_a_thread() -> None:
        await loop.run_in_executor(None, lambda: loss.backward(retain_graph=True))

    for name, job in (("torch MLP, on the loop", on_the_loop), ("torch MLP, in a thread", in_a_thread)):
        await job()
        lags: list[float] = []
        times: list[float] = []
        with _Collections() as collections:
            for _ in range(rounds):
                found, seconds = await beside(job)
                lags += found
                times.append(seconds)
        _row(table, name, lags, collections.longest, statistics.median(times), None, judged=False)
    await loop.shutdown_default_executor()
