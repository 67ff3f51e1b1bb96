"""The price of a dashboard: steps of a training loop with a worker that has none, one whose page is closed, and one whose page is open.

The page is a process of its own that asks twice a second, as a browser does. Steps follow each other without a pause, at about a thousand a second.
A round takes a stretch of steps in each way, in turn, long enough for several windows of recording, and ratios are taken within a round. Times are
those of this process's processors, both workers' included: on the wall, neighbours make more difference than what is measured. "closed" is also what
every worker pays without a dashboard; the last row says what its counters cost per remote step.
"""

from __future__ import annotations

import asyncio
import http.cookiejar
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.meter import Meter
from aiograd.distributed.observing import observe
from tests.benchmarks.harness import Settings, Table, threads

COLUMNS = ["step", "page", "steps per CPU second", "CPU ms per step", "x without", "target", "verdict"]
#: of the time of a step
CLOSED, OPEN = 1.01, 1.05
#: exchanges of a remote step with one worker that are observed on one side: a call, a send, a commit, a pass
EXCHANGES = 4

service = dist.Service()


@service.function
async def square(x: ag.Tensor) -> ag.Tensor:
    """A remote part that costs nothing itself."""
    return (x * x).sum()


def run(settings: Settings) -> Iterator[Table]:
    """One table."""
    with threads(1):
        yield ag.run(_run(settings))


async def _run(settings: Settings) -> Table:
    table = Table("A dashboard beside a training loop", COLUMNS)
    async with (
        dist.Worker("left", service=service) as left,
        dist.Worker("plain", peers={"left": left.url}) as plain,
        dist.Worker("driver", peers={"left": left.url}, dashboard=True) as driver,
    ):
        await _rows(settings, table, "local", driver, plain, _local(settings))
        await _rows(settings, table, "remote", driver, plain, _remote)
    count = settings.of(200_000, 100)
    meter, began = Meter(), time.perf_counter()
    for _ in range(count):
        with observe(meter, "call", "square", "left", None, "CLIENT"):
            pass
    each = (time.perf_counter() - began) / count
    table.add("remote", "counters", "", f"{each * EXCHANGES * 1e3:.4f}", "", "", "")
    return table


def _local(settings: Settings) -> Callable[[dist.Worker], Awaitable[None]]:
    rng = np.random.default_rng(0)
    batch, width = settings.of(128, 4), settings.of(256, 4)
    x, target = (ag.tensor(rng.normal(size=(batch, width)).astype(np.float32)) for _ in range(2))
    model = ag.nn.Sequential(ag.nn.Linear(width, width), ag.nn.ReLU(), ag.nn.Linear(width, width))
    optimizer = ag.optim.SGD(model.parameters(), lr=1e-3)

    async def step(worker: dist.Worker) -> None:
        loss = ((model(x) - target) ** 2).mean()
        await loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


async def _remote(worker: dist.Worker) -> None:
    async with worker.context() as ctx:
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        await ctx.backward(await worker.call("left", "square", x))


async def _rows(
    settings: Settings, table: Table, name: str, driver: dist.Worker, plain: dist.Worker, step: Callable[[dist.Worker], Awaitable[None]]
) -> None:  # fmt: skip
    seconds = 0.02 if settings.tiny else 2.0
    url = driver.dashboard_url
    assert url is not None
    ways = ("none", "closed", "open")
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(settings.of(5, 1)):
        for way in ways:
            worker = plain if way == "none" else driver
            page = await _open(url, driver) if way == "open" else None
            for _ in range(settings.of(20, 1)):
                await step(worker)
            count, began = 0, time.process_time()
            while time.process_time() - began < seconds:
                await step(worker)
                count += 1
            spent[way].append((time.process_time() - began) / count)
            if page is not None:
                await _close(page, driver)
    medians = {way: statistics.fmean(times) for way, times in spent.items()}
    for way in ways:
        ratio = statistics.median(mine / base for mine, base in zip(spent[way], spent["none"], strict=True))
        target = {"none": None, "closed": CLOSED, "open": OPEN}[way]
        verdict = "" if target is None or settings.tiny else "met" if ratio <= target else "missed"
        goal = "" if target is None or settings.tiny else f"≤ {target:.2f}"
        table.add(name, way, f"{1 / medians[way]:.0f}", f"{medians[way] * 1e3:.3f}", f"{ratio:.3f}", goal, verdict)


async def _open(url: str, driver: dist.Worker) -> asyncio.subprocess.Process:
    """A page in a process of its own; returns when it is being served."""
    command = (sys.executable, "-m", "tests.benchmarks.dashboard", url)
    page = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    while driver._core.watch is None:
        await asyncio.sleep(0.005)
    return page


async def _close(page: asyncio.subprocess.Process, driver: dist.Worker) -> None:
    """End the page, and do not wait until it counts as closed."""
    page.kill()
    await page.wait()
    watch: Any = driver._core.watch
    if watch is not None:
        watch.stop()
    await asyncio.sleep(0)


def poll(url: str) -> None:
    """Ask for data as the page does, without end."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    opener.open(url).read()
    while True:
        try:
            opener.open(url.partition("?")[0] + "/data?after=999999999").read()
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise
        time.sleep(0.5)


if __name__ == "__main__":
    poll(sys.argv[1])
