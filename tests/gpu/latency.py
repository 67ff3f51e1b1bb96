"""The cost of an operation apart from the device: launches, waits, single steps of small graphs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import uvloop

import aiograd as ag
from tests.gpu.measuring import Run, table


def run(run: Run) -> Iterator[str]:
    """The table, line by line."""
    return table("Latency", ("what", "µs"), _rows(run))


def _rows(run: Run) -> Iterator[tuple[str, str]]:
    x = run.device.from_host(np.ones(64, np.float32))
    yield "element-wise operation on 64 elements, launched", f"{run.seconds(lambda: x + x) * 1e6:.1f}"
    yield "a chain of ten of them, one launch", f"{run.seconds(lambda: _chain(x)) * 1e6:.1f}"
    if run.torch is not None:
        a = run.torch.ones(64, device="cuda")
        yield "torch: element-wise operation", f"{run.torch_seconds(lambda: a + a) * 1e6:.1f}"
    for name, factory in (("asyncio", asyncio.new_event_loop), ("uvloop", uvloop.new_event_loop)):
        with asyncio.Runner(loop_factory=factory) as runner:
            median, worst = runner.run(_waits(run))
        yield f"await of a small operation, {name}, median", f"{median * 1e6:.0f}"
        yield f"await of a small operation, {name}, 99 of 100", f"{worst * 1e6:.0f}"
    yield "forward and backward of (x · x).sum()", f"{asyncio.run(_passes(run)) * 1e6:.0f}"


def _chain(x: Any) -> Any:
    for _ in range(10):
        x = x * 1.01
    return x


async def _waits(run: Run) -> tuple[float, float]:
    x = ag.tensor(np.ones(64, np.float32), device="cuda:0")
    took = []
    for _ in range(run.of(3000, 3)):
        started = time.perf_counter()
        await (x + 1)
        took.append(time.perf_counter() - started)
    took.sort()
    return took[len(took) // 2], took[len(took) * 99 // 100]


async def _passes(run: Run) -> float:
    x = ag.tensor(np.ones(64, np.float32), device="cuda:0", requires_grad=True)
    count = run.of(1000, 2)
    for timed in (False, True):
        started = time.perf_counter()
        for _ in range(count):
            await (x * x).sum().backward()
            x.grad = None
        if timed:
            break
    return (time.perf_counter() - started) / count
