"""All that aiograd needs of aiohttp beyond what aiohttp documents.

aiohttp documents requests, responses, sessions and servers. A worker needs more at two places: a connection that was accepted has timers
of its own, and a connection that has become a WebSocket leaves the library, on either side, with the bytes that came after the HTTP
head. No name with a leading underscore is used for that. `REQUIRED` lists the undocumented names that are; `refuse_unfit` checks them
when `aiograd.distributed.rpc.http` is imported, and pyproject.toml holds aiohttp to the minor releases that have them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import aiohttp
from aiohttp import web
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection

#: earlier releases have known denial-of-service holes
FLOOR = (3, 14, 1)

#: class -> its attributes that are called, overridden or assigned
REQUIRED: Mapping[type, tuple[str, ...]] = {
    web.RequestHandler: (
        "connection_made", "connection_lost", "data_received", "finish_response", "force_close", "handle_error", "peername", "shutdown", "transport",
    ),
    web.BaseRequest: ("protocol",),
    aiohttp.ClientResponse: ("connection",),
    Connection: ("protocol",),
    ResponseHandler: ("set_parser", "transport"),
}  # fmt: skip


def missing() -> Iterator[str]:
    """The names in `REQUIRED` that the installed aiohttp does not have."""
    for owner, names in REQUIRED.items():
        for name in names:
            if not hasattr(owner, name):
                yield f"{owner.__module__}.{owner.__qualname__}.{name}"


def refuse_unfit(version: str) -> None:
    """Check the installed aiohttp.

    Args:
        version: its version.

    Raises:
        ImportError: it is older than `FLOOR`, or it lacks something in `REQUIRED`.
    """
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < FLOOR[: len(numbers)]:
        floor = ".".join(map(str, FLOOR))
        raise ImportError(f"aiograd.distributed needs aiohttp {floor} or later, found {version}; earlier ones have known security holes")
    lacking = ", ".join(missing())
    if lacking:
        raise ImportError(f"aiograd.distributed needs {lacking}, which aiohttp {version} lacks; install a release that aiograd allows")


def take_dialled(response: aiohttp.ClientResponse) -> tuple[asyncio.Transport, bytes] | None:
    """Take a connection out of a session's hands once its answer was to switch protocols.

    Args:
        response: that answer, not yet closed.

    Returns:
        The connection and what arrived after the answer; None if the connection is gone.
    """
    protocol = response.connection.protocol if response.connection is not None else None
    transport = protocol.transport if protocol is not None else None
    if protocol is None or transport is None:
        return None
    collected = _Collector()
    protocol.set_parser(collected, None)
    protocol.transport = None
    return transport, bytes(collected.data)


def forget_accepted(handler: web.RequestHandler) -> None:
    """Make a server let go of a connection and leave it open; its handler sends and receives nothing from then on."""
    handler.transport = None
    web.RequestHandler.connection_lost(handler, None)


class _Collector:
    """Stands in for a WebSocket parser, to get the bytes that the library has buffered."""

    def __init__(self) -> None:
        self.data = bytearray()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self.data += data
        return False, b""

    def feed_eof(self) -> None:
        """Nothing to do."""
