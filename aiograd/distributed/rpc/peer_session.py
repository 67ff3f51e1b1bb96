"""PeerSession: drives one session with a peer over a sequence of channels.

The pure `RpcSession` decides; this carries out its effects: it moves frames between session and channel, resolves the futures of answers, and keeps
one timer; `request_handlers` runs the handlers of the peer's requests. A session that loses its channel tells its owner (a `Peer`), which dials again
or declares it lost.

Note [A blocked loop]
    A loop that was blocked (a slow import, a compilation, a debugger, a process that was stopped) runs its timers before it has read the frames
    that came meanwhile, so every peer seems silent. If a tick is late by more than half a heartbeat, the delay is
    not counted as silence. If it is late by the whole time after which a peer is lost, peers have most likely given up this worker, although the
    socket is open: only heartbeats are sent until one comes back, and the silence of the peer is counted anew.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable
from typing import Any, Protocol

from aiograd.distributed import failpoints
from aiograd.distributed.error_wire import from_wire
from aiograd.distributed.failpoints import RequestPoints
from aiograd.distributed.rpc.codec import NOTHING, decode, encode, message_size
from aiograd.distributed.rpc.earlier_requests import EarlierRequests, PendingRequest
from aiograd.distributed.rpc.effects import Abandon, Answered, Deliver, Expired, SessionEnded
from aiograd.distributed.rpc.failure_detector import FailureDetector
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.outbound import OutboundRequest
from aiograd.distributed.rpc.outbound_room import OutboundRoom
from aiograd.distributed.rpc.pulse import Pulses
from aiograd.distributed.rpc.request_handlers import HandlingPeer, RequestHandlers
from aiograd.distributed.rpc.secure_channel import SecureChannel
from aiograd.distributed.rpc.session import RpcSession
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import DeadlineError, DistributedError

#: ticks are at least this far apart, in seconds
TICK = 0.002

class SessionOwner(HandlingPeer, Protocol):
    """The part of a `Peer` that its sessions use."""

    def disconnected(self, session: PeerSession, why: BaseException | None) -> None:
        """Called when a session has lost its channel."""

    def left(self, session: PeerSession) -> None:
        """Called when the peer has said goodbye."""

    def timed_out(self, session: PeerSession) -> None:
        """Called when the peer has been silent for too long."""

    def loss(self, session: PeerSession, reason: str, stage: str, cause: BaseException | None) -> DistributedError:
        """The error for a request that waits."""


class PeerSession:
    """One session with one peer.

    Args:
        peer: the owner of the session.
        rpc_session: a new `RpcSession`.
        dialled: True if this side opened it.
    """

    __slots__ = (
        "peer", "rpc_session", "dialled", "id", "identity", "channel", "attached_at", "short_lived", "round_trip", "trouble",
        "detector", "pulses", "is_lost", "is_confirmed", "is_used", "successor",
        "_loop", "_context", "_requests", "_handlers", "_blocked", "_timer", "_timer_at", "_tolerance", "_room", "_earlier",
        "_is_doubted", "spared_since", "_first_spared",
    )  # fmt: skip

    def __init__(self, peer: SessionOwner, rpc_session: RpcSession, *, dialled: bool) -> None:
        self.peer: SessionOwner = peer
        self.rpc_session: RpcSession = rpc_session
        self.dialled: bool = dialled
        #: id of the session and identity of the peer; known after the first handshake
        self.id: bytes = b""
        self.identity: PeerIdentity | None = None
        self.channel: SecureChannel | None = None
        self.is_lost: bool = False
        #: True if a frame of this session has come from the peer, so that both sides have it
        self.is_confirmed: bool = False
        #: True if either side has ever sent a request in it
        self.is_used: bool = False
        #: the session to which the requests of this one move after its end
        self.successor: PeerSession | None = None
        self._loop = peer.loop
        self._context: contextvars.Context = peer.context
        #: when the peer is lost: counted from when it was last heard or, before that, first dialled
        self.detector: FailureDetector = rpc_session.detector
        now = self._loop.time()
        self.detector.begin(now)
        self.detector.is_patient = True
        #: of the latest handshake
        self.pulses: Pulses | None = None
        self.attached_at: float = -math.inf
        #: the number of short-lived channels in a row
        self.short_lived: int = 0
        #: round trip of the handshake of the latest channel, in seconds
        self.round_trip: float = 0.0
        #: the reason why there is no channel
        self.trouble: BaseException | None = None
        self._requests: dict[int, PendingRequest] = {}
        self._handlers = RequestHandlers(self)
        self._blocked = False
        #: True if the peer seems silent and the loop takes one more turn to read the bytes that wait
        self._is_doubted = False
        #: see `WorkerLostError`; and the id of the first request made since then
        self.spared_since: float = math.inf
        self._first_spared = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        #: seconds by which a tick may be late
        self._tolerance = peer.limits.heartbeat / 2
        #: for bytes of unanswered requests
        self._room = OutboundRoom(peer.limits.bytes_per_peer)
        self._earlier = EarlierRequests(self, peer.loop, peer.context, peer.limits.silence)
        self._arm(now)

    # ---- requests of this side

    async def request(self, kind: int, value: Any, timeout: float) -> Any:
        """Send a request to the peer. See `Endpoint.request`."""
        limits = self.peer.limits
        message = encode(value, limits)
        size = message_size(message)
        self.is_used = True
        left = timeout
        if not self._room.take(size):
            left = await self._wait_for_room(kind, size, timeout)
            if self.successor is not None:
                return await self.successor.request(kind, value, left)
        answer: asyncio.Future[Any] = self._loop.create_future()
        now = self._loop.time()
        if now > self._timer_at + self._tolerance:
            self._excuse(now)
        try:
            id = self.rpc_session.request(kind, message, left, now)
        except BaseException:
            self._room.release(size)
            raise
        del message
        request = self._requests[id] = PendingRequest(self, id, answer, kind, size, timeout, value)
        self.pump(now)
        if (points := self.peer.failpoints.get(kind)) is not None:
            failpoints.reach(points.request_sent)
        try:
            return await answer
        except asyncio.CancelledError:
            request.session.give_up(request)
            raise
        finally:
            del answer, request  # else an error's traceback keeps this frame, which keeps the error

    def give_up(self, request: PendingRequest) -> None:
        """Cancel a request that its caller has abandoned."""
        id = request.id
        if self._requests.get(id) is request:
            self._forget(id)
            now = self._loop.time()
            self.rpc_session.cancel(id, now)
            self.pump(now)
            return
        if self._earlier.drop(request):
            self._room.release(request.size)

    async def _wait_for_room(self, kind: int, size: int, seconds: float) -> float:
        """Wait until `size` more bytes of requests may be outstanding, and reserve them; returns the rest of `seconds`."""
        started = self._loop.time()
        await self._room.wait(size, self._context, started + seconds, self._late(kind, seconds))
        if self.is_lost and self.successor is None:  # in the same moment in which room was granted
            raise self.peer.loss(self, "it was lost while this waited to be sent", self._stage(kind), self.trouble)
        left = seconds - (self._loop.time() - started)
        if left <= 0:
            self._room.release(size)
            raise self._late(kind, seconds)
        return left

    def _forget(self, id: int) -> PendingRequest | None:
        request = self._requests.pop(id, None)
        if request is not None:
            self._room.release(request.size)
        return request

    @property
    def handlers(self) -> list[asyncio.Task[None]]:
        """The tasks of running handlers, including the ones that are being cancelled."""
        return self._handlers.tasks

    # ---- frames

    def _frame(self, frame: Buffer, body: memoryview | None) -> None:
        now = self._loop.time()
        self.is_confirmed = True
        rpc_session = self.rpc_session
        rpc_session.receive(frame, now, body)
        if rpc_session.effects:
            self._apply()
        self.pump(now)

    def _apply(self) -> None:
        effects = self.rpc_session.effects
        while effects:
            effect = effects.popleft()
            if isinstance(effect, Answered):
                self._answered(effect)
            elif isinstance(effect, Deliver):
                self.is_used = True
                self.spared_since = math.inf
                self._handlers.begin(effect)
            elif isinstance(effect, Abandon):
                self._handlers.abandon(effect.id)
            elif isinstance(effect, Expired):
                request = self._forget(effect.id)
                if request is not None and not request.answer.done():
                    request.answer.set_exception(self._late(request.kind, request.timeout))
            elif isinstance(effect, SessionEnded):
                self._earlier.settle(effect.session, effect.first)
            else:
                self.peer.left(self)

    def _answered(self, effect: Answered) -> None:
        if effect.id >= self._first_spared:
            self.spared_since = math.inf
        request = self._forget(effect.id)
        if request is None or request.answer.done():
            return
        try:
            value = None if effect.message == NOTHING[0] else decode(effect.message, self.peer.limits)
        except Exception as error:
            request.answer.set_exception(error)
            return
        if effect.failed:
            request.answer.set_exception(from_wire(value, self.peer.name))
        else:
            request.answer.set_result(value)

    def pump(self, now: float, points: RequestPoints | None = None) -> None:
        """Send frames while the channel accepts them; `points.answer_begun` is reached between two frames."""
        channel, rpc_session = self.channel, self.rpc_session
        if channel is not None and rpc_session.has_output and (not self._blocked or channel.has_room):
            while (frame := rpc_session.next_frame(now, self._blocked)) is not None:
                self._blocked = not channel.send(frame)
                if channel.frame_bytes != rpc_session.frame_bytes:
                    rpc_session.resize(channel.frame_bytes)
                if not channel.has_room or not rpc_session.has_output:
                    break
                if points is not None and points.answer_begun:
                    channel.flush()
                    failpoints.reach(points.answer_begun)
            channel.flush()
        self._arm(now)

    def _writable(self) -> None:
        self._blocked = False
        if self.channel is not None:
            self.rpc_session.resize(self.channel.frame_bytes)
        self.pump(self._loop.time())

    # ---- channels

    def attach(self, channel: SecureChannel) -> None:
        """Continue over `channel`, which has been secured for this session. An earlier channel is closed."""
        old, self.channel = self.channel, channel
        now = self._loop.time()
        if old is not None:
            self.rpc_session.detach(now)
            old.close()
        self.attached_at = now
        self.pulses = channel.secured.pulses
        self.round_trip = channel.round_trip
        self.trouble = None
        self._blocked = False
        self.rpc_session.attach(now, channel.frame_bytes, epoch=channel.epoch, peer_epoch=channel.peer_epoch)
        channel.start(self._frame, lambda why: self._disconnected(channel, why), self._writable, self.rpc_session.place)
        if self.channel is channel:
            self.pump(now)

    def _disconnected(self, channel: SecureChannel, why: BaseException | None) -> None:
        if self.channel is not channel:
            return
        self.channel = None
        self.trouble = why
        self._blocked = False
        now = self._loop.time()
        self._excuse(now)
        self.detector.heard(channel.heard_at)
        self.rpc_session.detach(now)
        self._arm(now)
        self.peer.disconnected(self, why)

    def say_goodbye(self) -> None:
        """Tell the peer that this side closes in an orderly way."""
        if self.channel is not None:
            now = self._loop.time()
            self.rpc_session.goodbye(now)
            self.pump(now)

    def lose(self, reason: str, cause: BaseException | None = None, successor: PeerSession | None = None) -> None:
        """End the session: requests that wait for an answer fail, handlers of the peer's requests are cancelled.

        Args:
            reason: completes the sentence "worker 'x' was lost: ...".
            cause: an error that says more than "lost", and is raised instead where it is one of the handshake.
            successor: the session to which requests move that the peer has not run, see Note [Requests that move to the next session]
                in `earlier_requests`.
        """
        if self.is_lost:
            return
        self.is_lost = True
        self.successor = successor
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()
        requests, self._requests = self._requests, {}

        def loss(kind: int) -> DistributedError:
            return self.peer.loss(self, reason, self._stage(kind), cause)

        if successor is not None:
            moved = {requests.pop(outbound.id): outbound for outbound in self.rpc_session.unresolved() if outbound.id in requests}
            successor._earlier.inherit(self.id, moved, loss, not self.is_confirmed)
            successor._earlier.predecessor = self.id
        self.rpc_session.fail_all()
        for request in requests.values():
            request.fail(loss)
        self._earlier.end(None if successor is None else successor._earlier)
        self._room.close(None if successor is not None else lambda: self.peer.loss(self, reason, "waiting to send", cause))
        self._handlers.abandon_all()

    @property
    def has_requests(self) -> bool:
        """True if requests wait for the peer."""
        return bool(self._requests or self._room.is_awaited or self._earlier)

    # ---- for requests of an earlier session, see `EarlierRequests`

    def take_over(self, request: PendingRequest) -> None:
        """A request is this session's from now on, although it has not been sent in it."""
        request.session, request.id = self, 0
        self._room.add(request.size)
        self.is_used = True

    def repeat(self, request: PendingRequest, outbound: OutboundRequest, now: float) -> None:
        """Send a request that has been taken over."""
        request.id = self.rpc_session.repeat(outbound, now)
        self._requests[request.id] = request

    def lost_for(self, request: PendingRequest, loss: Callable[[int], DistributedError]) -> None:
        """Fail a request that has been taken over and ends without an answer."""
        self._room.release(request.size)
        request.fail(loss)

    def late_for(self, request: PendingRequest) -> DistributedError:
        """The error for a request that is past its deadline."""
        return self._late(request.kind, request.timeout)

    def settled(self, now: float) -> None:
        """Requests may have been repeated."""
        self.pump(now)

    # ---- time

    def left(self) -> float:
        """Seconds left to reach the peer while there is no channel."""
        self._excuse(now := self._loop.time())
        return self.detector.deadline - now

    def pulse(self, message: bytes) -> bool:
        """Take a pulse of the peer's watchdog; False where it is none of this session. See Note [Pulses] in `pulse`."""
        pulse = None if self.pulses is None else self.pulses.take(message)
        if pulse is None:
            return False
        self.detector.is_patient = False
        if pulse.seconds:
            self.detector.held(self._loop.time(), pulse.seconds, pulse.line)
        return True

    def _excuse(self, now: float) -> None:
        """If the tick is late, do not count the delay as silence of the peer. See Note [A blocked loop]."""
        late = now - self._timer_at
        if late <= self._tolerance:
            return
        self.spared_since, self._first_spared = self._timer_at, self.rpc_session.next_id
        self._timer_at = now  # once
        is_long = late >= self.peer.limits.silence
        self.detector.excuse(now if is_long else min(self.detector.last + late, now))
        if is_long:
            self.rpc_session.test(now)

    def _arm(self, now: float) -> None:
        """Set the timer so that `_tick` runs when something is due; a timer that fires too early only costs a tick."""
        if self.is_lost or (self._timer is not None and self.channel is not None and self.rpc_session.is_idle_until(self._timer_at)):
            return
        when = self.rpc_session.next_tick()
        if self._is_doubted:
            when = now
        if self.channel is None:
            soon = min(self.detector.deadline, now + self.peer.limits.heartbeat)  # often enough to notice a late tick
            when = soon if when is None or soon < when else when
        if when is None or (self._timer is not None and self._timer_at <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = max(when, now + TICK)
        self._timer = self._loop.call_at(self._timer_at, self._tick, context=self._context)

    def _tick(self) -> None:
        now = self._loop.time()
        self._excuse(now)
        self._timer = None
        self._timer_at = math.inf
        rpc_session = self.rpc_session
        rpc_session.tick(now)
        if rpc_session.effects:
            self._apply()
        if self.is_lost:
            return
        channel = self.channel
        if now >= self.detector.deadline if channel is None else self._is_silent(channel, now):
            self.peer.timed_out(self)
            return
        self.pump(now)

    def _is_silent(self, channel: SecureChannel, now: float) -> bool:
        """True if no byte has come for too long, also after one more turn of the loop, which reads the bytes that wait in the socket."""
        rpc_session = self.rpc_session
        if rpc_session.is_silent(now) and (heard_at := channel.heard_at) > self.detector.last:
            self.detector.heard(heard_at)
        was_doubted, self._is_doubted = self._is_doubted, rpc_session.is_silent(now)
        return was_doubted and self._is_doubted

    # ---- words

    def _stage(self, kind: int) -> str:
        return str(getattr(kind, "name", f"kind {kind}"))

    def _about(self, kind: int) -> str:
        return f"request {self._stage(kind)} to worker {self.peer.name!r}"

    def _late(self, kind: int, timeout: float) -> DeadlineError:
        connected = "no" if self.channel is None else "yes"
        return DeadlineError(
            f"{self._about(kind)} did not end within {timeout:g} s (connected: {connected}); allow more time, or see what that worker is doing"
        )
