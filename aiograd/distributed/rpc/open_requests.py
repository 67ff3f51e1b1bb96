"""The requests that are under way on an endpoint, either way, for a report of what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

from aiograd.distributed.rpc.endpoint import Endpoint


class RequestMade(NamedTuple):
    """A request of this worker that is not answered; with the id 0 it waits for room, and has no kind and value yet."""

    caller: str
    session: bytes
    id: int
    kind: int
    value: Any
    peer: str
    principal: str
    #: of the answer, or of the room
    future: asyncio.Future[Any]
    began: float | None
    size: int
    is_sent: bool


class RequestServed(NamedTuple):
    """A request of a peer, or of this worker to itself, that is being served."""

    caller: str
    session: bytes
    id: int
    kind: int
    principal: str
    task: asyncio.Task[Any]
    began: float | None


def open_requests(endpoint: Endpoint) -> Iterator[RequestMade | RequestServed]:
    """The requests that are under way.

    Args:
        endpoint: of the worker.

    Returns:
        An iterator; nothing changes.
    """
    here = endpoint.name
    for session in endpoint.sessions():
        peer, principal, rpc_session = session.peer.name, session.peer.principal, session.rpc_session
        outbound, inbound = {each.id: each for each in rpc_session.unresolved()}, rpc_session._answers.requests
        for id, made in list(session._requests.items()):
            sent = outbound.get(id)
            began = None if sent is None else sent.deadline - made.timeout
            is_sent = sent is not None and sent.sent_at is not None
            yield RequestMade(here, session.id, id, made.kind, made.value, peer, principal, made.answer, began, made.size, is_sent)
        for size, room in list(session._room._waiting):
            yield RequestMade(here, session.id, 0, 0, None, peer, principal, room, None, size, False)
        for id, task in list(session._handlers._running.items()):
            served = inbound.get(id)
            kind, since = (0, None) if served is None else (served.kind, served.began)
            yield RequestServed(peer, session.id, id, kind, principal, task, since)
    for task, own in list(endpoint._loopback.requests.items()):
        yield RequestMade(here, b"", own.id, own.kind, own.value, here, own.principal, own.answer, own.began, 0, True)
        yield RequestServed(here, b"", own.id, own.kind, own.principal, task, own.began)
