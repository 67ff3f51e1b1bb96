"""Tenants whose workers have the same names are strangers to each other: what one's worker does or suffers is none of its namesake's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from aiograd import distributed as dist
from aiograd.distributed.rpc.identity import PeerId, PeerIdentity
from aiograd.distributed.rpc.keyring import Keyring, kid_of
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import CommitUnknown, Overloaded, ReferenceLostError, UnknownPeerError, WorkerLostError
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.memory import MemoryTransport, Switchboard
from tests.distributed.workers import OTHER_SECRET, leaf, settled, until, values, view
from tests.distributed.world import LIMITS, SECRET, Node, World

TENANTS = {"default": Keyring(SECRET), "tenant": Keyring(OTHER_SECRET, principal="tenant")}


def both() -> Keyring:
    keyring = Keyring(SECRET)
    keyring.add(kid_of(OTHER_SECRET), OTHER_SECRET, "tenant")
    return keyring


def test_an_identity_is_found_by_principal_and_name() -> None:
    one, two = PeerIdentity("w", b"i" * 16, "default"), PeerIdentity("w", b"j" * 16, "tenant")
    assert one.peer == PeerId("default", "w") == one._replace(incarnation=b"k" * 16).peer
    assert one.peer != two.peer and {one.peer: 1, two.peer: 2}[PeerId("tenant", "w")] == 2


# -------------------------------------------------------------------- endpoints


class Namesakes:
    """A hub that both tenants know, and a worker named "w" of each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.hub: Node
        self.mine: Node
        self.theirs: Node

    async def open(self, limits: Limits = LIMITS) -> Namesakes:
        self.hub = await self.world.node("hub", keyring=both(), limits=limits)
        self.mine, self.theirs = await self.worker("default"), await self.worker("tenant")
        return self

    async def worker(self, principal: str) -> Node:
        """A "w", at an address of its own."""
        return await self.world.node("w", self.hub, keyring=TENANTS[principal], host=f"{principal}.w")


async def test_a_worker_does_not_evict_its_namesake(world: World, virtual_clock: VirtualClock) -> None:
    n = await Namesakes(world).open()
    asking = asyncio.create_task(n.mine.ask("hub", "gate", 1))
    await asyncio.sleep(0.1)
    back = asyncio.create_task(n.hub.ask("w", "gate", 2))
    await asyncio.sleep(0.1)
    assert await n.theirs.ask("hub", "echo", 3) == 3
    assert await n.hub.ask("w", "echo", 4, principal="tenant") == 4
    assert n.theirs.ran == [4] and n.mine.ran == [2]
    n.hub.gate.set()
    n.mine.gate.set()
    assert await asking == 1 and await back == 2
    assert not n.hub.lost and not n.mine.lost and not n.theirs.lost
    assert world.board.dials == 2
    assert [(caller.name, caller.principal) for caller in n.hub.callers] == [("w", "default"), ("w", "tenant")]


async def test_a_worker_that_is_restarted_is_lost_to_its_tenant_only(world: World, virtual_clock: VirtualClock) -> None:
    n = await Namesakes(world).open()
    asking = [asyncio.create_task(node.ask("hub", "gate", 1)) for node in (n.mine, n.theirs)]
    await asyncio.sleep(0.1)
    back = [asyncio.create_task(n.hub.ask("w", "gate", 2, principal=principal)) for principal in ("default", "tenant")]
    await asyncio.sleep(0.1)
    for channel in n.theirs.transport._mine:
        channel.held = True  # nobody hears that it is gone
    n.theirs.transport.stop()
    n.theirs.transport.is_dead = True
    again = await n.worker("tenant")
    assert await again.ask("hub", "echo", 3) == 3
    with pytest.raises(WorkerLostError, match="restarted"):
        await back[1]
    assert [identity.peer for identity, _ in n.hub.lost] == [PeerId("tenant", "w")]
    n.hub.gate.set()
    n.mine.gate.set()
    assert await asking[0] == 1 and await back[0] == 2
    with pytest.raises(WorkerLostError):
        await asking[1]


async def test_budgets_and_figures_are_per_tenant(virtual_clock: VirtualClock) -> None:
    size = 40_000
    async with World() as world:
        n = await Namesakes(world).open(replace(LIMITS, bytes_per_peer=size + 20_000))
        holding = asyncio.create_task(n.mine.ask("hub", "gate", "x" * size))
        await asyncio.sleep(0.1)
        assert await n.theirs.ask("hub", "echo", "y" * size) == "y" * size
        figures = {each.principal: each for each in n.hub.endpoint.statistics().peers}
        assert figures["default"].running == 1 and figures["default"].bytes_held > size
        assert figures["tenant"].running == 0 and figures["tenant"].bytes_held == 0
        assert figures["tenant"].bytes_in > size and figures["tenant"].name == figures["default"].name == "w"
        n.hub.gate.set()
        assert await holding == "x" * size


