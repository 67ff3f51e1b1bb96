"""Peers that have the key and mean ill, or are merely broken: they announce what never comes, ask for the impossible, or stop in the middle.

Memory is measured: nobody makes a worker allocate more than two messages and a little.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.frames import FrameKind, parse
from aiograd.distributed.rpc.handshake import Dialler
from aiograd.distributed.rpc.http import HttpTransport, framing
from aiograd.distributed.rpc.keyring import Key
from aiograd.distributed.rpc.limits import Limits
from tests.distributed.http_support import UPGRADE, read_to_the_end
from tests.distributed.intruder import LIMITS, Intruder, frame, request_frame
from tests.distributed.memory import Switchboard
from tests.distributed.test_codec import BOMBS, build, descriptor
from tests.distributed.workers import PATIENT, SECRET, exposing, leaf, triple, until, values
from tests.watchdog import SECONDS

KEY = Key("k1", SECRET, "default")
MIB = 1 << 20
SMALL = Limits(message_bytes=2 * MIB, frame_bytes=256 << 10, bytes_per_peer=2 * MIB, bytes_total=4 * MIB, head_bytes=256 << 10, requests_per_peer=64)
#: above what there was before
MOST = 2 * SMALL.message_bytes + MIB

service = exposing(triple)


@service.function
async def answer_at_length(count: int) -> ag.Tensor:
    return ag.zeros(count, dtype=ag.float32)


async def one_pass(worker: dist.Worker) -> None:
    async with worker.context() as ctx:
        x = leaf(1.0)
        await ctx.backward((await worker.call("b", "triple", x)).sum())
        assert values(ctx.grads[x]) == [3]


# -------------------------------------------------------------------- bombs

Say = Callable[[Intruder], Iterator[bytes]]
HOSTILE: dict[str, Say] = {}


def hostile(function: Say) -> Say:
    HOSTILE[function.__name__.replace("_", " ")] = function
    return function


def of_frames(make: Callable[[int], tuple[bytes, bytes]], numbers: Iterable[int]) -> Say:
    def say(peer: Intruder) -> Iterator[bytes]:
        for number in numbers:
            yield peer.seal(*make(number))

    return say


def ids(count: int) -> bytes:
    return struct.pack(f"<{count}Q", *range(1 << 40, (1 << 40) + count))


WHOLE = SMALL.message_bytes
#: what no honest peer does: it ends the connection
FATAL_FRAMES: dict[str, tuple[Callable[[int], Any], Iterable[int]]] = {
    "an answer above the limit": (lambda total: frame(FrameKind.RESPONSE, 1, b"x", total=total), [WHOLE + 1]),
    "an answer of all the memory there is": (lambda total: frame(FrameKind.RESPONSE, 1, b"x", total=total), [2**63]),
    "answers that are only announced": (lambda number: frame(FrameKind.RESPONSE, number, b"x", total=WHOLE), [1]),
    "more requests than may run": (lambda number: frame(FrameKind.REQUEST, number, b"x", total=2), range(1, 2200)),
    "requests that are cancelled at once": (lambda number: frame(FrameKind.CANCEL, number), range(1, 2200)),
    "a message in single bytes": (lambda at: frame(FrameKind.REQUEST, 1, b"x", total=WHOLE, offset=at), range(0, 15_000, 2)),
    "heartbeats full of ids": (lambda count: frame(FrameKind.HEARTBEAT, 0, ids(count), total=0), (4097, 30_000)),
}
FATAL = set(FATAL_FRAMES)
HOSTILE.update({name: of_frames(*made) for name, made in FATAL_FRAMES.items()})
HOSTILE["messages that are only announced"] = of_frames(lambda number: frame(FrameKind.REQUEST, number, b"x", total=WHOLE), range(1, 60))
HOSTILE["requests above the limit"] = of_frames(lambda total: frame(FrameKind.REQUEST, total, b"x", total=WHOLE + total), range(1, 60))
HOSTILE["a request of all the memory there is"] = of_frames(lambda total: frame(FrameKind.REQUEST, 1, b"x", total=total), [2**63])
HOSTILE["questions and no reading"] = of_frames(lambda number: frame(FrameKind.PROBE, number), range(1, 2000))


@hostile
def arguments_nested_without_end(peer: Intruder) -> Iterator[bytes]:
    body = build(b"\x08\x01\x00\x00\x00" * 40_000)
    yield peer.seal(*frame(FrameKind.REQUEST, 1, body, request_kind=Kind.CALL))


@hostile
def gradients_without_elements(peer: Intruder) -> Iterator[bytes]:
    tensors = [descriptor(shape=(2**31 - 1, 2**31 - 1, 0), size=0)] * 1000
    body = build(b"\x08" + struct.pack("<I", 1000) + b"\x0b" * 1000, *tensors)
    yield peer.seal(*frame(FrameKind.REQUEST, 1, body, request_kind=Kind.GRADIENT))


@hostile
def small_encodings_of_large_tensors(peer: Intruder) -> Iterator[bytes]:
    count, size = 60, 1024 + (1 << 12)
    tensors = [descriptor(code=4, encoding=3, start=index * size, size=size, shape=(1 << 22,)) for index in range(count)]
    body = build(b"\x08" + struct.pack("<I", count) + b"\x0b" * count, *tensors, data=bytes(count * size))
    for start in range(0, len(body), SMALL.frame_bytes):
        piece = body[start : start + SMALL.frame_bytes]
        yield peer.seal(*frame(FrameKind.REQUEST, 1, piece, request_kind=Kind.CALL, total=len(body), offset=start))


def codec_bomb(message: bytearray) -> Say:
    def say(peer: Intruder) -> Iterator[bytes]:
        for number in range(1, 4):
            yield peer.seal(*frame(FrameKind.REQUEST, number, bytes(message), request_kind=Kind.CALL))

    return say


HOSTILE.update({name: codec_bomb(message) for name, message in BOMBS.items() if len(message) <= SMALL.frame_bytes})


@contextlib.asynccontextmanager
async def victim(limits: Limits) -> AsyncIterator[tuple[dist.Worker, dist.Worker, Switchboard]]:
    """A worker "b", a friend of it, and what connects them."""
    board = Switchboard()
    async with dist.Worker("b", service=service, secret=dist.Keyring(SECRET, kid="k1"), limits=limits, transport=board.transport("b")) as b:
        transport = board.transport("a")
        async with dist.Worker("a", secret=dist.Keyring(SECRET, kid="k1"), limits=limits, transport=transport, peers={"b": b.url}) as a:
            yield a, b, board


@pytest.mark.parametrize("name", HOSTILE)
async def test_whatever_a_peer_sends_takes_two_messages_of_memory_at_most(name: str, virtual_clock: object) -> None:
    async with victim(SMALL) as (a, b, board):
        await one_pass(a)
        stranger = board.transport("x")
        peer = Intruder(await stranger.connect(b.url, 1.0))  # type: ignore[arg-type]
        await peer.greet(KEY, "x", "b")
        said = HOSTILE[name](peer)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            most = 0
            for record in said:
                peer.sent.clear()
                ours = tracemalloc.get_traced_memory()[0]  # the record is the intruder's own
                tracemalloc.reset_peak()
                peer.channel.send(record)
                del record
                for _ in range(3):
                    await asyncio.sleep(0)
                peer.received.clear()
                most = max(most, tracemalloc.get_traced_memory()[1] - min(ours, before + SMALL.frame_bytes))
                if peer.is_closed:
                    break
            assert most <= MOST, f"{most} bytes, {MOST} are allowed"
            assert peer.is_closed == (name in FATAL)
            await one_pass(a)
        finally:
            tracemalloc.stop()
        said.close()  # type: ignore[attr-defined]
        assert b.statistics().bytes_held <= SMALL.bytes_per_peer
        await stranger.aclose()
        forget(b)
        await until(lambda: not b.statistics().bytes_held)
        await one_pass(a)


def forget(worker: dist.Worker) -> None:
    """The end of the intruder's session when it has been silent for long enough."""
    for peer in list(worker.endpoint._peers.values()):
        if peer.name == "x":
            for session in list(peer.sessions):
                peer.lose(session, "the test is over")


