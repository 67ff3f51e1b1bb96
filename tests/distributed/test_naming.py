"""The name of a worker for callers that hold its key, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.distributed.rpc.http import naming
from aiograd.distributed.rpc.http.naming import NamePage, name_at
from aiograd.distributed.rpc.http.pages import NAME, PageRequest
from aiograd.errors import AddressError, ArgumentError, AuthenticationError, HostRefusedError
from tests.distributed.http_support import get
from tests.support import assert_awaiting_raises

pytestmark = pytest.mark.net
KEYS = dist.Keyring(bytes(range(32)), kid="may")
OTHER = dist.Keyring(bytes(32), kid="may")
NUMBER = "ab" * naming.NUMBER_BYTES


def asked(authorization: str) -> Any:
    return NamePage("left", KEYS).answer(PageRequest(NAME, {}, {}, authorization, is_local=True, is_secure=False, port=1))


def proof(keyring: dist.Keyring = KEYS, number: str = NUMBER, purpose: bytes = b"name of the worker") -> str:
    return hmac.digest(keyring.key_for("default").derive(purpose), number.encode(), "sha256").hex()


async def test_the_holder_of_a_key_learns_the_name() -> None:
    async with dist.Worker("left", secret=KEYS) as worker:
        assert await name_at(worker.url, KEYS, timeout=30.0) == "left"


async def test_no_other_learns_it() -> None:
    async with dist.Worker("left", secret=KEYS) as worker:
        error = await assert_awaiting_raises(AuthenticationError, "status 404.*same secret", name_at(worker.url, OTHER, timeout=30.0))
        assert "left" not in str(error)
        status, body, _ = await get(worker.url, NAME)
        assert status == 404 and b"left" not in body
        status, body, _ = await get(worker.url, NAME, f"Origin: {worker.url}\r\nAuthorization: aiograd may {NUMBER} {proof()}\r\n")
        assert status == 403, "closed to browsers"


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        f"aiograd may {NUMBER} {proof(OTHER)}",
        f"aiograd june {NUMBER} {proof()}",
        f"aiograd june {NUMBER} {proof(OTHER)}",  # the zeros that stand for a key that is not there
        f"aiograd may {NUMBER[2:]}cd {proof()}",
        f"aiograd may {NUMBER[2:]} {proof(number=NUMBER[2:])}",
        f"aiograd may {NUMBER} {proof(purpose=b'handshake HELLO')}",
        f"aiograd may {NUMBER} {proof()} more",
        f"Bearer may {NUMBER} {proof()}",
        f"aiograd may {NUMBER} ü",
        f"aiograd may {'ü' * 2 * naming.NUMBER_BYTES} {proof()}",
        f"aiograd \udcff {NUMBER} {proof()}",
    ],
)
def test_proofs_that_prove_nothing(authorization: str) -> None:
    page = asked(authorization)
    assert page.status == 404 and b"left" not in page.body


def test_a_proof() -> None:
    page = asked(f"aiograd may {NUMBER} {proof()}")
    assert (page.status, page.body) == (200, b"left")


async def test_urls_that_lead_to_no_worker() -> None:
    await assert_awaiting_raises(ArgumentError, "left", name_at("left", KEYS, timeout=30.0))
    async with dist.Worker("left", secret=KEYS) as worker:
        url = worker.url
    await assert_awaiting_raises(ConnectionRefusedError, "no process listens", name_at(url, KEYS, timeout=30.0))


@contextlib.asynccontextmanager
async def server(answer: bytes) -> Any:
    """A server that gives one answer to everything; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def http(status: str, body: bytes, server: str = "aiograd") -> bytes:
    return f"HTTP/1.1 {status}\r\nServer: {server}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (http("200 OK", b"x", "nginx"), AddressError, "another HTTP server"),
        (http("403 Forbidden", b""), HostRefusedError, "does not answer to the name"),
        (http("500 Failed", b""), AuthenticationError, "status 500"),
        (http("200 OK", b"a b"), ArgumentError, "1 to 128 characters"),
        (http("200 OK", b"x" * 100_000), ArgumentError, "1 to 128 characters"),
        (http("200 OK", b""), ArgumentError, "1 to 128 characters"),
        (http("302 Found", b""), AuthenticationError, "status 302"),
        (b"HTTP/1.1 200 OK\r\nServer: aiograd\r\nContent-Length: 9\r\n\r\nab", OSError, "reading"),
        (b"nonsense\r\n\r\n", OSError, "connecting"),
        (b"", OSError, "hung up"),
    ],
)
async def test_answers_that_are_none(answer: bytes, error: type[BaseException], text: str) -> None:
    async with server(answer) as url:
        await assert_awaiting_raises(error, text, name_at(url, KEYS, timeout=30.0))


async def test_a_server_without_an_answer() -> None:
    silent = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silent.wait()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        await assert_awaiting_raises(TimeoutError, "0.05 s", name_at(url, KEYS, timeout=0.05))
        silent.set()
