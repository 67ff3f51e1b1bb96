"""Peers that fall silent, crash, come back, are restarted, or dial at the same moment. Time is virtual."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.errors import UnknownPeerError, WorkerLostError
from aiograd.testing.virtual_clock import VirtualClock
from tests.chaos.broken import without
from tests.distributed.memory import MemoryChannel
from tests.distributed.world import LIMITS, SECRET, Node, World, turns

pytestmark = pytest.mark.usefixtures("virtual_clock")


def keys() -> Keyring:
    """A keyring of two principals."""
    ring = Keyring(SECRET)
    ring.add("tenant-1", b"1" * 32, "tenant")
    return ring


async def dialled_by_both(world: World) -> tuple[Node, Node]:
    """Two nodes that have dialled each other at the same moment, and hold two sessions."""
    a, b = await world.mutual()
    world.board.latency = 0.01
    assert await asyncio.gather(a.ask("b", "echo", 1), b.ask("a", "echo", 2)) == [1, 2]
    return a, b


async def test_heartbeats_keep_an_idle_connection_alive(world: World) -> None:
    a, b = await world.talking()
    await asyncio.sleep(100.0)
    assert world.board.dials == 1
    assert a.statistics("b").frames_in >= 190
    assert await b.ask("a", "echo", 1) == 1
    assert not a.lost and not b.lost


async def test_a_silent_peer_is_lost(world: World) -> None:
    a, b = await world.talking()
    asking = asyncio.create_task(a.ask("b", "gate", 2))
    asked = await b.asking(0.2, "a", "gate", 3)
    started = asyncio.get_running_loop().time()
    world.board.hold()
    world.board.unreachable |= {a.transport.url, b.transport.url}
    for task in asking, asked:
        with pytest.raises(WorkerLostError, match=r"nothing was heard .* for 1\.5 s"):
            await task
    assert 1.0 <= asyncio.get_running_loop().time() - started <= 1.6
    await turns()
    assert a.cancelled == [3] and b.cancelled == [2]
    assert [identity.name for identity, _ in a.lost + b.lost] == ["b", "a"]
    assert not a.endpoint.statistics().peers


async def test_a_crash_is_noticed_at_once(world: World) -> None:
    a, b = await world.mutual()
    await a.ask("b", "echo", 1)
    asking = asyncio.create_task(a.ask("b", "gate", 2))
    served = await b.asking(1.0, "a", "gate", 3)
    started = asyncio.get_running_loop().time()
    b.transport.crash()
    with pytest.raises(WorkerLostError, match="no process listens") as caught:
        await asking
    assert (caught.value.worker, caught.value.stage) == ("b", "kind 7")
    assert asyncio.get_running_loop().time() - started < 0.05
    assert [identity for identity, _ in a.lost] == [PeerIdentity("b", b.endpoint.incarnation, "default")]
    await turns()
    assert a.cancelled == [3]
    served.cancel()


async def test_the_side_that_was_dialled_notices_a_crash_as_well(world: World) -> None:
    a, b = await world.mutual()
    await a.ask("b", "echo", 1)
    asking = await b.asking(2.0, "a", "gate", 2)
    started = asyncio.get_running_loop().time()
    a.transport.crash()
    with pytest.raises(WorkerLostError, match="no process listens"):
        await asking
    assert asyncio.get_running_loop().time() - started < 0.05


async def test_a_restarted_peer_is_another_one(world: World) -> None:
    a, b = await world.talking()
    asking = await a.asking(2.0, "b", "gate", 2)
    b.transport.crash()
    again = await world.node("b")  # listens before a has tried to connect
    with pytest.raises(WorkerLostError, match="restarted"):
        await asking
    assert again.ran == []
    assert await a.ask("b", "echo", 3) == 3
    assert again.ran == [3]
    assert [identity.incarnation for identity, _ in a.lost] == [b.endpoint.incarnation]
    assert len(a.endpoint.statistics().peers) == 1


@pytest.mark.parametrize("kind", ["refuses", "does not answer", "closes what it accepts"])
async def test_a_peer_that_has_moved_is_dialled_where_it_is_at_once(world: World, kind: str) -> None:
    a = await world.node("a")
    world.board.latency = 0.01
    gone = world.board.transport("gone")
    if kind != "refuses":
        await gone.listen("", 0, lambda channel: channel.close())
        world.board.unreachable |= {gone.url} if kind == "does not answer" else set()
    a.endpoint.add_peer("b", gone.url)
    asking = await a.asking(0.005, "b", "echo", 1)
    b = await world.node("b")
    started = asyncio.get_running_loop().time()
    a.endpoint.add_peer("b", b.transport.url)
    assert await asking == 1 and asyncio.get_running_loop().time() - started < 0.08, "a few crossings"
    a.endpoint.add_peer("b", b.transport.url)
    assert await a.ask("b", "echo", 2) == 2 and world.board.dials == 2 and not a.lost
    gone.stop()


async def test_a_restarted_peer_that_dials_first(world: World) -> None:
    a, b = await world.talking()
    asking = await b.asking(2.0, "a", "gate", 2)
    for channel in world.board.channels:
        channel.held = True  # b does not notice that a is gone
    a.transport.stop()
    again = await world.node("a", b)
    assert await again.ask("b", "echo", 3) == 3
    with pytest.raises(WorkerLostError, match="restarted"):
        await asking
    assert b.lost[0][0].incarnation == a.endpoint.incarnation


@pytest.mark.parametrize("resets", [1, 6])
async def test_requests_survive_resets_and_run_once(world: World, resets: int) -> None:
    a, b = await world.pair()
    forth = [asyncio.create_task(a.ask("b", "sleep", 1.0 + 0.1 * number)) for number in range(20)]
    await asyncio.sleep(0.1)
    back = [asyncio.create_task(b.ask("a", "sleep", 1.0 + 0.1 * number)) for number in range(20)]
    for _ in range(resets):
        await asyncio.sleep(0.4)
        world.board.reset()
    late = [asyncio.create_task(a.ask("b", "echo", number)) for number in range(20)]  # asked while there is no connection
    await asyncio.gather(*forth, *back, *late)
    assert len(b.ran) == 40 and len(a.ran) == 20
    assert not a.lost and not b.lost
    assert world.board.dials >= 1 + resets


async def test_a_peer_without_url_comes_back_by_itself(world: World) -> None:
    a, b = await world.talking()
    asking = asyncio.create_task(b.ask("a", "gate", 2))  # b cannot dial a
    await asyncio.sleep(0.1)
    world.board.reset()
    a.gate.set()
    assert await asking == 2
    assert a.ran == [2]


async def test_a_peer_without_url_is_dialled_as_soon_as_it_has_one(world: World) -> None:
    a, b = await world.talking()
    asking = await b.asking(0.1, "a", "gate", 2)
    a.endpoint._urls.clear()  # neither can dial
    world.board.reset()
    await turns()
    b.endpoint.add_peer("a", a.transport.url)
    a.gate.set()
    assert await asking == 2
    assert a.ran == [2] and not b.lost


async def test_a_peer_without_url_that_does_not_come_back_is_lost(world: World) -> None:
    a, b = await world.talking()
    asking = await b.asking(0.1, "a", "gate", 2)
    a.endpoint._urls.clear()
    started = asyncio.get_running_loop().time()
    world.board.reset()
    with pytest.raises(WorkerLostError, match="nothing was heard"):
        await asking
    assert asyncio.get_running_loop().time() - started == pytest.approx(1.5, abs=0.2)
    assert b.endpoint.peers == ()
    with pytest.raises(UnknownPeerError):
        await b.ask("a", "echo")


async def test_unreachable_for_a_moment(world: World) -> None:
    a, b = await world.pair()
    asking = await a.asking(0.6, "b", "sleep", 2.0)
    failures = 0
    connect = a.transport.connect

    async def flaky(url: str, timeout: float) -> MemoryChannel:
        nonlocal failures
        failures += 1
        if failures <= 4:
            raise OSError("no route to host")
        return await connect(url, timeout)

    a.transport.connect = flaky  # type: ignore[method-assign]
    world.board.reset()
    assert await asking == 2.0
    assert failures == 5 and b.ran == [2.0] and not a.lost


@pytest.mark.parametrize("seconds", [5.0, 1.5, 0.5], ids=["one attempt longer than the silence", "as long", "shorter"])
async def test_a_peer_that_cannot_be_reached_at_first(virtual_clock: VirtualClock, seconds: float) -> None:
    async with World(replace(LIMITS, handshake_timeout=seconds)) as world:
        a, b = await world.pair()
        world.board.unreachable.add(b.transport.url)
        unanswered = rf"TimeoutError: connecting to {b.transport.url}: no answer within {min(seconds, LIMITS.silence):g} s; .*a firewall"
        with pytest.raises(WorkerLostError, match=rf"lost \(kind 7\): {unanswered}.* \(nothing was heard from it for 1\.5 s\)$"):
            await a.ask("b", "echo", 1)
        assert not a.lost  # it had never been there
        b.transport.stop()
        world.board.unreachable.clear()
        with pytest.raises(WorkerLostError, match="no process listens") as caught:
            await a.ask("b", "echo", 1)
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert virtual_clock.time() < 2.0


async def test_both_dial_at_once(world: World) -> None:
    a, b = await dialled_by_both(world)
    assert world.board.dials == 2
    await asyncio.gather(*(a.ask("b", "echo", n) for n in range(20)), *(b.ask("a", "echo", n) for n in range(20)))
    mine, theirs = a.endpoint.statistics().peers
    busy, idle = max(mine.frames_out, theirs.frames_out), min(mine.frames_out, theirs.frames_out)
    assert busy >= 40 and idle <= 3  # both sides agreed on one
    await asyncio.sleep(5.0)
    world.board.reset()
    assert await asyncio.gather(a.ask("b", "echo", 1), b.ask("a", "echo", 2)) == [1, 2]
    assert not a.lost and not b.lost
    assert len(a.ran) == 22 and len(b.ran) == 22


async def test_links_are_per_principal(world: World) -> None:
    b = await world.node("b", keyring=keys())
    a = await world.node("a", b, keyring=keys())
    await asyncio.gather(a.ask("b", "echo", 1), a.ask("b", "echo", 2, principal="tenant"))
    assert world.board.dials == 2
    assert {identity.principal for identity in b.callers} == {"default", "tenant"}
    assert await b.ask("a", "echo", 3, principal="tenant") == 3
    assert a.callers[-1].principal == "tenant"
    assert await a.ask("a", "echo", 4, principal="tenant") == 4
    assert a.callers[-1].principal == "tenant"
    assert world.board.dials == 2
    assert {each.principal for each in a.endpoint.statistics().peers} == {"default", "tenant"}


async def test_a_lost_peer_may_come_back(world: World) -> None:
    a, b = await world.talking()
    world.board.hold()
    world.board.unreachable.add(b.transport.url)
    with pytest.raises(WorkerLostError):
        await a.ask("b", "echo", 2)
    world.board.unreachable.clear()
    assert await a.ask("b", "echo", 3) == 3
    assert b.ran == [1, 3]
    assert [identity.name for identity, _ in b.lost] == ["a"]


async def test_a_worker_that_was_frozen_does_not_take_its_peers_for_dead(world: World) -> None:
    a, b = await world.talking()
    asking = await a.asking(0.1, "b", "gate", 2)
    asyncio.get_running_loop().advance(20.0)  # type: ignore[attr-defined]
    await asyncio.sleep(2.0)
    b.gate.set()
    assert await asking == 2
    assert not a.lost and not b.lost and world.board.dials == 1


async def test_altered_bytes_close_the_connection_and_nothing_is_lost(world: World) -> None:
    a, b = await world.pair()
    await a.ask("b", "echo", 0)
    (channel, *_) = [each for each in world.board.channels if each.side == "a"]
    send = channel.send
    channel.send = lambda frame, more=False: send(bytes(frame)[:-1] + bytes([bytes(frame)[-1] ^ 1]))  # type: ignore[method-assign]
    assert await a.ask("b", "echo", 1) == 1
    assert b.ran == [0, 1]
    assert world.board.dials == 2


async def test_without_its_fence_a_restarted_peer_gets_requests_meant_for_the_one_before(virtual_clock: VirtualClock) -> None:
    with without("epoch_fence"):
        async with World() as world:
            a, b = await world.talking()
            asking = await a.asking(0.1, "b", "sleep", 1.0)
            b.transport.crash()
            again = await world.node("b")
            assert await asking == 1.0
            assert b.ran == [1, 1.0] and again.ran == [1.0]


async def test_redundant_conversations_do_not_chase_each_other(world: World) -> None:
    """Two sessions that the same side ends up dialling: each new one must not end the other."""
    a, b = await dialled_by_both(world)
    (peer,) = b.endpoint._peers.values()
    for session in list(peer.sessions):  # b has forgotten what a has not
        peer.lose(session, "for the test")
    await asyncio.sleep(2.0)
    dials = world.board.dials
    await asyncio.gather(a.ask("b", "echo", 3), b.ask("a", "echo", 4))
    await asyncio.sleep(10.0)
    assert world.board.dials - dials <= 1
    assert 1 <= len(a.endpoint.statistics().peers) <= 2


async def test_what_a_peer_has_given_up_is_lost_and_not_asked_again(world: World) -> None:
    a, b = await world.talking()
    asking = await a.asking(0.1, "b", "gate", 2)
    (peer,) = b.endpoint._peers.values()
    (session,) = peer.sessions
    peer.lose(session, "for the test")
    with pytest.raises(WorkerLostError, match="given up the session"):
        await asking
    assert b.ran == [1, 2]
    assert b.cancelled == [2]
    assert await a.ask("b", "echo", 3) == 3
    assert [identity.name for identity, _ in a.lost] == ["b"]


async def test_a_newer_link_takes_the_place_of_one_whose_end_was_not_noticed(world: World) -> None:
    a, b = await world.talking()
    asking = await a.asking(0.1, "b", "sleep", 1.0)
    (mine,) = [channel for channel in world.board.channels if channel.side == "a"]
    mine._end(ConnectionResetError("only a knows"))
    assert await asking == 1.0
    assert await b.ask("a", "echo", 2) == 2
    assert b.ran == [1, 1.0]
    assert world.board.dials == 2
    assert len(world.board.channels) == 2  # the old one is closed at both ends


async def test_those_who_wait_for_room_hear_of_a_loss_too() -> None:
    async with World(replace(LIMITS, bytes_per_peer=1 << 14)) as world:
        a, b = await world.pair()
        asking = [asyncio.create_task(a.ask("b", "gate", "x" * 10_000)) for _ in range(3)]
        await asyncio.sleep(0.1)
        b.transport.crash()
        for task in asking:
            with pytest.raises(WorkerLostError):
                await task
        assert asyncio.get_running_loop().time() < 0.2
        assert len(b.ran) == 1


async def test_a_loss_in_the_moment_in_which_there_is_room() -> None:
    async with World(replace(LIMITS, bytes_per_peer=1 << 14)) as world:
        a, b = await world.pair()
        first = asyncio.create_task(a.ask("b", "gate", "x" * 10_000))
        await turns(50)
        (session,) = a.endpoint.sessions()
        second = asyncio.create_task(a.ask("b", "echo", "y" * 10_000))
        await turns()
        b.gate.set()
        while session._room.is_awaited:
            await turns(1)
        session.peer.lose(session, "for the test")
        await first
        with pytest.raises(WorkerLostError):
            await second


async def test_the_other_conversation_is_used_while_one_is_not_connected(world: World) -> None:
    a, b = await dialled_by_both(world)
    await asyncio.sleep(1.0)
    world.board.unreachable |= {a.transport.url, b.transport.url}
    preferred = next(each for each in a.endpoint.sessions() if each.dialled)
    assert preferred.channel is not None
    preferred.channel.close()
    await asyncio.sleep(0.1)
    assert await a.ask("b", "echo", 3, timeout=0.5) == 3
    assert await b.ask("a", "echo", 4, timeout=0.5) == 4


async def test_a_connection_that_breaks_again_and_again_is_tried_less_often(world: World) -> None:
    a, b = await world.talking()
    asking = await a.asking(1.0, "b", "gate", "poison", timeout=20.0)

    def breaks(channel: MemoryChannel, frame: bytes) -> bool:
        if channel.side == "b" and channel.sent > 1:  # all but the answer of the handshake
            asyncio.get_running_loop().call_soon(channel.abort, ConnectionResetError("again"))
        return True

    world.board.passes = breaks
    world.board.reset()
    await asyncio.sleep(10.0)
    assert 5 < world.board.dials < 80
    world.board.passes = lambda channel, frame: True
    b.gate.set()
    assert await asking == "poison"
    assert b.ran == [1, "poison"]


async def test_a_conversation_that_is_given_up_does_not_take_the_other_with_it(world: World) -> None:
    a, b = await dialled_by_both(world)
    asking = asyncio.create_task(a.ask("b", "gate", 3))  # over the one that a dialled
    await asyncio.sleep(1.0)
    (theirs,) = [each for each in b.endpoint.sessions() if each.dialled]
    theirs.peer.lose(theirs, "for the test")
    await asyncio.sleep(1.0)
    b.gate.set()
    assert await asking == 3
    assert b.ran == [1, 3]
    assert len(a.endpoint.statistics().peers) == len(b.endpoint.statistics().peers) == 1
    assert world.board.dials == 3  # one each, and one that found out


async def test_a_peer_that_starts_afresh_has_given_up_what_was_before(world: World) -> None:
    a, b = await world.talking()
    asking = await b.asking(0.1, "a", "gate", 2)
    (session,) = a.endpoint.sessions()
    session.peer.lose(session, "for the test")
    assert await a.ask("b", "echo", 3) == 3
    with pytest.raises(WorkerLostError, match="opened another session"):
        await asking
    assert asyncio.get_running_loop().time() < 0.2


async def test_a_session_is_given_up_while_it_is_being_resumed(world: World) -> None:
    a, b = await world.talking()
    asking = await a.asking(1.0, "b", "gate", 2)
    world.board.latency = 0.05
    world.board.reset()
    await asyncio.sleep(0.12)  # the hello has arrived, the finish has not
    assert b.endpoint.statistics().handshakes == 1
    (session,) = b.endpoint.sessions()
    session.peer.lose(session, "for the test")
    with pytest.raises(WorkerLostError, match="given up"):
        await asking
    assert await a.ask("b", "echo", 3) == 3
    assert b.ran == [1, 2, 3]


async def test_a_connection_that_breaks_before_the_peer_knows_of_it(world: World) -> None:
    a, b = await world.pair()
    broken = 0

    def breaks(channel: MemoryChannel, frame: bytes) -> bool:
        nonlocal broken
        if channel.side == "a" and channel.sent == 2 and broken < 3:  # the last message of the handshake
            broken += 1
            asyncio.get_running_loop().call_soon(channel.abort, ConnectionResetError("just now"))
            return False
        return True

    world.board.passes = breaks
    assert await a.ask("b", "echo", 1) == 1
    assert b.ran == [1] and broken == 3 and not a.lost


async def test_a_restart_seen_by_one_principal_is_none_of_the_others(world: World) -> None:
    b = await world.node("b", keyring=keys())
    a = await world.node("a", b, keyring=keys())
    await a.ask("b", "echo", 1)
    noticed = list(world.board.channels)
    asking = await a.asking(0.1, "b", "gate", 2, principal="tenant")
    for channel in world.board.channels:
        channel.held = channel not in noticed
    b.transport.stop()
    b.transport.is_dead = True
    await world.node("b", keyring=keys())
    for channel in noticed:
        channel._end(ConnectionResetError("killed"))
    await asyncio.sleep(0.05)
    assert await a.ask("b", "echo", 3) == 3
    assert not asking.done(), "another tenant may use the name for what it likes"
    with pytest.raises(WorkerLostError, match="restarted|nothing was heard"):
        await asking
    assert asyncio.get_running_loop().time() < 2.0
    assert await a.ask("b", "echo", 4, principal="tenant") == 4


async def test_one_side_is_enough_to_dial_again(world: World) -> None:
    a, _ = await world.mutual()
    world.board.latency = 0.02
    await a.ask("b", "echo", 1)
    await asyncio.sleep(1.0)
    world.board.reset()
    await asyncio.sleep(1.0)
    assert world.board.dials == 2
    assert len(world.board.channels) == 2


async def test_attempts_to_reach_a_peer_are_spaced(world: World) -> None:
    a, _ = await world.pair()
    attempts = 0

    async def connect(url: str, timeout: float) -> MemoryChannel:
        nonlocal attempts
        attempts += 1
        raise OSError("no route to host")

    a.transport.connect = connect  # type: ignore[method-assign]
    with pytest.raises(WorkerLostError, match="no route to host"):
        await a.ask("b", "echo", 1)
    assert 6 <= attempts <= 16


async def test_a_peer_with_whom_nothing_was_said_is_not_reported(world: World) -> None:
    a, b = await world.pair()
    world.board.latency = 0.1
    asking = await a.asking(0.01, "b", "echo", 1)
    asking.cancel()
    await asyncio.sleep(1.0)
    assert b.endpoint.peers == ("a",)
    a.transport.crash()
    await asyncio.sleep(3.0)
    assert b.endpoint.peers == ()
    assert not b.lost and not b.ran


async def test_a_restarted_peer_cannot_resume_what_was_before(world: World) -> None:
    a, b = await world.talking()
    asking = await b.asking(0.1, "a", "gate", 2)
    (before,) = a.endpoint.sessions()
    a.transport.crash()
    again = await world.node("a", b)
    task = asyncio.create_task(again.ask("b", "echo", 3))
    await turns(1)
    (after,) = again.endpoint.sessions()
    after.id = before.id  # though it cannot know
    with pytest.raises(WorkerLostError, match="restarted"):
        await asking
    assert await task == 3
    assert again.ran == []
