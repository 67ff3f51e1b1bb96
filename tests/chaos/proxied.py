"""Real workers that speak HTTP through proxies which do harm: the same work and the same promises as on the simulated network, in real time.

All workers are in this process, each in a context of its own, so that the oracle can look at their gradients.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import Counter
from random import Random

from aiograd.distributed.rpc.http import HttpTransport
from aiograd.distributed.rpc.transport import Transport
from tests.chaos.hosts import DRIVER, TENANT, Host, new_limits
from tests.chaos.mix import Activity, Mix
from tests.chaos.promises import Broken, Notes
from tests.chaos.proxy import Proxy
from tests.chaos.service import all_of
from tests.chaos.work import Work, fresh_pass

#: part of the connections that are harmed, per direction
RATE = 0.35
#: heartbeats by which real time may be late: others use this machine too
GRACE = 6.0
#: seconds until a run is called a hang
LONGEST = 120.0


class ProxiedHost(Host):
    """A worker that listens on a real port, and reaches each other one through a proxy."""

    world: ProxiedWorld

    def new_transport(self) -> Transport:
        """The transport."""
        return HttpTransport(limits=self.world.limits, trusted_hosts=("127.0.0.1",))

    async def introduce(self) -> None:
        """Put proxies before this worker, and tell the others of them."""
        world = self.world
        for other in world.names:
            if other != self.name:
                proxy = Proxy(self.worker.url, Random(f"{world.seed}:{other}>{self.name}"), RATE, world.hits)
                world.proxies.append(proxy)
                world.urls[other, self.name] = await proxy.open()


class ProxiedWorld:
    """Everything of one run."""

    def __init__(self, seed: int | str) -> None:
        loop = asyncio.get_running_loop()
        self.seed = seed
        self.mix = Mix(cancels=0.1, failing=0.02, workers=2)
        self.limits = new_limits(4096)
        self.notes = Notes(loop.time, lambda: 1, False, self.limits.heartbeat, self.limits.silence, GRACE)
        self.names = [DRIVER, "w0", "w1", TENANT]
        self.hosts: dict[str, Host] = {}
        self.streams = {name: Random(f"{seed}:{name}") for name in ("pauses", "failures")}
        self.may_fail = True
        self.buried: set[tuple[str, bytes]] = set()
        self.squatted: set[tuple[str, bytes]] = set()
        self.proxies: list[Proxy] = []
        #: (who dials, whom) -> through which proxy
        self.urls: dict[tuple[str, str], str] = {}
        self.hits: Counter[str] = Counter()

    async def run(self) -> None:
        """Everything."""
        processes = [
            asyncio.create_task(ProxiedHost(self, name).main(), context=contextvars.Context())  # type: ignore[arg-type]
            for name in self.names
        ]
        try:
            while len(self.hosts) < len(self.names):
                await asyncio.sleep(0.01)
            for (who, whom), url in self.urls.items():
                self.hosts[who].worker.add_peer(whom, url)
            async with asyncio.timeout(LONGEST):
                driving = self._train(DRIVER, ("context", "context", "echo", "tally", "steps", "nap"))
                await asyncio.gather(driving, self._train(TENANT, ("context", "probe")))
                self.may_fail = False
                for proxy in self.proxies:
                    proxy.heal()
                await asyncio.sleep(2 * self.limits.silence)
                await self._run_on(DRIVER, self._fresh_passes())
                await self._rest()
        except TimeoutError:
            raise Broken(f"a hang: not done within {LONGEST:g} s; {self.notes.broken[:3]}") from None
        finally:
            for process in processes:
                process.cancel()
            await asyncio.wait(processes)
            for proxy in self.proxies:
                await proxy.aclose()
        for process in processes:
            if not process.cancelled():
                process.result()
        if self.notes.broken:
            raise Broken("; ".join(self.notes.broken[:3]))

    async def _run_on(self, name: str, coroutine: object) -> None:
        await asyncio.create_task(coroutine, context=self.hosts[name].worker.endpoint.context.copy())  # type: ignore[arg-type]

    async def _train(self, name: str, activities: tuple[Activity, ...]) -> None:
        host = self.hosts[name]
        random = Random(f"{self.seed}:{name}:work")
        for _ in range(2):
            work = Work(self, host, [])  # type: ignore[arg-type]
            todo = [work.do(activity, Random(random.random())) for activity in random.sample(activities, len(activities))]
            await self._run_on(name, all_of(todo))

    async def _fresh_passes(self) -> None:
        host = self.hosts[DRIVER]
        for peer in ("w0", "w1"):
            await fresh_pass(host, peer, self.notes)
            self.notes.count("fresh pass")

    async def _rest(self) -> None:
        left: dict[str, dict[str, int]] = {}
        for _ in range(round(2.5 * self.limits.lease_seconds / self.limits.heartbeat)):
            left = {}
            for name, host in self.hosts.items():
                figures = host.worker.statistics()
                counts = {key: getattr(figures, key) for key in ("contexts", "passes", "calls", "bytes_held")}
                counts["running"] = sum(peer.running + peer.outstanding for peer in figures.peers)
                if found := {key: count for key, count in counts.items() if count}:
                    left[name] = found
            if not left:
                return
            await asyncio.sleep(self.limits.heartbeat)
        self.notes.expect(False, f"left over: {left}")


def run_proxied(seed: int | str) -> tuple[Counter[str], Counter[str]]:
    """Run one seed.

    Returns:
        What was done, and what the proxies have done.

    Raises:
        Broken: a promise was not kept.
    """

    async def main() -> tuple[Counter[str], Counter[str]]:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(f"{what.get('message')}: {what.get('exception')!r}"))
        world = ProxiedWorld(seed)
        await world.run()
        if complaints:
            raise Broken(f"the loop was told of: {complaints[:3]}")
        return world.notes.counts, world.hits

    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(main())
    raise KeyboardInterrupt
