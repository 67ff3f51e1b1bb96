"""Answers: the answerer's side of a session, from the first fragment of a request until its requester has the answer.

Note [Exactly once]
    A request has a row from its first fragment. Once it was delivered it is never delivered again: a copy that arrives while it runs
    joins it (RECEIVED), one that arrives afterwards gets the stored answer. Rows are dropped when the requester says that the request
    is resolved, by the watermark in each of its frames or by the ids in its heartbeats, and what arrives later for a resolved id is
    stale and ignored. What was said once stays said, so frames may overtake each other.

    ============ ============================ ============== ===================== =====================
    state        REQUEST, complete            PROBE          CANCEL                deadline
    ============ ============================ ============== ===================== =====================
    (none)       ASSEMBLING or RUNNING        UNKNOWN        DONE, empty FAILURE
    ASSEMBLING   RUNNING: deliver             UNKNOWN        DONE, empty FAILURE   (none)
    RUNNING      RECEIVED                     RECEIVED       DONE: abandon         ABANDONED: abandon
    ABANDONED    RECEIVED                     RECEIVED       DONE, empty FAILURE
    DONE         the answer                   the answer     DONE, empty FAILURE
    resolved     ignored                      ignored        ignored
    ============ ============================ ============== ===================== =====================

Note [Limits]
    Before memory is taken for a message its bytes are reserved; before a request is delivered those that run are counted. What finds no
    room is answered with the failure that the driver supplies, and that answer is remembered like any other, so that the refused request
    is never run by a late copy of itself. Answers are kept for the requester, so they count too: one that lets more than its budget of
    them pile up is refused new requests.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable, Collection, Sequence

from aiograd.distributed.agenda import Agenda
from aiograd.distributed.budget import PeerBudget
from aiograd.distributed.effects import Abandon, Deliver, Effect
from aiograd.distributed.frame import Frame, FrameKind
from aiograd.distributed.limits import Limits
from aiograd.distributed.outbox import Outbox, Outgoing
from aiograd.distributed.outgoing import UNRESOLVED
from aiograd.distributed.reassembly import Assembly
from aiograd.distributed.safeguards import Safeguards
from aiograd.distributed.transport import Buffer
from aiograd.errors import ProtocolError

#: of the time a requester has left, the part that its answer may take on the way back, and the most that this is, seconds
SHARE_OF_RETURN = 0.05
LONGEST_RETURN = 0.05
#: rows of answered requests that a peer may leave unresolved, in multiples of those that may run, and in any case
UNRESOLVED_PER_RUNNING = 16
UNRESOLVED_ANYWAY = 1024


class State(enum.Enum):
    """Of a request. See Note [Exactly once]."""

    ASSEMBLING = enum.auto()
    RUNNING = enum.auto()
    ABANDONED = enum.auto()
    DONE = enum.auto()


_ASSEMBLING, _RUNNING, _ABANDONED, _DONE = State


class Row:
    """What is known of one request of the peer.

    Attributes:
        state: where it is.
        kind: what it asks for.
        total: bytes of its message.
        deadline: when its answer is of no use any more, seconds.
        assembly: its message while it is incomplete.
        held: bytes reserved for it.
        answer: what was answered.
    """

    __slots__ = ("id", "state", "kind", "total", "deadline", "assembly", "held", "answer")

    def __init__(self, id: int, state: State, kind: int, total: int, deadline: float) -> None:
        self.id = id
        self.state = state
        self.kind = kind
        self.total = total
        self.deadline = deadline
        self.assembly: Assembly | None = None
        self.held = 0
        self.answer: Outgoing | None = None


class Answers:
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
        "rows", "watermark", "running", "held", "stored", "delivered", "agenda",
        "_horizon", "_unresolved", "_limits", "_budget", "_safeguards", "_outbox", "_effects", "_overloaded", "_most_rows",
    )  # fmt: skip

    def __init__(
        self,
        limits: Limits,
        budget: PeerBudget,
        safeguards: Safeguards,
        outbox: Outbox,
        effects: deque[Effect],
        overloaded: Callable[[], Sequence[Buffer]],
    ) -> None:
        self.rows: dict[int, Row] = {}
        self.watermark = 1
        self.running = 0
        self.held = 0
        self.stored = 0
        self.delivered = 0
        self.agenda = Agenda()
        #: below the horizon, all ids but these are resolved
        self._horizon = 0
        self._unresolved: Collection[int] = frozenset()
        self._limits = limits
        self._budget = budget
        self._safeguards = safeguards
        self._outbox = outbox
        self._effects = effects
        self._overloaded = overloaded
        self._most_rows = UNRESOLVED_PER_RUNNING * limits.requests_per_peer + UNRESOLVED_ANYWAY

    # ---- heard from the peer

    def request(self, frame: Frame, now: float) -> None:
        """A fragment of a request.

        Raises:
            ProtocolError: it does not fit what came before.
        """
        id = frame.id
        row = self.rows.get(id)
        if row is not None:
            if row.state is not _ASSEMBLING:
                if self._is_known(row):
                    if frame.offset + len(frame.body) == frame.total:
                        self._say(row)
                    return
                self._drop(row)
                row = None
        elif self._is_resolved(id) and self._safeguards.dedupe:
            return
        limits = self._limits
        left = min(frame.deadline_ms / 1000 or limits.default_deadline, limits.max_deadline)
        if self._safeguards.shrink_deadline:
            left -= min(left * SHARE_OF_RETURN, LONGEST_RETURN)
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
                message: bytearray | memoryview = bytearray(body)
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
                self.agenda.set(id, row.deadline)
            return
        row.state = _RUNNING
        if id > self.delivered:
            self.delivered = id
        self.agenda.set(id, row.deadline)
        self._effects.append(Deliver(id, row.kind, message, row.deadline - now))

    def _begin(self, frame: Frame, deadline: float) -> Row | None:
        """A row for a new request; None where it was refused. See Note [Limits]."""
        id, total = frame.id, frame.total
        row = Row(id, _ASSEMBLING, frame.request_kind, total, deadline)
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
                self.agenda.set(id, deadline)
            return row
        self._refuse(row, counted=False)
        return None

    def _admit(self, row: Row) -> None:
        if len(self.rows) >= self._most_rows:
            raise ProtocolError(
                f"request {row.id}: {len(self.rows)} earlier requests are answered or running and the peer has resolved none above "
                f"{self.watermark - 1}, expected it to say which it has resolved",
                code="unresolved",
            )
        self.rows[row.id] = row

    def _refuse(self, row: Row, counted: bool = True) -> None:
        if counted:
            self._release(row, failed=True)
        self._settle(row, FrameKind.FAILURE, self._overloaded())

    def probe(self, frame: Frame) -> None:
        """The peer asks what became of a request."""
        row = self.rows.get(frame.id)
        if row is not None and row.state is not _ASSEMBLING and self._is_known(row):
            self._say(row)
        elif row is not None or not self._is_resolved(frame.id):
            self._outbox.control[FrameKind.UNKNOWN, frame.id] = None

    def cancel(self, frame: Frame) -> None:
        """The peer wants no answer."""
        id = frame.id
        row = self.rows.get(id)
        if row is None:
            if self._is_resolved(id):
                return
            row = Row(id, _ABANDONED, 0, 0, 0.0)
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
        """What a heartbeat tells; see `Requests.unresolved`.

        Raises:
            ProtocolError: it is no list of ids.
        """
        if len(body) % 8 or len(body) > 8 * (1 + UNRESOLVED):
            raise ProtocolError(f"HEARTBEAT with {len(body)} bytes after its header, expected {1 + UNRESOLVED} ids of 8 bytes at most", code="ids")
        horizon, *ids = struct.unpack(f"<{len(body) // 8}Q", body)
        # what an overtaken heartbeat tells, later ones told too
        if horizon < self._horizon or (horizon == self._horizon and len(ids) >= len(self._unresolved)):
            return
        self._horizon, self._unresolved = horizon, frozenset(ids)
        for row in [row for row in self.rows.values() if self._is_resolved(row.id)]:
            self._drop(row)

    # ---- asked by the driver

    def respond(self, id: int, message: Sequence[Buffer], failed: bool) -> None:
        """See `Session.respond`."""
        row = self.rows.get(id)
        if row is None or row.state is not _RUNNING:
            return
        kind = FrameKind.FAILURE if failed else FrameKind.RESPONSE
        answer = Outgoing(kind, id, message, self._limits)
        self._release(row, failed)
        row.answer = answer
        row.state = _DONE
        self.stored += answer.total
        self.agenda.remove(id)
        self._outbox.put(answer)

    # ---- channel and time

    def attach(self, cut: Sequence[Outgoing]) -> None:
        """A new channel: send answers again that the old one carried in part. Those it carried whole are asked for where they are missing."""
        for message in cut:
            row = self.rows.get(message.id)
            if row is not None and row.answer is message:
                self._outbox.put(message)

    def tick(self, now: float) -> None:
        """Abandon what is due."""
        for id in self.agenda.take(now):
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
        self.agenda.clear()
        self.held = self.stored = self.running = 0

    # ---- shared

    def _is_resolved(self, id: int) -> bool:
        return id < self.watermark or (id < self._horizon and id not in self._unresolved)

    def _is_known(self, row: Row) -> bool:
        """Whether a request that was delivered counts as known. See Note [Exactly once]."""
        safeguards = self._safeguards
        return safeguards.dedupe and (safeguards.dedupe_running or row.state is _DONE)

    def _say(self, row: Row) -> None:
        """Tell the peer what became of its request."""
        if row.answer is not None:
            self._outbox.put(row.answer)
        else:
            self._outbox.control[FrameKind.RECEIVED, row.id] = None

    def _settle(self, row: Row, kind: FrameKind, message: Sequence[Buffer]) -> None:
        """Answer with `message`, and remember it, instead of what was answered before."""
        self._forget_answer(row)
        row.answer = answer = Outgoing(kind, row.id, message, self._limits)
        row.state = _DONE
        self.stored += answer.total
        self.agenda.remove(row.id)
        self._outbox.put(answer)

    def _end(self, row: Row) -> None:
        """Nobody waits for the answer: free what is held for it and tell the driver."""
        if row.state is _RUNNING:
            self._effects.append(Abandon(row.id))
        if row.state is _RUNNING or row.state is _ASSEMBLING:
            self._release(row, failed=True)

    def _drop(self, row: Row) -> None:
        """Forget a request altogether."""
        del self.rows[row.id]
        self.agenda.remove(row.id)
        self._end(row)
        self._forget_answer(row)

    def _forget_answer(self, row: Row) -> None:
        if row.answer is not None:
            self._outbox.withdraw(row.answer)
            self.stored -= row.answer.total
            row.answer = None

    def _release(self, row: Row, failed: bool) -> None:
        """Give back what a request holds while it is assembled and runs."""
        self.running -= 1
        row.assembly = None
        held, row.held = row.held, 0
        if not failed or self._safeguards.return_budget:
            self.held -= held
            self._budget.release(held)
