"""Frames over a WebSocket, without a socket: a transport that is fed by the test, and the virtual clock."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys

import pytest

from aiograd.distributed.rpc.http import WebSocketChannel, framing
from aiograd.distributed.rpc.http.channel import OVERHEAD, STRANGER, WAKE
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ProtocolError, WorkerLostError
from tests.distributed.http_support import LoopTransport, Sink

LIMITS = Limits(frame_bytes=1 << 20)
KEY = b"\x11\x22\x33\x44"


def channel(*, masking: bool = False, limits: Limits = LIMITS, greeted: bool = True) -> tuple[LoopTransport, WebSocketChannel, Sink]:
    loop_transport = LoopTransport()
    it = WebSocketChannel("peer", limits, masking=masking, certified_names=None, on_lost=lambda channel: None)
    it.start(loop_transport, b"")  # type: ignore[arg-type]
    return loop_transport, it, Sink(it, greeted=greeted)


def wire(payload: bytes, first: int = framing.FIN | framing.BINARY, key: bytes | None = KEY) -> bytes:
    """One frame as a client (with `key`) or a server (without) sends it."""
    if key is None:
        return framing.header(first, len(payload), 0) + payload
    return framing.header(first, len(payload), framing.MASKED) + key + bytes(byte ^ key[index % 4] for index, byte in enumerate(payload))


def frames(sink: Sink) -> list[bytes]:
    return [bytes(sink.frames.get_nowait()) for _ in range(sink.frames.qsize())]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 125, 126, 127, 899, 900, 901, 902, 903, 65535, 65536, 65539])
def test_masking_is_what_the_standard_says(length: int) -> None:
    data = os.urandom(length)
    expected = bytes(byte ^ KEY[index % 4] for index, byte in enumerate(data))
    assert bytes(framing.masked(data, KEY)) == bytes(framing.masked(memoryview(bytearray(data)), KEY)) == expected
    in_place = bytearray(data)
    framing.mask_in_place(in_place, KEY)
    assert in_place == expected


@pytest.mark.parametrize("masking", [True, False])
async def test_what_one_side_sends_the_other_receives_however_it_is_cut(masking: bool) -> None:
    draw = random.Random(11)
    out, sender, _ = channel(masking=masking)
    into, _, sink = channel(masking=not masking)
    sent = [draw.randbytes(size) for size in (0, 1, 125, 126, 5000, 65535, 65536, 70000, 16384, 16385, 1 << 20, (1 << 20) + OVERHEAD, 7)]
    for data in sent:
        sender.send(data)
    stream = bytes(out.written)
    if masking:  # as other clients do it
        stream = b"".join(wire(data, key=draw.choice((KEY, bytes(4)))) for data in sent)
    else:
        assert stream == b"".join(wire(data, key=None) for data in sent)
    position = 0
    while position < len(stream):
        step = draw.choice((1, 2, 3, 7, 100, 5000, 65536, 300000))
        into.feed(stream[position : position + step])
        position += step
    assert frames(sink) == sent


async def test_small_frames_that_follow_each_other_leave_together_and_in_order() -> None:
    out, sender, _ = channel(masking=False)
    into, _, sink = channel(masking=True)
    for data in (b"one", b"two"):
        assert sender.send(data, more=True)
    assert not out.written
    sender.send(bytes(40_000), more=True)
    assert sender.send(b"three", more=True)
    sender.send(b"four")
    written = len(out.written)
    sender.send(b"five", more=True)
    assert len(out.written) == written
    sender.flush()
    sender.send(bytes(16_000), more=True)
    sender.send(bytes(16_000), more=True)
    assert len(out.written) > written + 32_000, "no more than a little waits"
    into.feed(bytes(out.written))
    assert [len(frame) if len(frame) > 9 else frame for frame in frames(sink)] == [b"one", b"two", 40_000, b"three", b"four", b"five", 16_000, 16_000]
    sender.send(b"last", more=True)
    sender.close()
    assert b"last" in out.written


async def test_buffers_of_large_frames_are_not_used_again() -> None:
    into, _, sink = channel(masking=True)
    first, second = os.urandom(100_000), os.urandom(100_000)
    into.feed(wire(first, key=None))
    into.feed(wire(second, key=None))
    assert frames(sink) == [first, second]


async def test_after_a_large_frame_others_have_a_turn_of_the_loop() -> None:
    into, it, sink = channel(masking=True)
    into.feed(wire(b"small", key=None) * 3)
    assert into.reading, "small ones come one after the other"
    for _ in range(3):
        into.feed(wire(bytes(100_000), key=None))
        assert sink.count and not into.reading
        await asyncio.sleep(0)
        assert into.reading
    into.feed(wire(bytes(100_000), key=None))
    it.close()
    await asyncio.sleep(0)
    assert not into.reading, "a channel that is closing is left alone"


async def test_every_mask_of_what_is_not_sealed_is_another() -> None:
    out, sender, _ = channel(masking=True, greeted=False)
    for _ in range(1000):
        sender.send(b"")
    assert len({bytes(out.written[index + 2 : index + 6]) for index in range(0, 6000, 6)}) > 990


@pytest.mark.parametrize("length", [20, 900, 70000])
async def test_sealed_frames_have_a_mask_of_zero_and_those_before_have_none_of_it(length: int) -> None:
    out, sender, _ = channel(masking=True)
    data = os.urandom(length)
    sender.send(data)
    assert out.written == framing.header(framing.FIN | framing.BINARY, length, framing.MASKED) + bytes(4) + data
    out, sender, _ = channel(masking=True, greeted=False)
    sender.send(data)
    assert data not in out.written


class Socket:
    """Counts at how many bytes the system is told to wake the receiver."""

    def __init__(self) -> None:
        self.wake_at = [1]

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if option == socket.SO_RCVLOWAT:
            self.wake_at.append(value)


@pytest.mark.skipif(sys.platform != "linux", reason="the system wakes a receiver for each piece")
async def test_the_system_collects_large_frames_and_never_waits_for_more_than_their_rest() -> None:
    into, it, sink = channel(masking=True)
    it._connection = system = Socket()
    stream = wire(bytes(20_000), key=None) + wire(bytes(900_000), key=None) + wire(b"small", key=None)
    position = 0
    while position < len(stream):  # as a system would that gives what it was told to collect, and a little more
        step = min(system.wake_at[-1] + 7, len(into.protocol.get_buffer(-1)))
        assert position + system.wake_at[-1] <= len(stream), "it would wait for ever"
        into.feed(stream[position : position + step])
        position += step
    assert [len(frame) for frame in frames(sink)] == [20_000, 900_000, 5]
    assert max(system.wake_at) == WAKE and system.wake_at[-1] == 1


async def test_frames_from_before_the_attachment_are_delivered_by_it() -> None:
    loop_transport = LoopTransport()
    it = WebSocketChannel("peer", LIMITS, masking=True, certified_names=None, on_lost=lambda channel: None)
    it.start(loop_transport, wire(b"early", key=None) + wire(b"later", key=None)[:4])  # type: ignore[arg-type]
    assert not loop_transport.reading, "nobody to give frames to: nothing is read"
    sink = Sink()
    sink.attach(it)
    assert frames(sink) == [b"early"] and loop_transport.reading
    loop_transport.feed(wire(b"later", key=None)[4:])
    assert frames(sink) == [b"later"]


async def test_a_channel_is_handed_on_between_two_frames() -> None:
    into, it, greeter = channel(greeted=False)
    heir = Sink()
    it.attach(lambda frame: heir.attach(it), greeter._closed, lambda: None)
    into.feed(wire(b"hello") + wire(b"work" * 5000) + wire(b"more"))
    assert frames(greeter) == [] and frames(heir) == [b"work" * 5000, b"more"], "also the limit for strangers ends between two frames"


async def test_a_stranger_sends_only_small_messages() -> None:
    into, _, sink = channel(greeted=False)
    into.feed(wire(bytes(STRANGER)))
    assert frames(sink) == [bytes(STRANGER)] and into.state == "open"
    into.feed(wire(bytes(STRANGER + 1))[:14])
    assert into.state == "closing" and into.written == b"\x88\x02\x03\xf1"


async def test_a_closed_channel_says_so_once_and_swallows_frames() -> None:
    into, it, sink = channel()
    into.feed(wire(b"in"))
    it.close()
    it.close()
    assert not it.send(b"out")
    into.state = "open"
    into.feed(wire(b"late"))
    assert into.written == b"\x88\x02\x03\xe8", "a close frame, and nothing after it"
    into.abort()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sink.closed == [None] and frames(sink) == [b"in"]


async def test_attaching_to_what_is_gone_tells_at_once() -> None:
    loop_transport = LoopTransport()
    it = WebSocketChannel("peer", LIMITS, masking=True, certified_names=None, on_lost=lambda channel: None)
    it.start(loop_transport, wire(b"last words", key=None))  # type: ignore[arg-type]
    error = ConnectionResetError("gone")
    it.connection_lost(error)
    sink = Sink(it)
    assert sink.closed == [error] and it.send(b"x") is False


async def test_closing_from_inside_of_on_frame_stops_delivery() -> None:
    into, it, sink = channel()
    it.attach(lambda frame: it.close(), sink._closed, lambda: None)
    into.feed(wire(b"a") + wire(b"b"))
    assert into.state == "closing"


async def test_fragments_pings_and_pongs_of_other_clients() -> None:
    into, _, sink = channel()
    into.feed(wire(b"one ", framing.BINARY) + wire(b"ping", framing.FIN | framing.PING) + wire(b"", framing.CONTINUATION))
    into.feed(wire(b"two" * 9000, framing.CONTINUATION) + wire(b"!", framing.FIN | framing.CONTINUATION) + wire(b"", framing.FIN | framing.PONG))
    assert frames(sink) == [b"one " + b"two" * 9000 + b"!"]
    assert into.written == wire(b"ping", framing.FIN | framing.PONG, None) and into.state == "open"


async def test_pings_of_who_does_not_read_are_not_answered() -> None:
    out, it, _ = channel()
    while it.send(bytes(1 << 20)):
        pass
    length = len(out.written)
    out.feed(wire(b"ping", framing.FIN | framing.PING))
    assert len(out.written) == length


async def test_a_close_frame_is_answered() -> None:
    into, _, sink = channel(masking=True)
    into.feed(wire((1000).to_bytes(2, "big"), framing.FIN | framing.CLOSE, None) + wire(b"after", key=None))
    assert into.state == "closing" and into.written[0] == 0x88 and frames(sink) == []


MALFORMED = {
    "not masked": (wire(b"x", key=None), 1002),
    "reserved bit": (wire(b"x", 0xC2), 1002),
    "opcode 3": (wire(b"x", 0x83), 1002),
    "opcode 11": (wire(b"x", 0x8B), 1002),
    "text": (wire(b"x", framing.FIN | framing.TEXT), 1003),
    "text in fragments": (wire(b"x", framing.TEXT), 1003),
    "continues nothing": (wire(b"x", framing.FIN | framing.CONTINUATION), 1002),
    "a message inside of a message": (wire(b"x", framing.BINARY) + wire(b"y"), 1002),
    "ping in fragments": (wire(b"x", framing.PING), 1002),
    "long ping": (wire(bytes(126), framing.FIN | framing.PING), 1002),
    "long close": (wire(bytes(200), framing.FIN | framing.CLOSE), 1002),
    "short length in 2 bytes": (b"\x82\xfe\x00\x05", 1002),
    "short length in 8 bytes": (b"\x82\xff" + (65535).to_bytes(8, "big"), 1002),
    "too large": (b"\x82\xff" + ((1 << 20) + OVERHEAD + 1).to_bytes(8, "big"), 1009),
    "absurdly large": (b"\x82\xff" + b"\xff" * 8, 1009),
    "too large in fragments": (wire(bytes(1 << 20), framing.BINARY) + wire(bytes(OVERHEAD), 0) + wire(b"x", framing.CONTINUATION), 1009),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_what_breaks_the_protocol_closes_the_channel(name: str) -> None:
    data, code = MALFORMED[name]
    into, it, sink = channel()
    into.feed(data)
    assert into.state == "closing" and bytes(into.written) == b"\x88\x02" + code.to_bytes(2, "big")
    it.connection_lost(None)
    assert frames(sink) == [] and isinstance(sink.closed[0], ProtocolError) and sink.closed[0].code == "websocket"


async def test_nothing_is_set_aside_for_a_frame_that_is_too_large() -> None:
    into, it, _ = channel()
    into.feed(b"\x82\xff" + (1 << 40).to_bytes(8, "big") + KEY)
    assert it._body is None


async def test_random_bytes_never_raise() -> None:
    draw = random.Random(5)
    for _ in range(600 * int(os.environ.get("AIOGRAD_FUZZ", "1"))):
        into, it, sink = channel(masking=draw.random() < 0.5)
        stream = bytearray()
        for _ in range(draw.randint(1, 4)):
            first = draw.choice((0x82, 0x82, 0x02, 0x00, 0x80, 0x88, 0x89, draw.randrange(256)))
            stream += wire(draw.randbytes(draw.choice((0, 1, 125, 126, 300, 20000))), first, draw.choice((None, draw.randbytes(4))))
        for _ in range(draw.randint(0, 3)):
            stream[draw.randrange(min(len(stream), 20))] = draw.randrange(256)
        into.feed(bytes(stream))
        it.connection_lost(None)
        assert len(sink.closed) == 1


# ---- peers that do not read, and peers that do not finish


async def test_a_full_transport_says_stop_and_then_go(virtual_clock: object) -> None:
    out, it, sink = channel()
    assert it.send(bytes(1 << 20)) and not it.send(bytes(1 << 20)), "two frames are under way"
    assert not sink.writable.is_set()
    out.drain(out.unread - 1000)
    assert sink.writable.is_set() and it.send(b"x")


async def test_too_much_unread_output_drops_the_peer(virtual_clock: object) -> None:
    out, it, sink = channel(limits=Limits(unread_bytes=5 << 20))
    for _ in range(4):
        it.send(bytes(1 << 20))
    assert out.state == "open"
    it.send(bytes(1 << 20))
    assert out.state == "gone" and not it.send(b"x")
    assert isinstance(await sink.until_closed(), WorkerLostError)


async def test_output_left_unread_for_long_drops_the_peer(virtual_clock: object) -> None:
    loop = asyncio.get_running_loop()
    out, it, sink = channel(limits=Limits(unread_seconds=10.0))
    begin = loop.time()
    while it.send(bytes(1 << 20)):
        pass
    error = await sink.until_closed()
    assert isinstance(error, WorkerLostError) and "did not read" in str(error) and out.state == "gone"
    assert 10.0 <= loop.time() - begin <= 11.0


async def test_a_peer_that_reads_a_trickle_is_dropped_and_a_slow_one_is_not(virtual_clock: object) -> None:
    for per_second, survives in ((1000, False), (500_000, True)):
        out, it, sink = channel(limits=Limits(unread_seconds=10.0))
        for _ in range(60):
            while not it._paused and it.send(bytes(1 << 20)):
                pass
            await asyncio.sleep(1)
            if out.state == "open":
                out.drain(min(per_second, out.unread))
        assert (out.state == "open") == survives
        it.close()
        out.abort()
        await asyncio.sleep(1)
        assert len(sink.closed) == 1


async def test_a_part_of_a_frame_is_a_sign_of_life_and_a_slow_frame_of_a_peer_is_waited_for(virtual_clock: object) -> None:
    """Five thousand bytes a second: the frame takes four times as long as a stranger would have for it."""
    loop = asyncio.get_running_loop()
    out, it, sink = channel(limits=Limits(handshake_timeout=5.0))
    frame = wire(bytes(100_000))
    for at in range(0, len(frame), 5000):
        await asyncio.sleep(1.0)
        out.feed(frame[at : at + 5000])
        assert it.heard_at == loop.time()
    assert out.state == "open" and len(await sink.next()) == 100_000
    await asyncio.sleep(3.0)
    assert it.heard_at == loop.time() - 3.0
    it.close()
    out.abort()


async def test_a_channel_takes_two_frames_ahead(virtual_clock: object) -> None:
    out, it, sink = channel()
    it.pace(4096)
    sent = 0
    while it.send(bytes(4096)):
        it.flush()
        sent += 1
    assert sent <= 2 and out.unread > 8192
    out.drain(out.unread - 4000)
    assert sink.writable.is_set()
    it.close()
    out.abort()


UNFINISHED = {
    "large frame": wire(bytes(60_000))[:500],
    "small frame": wire(bytes(500))[:100],
    "header": wire(bytes(500))[:1],
    "fragment": wire(b"part", framing.BINARY),
}


@pytest.mark.parametrize("name", UNFINISHED)
async def test_a_message_that_is_never_finished_drops_the_peer(virtual_clock: object, name: str) -> None:
    loop = asyncio.get_running_loop()
    into, _, sink = channel(limits=Limits(handshake_timeout=5.0))
    into.feed(wire(b"whole"))
    await asyncio.sleep(30)
    begin = loop.time()
    into.feed(UNFINISHED[name])
    for _ in range(4):
        await asyncio.sleep(1)
        into.feed(wire(b"", framing.FIN | framing.PONG) if name == "fragment" else b"\xfe")  # control frames are no progress, nor is a byte
    assert isinstance(await sink.until_closed(), WorkerLostError)
    assert 5.0 <= loop.time() - begin <= 6.0


async def test_many_messages_in_pieces_are_no_unfinished_message(virtual_clock: object) -> None:
    into, _, sink = channel(limits=Limits(handshake_timeout=5.0))
    stream = wire(bytes(60_000)) * 40
    for position in range(0, len(stream), 70_000):
        into.feed(stream[position : position + 70_000])
        await asyncio.sleep(0.9)
    assert sink.count == 40 and into.state == "open"


async def test_nothing_is_watched_when_there_is_nothing_to_watch(virtual_clock: object) -> None:
    into, it, _ = channel()
    into.feed(wire(bytes(30_000)) + wire(b"x"))
    it.send(b"y")
    assert it._watch is None


async def test_a_closed_connection_that_does_not_drain_is_aborted(virtual_clock: object) -> None:
    out, it, sink = channel()
    it.send(b"x")
    it.close()
    assert out.state == "closing"
    await sink.until_closed()
    assert out.state == "gone" and asyncio.get_running_loop().time() <= 1.1
