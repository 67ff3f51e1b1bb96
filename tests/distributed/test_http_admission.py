"""Who is let in: peers up to a number and told when there is no room, strangers always, but only as many as there are chairs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from aiograd import distributed as dist
from aiograd.distributed.rpc.http.admission import TOO_MANY, TOO_MANY_HERE, Admission
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import NotExposedError, Overloaded

SECRET = b"0123456789abcdef" * 2
#: nobody is given up for being silent
PATIENT = Limits(missed_heartbeats=1000)


def test_peers_are_counted_in_total_and_per_address() -> None:
    admission = Admission(total=4, per_address=2)
    first, second = admission.admit("10.0.0.1"), admission.admit("10.0.0.1")
    assert first.promote() and second.promote() and second.promote()
    third = admission.admit("10.0.0.1")
    assert third.refusal() == TOO_MANY_HERE and not third.promote()
    assert admission.admit("::ffff:10.0.0.1").refusal() == TOO_MANY_HERE, "the same address, written in another way"
    for address in ("2001:db8::1", "2001:db8::2%eth0"):
        assert admission.admit(address).promote()
    assert admission.admit("2001:db8::3").refusal() == TOO_MANY_HERE, "one network of IPv6 counts as one address"
    assert admission.admit("10.0.0.2").refusal() == TOO_MANY
    first.release()
    first.release()
    assert third.refusal() == 0 and third.promote()
    assert first.promote() and first.refusal() == 0, "what is closed cannot be refused"


def test_strangers_make_room_for_strangers_and_never_peers() -> None:
    admission = Admission(total=16, per_address=3)
    closed: list[str] = []
    permits = {}
    for name in "abcdefg":
        permits[name] = admission.admit("10.0.0.1")
        permits[name].held_by(lambda name=name: closed.append(name))
        if name == "b":
            assert permits[name].promote()
    assert closed == ["a", "c", "d"] and admission.open == 4
    for number in range(2, 5):  # with those of other addresses: as many as a quarter of the peers
        admission.admit(f"10.0.0.{number}")
    assert closed == ["a", "c", "d", "e", "f"] and admission.open == 5
    permits["a"].release()
    assert admission.open == 5
    late = admission.admit("10.0.0.9")
    late.evict()
    late.held_by(lambda: closed.append("late"))
    assert closed[-1] == "late", "evicted between two holders"


@pytest.fixture
def strangers() -> Iterator[list[socket.socket]]:
    held: list[socket.socket] = []
    yield held
    for each in held:
        each.close()


@pytest.mark.net
async def test_a_worker_above_the_limit_is_told_at_once() -> None:
    limits = Limits(connections_per_address=2)
    async with dist.Worker("hub", secret=SECRET, limits=limits) as hub:
        workers = [dist.Worker(f"w{n}", secret=SECRET, limits=PATIENT, peers={"hub": hub.url}) for n in range(3)]
        for each in workers[:2]:
            async with asyncio.timeout(20):
                await each.__aenter__()
                assert await find(each) is None
        await workers[2].__aenter__()
        with pytest.raises(Overloaded, match=r"no more connections from this address \(status 429\).*its Limits\.connections_per_address"):
            await find(workers[2])
        await workers[0].aclose()
        async with asyncio.timeout(20):
            while hub.endpoint.transport.connections > 1:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
        assert await find(workers[2]) is None, "there is room again"
        for each in workers:
            await each.aclose()


async def find(worker: dist.Worker) -> None:
    """Ask the hub for something that it does not have."""
    with pytest.raises(NotExposedError):
        await worker.call("hub", "nothing")


@pytest.mark.net
async def test_strangers_who_hold_their_connections_keep_nobody_out(strangers: list[socket.socket]) -> None:
    limits = Limits(connections_per_address=4, handshake_timeout=1000)
    async with dist.Worker("hub", secret=SECRET, limits=limits) as hub:
        address = ("127.0.0.1", int(hub.url.rpartition(":")[2]))

        def knock(count: int) -> None:
            for n in range(count):
                strangers.append(socket.create_connection(address))
                if n % 2:
                    strangers[-1].send(b"GET /aiograd/v1 HTTP/1.1\r\nHost:")

        knock(20)
        for n in range(3):
            worker = dist.Worker(f"w{n}", secret=SECRET, limits=PATIENT, peers={"hub": hub.url})
            async with worker:
                await find(worker)
                knock(20)
                await find(worker)
                assert [each.principal for each in hub.statistics().peers if each.is_connected] == ["default"], "peers are not evicted"
        assert hub.endpoint.transport.connections <= 8  # type: ignore[attr-defined]
