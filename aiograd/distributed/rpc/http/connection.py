"""HttpConnection: an accepted connection that has not become a channel.

Note [One head at a time]
    The library gets the bytes of one request head, up to the empty line, and no byte more until its answer is sent: a request has no
    body, so what follows is either the start of the next request or, after an upgrade, no HTTP. Meanwhile reading is paused. So
    nothing collects in the library, however much a peer sends, and an upgraded connection leaves with the bytes that came too early.
    A connection that sent more than its request before the answer is not kept. Of a head above `MAX_HEAD` the library gets that much,
    enough to refuse it for a line that is too long or too many lines; a head that is neither is hung up on in time.
"""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import web

from aiograd.distributed.rpc.http.admission import ConnectionPermit
from aiograd.distributed.rpc.http.aiohttp_internals import forget_accepted
from aiograd.distributed.rpc.http.channel import RECEIVE
from aiograd.distributed.rpc.http.responses import refusal
from aiograd.distributed.rpc.limits import Limits
from aiograd.running.log_fields import structured_logger

MAX_HEADERS = 64
MAX_LINE = 8190
#: bytes of a head; of a longer one nothing more is read
MAX_HEAD = 64 << 10
#: seconds that a closed connection has for the rest of its output
LINGER = 1.0

logger = structured_logger("aiograd.distributed.rpc.http")

_END = b"\r\n\r\n"


class HttpConnection(web.RequestHandler):
    """The library's protocol for one connection, with time limits on its waits.

    Args:
        library: the aiohttp server that answers requests.
        limits: sizes and times.
        permit: of the connection.
    """

    __slots__ = ("permit", "_limits", "_timer", "_accepted", "_head_bytes", "_head_end", "_is_asked", "_rest")

    def __init__(self, library: web.Server, limits: Limits, permit: ConnectionPermit) -> None:
        super().__init__(
            library,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.keepalive_timeout,
            logger=logger.logger,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            max_headers=MAX_HEADERS,
            lingering_time=0.0,
            auto_decompress=False,
        )
        self.permit = permit
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        #: `transport` is None from the moment the library closes it, which may be long before it is
        self._accepted: asyncio.Transport | None = None
        #: the size of an incomplete head and its last bytes, then whether it is complete and what came after it
        self._head_bytes = 0
        self._head_end = b""
        self._is_asked = False
        self._rest = b""

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._accepted = cast(asyncio.Transport, transport)
        super().connection_made(transport)
        self._expect(self._limits.handshake_timeout)
        self.permit.held_by(self.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.permit.release()
        super().connection_lost(exc)
        self._accepted = None
        self._expect(None)

    def data_received(self, data: bytes) -> None:
        if self._is_asked:
            self._rest += data[: RECEIVE + 1 - len(self._rest)]  # more than `RECEIVE` is refused, so the rest need not be kept
            return
        if self._timer is None:
            self._expect(self._limits.handshake_timeout)
        room = MAX_HEAD - self._head_bytes
        seen = self._head_end + data[:room]
        end = seen.find(_END)
        end = room if end < 0 else end + len(_END) - len(self._head_end)
        if end > len(data):
            self._head_end = seen[1 - len(_END) :]
            self._head_bytes += len(data)
        else:
            data, self._rest = data[:end], data[end:]
            self._is_asked = True
            if self._accepted is not None:
                self._accepted.pause_reading()
        try:
            super().data_received(data)
        except Exception:
            # An error that the parser did not foresee is the sender's fault all the same.
            logger.debug("a request from %s could not be parsed", self.peername, exc_info=True)
            self.abort()

    def force_close(self) -> None:
        """Close; a peer that does not read its answer does not keep the connection."""
        if self.transport is not None:
            self._expect(LINGER)
        super().force_close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """End for good, see the library."""
        await super().shutdown(timeout)
        self.abort()

    def abort(self) -> None:
        """Close at once, and drop unsent bytes."""
        if self._accepted is not None:
            self._accepted.abort()

    def forget(self) -> None:
        """The loop was stopped handing the connection over, and has closed it, of which uvloop does not tell. Nothing is written any more."""
        if self._accepted is not None:
            self.force_close()
            asyncio.get_running_loop().call_soon(self.connection_lost, None)  # the library expects it after its task has begun

    def detach(self) -> tuple[asyncio.Transport | None, bytes]:
        """Take the connection out of the library's hands; returns it, None if it is closed or closing, and the bytes after the request."""
        transport = self._accepted
        if self.transport is None or transport is None or transport.is_closing():
            return None, b""
        self._accepted = None
        forget_accepted(self)
        self._expect(None)
        return transport, self._rest

    # ---- requests

    def head_is_complete(self) -> None:
        """A request is being answered; making and reading the answer has a time limit as well."""
        self._expect(self._limits.unread_seconds)

    async def finish_response(self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None) -> tuple[web.StreamResponse, bool]:
        """Send the answer. A connection that already sent more than its request is not kept."""
        if self._rest:
            resp.force_close()
        result = await super().finish_response(request, resp, start_time)
        if resp.keep_alive:  # otherwise the limit also holds for the rest of the answer
            self._expect(None)
            self._head_bytes, self._head_end, self._is_asked = 0, b"", False
            if self._accepted is not None and not self._accepted.is_closing():
                self._accepted.resume_reading()
        return result

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what could not be parsed, or what failed here."""
        if status >= 500:
            logger.error("answering a request from %s failed", request.remote, exc_info=exc)
        return refusal(400 if status < 500 else 500)

    def _expect(self, seconds: float | None) -> None:
        """Abort the connection unless the next thing happens within `seconds`."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.abort)
