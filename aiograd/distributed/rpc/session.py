"""RpcSession: requests that run at most once and answers that arrive, between two workers, over channels that break and are replaced.

A session belongs to one peer and outlives its channels: when one closes, the next one is attached and nothing is lost or done twice. It
decides and does nothing else: frames, times and requests come in, frames to send and effects to carry out come out.
Requests go both ways at the same time; `outbound` has the requester's side of it, `inbound` the answerer's, `outbox` the order in which
frames leave.

Note [Heartbeats]
    A side that has sent nothing for `Limits.heartbeat` sends a heartbeat; each sixth of the silence while requests are not resolved, either way, and
    for a while after the last message. The peer counts from the frame before (Note [When a peer is silent] in `failure_detector`), so where a
    loop that is held up cannot tell, nothing is lost before five sixths of the silence: 1.25 s by default, less the way of a frame.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiograd.distributed.rpc.budget import PeerBudget
from aiograd.distributed.rpc.effects import Abandon, Answered, Deliver, Effect, Expired, PeerLeft, SessionEnded
from aiograd.distributed.rpc.failure_detector import FailureDetector
from aiograd.distributed.rpc.frame_age import FrameAge, clock
from aiograd.distributed.rpc.frames import HEADER, FrameKind, destination, pack_header, parse
from aiograd.distributed.rpc.inbound import InboundRequest, InboundRequests
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.outbound import OutboundRequest, OutboundRequests
from aiograd.distributed.rpc.outbox import SessionOutbox
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import ProtocolError

__all__ = ["Abandon", "Answered", "Deliver", "Effect", "Expired", "SessionEnded", "PeerLeft", "RpcSession", "SessionStatistics"]

#: control frames that may wait to be sent, in multiples of the requests a peer may run, and in any case
CONTROL_PER_REQUEST = 4
CONTROL_ANYWAY = 1024
#: seconds between signs of life while a channel is tested
TEST = 0.02
#: heartbeats in the silence, at least, while there is work, see Note [Heartbeats]; and how many times the silence after it
WORKING, LINGER = 6, 4
#: the longest time that fits the header, milliseconds
LONGEST_MS = 0xFFFF_FFFF

_REQUEST, _RESPONSE, _FAILURE, _RECEIVED, _PROBE, _CANCEL, _UNKNOWN, _HEARTBEAT, _GOODBYE, _ENDED = FrameKind


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Figures of one session.

    Attributes:
        outstanding: requests of this side that are not resolved.
        running: requests of the peer that are arriving or run.
        remembered: requests of the peer that are not forgotten yet, running or not.
        bytes_held: bytes reserved from the budget, for messages that arrive and requests that run.
        bytes_stored: bytes of answers kept until the peer has them.
        bytes_unsent: bytes of messages that no frame has carried yet.
        frames_in, frames_out, bytes_in, bytes_out: the frames and bytes that channels have carried.
        resent: times that a request was sent again or asked after.
        round_trip: see `PeerStatistics`.
    """

    outstanding: int
    running: int
    remembered: int
    bytes_held: int
    bytes_stored: int
    bytes_unsent: int
    frames_in: int
    frames_out: int
    bytes_in: int
    bytes_out: int
    resent: int
    round_trip: float | None


