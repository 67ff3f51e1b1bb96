"""Decisions of passes with many participants: they go by a tree, and whoever it misses is told all the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.error_wire import from_wire
from aiograd.distributed.kinds import Kind
from aiograd.distributed.messages.calls import FunctionCall
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.errors import CommitUnknown, ProtocolError, RemoteError
from aiograd.testing import simulated_run
from aiograd.testing.network import Faults, SimulatedNetwork
from aiograd.transaction.tree import FANOUT
from tests.distributed.workers import SECRET
from tests.support import run_by

COUNT = 3 * FANOUT
service = dist.Service()


@service.reference
class Scale:
    """One parameter."""

    def __init__(self) -> None:
        self.weight = ag.tensor([2.0, 3.0], requires_grad=True)

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        return x * self.weight

    async def times(self, factor: float) -> float:
        if factor < 0:
            raise ValueError("below nought")
        return factor * self.weight[0].item()


class World:
    """A driver and many workers; requests are counted by who sends them and their kind."""

    def __init__(self, knows_peers: bool) -> None:
        self.network = SimulatedNetwork(0, faults=Faults(latency=(1e-3, 2e-3)))
        self.names = [f"w{number:03}" for number in range(COUNT)]
        self.knows_peers = knows_peers
        self.workers: dict[str, dist.Worker] = {}
        self.sent: Counter[tuple[str, int]] = Counter()
        self.driver: dist.Worker

    async def serve(self, name: str) -> None:
        transport = self.network.transport(name)
        async with ag.Engine(), dist.Worker(name, service=service, secret=SECRET, transport=transport) as worker:
            for other in self.names if self.knows_peers else ():
                if other != name:
                    worker.add_peer(other, f"sim://{other}")
            self.workers[name] = worker
            await asyncio.get_running_loop().create_future()

    async def lead(self, work: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        transport = self.network.transport("driver")
        async with ag.Engine(), dist.Worker("driver", secret=SECRET, transport=transport) as self.driver:
            for name in self.names:
                self.driver.add_peer(name, f"sim://{name}")
            while len(self.workers) < COUNT:
                await asyncio.sleep(0.01)
            await work(self)

    async def forward(self) -> tuple[ag.Tensor, ag.Tensor]:
        refs = await asyncio.gather(*(self.driver.remote(name, Scale) for name in self.names))
        x = ag.tensor([1.0, 1.0], requires_grad=True)
        return x, ag.stack(await asyncio.gather(*(ref.call("forward", x) for ref in refs))).sum()

    def committed(self) -> set[str]:
        """The workers on which the pass is committed."""
        return {name for name, worker in self.workers.items() if worker.statistics().passes_committed}


def run(work: Callable[[World], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch, *, knows_peers: bool = True) -> None:
    async def main() -> None:
        world = World(knows_peers)
        request = Endpoint.request

        async def counted(self: Endpoint, peer: str, kind: int, *rest: Any) -> Any:
            world.sent[self.name, kind] += 1
            return await request(self, peer, kind, *rest)

        monkeypatch.setattr(Endpoint, "request", counted)
        for name in world.names:
            world.network.spawn(name, world.serve(name))
        try:
            await world.network.spawn("driver", world.lead(work))
        finally:
            monkeypatch.setattr(Endpoint, "request", request)
            for name in world.names:
                world.network.kill(name)

    simulated_run(main, seed=0)


in_world = run_by(lambda work, monkeypatch: run(work, monkeypatch))


@pytest.mark.sim
@in_world
async def test_a_commit_of_many_goes_by_a_tree(world: World) -> None:
    async with world.driver.context() as ctx:
        x, loss = await world.forward()
        await ctx.backward(loss)
        assert np.array_equal(ctx.grads[x].numpy(), [2.0 * COUNT, 3.0 * COUNT])
        assert world.committed() == set(world.names)
    assert world.sent["driver", Kind.RELAY] == FANOUT and world.sent["driver", Kind.COMMIT] == 0
    relayed = [count for (name, kind), count in world.sent.items() if kind == Kind.RELAY and name != "driver"]
    assert sum(relayed) == COUNT - FANOUT and max(relayed) <= FANOUT


@pytest.mark.sim
@run_by(lambda work, monkeypatch: run(work, monkeypatch, knows_peers=False))
async def test_workers_that_do_not_know_each_other_are_told_directly(world: World) -> None:
    async with world.driver.context() as ctx:
        _, loss = await world.forward()
        await ctx.backward(loss)
        assert world.committed() == set(world.names)
    assert world.sent["driver", Kind.COMMIT] == COUNT - FANOUT


@pytest.mark.sim
@pytest.mark.parametrize("silent", [False, True])
@in_world
async def test_whoever_is_behind_a_lost_worker_is_told(world: World, silent: bool) -> None:
    lost = world.names[0]  # the first of a branch
    async with world.driver.context() as ctx:
        _, loss = await world.forward()
        with world.network.at("commit.half", lost, lambda: world.network.kill(lost, silent=silent)), pytest.raises(CommitUnknown) as caught:
            await ctx.backward(loss)
        assert caught.value.workers == (lost,) and caught.value.committed
        assert world.committed() >= set(world.names[1:])


@pytest.mark.sim
@in_world
async def test_a_method_of_many_objects(world: World) -> None:
    refs = await asyncio.gather(*(world.driver.remote(name, Scale) for name in world.names))
    assert await refs[0].call_all(refs, "times", 2.0) == [4.0] * COUNT
    failed = await refs[0].call_all(refs, "times", -1.0)
    assert all(isinstance(error, RemoteError) and "below nought" in str(error) for error in failed)
    assert world.sent["driver", Kind.RELAY] == 2 * FANOUT
    world.network.kill(world.names[0])  # two are behind it
    assert await refs[0].call_all(refs, "times", 3.0) == [None, None, None, *[6.0] * (COUNT - 3)]


@pytest.mark.sim
@in_world
async def test_only_methods_are_called_by_way_of_another_worker(world: World) -> None:
    found = await world.driver._core.multicast.spread({"w000": FunctionCall("forward", [], {}, False, None)}, 5.0, world.driver._core.principal)
    assert isinstance(found["w000"], ProtocolError)


@pytest.mark.sim
@in_world
async def test_many_are_told_of_an_abort(world: World) -> None:
    async with world.driver.context() as ctx:
        _, loss = await world.forward()

        def fail(grad: ag.Tensor) -> None:
            raise ZeroDivisionError("by nought")

        loss.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            await ctx.backward(loss)
        assert not world.committed()
        assert all(worker.statistics().passes == 0 for worker in world.workers.values())


@pytest.mark.sim
@pytest.mark.parametrize("value", [None, (), (4, []), (4, [("w001", ())]), (4, [("w000", ()), "w001"]), ("4", [("w000", ())]), (4, [["w000", ()]])])
@in_world
async def test_malformed_messages_to_many_are_refused(world: World, value: Any) -> None:
    with pytest.raises(ProtocolError, match="a malformed RELAY"):
        await world.driver._core.endpoint.request("w000", Kind.RELAY, value, 5.0)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("relayed", "text"),
    [
        ((7, (bytes(16),)), "field request_kind is RELEASE; expected ABORT or CALL"), ((99, ()), "unknown kind 99"), ((4, ()), "malformed COMMIT"),
        ((9, ("x",)), "malformed COLLECTIVE"),
    ],
)
@in_world
async def test_requests_that_may_not_be_relayed_fail_on_their_receiver(world: World, relayed: tuple[int, Any], text: str) -> None:
    kind, value = relayed
    ((name, failed, error),) = await world.driver._core.endpoint.request("w000", Kind.RELAY, (kind, [("w000", value)]), 5.0)
    found = from_wire(error, name)
    assert name == "w000" and failed and isinstance(found, ProtocolError) and text in str(found)
