"""Faults at moments of a transaction between a coordinator and two members, on a simulated network in virtual time.

A moment is a message on one host: before it is sent or served, or after it is served. A fault strikes there once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from aiograd import distributed as dist
from aiograd.distributed.messages.calls import FunctionCall
from aiograd.distributed.messages.requests import REQUESTS
from aiograd.errors import AiogradError, CommitUnknown, StepError
from aiograd.testing import Faults, SimulatedNetwork
from tests.distributed.workers import SECRET

COORDINATOR, MEMBERS = "driver", ("a", "b")
NAMES = (COORDINATOR, *MEMBERS)
LEASE = 6.0
LIMITS = dist.Limits(default_deadline=LEASE, lease=LEASE)
#: seconds in which no peer is lost, and after which leases have ended
MOMENT, LONG = 0.8, 2.5 * LEASE
#: seconds in which a loss is noticed
NOTICED = 2 * LIMITS.silence


class Moment(NamedTuple):
    """A message on a host.

    Args:
        side: "sent" (before it leaves), "before" or "after" (it is served).
        message: its class; or the name of the function, or of the method, that it calls.
        host: the sender, or the receiver.
        held: a message, or the answer to it, that its receiver gets only when the fault has struck; and the receiver.
        pauses: the host waits then until the fault has been noticed everywhere.
    """

    side: str
    message: str
    host: str
    held: tuple[str, str] = ("", "")
    pauses: bool = False


def name_of(kind: int, value: Any) -> str:
    """The name of a request, see `Moment`."""
    message = REQUESTS.parse(kind, value)
    if not isinstance(message, FunctionCall):
        return type(message).__name__
    return str(message.args[1]) if message.function == "aiograd.reference.call" else message.function


#: a fault
Strike: TypeAlias = "Callable[[Scene], None]"


class Scene:
    """A coordinator and two members, each on a host of its own, and one fault. A subclass knows a protocol."""

    #: by name
    moments: Mapping[str, Moment]
    limits = LIMITS
    #: the functions and classes that members expose
    service: dist.Service | None = None
    #: the hosts with work in a transaction
    participants: tuple[str, ...] = NAMES

    def __init__(self) -> None:
        self.network = SimulatedNetwork(1, faults=Faults(latency=(0.001, 0.002)))
        self.workers: dict[str, dist.Worker] = {}
        self.servers: list[asyncio.Future[Any]] = []
        self.over, self.struck, self.rested = asyncio.Event(), asyncio.Event(), asyncio.Event()
        #: hosts that refuse the next request for want of memory, and hosts that had none to refuse
        self.short: set[str] = set()
        self.unmet: set[str] = set()
        #: when every host runs again, reaches the others, and has noticed what was lost
        self.calm = 0.0
        #: the transaction, as its caller sees it
        self.stepping: asyncio.Task[Any]
        self._armed: tuple[Moment, Strike] | None = None

    # ---------------------------------------------------------------- the protocol

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """On the coordinator: everything that transactions need, among the living hosts. Nothing was taken yet."""
        raise NotImplementedError
        yield

    async def step(self) -> None:
        """On the coordinator: one transaction."""
        raise NotImplementedError

    def taken(self, name: str) -> int:
        """The number of transactions whose whole work can be seen on a host."""
        raise NotImplementedError

    def is_in_doubt(self, name: str) -> bool:
        """True if a host says that its work is in doubt."""
        raise NotImplementedError

    def left(self, name: str) -> Any:
        """Work that a host still holds for a transaction that is over; false: none."""
        raise NotImplementedError

    @property
    def is_usable(self) -> bool:
        """True if the session goes on."""
        return self.living == list(NAMES) and not any(map(self.is_in_doubt, NAMES)) and ending(self.stepping) != "in doubt"

    async def again(self) -> None:
        """On the coordinator: another transaction of the session."""
        await self.step()

    # ---------------------------------------------------------------- hosts

    @property
    def living(self) -> list[str]:
        """The names of the hosts that were not killed."""
        return [name for name in NAMES if (host := self.network.find(name)) is not None and not host.owner.is_dead]

    def worker(self, name: str) -> dist.Worker:
        peers = {other: f"sim://{other}" for other in NAMES if other != name}
        worker = dist.Worker(name, service=self.service, peers=peers, secret=SECRET, transport=self.network.transport(name), limits=self.limits)
        self.workers[name] = worker
        core = worker._core
        request = core.endpoint.request

        def send(peer: str, kind: int, value: Any, *rest: Any) -> Any:
            self.reach("sent", self._name_of(kind, value), name)
            return request(peer, kind, value, *rest)

        async def serve(kind: int, handler: Any, peer: Any, value: Any, timeout: float) -> Any:
            message = self._name_of(kind, value)
            await self._pause(self.reach("before", message, name))
            await self._hold(message, name)
            if name in self.short:
                self.short.discard(name)
                raise MemoryError("no room")
            answer = await handler(peer, value, timeout)
            await self._pause(self.reach("after", message, name))
            await self._hold("answer to " + message, peer.name)
            return answer

        def serve_promptly(kind: int, handler: Any, peer: Any, value: Any) -> Any:
            self.reach("before", self._name_of(kind, value), name)
            return handler(peer, value)

        core.endpoint.request = send  # type: ignore[method-assign]
        for handlers, serving in ((core.handlers, serve), (core.prompt_handlers, serve_promptly)):
            handlers.update({kind: functools.partial(serving, kind, handler) for kind, handler in handlers.items()})
        return worker

    def start(self) -> None:
        """Start the members."""
        self.servers += [self.network.spawn(name, self.serve(name)) for name in MEMBERS]

    async def serve(self, name: str) -> None:
        async with self.worker(name):
            await self.over.wait()

    async def drive(self, moment: Moment, strike: Strike) -> None:
        """On the coordinator: a transaction with a fault; and when all is calm again, another one."""
        async with self.worker(COORDINATOR):
            async with self.session():
                self.arm(moment, strike)
                self.stepping = asyncio.ensure_future(self.step())
                await self.rested.wait()
                self._armed, self.unmet = None, {*self.short}
                self.short.clear()
                is_usable = self.is_usable
                if is_usable:
                    known = max(map(self.taken, self.participants))
                    await self.again()
                    await self.finish()
                    assert {self.taken(name) for name in self.participants if name in self.living} == {known + 1}
            if not is_usable:
                await self.begin_anew()

    async def drive_anew(self) -> None:
        """On a coordinator that was restarted: a transaction."""
        self._armed = None
        async with self.worker(COORDINATOR):
            await self.begin_anew()

    async def begin_anew(self) -> None:
        """On the coordinator: a transaction among the living."""
        async with self.session():
            await self.step()
            await self.finish()
            assert {self.taken(name) for name in self.participants if name in self.living} == {1}

    @property
    def seen(self) -> str:
        """The living that have the work of the transaction, in words."""
        taken = {name: self.taken(name) for name in self.living if name in self.participants}
        doubtful = {name for name in taken if self.is_in_doubt(name)}
        assert {*taken.values()} <= {0, 1}, taken
        if not any(taken.values()):
            return "none, in doubt" if doubtful and COORDINATOR not in self.living else "none"
        lacking = {name for name, count in taken.items() if not count}
        return "all but b" if lacking == {"b"} <= doubtful else "some" if lacking else "all"

    async def finish(self) -> None:
        """Wait until the living hold nothing any more."""
        while any(map(self.left, self.living)):
            await asyncio.sleep(0.1)

    # ---------------------------------------------------------------- the fault

    def reach(self, side: str, message: str, host: str) -> bool:
        """A host has come to a moment. Returns True where it is to wait."""
        moment, strike = self._armed or (None, None)
        if moment is None or strike is None or (side, message, host) != moment[:3]:
            return False
        self._armed = None
        self.struck.set()
        self.disturb(0.0)
        strike(self)
        return moment.pauses

    def _name_of(self, kind: int, value: Any) -> str:
        return "" if self._armed is None else name_of(kind, value)

    async def _hold(self, message: str, host: str) -> None:
        if self._armed is not None and self._armed[0].held == (message, host):
            await self.struck.wait()

    async def _pause(self, pauses: bool) -> None:
        if pauses and not self.short:
            await asyncio.sleep(NOTICED)

    def arm(self, moment: Moment, strike: Strike) -> None:
        """Let a fault strike at a moment."""
        self._armed = moment, strike

    def disturb(self, seconds: float) -> None:
        """Trouble has begun, and ends after these seconds."""
        self.calm = max(self.calm, asyncio.get_running_loop().time() + seconds + NOTICED)

    def part(self, name: str, others: tuple[str, ...], seconds: float) -> None:
        """Cut a host off from others for a while."""
        for other in others:
            self.network.cut(name, other)
            asyncio.get_running_loop().call_later(seconds, self.network.heal, name, other, context=contextvars.Context())
        self.disturb(seconds)

    def freeze(self, name: str, seconds: float) -> None:
        """Freeze a host for a while."""
        self.disturb(seconds)
        self.network.freeze(name, seconds)

    def reset(self) -> None:
        """Break all connections."""
        for one, other in itertools.combinations(NAMES, 2):
            self.network.reset(one, other)


def named(error: CommitUnknown | StepError) -> tuple[str, ...]:
    """The workers that have not confirmed a transaction."""
    return error.failed if isinstance(error, StepError) else error.workers


def ending(stepping: asyncio.Future[Any]) -> str:
    """How a transaction has ended for its caller."""
    if stepping.cancelled():
        try:
            stepping.result()
        except asyncio.CancelledError as error:
            return "cancelled after the commit" if getattr(error, "committed", False) else "cancelled"
    error = stepping.exception()
    if error is None:
        return "done"
    assert isinstance(error, AiogradError | MemoryError), error
    if isinstance(error, CommitUnknown | StepError):
        assert {*named(error)} <= {*MEMBERS} and (error.committed or isinstance(error, StepError)), error
        return "in doubt"
    assert not getattr(error, "committed", False), error
    return "failed"


FAULTS: Mapping[str, Strike] = {
    "the caller is cancelled": lambda scene: scene.stepping.cancel() and None,
    "all connections break": Scene.reset,
    "a member is short of memory": lambda scene: scene.short.add("b"),
    "a member is cut off for a moment": lambda scene: scene.part("b", ("driver", "a"), MOMENT),
    "a member is cut off from the coordinator": lambda scene: scene.part("b", ("driver",), LEASE / 2),
    "a member is cut off": lambda scene: scene.part("b", ("driver", "a"), LEASE / 2),
    "a member is cut off for longer than its lease": lambda scene: scene.part("b", ("driver", "a"), LONG),
    "a member is frozen for a moment": lambda scene: scene.freeze("b", MOMENT),
    "a member is frozen for longer than its lease": lambda scene: scene.freeze("b", LONG),
    "a member is killed": lambda scene: scene.network.kill("b"),
    "a member is killed silently": lambda scene: scene.network.kill("b", silent=True),
    "the coordinator is frozen for a moment": lambda scene: scene.freeze("driver", MOMENT),
    "the coordinator is frozen for longer than a lease": lambda scene: scene.freeze("driver", LONG),
    "the coordinator is killed": lambda scene: scene.network.kill("driver"),
    "the coordinator is killed silently": lambda scene: scene.network.kill("driver", silent=True),
}
