"""Addresses: which URLs are dialled, which addresses a name may stand for, and under which names this worker answers.

Peers come from the configuration, never from a frame; even so a name in it is resolved by a foreign server. Nothing here does IO but
`resolve`.

Note [Names that turn into other addresses]
    A name is resolved once per connection and the connection goes to that very address, so that a second answer of the name server has
    no effect. A name that resolves to a link-local address or to a cloud's metadata service is refused: such addresses are reached only by writing
    the address itself into the URL. The other way round, a web page with a name that resolves to this machine could make a browser talk to a worker;
    such requests carry the page's name in ``Host``, and only this worker's own names are answered.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from aiograd.errors import AddressError, ArgumentError

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
DEFAULT_PORTS = {"http": 80, "https": 443}

_HOST = re.compile(r"[0-9A-Za-z._:-]{1,253}\Z")
_HOST_HEADER = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]{2,45}\]|[0-9A-Za-z._-]{1,253})(?::(?P<port>[0-9]{1,5}))?\Z")

#: services of clouds that hand out credentials, and do not live in a link-local network
_METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192")))
#: errors of a look-up that say that the name does not exist; the others may pass
_NO_SUCH_NAME = [getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY") if hasattr(socket, name)]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class PeerAddress(NamedTuple):
    """A parsed URL of a peer."""

    secure: bool
    #: lower case, without brackets
    host: str
    port: int

    @property
    def literal(self) -> IPAddress | None:
        """The host as an address, None where it is a name."""
        return parse_ip(self.host)

    @property
    def authority(self) -> str:
        """``host:port``, as it stands in a URL and in the Host header."""
        return f"{bracket(self.host)}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.authority}"


def parse_url(url: str) -> PeerAddress:
    """Parse ``http://host:port`` or ``https://host:port``; nothing else is a peer's URL.

    Raises:
        ArgumentError: anything else: another scheme, a path, a user, a query.
    """
    advice = "expected http://host:port or https://host:port"
    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url:
        raise ArgumentError(f"peer URL {url!r}: {advice}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ArgumentError(f"peer URL {url!r}: {error}; {advice}") from None
    if parts.username is not None or parts.password is not None:
        raise ArgumentError(f"a peer URL for {parts.hostname!r} holds a user name; secrets belong in the keyring, not in URLs; {advice}")
    if parts.scheme not in DEFAULT_PORTS or parts.path not in ("", "/") or parts.query or parts.fragment or "?" in url or "#" in url:
        raise ArgumentError(f"peer URL {url!r}: {advice}")
    host = parts.hostname or ""
    if not _HOST.match(host) or port == 0 or (":" in host and parse_ip(host) is None):
        raise ArgumentError(f"peer URL {url!r}: no usable host and port; {advice}")
    return PeerAddress(parts.scheme == "https", host, port or DEFAULT_PORTS[parts.scheme])


def parse_ip(text: str) -> IPAddress | None:
    """The address that `text` spells, None for anything else."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def bracket(host: str) -> str:
    """`host` as it is written in URLs: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """True if `host` is an address of this machine only (a name is not taken at its word)."""
    address = parse_ip(host)
    return address is not None and _embedded(address).is_loopback


def is_sensitive(address: IPAddress) -> bool:
    """True if only a URL that spells out this address may lead to it: link-local, metadata services, multicast and no address at all."""
    address = _embedded(address)
    is_reserved = address.version == 4 and address.is_reserved  # for IPv6 that would include ::1
    return address.is_link_local or address.is_multicast or address.is_unspecified or is_reserved or address in _METADATA


def _embedded(address: IPAddress) -> IPAddress:
    """The IPv4 address inside of an IPv6 one, for the ways in which one is written inside of the other."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def allowed_addresses(peer: PeerAddress, resolved: Iterable[str]) -> list[str]:
    """The addresses of a resolved name that may be dialled, in order and without repetition.

    Raises:
        PermissionError: all of them are out of bounds.
    """
    found = list(dict.fromkeys(resolved))
    kept = [text for text in found if (address := parse_ip(text.partition("%")[0])) is not None and not is_sensitive(address)]
    if not kept:
        raise PermissionError(
            f"connecting to {peer.url}: the name resolves to {', '.join(found) or 'nothing'}, which is link-local or a metadata service; "
            "if that is meant, write the address into the URL"
        )
    return kept


async def resolve(peer: PeerAddress) -> list[str]:
    """The addresses to dial for `peer`. Cancelling abandons the look-up.

    Raises:
        AddressError: there is no such name. OSError: it cannot be looked up now.
        PermissionError: see `allowed_addresses`.
    """
    if peer.literal is not None:
        return [peer.host]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        if isinstance(error, socket.gaierror) and error.errno not in _NO_SUCH_NAME:
            raise
        raise AddressError(f"connecting to {peer.url}: there is no host {peer.host!r} ({error}); correct the URL, or the name service") from error
    return allowed_addresses(peer, (str(entry[4][0]) for entry in found))


class HostAllowList:
    """The values of the Host header that a worker answers to.

    Args:
        host: the host it listens on, as given by the user.
        port: the port it listens on.
        trusted: further names, each ``name`` (with any port) or ``name:port``.

    Raises:
        ArgumentError: an entry of `trusted` is neither.
    """

    __slots__ = ("_any_port", "_exact", "_port")

    def __init__(self, host: str, port: int, trusted: Collection[str]) -> None:
        self._port = port
        self._any_port: set[str] = set()
        names = {host.lower(), socket.gethostname().lower()}
        if is_loopback(host):
            names.add("localhost")
        self._exact = {(name, port) for name in names}
        for entry in trusted:
            name, its_port = split_host(entry)
            if not name:
                raise ArgumentError(f"trusted_hosts holds {entry!r}: expected a host name or name:port")
            if its_port is None:
                self._any_port.add(name)
            else:
                self._exact.add((name, its_port))

    def allows(self, header: str, local_host: str, local_port: int, default_port: int) -> bool:
        """True if `header` names this worker.

        Args:
            header: the value of the Host header.
            local_host: the address at which this connection arrived: a page can forge a name, not the address it was loaded from.
            local_port: the port at which it arrived.
            default_port: the port of a header without one.
        """
        name, port = split_host(header)
        if not name:
            return False
        port = default_port if port is None else port
        return (name, port) in self._exact or name in self._any_port or (port == local_port and name == local_host.partition("%")[0].lower())


def split_host(header: str) -> tuple[str, int | None]:
    """Name (lower case, without brackets) and port of a Host header; an empty name where it is malformed."""
    match = _HOST_HEADER.match(header)
    if match is None:
        return "", None
    port = match["port"]
    return match["name"].strip("[]").lower(), None if port is None else int(port)
