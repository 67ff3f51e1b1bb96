"""Support for the tests of HTTP: sinks for frames, pairs of channels, a transport that is none, raw requests and certificates."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from aiograd.distributed.rpc.http import HttpTransport, WebSocketChannel
from aiograd.distributed.rpc.transport import Channel
from tests.watchdog import SECONDS

UPGRADE = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"


class Sink:
    """Keeps what a channel delivers."""

    def __init__(self, channel: Channel | None = None, *, greeted: bool = True) -> None:
        self.frames: asyncio.Queue[bytes | memoryview] = asyncio.Queue()
        self.count = 0
        self.closed: list[BaseException | None] = []
        self.closing = asyncio.Event()
        self.writable = asyncio.Event()
        if channel is not None:
            self.attach(channel)
            if greeted:
                self.attach(channel)

    def attach(self, channel: Channel) -> None:
        channel.attach(self._frame, self._closed, self.writable.set)

    def _frame(self, frame: bytes | memoryview) -> None:
        self.count += 1
        self.frames.put_nowait(frame)

    def _closed(self, error: BaseException | None) -> None:
        self.closed.append(error)
        self.closing.set()

    async def next(self) -> bytes | memoryview:
        return await asyncio.wait_for(self.frames.get(), SECONDS)

    async def until_closed(self) -> BaseException | None:
        await asyncio.wait_for(self.closing.wait(), SECONDS)
        return self.closed[0]


class Pair(NamedTuple):
    """Two transports with a channel between them."""

    listener: HttpTransport
    dialler: HttpTransport
    url: str
    accepted: Channel
    dialled: WebSocketChannel


@contextlib.asynccontextmanager
async def listening(transport: HttpTransport, accept: Callable[[Channel], None] | None = None, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """`transport` while it listens; gives its URL."""
    kept: list[Channel] = []
    try:
        yield await transport.listen(host, 0, accept or kept.append)
    finally:
        await transport.aclose()


@contextlib.asynccontextmanager
async def connected(listener: HttpTransport | None = None, dialler: HttpTransport | None = None) -> AsyncIterator[Pair]:
    """A pair with nothing attached."""
    listener, dialler = listener or HttpTransport(), dialler or HttpTransport()
    accepted: asyncio.Queue[Channel] = asyncio.Queue()
    async with listening(listener, accepted.put_nowait) as url:
        try:
            channel = await dialler.connect(url, SECONDS)
            yield Pair(listener, dialler, url, await asyncio.wait_for(accepted.get(), SECONDS), channel)
        finally:
            await dialler.aclose()


class LoopTransport:
    """Stands in for the event loop's transport: what is written stays in `written` until `drain`."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.unread = 0
        self.high = self.low = 0
        self.protocol: Any = None
        self.state = "open"
        self.reading = True

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        self.high, self.low = high, low

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def writelines(self, pieces: Iterable[bytes | memoryview]) -> None:
        for piece in pieces:
            self.write(piece)

    def write(self, data: bytes | memoryview) -> None:
        assert self.state == "open", f"written to a transport that is {self.state}"
        was, self.unread = self.unread, self.unread + len(data)
        self.written += data
        if was <= self.high < self.unread:
            self.protocol.pause_writing()

    def drain(self, count: int) -> None:
        was, self.unread = self.unread, self.unread - count
        if self.unread <= self.low < was:
            self.protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return self.state != "open"

    def close(self) -> None:
        if self.state == "open":
            self.state = "closing"

    def abort(self) -> None:
        if self.state != "gone":
            self.state = "gone"
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def feed(self, data: bytes) -> None:
        """As the loop delivers what it received: in the buffers of the protocol."""
        while data and self.state == "open":
            buffer = self.protocol.get_buffer(-1)
            count = min(len(buffer), len(data))
            assert count, "no room in the buffer"
            buffer[:count] = data[:count]
            data = data[count:]
            self.protocol.buffer_updated(count)


def read_to_the_end(opened: socket.socket) -> None:
    """Block until the other side hangs up."""
    opened.settimeout(SECONDS)
    with contextlib.suppress(ConnectionError):
        while opened.recv(4096):
            pass


async def closed(writer: asyncio.StreamWriter) -> None:
    """Close a connection that the other side may have closed."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def until_hung_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait until the other side hangs up, which sends nothing more, and close this side."""
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    await closed(writer)


@contextlib.asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A server that gives each connection to `answer`; its URL."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def request(url: str, data: bytes | str, *, half_close: bool = False) -> bytes:
    """Send `data` to where `url` points and return all that comes back until the connection ends."""
    host, port = url.rpartition("//")[2].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data.encode("latin-1") if isinstance(data, str) else data)
        if half_close:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), SECONDS)
    except ConnectionError:
        return b""
    finally:
        await closed(writer)


async def get(url: str, path: str, headers: str = "", *, method: str = "GET", host: str | None = None) -> tuple[int, bytes, str]:
    """Status, body and head of the answer to one request."""
    name = url.rpartition("//")[2] if host is None else host
    answer = await request(url, f"{method} {path} HTTP/1.1\r\nHost: {name}\r\n{headers}Connection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body, head.decode("latin-1")


def _usage(is_authority: bool) -> x509.KeyUsage:
    """The use of a key: an authority signs certificates (Python 3.13 insists on that being said), others sign handshakes."""
    no = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority, **no)


class Authority:
    """A certificate authority that lives as long as a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self._certificate = self._sign(self._name, self._key, [], is_authority=True)
        self._file = folder / "authority.pem"
        self._file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(self, name: x509.Name, key: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName], *, is_authority: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(_usage(is_authority), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _issue(self, context: ssl.SSLContext, worker: str) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(worker), x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        certificate = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, worker)]), key, names, is_authority=False)
        file = self._folder / f"{worker}.pem"
        file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context.load_cert_chain(file)

    def server(self, worker: str, *, mutual: bool = False) -> ssl.SSLContext:
        """A context to listen with."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._issue(context, worker)
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self._file)
        return context

    def client(self, worker: str | None = None) -> ssl.SSLContext:
        """A context to dial with, which shows a certificate where `worker` is given."""
        context = ssl.create_default_context(cafile=str(self._file))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if worker is not None:
            self._issue(context, worker)
        return context
