"""Client: dials one address and turns the answer into a connection for a channel.

Nothing is followed and nothing is guessed: no redirects, no proxies from the environment, no cookies, no retries. The address was
resolved by the caller and is dialled as it is.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp

from aiograd.distributed.rpc.http.addresses import PeerAddress, bracket
from aiograd.distributed.rpc.http.admission import TOO_MANY, TOO_MANY_HERE
from aiograd.distributed.rpc.http.aiohttp_internals import take_dialled
from aiograd.distributed.rpc.http.connection import MAX_HEADERS, MAX_LINE
from aiograd.distributed.rpc.http.server import PATH, accept_key
from aiograd.distributed.rpc.http.tls import explain, unanswered
from aiograd.errors import AddressError, DistributedError, HostRefusedError, Overloaded

_UPGRADE = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}


class Opened(NamedTuple):
    """A connection on which the other side has switched to frames, and the bytes that it sent after that."""

    transport: asyncio.Transport
    received: bytes


class HttpClient:
    """Opens connections for one worker. Made inside of a running loop."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True, use_dns_cache=False),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            trust_env=False,
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            max_headers=MAX_HEADERS,
        )

    async def open(self, peer: PeerAddress, address: str, entropy: bytes, context: ssl.SSLContext | None) -> Opened:
        """Connect to `address` and ask for the channel of `peer` there. Cancelling closes the connection.

        Args:
            peer: where to go.
            address: its address.
            entropy: 16 bytes.
            context: where the URL says ``https``.

        Raises:
            ConnectionRefusedError: no process listens there.
            HostRefusedError: the worker there does not answer to this name. Overloaded: it takes no more connections.
            CertificateError: a certificate does not satisfy one side. AddressError: it speaks no TLS, or nothing else.
            OSError: it cannot be reached, or it is not a worker.
        """
        key = base64.b64encode(entropy).decode()
        response = await self._get(peer, address, PATH, {**_UPGRADE, "Sec-WebSocket-Key": key}, context)
        try:
            return self._take_over(response, peer, key)
        finally:
            response.close()

    async def read(
        self, peer: PeerAddress, address: str, path: str, headers: Mapping[str, str], context: ssl.SSLContext | None, most: int
    ) -> tuple[int, bytes]:
        """Status and the first `most` bytes of a page of `peer`. Cancelling closes the connection.

        Args:
            peer, address, context: as for `open`.
            path: of the page.
            headers: of the request, besides the host.
            most: bytes that are read.

        Raises:
            ConnectionRefusedError, HostRefusedError, Overloaded, CertificateError, AddressError, OSError: as for `open`.
        """
        response = await self._get(peer, address, path, headers, context)
        try:
            _raise_refusal(response, peer)
            text = b""
            while len(text) < most and (more := await response.content.read(most - len(text))):
                text += more
            return response.status, text
        except aiohttp.ClientError as error:
            raise ConnectionError(f"reading {path} of {peer.url}: {type(error).__name__}: {error}") from error
        finally:
            response.close()

    async def _get(
        self, peer: PeerAddress, address: str, path: str, headers: Mapping[str, str], context: ssl.SSLContext | None
    ) -> aiohttp.ClientResponse:
        scheme = "https" if peer.secure else "http"
        try:
            return await self._session.get(
                f"{scheme}://{bracket(address)}:{peer.port}{path}",
                headers={"Host": peer.authority, **headers},
                allow_redirects=False,
                read_until_eof=False,
                ssl=context or False,
                server_hostname=peer.host if peer.secure else None,
            )
        except aiohttp.ClientSSLError as error:
            raise _tls_error(peer, error) or OSError(f"connecting to {peer.url} at {address}: {error}") from error
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                raise ConnectionRefusedError(f"connecting to {peer.url} at {address}: no process listens there") from error
            raise OSError(f"connecting to {peer.url} at {address}: {error}") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if peer.secure:
                raise _tls_error(peer, error) or unanswered(peer) from error
            raise ConnectionResetError(f"connecting to {peer.url} at {address}: it hung up without an answer") from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"connecting to {peer.url} at {address}: {type(error).__name__}: {error}") from error

    def _take_over(self, response: aiohttp.ClientResponse, peer: PeerAddress, key: str) -> Opened:
        _raise_refusal(response, peer)
        status = response.status
        if status != 101:
            raise ConnectionError(f"connecting to {peer.url}: expected to switch protocols, got status {status}{_advice(status)}")
        headers = response.headers
        if headers.get("Upgrade", "").lower() != "websocket" or headers.get("Sec-WebSocket-Accept") != accept_key(key):
            raise ConnectionError(f"connecting to {peer.url}: the answer is not that of a WebSocket server")
        if "Sec-WebSocket-Extensions" in headers or "Sec-WebSocket-Protocol" in headers:
            raise ConnectionError(f"connecting to {peer.url}: the server chose an extension or protocol that was not offered")
        taken = take_dialled(response)
        if taken is None:
            raise ConnectionResetError(f"connecting to {peer.url}: the connection was closed")
        return Opened(*taken)

    async def aclose(self) -> None:
        """Close the connections that are still being opened. Idempotent."""
        await self._session.close()


def _raise_refusal(response: aiohttp.ClientResponse, peer: PeerAddress) -> None:
    """Raise the typed error of an answer that no worker gives, or with which a worker lets nothing in."""
    status = response.status
    server = response.headers.get("Server", "")
    if status not in (101, 426) and status < 500 and server != "aiograd":
        raise AddressError(
            f"connecting to {peer.url}: another HTTP server answers there{f' ({server[:40]!r})' if server else ''}, with status {status}, and no "
            f"aiograd worker{_advice(status)}; compare host and port with those that the worker listens on"
        )
    if status == 403:
        raise HostRefusedError(
            f"connecting to {peer.url}: the worker there does not answer to the name {peer.host!r} (status 403). Start it with "
            f"`aiograd worker --trusted-host {peer.host}` or Worker(trusted_hosts=[{peer.host!r}]), or use its host name or address in the URL"
        )
    if status in (TOO_MANY_HERE, TOO_MANY):
        limit = "connections_per_address" if status == TOO_MANY_HERE else "connections"
        raise Overloaded(
            f"connecting to {peer.url}: the worker there takes no more connections{' from this address' * (status == TOO_MANY_HERE)} (status "
            f"{status}). Close workers that are not needed, or raise its Limits.{limit}"
        )
    if status == 426:
        raise AddressError(f"connecting to {peer.url}: the worker there speaks TLS only; use https:// in its URL")


def _tls_error(peer: PeerAddress, error: aiohttp.ClientError) -> DistributedError | None:
    cause = error.__cause__
    return explain(peer, cause) if isinstance(cause, ssl.SSLError) else None


def _advice(status: int) -> str:
    if 300 <= status < 400:
        return "; redirects are not followed: use the URL of the worker itself"
    return ""