def test_a_bomb_that_the_limits_let_through_would_be_noticed() -> None:
    """Else the test above would show nothing: with the limits of a large machine a few bytes take much more."""
    from aiograd.distributed.rpc.reassembly import Assembly

    tracemalloc.start()
    try:
        kept = Assembly(64 * MIB)
        assert tracemalloc.get_traced_memory()[0] > MOST
        del kept
    finally:
        tracemalloc.stop()


# -------------------------------------------------------------------- peers that stop in the middle

#: who is dropped under these is not dropped for its silence
HURRY = Limits(handshake_timeout=0.3, unread_seconds=0.4, heartbeat=0.1, missed_heartbeats=10_000, connections_per_address=250)


@contextlib.asynccontextmanager
async def listening(limits: Limits) -> AsyncIterator[tuple[dist.Worker, dist.Worker]]:
    """A worker "b" on a socket, and a friend that is connected to it."""
    async with dist.Worker("b", service=service, secret=dist.Keyring(SECRET, kid="k1"), limits=limits) as b:
        async with dist.Worker("a", secret=dist.Keyring(SECRET, kid="k1"), limits=PATIENT, peers={"b": b.url}) as a:
            await one_pass(a)
            yield a, b


def open_socket(worker: dist.Worker, *said: bytes) -> socket.socket:
    host, _, port = worker.url.rpartition("//")[2].partition(":")
    opened = socket.create_connection((host, int(port)))
    for text in said:
        opened.sendall(text)
    return opened


