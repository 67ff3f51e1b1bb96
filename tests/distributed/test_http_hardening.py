"""Requests of strangers: malformed, slow, too much, from a browser, or as a server that sends its callers elsewhere.

`AIOGRAD_FUZZ=100` multiplies the number of random requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp.web
import pytest

from aiograd.distributed.rpc.http import HttpTransport, framing, sockets
from aiograd.distributed.rpc.http.addresses import HostAllowList, PeerAddress
from aiograd.distributed.rpc.http.admission import Admission
from aiograd.distributed.rpc.http.channel import OVERHEAD, RECEIVE, STRANGER
from aiograd.distributed.rpc.http.connection import MAX_HEAD, HttpConnection
from aiograd.distributed.rpc.http.server import PATH, HttpServer, Upgrade, accept_key
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.transport import Channel
from aiograd.errors import Overloaded, WorkerLostError
from tests.distributed.http_support import (
    UPGRADE,
    LoopTransport,
    Sink,
    answering,
    closed,
    connected,
    get,
    listening,
    read_to_the_end,
    request,
    until_hung_up,
)  # fmt: skip

pytestmark = pytest.mark.net
FUZZ = int(os.environ.get("AIOGRAD_FUZZ", "1"))
#: short enough for tests that wait for it
HURRY = Limits(handshake_timeout=0.4, unread_seconds=0.6, keepalive_timeout=0.5)


@contextlib.asynccontextmanager
async def refusing(limits: Limits | None = None) -> AsyncIterator[str]:
    """A worker that must never get a channel, nor report anything to the loop."""
    reports: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: reports.append(context))
    accepted: list[Channel] = []
    transport = HttpTransport(limits)
    async with listening(transport, accepted.append) as url:
        yield url
        assert (await get(url, "/health"))[:2] == (200, b"ok"), "it still works"
    assert not accepted and not reports and transport.connections == 0
    loop.set_exception_handler(None)


@contextlib.contextmanager
def serving(limits: Limits, upgrade: Upgrade = lambda *args: None) -> Iterator[tuple[HttpConnection, LoopTransport, Admission]]:
    """An accepted connection whose peer reads nothing, for the virtual clock."""
    admission = Admission(1, 1)
    server = HttpServer(HostAllowList("127.0.0.1", 1, ()), limits, secure=False, upgrade=upgrade)
    connection, loop_transport = server.protocol(admission.admit("127.0.0.1")), LoopTransport()
    loop_transport.protocol = connection
    connection.connection_made(loop_transport)  # type: ignore[arg-type]
    yield connection, loop_transport, admission


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


# ---- requests that are refused


@pytest.mark.parametrize(
    ("headers", "host", "status"),
    [
        (UPGRADE, "evil.example.org", 403),
        (UPGRADE, "127.0.0.1", 403),
        (UPGRADE, "127.0.0.1:1", 403),
        (UPGRADE, "", 403),
        (UPGRADE + "Origin: http://evil.example.org\r\n", None, 403),
        (UPGRADE + "Origin: null\r\n", None, 403),
        (UPGRADE + "oRIGIN: http://127.0.0.1\r\n", None, 403),
        (UPGRADE + "Sec-Fetch-Mode: websocket\r\n", None, 403),
        (UPGRADE + "sec-fetch-site: same-origin\r\n", None, 403),
        (UPGRADE + "Content-Length: 5\r\n", None, 413),
        (UPGRADE.replace("13", "8"), None, 400),
        (UPGRADE.replace("AAAA==", "AAAA"), None, 400),
        (UPGRADE.replace("AAAAAA==", "AAAA===="), None, 400),
        (UPGRADE.replace("Upgrade: websocket", "Upgrade: h2c"), None, 400),
        (UPGRADE.replace("Connection: Upgrade", "Connection: keep-alive"), None, 400),
        ("", None, 400),
    ],
)
async def test_a_channel_is_not_opened(headers: str, host: str | None, status: int) -> None:
    async with refusing() as url:
        name = url[7:] if host is None else host
        answer = await request(url, f"GET /aiograd/v1 HTTP/1.1\r\nHost: {name}\r\n{headers}\r\n" + ("x" * 5 if "Length" in headers else ""))
        assert answer.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("path", ["/health", "/aiograd/v1", "/unknown"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "BREW"])
async def test_only_get_is_answered(method: str, path: str) -> None:
    async with refusing() as url:
        answer = await request(url, f"{method} {path} HTTP/1.1\r\nHost: {url[7:]}\r\nConnection: close\r\n\r\n")
        assert answer.split(b" ")[1] in (b"405", b"400") and b"Allow:" not in answer


@pytest.mark.parametrize("header", ["Origin: http://x\r\n", "Sec-Fetch-Dest: empty\r\n", "Host: other\r\n"])
async def test_browsers_get_nothing_at_all(header: str) -> None:
    async with listening(HttpTransport()) as url:
        answers = [await request(url, f"GET {path} HTTP/1.1\r\nHost: {url[7:]}\r\n{header}\r\n") for path in ("/health", "/unknown")]
        assert {answer.split(b" ")[1] for answer in answers} <= {b"403", b"400"}
        assert len({answer.partition(b"\r\n\r\n")[2] for answer in answers}) == 1


@pytest.mark.parametrize(
    "target", ["http://evil.example.org/health", "//evil.example.org/health", "evil.example.org:443", "*", "/health\x00", "/../health", "/health;x"]
)
async def test_other_forms_of_targets_lead_nowhere(target: str) -> None:
    async with refusing() as url:
        answer = await request(url, f"GET {target} HTTP/1.1\r\nHost: {url[7:]}\r\nConnection: close\r\n\r\n")
        assert answer.split(b" ")[1] in (b"400", b"403", b"404")


SMUGGLING = {
    "both lengths": "GET /health HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": "GET /health HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nContent-Length: 30\r\n\r\n",
    "two hosts": "GET /health HTTP/1.1\r\nHost: {host}\r\nHost: evil\r\n\r\n",
    "no host": "GET /health HTTP/1.1\r\n\r\n",
    "old": "GET /health HTTP/1.0\r\n\r\n",
    "older": "GET /health\r\n\r\n",
    "negative length": "GET /health HTTP/1.1\r\nHost: {host}\r\nContent-Length: -1\r\n\r\n",
    "space before colon": "GET /health HTTP/1.1\r\nHost : {host}\r\n\r\n",
    "folded": "GET /health HTTP/1.1\r\nHost: {host}\r\nX-A: b\r\n c\r\n\r\n",
    "bare line feeds": "GET /health HTTP/1.1\nHost: {host}\nX: \x01\n\n",
    "chunked body": "GET /health HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
    "compressed body": "GET /health HTTP/1.1\r\nHost: {host}\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\n123456789",
    "long line": "GET /" + "a" * 9000 + " HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "long header": "GET /health HTTP/1.1\r\nHost: {host}\r\nX: " + "a" * 9000 + "\r\n\r\n",
    "many headers": "GET /health HTTP/1.1\r\nHost: {host}\r\n" + "".join(f"X-{index}: 1\r\n" for index in range(70)) + "\r\n",
    "tls": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "\x00" * 200,
    "http2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "nothing": "\r\n\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLING)
async def test_malformed_requests(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async with refusing(HURRY) as url:
        answer = await request(url, SMUGGLING[name].format(host=url[7:]))
        assert answer == b"" or answer.split(b" ")[1] in (b"400", b"403", b"413"), answer
        assert answer.count(b"HTTP/1.") <= 1
    assert not [record for record in caplog.records if record.levelname not in ("DEBUG", "INFO")]


async def test_random_requests_are_refused_and_nothing_else_happens() -> None:
    draw = random.Random(20)
    methods = ["GET", "get", "POST", "CONNECT", "PRI", "", "G\x00T", "GET\t"]
    targets = ["/health", "/aiograd/v1", "/", "*", "http://a/", "//a", "/%00", "/" + "a" * 300, "/\xff", "?", "/health HTTP/1.1\r\nX:"]
    versions = ["HTTP/1.1", "HTTP/1.0", "HTTP/2", "HTTP/9.9", "http/1.1", "", "HTTP/1.1 ", "HTTP/1.1\x00"]
    lines = [
        "Origin: x", "Content-Length: 99999999999999999999", "Content-Length: 1", "Content-Length: x", "Transfer-Encoding: chunked",
        "Connection: close", "Transfer-Encoding: gzip, chunked", "Connection: Upgrade", "Upgrade: websocket", "Upgrade: h2c", "Expect: 100-continue",
        ": empty", "no colon", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13", "Host: a", "Cookie: " + "a" * 500, "X: \x00", "X: \xff",
        "Range: bytes=0-", "Trailer: Host",
    ]  # fmt: skip
    async with refusing(HURRY) as url:

        async def one() -> None:
            start = f"{draw.choice(methods[:1] * 4 + methods)} {draw.choice(targets)} {draw.choice(versions[:1] * 4 + versions)}\r\n"
            chosen = [f"Host: {url[7:]}"] * (draw.random() < 0.7) + draw.sample(lines, draw.randint(0, 4))
            head = start + "".join(f"{line}\r\n" for line in chosen)
            data = bytearray((head + "\r\n").encode("latin-1"))
            if draw.random() < 0.5:
                data += draw.choice((b"0\r\n\r\n", b"\x82\x80\x00\x00\x00\x00", b"zz\r\n", b"GET /nope HTTP/1.1\r\n\r\n", draw.randbytes(50)))
            for _ in range(draw.choice((0, 0, 1, 5))):
                data[draw.randrange(len(data))] = draw.randrange(256)
            answer = await request(url, bytes(data), half_close=draw.random() < 0.5)
            statuses = [int(line.split(b" ")[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.")]
            assert all(status < 500 and status != 101 for status in statuses), (bytes(data), answer)

        for _ in range(16 * FUZZ):
            await asyncio.gather(*(one() for _ in range(16)))


async def test_random_bytes_on_an_open_channel() -> None:
    draw = random.Random(22)
    reports: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    transport = HttpTransport(HURRY)
    sinks: list[Sink] = []
    async with listening(transport, lambda channel: sinks.append(Sink(channel))) as url:

        async def one() -> bytes:
            first = draw.choice((0x82, 0x02, 0x00, 0x88, 0x89, 0x8A, 0x81, draw.randrange(256)))
            length = draw.choice((b"\x80", b"\xfe\x01\x00", b"\xff" + b"\xff" * 8, b"\x05", draw.randbytes(9)))
            frame = bytes([first]) + length + draw.randbytes(draw.randrange(300))
            data = f"GET /aiograd/v1 HTTP/1.1\r\nHost: {url[7:]}\r\n{UPGRADE}\r\n".encode() + frame
            return await request(url, data, half_close=True)

        for _ in range(8 * FUZZ):
            for answer in await asyncio.gather(*(one() for _ in range(16))):
                assert answer.startswith(b"HTTP/1.1 101 ") or not answer, answer
        assert len(sinks) > 50 and [len(sink.closed) for sink in sinks] == [1] * len(sinks)
    asyncio.get_running_loop().set_exception_handler(None)
    assert not reports and transport.connections == 0


# ---- slow ones


@pytest.mark.parametrize("start", ["", "GET", "GET /health HTTP/1.1\r\nHost: x\r\nX-"])
async def test_a_head_that_does_not_come_closes_the_connection(start: str) -> None:
    async with refusing(HURRY) as url:
        begin = asyncio.get_running_loop().time()
        assert await request(url, start) == b""
        assert asyncio.get_running_loop().time() - begin > 0.35


async def test_a_head_in_drops_closes_the_connection() -> None:
    async with refusing(HURRY) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        with contextlib.suppress(ConnectionError, RuntimeError):  # RuntimeError: written after the loop saw the end
            for byte in b"GET /health HTTP/1.1\r\nX: " + b"a" * 400:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.02)
            pytest.fail("all of it was taken")
        await until_hung_up(reader, writer)


@pytest.mark.parametrize(
    ("second", "limits"),
    [(b"", Limits(handshake_timeout=10, keepalive_timeout=0.4)), (b"GET /hea", Limits(handshake_timeout=0.4, keepalive_timeout=10))],
)
async def test_connections_are_kept_for_a_while_and_their_second_request_is_timed_as_well(second: bytes, limits: Limits) -> None:
    async with refusing(limits) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        begin = asyncio.get_running_loop().time()
        writer.write(f"GET /health HTTP/1.1\r\nHost: {url[7:]}\r\n\r\n".encode())
        assert b"200 OK" in await reader.readuntil(b"ok")
        writer.write(second)
        await until_hung_up(reader, writer)
        assert asyncio.get_running_loop().time() - begin > 0.3


async def test_a_closed_connection_that_does_not_drain_is_aborted(virtual_clock: object) -> None:
    with serving(Limits()) as (connection, loop_transport, admission):
        await asyncio.sleep(0.1)
        connection.force_close()
        assert loop_transport.state == "closing"
        await asyncio.sleep(1.1)
        assert loop_transport.state == "gone" and admission.open == 0


def test_requests_that_arrive_while_a_worker_is_closed_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    """On uvloop, where a transport that is closed refuses what is written."""

    async def main(turns: int) -> None:
        async with listening(HttpTransport(), lambda channel: None) as url:
            for _ in range(10):
                client = clients.enter_context(socket.create_connection(("127.0.0.1", port_of(url))))
                client.sendall(f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{port_of(url)}\r\n\r\n".encode())
            for _ in range(turns):
                await asyncio.sleep(0)

    for turns in range(9):
        with contextlib.ExitStack() as clients, asyncio.Runner(loop_factory=pytest.importorskip("uvloop").new_event_loop) as runner:
            runner.run(main(turns))
    assert not caplog.records


async def test_what_the_parser_did_not_foresee_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ValueError("surprise")

    async with refusing() as url:
        with monkeypatch.context() as patch:
            patch.setattr(aiohttp.web.RequestHandler, "data_received", broken)
            assert await request(url, b"GET /health HTTP/1.1\r\n\r\n") == b""


async def test_a_connection_that_is_lost_while_it_is_upgraded_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As where the dialling process is killed after its request."""

    def head_is_complete(connection: HttpConnection) -> None:
        connection.abort()

    async with refusing() as url:
        with monkeypatch.context() as patch:
            patch.setattr(HttpConnection, "head_is_complete", head_is_complete)
            assert await request(url, f"GET {PATH} HTTP/1.1\r\nHost: {url[7:]}\r\n{UPGRADE}\r\n") == b""
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


