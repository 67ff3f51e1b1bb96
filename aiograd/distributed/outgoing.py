"""Requests: the requester's side of a session, from a request to its answer, its deadline or its cancellation.

Note [Resending]
    A request keeps its id however often it is sent, so that the answerer knows it again. Over a channel that may lose frames it is asked
    after when nothing was heard for a while: first after four round trips (0.2 s at least), then at twice the interval each time, up to
    2 s. Over one that loses nothing until it closes, only when the next channel is there. Small requests are simply sent again, others
    are asked after with a PROBE, which costs a header: the answer to it is RECEIVED, or the response again, or UNKNOWN, and only then
    the whole message goes out again. That, and one retry per interval, is what bounds retry traffic after a partition has healed.

Note [What is resolved]
    A request is resolved when its answer was handed on, its deadline passed, or the answerer confirmed its cancellation. Answers must be
    remembered by the answerer until then, so it is told: each frame carries the lowest unresolved id (the watermark), which in quiet
    times is all. While one slow request keeps the watermark down, heartbeats carry the ids that are unresolved, and a heartbeat is sent
    early when answers of `UNTOLD_BYTES` were resolved of which the answerer does not know.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from aiograd.distributed.agenda import Agenda
from aiograd.distributed.budget import PeerBudget
from aiograd.distributed.effects import Answered, Effect, Expired
from aiograd.distributed.frame import Frame, FrameKind
from aiograd.distributed.limits import Limits
from aiograd.distributed.outbox import OVERHEAD, Outbox, Outgoing
from aiograd.distributed.reassembly import Assembly
from aiograd.distributed.safeguards import Safeguards
from aiograd.distributed.transport import Buffer
from aiograd.errors import ArgumentError, ProtocolError

#: seconds to the first retry and between later ones
FIRST_RETRY = 0.2
LAST_RETRY = 2.0
#: requests up to this size are resent at once, others are asked after first, bytes
SMALL = 1024
#: answers that the answerer may go on remembering until the next heartbeat, bytes
UNTOLD_BYTES = 1 << 18
#: unresolved ids that a heartbeat names at most
UNRESOLVED = 4096


class Request(Outgoing):
    """A request that is not resolved.

    Attributes:
        name: the id that the driver knows it by.
        sent_at: when its last fragment went out; None before.
        started: whether any of it went out, ever.
        resent: whether it was sent or asked after more than once, so that its answer measures no round trip.
        received: whether the answerer has all of it.
        cancelled: whether the driver wants no answer.
        interval: seconds to the next retry.
        retry_at: when that is; None for never.
        assembly: the answer so far.
        answer_kind: RESPONSE or FAILURE, once its first fragment came.
    """

    __slots__ = ("name", "sent_at", "started", "resent", "received", "cancelled", "interval", "retry_at", "assembly", "answer_kind")

    def __init__(self, id: int, kind: int, message: Sequence[Buffer], limits: Limits, deadline: float) -> None:
        super().__init__(FrameKind.REQUEST, id, message, limits, kind, deadline)
        self.name = id
        self.sent_at: float | None = None
        self.started = False
        self.resent = False
        self.received = False
        self.cancelled = False
        self.interval = 0.0
        self.retry_at: float | None = None
        self.assembly: Assembly | None = None
        self.answer_kind = FrameKind.RESPONSE


class Requests:
    """All requests of one side that are not resolved. See Note [Resending] and Note [What is resolved].

    Attributes:
        rows: by id, ascending.
        next_id: of the next request.
        watermark: the lowest unresolved id, or `next_id`.
        untold: bytes of answers that were resolved since the answerer was last told.
        held: bytes reserved from the budget.
        resent: requests that were sent or asked after again, in all.
        round_trip: seconds from request to answer, smoothed; None before the first.
    """

    __slots__ = (
        "rows", "next_id", "watermark", "untold", "held", "resent", "round_trip", "agenda",
        "_limits", "_budget", "_safeguards", "_outbox", "_effects", "_overloaded", "_retries",
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
        self.rows: dict[int, Request] = {}
        self.next_id = 1
        self.watermark = 1
        self.untold = 0
        self.held = 0
        self.resent = 0
        self.round_trip: float | None = None
        self.agenda = Agenda()
        self._limits = limits
        self._budget = budget
        self._safeguards = safeguards
        self._outbox = outbox
        self._effects = effects
        self._overloaded = overloaded
        #: whether requests are retried by the clock: the channel may lose frames
        self._retries = False

    # ---- asked by the driver

    def add(self, kind: int, message: Sequence[Buffer], timeout: float, now: float) -> int:
        """See `Session.request`."""
        if not -math.inf < timeout < math.inf:
            raise ArgumentError(f"request with timeout={timeout!r}; expected a finite number of seconds")
        if not 0 <= kind <= 0xFF:
            raise ArgumentError(f"request of kind {kind!r}; expected 0 to 255, which is what a header has room for")
        id = self.next_id
        row = Request(id, kind, message, self._limits, now + timeout)
        self.next_id = id + 1
        self.rows[id] = row
        self.agenda.set(id, row.deadline)
        self._outbox.put(row)
        return id

    def repeat(self, former: Request, now: float) -> int:
        """See `Session.repeat`."""
        return self.add(former.request_kind, former.buffers, former.deadline - now, now)

    def cancel(self, name: int, now: float) -> None:
        """See `Session.cancel`."""
        row = self._named(name)
        if row is None or row.cancelled:
            return
        row.cancelled = True
        self._drop_assembly(row)
        if not row.started:
            self._resolve(row)
        elif self._safeguards.propagate_cancel:
            self._outbox.withdraw(row)
            self._outbox.control[FrameKind.CANCEL, row.id] = None
            if self._retries:
                self._postpone(row, now)

    def _named(self, name: int) -> Request | None:
        if self._safeguards.retry_same_id:
            return self.rows.get(name)
        return next((row for row in self.rows.values() if row.name == name), None)

    # ---- heard from the peer

    def answered(self, frame: Frame, now: float) -> None:
        """A fragment of an answer.

        Raises:
            ProtocolError: it does not fit what came before.
        """
        row = self._row(frame)
        if row is None:
            return
        if row.cancelled:
            self._resolve(row)
            return
        body, total, assembly = frame.body, frame.total, row.assembly
        if assembly is None:
            if len(body) == total:
                try:
                    message = bytearray(body)
                except MemoryError:
                    self._ask_later(row, now)
                else:
                    self._finish(row, message, frame.kind, now)
                return
            assembly = self._begin(row, frame, now)
            if assembly is None:
                return
        elif assembly.total != total or row.answer_kind is not frame.kind:
            raise ProtocolError(
                f"answer to request {row.id}: a fragment of a {frame.kind.name} of {total} bytes, after one of a {row.answer_kind.name} "
                f"of {assembly.total} bytes",
                code="changed",
            )
        if assembly.add(frame.offset, body):
            self._finish(row, assembly.message, frame.kind, now)
        elif self._retries or row.retry_at is not None:
            self._postpone(row, now)

    def _begin(self, row: Request, frame: Frame, now: float) -> Assembly | None:
        """Make room for an answer; None where there is none now."""
        total = frame.total
        if self._budget.reserve(total):
            try:
                assembly = Assembly(total)
            except MemoryError:
                self._budget.release(total)
            else:
                self.held += total
                row.assembly, row.answer_kind = assembly, frame.kind
                return assembly
        elif total > self._budget.limit:
            self._finish(row, bytearray(b"".join(self._overloaded())), FrameKind.FAILURE, now)
            return None
        self._ask_later(row, now)
        return None

    def _ask_later(self, row: Request, now: float) -> None:
        """There is no room for an answer, which the answerer keeps: ask for it again when there may be."""
        row.received = True
        self._postpone(row, now)

    def received(self, frame: Frame, now: float) -> None:
        """The answerer has all of a request."""
        row = self._row(frame)
        if row is not None and not row.cancelled:
            row.received = True
            self._outbox.withdraw(row)
            if self._retries:
                self._postpone(row, now)

    def unknown(self, frame: Frame) -> None:
        """The answerer has not got all of a request."""
        row = self._row(frame)
        if row is not None and not row.cancelled:
            row.received = False
            if not row.queued:
                self._resend(row)

    def _row(self, frame: Frame) -> Request | None:
        if frame.id >= self.next_id:
            raise ProtocolError(f"{frame.kind.name} about request {frame.id}, but this side has made {self.next_id - 1}", code="unasked")
        return self.rows.get(frame.id)

    # ---- channel and time

    def sent(self, row: Request, now: float) -> None:
        """All of a request has gone out."""
        row.sent_at = now
        if self._retries:
            if not row.interval:
                row.interval = self._first_interval()
            self._postpone(row, now)

    def detach(self) -> None:
        """The channel is gone: nothing is retried until there is another one."""
        self._retries = False
        for row in self.rows.values():
            if row.retry_at is not None:
                row.retry_at = None
                self.agenda.set(row.id, row.deadline)

    def attach(self, reliable: bool, now: float) -> None:
        """A new channel, `reliable` or not: what became of what the old one carried?"""
        self._retries = not reliable
        for row in list(self.rows.values()):
            if row.started and not row.queued:
                self.resent += 1
                self._ask(row)
                if self._retries:
                    self._postpone(row, now)

    def tick(self, now: float) -> None:
        """Expire and retry what is due."""
        for id in self.agenda.take(now):
            row = self.rows[id]
            if now >= row.deadline:
                self._resolve(row)
                if not row.cancelled:
                    self._effects.append(Expired(row.name))
            else:
                row.interval = min(2 * (row.interval or self._first_interval()), LAST_RETRY)
                self.resent += 1
                self._ask(row)
                self._postpone(row, now)

    def unresolved(self) -> bytes:
        """What a heartbeat tells: an id, and the ids below it that are unresolved. Empty where the watermark says as much.

        Below that id, everything else is resolved.
        """
        self.untold = 0
        rows = self.rows
        if len(rows) == self.next_id - self.watermark:
            return b""
        most = min(UNRESOLVED, self._outbox.frame_bytes // 8 - 1)
        if most < 1:
            return b""
        ids = list(islice(rows, most + 1))
        horizon = ids.pop() if len(ids) > most else self.next_id
        return struct.pack(f"<{1 + len(ids)}Q", horizon, *ids)

    def told(self) -> None:
        """A frame goes out, and its watermark."""
        if len(self.rows) == self.next_id - self.watermark:
            self.untold = 0

    def clear(self) -> list[int]:
        """The session ends; returns the ids that the driver still waits for."""
        names = [row.name for row in self.rows.values() if not row.cancelled]
        self._budget.release(self.held)
        self.held = 0
        self.rows.clear()
        self.agenda.clear()
        self.watermark = self.next_id
        return names

    # ---- shared

    def _ask(self, row: Request) -> None:
        """Find out about a request, or send it again. See Note [Resending]."""
        row.resent = True
        if row.cancelled and self._safeguards.propagate_cancel:
            self._outbox.control[FrameKind.CANCEL, row.id] = None
        elif (row.received or row.total > SMALL) and self._safeguards.retry_same_id:
            if not row.queued:
                self._outbox.control[FrameKind.PROBE, row.id] = None
        else:
            self._resend(row)

    def _resend(self, row: Request) -> None:
        if not self._safeguards.retry_same_id and not row.queued:
            del self.rows[row.id]
            self.agenda.remove(row.id)
            row.id = self.next_id
            self.next_id += 1
            self.rows[row.id] = row
            self.agenda.set(row.id, row.deadline)
            self.watermark = next(iter(self.rows))
        self._outbox.put(row)

    def _first_interval(self) -> float:
        return min(max(FIRST_RETRY, 4 * (self.round_trip or 0.0)), LAST_RETRY)

    def _postpone(self, row: Request, now: float) -> None:
        if not row.interval:
            row.interval = self._first_interval()
        row.retry_at = retry_at = now + row.interval
        self.agenda.set(row.id, min(retry_at, row.deadline))

    def _finish(self, row: Request, message: bytearray | memoryview, kind: FrameKind, now: float) -> None:
        if not row.resent and row.sent_at is not None:
            sample = now - row.sent_at
            self.round_trip = sample if self.round_trip is None else self.round_trip + (sample - self.round_trip) / 8
        self.untold += len(message) + OVERHEAD
        self._resolve(row)
        if self.untold > UNTOLD_BYTES:
            self._outbox.control[FrameKind.HEARTBEAT, 0] = None
        self._effects.append(Answered(row.name, message, kind is FrameKind.FAILURE))

    def _resolve(self, row: Request) -> None:
        id = row.id
        del self.rows[id]
        self.agenda.remove(id)
        self._outbox.withdraw(row)
        self._drop_assembly(row)
        if id == self.watermark:
            self.watermark = next(iter(self.rows), self.next_id)

    def _drop_assembly(self, row: Request) -> None:
        assembly = row.assembly
        if assembly is not None:
            row.assembly = None
            self.held -= assembly.total
            self._budget.release(assembly.total)
