"""Endpoints on a switchboard, for tests of what endpoints do: nodes that know each other, and handlers that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.statistics import PeerStatistics
from aiograd.errors import WorkerLostError
from aiograd.testing import Faults, SimulatedNetwork, simulated_run
from tests.distributed.memory import Switchboard

SECRET = b"0123456789abcdef" * 2
LIMITS = Limits()
CALL = 7


class Node:
    """An endpoint with a handler that does what its first argument says, and notes what happens to it."""

    def __init__(self, world: World, name: str, options: dict[str, Any]) -> None:
        self.world = world
        self.name = name
        self.ran: list[Any] = []
        self.cancelled: list[Any] = []
        self.callers: list[PeerIdentity] = []
        self.timeouts: list[float] = []
        self.lost: list[tuple[PeerIdentity, WorkerLostError]] = []
        self.gate = asyncio.Event()
        self.transport = world.board.transport(options.pop("host", name))
        options.setdefault("keyring", Keyring(SECRET))
        options.setdefault("limits", world.limits)
        self.endpoint = Endpoint(name, transport=self.transport, handler=self.handle, on_lost=lambda *lost: self.lost.append(lost), **options)

    async def handle(self, peer: PeerIdentity, kind: int, value: Any, timeout: float) -> Any:
        self.callers.append(peer)
        self.timeouts.append(timeout)
        word, argument = value
        self.ran.append(argument)
        try:
            match word:
                case "echo":
                    return argument
                case "gate":
                    await self.gate.wait()
                    return argument
                case "sleep":
                    await asyncio.sleep(argument)
                    return argument
                case "stubborn":
                    try:
                        await self.gate.wait()
                    except asyncio.CancelledError:
                        raise ValueError("not now") from None
                case "unsendable":
                    return object()
                case "raise":
                    raise self.world.errors[argument]
                case "relay":
                    name, inner = argument
                    return await self.endpoint.request(name, kind, inner, timeout)
        except asyncio.CancelledError:
            self.cancelled.append(argument)
            raise
        raise AssertionError(word)

    async def ask(self, peer: str, word: str, argument: Any = None, timeout: float = 30.0, **options: Any) -> Any:
        return await self.endpoint.request(peer, CALL, (word, argument), timeout, **options)

    async def asking(self, seconds: float, *request: Any, **options: Any) -> asyncio.Task[Any]:
        """Ask, and let seconds pass."""
        task = asyncio.create_task(self.ask(*request, **options))
        await asyncio.sleep(seconds)
        return task

    def statistics(self, peer: str) -> PeerStatistics:
        (found,) = [each for each in self.endpoint.statistics().peers if each.name == peer]
        return found


class World:
    """Nodes on one switchboard; all are closed at the end."""

    def __init__(self, limits: Limits = LIMITS, **options: Any) -> None:
        self.board = Switchboard(**options)
        self.limits = limits
        self.nodes: list[Node] = []
        self.errors: dict[str, BaseException] = {}

    async def node(self, name: str, *known: Node, **options: Any) -> Node:
        node = Node(self, name, options)
        await node.endpoint.open("memory", 0)
        self.nodes.append(node)
        for other in known:
            node.endpoint.add_peer(other.name, other.transport.url)
        return node

    async def pair(self) -> tuple[Node, Node]:
        """a, which knows b, and b."""
        b = await self.node("b")
        return await self.node("a", b), b

    async def talking(self) -> tuple[Node, Node]:
        """a and b, connected by a request of a."""
        a, b = await self.pair()
        assert await a.ask("b", "echo", 1) == 1
        return a, b

    async def mutual(self) -> tuple[Node, Node]:
        """a and b, which know each other."""
        a, b = await self.pair()
        b.endpoint.add_peer("a", a.transport.url)
        return a, b

    async def __aenter__(self) -> World:
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes:
            await node.endpoint.aclose()
        for node in self.nodes:
            assert node.endpoint.statistics().bytes_held == 0


class EndpointPair:
    """Endpoints "a", whose code a test is, and "b", on a simulated network. Subclasses say what handlers do."""

    limits = LIMITS

    def __init__(self, **faults: Any) -> None:
        self.network = SimulatedNetwork(0, faults=Faults(**faults))
        self.a: Endpoint

    async def handle(self, peer: PeerIdentity, kind: int, value: Any, timeout: float) -> Any:
        return value

    async def open(self, name: str) -> Endpoint:
        endpoint = Endpoint(name, transport=self.network.transport(name), keyring=Keyring(SECRET), limits=self.limits, handler=self.handle)
        await endpoint.open("", 0)
        return endpoint

    async def _on_a(self, main: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        self.a = await self.open("a")
        self.a.add_peer("b", "sim://b")
        await main(self)
        await self.a.aclose()

    def run(self, main: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        async def world() -> None:
            await self.network.spawn("b", self.open("b"))
            await self.network.spawn("a", self._on_a(main))

        simulated_run(world)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def simulate(main: Callable[[], Coroutine[Any, Any, None]], **options: Any) -> float:
    """Run on virtual time; returns how long it took."""
    run = simulated_run(main, **options)
    assert not run.leftover_tasks
    return run.time
