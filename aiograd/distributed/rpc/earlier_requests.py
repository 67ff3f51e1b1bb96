"""EarlierRequests: the requests of sessions that have ended, until it is known which of them the peer has run.

Note [Requests that move to the next session]
    A worker that dials a peer which has given up the session gets another one. Requests that were not sent move to it at once. For requests that
    were sent, the peer must report if it ran them: it remembers the last delivered request of ended sessions (`SessionEnded`), for as long as
    a request can wait for an answer. Later ones were not delivered and will not be, since the session has ended; they are sent again under new
    numbers. The others are lost, and so are all if the peer does not remember the session. The one exception is a session in which this side never
    got a frame and which the peer does not know: its handshake was not completed there, so the peer has run nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from aiograd.distributed.rpc.effects import NOT_KNOWN
from aiograd.distributed.rpc.outbound import OutboundRequest
from aiograd.distributed.rpc.timers import call_at
from aiograd.errors import DistributedError


class NextSession(Protocol):
    """The session to which requests move."""

    def take_over(self, request: PendingRequest) -> None:
        """A request is this session's from now on, although it has not been sent in it."""

    def repeat(self, request: PendingRequest, outbound: OutboundRequest, now: float) -> None:
        """Send a request that has been taken over."""

    def lost_for(self, request: PendingRequest, loss: Callable[[int], DistributedError]) -> None:
        """Fail a request that has been taken over and ends without an answer."""

    def late_for(self, request: PendingRequest) -> DistributedError:
        """The error for a request that is past its deadline."""

    def give_up(self, request: PendingRequest) -> None:
        """Cancel a request that its caller has abandoned."""

    def settled(self, now: float) -> None:
        """Requests may have been repeated."""


class PendingRequest:
    """A request that waits for its answer. It may move to the next session, see Note [Requests that move to the next session]."""

    __slots__ = ("session", "id", "answer", "kind", "size", "timeout", "value")

    def __init__(
        self, session: NextSession, id: int, answer: asyncio.Future[Any], kind: int, size: int, timeout: float, value: Any = None
    ) -> None:
        self.session: NextSession = session
        self.id: int = id
        self.answer: asyncio.Future[Any] = answer
        self.kind: int = kind
        self.size: int = size
        self.timeout: float = timeout
        self.value: Any = value

    def fail(self, loss: Callable[[int], DistributedError]) -> None:
        """End it with the error that `loss` makes for its kind."""
        if not self.answer.done():
            self.answer.set_exception(loss(self.kind))


@dataclass(slots=True)
class _Ended:
    """Requests of a session that has ended, for which the peer has not reported yet if it ran them."""

    requests: dict[PendingRequest, OutboundRequest]
    #: makes the error for a request that is lost
    loss: Callable[[int], DistributedError]
    #: True if none of the requests was run in case the peer does not know the session
    is_unconfirmed: bool
    #: time at which the peer's time to report ends, in seconds
    until: float
    timer: asyncio.TimerHandle | None = None


class EarlierRequests:
    """The requests of sessions before one session that are not settled.

    Args:
        session: that one.
        loop, context: for timers.
        silence: seconds that the peer has to report.
    """

    __slots__ = ("predecessor", "_session", "_loop", "_context", "_silence", "_ended")

    def __init__(self, session: NextSession, loop: asyncio.AbstractEventLoop, context: contextvars.Context, silence: float) -> None:
        #: id of the session just before
        self.predecessor = b""
        self._session = session
        self._loop = loop
        self._context = context
        self._silence = silence
        #: by id of the session
        self._ended: dict[bytes, _Ended] = {}

    def __bool__(self) -> bool:
        return bool(self._ended)

    def drop(self, request: PendingRequest) -> bool:
        """Forget a request; returns whether it was here."""
        return any(ended.requests.pop(request, None) is not None for ended in self._ended.values())

    def inherit(
        self, session: bytes, requests: dict[PendingRequest, OutboundRequest], loss: Callable[[int], DistributedError], is_unconfirmed: bool
    ) -> None:
        """Take over the requests of an ended session that were not run. See Note [Requests that move to the next session]."""
        now = self._loop.time()
        undecided: dict[PendingRequest, OutboundRequest] = {}
        for request, outbound in requests.items():
            self._session.take_over(request)
            if outbound.received:
                self._session.lost_for(request, loss)
            elif outbound.started:
                undecided[request] = outbound
            else:
                self._session.repeat(request, outbound, now)
        if undecided:
            self._ended[session] = ended = _Ended(undecided, loss, is_unconfirmed, now + self._silence)
            self._watch(session, ended)

    def settle(self, session: bytes, first: int) -> None:
        """Settle the requests of an earlier session: the peer has run none from the id `first` on. The peer reports on the latest session last."""
        self._settle_one(session, first)
        if session == self.predecessor:
            for older in list(self._ended):
                self._settle_one(older, NOT_KNOWN)

    def end(self, successor: EarlierRequests | None) -> None:
        """End the session itself: its successor may still learn the fate of these requests; without one all are lost."""
        for session, ended in self._ended.items():
            if ended.timer is not None:
                ended.timer.cancel()
            if successor is not None:
                successor.inherit(session, ended.requests, ended.loss, ended.is_unconfirmed)
                continue
            for request in ended.requests:
                request.fail(ended.loss)
        self._ended.clear()

    def _watch(self, session: bytes, ended: _Ended) -> None:
        """Fail the requests of an ended session with expired deadlines, and all of them when the peer's time to report has ended."""
        now = self._loop.time()
        for request in [request for request, outbound in ended.requests.items() if outbound.deadline <= now]:
            del ended.requests[request]
            self._session.lost_for(request, lambda _, late=request: self._session.late_for(late))  # type: ignore[misc]
        if now >= ended.until or not ended.requests:
            ended.is_unconfirmed = False  # the peer has not said that it knows nothing of it
            self._settle_one(session, NOT_KNOWN)
            return
        when = min(ended.until, *(outbound.deadline for outbound in ended.requests.values()))
        ended.timer = call_at(self._context, self._loop, when, self._watch, session, ended)

    def _settle_one(self, session: bytes, first: int) -> None:
        ended = self._ended.pop(session, None)
        if ended is None:
            return
        if ended.timer is not None:
            ended.timer.cancel()
        if first == NOT_KNOWN and ended.is_unconfirmed:
            first = 0
        now = self._loop.time()
        for request, outbound in ended.requests.items():
            if outbound.id >= first:
                self._session.repeat(request, outbound, now)
            else:
                self._session.lost_for(request, ended.loss)
        self._session.settled(now)