async def test_a_worker_may_be_in_another_place_for_each_tenant(world: World, virtual_clock: VirtualClock) -> None:
    n = await Namesakes(world).open()
    hub = n.hub.endpoint
    hub.add_peer("w", n.theirs.transport.url, "tenant")
    assert await n.hub.ask("w", "echo", 1, principal="tenant") == 1 and n.theirs.ran == [1]
    with pytest.raises(UnknownPeerError, match=r"knows no worker 'w'.*it knows none"):
        await n.hub.ask("w", "echo", 2)
    hub.add_peer("w", n.mine.transport.url)
    assert await n.hub.ask("w", "echo", 3) == 3 and n.mine.ran == [3]
    assert await n.hub.ask("w", "echo", 4, principal="tenant") == 4 and n.theirs.ran == [1, 4]
    assert hub.peers == ("w",)
    assert hub.url_of(PeerId("tenant", "w")) == n.theirs.transport.url and hub.url_of(PeerId("other", "w")) == n.mine.transport.url


# -------------------------------------------------------------------- workers

service = dist.Service()
weight = leaf(2, 3)


@service.function
async def scale(x: Any) -> Any:
    return x * weight


@service.function
async def by_way_of_w(x: Any) -> Any:
    return await dist.current_worker().call("w", "scale", x) * weight


@service.reference
class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def value(self) -> int:
        return self.count


class Tenants(NamedTuple):
    hub: dist.Worker
    mine: dist.Worker
    theirs: dist.Worker
    #: of `theirs`
    transport: MemoryTransport


@contextlib.asynccontextmanager
async def tenants() -> AsyncIterator[Tenants]:
    board = Switchboard()
    async with contextlib.AsyncExitStack() as stack:

        async def worker(name: str, host: str, secret: Keyring) -> dist.Worker:
            return await stack.enter_async_context(dist.Worker(name, service=service, secret=secret, transport=board.transport(host)))

        hub = await worker("hub", "hub", both())
        mine, theirs = await worker("w", "mine", TENANTS["default"]), await worker("w", "theirs", TENANTS["tenant"])
        for each in (mine, theirs):
            each.add_peer("hub", hub.url)
        transport = theirs.endpoint.transport
        assert isinstance(transport, MemoryTransport)
        yield Tenants(hub, mine, theirs, transport)


async def test_passes_of_namesakes_go_on_side_by_side() -> None:
    async with tenants() as t:

        async def train(worker: dist.Worker, factor: float) -> list[list[float]]:
            found = []
            for _ in range(5):
                x = leaf(factor, 1)
                async with worker.context() as ctx:
                    y = await worker.call("hub", "by_way_of_w", x)
                    await ctx.backward((y * y).sum())
                    found.append(values(ctx.grads[x]))
            return found

        first, second = await asyncio.gather(train(t.mine, 1.0), train(t.theirs, 2.0))
        assert first == [[32, 162]] * 5 and second == [[64, 162]] * 5
        assert {peer.principal for peer in t.hub.statistics().peers} == {"default", "tenant"}
        await settled(t.hub, t.mine, t.theirs)


async def test_contexts_and_references_outlive_the_loss_of_a_namesake() -> None:
    async with tenants() as t:
        counter, lost = await t.mine.remote("hub", "Counter", 1), await t.theirs.remote("hub", "Counter", 2)
        async with t.mine.context() as ctx, t.theirs.context() as theirs:
            x = leaf(1, 1)
            with t.mine.within(ctx):
                y = await t.mine.call("hub", "scale", x)
            await t.theirs.call("hub", "scale", leaf(1, 1))
            assert list(view(t.hub, ctx).openers) == [("w", t.mine.endpoint.incarnation)]
            assert list(view(t.hub, theirs).openers) == [("w", t.theirs.endpoint.incarnation)]
            t.transport.crash()
            await until(lambda: not t.hub.endpoint.is_connected(PeerId("tenant", "w")))
            assert t.hub.endpoint.is_connected(PeerId("default", "w"))
            await ctx.backward(y.sum())
            assert values(ctx.grads[x]) == [2, 3]
            assert await counter.call("value") == 1
            with pytest.raises(ReferenceLostError):
                await t.mine._calls.reference(lost.to_wire()).call("value")


async def test_doubt_about_a_worker_is_not_doubt_about_its_namesake() -> None:
    class Undecided:
        """An adapter whose gradients on "w" are in doubt."""

        def _doubt(self, leaves: Any, owners: Any) -> CommitUnknown | None:
            return CommitUnknown("in doubt", workers=("w",)) if "w" in owners else None

        def _leave(self) -> None:
            """Nothing to let go of."""

    async with tenants() as t:
        objects = t.hub._objects
        for principal, is_mine in (("tenant", False), ("default", True)):
            wire = objects.table.add(adapter := Undecided(), None, principal, "w")
            objects.adapters[wire.id] = adapter
            if is_mine:
                with pytest.raises(CommitUnknown):
                    objects.check_certain(owners=["w"])
            else:
                objects.check_certain(owners=["w"])


async def test_a_tenant_that_fills_its_budget_leaves_its_namesake_alone() -> None:
    limits = Limits(requests_per_peer=1)
    async with World(limits) as world:
        n = await Namesakes(world).open(limits)
        held = asyncio.create_task(n.theirs.ask("hub", "gate", 1))
        await until(lambda: n.hub.ran)
        with pytest.raises(Overloaded):
            await n.theirs.ask("hub", "echo", 2)
        assert await n.mine.ask("hub", "echo", 3) == 3
        n.hub.gate.set()
        assert await held == 1
