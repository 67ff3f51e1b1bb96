"""PeerSession: drives one session with a peer over a sequence of links.

The pure `Session` decides; this carries out its effects: it moves frames between session and link, runs the handlers of the peer's requests,
resolves the futures of answers, and keeps one timer. When it loses its link it tells its owner (a `Peer`), which dials again or declares it lost.

Note [Context of handlers]
    Handlers and timers run in copies of the context in which the endpoint was opened, not in the context that is current when a frame
    arrives: a ContextVar of one caller must not leak into the handler of another's request.

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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from aiograd.distributed import failpoints
from aiograd.distributed.error_wire import from_wire
from aiograd.distributed.failpoints import RequestPoints
from aiograd.distributed.rpc.codec import NOTHING, decode, encode, message_size
from aiograd.distributed.rpc.effects import Abandon, Answered, Deliver, Expired, Former
from aiograd.distributed.rpc.former_requests import FormerRequests, PendingRequest
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.outbound import OutboundRequest
from aiograd.distributed.rpc.outbound_room import OutboundRoom
from aiograd.distributed.rpc.secure_channel import SecureChannel
from aiograd.distributed.rpc.session import RpcSession
from aiograd.distributed.rpc.timers import running_task
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import DeadlineError, DistributedError, WorkerLostError

#: ticks are at least this far apart, in seconds
TICK = 0.002

#: seconds for which the answer to a request that was served at once is held, where the peer does not wait for it; and the longest such request
HOLD, HOLD_BYTES = 0.005, 64 << 10

#: serves requests: who asks, the kind, the message, and the seconds that are left
Handler: TypeAlias = Callable[[PeerIdentity, int, Any, float], Coroutine[Any, Any, Any]]
#: serves requests that need no task: who asks, and the message; returns True where the peer waits for the answer, which is None
PromptHandler: TypeAlias = Callable[[PeerIdentity, Any], bool]


class SessionOwner(Protocol):
    """The part of a `Peer` that its sessions use."""

    name: str
    principal: str
    limits: Limits
    loop: asyncio.AbstractEventLoop
    context: contextvars.Context
    handler: Handler
    #: by kind of request
    prompt_handlers: Mapping[int, PromptHandler]
    #: by kind of request, where there are any
    failpoints: Mapping[int, RequestPoints]

    @property
    def failure(self) -> Callable[[BaseException, int, Any], Sequence[Buffer]]:
        """Makes the message that tells a peer of an error of a handler."""

    def unlinked(self, conversation: PeerSession, why: BaseException | None) -> None:
        """Called when a session has lost its link."""

    def left(self, conversation: PeerSession) -> None:
        """Called when the peer has said goodbye."""

    def gave_up(self, conversation: PeerSession) -> None:
        """Called when the peer has been silent for too long."""

    def loss(self, conversation: PeerSession, reason: str, stage: str, cause: BaseException | None) -> DistributedError:
        """The error for a request that waits."""


class PeerSession:
    """One session with one peer.

    Args:
        peer: the owner of the session.
        session: a new `Session`.
        dialled: True if this side opened it.
    """

    __slots__ = (
        "peer", "session", "dialled", "id", "identity", "link", "heard", "attached_at", "short_lived", "round_trip", "trouble",
        "is_lost", "is_confirmed", "is_used", "heir",
        "_loop", "_context", "_requests", "_handlers", "_stopping", "_blocked", "_timer", "_timer_at", "_tolerance", "_room", "_former",
        "_is_doubted", "spared_since", "_first_spared",
    )  # fmt: skip

    def __init__(self, peer: SessionOwner, session: RpcSession, *, dialled: bool) -> None:
        self.peer = peer
        self.session = session
        self.dialled = dialled
        #: id of the session and identity of the peer; known after the first handshake
        self.id = b""
        self.identity: PeerIdentity | None = None
        self.link: SecureChannel | None = None
        self.is_lost = False
        #: True if a frame of this session has come from the peer, so that both sides have it
        self.is_confirmed = False
        #: True if either side has ever sent a request in it
        self.is_used = False
        #: the session to which the requests of this one move after its end
        self.heir: PeerSession | None = None
        self._loop = peer.loop
        self._context: contextvars.Context = peer.context
        #: time at which the peer was last heard or, before that, first dialled
        self.heard = self._loop.time()
        self.attached_at = -math.inf
        #: the number of short-lived links in a row
        self.short_lived = 0
        #: round trip of the handshake of the latest link, in seconds
        self.round_trip = 0.0
        #: the reason why there is no link
        self.trouble: BaseException | None = None
        self._requests: dict[int, PendingRequest] = {}
        self._handlers: dict[int, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._blocked = False
        #: True if the peer seems silent and the loop takes one more turn to read the bytes that wait
        self._is_doubted = False
        #: see `WorkerLostError`; and the id of the first request made since then
        self.spared_since = math.inf
        self._first_spared = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        #: seconds by which a tick may be late
        self._tolerance = peer.limits.heartbeat / 2
        #: for bytes of unanswered requests
        self._room = OutboundRoom(peer.limits.bytes_per_peer)
        self._former = FormerRequests(self, peer.loop, peer.context, peer.limits.silence)
        self._arm(self.heard)

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
            if self.heir is not None:
                return await self.heir.request(kind, value, left)
        answer: asyncio.Future[Any] = self._loop.create_future()
        now = self._loop.time()
        if now > self._timer_at + self._tolerance:
            self._excuse(now)
        try:
            id = self.session.request(kind, message, left, now)
        except BaseException:
            self._room.release(size)
            raise
        del message
        request = self._requests[id] = PendingRequest(self, id, answer, kind, size, timeout)
        self._pump(now)
        if (points := self.peer.failpoints.get(kind)) is not None:
            failpoints.reach(points.request_sent)
        try:
            return await answer
        except asyncio.CancelledError:
            request.conversation.give_up(request)
            raise
        finally:
            del answer, request  # else an error's traceback keeps this frame, which keeps the error

    def give_up(self, request: PendingRequest) -> None:
        """Cancel a request whose caller does not wait any more."""
        id = request.id
        if self._requests.get(id) is request:
            self._forget(id)
            now = self._loop.time()
            self.session.cancel(id, now)
            self._pump(now)
            return
        if self._former.drop(request):
            self._room.release(request.size)

    async def _wait_for_room(self, kind: int, size: int, seconds: float) -> float:
        """Wait until `size` more bytes of requests may be outstanding, and reserve them; returns the rest of `seconds`."""
        started = self._loop.time()
        await self._room.wait(size, self._context, started + seconds, self._late(kind, seconds))
        if self.is_lost and self.heir is None:  # in the same moment in which room was granted
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

    # ---- requests of the peer

    async def _serve(self, effect: Deliver) -> None:
        id, kind, message, timeout = effect
        del effect
        value: Any = None
        failed = False
        stop: BaseException | None = None
        answer: Sequence[Buffer]
        peer = self.peer
        try:
            value = decode(message, peer.limits)
            del message
            answer = encode(await peer.handler(self._known(), kind, value, timeout), peer.limits)
        except BaseException as error:
            if isinstance(error, GeneratorExit) and running_task() is not self._handlers.get(id):
                raise  # this coroutine is closed from outside: there is no answer
            if id not in self._handlers:  # abandoned: nobody waits for an answer
                if isinstance(error, SystemExit):
                    return
                raise
            failed = True
            answer = peer.failure(error, kind, value)
            if isinstance(error, KeyboardInterrupt):
                stop = error
        if self._handlers.pop(id, None) is not None:
            now = self._loop.time()
            self.session.respond(id, answer, now, failed)
            points = peer.failpoints.get(kind)
            self._pump(now, points)
            if points is not None:
                failpoints.reach(points.answer_sent)
        if stop is not None:  # somebody at a terminal means the process: it leaves the loop, as out of any task, but the answer goes first
            self._loop.call_soon(_raise, stop)

    def _serve_promptly(self, effect: Deliver, handler: PromptHandler) -> None:
        """Serve a request that needs no task; what is to be sent then goes out with the rest of what came with it."""
        id, kind, message, _ = effect
        value: Any = None
        failed, hold = False, 0.0
        answer: Sequence[Buffer] = NOTHING
        size = len(message)
        try:
            value = decode(message, self.peer.limits)
            if not handler(self._known(), value) and size <= HOLD_BYTES:
                hold = HOLD
        except BaseException as error:
            failed = True
            answer = self.peer.failure(error, kind, value)
            if not isinstance(error, Exception):  # it means the process: see `_serve`
                self._loop.call_soon(_raise, error)
        self.session.respond(id, answer, self._loop.time(), failed, hold)

    def _abandon(self, id: int) -> None:
        task = self._handlers.pop(id, None)
        if task is not None and not task.done():
            self._stopping.add(task)
            task.add_done_callback(self._stopped)
            task.cancel()

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping.discard(task)
        if not task.cancelled():
            task.exception()  # nobody asks for it any more

    @property
    def handlers(self) -> list[asyncio.Task[None]]:
        """The tasks of running handlers, including those that are being cancelled."""
        return [*self._handlers.values(), *self._stopping]

    # ---- frames

    def _frame(self, frame: Buffer, body: memoryview | None) -> None:
        now = self._loop.time()
        self.heard = now
        self.is_confirmed = True
        session = self.session
        session.receive(frame, now, body)
        if session.effects:
            self._apply()
        self._pump(now)

    def _apply(self) -> None:
        effects = self.session.effects
        while effects:
            effect = effects.popleft()
            if isinstance(effect, Answered):
                self._answered(effect)
            elif isinstance(effect, Deliver):
                self.is_used = True
                self.spared_since = math.inf
                prompt = self.peer.prompt_handlers.get(effect.kind)
                if prompt is not None:
                    self._context.copy().run(self._serve_promptly, effect, prompt)
                else:
                    self._handlers[effect.id] = self._loop.create_task(self._serve(effect), context=self._context.copy())
            elif isinstance(effect, Abandon):
                self._abandon(effect.id)
            elif isinstance(effect, Expired):
                request = self._forget(effect.id)
                if request is not None and not request.answer.done():
                    request.answer.set_exception(self._late(request.kind, request.timeout))
            elif isinstance(effect, Former):
                self._former.settle(effect.session, effect.first)
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

    def _pump(self, now: float, points: RequestPoints | None = None) -> None:
        """Send frames while the link accepts them; `points.answer_begun` is reached between two frames."""
        link, session = self.link, self.session
        if link is not None and not self._blocked and session.has_output:
            while (frame := session.next_frame(now)) is not None:
                self._blocked = not link.send(frame)
                if link.frame_bytes != session.frame_bytes:
                    session.resize(link.frame_bytes)
                if self._blocked or not session.has_output:
                    break
                if points is not None and points.answer_begun:
                    link.flush()
                    failpoints.reach(points.answer_begun)
            link.flush()
        self._arm(now)

    def _writable(self) -> None:
        self._blocked = False
        if self.link is not None:
            self.session.resize(self.link.frame_bytes)
        self._pump(self._loop.time())

    # ---- links

    def attach(self, link: SecureChannel) -> None:
        """Continue over `link`, which has been secured for this session. An earlier link is closed."""
        old, self.link = self.link, link
        now = self._loop.time()
        if old is not None:
            self.session.detach(now)
            old.close()
        self.heard = self.attached_at = now
        self.round_trip = link.round_trip
        self.trouble = None
        self._blocked = False
        self.session.attach(now, link.frame_bytes, epoch=link.epoch, peer_epoch=link.peer_epoch)
        link.start(self._frame, lambda why: self._unlinked(link, why), self._writable, self.session.place)
        if self.link is link:
            self._pump(now)

    def _unlinked(self, link: SecureChannel, why: BaseException | None) -> None:
        if self.link is not link:
            return
        self.link = None
        self.trouble = why
        self._blocked = False
        now = self._loop.time()
        self._excuse(now)
        self.heard = max(self.heard, link.heard_at)
        self.session.detach(now)
        self._arm(now)
        self.peer.unlinked(self, why)

    def say_goodbye(self) -> None:
        """Tell the peer that this side closes in an orderly way."""
        if self.link is not None:
            now = self._loop.time()
            self.session.goodbye(now)
            self._pump(now)

    def lose(self, reason: str, cause: BaseException | None = None, heir: PeerSession | None = None) -> None:
        """End the session: requests that wait for an answer fail, handlers of the peer's requests are cancelled.

        Args:
            reason: completes the sentence "worker 'x' was lost: ...".
            cause: an error that says more than "lost", and is raised instead where it is one of the handshake.
            heir: the session to which requests move that the peer has not run, see Note [Requests that move to the next session]
                in `former_requests`.
        """
        if self.is_lost:
            return
        self.is_lost = True
        self.heir = heir
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        link, self.link = self.link, None
        if link is not None:
            link.close()
        requests, self._requests = self._requests, {}

        def loss(kind: int) -> DistributedError:
            return self.peer.loss(self, reason, self._stage(kind), cause)

        if heir is not None:
            rows = {requests.pop(row.id): row for row in self.session.unresolved() if row.id in requests}
            heir._former.inherit(self.id, rows, loss, not self.is_confirmed)
            heir._former.predecessor = self.id
        self.session.fail_all()
        for request in requests.values():
            request.fail(loss)
        self._former.end(None if heir is None else heir._former)
        self._room.close(None if heir is not None else lambda: self.peer.loss(self, reason, "waiting to send", cause))
        for id in list(self._handlers):
            self._abandon(id)

    @property
    def has_requests(self) -> bool:
        """True if requests wait for the peer."""
        return bool(self._requests or self._room.is_awaited or self._former)

    # ---- for requests of an earlier session, see `FormerRequests`

    def take_over(self, request: PendingRequest) -> None:
        """A request is this session's from now on, although it has not been sent in it."""
        request.conversation, request.id = self, 0
        self._room.add(request.size)
        self.is_used = True

    def repeat(self, request: PendingRequest, row: OutboundRequest, now: float) -> None:
        """Send a request that has been taken over."""
        request.id = self.session.repeat(row, now)
        self._requests[request.id] = request

    def lost_for(self, request: PendingRequest, loss: Callable[[int], DistributedError]) -> None:
        """Fail a request that has been taken over and ends without an answer."""
        self._room.release(request.size)
        request.fail(loss)

    def late_for(self, request: PendingRequest) -> DistributedError:
        """The error for a request whose deadline has passed."""
        return self._late(request.kind, request.timeout)

    def settled(self, now: float) -> None:
        """Requests may have been repeated."""
        self._pump(now)

    # ---- time

    def left(self) -> float:
        """Seconds left to reach the peer while there is no link."""
        now = self._loop.time()
        self._excuse(now)
        return self.heard + self.peer.limits.silence - now

    def _excuse(self, now: float) -> None:
        """If the tick is late, do not count the delay as silence of the peer. See Note [A blocked loop]."""
        late = now - self._timer_at
        if late <= self._tolerance:
            return
        self.spared_since, self._first_spared = self._timer_at, self.session.next_id
        self._timer_at = now  # once
        is_long = late >= self.peer.limits.silence
        self.heard = now if is_long else min(self.heard + late, now)
        self.session.last_heard = max(self.session.last_heard, self.heard)
        if is_long:
            self.session.test(now)

    def _arm(self, now: float) -> None:
        """Set the timer so that `_tick` runs when something is due; a timer that fires too early only costs a tick."""
        if self.is_lost or (self._timer is not None and self.link is not None and self.session.is_idle_until(self._timer_at)):
            return
        when = self.session.next_tick()
        if self._is_doubted:
            when = now
        if self.link is None:
            soon = min(self.heard + self.peer.limits.silence, now + self.peer.limits.heartbeat)  # often enough to notice a late tick
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
        session = self.session
        session.tick(now)
        if session.effects:
            self._apply()
        if self.is_lost:
            return
        link = self.link
        if link is None:
            if now >= self.heard + self.peer.limits.silence:
                self.peer.gave_up(self)
                return
        elif self._is_silent(link, now):
            link.close(WorkerLostError(f"nothing was heard for {now - self.heard:.1f} s", worker=self.peer.name, stage="heartbeat"))
            return
        self._pump(now)

    def _is_silent(self, link: SecureChannel, now: float) -> bool:
        """True if no byte has come for too long, also after one more turn of the loop, which reads the bytes that wait in the socket."""
        session = self.session
        if session.is_silent(now):
            self.heard = session.last_heard = max(session.last_heard, link.heard_at)
        was_doubted, self._is_doubted = self._is_doubted, session.is_silent(now)
        return was_doubted and self._is_doubted

    # ---- words

    def _known(self) -> PeerIdentity:
        if self.identity is None:
            raise WorkerLostError(f"worker {self.peer.name!r} asked for something before it was known", worker=self.peer.name)
        return self.identity

    def _stage(self, kind: int) -> str:
        return str(getattr(kind, "name", f"kind {kind}"))

    def _about(self, kind: int) -> str:
        return f"request {self._stage(kind)} to worker {self.peer.name!r}"

    def _late(self, kind: int, timeout: float) -> DeadlineError:
        return DeadlineError(
            f"{self._about(kind)} did not end within {timeout:g} s (connected: {'yes' if self.link is not None else 'no'}); allow more time, or see "
            "what that worker is doing"
        )


def _raise(error: BaseException) -> None:
    raise error
