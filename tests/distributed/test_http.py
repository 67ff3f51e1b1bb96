"""HttpTransport over real sockets: frames, routes, TLS, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from aiograd import distributed as dist
from aiograd.distributed.rpc.http import HttpTransport
from aiograd.distributed.rpc.http.addresses import HostAllowList
from aiograd.distributed.rpc.http.channel import OVERHEAD
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.transport import Channel, Transport
from aiograd.errors import AddressError, ArgumentError, DistributedError, Overloaded, WorkerLostError
from tests.distributed.http_support import Authority, Sink, answering, connected, get, listening, until_hung_up
from tests.loops import LOOPS
from tests.support import cancel

pytestmark = pytest.mark.net
SIZES = (0, 1, 125, 126, 65535, 65536, 200_000, (1 << 20) + OVERHEAD)


async def exchange(listener: HttpTransport, dialler: HttpTransport) -> None:
    async with connected(listener, dialler) as pair:
        accepted, dialled = Sink(pair.accepted), Sink(pair.dialled)
        data = [os.urandom(size) for size in SIZES]
        for sender, sink in ((pair.dialled, accepted), (pair.accepted, dialled)):
            for frame in data:
                sender.send(memoryview(frame))
            assert [bytes(await sink.next()) for _ in data] == data
    assert accepted.closed == dialled.closed == [None]
    assert listener.connections == dialler.connections == 0


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_frames_cross_both_ways(loop: str, secure: bool, tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        if secure:
            authority = Authority(tmp_path)
            runner.run(exchange(HttpTransport(ssl=authority.server("alice")), HttpTransport(client_ssl=authority.client())))
        else:
            runner.run(exchange(HttpTransport(), HttpTransport()))


async def one_large_frame_a_turn() -> None:
    """However many are there to be read: what came in before one of them is served before the next."""
    turn = 0
    loop = asyncio.get_running_loop()
    came_in: list[int] = []
    is_over = asyncio.Event()

    def count() -> None:
        nonlocal turn
        turn += 1
        if not is_over.is_set():
            loop.call_soon(count)

    async with connected() as pair:
        sink = Sink()

        def note(frame: bytes | memoryview) -> None:
            sink._frame(frame)
            came_in.append(turn)

        for _ in range(2):
            pair.accepted.attach(note, sink._closed, sink.writable.set)
        Sink(pair.dialled)
        count()
        for _ in range(40):
            pair.dialled.send(bytes(100_000))
        for _ in range(40):
            await sink.next()
        is_over.set()
    assert len(set(came_in)) == 40


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_large_frames_take_a_turn_of_the_loop_each(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(one_large_frame_a_turn())


async def test_it_is_a_transport_and_its_channels_are_channels() -> None:
    transport: Transport = HttpTransport()
    assert len(transport.entropy(16)) == 16 != transport.entropy(16)
    async with connected() as pair:
        channel: Channel = pair.dialled
        assert channel.remote == pair.url and channel.certified_names is None
        assert pair.accepted.remote.startswith("127.0.0.1:")


async def test_a_transport_dials_itself_and_many_others() -> None:
    accepted: list[Channel] = []
    transport = HttpTransport()
    async with listening(transport, accepted.append) as url:
        channels = await asyncio.gather(*(transport.connect(url, 5) for _ in range(20)))
        sinks = [Sink(channel) for channel in channels]
        assert transport.connections == 20
        for index, channel in enumerate(accepted):
            Sink(channel)
            channel.send(b"%d" % index)
        assert sorted([int(bytes(await sink.next())) for sink in sinks]) == list(range(20))


async def test_one_side_closes_and_both_are_told_once() -> None:
    async with connected() as pair:
        accepted, dialled = Sink(pair.accepted), Sink(pair.dialled)
        pair.dialled.send(b"goodbye")
        pair.dialled.close()
        assert await accepted.next() == b"goodbye"
        assert (await accepted.until_closed(), await dialled.until_closed()) == (None, None)
        pair.accepted.close()
        assert pair.listener.connections == 0
    assert accepted.closed == dialled.closed == [None]


async def test_a_crash_is_noticed_at_once() -> None:
    async with connected() as pair:
        accepted = Sink(pair.accepted)
        pair.dialled._transport.abort()
        await accepted.until_closed()


async def test_a_sender_is_held_back_and_let_go_on() -> None:
    async with connected() as pair:
        accepted, dialled = Sink(), Sink(pair.dialled)
        sent, frame = 0, bytes(1 << 20)
        while pair.dialled.send(frame):
            sent += 1
            await asyncio.sleep(0)
        assert sent < 50 and not dialled.writable.is_set(), "nobody reads there yet"
        accepted.attach(pair.accepted)
        accepted.attach(pair.accepted)
        await asyncio.wait_for(dialled.writable.wait(), 10)
        assert [len(await accepted.next()) for _ in range(sent + 1)] == [len(frame)] * (sent + 1)


# ---- requests


async def test_health_and_nothing_else() -> None:
    async with listening(HttpTransport()) as url:
        status, body, head = await get(url, "/health")
        assert (status, body) == (200, b"ok")
        assert "Server: aiograd\r\n" in head and "Python" not in head and "aiohttp" not in head
        unknown = [await get(url, path) for path in ("/", "/metrics", "/aiograd", "/aiograd/v1/", "/aiograd/v2", "/health/", "//health", "/%68ealth")]
        assert {(status, body) for status, body, _ in unknown} == {(404, b"not found\n")}
        assert len({head for _, _, head in unknown}) <= 2, "but for the date they are the same"


async def test_an_answer_that_fails_says_nothing_of_why(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> bool:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(HostAllowList, "allows", broken)
    async with listening(HttpTransport()) as url:
        status, body, head = await get(url, "/health")
    assert (status, body) == (500, b"failed\n") and "secret" not in head
    assert "a secret detail" in caplog.text, "it is in the local log"


async def test_requests_leave_no_trace_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with listening(HttpTransport()) as url:
        await get(url, "/health")
        await get(url, "/nope")
    assert not caplog.records


# ---- listening and dialling


def listening_addresses(port: int) -> set[str]:
    """The addresses that the kernel says are listened on at `port`, in hexadecimal."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    found.add(local.rpartition(":")[0])
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_it_listens_on_what_it_was_told_and_nothing_wider(host: str) -> None:
    transport = HttpTransport()
    async with listening(transport, host=host) as url:
        assert url.startswith(f"http://{host}:")
        port = int(url.rpartition(":")[2])
        assert listening_addresses(port) in ({"0100007F"}, {"00000000000000000000000001000000"}, set())  # empty where there is no /proc
    assert not listening_addresses(port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "::ffff:0.0.0.0"])  # noqa: S104 - they are refused
