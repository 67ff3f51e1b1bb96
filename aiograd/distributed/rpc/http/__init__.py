"""Workers over HTTP: the only part of aiograd that knows the HTTP library.

===================  ==================================================================
`transport`          `HttpTransport`: listening, dialling, closing
`server`             requests: which are answered, refused, or turned into a channel
`connection`         one accepted connection, before it is a channel
`responses`          the answers
`pages`              the rules for the pages of a dashboard, and for metrics
`client`             one dialled connection
`channel`            frames over a connection that has become a WebSocket
`framing`            the bytes around a frame
`addresses`          URLs of peers, and names of this worker
`pulse`              what a worker tells while its loop is held up
`naming`             the name of a worker, for callers that hold its key
`admission`          how many connections are let in
`tls`                contexts, and what is said when TLS fails
`aiohttp_internals`  what is needed of the HTTP library beyond what it documents
===================  ==================================================================
"""

from __future__ import annotations

import aiohttp

from aiograd.distributed.rpc.http.aiohttp_internals import refuse_unfit
from aiograd.distributed.rpc.http.channel import WebSocketChannel
from aiograd.distributed.rpc.http.transport import HttpTransport

__all__ = ["HttpTransport", "WebSocketChannel"]

refuse_unfit(aiohttp.__version__)
