"""OutboundRequests: the requester's side of a session, from a request to its answer, its deadline or its cancellation.

Note [Resending]
    A request keeps its id however often it is sent, so that the answerer knows it again. A channel carries everything once and in order
    until it closes, and then an unknown part of the requests and answers on their way is lost. So when the next channel is there, and
    not before, each request that had been sent is seen to: a small one is simply sent again, a larger one is asked after with a PROBE, which
    costs a header. The answer is RECEIVED, or the response again, or UNKNOWN, and only then the whole message goes out again. Messages of
    which a part had arrived are forgotten with the channel, and sent from their beginning over the next.

    One thing is asked for again over the same channel: an answer for which there was no room, once there may be some.

Note [Resolved requests]
    A request is resolved when its answer was handed on, its deadline passed, or the answerer confirmed its cancellation. Answers must be
    remembered by the answerer until then, so it is told: each frame carries the lowest unresolved id (the watermark), which in quiet
    times is all. While one slow request keeps the watermark down, heartbeats carry the ids that are unresolved, and a heartbeat is sent
    early when answers of `UNACKNOWLEDGED_BYTES` were resolved of which the answerer does not know.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from aiograd.distributed.rpc.effects import Answered, Expired
from aiograd.distributed.rpc.frames import Frame, FrameKind
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.outbox import OVERHEAD, Outgoing
from aiograd.distributed.rpc.reassembly import Assembly
from aiograd.distributed.rpc.session_side import SessionSide
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import ArgumentError, ProtocolError

#: seconds until an answer for which there was no room is asked for again: the first time, and at most
FIRST_RETRY = 0.2
LAST_RETRY = 2.0
#: requests up to this size are resent at once, others are asked after first, bytes
SMALL = 1024
#: answers that the answerer may go on remembering until the next heartbeat, bytes
UNACKNOWLEDGED_BYTES = 1 << 18
#: unresolved ids that a heartbeat names at most
UNRESOLVED = 4096
#: the latest answers, of which the quickest tell the round trip; seconds that these may differ by: clocks of loops count milliseconds
ROUND_TRIPS, CLOCK = 32, 0.0015


class OutboundRequest(Outgoing):
    """A request that is not resolved.

    Attributes:
        sent_at: when its last fragment went out; None before.
        started: True if any of it has ever been sent.
        resent: True if it was sent or asked after more than once, so that its answer measures no round trip.
        received: True if the answerer has all of it.
        cancelled: True if its caller has cancelled it.
        pause: seconds until its answer was last asked for again for lack of room.
        assembly: the answer so far.
        answer_kind: RESPONSE or FAILURE, once its first fragment came.
    """

    __slots__ = ("sent_at", "started", "resent", "received", "cancelled", "pause", "assembly", "answer_kind")

    def __init__(self, id: int, kind: int, message: Sequence[Buffer], limits: Limits, deadline: float) -> None:
        super().__init__(FrameKind.REQUEST, id, message, limits, kind, deadline)
        self.sent_at: float | None = None
        self.started: bool = False
        self.resent: bool = False
        self.received: bool = False
        self.cancelled: bool = False
        self.pause: float = 0.0
        self.assembly: Assembly | None = None
        self.answer_kind: FrameKind = FrameKind.RESPONSE


class OutboundRequests(SessionSide):
    """All requests of one side that are not resolved. See Note [Resending] and Note [Resolved requests].

    Args:
        *options: as of `SessionSide`.

    Attributes:
        requests: by id, ascending.
        next_id: of the next request; the `watermark` where all are resolved.
        unacknowledged: bytes of answers that were resolved since the answerer was last told.
        resent: requests that were sent or asked after again, in all.
    """

    __slots__ = ("requests", "next_id", "unacknowledged", "resent", "_times")

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.requests: dict[int, OutboundRequest] = {}
        self.next_id = 1
        self.unacknowledged = 0
        self.resent = 0
        #: seconds from requests to their answers, of late
        self._times: deque[float] = deque(maxlen=ROUND_TRIPS)

    # ---- called by the session's owner

    def add(self, kind: int, message: Sequence[Buffer], timeout: float, now: float) -> int:
        """See `RpcSession.request`."""
        if not -math.inf < timeout < math.inf:
            raise ArgumentError(f"request with timeout={timeout!r}; expected a finite number of seconds")
        if not 0 <= kind <= 0xFF:
            raise ArgumentError(f"request of kind {kind!r}; expected 0 to 255, which is what a header has room for")
        id = self.next_id
        request = OutboundRequest(id, kind, message, self._limits, now + timeout)
        self.next_id = id + 1
        self.requests[id] = request
        self.timers.set(id, request.deadline)
        self._outbox.put(request)
        return id

    def repeat(self, earlier: OutboundRequest, now: float) -> int:
        """See `RpcSession.repeat`."""
        return self.add(earlier.request_kind, earlier.buffers, earlier.deadline - now, now)

    def cancel(self, id: int) -> None:
        """See `RpcSession.cancel`."""
        request = self.requests.get(id)
        if request is None or request.cancelled:
            return
        request.cancelled = True
        self._drop_assembly(request)
        if not request.started:
            self._resolve(request)
        else:
            self._outbox.withdraw(request)
            self._outbox.control[FrameKind.CANCEL, request.id] = None

    @property
    def round_trip(self) -> float | None:
        """Seconds to the quickest of the latest answers, on average; None before the first. Answers to requests that were sent again do not count."""
        if not self._times:
            return None
        least = min(self._times)
        quickest = [seconds for seconds in self._times if seconds <= least + CLOCK]
        return sum(quickest) / len(quickest)

    # ---- heard from the peer

    def answered(self, frame: Frame, now: float) -> None:
        """A fragment of an answer.

        Raises:
            ProtocolError: it does not fit what came before.
        """
        request = self._find(frame)
        if request is None:
            return
        if request.cancelled:
            self._resolve(request)
            return
        body, total, assembly = frame.body, frame.total, request.assembly
        if assembly is None:
            if frame.offset:
                return  # the rest of one for which there was no room
            if len(body) == total:
                try:
                    message = bytearray(body) if body.readonly else body
                except MemoryError:
                    self._ask_later(request, now)
                else:
                    self._finish(request, message, frame.kind, now)
                return
            assembly = self._begin(request, frame, now)
            if assembly is None:
                return
        elif assembly.total != total or request.answer_kind is not frame.kind:
            raise ProtocolError(
                f"answer to request {request.id}: a fragment of a {frame.kind.name} of {total} bytes, after one of a {request.answer_kind.name} "
                f"of {assembly.total} bytes",
                code="changed",
            )
        if assembly.add(frame.offset, body):
            self._finish(request, assembly.message, frame.kind, now)

    def _begin(self, request: OutboundRequest, frame: Frame, now: float) -> Assembly | None:
        """Make room for an answer; None where there is none now."""
        total = frame.total
        if self._budget.reserve(total):
            try:
                assembly = Assembly(total)
            except MemoryError:
                self._budget.release(total)
            else:
                self.held += total
                request.assembly, request.answer_kind = assembly, frame.kind
                return assembly
        elif total > self._budget.limit:
            self._finish(request, bytearray(b"".join(self._overloaded())), FrameKind.FAILURE, now)
            return None
        self._ask_later(request, now)
        return None

    def _ask_later(self, request: OutboundRequest, now: float) -> None:
        """There is no room for an answer, which the answerer keeps: ask for it when there may be, and again until it comes."""
        request.received = True
        request.pause = min(2 * request.pause or FIRST_RETRY, LAST_RETRY)
        self.timers.set(request.id, min(now + request.pause, request.deadline))

    def received(self, frame: Frame) -> None:
        """The answerer has all of a request."""
        request = self._find(frame)
        if request is not None and not request.cancelled:
            request.received = True
            self._outbox.withdraw(request)

    def unknown(self, frame: Frame) -> None:
        """The answerer has not got all of a request."""
        request = self._find(frame)
        if request is not None and not request.cancelled:
            request.received = False
            if not request.queued:
                self._resend(request)

    def _find(self, frame: Frame) -> OutboundRequest | None:
        if frame.id >= self.next_id:
            raise ProtocolError(f"{frame.kind.name} about request {frame.id}, but this side has made {self.next_id - 1}", code="unasked")
        return self.requests.get(frame.id)

    # ---- channel and time

    def detach(self) -> None:
        """The channel is gone, and with it the rest of the answers that were arriving."""
        for request in self.requests.values():
            self._drop_assembly(request)

    def attach(self) -> None:
        """Attach a new channel: send requests again, or ask for the fate of the old channel's."""
        for request in list(self.requests.values()):
            if request.started and not request.queued:
                self.resent += 1
                self._ask(request)

    def tick(self, now: float) -> None:
        """Expire requests that are due, and ask again for answers that had no room."""
        for id in self.timers.take(now):
            request = self.requests[id]
            if now >= request.deadline:
                self._resolve(request)
                if not request.cancelled:
                    self._effects.append(Expired(request.id))
            else:
                if request.assembly is None:
                    self.resent += 1
                    self._ask(request)
                self._ask_later(request, now)

    def unresolved(self) -> bytes:
        """The body of a heartbeat: an id, and the ids below it that are unresolved. Empty if the watermark says the same.

        Below that id, everything else is resolved.
        """
        self.unacknowledged = 0
        requests = self.requests
        if len(requests) == self.next_id - self.watermark:
            return b""
        most = min(UNRESOLVED, self._outbox.frame_bytes // 8 - 1)
        if most < 1:
            return b""
        ids = list(islice(requests, most + 1))
        horizon = ids.pop() if len(ids) > most else self.next_id
        return struct.pack(f"<{1 + len(ids)}Q", horizon, *ids)

    def told(self) -> None:
        """A frame goes out, and its watermark."""
        if len(self.requests) == self.next_id - self.watermark:
            self.unacknowledged = 0

    def clear(self) -> list[int]:
        """The session ends; returns the ids that are still awaited."""
        ids = [request.id for request in self.requests.values() if not request.cancelled]
        self._budget.release(self.held)
        self.held = 0
        self.requests.clear()
        self.timers.clear()
        self.watermark = self.next_id
        return ids

    # ---- shared

    def _ask(self, request: OutboundRequest) -> None:
        """Find out about a request, or send it again. See Note [Resending]."""
        request.resent = True
        if request.cancelled:
            self._outbox.control[FrameKind.CANCEL, request.id] = None
        elif request.received or request.total > SMALL:
            if not request.queued:
                self._outbox.control[FrameKind.PROBE, request.id] = None
        else:
            self._resend(request)

    def _resend(self, request: OutboundRequest) -> None:
        self._outbox.put(request)

    def _finish(self, request: OutboundRequest, message: bytearray | memoryview, kind: FrameKind, now: float) -> None:
        if not request.resent and request.sent_at is not None:
            self._times.append(now - request.sent_at)
        self.unacknowledged += len(message) + OVERHEAD
        self._resolve(request)
        if self.unacknowledged > UNACKNOWLEDGED_BYTES:
            self._outbox.control[FrameKind.HEARTBEAT, 0] = None
        self._effects.append(Answered(request.id, message, kind is FrameKind.FAILURE))

    def _resolve(self, request: OutboundRequest) -> None:
        id = request.id
        del self.requests[id]
        self.timers.remove(id)
        self._outbox.withdraw(request)
        self._drop_assembly(request)
        if id == self.watermark:
            self.watermark = next(iter(self.requests), self.next_id)

    def _drop_assembly(self, request: OutboundRequest) -> None:
        assembly = request.assembly
        if assembly is not None:
            request.assembly = None
            self.held -= assembly.total
            self._budget.release(assembly.total)
