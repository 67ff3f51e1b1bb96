"""Client: dials one address and turns the answer into a connection for a channel.

Nothing is followed and nothing is guessed: no redirects, no proxies from the environment, no cookies, no retries. The address was
resolved by the caller and is dialled as it is.
"""

from __future__ import annotations

import asyncio
import base64
import ssl as tls
from typing import NamedTuple

import aiohttp

from aiograd.distributed.http.addresses import PeerAddress, bracket
from aiograd.distributed.http.server import MAX_HEADERS, MAX_LINE, PATH, Collector, accept_key
from aiograd.errors import HostRefusedError

_UPGRADE = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}


class Opened(NamedTuple):
    """A connection on which the other side has switched to frames, and what it sent after that."""

    transport: asyncio.Transport
    received: bytes


class HttpClient:
    """Opens connections for one worker. Made inside of a running loop.

    Args:
        context: for peers whose URL says ``https``.
    """

    def __init__(self, context: tls.SSLContext) -> None:
        self._context = context
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

    async def open(self, peer: PeerAddress, address: str, entropy: bytes) -> Opened:
        """Connect to `address` and ask for the channel of `peer` there. Cancelling closes what was opened.

        Args:
            peer: where to go.
            address: its address.
            entropy: 16 bytes.

        Raises:
            ConnectionRefusedError: nobody listens there.
            HostRefusedError: the worker there does not answer to this name.
            OSError: it cannot be reached, or it is not a worker.
        """
        key = base64.b64encode(entropy).decode()
        scheme = "https" if peer.secure else "http"
        try:
            response = await self._session.get(
                f"{scheme}://{bracket(address)}:{peer.port}{PATH}",
                headers={"Host": peer.authority, **_UPGRADE, "Sec-WebSocket-Key": key},
                allow_redirects=False,
                read_until_eof=False,
                ssl=self._context if peer.secure else False,
                server_hostname=peer.host if peer.secure else None,
            )
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                raise ConnectionRefusedError(f"connecting to {peer.url} at {address}: nobody listens there") from error
            raise OSError(f"connecting to {peer.url} at {address}: {error}") from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"connecting to {peer.url} at {address}: {type(error).__name__}: {error}") from error
        try:
            return self._take_over(response, peer, key)
        finally:
            response.close()

    def _take_over(self, response: aiohttp.ClientResponse, peer: PeerAddress, key: str) -> Opened:
        status = response.status
        if status == 403:
            raise HostRefusedError(
                f"connecting to {peer.url}: the worker there does not answer to the name {peer.host!r} (status 403). Start it with "
                f"`aiograd worker --trusted-host {peer.host}` or Worker(trusted_hosts=[{peer.host!r}]), or use its host name or address in the URL"
            )
        if status != 101:
            raise ConnectionError(f"connecting to {peer.url}: expected to switch protocols, got status {status}{_advice(status)}")
        headers = response.headers
        if headers.get("Upgrade", "").lower() != "websocket" or headers.get("Sec-WebSocket-Accept") != accept_key(key):
            raise ConnectionError(f"connecting to {peer.url}: the answer is not that of a WebSocket server")
        if "Sec-WebSocket-Extensions" in headers or "Sec-WebSocket-Protocol" in headers:
            raise ConnectionError(f"connecting to {peer.url}: the server chose an extension or protocol that was not offered")
        connection = response.connection
        protocol = connection.protocol if connection is not None else None
        transport = protocol.transport if protocol is not None else None
        if protocol is None or transport is None:
            raise ConnectionResetError(f"connecting to {peer.url}: the connection was closed")
        collected = Collector()
        protocol.set_parser(collected, None)
        protocol.transport = None  # the library forgets the connection without closing it
        return Opened(transport, bytes(collected.data))

    async def aclose(self) -> None:
        """Close the connections that are still being opened. Idempotent."""
        await self._session.close()


def _advice(status: int) -> str:
    if 300 <= status < 400:
        return "; redirects are not followed: use the URL of the worker itself"
    return ""
