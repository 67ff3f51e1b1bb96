"""Native programs by themselves: a long element-wise chain beside one copy of its ends, a forward without a graph, and what compiling takes.

What a copy of an array into another takes is the time in which nothing but the ends of the chain is read and written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

import aiograd as ag
from aiograd import nn
from aiograd.compiler.native import build
from aiograd.compiler.native.cache import CodeCache
from tests.benchmarks import networks
from tests.benchmarks.harness import Settings, Table, goal_cells, threads


def run(settings: Settings) -> Iterator[Table]:
    """Time all of them."""
    if not ag.kernels.native_available():
        yield Table("Native programs: llvmlite is not installed", ("", ""))
        return
    with threads(1):
        yield _chains(settings)
        yield _calls(settings)
        yield _compiling(settings)
        yield _sizes(settings)


def _best(function: Callable[[], Any], settings: Settings, times: int = 200) -> float:
    """Seconds of the fastest of some calls."""
    found = []
    for _ in range(settings.of(times, 3)):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return min(found)


def _chains(settings: Settings) -> Table:
    columns = ("elements", "copy us", "numpy tier, x copy", "native, x copy", "target", "verdict")
    table = Table("20 element-wise operations, float32, 1 thread, no graph", columns)
    rng = np.random.default_rng(0)
    for size in (100, 10_000, 1_000_000):
        size = settings.of(size, min(size, 1000))
        x = ag.tensor(rng.uniform(0.5, 0.9, size).astype(np.float32))
        target = np.empty(size, np.float32)
        copy = _best(lambda x=x, target=target: np.copyto(target, x._data), settings)
        ratios = []
        for tier in ("numpy", "native"):
            compiled = ag.compile(_chain, tier=tier)
            with ag.no_grad():
                compiled(x)
                ratios.append(_best(lambda compiled=compiled, x=x: compiled(x), settings) / copy)
        goal = 1.2 if size >= 1_000_000 else None
        table.add(f"{size:,}", f"{copy * 1e6:.1f}", *[f"{ratio:.2f}" for ratio in ratios], *goal_cells(ratios[1], goal, None)[::2])
    return table


def _chain(x: Any) -> Any:
    for _ in range(10):
        x = x * 0.9 + 0.05
    return x


def _calls(settings: Settings) -> Table:
    table = Table("Forward of an MLP 64-64-10, one sample, no_grad", ("tier", "us a call", "target", "verdict"))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x = ag.tensor(np.ones((1, 64), np.float32))
    for tier in ("numpy", "native"):
        compiled = ag.compile(lambda x: model(x), tier=tier)
        with ag.no_grad():
            for _ in range(5):
                compiled(x)
            found = _best(lambda compiled=compiled: [compiled(x) for _ in range(20)], settings) / 20 * 1e6
        table.add(tier, f"{found:.2f}", *goal_cells(found, 5.0 if tier == "native" else None, None)[::2])
    return table


def _compiling(settings: Settings) -> Table:
    title = "Making programs native: seconds of one core, forward and backward, without the cache on disk"
    table = Table(title, ("program", "seconds", "target", "verdict"))
    length, goals = settings.of(1000, 20), None if settings.tiny else True

    def chain(x: Any, a: Any, b: Any) -> Any:
        for _ in range(length):
            x = x * a + b
        return x.sum()

    rng = np.random.default_rng(0)
    tensors = [ag.tensor(rng.uniform(0.5, 0.9, 4).astype(np.float32), requires_grad=True) for _ in range(3)]
    seconds = _seconds(chain, tensors, settings)
    table.add(f"{2 * length:,} operations in a chain", f"{seconds:.2f}", *goal_cells(seconds, goals and 0.6, None)[::2])
    steps = settings.of(100, 10)
    few, many = (_seconds(networks.on_aiograd(networks.lstm(each, 16, 4)).forward, [], settings) for each in (steps, 10 * steps))
    table.add(f"LSTM over {steps} steps, elementary operations", f"{few:.2f}", *goal_cells(few, goals and 0.5, None)[::2])
    table.add(f"LSTM over {10 * steps:,} steps, x {steps} steps", f"{many / few:.2f}", *goal_cells(many / few, goals and 2.0, None)[::2])
    return table


def _sizes(settings: Settings) -> Table:
    """A service puts requests together, so that batches have many sizes."""
    most = settings.of(64, 4)
    table = Table(f"MLP 64-64-10 in batches of 1 to {most}, forward and backward, native", ("dynamic", "texts", "seconds to make", "us, batch of 8"))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    rng = np.random.default_rng(0)
    batches = [ag.tensor(rng.standard_normal((n, 64)).astype(np.float32)) for n in range(1, most + 1)]

    def loss(x: Any) -> Any:
        return model(x).square().mean()

    for dynamic in (False, True):
        makings = [_made(loss, [[batch] for batch in batches], max_signatures=most, dynamic=dynamic) for _ in range(settings.of(3, 1))]
        compiled, eight = makings[0], batches[min(8, most) - 1]
        seconds = min(map(_native_seconds, makings))
        call = _best(lambda compiled=compiled, eight=eight: compiled(eight), settings, 2000)
        texts = {program.native.source for program in compiled.programs if program.native is not None}
        table.add(str(dynamic), str(len(texts)), f"{seconds:.2f}", f"{call * 1e6:.1f}")
    return table


def _seconds(function: Callable[..., Any], tensors: list[Any], settings: Settings) -> float:
    """The least seconds of some makings of native programs, with no machine code kept from the one before."""
    return min([_native_seconds(_made(function, [tensors])) for _ in range(settings.of(3, 1))])


def _native_seconds(compiled: Any) -> float:
    return sum([program.native.seconds for program in compiled.programs if program.native is not None])


def _made(function: Callable[..., Any], calls: list[list[Any]], **options: Any) -> Any:
    """A compiled function with native programs for these arguments; none of their machine code was there before."""
    with mock.patch.object(build, "code_cache", CodeCache(directory=lambda: None)):
        compiled = ag.compile(function, tier="native", **options)

        async def passes() -> None:
            for tensors in calls:
                for _ in range(2):
                    await compiled(*tensors).backward()

        ag.run(passes())
    return compiled
