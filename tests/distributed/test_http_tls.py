"""TLS: its context is made once and off the loop, and what is wrong with it is said at once and by type."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.distributed.error_wire import from_wire, to_wire
from aiograd.distributed.rpc.http import HttpTransport, tls
from aiograd.distributed.rpc.http.addresses import parse_url
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import AddressError, AuthenticationError, CertificateError, DistributedError, NotExposedError, WorkerLostError
from tests.distributed.http_support import Authority, listening, request

pytestmark = pytest.mark.net
SECRET = b"0123456789abcdef" * 2
#: nobody is given up for being silent, so what ends a call is the error
PATIENT = Limits(missed_heartbeats=1000)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The threads on which contexts with the system's authorities were made."""
    threads: list[int] = []
    create = ssl.create_default_context

    def counted(*args: Any, **options: Any) -> ssl.SSLContext:
        threads.append(threading.get_ident())
        return create(*args, **options)

    monkeypatch.setattr(ssl, "create_default_context", counted)
    monkeypatch.setattr(tls, "_context", None)
    yield threads


async def ask(url: str, *, limits: Limits = PATIENT, **options: Any) -> None:
    async with dist.Worker("a", secret=SECRET, peers={"b": url}, limits=limits, **options) as a:
        await a.call("b", "nothing")


# -------------------------------------------------------------------- made once


async def test_no_context_is_made_for_peers_without_tls(made: list[int]) -> None:
    async with dist.Worker("b", secret=SECRET) as b:
        workers = [dist.Worker(f"a{n}", secret=SECRET, peers={"b": b.url}) for n in range(10)]
        for worker in workers:
            await worker.__aenter__()
        for result in await asyncio.gather(*(worker.call("b", "nothing") for worker in workers), return_exceptions=True):
            assert isinstance(result, NotExposedError)
        for worker in workers:
            await worker.aclose()
    assert made == []


async def test_one_context_is_made_for_all_and_not_on_the_loop(made: list[int], tmp_path: Path) -> None:
    async with listening(HttpTransport(ssl=Authority(tmp_path).server("b"))) as url:
        for result in await asyncio.gather(*(ask(url) for _ in range(10)), return_exceptions=True):
            assert isinstance(result, CertificateError)
    assert len(made) == 1 and made[0] != threading.get_ident()


# -------------------------------------------------------------------- what is wrong


async def test_a_certificate_that_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    authority, strangers = Authority(tmp_path), Authority(tmp_path / "others")
    async with listening(HttpTransport(ssl=authority.server("b"))) as url:
        with pytest.raises(CertificateError, match=r"not trusted here \(unable to get local issuer.*client_ssl=") as caught:
            await ask(url, client_ssl=strangers.client())
        assert caught.value.is_certain and isinstance(caught.value, AuthenticationError)


async def test_a_certificate_for_another_host(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with listening(HttpTransport(ssl=authority.server("b")), host="127.0.0.2") as url:
        with pytest.raises(CertificateError, match=r"its certificate is not for '127.0.0.2'.*Use a name of it in the URL"):
            await ask(url, client_ssl=authority.client())


@pytest.mark.parametrize("shows", ["none", "another's"])
async def test_a_certificate_that_the_other_side_wants(tmp_path: Path, shows: str) -> None:
    (tmp_path / "others").mkdir()
    authority, strangers = Authority(tmp_path), Authority(tmp_path / "others")
    client = authority.client()
    if shows != "none":
        strangers._issue(client, "a")
    async with listening(HttpTransport(ssl=authority.server("b", mutual=True))) as url:
        with pytest.raises(CertificateError, match=r"hung up after the TLS handshake.*load_cert_chain") as caught:
            await ask(url, client_ssl=client)
        assert not caught.value.is_certain


async def test_https_where_there_is_http(tmp_path: Path) -> None:
    async with dist.Worker("b", secret=SECRET) as b:
        with pytest.raises(AddressError, match=r"does not speak TLS.*use http://"):
            await ask(b.url.replace("http", "https"), client_ssl=Authority(tmp_path).client())


async def test_http_where_there_is_https(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with dist.Worker("b", secret=SECRET, ssl=authority.server("b")) as b:
        with pytest.raises(AddressError, match=r"speaks TLS only; use https://"):
            await ask(b.url.replace("https", "http"))
        assert (await request(b.url, b"\x00" * 100)).startswith(b"HTTP/1.1 426 ")
        with pytest.raises(NotExposedError):
            await ask(b.url, client_ssl=authority.client())


@pytest.mark.parametrize("code", ["EAI_NONAME", "EAI_NODATA"])
def test_a_host_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    look_up(monkeypatch, getattr(socket, code))
    with pytest.raises(AddressError, match=r"there is no host 'gpu7' .*correct the URL"):
        asyncio.run(ask("http://gpu7:7000"))


async def test_a_host_that_cannot_exist() -> None:
    with pytest.raises(AddressError, match="label empty"):
        await ask("http://a..b:7000")


def test_a_name_service_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = look_up(monkeypatch, socket.EAI_AGAIN)
    with pytest.raises(WorkerLostError, match="what was looked for .*nothing was heard"):
        asyncio.run(ask("http://gpu7:7000", limits=Limits(heartbeat=0.05)))
    assert len(asked) > 1


def look_up(monkeypatch: pytest.MonkeyPatch, code: int) -> list[str]:
    """Let every look-up of a name by asyncio's own loop end in an error."""
    asked: list[str] = []

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        if host != "gpu7":
            return found(host, *args, **options)
        asked.append(host)
        raise socket.gaierror(code, "what was looked for")

    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


async def test_a_worker_that_was_connected_is_asked_again_whatever_its_address_says() -> None:
    async with dist.Worker("b", secret=SECRET) as b, dist.Worker("a", secret=SECRET, peers={"b": b.url}, limits=Limits(heartbeat=0.05)) as a:
        with pytest.raises(NotExposedError):
            await a.call("b", "nothing")
        (peer,) = a.endpoint._peers.values()
        (session,) = peer.sessions
        assert session.channel is not None
        a.add_peer("b", b.url.replace("http", "https"))
        session.channel.close()
        with pytest.raises(WorkerLostError, match="nothing was heard"):
            await a.call("b", "nothing")
        a.add_peer("b", b.url)
        with pytest.raises(NotExposedError):
            await a.call("b", "nothing")


@pytest.mark.parametrize(
    ("reason", "kind", "text"),
    [
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", CertificateError, "wants one"),
        ("TLSV1_ALERT_UNKNOWN_CA", CertificateError, "refuses the certificate of this worker"),
        ("WRONG_VERSION_NUMBER", AddressError, "use http://"),
        ("TLSV1_ALERT_PROTOCOL_VERSION", AddressError, "expected TLS 1.3 on both sides"),
    ],
)
def test_what_openssl_says(reason: str, kind: type[DistributedError], text: str) -> None:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    explained = tls.explain(parse_url("https://b:1"), error)
    assert type(explained) is kind and text in str(explained)


def test_a_connection_that_breaks_is_no_fault_of_tls() -> None:
    assert tls.explain(parse_url("https://b:1"), ssl.SSLEOFError(8, "EOF occurred in violation of protocol")) is None


def test_these_errors_cross() -> None:
    for error in (CertificateError("c", is_certain=False), AddressError("a")):
        crossed = from_wire(to_wire(error, "b", "f", "id"), "b")
        assert type(crossed) is type(error) and getattr(crossed, "is_certain", False) is getattr(error, "is_certain", False)