async def test_addresses_that_others_reach_need_tls_or_permission(host: str) -> None:
    with pytest.raises(ArgumentError, match="allow_plaintext=True"):
        await HttpTransport().listen(host, 0, lambda channel: None)


@pytest.mark.parametrize(("host", "port"), [("", 0), ("127.0.0.1", -1), ("127.0.0.1", 65536)])
async def test_no_address_is_not_every_address(host: str, port: int) -> None:
    with pytest.raises(ArgumentError, match="expected an address"):
        await HttpTransport(allow_plaintext=True).listen(host, port, lambda channel: None)


async def test_a_taken_port() -> None:
    async with listening(HttpTransport()) as url:
        with pytest.raises(OSError, match=rf"listening on {url[7:]}: Address already in use; another process listens there: choose another port"):
            await HttpTransport().listen("127.0.0.1", int(url.rpartition(":")[2]), lambda channel: None)


async def test_nobody_listens() -> None:
    async with listening(HttpTransport()) as url:
        pass
    transport = HttpTransport()
    with pytest.raises(ConnectionRefusedError, match="no process listens"):
        await transport.connect(url, 5)
    await transport.aclose()


async def test_the_port_can_be_taken_again_at_once() -> None:
    async with connected() as pair:
        port = int(pair.url.rpartition(":")[2])
    again = HttpTransport()
    await again.listen("127.0.0.1", port, lambda channel: None)
    await again.aclose()