async def test_requests_in_a_row_without_waiting_end_with_the_first() -> None:
    async with refusing() as url:
        answer = await request(url, f"GET /health HTTP/1.1\r\nHost: {url[7:]}\r\n\r\n".encode() * 50)
        assert answer.count(b"HTTP/1.1") <= 1


ASKED = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n"


@pytest.mark.parametrize("cut", [*range(1, len(ASKED))])
async def test_a_head_in_two_parts_is_answered_and_so_is_the_next_one(cut: int, virtual_clock: object) -> None:
    with serving(Limits()) as (connection, loop_transport, _):
        for count in (1, 2):
            connection.data_received(ASKED[:cut])
            await asyncio.sleep(0.1)
            assert loop_transport.reading
            connection.data_received(ASKED[cut:])
            assert not loop_transport.reading, "nothing more is taken before the answer"
            await asyncio.sleep(0.1)
            loop_transport.drain(loop_transport.unread)
            await asyncio.sleep(0.1)
            assert loop_transport.written.count(b" 200 OK") == count and loop_transport.reading and loop_transport.state == "open"
        connection.abort()
        await asyncio.sleep(0.1)


async def test_who_sends_on_before_the_answer_is_answered_once_and_hung_up_on(virtual_clock: object) -> None:
    with serving(Limits()) as (connection, loop_transport, admission):
        connection.data_received(ASKED + ASKED[:9])
        connection.data_received(ASKED * 3)
        await asyncio.sleep(0.1)
        loop_transport.drain(loop_transport.unread)
        await asyncio.sleep(0.1)
        assert loop_transport.written.count(b"HTTP/1.1") == 1 and loop_transport.written.count(b" 200 OK") == 1
        assert b"Connection: close" in loop_transport.written and loop_transport.state == "closing"
        await asyncio.sleep(20)
        assert loop_transport.state == "gone" and admission.open == 0