class RpcSession:
    """One side of a session with one peer. Times are seconds on any clock that never goes back.

    Args:
        limits: limits on messages and requests of the peer.
        budget: that messages of the peer are charged to.
        overloaded, too_long: the failures that refuse a request, for lack of room (made by a call), and for being longer than `message_bytes`.

    Attributes:
        effects: the commands to the `PeerSession`, in order; it removes them as it carries them out.
        detector: when the peer is lost, if nothing comes from it.
    """

    __slots__ = (
        "effects", "detector",
        "_limits", "_budget", "_outbox", "_requests", "_answers", "_most_control", "_frames_in", "_frames_out", "_bytes_in", "_bytes_out",
        "_linger", "_attached", "_leaving", "_ended", "_tested_at", "_heartbeat_at", "_ticked_at", "_often", "_busy_until", "_epoch", "_age",
    )  # fmt: skip

    def __init__(self, limits: Limits, budget: PeerBudget, *, overloaded: Callable[[], Sequence[Buffer]] = tuple, too_long: Any = ()) -> None:
        self.effects: deque[Effect] = deque()
        self.detector: FailureDetector = FailureDetector(limits, 0.0)
        self._limits = limits
        self._budget = budget
        self._outbox = SessionOutbox(limits.frame_bytes)
        self._requests = OutboundRequests(limits, budget, self._outbox, self.effects, overloaded)
        self._answers = InboundRequests(limits, budget, self._outbox, self.effects, overloaded, too_long=too_long)
        self._most_control = CONTROL_PER_REQUEST * limits.requests_per_peer + CONTROL_ANYWAY
        self._linger = LINGER * limits.silence
        self._attached = False
        self._leaving = False
        self._ended: deque[SessionEnded] = deque()
        self._tested_at = math.inf  # since when the channel is tested
        self._heartbeat_at = 0.0
        self._often = min(limits.heartbeat, limits.silence / WORKING)
        self._busy_until = -math.inf
        #: the start of the clock in the headers of frames; and the ages of the peer's frames
        self._epoch = 0.0
        self._age = FrameAge(math.inf, 0.0)
        self._ticked_at = 0.0
        self._frames_in = self._frames_out = self._bytes_in = self._bytes_out = 0

    # ---- requester

    @property
    def next_id(self) -> int:
        """Id of the next request."""
        return self._requests.next_id

    def request(self, kind: int, message: Sequence[Buffer], timeout: float, now: float) -> int:
        """Ask the peer for something. `Answered` or `Expired` follows, unless it is cancelled or the session ends.

        Args:
            kind: the kind of the request, 0 to 255.
            message: its buffers; they must not change before the answer, since they may have to be sent again.
            timeout: seconds that the answer is waited for.
            now: seconds.

        Returns:
            The id of the request.

        Raises:
            LimitError: the message is above `Limits.message_bytes`. ArgumentError: `timeout` is no finite number, or no such `kind`.
        """
        return self._requests.add(kind, message, timeout, now)

    def cancel(self, id: int, now: float) -> None:
        """The answer to a request is not wanted any more; the peer is told to abandon it. Nothing is reported for it afterwards."""
        self._requests.cancel(id)

    def unresolved(self) -> list[OutboundRequest]:
        """Requests of this side that were not answered, expired ones and cancelled ones excepted, in order."""
        return [request for request in self._requests.requests.values() if not request.cancelled]

    def repeat(self, request: OutboundRequest, now: float) -> int:
        """Send a request of another session again, which has ended without running it; returns the new id."""
        return self._requests.repeat(request, now)

    # ---- answerer

    @property
    def delivered(self) -> int:
        """The highest id of a request of the peer that was delivered; stays when the session ends."""
        return self._answers.delivered

    def tell_ended(self, ended: SessionEnded) -> None:
        """Tell the peer which requests were delivered in an earlier session."""
        self._ended.append(ended)

    def respond(self, id: int, message: Sequence[Buffer], now: float, failed: bool = False, hold: float = 0.0) -> None:
        """Answer a request that was delivered. Ignored if the caller no longer waits.

        Args:
            id: from `Deliver`.
            message: its buffers; they must not change until the peer has resolved the request, since they may have to be sent again.
            now: seconds.
            failed: the answer is an error.
            hold: seconds for which it may wait for something else that is sent; 0: it does not.

        Raises:
            LimitError: the message is above `Limits.message_bytes`; the request still runs and can be answered with a failure.
        """
        self._answers.respond(id, message, failed, now + hold if hold else None)

    # ---- channel

    def attach(self, now: float, frame_bytes: int | None = None, *, epoch: float | None = None, peer_epoch: float = math.inf) -> None:
        """Attach a new channel. Messages that the one before may have lost are asked after.

        Args:
            now: seconds.
            frame_bytes: bytes after the header of a frame, at most, where the peer takes less than `Limits.frame_bytes`.
            epoch: when this side's clock began of which frames tell; None: now.
            peer_epoch: when something came that the peer sent as its clock began; see Note [Deadlines] in `frame_age`.
        """
        self.detach(now)
        self._epoch = now if epoch is None else epoch
        self._age = FrameAge(peer_epoch, now)
        limit = self._limits.frame_bytes
        cut = self._outbox.interrupt(limit if frame_bytes is None else min(frame_bytes, limit))
        self._attached = True
        self._tested_at = math.inf
        self._ticked_at = now
        self.detector.begin(now)
        self._heartbeat_at = now + self._limits.heartbeat
        self._answers.attach(cut)
        self._requests.attach()
        if self._requests.unacknowledged:
            self._outbox.control[_HEARTBEAT, 0] = None

    @property
    def frame_bytes(self) -> int:
        """Bytes after the header of a frame, at most."""
        return self._outbox.frame_bytes

    def resize(self, frame_bytes: int) -> None:
        """Cut messages into frames of so many bytes from now on, at most `Limits.frame_bytes`."""
        self._outbox.resize(min(frame_bytes, self._limits.frame_bytes))

    def test(self, now: float) -> None:
        """Send nothing but signs of life until one comes back, so that it is known whether messages can arrive."""
        if self._attached:
            self._tested_at = self._heartbeat_at = now

    def detach(self, now: float) -> None:
        """The channel is gone. Requests and handlers go on; messages that were arriving do not. Idempotent."""
        self._attached = False
        self.detector.forget()
        self._outbox.control.clear()
        self._requests.detach()
        self._answers.detach()

    def place(self, header: Buffer) -> memoryview | None:
        """Memory for the body of a frame after its header has come, if it continues a message; the frame need not be authenticated yet.

        See Note [Bodies in place] in `reassembly`. A call of `receive` with this memory follows, or none at all.
        """
        kind, id, offset, length = destination(header)
        requests: Mapping[int, InboundRequest | OutboundRequest] = self._answers.requests if kind == _REQUEST else self._requests.requests
        request = requests.get(id)
        return None if request is None or request.assembly is None else request.assembly.place(offset, length)

    def receive(self, frame: Buffer, now: float, body: memoryview | None = None) -> None:
        """Take a frame from the channel.

        Args:
            frame: all of it, or its header where there is `body`.
            now: seconds.
            body: the rest of the frame, in memory that is given away or that `place` gave for it.

        Raises:
            ProtocolError: it makes no sense, and the channel must be closed. Nothing of it was applied, except what its header says is
                resolved.
        """
        parsed = parse(frame, self._limits, body)
        kind = parsed.kind
        self.detector.heard(now)
        age = self._age.of(parsed.sent_ms, now)
        if now > self._tested_at + TEST / 2:  # not one that had been waiting
            self._tested_at = math.inf
        self._frames_in += 1
        self._bytes_in += HEADER.size + len(parsed.body)
        answers = self._answers
        if parsed.watermark > answers.watermark:
            answers.resolved_below(parsed.watermark)
        if kind is _REQUEST:
            self._busy_until = now + self._linger
            self._heartbeat_at = min(self._heartbeat_at, now + self._often)
            answers.request(parsed, now, age)
        elif kind is _RESPONSE or kind is _FAILURE:
            self._requests.answered(parsed, now)
        elif kind is _RECEIVED:
            self._requests.received(parsed)
        elif kind is _PROBE:
            answers.probe(parsed)
        elif kind is _CANCEL:
            answers.cancel(parsed)
        elif kind is _UNKNOWN:
            self._requests.unknown(parsed)
        elif kind is _HEARTBEAT:
            if parsed.body:
                answers.resolved_but(parsed.body)
        elif kind is _ENDED:
            self.effects.append(SessionEnded(bytes(parsed.body), parsed.id))
        else:
            self.effects.append(PeerLeft())
        if len(self._outbox.control) > self._most_control:
            raise ProtocolError(
                f"{len(self._outbox.control)} replies wait to be sent to the peer, expected at most {self._most_control}; it asks and does not read",
                code="flood",
            )

    @property
    def has_output(self) -> bool:
        """True if `next_frame` may have something."""
        return self._attached and (bool(self._outbox) or self._leaving or bool(self._ended))

    @property
    def unsent(self) -> int:
        """Bytes of messages that no frame has carried yet: the amount by which callers are held back."""
        return self._outbox.unsent

    def next_frame(self, now: float, is_full: bool = False) -> tuple[Buffer, ...] | None:
        """The next frame to send: its header and slices of a message, one after the other; a control frame where `is_full`. None: there is none."""
        outbox, requests = self._outbox, self._requests
        if not self._attached or (is_full and not outbox.control and not self._leaving):
            return None
        if outbox.held_until != math.inf and self.has_output:
            outbox.release()
        if requests.unacknowledged:
            requests.told()
        if self._ended:
            session, first = self._ended.popleft()
            return self._out(pack_header(_ENDED, first, (session,), sent_ms=clock(now, self._epoch), watermark=requests.watermark), (session,), now)
        control = outbox.control
        while control:
            kind, id = control.popitem(last=False)[0]
            if (kind is _PROBE or kind is _CANCEL) and id not in requests.requests:
                continue  # resolved in the meantime
            body = requests.unresolved() if kind is _HEARTBEAT else b""
            return self._out(pack_header(kind, id, (body,), sent_ms=clock(now, self._epoch), watermark=requests.watermark), (body,), now)
        if self._leaving and not outbox.has_small:
            return self._goodbye(now)
        if is_full or self._tested_at != math.inf:
            return None
        while (taken := outbox.take()) is not None:
            message, offset, parts = taken
            deadline_ms = 0
            self._busy_until = now + self._linger
            if type(message) is OutboundRequest:
                left = message.deadline - now
                if left <= 0:  # its expiry is in the timer queue
                    outbox.withdraw(message)
                    continue
                deadline_ms = min(int(left * 1000) or 1, LONGEST_MS)
                message.started = True
                if message.offset == message.total:
                    message.sent_at = now
            header = pack_header(
                message.frame_kind,
                message.id,
                parts,
                request_kind=message.request_kind,
                offset=offset,
                total=message.total,
                deadline_ms=deadline_ms,
                sent_ms=clock(now, self._epoch),
                watermark=requests.watermark,
            )
            return self._out(header, parts, now)
        return None

    def _out(self, header: bytes, parts: Sequence[Buffer], now: float) -> tuple[Buffer, ...]:
        self._heartbeat_at = now + self._interval(now)
        self._frames_out += 1
        size = HEADER.size
        for part in parts:
            size += len(part)
        self._bytes_out += size
        return (header, *parts)

    def _interval(self, now: float) -> float:
        """Seconds from a frame to the heartbeat that follows if nothing else does; see Note [Heartbeats]."""
        if self._tested_at != math.inf:
            return TEST
        return self._often if self._requests.requests or self._answers.requests or now < self._busy_until else self._limits.heartbeat

    def _goodbye(self, now: float) -> tuple[Buffer, ...]:
        self._leaving = False
        self._attached = False
        return self._out(pack_header(_GOODBYE, 0, sent_ms=clock(now, self._epoch), watermark=self._requests.watermark), (), now)

    # ---- time

    def tick(self, now: float) -> None:
        """Run due timers; harmless when there are none."""
        self._ticked_at = now
        if now >= self._outbox.held_until:
            self._outbox.release()
        self._requests.tick(now)
        self._answers.tick(now)
        if self._attached and now >= self._heartbeat_at:
            self._heartbeat_at = now + self._interval(now)
            self._outbox.control[_HEARTBEAT, 0] = None

    def next_tick(self) -> float | None:
        """When `tick` is next needed, seconds; None for never. It is asked for after anything else was called."""
        soonest = self._requests.timers.next()
        when = self._answers.timers.next()
        if when is not None and (soonest is None or when < soonest):
            soonest = when
        if self._attached:
            if soonest is None or self._heartbeat_at < soonest:
                soonest = self._heartbeat_at
            if self._outbox.held_until < soonest:
                soonest = self._outbox.held_until
            if self._ticked_at < (when := self.detector.deadline) < soonest:
                soonest = when
        return soonest

    def is_idle_until(self, when: float) -> bool:
        """True if `tick` is not needed before `when`, where it was not when `next_tick` was asked last. Cheaper than that."""
        return (
            self._heartbeat_at >= when
            and self._outbox.held_until >= when
            and self._requests.timers.is_idle_until(when)
            and self._answers.timers.is_idle_until(when)
        )

    def is_silent(self, now: float) -> bool:
        """True if the peer is lost, although there is a channel: nothing came from it for too long."""
        return self._attached and now >= self.detector.deadline

    # ---- end

    def goodbye(self, now: float) -> None:
        """Tell the peer that this side leaves: after waiting answers of one frame, before the rest of larger messages.

        Nothing is sent after it.
        """
        self._leaving = True

    def fail_all(self) -> list[int]:
        """The session ends: forget everything and give back its bytes.

        Returns:
            Ids of requests of this side that are unresolved, cancelled ones excepted. Handlers that run are for the `PeerSession` to cancel.
        """
        self._attached = False
        self._outbox.clear()
        self._answers.clear()
        self.effects.clear()
        return self._requests.clear()

    def statistics(self) -> SessionStatistics:
        """Figures as they are now."""
        requests, answers = self._requests, self._answers
        return SessionStatistics(
            outstanding=len(requests.requests),
            running=answers.running,
            remembered=len(answers.requests),
            bytes_held=requests.held + answers.held,
            bytes_stored=answers.stored,
            bytes_unsent=self._outbox.unsent,
            frames_in=self._frames_in,
            frames_out=self._frames_out,
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            resent=requests.resent,
            round_trip=requests.round_trip,
        )