def upgrade(worker: dist.Worker) -> bytes:
    return f"GET /aiograd/v1 HTTP/1.1\r\nHost: {worker.url[7:]}\r\n{UPGRADE}\r\n".encode()


def hello() -> bytes:
    return Dialler("x", os.urandom(16), KEY, "b", None, os.urandom, LIMITS).hello()


def masked(payload: bytes, first: int = 0x82) -> bytes:
    return framing.header(first, len(payload), framing.MASKED) + bytes(4) + payload


BEFORE: dict[str, Callable[[dist.Worker], list[bytes]]] = {
    "nothing": lambda b: [],
    "half of a request": lambda b: [upgrade(b)[:50]],
    "no hello": lambda b: [upgrade(b)],
    "half of a frame": lambda b: [upgrade(b), masked(hello())[:40]],
    "a fragment of a hello": lambda b: [upgrade(b), masked(hello()[:40], 0x02)],
    "no finish": lambda b: [upgrade(b), masked(hello())],
    "pings": lambda b: [upgrade(b), masked(b"", 0x89)],
}


@pytest.mark.net
async def test_who_stops_before_the_end_of_the_handshake_is_hung_up_on_in_time_and_others_do_not_notice() -> None:
    async with listening(HURRY) as (a, b), contextlib.AsyncExitStack() as stack:
        transport = b._core.endpoint.transport
        assert isinstance(transport, HttpTransport) and transport.connections == 1
        sockets = [stack.enter_context(open_socket(b, *say(b))) for say in BEFORE.values() for _ in range(20)]
        hung_up = asyncio.gather(*(asyncio.to_thread(read_to_the_end, opened) for opened in sockets))
        while not hung_up.done():
            await one_pass(a)
        await hung_up
        while transport.connections > 1:
            await asyncio.sleep(0)
        assert b.endpoint.statistics().handshakes == 0 and [peer.name for peer in b.statistics().peers] == ["a"]


