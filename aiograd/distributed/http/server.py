"""Server: what a worker answers to HTTP requests, and how a request becomes a channel.

Note [What is refused]
    Browsers must not be able to talk to a worker on behalf of a page: a request with a foreign Host, with ``Origin`` or any
    ``Sec-Fetch-*`` header is refused before its path is looked at. Refusals say nothing but their status. A request is one line and a few
    headers: bodies are refused, and a connection that does not produce a whole head within `handshake_timeout` is closed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from aiograd.distributed.http.addresses import HostAllowList
from aiograd.distributed.http.admission import TOO_MANY, TOO_MANY_HERE, Ticket
from aiograd.distributed.limits import Limits

PATH = "/aiograd/v1"
HEALTH = "/health"
MAX_HEADERS = 64
MAX_LINE = 8190
#: seconds that a closed connection has for the rest of its output
LINGER = 1.0

#: what a route gets: method, path with query, headers (lower case), body; and what it returns: status, headers, body
Route: TypeAlias = Callable[[str, str, Mapping[str, str], bytes], Awaitable[tuple[int, Mapping[str, str], bytes]]]
Upgrade: TypeAlias = Callable[[asyncio.Transport, Ticket, bytes], None]

logger = logging.getLogger("aiograd.distributed.http")

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_HEADERS = {"Server": "aiograd", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_BODIES = {400: b"bad request\n", 403: b"forbidden\n", 404: b"not found\n", 405: b"method not allowed\n", 413: b"too large\n", 500: b"failed\n"}
_BODIES |= {TOO_MANY_HERE: b"too many connections from this address\n", TOO_MANY: b"too many connections\n"}


def accept_key(key: str) -> str:
    """What RFC 6455 answers to a Sec-WebSocket-Key."""
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID, usedforsecurity=False).digest()).decode()


def refusal(status: int) -> web.Response:
    response = web.Response(status=status, body=_BODIES[status], headers=_HEADERS, content_type="text/plain")
    response.force_close()
    return response


class _Upgraded(web.StreamResponse):
    """Tells the library that the request is answered; the connection is no longer its business."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class HttpServer(web.Server):
    """Answers the requests of one listening worker.

    Args:
        hosts: the names it answers to.
        limits: sizes and times.
        secure: whether its connections use TLS.
        routes: further paths, looked up at each request.
        upgrade: gets the connections that became WebSockets.
    """

    def __init__(self, hosts: HostAllowList, limits: Limits, *, secure: bool, routes: Mapping[str, Route], upgrade: Upgrade) -> None:
        super().__init__(self._answer)
        self._hosts = hosts
        self.limits = limits
        self._default_port = 443 if secure else 80
        self._routes = routes
        self._upgrade = upgrade

    def protocol(self, ticket: Ticket) -> HttpConnection:
        """The protocol of a connection that was just accepted."""
        return HttpConnection(self, ticket)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast(HttpConnection, request.protocol)
        connection.head_is_complete()
        refused = self._refuses(request)
        if refused:
            return refusal(refused)
        path = request.raw_path.partition("?")[0]
        if path == PATH:
            return self._open_channel(request, connection)
        if path == HEALTH:
            return web.Response(body=b"ok", headers=_HEADERS, content_type="text/plain")
        route = self._routes.get(path)
        if route is None:
            return refusal(404)
        headers = {name.lower(): value for name, value in request.headers.items()}
        status, answer_headers, body = await route(request.method, request.raw_path, headers, b"")
        return web.Response(status=status, body=body, headers={**_HEADERS, **answer_headers})

    def _refuses(self, request: web.BaseRequest) -> int:
        """The status with which a request is refused whatever it asks for, 0 where it is not."""
        transport = request.transport
        hosts = request.headers.getall("Host", [])
        if transport is None or len(hosts) != 1:
            return 403
        local = transport.get_extra_info("sockname") or ("", 0)
        if not self._hosts.allows(hosts[0], local[0], local[1], self._default_port):
            logger.debug("refused a request from %s for the host %.100r: not a name of this worker", request.remote, hosts[0])
            return 403
        if "Origin" in request.headers or any(name.lower().startswith("sec-fetch-") for name in request.headers):
            return 403
        if request.method != "GET":
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
        refused = connection.ticket.refusal()
        if refused:
            return refusal(refused)
        transport, received = connection.detach()
        ticket = connection.ticket
        if transport is None:
            return _Upgraded()
        transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nServer: aiograd\r\n"
            b"Sec-WebSocket-Accept: " + accept_key(key).encode() + b"\r\n\r\n"
        )
        self._upgrade(transport, ticket, received)
        return _Upgraded()