@pytest.mark.parametrize("piece", [b"x" * 60_000, b"X: 1\r\n" * 10_000, b"X: " + b"1" * 6000 + b"\r\n"], ids=["a line", "lines", "a head"])
async def test_of_a_head_without_end_little_is_taken(piece: bytes, virtual_clock: object) -> None:
    with serving(Limits(handshake_timeout=3.0)) as (connection, loop_transport, admission):
        connection.data_received(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:1\r\n" + (b"" if piece[:1] == b"X" else b"X: "))
        taken = 0
        while loop_transport.reading:
            connection.data_received(piece)
            taken += len(piece)
        assert taken <= MAX_HEAD + len(piece)
        before = sum(len(part) for part in (connection._head_end, connection._rest))
        for _ in range(50):
            connection.data_received(piece)
        assert sum(len(part) for part in (connection._head_end, connection._rest)) - before <= RECEIVE + 1
        await asyncio.sleep(0.1)
        assert b" 400 " in loop_transport.written[:14] or (len(piece) < 10_000 and not loop_transport.written)
        await asyncio.sleep(3.0)
        assert loop_transport.state != "open"
        await asyncio.sleep(1.1)
        assert loop_transport.state == "gone" and admission.open == 0


@pytest.mark.parametrize(("early", "kept"), [(0, 0), (1, 1), (RECEIVE, RECEIVE), (RECEIVE + 1, RECEIVE + 1), (20 * RECEIVE, RECEIVE + 1)])
@pytest.mark.parametrize("cut", [0, -2, None], ids=["in one part", "in two parts", "after the head"])
async def test_an_upgraded_connection_comes_with_what_was_sent_too_early_but_no_more_than_is_refused(
    early: int, kept: int, cut: int | None, virtual_clock: object
) -> None:
    upgraded: list[tuple[object, bytes]] = []
    head = b"GET /aiograd/v1 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n" + UPGRADE.encode() + b"\r\n"
    with serving(Limits(), lambda transport, permit, received: upgraded.append((transport, received))) as (connection, loop_transport, admission):
        sent = bytes(range(256)) * (early // 256 + 1)
        connection.data_received(head[:cut])
        if cut is not None:
            connection.data_received(head[cut:] + sent[:early])
        else:
            for start in range(0, early, RECEIVE // 2):
                connection.data_received(sent[start : min(early, start + RECEIVE // 2)])
        await asyncio.sleep(0.1)
        ((transport, received),) = upgraded
        assert transport is loop_transport and received[: RECEIVE + 1] == sent[:kept] and len(received) == (kept if cut is None else early)
        assert loop_transport.written.startswith(b"HTTP/1.1 101 ") and loop_transport.state == "open" and admission.open == 1
        await asyncio.sleep(100)
        assert loop_transport.state == "open" and loop_transport.written.endswith(b"\r\n\r\n"), "the library has let go of it"


async def test_an_answer_that_is_not_read_is_given_up(virtual_clock: object) -> None:
    with serving(Limits(unread_seconds=3.0)) as (connection, loop_transport, admission):
        connection.data_received(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n")
        await asyncio.sleep(2.9)
        assert loop_transport.written.endswith(b"\r\n\r\nok") and loop_transport.unread and loop_transport.state == "open"
        await asyncio.sleep(0.2)
        assert loop_transport.state == "gone" and admission.open == 0


async def _until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


# ---- too many, too much


async def test_connections_above_the_limits_are_closed_oldest_first() -> None:
    transport = HttpTransport(Limits(connections=6, connections_per_address=4))
    async with listening(transport) as url:

        async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            stream = await asyncio.open_connection("127.0.0.1", port_of(url), local_addr=(address, 0))
            kept.append(stream)
            return stream

        kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for count in range(1, 5):
            await connect("127.0.0.1")
            await _until(lambda count=count: transport.connections == count)
        assert (await get(url, "/health"))[0] == 200, "made room for"
        assert await kept[0][0].read() == b"" and not kept[1][0].at_eof()
        await _until(lambda: transport.connections == 3)
        for number in (2, 3, 4):  # other addresses
            await connect(f"127.0.0.{number}")
        assert await kept[1][0].read() == b"", "the oldest of all"
        await _until(lambda: transport.connections == 4)
        for _, writer in kept:
            await closed(writer)
        await _until(lambda: transport.connections == 0)


async def test_many_idle_connections_are_gone_in_time() -> None:
    transport = HttpTransport(Limits(connections=200, connections_per_address=150, handshake_timeout=1.0))
    async with listening(transport) as url, contextlib.AsyncExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", port_of(url)))) for _ in range(100)]
        assert (await get(url, "/health"))[0] == 200, "others are served meanwhile"
        await asyncio.gather(*(asyncio.to_thread(read_to_the_end, opened) for opened in sockets))
        await _until(lambda: transport.connections == 0)


async def test_channels_count_as_connections_until_they_are_closed() -> None:
    async with connected(HttpTransport(Limits(connections_per_address=1))) as pair:
        assert pair.listener.connections == 1
        sink = Sink(pair.accepted)
        with pytest.raises(Overloaded, match=r"from this address .*Limits\.connections_per_address$"):
            await pair.dialler.connect(pair.url, 5)
        pair.dialled.close()
        await sink.until_closed()
        assert pair.listener.connections == 0
        (await pair.dialler.connect(pair.url, 5)).close()


async def test_a_frame_that_is_too_large_closes_the_channel() -> None:
    async with connected() as pair:
        sink, sender = Sink(pair.accepted), Sink(pair.dialled)
        pair.dialled.send(bytes((1 << 20) + OVERHEAD + 1))
        assert "at most" in str(await sink.until_closed())
        await sender.until_closed()
        assert sink.count == 0


async def test_a_peer_that_never_reads_is_dropped_and_others_go_on() -> None:
    limits = Limits(unread_seconds=0.4)
    channels: list[Channel] = []
    async with listening(HttpTransport(limits), channels.append) as url:
        deaf = socket.create_connection(("127.0.0.1", port_of(url)))
        deaf.sendall(f"GET /aiograd/v1 HTTP/1.1\r\nHost: {url[7:]}\r\n{UPGRADE}\r\n".encode())
        await _until(lambda: channels)
        sink = Sink(channels[0])
        while channels[0].send(bytes(1 << 20)):
            await asyncio.sleep(0)
        dialler = HttpTransport()
        other = Sink(await dialler.connect(url, 5))
        channels[1].send(b"still here")
        assert await other.next() == b"still here"
        assert isinstance(await sink.until_closed(), WorkerLostError)
        await dialler.aclose()
        deaf.close()


async def test_fragments_over_a_socket() -> None:
    sinks: list[Sink] = []
    async with listening(HttpTransport(), lambda channel: sinks.append(Sink(channel, greeted=False))) as url:
        pieces = [framing.header(first, 5, framing.MASKED) + bytes(4) + b"abcde" for first in (0x02, 0x00, 0x80)]
        late = framing.header(0x02, STRANGER, framing.MASKED) + bytes(4) + bytes(STRANGER) + pieces[1]
        answer = await request(url, f"GET /aiograd/v1 HTTP/1.1\r\nHost: {url[7:]}\r\n{UPGRADE}\r\n".encode() + b"".join(pieces) + late)
        assert bytes(await sinks[0].next()) == b"abcde" * 3
        assert answer.endswith(b"\x88\x02" + struct.pack("!H", framing.TOO_BIG))


# ---- servers that lead elsewhere


@contextlib.asynccontextmanager
async def malicious(answer: bytes) -> AsyncIterator[str]:
    """A server that gives every caller the same answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            key = head.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0].decode()
            writer.write(answer.replace(b"{accept}", accept_key(key).encode()))
            await writer.drain()
            await reader.read()
        writer.close()

    async with answering(serve) as url:
        yield url


@contextlib.asynccontextmanager
async def canary() -> AsyncIterator[str]:
    """A server that nobody may connect to."""
    visits: list[object] = []

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(writer.close())

    async with answering(visit) as url:
        yield url
        await asyncio.sleep(0.02)
    assert not visits


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 300, 304])
async def test_redirects_are_not_followed(status: int) -> None:
    async with canary() as place:
        answer = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {place}/aiograd/v1\r\nRefresh: 0; url={place}\r\nContent-Length: 0\r\n\r\n"
        async with malicious(answer.encode()) as url, contextlib.aclosing(HttpTransport()) as transport:
            with pytest.raises(OSError, match=r"redirects are not followed"):
                await transport.connect(url, 5)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with canary() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "ws_proxy"):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        async with connected():
            pass


GOOD = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n"
ANSWERS = {
    "an ordinary page": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    "an endless page": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"ffff\r\n" + b"a" * 65535,
    "a bomb": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 100\r\n\r\n" + b"\x1f\x8b\x08" + bytes(97),
    "cookies": b"HTTP/1.1 403 Forbidden\r\nSet-Cookie: a=b; Domain=.org\r\nContent-Length: 0\r\n\r\n",
    "a wrong key": GOOD.replace(b"{accept}", b"AAAA") + b"\r\n",
    "an extension": GOOD + b"Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n",
    "a protocol": GOOD + b"Sec-WebSocket-Protocol: chat\r\n\r\n",
    "another upgrade": GOOD.replace(b"websocket", b"h2c") + b"\r\n",
    "no upgrade": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "garbage": b"\x00\x01\x02\x03\x04\r\n\r\n",
    "no status": b"HTTP/1.1 \r\n\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"X: " + b"a" * 100_000,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: 1\r\n" % index for index in range(1000)) + b"\r\n",
    "demands a password": b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n",
    "hangs up": b"",
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_what_is_no_worker_gives_an_error_that_says_so(name: str) -> None:
    async with malicious(ANSWERS[name]) as url, contextlib.aclosing(HttpTransport()) as transport:
        with pytest.raises((OSError, TimeoutError), match=r"connecting to http://127\.0\.0\.1"):
            await transport.connect(url, 0.3)


async def test_a_server_that_answers_like_a_worker_is_connected_to() -> None:
    async with malicious(GOOD + b"\r\n" + b"\x82\x02hi") as url, contextlib.aclosing(HttpTransport()) as transport:
        assert await Sink(await transport.connect(url, 5)).next() == b"hi", "so the answers above fail for what they say"


async def test_refused_means_that_every_address_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def addresses(peer: PeerAddress) -> list[str]:
        return ["127.0.0.1", "127.0.0.2"]

    monkeypatch.setattr("aiograd.distributed.rpc.http.transport.resolve", addresses)
    async with malicious(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url, contextlib.aclosing(HttpTransport()) as transport:
        with pytest.raises(OSError, match="404") as caught:
            await transport.connect(url, 5)
        assert not isinstance(caught.value, ConnectionRefusedError)


async def test_random_answers_give_ordinary_errors() -> None:
    draw = random.Random(23)
    lines = [
        "Upgrade: websocket", "Connection: Upgrade", "Connection: close", "Sec-WebSocket-Accept: AAAA",
        "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999", "Transfer-Encoding: chunked", "Content-Encoding: br", "Location: http://a/",
        "Set-Cookie: a", "X: \xff", "no colon", ": empty", "Content-Type: text/html; charset=nonsense", "Link: <<>>; rel=", "Content-Disposition: x",
        "Sec-WebSocket-Extensions: permessage-deflate",
    ]  # fmt: skip
    answer = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        writer.close()

    async with answering(serve) as url, contextlib.aclosing(HttpTransport()) as transport:
        for _ in range(100 * FUZZ):
            status = draw.choice(("101 Switching", "101", "100 Continue", "200 OK", "204 No", "302 Found", "999 X", "1000 X", "-1", "abc", ""))
            head = f"HTTP/1.{draw.choice('0119')} {status}\r\n" + "".join(f"{line}\r\n" for line in draw.sample(lines, draw.randint(0, 5))) + "\r\n"
            data = bytearray(head.encode("latin-1") + draw.randbytes(draw.choice((0, 0, 20, 5000))))
            for _ in range(draw.choice((0, 0, 1, 5))):
                data[draw.randrange(len(data))] = draw.randrange(256)
            answer = bytes(data)
            with pytest.raises(OSError, match="connecting to"):
                await transport.connect(url, 5)


async def test_compression_is_not_negotiated() -> None:
    async with listening(HttpTransport(), Sink) as url:
        offer = "Sec-WebSocket-Extensions: permessage-deflate\r\nSec-WebSocket-Protocol: x\r\n\r\n"
        answer = await request(url, f"GET /aiograd/v1 HTTP/1.1\r\nHost: {url[7:]}\r\n{UPGRADE}{offer}".encode() + b"\xc2\x80\x00\x00\x00\x00")
        assert answer.startswith(b"HTTP/1.1 101") and b"Extensions" not in answer and b"Protocol:" not in answer
        assert answer.endswith(b"\x88\x02" + struct.pack("!H", framing.PROTOCOL_FAULT)), "a compressed frame breaks the protocol"


async def test_running_out_of_descriptors_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiograd.distributed.rpc.http.transport.ACCEPT_PAUSE", 0.01)
    failures = [OSError(24, "Too many open files")] * 3

    async def accepted(listener: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return await sockets.accepted(listener)

    monkeypatch.setattr("aiograd.distributed.rpc.http.transport.accepted", accepted)
    transport = HttpTransport()
    url = await transport.listen("127.0.0.1", 0, lambda channel: None)
    assert (await get(url, "/health"))[0] == 200 and not failures
    await transport.aclose()