@pytest.mark.net
@pytest.mark.parametrize("how", ["silent", "half a frame", "a frame in drips", "a fragment", "deaf"])
async def test_who_stops_after_the_handshake_is_dropped_in_time_and_others_do_not_notice(how: str) -> None:
    limits = replace(HURRY, missed_heartbeats=10) if how == "silent" else HURRY
    async with listening(limits) as (a, b):
        transport = b._core.endpoint.transport
        assert isinstance(transport, HttpTransport)
        dialler = HttpTransport(limits)
        channel = await dialler.connect(b.url, 5)
        peer = Intruder(channel)
        await peer.greet(KEY, "x", "b")
        peer.send(peer.request(Kind.CALL, ("triple", [1], {}, True, None)))
        await peer.answer()
        assert transport.connections == 2
        raw = channel._transport
        record = peer.request(Kind.CALL, ("triple", [1], {}, True, None), 2)
        drip: asyncio.Task[None] | None = None
        if how == "half a frame":
            raw.write(masked(record)[:-5])
        elif how == "a fragment":
            raw.write(masked(record[:20], 0x02))
        elif how == "a frame in drips":
            drip = asyncio.create_task(_drip(raw, masked(record + bytes(1000))))
        elif how == "deaf":
            raw.pause_reading()  # type: ignore[attr-defined]
            for number in range(3, 23):
                peer.send(peer.request(Kind.CALL, ("answer_at_length", [250_000], {}, True, None), number))
        while transport.connections > 1:
            await one_pass(a)
        forget(b)
        if drip is not None:
            drip.cancel()
        await dialler.aclose()
        while b.statistics().bytes_held or any(peer.name == "x" for peer in b.statistics().peers):
            await asyncio.sleep(0.01)
        await one_pass(a)


async def _drip(raw: asyncio.Transport, data: bytes) -> None:
    for at in range(len(data)):
        raw.write(data[at : at + 1])
        await asyncio.sleep(0.01)


def repeated(piece: str, times: int) -> Iterator[bytes]:
    return itertools.repeat(piece.encode("latin-1"), times)


@pytest.mark.net
@pytest.mark.parametrize("name", ["many headers", "a long header", "a long line", "a long body", "chunks", "a frame that is announced"])
async def test_requests_without_end_are_refused_before_they_are_stored(name: str) -> None:
    """The limits of HTTP itself. Sixteen MiB are on offer; nobody takes more than a little of that."""
    async with listening(HURRY) as (a, b):
        host = f"Host: {b.url[7:]}\r\n"
        get = f"GET /health HTTP/1.1\r\n{host}"
        long = "x" * 65_536
        offers: dict[str, tuple[str, Iterator[bytes]]] = {
            "many headers": (get, repeated("X-Some: 1\r\n" * 6000, 256)),
            "a long header": (get + "X: ", repeated(long, 256)),
            "a long line": ("GET /", repeated(long, 256)),
            "a long body": (f"POST /health HTTP/1.1\r\n{host}Content-Length: {16 * MIB}\r\n\r\n", repeated(long, 256)),
            "chunks": (f"{get}Transfer-Encoding: chunked\r\n\r\n", repeated(f"10000\r\n{long}\r\n", 256)),
            "a frame that is announced": (
                f"GET /aiograd/v1 HTTP/1.1\r\n{host}{UPGRADE}\r\n" + "\x82\xff\x00\x00\x00\x00\x7f\xff\xff\xff", repeated(long, 256),
            ),
        }  # fmt: skip
        head, rest = offers[name]
        opened = open_socket(b)
        answer: list[bytes] = []

        def offer() -> None:  # on a thread, so that what it takes is little and not measured in
            with contextlib.suppress(OSError):
                opened.sendall(head.encode("latin-1"))
                for piece in rest:
                    opened.sendall(piece)
            with contextlib.suppress(OSError):
                opened.settimeout(SECONDS)
                answer.append(opened.recv(100))

        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            await asyncio.to_thread(offer)
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
            opened.close()
        assert peak <= 3 * MIB, f"{peak} bytes"
        assert not answer or not answer[0] or b" 4" in answer[0][:14] or b" 101 " in answer[0], answer
        await one_pass(a)


def test_requests_are_built_by_hand_as_the_library_builds_them() -> None:
    head, body = request_frame(Kind.CALL, ("triple", [1], {}, True, None))
    assert parse(head + body, LIMITS).request_kind == Kind.CALL
