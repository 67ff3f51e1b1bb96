"""InboundRequests: the answerer's side of a session, from the first fragment of a request until its requester has the answer.

Note [Exactly once]
    A request has a request from its first fragment. Once it was delivered it is never delivered again: a copy that arrives while it runs
    joins it (RECEIVED), one that arrives afterwards gets the stored answer. Rows are dropped when the requester says that the request
    is resolved, by the watermark in each of its frames or by the ids in its heartbeats; it says so when it will send no more about it.

    ============ ============================ ============== ===================== =====================
    state        REQUEST                      PROBE          CANCEL                deadline
    ============ ============================ ============== ===================== =====================
    (none)       ASSEMBLING or RUNNING        UNKNOWN        DONE, empty FAILURE
    ASSEMBLING   RUNNING when complete        UNKNOWN        DONE, empty FAILURE   (none)
    RUNNING      RECEIVED                     RECEIVED       DONE: abandon         ABANDONED: abandon
    ABANDONED    RECEIVED                     RECEIVED       DONE, empty FAILURE
    DONE         the answer                   the answer     DONE, empty FAILURE
    resolved     ignored                      ignored        ignored
    ============ ============================ ============== ===================== =====================

    ASSEMBLING ends with the channel: over the next one the request comes from its beginning.

Note [Limits]
    Before memory is taken for a message its bytes are reserved; before a request is delivered the running ones are counted. A request over
    the limit is answered with the failure that the `PeerSession` supplies, and that answer is remembered like any other, so that the refused request
    is never run by a late copy of itself. Answers are kept for the requester, so they count too: one that lets more than its budget of
    them pile up is refused new requests. A request longer than `Limits.message_bytes` is refused likewise: to close the channel would end all other
    messages, too, and the request would come again over the next one.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any

from aiograd.distributed.rpc.effects import Abandon, Deliver
from aiograd.distributed.rpc.frames import Frame, FrameKind
from aiograd.distributed.rpc.outbound import UNRESOLVED
from aiograd.distributed.rpc.outbox import Outgoing
from aiograd.distributed.rpc.reassembly import Assembly
from aiograd.distributed.rpc.session_side import SessionSide
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import ProtocolError

#: of the time a requester has left, the part that its answer may take on the way back, and the most that this is, seconds
SHARE_OF_RETURN = 0.05
LONGEST_RETURN = 0.05
#: requests of answered requests that a peer may leave unresolved, in multiples of the number that may run, and in any case
UNRESOLVED_PER_RUNNING = 16
UNRESOLVED_ANYWAY = 1024


class RequestState(enum.Enum):
    """Of a request. See Note [Exactly once]."""

    ASSEMBLING = enum.auto()
    RUNNING = enum.auto()
    ABANDONED = enum.auto()
    DONE = enum.auto()


_ASSEMBLING, _RUNNING, _ABANDONED, _DONE = RequestState


class InboundRequest:
    """The state of one request of the peer.

    Attributes:
        state: its stage, from arriving to answered.
        kind: the kind of the request.
        total: bytes of its message.
        deadline: when its answer is of no use any more, seconds.
        began: when its first fragment came, seconds.
        assembly: its message while it is incomplete.
        held: bytes reserved for it.
        answer: the answer.
    """

    __slots__ = ("id", "state", "kind", "total", "deadline", "began", "assembly", "held", "answer")

    def __init__(self, id: int, state: RequestState, kind: int, total: int, deadline: float, began: float = 0.0) -> None:
        self.id = id
        self.state = state
        self.kind = kind
        self.total = total
        self.deadline = deadline
        self.began = began
        self.assembly: Assembly | None = None
        self.held = 0
        self.answer: Outgoing | None = None


class InboundRequests(SessionSide):
    """The requests of the peer that it has not resolved. See Note [Exactly once].

    Args:
        *options: as of `SessionSide`.
        too_long: the failure that refuses a request longer than `Limits.message_bytes`.

    Attributes:
        requests: by id.
        running: requests that are assembled or run.
        stored: bytes of answers.
        delivered: the highest id of a request that was delivered.
    """

    __slots__ = ("requests", "running", "stored", "delivered", "_most_requests", "_too_long")

    def __init__(self, *options: Any, too_long: Sequence[Buffer]) -> None:
        super().__init__(*options)
        self._too_long = too_long
        self.requests: dict[int, InboundRequest] = {}
        self.running = 0
        self.stored = 0
        self.delivered = 0
        self._most_requests = UNRESOLVED_PER_RUNNING * self._limits.requests_per_peer + UNRESOLVED_ANYWAY

    # ---- heard from the peer

    def request(self, frame: Frame, now: float, age: float = 0.0) -> None:
        """A fragment of a request, `age` seconds after it was sent.

        Raises:
            ProtocolError: it does not fit what came before.
        """
        id = frame.id
        request = self.requests.get(id)
        if request is not None and request.state is not _ASSEMBLING:
            if not frame.offset:
                self._say(request)
            return
        if request is None and (frame.offset or id < self.watermark):
            return  # the rest of an abandoned request, or one without a waiting caller
        left = self._seconds_left(frame, age)
        if left <= 0:  # its caller has gone
            if request is not None:
                self._drop(request)
            return
        body, total = frame.body, frame.total
        if request is None:
            request = self._begin(frame, now, now + left)
            if request is None:
                return
        elif request.total != total or request.kind != frame.request_kind:
            raise ProtocolError(
                f"request {id}: a fragment of {total} bytes of kind {frame.request_kind}, after one of {request.total} bytes of kind {request.kind}",
                code="changed",
            )
        assembly = request.assembly
        if assembly is None:
            try:
                message: bytearray | memoryview = bytearray(body) if body.readonly else body
            except MemoryError:
                self._refuse(request)
                return
        elif assembly.add(frame.offset, body):
            request.assembly = None
            message = assembly.message
            if now + left < request.deadline:
                request.deadline = now + left
        else:
            if now + left < request.deadline:
                request.deadline = now + left
                self.timers.set(id, request.deadline)
            return
        request.state = _RUNNING
        if id > self.delivered:
            self.delivered = id
        self.timers.set(id, request.deadline)
        self._effects.append(Deliver(id, request.kind, message, request.deadline - now))

    def _seconds_left(self, frame: Frame, age: float) -> float:
        """Seconds until the answer to a request is of no use, less what its way back may take."""
        limits = self._limits
        left = min(frame.deadline_ms / 1000 or limits.default_deadline, limits.max_deadline) - age
        return left - min(left * SHARE_OF_RETURN, LONGEST_RETURN)

    def _begin(self, frame: Frame, now: float, deadline: float) -> InboundRequest | None:
        """A request for a new request; None where it was refused. See Note [Limits]."""
        id, total = frame.id, frame.total
        request = InboundRequest(id, _ASSEMBLING, frame.request_kind, total, deadline, now)
        self._admit(request)
        limits = self._limits
        if total > limits.message_bytes:
            self._settle(request, FrameKind.FAILURE, self._too_long)
            return None
        if self.running < limits.requests_per_peer and self.stored <= limits.bytes_per_peer and self._budget.reserve(total):
            request.held = total
            self.held += total
            self.running += 1
            if len(frame.body) != total:
                try:
                    request.assembly = Assembly(total)
                except MemoryError:
                    self._refuse(request)
                    return None
                self.timers.set(id, deadline)
            return request
        self._refuse(request, counted=False)
        return None

    def _admit(self, request: InboundRequest) -> None:
        if len(self.requests) >= self._most_requests:
            raise ProtocolError(
                f"request {request.id}: {len(self.requests)} earlier requests are answered or running and the peer has resolved none above "
                f"{self.watermark - 1}, expected it to say which it has resolved",
                code="unresolved",
            )
        self.requests[request.id] = request

    def _refuse(self, request: InboundRequest, counted: bool = True) -> None:
        if counted:
            self._release(request)
        self._settle(request, FrameKind.FAILURE, self._overloaded())

    def probe(self, frame: Frame) -> None:
        """The peer asks what became of a request."""
        request = self.requests.get(frame.id)
        if request is not None and request.state is not _ASSEMBLING:
            self._say(request)
        elif request is not None or frame.id >= self.watermark:
            self._outbox.control[FrameKind.UNKNOWN, frame.id] = None

    def cancel(self, frame: Frame) -> None:
        """The peer wants no answer."""
        id = frame.id
        request = self.requests.get(id)
        if request is None:
            if id < self.watermark:
                return
            request = InboundRequest(id, _ABANDONED, 0, 0, 0.0)
            self._admit(request)
        self._end(request)
        self._settle(request, FrameKind.FAILURE, ())

    def resolved_below(self, watermark: int) -> None:
        """All requests with smaller ids are resolved."""
        requests = self.requests
        before, self.watermark = self.watermark, watermark
        if requests:
            if watermark - before <= len(requests):
                gone = [requests[id] for id in range(before, watermark) if id in requests]
            else:
                gone = [request for id, request in requests.items() if id < watermark]
            for request in gone:
                self._drop(request)

    def resolved_but(self, body: memoryview) -> None:
        """The ids that a heartbeat tells; see `OutboundRequests.unresolved`.

        Raises:
            ProtocolError: it is no list of ids.
        """
        if len(body) % 8 or len(body) > 8 * (1 + UNRESOLVED):
            raise ProtocolError(f"HEARTBEAT with {len(body)} bytes after its header, expected {1 + UNRESOLVED} ids of 8 bytes at most", code="ids")
        horizon, *ids = struct.unpack(f"<{len(body) // 8}Q", body)
        unresolved = frozenset(ids)
        for request in [request for id, request in self.requests.items() if id < horizon and id not in unresolved]:
            self._drop(request)

    # ---- called by the session's owner

    def respond(self, id: int, message: Sequence[Buffer], failed: bool, held_until: float | None = None) -> None:
        """See `RpcSession.respond`."""
        request = self.requests.get(id)
        if request is None or request.state is not _RUNNING:
            return
        kind = FrameKind.FAILURE if failed else FrameKind.RESPONSE
        answer = Outgoing(kind, id, message, self._limits)
        self._release(request)
        request.answer = answer
        request.state = _DONE
        self.stored += answer.total
        self.timers.remove(id)
        if held_until is None or answer.total > self._outbox.frame_bytes:
            self._outbox.put(answer)
        else:
            self._outbox.hold(answer, held_until)

    # ---- channel and time

    def detach(self) -> None:
        """The channel is gone, and with it the rest of the requests that were arriving."""
        for request in [request for request in self.requests.values() if request.state is _ASSEMBLING]:
            self._drop(request)

    def attach(self, cut: Sequence[Outgoing]) -> None:
        """A new channel: send answers again that the old one carried in part. Those it carried whole are asked for where they are missing."""
        for message in cut:
            request = self.requests.get(message.id)
            if request is not None and request.answer is message:
                self._outbox.put(message)

    def tick(self, now: float) -> None:
        """Abandon the requests that are due."""
        for id in self.timers.take(now):
            request = self.requests[id]
            if request.state is _ASSEMBLING:
                self._drop(request)
            else:
                self._end(request)
                request.state = _ABANDONED

    def clear(self) -> None:
        """The session ends."""
        self._budget.release(self.held)
        self.requests.clear()
        self.timers.clear()
        self.held = self.stored = self.running = 0

    # ---- shared

    def _say(self, request: InboundRequest) -> None:
        """Tell the peer what became of its request."""
        if request.answer is not None:
            self._outbox.put(request.answer)
        else:
            self._outbox.control[FrameKind.RECEIVED, request.id] = None

    def _settle(self, request: InboundRequest, kind: FrameKind, message: Sequence[Buffer]) -> None:
        """Answer with `message`, and remember it in the place of an earlier answer."""
        self._forget_answer(request)
        request.answer = answer = Outgoing(kind, request.id, message, self._limits)
        request.state = _DONE
        self.stored += answer.total
        self.timers.remove(request.id)
        self._outbox.put(answer)

    def _end(self, request: InboundRequest) -> None:
        """The caller no longer waits: free the memory held for the answer and abandon the handler."""
        if request.state is _RUNNING:
            self._effects.append(Abandon(request.id))
        if request.state is _RUNNING or request.state is _ASSEMBLING:
            self._release(request)

    def _drop(self, request: InboundRequest) -> None:
        """Forget a request altogether."""
        del self.requests[request.id]
        self.timers.remove(request.id)
        self._end(request)
        self._forget_answer(request)

    def _forget_answer(self, request: InboundRequest) -> None:
        if request.answer is not None:
            self._outbox.withdraw(request.answer)
            self.stored -= request.answer.total
            request.answer = None

    def _release(self, request: InboundRequest) -> None:
        """Release the memory that a request holds while it is assembled and runs."""
        self.running -= 1
        request.assembly = None
        held, request.held = request.held, 0
        self.held -= held
        self._budget.release(held)
