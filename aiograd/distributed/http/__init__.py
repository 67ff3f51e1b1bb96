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

from aiograd.distributed.http.channel import WebSocketChannel
from aiograd.distributed.http.server import Route
from aiograd.distributed.http.transport import HttpTransport

__all__ = ["HttpTransport", "Route", "WebSocketChannel"]
