"""InboundRequests: the answerer's side of a session, from the first fragment of a request until its requester has the answer.

Note [Exactly once]
    A request has a row from its first fragment. Once it was delivered it is never delivered again: a copy that arrives while it runs
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
    Before memory is taken for a message its bytes are reserved; before a request is delivered those that run are counted. A request over
    the limit is answered with the failure that the driver supplies, and that answer is remembered like any other, so that the refused request
    is never run by a late copy of itself. Answers are kept for the requester, so they count too: one that lets more than its budget of
    them pile up is refused new requests.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable, Sequence

from aiograd.distributed.rpc.budget import PeerBudget
from aiograd.distributed.rpc.effects import Abandon, Deliver, Effect
from aiograd.distributed.rpc.frames import Frame, FrameKind
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.outbound import UNRESOLVED
from aiograd.distributed.rpc.outbox import Outgoing, SessionOutbox
from aiograd.distributed.rpc.reassembly import Assembly
from aiograd.distributed.rpc.timer_queue import TimerQueue
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import ProtocolError

#: of the time a requester has left, the part that its answer may take on the way back, and the most that this is, seconds
SHARE_OF_RETURN = 0.05
LONGEST_RETURN = 0.05
#: rows of answered requests that a peer may leave unresolved, in multiples of those that may run, and in any case
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
        assembly: its message while it is incomplete.
        held: bytes reserved for it.
        answer: the answer.
    """

    __slots__ = ("id", "state", "kind", "total", "deadline", "assembly", "held", "answer")

    def __init__(self, id: int, state: RequestState, kind: int, total: int, deadline: float) -> None:
        self.id = id
        self.state = state
        self.kind = kind
        self.total = total
        self.deadline = deadline
        self.assembly: Assembly | None = None
        self.held = 0
        self.answer: Outgoing | None = None


