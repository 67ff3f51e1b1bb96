"""The answers of a worker to HTTP requests: that it is healthy, refusals, and the end of an upgrade."""

from __future__ import annotations

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from aiograd.distributed.rpc.http.admission import TOO_MANY, TOO_MANY_HERE

_HEADERS = {"Server": "aiograd", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_BODIES = {400: b"bad request\n", 403: b"forbidden\n", 404: b"not found\n", 405: b"method not allowed\n", 413: b"too large\n", 500: b"failed\n"}
_BODIES |= {TOO_MANY_HERE: b"too many connections from this address\n", TOO_MANY: b"too many connections\n"}


def healthy() -> web.Response:
    """The worker runs."""
    return web.Response(body=b"ok", headers=_HEADERS, content_type="text/plain")


def taken() -> web.Response:
    """A pulse was taken."""
    response = web.Response(status=204, headers=_HEADERS)
    response.force_close()
    return response


def refusal(status: int) -> web.Response:
    """Says `status` and no more, and ends the connection."""
    response = web.Response(status=status, body=_BODIES[status], headers=_HEADERS, content_type="text/plain")
    response.force_close()
    return response


class Upgraded(web.StreamResponse):
    """Tells the library that the request is answered; the connection is no longer its business."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None
