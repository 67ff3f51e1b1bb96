"""Host: one worker's process on the simulated network: an engine, a worker, what it serves, and what it is busy with itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any, Protocol

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.autograd.context import Context
from aiograd.distributed.rpc.keyring import kid_of
from aiograd.distributed.rpc.transport import Transport
from aiograd.testing import SimulatedNetwork
from tests.chaos.mix import Mix
from tests.chaos.promises import Notes
from tests.chaos.service import UNTIL, Failure, Served

DRIVER, TENANT = "driver", "tenant"
KEY, TENANT_KEY = b"c" * 32, b"t" * 32
#: of those whose functions and hooks take a moment
PAUSES, LONGEST_PAUSE = 0.15, 0.03


def new_limits(frame_bytes: int) -> dist.Limits:
    """The limits of all workers: deadlines are short, since virtual time is cheap but not free."""
    return dist.Limits(frame_bytes=frame_bytes, handshake_timeout=2.0, default_deadline=5.0, lease=12.0)


class World(Protocol):
    """The part of a run that a host uses."""

    network: SimulatedNetwork
    notes: Notes
    mix: Mix
    limits: dist.Limits
    names: list[str]
    hosts: dict[str, Host]
    streams: dict[str, Random]
    may_fail: bool
    buried: set[tuple[str, bytes]]
    squatted: set[tuple[str, bytes]]


class Host:
    """One incarnation of a worker's process.

    Args:
        world: the run it is in.
        name: of the worker.
        work: what it is busy with, besides serving.
    """

    def __init__(self, world: World, name: str, work: Callable[[Host], Awaitable[None]] | None = None) -> None:
        self.world = world
        self.name = name
        self.served = SimulatedServed(self)
        self.keyring = _keyring(name)
        self.worker: dist.Worker
        self.work = work
        #: asyncio's task of the process; None before it runs
        self.main_task: asyncio.Task[None] | None = None
        self.watch = ContextWatch(self)

    async def main(self) -> None:
        """The process."""
        world = self.world
        self.main_task = asyncio.current_task()
        transport = self.new_transport()
        async with ag.Engine(inline_ns=world.mix.inline_ns):
            self.worker = self.served.worker = dist.Worker(
                self.name, service=self.served.service, secret=self.keyring, limits=world.limits, transport=transport
            )
            self.watch.start()
            async with self.worker:
                await self.introduce()
                world.hosts[self.name] = self
                if self.work is not None:
                    await self.work(self)
                await asyncio.get_running_loop().create_future()

    @property
    def is_closing(self) -> bool:
        """True once the worker has begun to close."""
        return self.worker._core.is_closing

    def new_transport(self) -> Transport:
        """The transport."""
        return self.world.network.transport(self.name)

    async def introduce(self) -> None:
        """Let the worker know the others."""
        for other in self.world.names:
            if other != self.name:
                self.worker.add_peer(other, f"sim://{other}")

    async def timed(self, what: str, seconds: float, awaitable: Awaitable[Any]) -> Any:
        """Await something that must end in time, however it ends."""
        notes = self.world.notes
        begun = notes.clock()
        try:
            return await awaitable
        finally:
            notes.in_time(self.name, what, begun, seconds)

    def find(self, key: bytes, principal: str) -> Context | None:
        """This worker's view of a context."""
        return next((each for each in self.worker._contexts if (each.key, each.principal) == (key, principal)), None)


class SimulatedServed(Served):
    """The service of a host; its requests to others are timed and noted."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.name, _Journal(host))
        self.host = host

    async def pause(self) -> None:
        """A moment's wait, or none."""
        draw = self.host.world.streams["pauses"].random()
        if draw < PAUSES:
            await asyncio.sleep(draw / PAUSES * LONGEST_PAUSE)

    async def ask(self, what: str, make: Callable[[int, float], Coroutine[Any, Any, Any]], timeout: float | None = None) -> Any:
        """See `Served.ask`."""
        world, notes = self.host.world, self.host.world.notes
        self.fail()
        now = notes.clock()
        until = min(UNTIL.get(), now + (timeout or world.limits.default_deadline))
        context = dist.current_context()
        token = notes.new_token(until, None if context is None else context.key)
        try:
            result = await self.host.timed(f"{what} (call {token})", max(0.0, until - now), make(token, until))
        except asyncio.CancelledError:
            notes.given_up(token)
            raise
        notes.answered(token)
        return result

    def hook(self, value: ag.Tensor) -> None:
        """A hook that may wait or raise."""
        if not value.requires_grad:
            return

        async def look(grad: ag.Tensor) -> None:
            await self.pause()
            self.fail()

        value.register_hook(look)

    def fail(self) -> None:
        """Raise, now and then."""
        world = self.host.world
        if world.mix.failing and world.may_fail and world.streams["failures"].random() < world.mix.failing:
            world.notes.count("failure")
            raise Failure("user code that fails")


class _Journal:
    """Notes for one host what it runs."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._begun: dict[int, float] = {}

    def begin(self, token: int, until: float) -> None:
        notes = self._host.world.notes
        self._begun[token] = notes.clock()
        notes.begin(self._host.name, token, until)

    def end(self, token: int) -> None:
        self._host.world.notes.end(self._host.name, token, self._begun.pop(token))


class ContextWatch:
    """Sees to it that a released context never comes back, for its principal, to the worker that has released it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._released: set[tuple[bytes, str]] = set()

    def start(self) -> None:
        """Look on from now on."""
        table: Any = self._host.worker._contexts
        add, remove = table._add, table.remove

        def watched_add(key: bytes, origin: str, principal: str) -> Any:
            if (key, principal) in self._released:
                self._host.world.notes.expect(False, f"{self._host.name}: context {key.hex()[:8]} was released and is opened again")
            return add(key, origin, principal)

        def watched_remove(context: Context, now: float) -> Any:
            self._released.add((context.key, context.principal))
            return remove(context, now)

        table._add, table.remove = watched_add, watched_remove


def _keyring(name: str) -> dist.Keyring:
    if name == TENANT:
        return dist.Keyring(TENANT_KEY, principal=TENANT)
    keyring = dist.Keyring(KEY)
    keyring.add(kid_of(TENANT_KEY), TENANT_KEY, TENANT)
    return keyring