class InboundRequests:
    """The requests of the peer that it has not resolved. See Note [Exactly once].

    Attributes:
        rows: by id.
        watermark: the lowest id that the peer has not resolved.
        running: requests that are assembled or run.
        held: bytes reserved from the budget.
        stored: bytes of answers.
        delivered: the highest id of a request that was delivered.
    """

    __slots__ = (
        "rows", "watermark", "running", "held", "stored", "delivered", "timers",
        "_limits", "_budget", "_outbox", "_effects", "_overloaded", "_most_rows",
    )  # fmt: skip

    def __init__(
        self,
        limits: Limits,
        budget: PeerBudget,
        outbox: SessionOutbox,
        effects: deque[Effect],
        overloaded: Callable[[], Sequence[Buffer]],
    ) -> None:
        self.rows: dict[int, InboundRequest] = {}
        self.watermark = 1
        self.running = 0
        self.held = 0
        self.stored = 0
        self.delivered = 0
        self.timers = TimerQueue()
        self._limits = limits
        self._budget = budget
        self._outbox = outbox
        self._effects = effects
        self._overloaded = overloaded
        self._most_rows = UNRESOLVED_PER_RUNNING * limits.requests_per_peer + UNRESOLVED_ANYWAY

    # ---- heard from the peer

    def request(self, frame: Frame, now: float, age: float = 0.0) -> None:
        """A fragment of a request, `age` seconds after it was sent.

        Raises:
            ProtocolError: it does not fit what came before.
        """
        id = frame.id
        row = self.rows.get(id)
        if row is not None and row.state is not _ASSEMBLING:
            if not frame.offset:
                self._say(row)
            return
        if row is None and (frame.offset or id < self.watermark):
            return  # the rest of one that was given up, or nobody waits for it
        left = self._seconds_left(frame, age)
        if left <= 0:  # its caller has gone
            if row is not None:
                self._drop(row)
            return
        body, total = frame.body, frame.total
        if row is None:
            row = self._begin(frame, now + left)
            if row is None:
                return
        elif row.total != total or row.kind != frame.request_kind:
            raise ProtocolError(
                f"request {id}: a fragment of {total} bytes of kind {frame.request_kind}, after one of {row.total} bytes of kind {row.kind}",
                code="changed",
            )
        assembly = row.assembly
        if assembly is None:
            try:
                message: bytearray | memoryview = bytearray(body) if body.readonly else body
            except MemoryError:
                self._refuse(row)
                return
        elif assembly.add(frame.offset, body):
            row.assembly = None
            message = assembly.message
            if now + left < row.deadline:
                row.deadline = now + left
        else:
            if now + left < row.deadline:
                row.deadline = now + left
                self.timers.set(id, row.deadline)
            return
        row.state = _RUNNING
        if id > self.delivered:
            self.delivered = id
        self.timers.set(id, row.deadline)
        self._effects.append(Deliver(id, row.kind, message, row.deadline - now))

    def _seconds_left(self, frame: Frame, age: float) -> float:
        """Seconds until the answer to a request is of no use, less what its way back may take."""
        limits = self._limits
        left = min(frame.deadline_ms / 1000 or limits.default_deadline, limits.max_deadline) - age
        return left - min(left * SHARE_OF_RETURN, LONGEST_RETURN)

    def _begin(self, frame: Frame, deadline: float) -> InboundRequest | None:
        """A row for a new request; None where it was refused. See Note [Limits]."""
        id, total = frame.id, frame.total
        row = InboundRequest(id, _ASSEMBLING, frame.request_kind, total, deadline)
        self._admit(row)
        limits = self._limits
        if self.running < limits.requests_per_peer and self.stored <= limits.bytes_per_peer and self._budget.reserve(total):
            row.held = total
            self.held += total
            self.running += 1
            if len(frame.body) != total:
                try:
                    row.assembly = Assembly(total)
                except MemoryError:
                    self._refuse(row)
                    return None
                self.timers.set(id, deadline)
            return row
        self._refuse(row, counted=False)
        return None

    def _admit(self, row: InboundRequest) -> None:
        if len(self.rows) >= self._most_rows:
            raise ProtocolError(
                f"request {row.id}: {len(self.rows)} earlier requests are answered or running and the peer has resolved none above "
                f"{self.watermark - 1}, expected it to say which it has resolved",
                code="unresolved",
            )
        self.rows[row.id] = row

    def _refuse(self, row: InboundRequest, counted: bool = True) -> None:
        if counted:
            self._release(row)
        self._settle(row, FrameKind.FAILURE, self._overloaded())

    def probe(self, frame: Frame) -> None:
        """The peer asks what became of a request."""
        row = self.rows.get(frame.id)
        if row is not None and row.state is not _ASSEMBLING:
            self._say(row)
        elif row is not None or frame.id >= self.watermark:
            self._outbox.control[FrameKind.UNKNOWN, frame.id] = None

    def cancel(self, frame: Frame) -> None:
        """The peer wants no answer."""
        id = frame.id
        row = self.rows.get(id)
        if row is None:
            if id < self.watermark:
                return
            row = InboundRequest(id, _ABANDONED, 0, 0, 0.0)
            self._admit(row)
        self._end(row)
        self._settle(row, FrameKind.FAILURE, ())

    def resolved_below(self, watermark: int) -> None:
        """All requests with smaller ids are resolved."""
        rows = self.rows
        before, self.watermark = self.watermark, watermark
        if rows:
            if watermark - before <= len(rows):
                gone = [rows[id] for id in range(before, watermark) if id in rows]
            else:
                gone = [row for id, row in rows.items() if id < watermark]
            for row in gone:
                self._drop(row)

    def resolved_but(self, body: memoryview) -> None:
        """The ids that a heartbeat tells; see `OutboundRequests.unresolved`.

        Raises:
            ProtocolError: it is no list of ids.
        """
        if len(body) % 8 or len(body) > 8 * (1 + UNRESOLVED):
            raise ProtocolError(f"HEARTBEAT with {len(body)} bytes after its header, expected {1 + UNRESOLVED} ids of 8 bytes at most", code="ids")
        horizon, *ids = struct.unpack(f"<{len(body) // 8}Q", body)
        unresolved = frozenset(ids)
        for row in [row for id, row in self.rows.items() if id < horizon and id not in unresolved]:
            self._drop(row)

    # ---- asked by the driver

    def respond(self, id: int, message: Sequence[Buffer], failed: bool, held_until: float | None = None) -> None:
        """See `RpcSession.respond`."""
        row = self.rows.get(id)
        if row is None or row.state is not _RUNNING:
            return
        kind = FrameKind.FAILURE if failed else FrameKind.RESPONSE
        answer = Outgoing(kind, id, message, self._limits)
        self._release(row)
        row.answer = answer
        row.state = _DONE
        self.stored += answer.total
        self.timers.remove(id)
        if held_until is None or answer.total > self._outbox.frame_bytes:
            self._outbox.put(answer)
        else:
            self._outbox.hold(answer, held_until)

    # ---- channel and time

    def detach(self) -> None:
        """The channel is gone, and with it the rest of the requests that were arriving."""
        for row in [row for row in self.rows.values() if row.state is _ASSEMBLING]:
            self._drop(row)

    def attach(self, cut: Sequence[Outgoing]) -> None:
        """A new channel: send answers again that the old one carried in part. Those it carried whole are asked for where they are missing."""
        for message in cut:
            row = self.rows.get(message.id)
            if row is not None and row.answer is message:
                self._outbox.put(message)

    def tick(self, now: float) -> None:
        """Abandon what is due."""
        for id in self.timers.take(now):
            row = self.rows[id]
            if row.state is _ASSEMBLING:
                self._drop(row)
            else:
                self._end(row)
                row.state = _ABANDONED

    def clear(self) -> None:
        """The session ends."""
        self._budget.release(self.held)
        self.rows.clear()
        self.timers.clear()
        self.held = self.stored = self.running = 0

    # ---- shared

    def _say(self, row: InboundRequest) -> None:
        """Tell the peer what became of its request."""
        if row.answer is not None:
            self._outbox.put(row.answer)
        else:
            self._outbox.control[FrameKind.RECEIVED, row.id] = None

    def _settle(self, row: InboundRequest, kind: FrameKind, message: Sequence[Buffer]) -> None:
        """Answer with `message`, and remember it, instead of what was answered before."""
        self._forget_answer(row)
        row.answer = answer = Outgoing(kind, row.id, message, self._limits)
        row.state = _DONE
        self.stored += answer.total
        self.timers.remove(row.id)
        self._outbox.put(answer)

    def _end(self, row: InboundRequest) -> None:
        """Nobody waits for the answer: free what is held for it and tell the driver."""
        if row.state is _RUNNING:
            self._effects.append(Abandon(row.id))
        if row.state is _RUNNING or row.state is _ASSEMBLING:
            self._release(row)

    def _drop(self, row: InboundRequest) -> None:
        """Forget a request altogether."""
        del self.rows[row.id]
        self.timers.remove(row.id)
        self._end(row)
        self._forget_answer(row)

    def _forget_answer(self, row: InboundRequest) -> None:
        if row.answer is not None:
            self._outbox.withdraw(row.answer)
            self.stored -= row.answer.total
            row.answer = None

    def _release(self, row: InboundRequest) -> None:
        """Give back what a request holds while it is assembled and runs."""
        self.running -= 1
        row.assembly = None
        held, row.held = row.held, 0
        self.held -= held
        self._budget.release(held)
