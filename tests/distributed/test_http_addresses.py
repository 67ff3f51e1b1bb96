"""Which URLs are dialled, which addresses a name may stand for, and which names a worker answers to."""

from __future__ import annotations

import socket

import pytest

from aiograd.distributed.rpc.http.addresses import HostAllowList, PeerAddress, allowed_addresses, is_loopback, parse_url, resolve
from aiograd.errors import ArgumentError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", PeerAddress(False, "127.0.0.1", 8000)),
        ("https://Worker-1.example.org:443/", PeerAddress(True, "worker-1.example.org", 443)),
        ("http://[::1]:9", PeerAddress(False, "::1", 9)),
        ("https://host_2", PeerAddress(True, "host_2", 443)),
    ],
)
def test_urls_of_peers(url: str, expected: PeerAddress) -> None:
    assert parse_url(url) == expected
    assert parse_url(expected.url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "", "127.0.0.1:8000", "ftp://a:1", "ws://a:1", "file:///etc/passwd", "http://", "http://:80", "http://a:0", "http://a:65536", "http://a:x",
        "http://a:1/path", "http://a:1/aiograd/v1", "http://a:1?x=1", "http://a:1#f", "http://a:1?", "http://a b:1", "http://a\n:1", "http://a\t:1",
        "http://ä:1", "http://a%2eb:1", "http://[::1%25eth0]:1", "http://[::g]:1", "http://[::1", "http://a\\b:1", "http://a,b:1", " http://a:1", 5,
        None,
    ],
)  # fmt: skip
def test_anything_else_is_no_url_of_a_peer(url: str) -> None:
    with pytest.raises(ArgumentError, match="http://host:port"):
        parse_url(url)


def test_a_secret_in_a_url_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ArgumentError, match="keyring") as caught:
        parse_url("http://me:hunter2@example.org:80")
    assert "hunter2" not in str(caught.value)


SENSITIVE = [
    "169.254.169.254", "169.254.0.1", "fe80::1", "fe80::1%eth0", "::ffff:169.254.169.254", "2002:a9fe:a9fe::1", "64:ff9b::a9fe:a9fe", "0.0.0.0", "::",  # noqa: S104 - addresses that are refused
    "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("address", SENSITIVE)
def test_a_name_does_not_lead_to_link_local_or_metadata_addresses(address: str) -> None:
    peer = PeerAddress(False, "innocent.example.org", 80)
    with pytest.raises(PermissionError, match="write the address into the URL"):
        allowed_addresses(peer, [address])
    assert allowed_addresses(peer, [address, "10.0.0.1", "10.0.0.1", "2001:db8::5"]) == ["10.0.0.1", "2001:db8::5"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.1.2.3", "192.168.1.1", "8.8.8.8", "2606:4700::1111", "fd12::1"])
def test_a_name_leads_to_ordinary_addresses(address: str) -> None:
    assert allowed_addresses(PeerAddress(False, "name", 80), [address]) == [address]


async def test_an_address_in_the_url_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: pytest.fail("nothing to resolve"))
    assert await resolve(parse_url("http://169.254.169.254:80")) == ["169.254.169.254"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::", "10.0.0.1", ""])  # noqa: S104 - not bound to
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


HOSTS = [
    ("127.0.0.1:7000", True), ("localhost:7000", True), ("LOCALHOST:7000", True), (f"{socket.gethostname()}:7000", True), ("10.0.0.5:7000", True),
    ("good.example.org", True), ("good.example.org:1", True), ("exact.example.org:8443", True), ("exact.example.org:7000", False),
    ("127.0.0.1", False), ("127.0.0.1:7001", False), ("localhost", False), ("10.0.0.6:7000", False), ("evil.example.org:7000", False),
    ("good.example.org.evil.org:7000", False), ("evil.org/good.example.org:7000", False), ("good.example.org:7000@evil", False), ("", False),
    (":7000", False), ("127.0.0.1:7000:7000", False), ("127.0.0.1:", False), ("[127.0.0.1]:7000x", False), ("::1:7000", False),
    ("good.example.org ", False),
]  # fmt: skip


@pytest.mark.parametrize(("header", "allowed"), HOSTS)
def test_names_that_a_worker_answers_to(header: str, allowed: bool) -> None:
    hosts = HostAllowList("127.0.0.1", 7000, ("Good.example.org", "exact.example.org:8443"))
    assert hosts.allows(header, "10.0.0.5", 7000, 80) is allowed


def test_a_header_without_port_means_the_default_port() -> None:
    hosts = HostAllowList("name", 443, ())
    assert hosts.allows("name", "10.0.0.5", 443, 443) and not hosts.allows("name", "10.0.0.5", 443, 80)
    assert HostAllowList("::1", 7000, ()).allows("[::1]:7000", "::1", 7000, 80)


def test_nonsense_among_trusted_hosts() -> None:
    with pytest.raises(ArgumentError, match="trusted_hosts"):
        HostAllowList("name", 443, ("http://name",))
