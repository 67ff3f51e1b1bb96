"""Secure channels: who gets one, and handshakes over connections that fail."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

import pytest

from aiograd.distributed.rpc.cipher import Seal
from aiograd.distributed.rpc.handshake import Answerer, Dialler
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.distributed.rpc.pacing import FIRST, PING, PING_FORM, PONG
from aiograd.distributed.rpc.secure_channel import SecureChannel
from aiograd.errors import AuthenticationError, ProtocolError, VersionMismatch
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.memory import MemoryChannel
from tests.distributed.world import LIMITS, SECRET, World, turns


async def test_a_wrong_key_is_refused(virtual_clock: VirtualClock) -> None:
    async with World() as world:
        b = await world.node("b", keyring=Keyring(b"another secret of 32 bytes......"))
        a = await world.node("a", b)
        with pytest.raises(AuthenticationError, match="'b' at memory://b hung up"):
            await a.ask("b", "echo", 1)
        assert b.ran == [] and b.endpoint.statistics().failed_handshakes >= 2
        assert b.endpoint.peers == ()
    assert virtual_clock.time() < 1.0


async def test_a_worker_of_another_name_is_refused(world: World, virtual_clock: VirtualClock) -> None:
    c = await world.node("c")
    a = await world.node("a")
    a.endpoint.add_peer("b", c.transport.url)
    with pytest.raises(AuthenticationError):
        await a.ask("b", "echo", 1)
    assert c.ran == []


@pytest.mark.parametrize("side", ["dialling", "answering"])
async def test_a_certificate_for_another_name_is_refused(world: World, virtual_clock: VirtualClock, side: str) -> None:
    a, b = await world.pair()
    connect = a.transport.connect
    accept = b.transport.accept
    assert accept is not None

    async def connected(url: str, timeout: float) -> MemoryChannel:
        channel = await connect(url, timeout)
        channel.certified_names = names
        return channel

    def accepted(channel: MemoryChannel) -> None:
        channel.certified_names = names
        accept(channel)

    if side == "dialling":
        a.transport.connect = connected  # type: ignore[method-assign]
    else:
        b.transport.accept = accepted
    names = frozenset({"c"})
    with pytest.raises(AuthenticationError):
        await a.ask("b", "echo", 1)
    await turns()
    assert not world.board.channels
    names = frozenset({"a", "b"})
    assert await a.ask("b", "echo", 2) == 2
    assert b.ran == [2]


async def test_there_is_a_limit_to_handshakes_under_way(virtual_clock: VirtualClock) -> None:
    async with World(replace(LIMITS, connections=3)) as world:
        b = await world.node("b")
        stranger = world.board.transport("stranger")
        channels = [await stranger.connect(b.transport.url, 1.0) for _ in range(5)]
        await turns()
        assert [channel.closed for channel in channels] == [False] * 3 + [True] * 2
        assert b.endpoint.statistics().handshakes == 3


async def secured(world: World) -> tuple[SecureChannel, Seal]:
    """A channel of a new connection, and the seal of its peer."""
    b = await world.node("b")
    channel = await world.board.transport("a").connect(b.transport.url, 1.0)
    key = Keyring(SECRET).key_for("default")
    answerer = Answerer("x", b"x" * 16, Keyring(SECRET), world.board.transport("x").entropy, LIMITS, lambda identity, session: False)
    dialler = Dialler("a", b"a" * 16, key, "x", None, world.board.transport("y").entropy, LIMITS)
    finish = dialler.receive(answerer.receive(dialler.hello()) or b"")
    answerer.receive(finish)
    return SecureChannel(channel, answerer.result, 0.0), dialler.result.seal


async def test_frames_that_come_before_anybody_listens_wait(world: World) -> None:
    link, seal = await secured(world)
    received: list[bytes] = []
    link._receive(memoryview(bytearray(seal.seal([b"one"]))))
    link.start(lambda frame, body: received.append(bytes(frame)), lambda why: None, lambda: None, lambda head: None)
    link._receive(seal.seal([b"two"]))
    assert received == [b"one", b"two"]
    link.close()


async def test_an_answer_to_no_ping_closes_the_channel(world: World) -> None:
    link, seal = await secured(world)
    closed: list[BaseException | None] = []
    link.start(lambda frame, body: None, closed.append, lambda: None, lambda head: None)
    link._receive(seal.seal([PING_FORM.pack(PONG, 0)]))
    await turns()
    (error,) = closed
    assert isinstance(error, ProtocolError) and error.code == "pong"


async def test_a_sender_goes_on_when_the_channel_has_room_as_a_later_record_tells(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    link, seal = await secured(world)
    writable: list[bool] = []
    link.start(lambda frame, body: None, lambda why: None, lambda: writable.append(True), lambda head: None)
    for answer in (True, False):
        monkeypatch.setattr(link.channel, "send", lambda record, more=False, answer=answer: answer)
        assert link.send((bytes(100),)) is answer
        link._receive(seal.seal([PING_FORM.pack(PING, 1)]))
    assert not writable
    monkeypatch.setattr(link.channel, "send", lambda record, more=False: True)
    link._receive(seal.seal([PING_FORM.pack(PING, 1)]))
    link._receive(seal.seal([PING_FORM.pack(PING, 1)]))
    assert writable == [True]
    link.close()


async def test_a_full_window_stops_the_sender_until_a_ping_is_answered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    link, seal = await secured(world)
    writable: list[bool] = []
    link.start(lambda frame, body: None, lambda why: None, lambda: writable.append(True), lambda head: None)
    sent: list[int] = []
    monkeypatch.setattr(link.channel, "send", lambda record, more=False: sent.append(len(record)) or True)
    while link.send((bytes(link.frame_bytes),)):
        assert sum(sent) < FIRST
    link._writable()
    assert not writable and sum(sent) >= FIRST, "the channel has room, but too much is on its way"
    before = link.frame_bytes
    while not writable:
        link._receive(seal.seal([PING_FORM.pack(PONG, 0)]))
    assert link.frame_bytes > before
    link.close()


async def test_versions_that_do_not_fit(virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiograd.distributed.rpc.peer.Dialler", functools.partial(Dialler, versions=(7, 9)))

    async with World() as world:
        a, _ = await world.pair()
        with pytest.raises(VersionMismatch, match=r"versions 5 to 5 .* versions 7 to 9"):
            await a.ask("b", "echo", 1)
        await asyncio.sleep(1.0)
        assert not world.board.channels and world.board.dials == 1
    assert virtual_clock.time() < 1.1


async def test_strangers_are_turned_away(world: World, virtual_clock: VirtualClock) -> None:
    _, b = await world.pair()
    stranger = world.board.transport("stranger")
    for noise in (b"", b"GET / HTTP/1.1", b"x" * 100_000):
        channel = await stranger.connect(b.transport.url, 1.0)
        closed = asyncio.get_running_loop().create_future()
        channel.attach(lambda frame: pytest.fail("it was answered"), closed.set_result, lambda: None)
        channel.send(noise)
        await closed
    silent = await stranger.connect(b.transport.url, 1.0)
    closed = asyncio.get_running_loop().create_future()
    silent.attach(lambda frame: None, closed.set_result, lambda: None)
    started = asyncio.get_running_loop().time()
    await closed
    assert asyncio.get_running_loop().time() - started == pytest.approx(5.0, abs=0.1)
    assert b.endpoint.statistics().handshakes == 0
    assert b.endpoint.statistics().failed_handshakes == 4
