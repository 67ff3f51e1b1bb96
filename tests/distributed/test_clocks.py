"""Clocks that are wrong, differ or jump: deadlines and leases are durations, and nothing between workers reads the time of day."""

from __future__ import annotations

import ast
import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiograd
from aiograd import distributed as dist
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import DeadlineError
from tests.distributed.workers import SECRET, leaf, settled, values, workers
from tests.sweeps import swept
from tests.watchdog import SECONDS

HOUR = 3600.0
service = dist.Service()


@service.function
async def triple(x: Any) -> Any:
    return x * 3


@service.function
async def sleep(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return asyncio.get_running_loop().time()


async def one_pass(worker: dist.Worker) -> None:
    async with worker.context() as ctx:
        x = leaf(1)
        await ctx.backward((await worker.call("b", "triple", x, timeout=5)).sum(), timeout=5)
        assert values(ctx.grads[x]) == [3]


WALL = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


def test_nothing_between_workers_reads_the_time_of_day() -> None:
    package = Path(aiograd.__file__).parent
    for path in [*(package / "distributed").rglob("*.py"), *(package / "engine").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert f"{node.value.id}.{node.attr}" not in WALL, f"{path.name}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                raise AssertionError(f"{path.name}:{node.lineno}")


@pytest.mark.parametrize("jumps", [[HOUR], [-HOUR], [0.0], [HOUR, -HOUR], [-1e9, 1e9, 0.5]], ids=str)
async def test_a_clock_that_jumps_changes_nothing(jumps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    offsets: Iterator[float] = itertools.cycle(jumps)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(offsets))
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + next(offsets)) * 1e9))
    async with workers("a", "b", service=service) as (a, b):
        for _ in range(3):
            await one_pass(a)
        with pytest.raises(DeadlineError):
            await a.call("b", "sleep", 30.0, timeout=0.05)
        await one_pass(a)
        await settled(a, b)


class Apart(asyncio.SelectorEventLoop):
    """A loop whose time is not that of others, as on another machine."""

    offset = 0.0

    def time(self) -> float:
        return super().time() + self.offset


@pytest.mark.net
@pytest.mark.parametrize("offset", swept([HOUR, -HOUR, 1e6], keep=2), ids=str)
async def test_clocks_that_differ_change_nothing(offset: float) -> None:
    """Workers on two loops whose times are hours apart: calls, passes, deadlines both ways, leases."""
    limits = Limits(lease=2.0)
    started: list[Any] = []
    ready = threading.Event()

    def elsewhere() -> None:
        async def main() -> None:
            async with dist.Worker("b", service=service, secret=SECRET, limits=limits) as b:
                stop = asyncio.Event()
                started[:] = [b.url, asyncio.get_running_loop(), stop, b]
                ready.set()
                await stop.wait()

        loop = Apart()
        loop.offset = offset
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    try:
        assert await asyncio.to_thread(ready.wait, SECONDS)
        url, loop, _, b = started
        async with dist.Worker("a", secret=SECRET, limits=limits, peers={"b": url}) as a:
            for _ in range(3):
                await one_pass(a)
            there = await a.call("b", "sleep", 0.01)
            assert abs(there - loop.time()) < 60
            with pytest.raises(DeadlineError):
                await a.call("b", "sleep", 10 * SECONDS, timeout=0.1)
            async with a.context() as ctx:  # a lease lasts, is renewed, and ends, whatever the clocks say
                x = leaf(1)
                y = await a.call("b", "triple", x)
                await asyncio.sleep(2.5)
                await ctx.backward(y.sum())
                assert values(ctx.grads[x]) == [3] and b.statistics().contexts == 1
    finally:
        if started:
            started[1].call_soon_threadsafe(started[2].set)
        await asyncio.to_thread(thread.join, SECONDS)
    assert not thread.is_alive()
