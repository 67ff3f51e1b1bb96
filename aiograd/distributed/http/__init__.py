"""Workers over HTTP: the only part of aiograd that knows the HTTP library.

=============  ==================================================================
`transport`    `HttpTransport`: listening, dialling, closing
`server`       requests: what is answered, refused, and turned into a channel
`client`       one dialled connection
`channel`      frames over a connection that has become a WebSocket
`framing`      the bytes around a frame
`addresses`    URLs of peers, and names of this worker
`admission`    how many connections are let in
=============  ==================================================================
"""

from __future__ import annotations

import aiohttp

from aiograd.distributed.http.channel import WebSocketChannel
from aiograd.distributed.http.server import Route
from aiograd.distributed.http.transport import HttpTransport

__all__ = ["HttpTransport", "Route", "WebSocketChannel"]


#: earlier releases have known denial-of-service holes
AIOHTTP_FLOOR = (3, 14, 1)


def _refuse_old(version: str) -> None:
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < AIOHTTP_FLOOR[: len(numbers)]:
        floor = ".".join(map(str, AIOHTTP_FLOOR))
        raise ImportError(f"aiograd.distributed needs aiohttp {floor} or later, found {version}; earlier ones have known security holes")


_refuse_old(aiohttp.__version__)