class HttpConnection(web.RequestHandler):
    """One connection that has not become a channel: the library's protocol with timers on what it waits for."""

    __slots__ = ("ticket", "_timer", "_limits", "_early", "_raw")

    def __init__(self, server: HttpServer, ticket: Ticket) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=server.limits.keepalive_timeout,
            logger=logger,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            max_headers=MAX_HEADERS,
            lingering_time=0.0,
            auto_decompress=False,
        )
        self._limits = server.limits
        self.ticket = ticket
        self._timer: asyncio.TimerHandle | None = None
        self._early = False
        self._raw: asyncio.Transport | None = None  # `transport` is None from the moment the library closes it, which may be long before it is

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        super().connection_made(transport)
        self._expect(self._limits.handshake_timeout)
        self.ticket.held_by(self.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        answering = self._task_handler
        self.ticket.release()
        super().connection_lost(exc)
        self._raw = None
        self._expect(None)
        if answering is not None:
            answering.cancel()  # nobody is left to read the answer

    def force_close(self) -> None:
        """Close; a peer that does not read its answer does not keep the connection."""
        if self.transport is not None:
            self._expect(LINGER)
        super().force_close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """End for good, see the library."""
        await super().shutdown(timeout)
        self.abort()

    def data_received(self, data: bytes) -> None:
        if self._current_request is not None or self._messages:
            self._early = True
            if not self._upgraded:
                return  # the connection ends with the answer to what came before; what follows is not kept, however much it is
        elif self._timer is None:
            self._expect(self._limits.handshake_timeout)
        try:
            super().data_received(data)
        except Exception:
            # What the parser did not foresee is the sender's fault all the same.
            logger.debug("a request from %s could not be parsed", self.peername, exc_info=True)
            self.abort()

    def head_is_complete(self) -> None:
        """A request is being answered; making and reading the answer has a time limit as well."""
        self._expect(self._limits.unread_seconds)

    async def finish_response(self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None) -> tuple[web.StreamResponse, bool]:
        """Send the answer. A connection that already sent more than its request is not kept."""
        if self._early or self._messages:
            resp.force_close()
        result = await super().finish_response(request, resp, start_time)
        if resp.keep_alive:
            self._expect(None)  # otherwise the limit also holds for the rest of the answer
        return result

    def detach(self) -> tuple[asyncio.Transport | None, bytes]:
        """Take the connection out of the library's hands; returns it (None if it is closed) and what arrived after the request."""
        if self.transport is None:
            return None, b""
        collected = Collector()
        self.set_parser(collected)  # type: ignore[arg-type]
        transport, self.transport = self.transport, None
        super().connection_lost(None)
        self._raw = None
        self._expect(None)
        return transport, bytes(collected.data)

    def abort(self) -> None:
        """Close at once, with whatever is still to be sent."""
        if self._raw is not None:
            self._raw.abort()

    def _expect(self, seconds: float | None) -> None:
        """Abort the connection unless the next thing happens within `seconds`."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self.abort)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what could not be parsed, or what a route raised."""
        if status >= 500:
            logger.error("answering a request from %s failed", request.remote, exc_info=exc)
        return refusal(400 if status < 500 else 500)


class Collector:
    """Stands in for a WebSocket parser, to get at what the library has buffered."""

    def __init__(self) -> None:
        self.data = bytearray()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self.data += data
        return False, b""

    def feed_eof(self) -> None:
        """Nothing to do."""


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
