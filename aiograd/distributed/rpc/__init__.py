"""Requests and answers between workers: from bytes on a connection to a value for a handler. Nothing here knows of gradients.

From the bottom up: `noise`, `handshake` and `cipher` make a `secure_channel` of a connection (`http` carries it, `shared` large frames between
processes of one machine); `frames`, `outbox`, `outbound` and `inbound` are a `session`, which decides and is pure of asyncio; a `peer_session`
drives it over one connection after another; a `peer` has several in its life; an `endpoint` finds peers by name.
"""