async def test_a_name_is_dialled_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted: list[Channel] = []
    asked: list[str] = []
    loop = asyncio.get_running_loop()

    async def look_up(host: str, port: int, **options: object) -> list[object]:
        asked.append(host)
        return [(0, 0, 0, "", ("127.0.0.2", port)), (0, 0, 0, "", ("127.0.0.1", port))]

    class Loop:
        getaddrinfo = staticmethod(look_up)

    async with listening(HttpTransport(trusted_hosts=("worker.example.org",)), accepted.append) as url:
        monkeypatch.setattr("aiograd.distributed.rpc.http.addresses.asyncio.get_running_loop", lambda: Loop)
        from aiograd.distributed.rpc.http import addresses

        found = await addresses.resolve(addresses.parse_url(f"http://worker.example.org:{url.rpartition(':')[2]}"))
        monkeypatch.undo()
        monkeypatch.setattr("aiograd.distributed.rpc.http.transport.resolve", lambda peer: _give(found))
        dialler = HttpTransport()
        channel = await dialler.connect(f"http://worker.example.org:{url.rpartition(':')[2]}", 5)
        assert channel.remote.startswith("http://worker.example.org:") and len(accepted) == 1, "the first refused, the second answered"
        await dialler.aclose()
    assert asked == ["worker.example.org"] and loop is asyncio.get_running_loop()


async def _give(found: list[str]) -> list[str]:
    return found


@pytest.mark.parametrize("status", ["200 OK", "403 Forbidden", "404 Not Found"])
async def test_another_http_server_is_said_to_be_one(status: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nServer: nginx\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    async with answering(answer) as url, dist.Worker("a", peers={"b": url}) as a:
        with pytest.raises(AddressError, match=rf"connecting to {url}: another HTTP server answers there \('nginx'\), with status {status[:3]}"):
            await a.call("b", "anything")


async def test_a_peer_that_never_answered_is_named_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with dist.Worker("a", peers={"b": url}, limits=Limits(heartbeat=0.02)) as a:
            with pytest.raises(WorkerLostError, match=rf"lost \(CALL\): TimeoutError: connecting to {url}: no answer within .* a firewall"):
                await a.call("b", "anything")


async def test_dialling_gives_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        transport = HttpTransport()
        with pytest.raises(TimeoutError, match=r"no answer within 0.05 s"):
            await transport.connect(url, 0.05)
        dialling = asyncio.create_task(transport.connect(url, 30))
        await asyncio.sleep(0.01)
        await cancel(dialling)
        await transport.aclose()


async def test_a_closed_transport() -> None:
    transport = HttpTransport()
    async with listening(transport) as url:
        pass
    await transport.aclose()
    with pytest.raises(DistributedError, match="the transport is closed"):
        await transport.connect(url, 5)
    with pytest.raises(DistributedError, match="the transport is closed"):
        await transport.listen("127.0.0.1", 0, lambda channel: None)


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_comes_in_the_turn_of_the_end_is_closed(turns: int) -> None:
    transport = HttpTransport()
    url = await transport.listen("127.0.0.1", 0, lambda channel: None)
    await asyncio.sleep(0.01)  # it waits for connections
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as dialled:
        dialled.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        await transport.aclose()
        gc.collect()  # a socket that is left is a ResourceWarning
        with contextlib.suppress(ConnectionError):
            assert await asyncio.get_running_loop().sock_recv(dialled, 1) == b""


async def test_closing_ends_connections_that_asked_for_nothing_yet_or_nothing_more() -> None:
    transport = HttpTransport()
    async with listening(transport) as url:
        streams = [await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])) for _ in range(3)]
        streams[1][1].write(b"GET /hea")
        streams[2][1].write(f"GET /health HTTP/1.1\r\nHost: {url[7:]}\r\n\r\n".encode())
        assert (await streams[2][0].readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        assert transport.connections == 3
    assert transport.connections == 0
    for stream in streams:
        await until_hung_up(*stream)


async def test_a_handler_that_fails_to_accept_closes_the_channel() -> None:
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))

    def accept(channel: Channel) -> None:
        raise RuntimeError("no")

    dialler = HttpTransport()
    async with listening(HttpTransport(), accept) as url:
        sink = Sink(await dialler.connect(url, 5))
        await sink.until_closed()
    await dialler.aclose()
    assert [str(report["exception"]) for report in reports] == ["no"]


