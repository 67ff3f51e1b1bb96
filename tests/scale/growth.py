"""More and more workers: what it takes one driver to have them join, to end one backward pass on all of them, and to be connected to them."""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from tests.scale.cluster import DRIVER, SimulatedCluster

service = dist.Service()
#: elements of what each worker is given
ELEMENTS = 4
#: virtual seconds in which nothing happens
IDLE = 2.0


@service.reference
class Scale:
    """One parameter."""

    def __init__(self) -> None:
        self.weight = ag.tensor(np.arange(1.0, ELEMENTS + 1), requires_grad=True)

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        """Times the parameter."""
        return x * self.weight


@dataclass
class Growth:
    """The cost with so many workers."""

    workers: int
    figures: dict[str, Any] = field(default_factory=dict)


class Counters:
    """The work of driver and network since this was made."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.loop = asyncio.get_running_loop()
        self.time, self.processor = self.loop.time(), time.process_time()
        self.sent, self.all = self._counts()

    def _counts(self) -> tuple[int, int]:
        links = self.cluster.network.statistics()
        return sum(link.sent for (source, _), link in links.items() if source == DRIVER), sum(link.sent for link in links.values())

    def since(self) -> tuple[float, int, int, float]:
        """Virtual seconds, frames of the driver, frames of all, and processor seconds."""
        sent, all_sent = self._counts()
        return self.loop.time() - self.time, sent - self.sent, all_sent - self.all, time.process_time() - self.processor


async def grow(count: int, **limits: Any) -> Growth:
    """A cluster of so many workers, with these limits."""
    begun = time.process_time()
    found = Growth(count)

    async def work(cluster: SimulatedCluster) -> None:
        figures, driver = found.figures, cluster.cluster.driver
        links = cluster.network.statistics()
        figures["seconds until all had joined"] = f"{cluster.joined_in:.2f}"
        figures["frames of the driver meanwhile"] = sum(link.sent for (source, _), link in links.items() if source == DRIVER)
        figures["processor seconds of all, real"] = f"{time.process_time() - begun:.1f}"
        refs = await asyncio.gather(*(driver.remote(name, Scale) for name in cluster.names))
        await one_pass(driver, refs)  # connections between workers are made
        counters = Counters(cluster)
        commits = await one_pass(driver, refs)
        seconds, sent, all_sent, processor = counters.since()
        figures["a backward pass, with its commit, seconds"] = f"{commits:.4f}"
        figures["frames of the driver in a step (call, backward, release)"] = sent
        figures["frames of all in a step"] = all_sent
        figures["processor seconds of a step, real"] = f"{processor:.2f}"
        counters = Counters(cluster)
        await asyncio.sleep(IDLE)
        _, sent, all_sent, processor = counters.since()
        figures["frames of the driver per idle second"] = f"{sent / IDLE:.0f}"
        figures["frames of all per idle second"] = f"{all_sent / IDLE:.0f}"
        figures["connections in all"] = cluster.network.open_channels // 2
        figures["memory of the simulation, MiB"] = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}"

    await SimulatedCluster([f"w{number:04}" for number in range(count)], service, **limits).run(work)
    return found


async def one_pass(driver: dist.Worker, refs: list[dist.RemoteRef]) -> float:
    """Call every worker and differentiate; returns the seconds that the backward pass took."""
    loop = asyncio.get_running_loop()
    x = ag.tensor(np.ones(ELEMENTS), requires_grad=True)
    async with driver.context() as ctx:
        results = await asyncio.gather(*(ref.call("forward", x) for ref in refs))
        begun = loop.time()
        await ctx.backward(ag.stack(results).sum())
        assert np.array_equal(ctx.grads[x].numpy(), len(refs) * np.arange(1.0, ELEMENTS + 1))
        return loop.time() - begun
