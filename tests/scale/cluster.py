"""Workers on a simulated network of several data centres that join the cluster of one driver, as ``aiograd worker --join`` does."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.cluster.joining import serve_cluster
from aiograd.testing import HostKilledError
from aiograd.testing.network import Faults, SimulatedNetwork

SECRET = b"a thousand workers, one secret.."
DRIVER = "driver"
#: between hosts of one data centre, and between data centres: seconds on the way, and bytes per second of each link
WITHIN = Faults(latency=(1e-4, 3e-4), slow=1.25e9)
BETWEEN = Faults(latency=(8e-3, 4e-2), slow=1.25e8)
#: data centres; each has one part of the hosts
CENTRES = 4


def new_limits(**limits: Any) -> dist.Limits:
    """The limits of driver and workers: as they are by default, but for the number of connections and `limits`."""
    return dist.Limits(connections=4096, **limits)


class Placement:
    """Which data centre a host is in, and so the latency and bandwidth between two hosts.

    Args:
        centre_of: says it of a worker by name; the driver is in the first.
    """

    def __init__(self, centre_of: Callable[[str], int]) -> None:
        self._centre_of = centre_of

    def centre(self, name: str) -> int:
        """The number of a host's data centre."""
        return 0 if name == DRIVER else self._centre_of(name)

    def __call__(self, source: str, target: str) -> Faults:
        """The latency and bandwidth of frames between two hosts."""
        return WITHIN if self.centre(source) == self.centre(target) else BETWEEN


def spread_evenly(name: str) -> int:
    """A data centre for a host that may be anywhere."""
    return zlib.crc32(name.encode()) % CENTRES


class SimulatedCluster:
    """A driver, and workers that join it.

    Args:
        names: of the workers.
        service: what they expose.
        centre_of: see `Placement`.
        seed: of the network.
        limits: of driver and workers, in place of those of `new_limits`.
    """

    def __init__(
        self, names: Iterable[str], service: dist.Service, centre_of: Callable[[str], int] = spread_evenly, seed: int = 0, **limits: Any
    ) -> None:
        self.names = tuple(names)
        self.network = SimulatedNetwork(seed, faults=Placement(centre_of))
        self.service = service
        self.limits = limits
        self.cluster: dist.JoinCluster
        #: virtual seconds until all had joined
        self.joined_in = 0.0
        #: called with the name of a worker that is lost, and of one that is back
        self.on_lost: Callable[[str], None] = lambda name: None
        self.on_return: Callable[[str], None] = lambda name: None

    async def run(self, work: Callable[[SimulatedCluster], Coroutine[Any, Any, Any]]) -> Any:
        """Start everything, do the work on the driver, and end everything; returns what the work did."""
        loop = asyncio.get_running_loop()
        outcome = self.network.spawn(DRIVER, self._drive(work))
        hosts = [loop.create_task(self._keep(name)) for name in self.names]
        try:
            return await outcome
        finally:
            for host in hosts:
                host.cancel()
            await asyncio.gather(*hosts, return_exceptions=True)

    async def _drive(self, work: Callable[[SimulatedCluster], Coroutine[Any, Any, Any]]) -> Any:
        loop = asyncio.get_running_loop()
        self.cluster = dist.JoinCluster(
            len(self.names), service=self.service, secret=SECRET, limits=new_limits(**self.limits), transport=self.network.transport(DRIVER),
            on_lost=lambda name, status: self.on_lost(name), on_return=lambda name, url: self.on_return(name),
        )  # fmt: skip
        async with ag.Engine(), self.cluster:
            self.joined_in = loop.time()
            return await work(self)

    async def _keep(self, name: str) -> None:
        """Run a worker's process, and again a while after it was killed."""
        while True:
            try:
                return await self.network.spawn(name, self._serve(name))
            except HostKilledError:
                await asyncio.sleep(20.0)
                self.network.restart(name)

    async def _serve(self, name: str) -> None:
        worker = dist.Worker(name, service=self.service, secret=SECRET, limits=new_limits(**self.limits), transport=self.network.transport(name))
        async with ag.Engine(), worker:
            await serve_cluster(worker, f"sim://{DRIVER}", asyncio.Event())
