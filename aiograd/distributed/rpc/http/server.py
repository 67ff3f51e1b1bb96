"""Server: a worker's answers to HTTP requests, and the way from a request to a channel.

Note [Refusals]
    Browsers must not be able to talk to a worker on behalf of a page: a request with a foreign Host, with ``Origin`` or any
    ``Sec-Fetch-*`` header is refused; only the routes of a dashboard have rules of their own, see `pages`. Refusals say nothing but their status. A
    request is one line and a few headers: bodies are refused, and a connection that does not produce a whole head within `handshake_timeout` is
    closed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from aiohttp import web

from aiograd.distributed.rpc.http.addresses import HostAllowList, is_loopback
from aiograd.distributed.rpc.http.admission import ConnectionPermit
from aiograd.distributed.rpc.http.connection import HttpConnection
from aiograd.distributed.rpc.http.pages import Site, refuses_browser, respond
from aiograd.distributed.rpc.http.pulse import PULSE, answer_pulse
from aiograd.distributed.rpc.http.responses import Upgraded, healthy, refusal
from aiograd.distributed.rpc.limits import Limits
from aiograd.running.log_fields import structured_logger

PATH = "/aiograd/v1"
HEALTH = "/health"

Upgrade: TypeAlias = Callable[[asyncio.Transport, ConnectionPermit, bytes], None]

logger = structured_logger("aiograd.distributed.rpc.http")

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def accept_key(key: str) -> str:
    """The answer of RFC 6455 to a Sec-WebSocket-Key."""
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID, usedforsecurity=False).digest()).decode()


class HttpServer:
    """Answers the requests of one listening worker.

    Args:
        hosts: the names it answers to.
        limits: sizes and times.
        secure: True if its connections use TLS.
        upgrade: gets the connections that became WebSockets.
        site: the pages for browsers and Prometheus.
    """

    def __init__(self, hosts: HostAllowList, limits: Limits, *, secure: bool, upgrade: Upgrade, site: Site | None = None) -> None:
        self._library = web.Server(self._answer)
        self._hosts = hosts
        self._limits = limits
        self._default_port = 443 if secure else 80
        self._upgrade = upgrade
        self._site = site or Site()

    def protocol(self, permit: ConnectionPermit) -> HttpConnection:
        """The protocol of a connection that was just accepted."""
        return HttpConnection(self._library, self._limits, permit)

    async def shutdown(self, timeout: float) -> None:
        """End the connections that have not become channels. Cancelling it leaves connections that close by themselves.

        Args:
            timeout: seconds for answers that are being sent.
        """
        await self._library.shutdown(timeout)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast(HttpConnection, request.protocol)
        connection.head_is_complete()
        path = request.raw_path.partition("?")[0]
        refused = self._refuses(request, path)
        if refused:
            return refusal(refused)
        if path == PATH:
            return self._open_channel(request, connection)
        if path == HEALTH:
            return healthy()
        if path == PULSE:
            return answer_pulse(self._site.take_pulse, request)
        pages = self._site.pages_of(path)
        if pages is not None:
            port = request.transport.get_extra_info("sockname")[1] if request.transport is not None else 0
            return respond(pages, request, path, is_loopback=is_loopback(request.remote or ""), secure=self._default_port == 443, port=port)
        return refusal(404)

    def _refuses(self, request: web.BaseRequest, path: str) -> int:
        """The status of the refusal of a request, for any path; 0 if the request is not refused."""
        transport = request.transport
        hosts = request.headers.getall("Host", [])
        if transport is None or len(hosts) != 1:
            return 403
        local = transport.get_extra_info("sockname") or ("", 0)
        if not self._hosts.allows(hosts[0], local[0], local[1], self._default_port):
            logger.debug("refused a request from %s for the host %.100r: not a name of this worker", request.remote, hosts[0])
            return 403
        if self._site.dashboard is not None and self._site.pages_of(path) is self._site.dashboard:
            if refuses_browser(request, path, secure=self._default_port == 443):
                return 403
        elif "Origin" in request.headers or any(name.lower().startswith("sec-fetch-") for name in request.headers):
            return 403
        if request.method != ("POST" if path == PULSE else "GET"):
            return 405
        if request.body_exists:
            return 413
        return 0

    def _open_channel(self, request: web.BaseRequest, connection: HttpConnection) -> web.StreamResponse:
        headers = request.headers
        key = headers.get("Sec-WebSocket-Key", "")
        if (
            headers.get("Upgrade", "").strip().lower() != "websocket"
            or "upgrade" not in (token.strip().lower() for token in headers.get("Connection", "").split(","))
            or headers.get("Sec-WebSocket-Version") != "13"
            or not _is_key(key)
        ):
            return refusal(400)
        refused = connection.permit.refusal()
        if refused:
            return refusal(refused)
        transport, received = connection.detach()
        permit = connection.permit
        if transport is None:
            return Upgraded()
        transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nServer: aiograd\r\n"
            b"Sec-WebSocket-Accept: " + accept_key(key).encode() + b"\r\n\r\n"
        )
        self._upgrade(transport, permit, received)
        return Upgraded()


def _is_key(key: str) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        return False


def certified_names(transport: asyncio.Transport) -> frozenset[str] | None:
    """The subject alternative names in the certificate that the peer showed and that was verified; None without one."""
    certificate: Mapping[str, Any] | None = transport.get_extra_info("peercert")
    if not certificate:
        return None
    return frozenset(value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI", "IP Address"))
