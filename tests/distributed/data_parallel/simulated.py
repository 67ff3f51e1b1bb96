"""Replicas on a simulated network, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from aiograd.testing import Faults, SimulatedNetwork, simulated_run
from tests.distributed.data_parallel.models import Net, bits, module_of, serial, service
from tests.distributed.workers import SECRET
from tests.support import run_by

LEASE = 8.0
LIMITS = dist.Limits(default_deadline=20.0, lease=LEASE)
OPTIONS: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.05}}


class World:
    """A driver with replicas on workers of a simulated network.

    Args:
        names: of the workers; the first `replicas` of them have one.
        replicas: None: all.
        options: of `DataParallel.create`.
    """

    def __init__(
        self,
        names: Sequence[str] = ("w0", "w1", "w2"),
        replicas: int | None = None,
        *,
        module: Any = Net,
        seed: int = 1,
        **options: Any,
    ) -> None:
        self.network = SimulatedNetwork(seed, faults=Faults(latency=(0.001, 0.002)))
        self.names = list(names)
        self.first = self.names[: replicas or len(names)]
        self.module = module
        self.options = {**OPTIONS, **options}
        self.over = asyncio.Event()
        self.workers: dict[str, dist.Worker] = {}
        #: the processes of workers, those that were killed too
        self.servers: list[asyncio.Future[None]] = []
        self.driver: dist.Worker
        self.replicas: dist.DataParallel

    async def serve(self, name: str) -> None:
        async with self.worker(name):
            await self.over.wait()

    def worker(self, name: str) -> dist.Worker:
        peers = {other: f"sim://{other}" for other in ("driver", *self.names) if other != name}
        made = dist.Worker(name, service=service, peers=peers, secret=SECRET, transport=self.network.transport(name), limits=LIMITS)
        self.workers[name] = made
        return made

    def start(self, name: str) -> None:
        self.servers.append(self.network.spawn(name, self.serve(name)))

    def restart(self, name: str) -> None:
        self.network.restart(name)
        self.start(name)

    async def drive(self, main: Callable[[World], Awaitable[Any]]) -> Any:
        async with self.worker("driver") as self.driver:
            async with await dist.DataParallel.create(self.driver, self.first, self.module, **self.options) as self.replicas:
                return await main(self)

    @contextlib.asynccontextmanager
    async def running(self, main: Callable[[World], Awaitable[Any]]) -> AsyncIterator[asyncio.Future[Any]]:
        """Run `main` on the driver; the workers are there as long as the block."""
        for name in self.names:
            self.start(name)
        driving = self.network.spawn("driver", self.drive(main))
        try:
            yield driving
        finally:
            driving.cancel()
            self.over.set()
            await asyncio.gather(driving, *self.servers, return_exceptions=True)

    def simulate(self, main: Callable[[World], Awaitable[Any]], **options: Any) -> Any:
        """Run `main` on the driver to its end, and see that nothing is left running."""

        async def run() -> Any:
            async with self.running(main) as driving:
                return await driving

        run_ = simulated_run(run, **options)
        assert not run_.leftover_tasks, run_.leftover_tasks
        return run_.value

    # ---------------------------------------------------------------- what is there

    def host(self, name: str) -> Any:
        """The host of the replica on a worker, as it is there."""
        remote = self.replicas._coordinator.find(name)
        assert remote is not None
        return self.workers[name]._objects.table._held[remote.ref.key].value

    def state(self, name: str) -> dict[str, bytes]:
        """The bits of a replica."""
        module = module_of(self.host(name))
        assert all(parameter.grad is None for parameter in module.parameters())
        return bits(module.state_dict())

    @property
    def states(self) -> list[dict[str, bytes]]:
        return [self.state(name) for name in self.replicas.names]

    def around(self, name: str, method: str, action: Callable[[], Any], *, is_before: bool) -> None:
        """Do something when a host is asked for something, before it does it or before the answer goes out; once."""
        host = self.host(name)
        original = getattr(host, method)

        async def wrapped(*args: Any) -> Any:
            vars(host).pop(method, None)
            if is_before:
                action()
            result = await original(*args)
            if not is_before:
                action()
            return result

        setattr(host, method, wrapped)


def in_world(*names: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator of tests that run on the driver of such a world; each gets it first."""
    return run_by(lambda main: World(*names, **options).simulate(main))


async def expected(history: Sequence[Any], module: Any = Net, **options: Any) -> dict[str, bytes]:
    """The bits of one process that has taken these steps."""
    return (await whole(history, module=module, **options))[0]


async def whole(given: Any, cls: Any = ag.optim.AdamW, options: Any = None, module: Any = Net, **more: Any) -> tuple[dict[str, bytes], Any]:
    """Weights and state of one process that has taken these steps."""
    alone = module()
    optimizer = cls(alone.parameters(), **(options or {"lr": 0.05}))
    await serial(alone, optimizer, given, **more)
    return bits(alone.state_dict()), optimizer.state_dict()