# ---- TLS


async def test_closing_does_not_wait_for_the_other_side_of_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    listener = HttpTransport(ssl=authority.server("alice"))
    async with listening(listener) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=authority.client())
        writer.transport.pause_reading()
        assert listener.connections == 1
    await asyncio.sleep(0.01)
    assert listener.connections == 0
    writer.transport.abort()


async def test_mutual_tls_tells_who_the_peer_is(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    alice = HttpTransport(ssl=authority.server("alice", mutual=True), client_ssl=authority.client("alice"))
    bob = HttpTransport(ssl=authority.server("bob", mutual=True), client_ssl=authority.client("bob"))
    async with connected(alice, bob) as pair:
        assert pair.url.startswith("https://")
        Sink(pair.accepted), Sink(pair.dialled)
        assert pair.accepted.certified_names == {"bob", "127.0.0.1", "localhost"}
        assert pair.dialled.certified_names == {"alice", "127.0.0.1", "localhost"}


async def test_tls_of_the_server_alone_names_nobody(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with connected(HttpTransport(ssl=authority.server("alice")), HttpTransport(client_ssl=authority.client("bob"))) as pair:
        Sink(pair.accepted), Sink(pair.dialled)
        assert pair.accepted.certified_names is pair.dialled.certified_names is None


async def test_who_cannot_show_a_certificate_gets_no_channel(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    authority, strangers = Authority(tmp_path), Authority(tmp_path / "others")
    accepted: list[Channel] = []
    listener = HttpTransport(ssl=authority.server("alice", mutual=True))
    forged = authority.client()
    strangers._issue(forged, "alice")
    async with listening(listener, accepted.append) as url:
        for context in (authority.client(), forged, strangers.client("mallory")):
            dialler = HttpTransport(client_ssl=context)
            with pytest.raises(OSError, match="connecting to https"):
                await dialler.connect(url, 5)
            await dialler.aclose()
        plain = HttpTransport()
        with pytest.raises(OSError, match="connecting to http:"):
            await plain.connect(url.replace("https", "http"), 5)
        await plain.aclose()
    assert not accepted and listener.connections == 0


async def test_a_certificate_for_another_name_is_not_accepted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with listening(HttpTransport(ssl=authority.server("alice"), trusted_hosts=("127.0.0.2",)), host="127.0.0.1") as url:
        dialler = HttpTransport(client_ssl=authority.client())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("aiograd.distributed.rpc.http.transport.resolve", lambda peer: _give(["127.0.0.1"]))
            with pytest.raises(OSError, match="certificate"):
                await dialler.connect(f"https://127.0.0.2:{url.rpartition(':')[2]}", 5)
        await dialler.aclose()


async def test_a_tls_handshake_that_does_not_come_closes_the_connection(tmp_path: Path) -> None:
    listener = HttpTransport(Limits(handshake_timeout=1.0, connections_per_address=2), ssl=Authority(tmp_path).server("alice"))
    async with listening(listener) as url:
        port = int(url.rpartition(":")[2])
        stalled = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        stalled[0][1].write(b"\x16\x03\x01\x02\x00\x01")
        while listener.connections < 2:  # counted before the handshake
            await asyncio.sleep(0)
        for stream in [await asyncio.open_connection("127.0.0.1", port), *stalled]:
            await until_hung_up(*stream)
        assert listener.connections == 0


def test_old_tls_is_refused() -> None:
    with pytest.raises(ArgumentError, match="minimum_version"):
        HttpTransport(client_ssl=ssl.create_default_context())


async def test_limits_of_one_transport_do_not_hold_for_another() -> None:
    async with connected(HttpTransport(Limits(connections=1))) as pair:
        Sink(pair.accepted)
        with pytest.raises(Overloaded, match=r"Limits\.connections$"):
            await pair.dialler.connect(pair.url, 5)
