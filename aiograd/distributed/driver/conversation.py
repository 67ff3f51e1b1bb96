"""Conversation: drives one session with a peer, over whatever links come and go.

The session decides; this carries out: it moves frames between session and link, runs the handlers of what the peer asks, wakes those who
wait for answers, and keeps one timer. When it loses its link it tells its owner (a `Peer`), which finds another or declares it lost.

Note [Whose context]
    Handlers and timers run in copies of the context in which the endpoint was opened, not in that of whoever happened to make a frame
    arrive: a ContextVar of one caller must not leak into the handler of another's request.

Note [A worker that was frozen itself]
    After the process has been stopped for a while, timers are due before the frames that piled up have been read, and every peer looks
    silent. A tick that comes late by more than half a heartbeat is a sign of that, so silence is judged one heartbeat later.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiograd.distributed import failpoints
from aiograd.distributed.codec import decode, encode, message_size
from aiograd.distributed.driver.link import Link
from aiograd.distributed.driver.timers import call_at
from aiograd.distributed.effects import Abandon, Answered, Deliver, Expired
from aiograd.distributed.faults import from_wire
from aiograd.distributed.identity import Identity
from aiograd.distributed.kinds import Kind
from aiograd.distributed.session import Session
from aiograd.distributed.transport import Buffer
from aiograd.errors import DeadlineError, WorkerLostError

if TYPE_CHECKING:
    from aiograd.distributed.driver.peer import Peer

#: ticks are at least this far apart, in seconds
TICK = 0.002


class _Request(NamedTuple):
    """One that waits for its answer."""

    answer: asyncio.Future[Any]
    kind: int
    size: int
    timeout: float


class Conversation:
    """One session with one peer.

    Args:
        peer: to whom it belongs.
        session: fresh.
        dialled: whether this side opened it.
    """

    __slots__ = (
        "peer", "session", "dialled", "id", "identity", "link", "heard", "attached_at", "short_lived", "round_trip", "trouble",
        "is_lost", "is_confirmed", "is_used",
        "_loop", "_context", "_requests", "_handlers", "_stopping", "_blocked", "_timer", "_timer_at", "_patience_until", "_outgoing", "_waiting",
    )  # fmt: skip

    def __init__(self, peer: Peer, session: Session, *, dialled: bool) -> None:
        self.peer = peer
        self.session = session
        self.dialled = dialled
        #: what both sides call the session, and who the peer is; known after the first handshake
        self.id = b""
        self.identity: Identity | None = None
        self.link: Link | None = None
        self.is_lost = False
        #: whether a frame of this session has come from the peer, so that both sides know of it
        self.is_confirmed = False
        #: whether anything was ever asked in it, by either side
        self.is_used = False
        self._loop = peer.loop
        self._context: contextvars.Context = peer.context
        #: when the peer was last heard, or first tried
        self.heard = self._loop.time()
        self.attached_at = -math.inf
        #: links in a row that have not lived long
        self.short_lived = 0
        #: of the handshake of the latest link, in seconds
        self.round_trip = 0.0
        #: why there is no link
        self.trouble: BaseException | None = None
        self._requests: dict[int, _Request] = {}
        self._handlers: dict[int, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._blocked = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._patience_until = -math.inf
        #: bytes of requests that are not answered, and those who wait for there to be fewer
        self._outgoing = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._arm(self.heard)

    # ---- requests of this side

    async def request(self, kind: int, value: Any, timeout: float) -> Any:
        """Ask the peer. See `Endpoint.request`."""
        limits = self.peer.limits
        message = encode(value, limits)
        size = message_size(message)
        self.is_used = True
        left = timeout
        if self._waiting or (self._outgoing and self._outgoing + size > limits.bytes_per_peer):
            left = await self._wait_for_room(kind, size, timeout)
        else:
            self._outgoing += size
        answer: asyncio.Future[Any] = self._loop.create_future()
        now = self._loop.time()
        try:
            id = self.session.request(kind, message, left, now)
        except BaseException:
            self._release(size)
            raise
        del message
        self._requests[id] = _Request(answer, kind, size, timeout)
        self._pump(now)
        if kind == Kind.GRADIENT:
            failpoints.reach("bwd.after_send")
        try:
            return await answer
        except asyncio.CancelledError:
            if self._forget(id) is not None and self.peer.safeguards.propagate_cancel:
                now = self._loop.time()
                self.session.cancel(id, now)
                self._pump(now)
            raise

    async def _wait_for_room(self, kind: int, size: int, seconds: float) -> float:
        """Wait until `size` more bytes may be on their way, and reserve them; returns what is left of `seconds`."""
        started = self._loop.time()
        room: asyncio.Future[None] = self._loop.create_future()
        entry = (size, room)
        self._waiting.append(entry)
        timer = call_at(self._context, self._loop, self._loop.time() + seconds, _expire, room, self._late(kind, seconds))
        try:
            await room
        except BaseException:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif room.done() and not room.cancelled() and room.exception() is None:
                self._release(size)  # it was granted in the same moment
            raise
        finally:
            timer.cancel()
        if self.is_lost:  # in the same moment in which room was granted
            raise self.peer.loss(self, "it was lost while this waited to be sent", self._stage(kind), self.trouble)
        left = seconds - (self._loop.time() - started)
        if left <= 0:
            self._release(size)
            raise self._late(kind, seconds)
        return left

    def _release(self, size: int) -> None:
        self._outgoing -= size
        waiting = self._waiting
        while waiting:
            size, room = waiting[0]
            if self._outgoing and self._outgoing + size > self.peer.limits.bytes_per_peer:
                break
            waiting.popleft()
            if not room.done():
                self._outgoing += size
                room.set_result(None)

    def _forget(self, id: int) -> _Request | None:
        request = self._requests.pop(id, None)
        if request is not None:
            self._release(request.size)
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
            self._pump(now, "fwd.mid_send" if kind == Kind.CALL else None)
            if kind == Kind.CALL:
                failpoints.reach("fwd.after_send")
        if stop is not None:  # somebody at a terminal means the process: it leaves the loop, as out of any task, but the answer goes first
            self._loop.call_soon(_raise, stop)

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
        """Tasks that run now, those that are being cancelled included."""
        return [*self._handlers.values(), *self._stopping]

    # ---- frames

    def _frame(self, frame: Buffer) -> None:
        now = self._loop.time()
        self.heard = now
        self.is_confirmed = True
        session = self.session
        session.receive(frame, now)
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
                self._handlers[effect.id] = self._loop.create_task(self._serve(effect), context=self._context.copy())
            elif isinstance(effect, Abandon):
                self._abandon(effect.id)
            elif isinstance(effect, Expired):
                request = self._forget(effect.id)
                if request is not None and not request.answer.done():
                    request.answer.set_exception(self._late(request.kind, request.timeout))
            else:
                self.peer.left(self)

    def _answered(self, effect: Answered) -> None:
        request = self._forget(effect.id)
        if request is None or request.answer.done():
            return
        try:
            value = decode(effect.message, self.peer.limits)
        except Exception as error:
            request.answer.set_exception(error)
            return
        if effect.failed:
            request.answer.set_exception(from_wire(value, self.peer.name))
        else:
            request.answer.set_result(value)

    def _pump(self, now: float, point: str | None = None) -> None:
        """Send what there is to send while the link takes it; `point` is come to between two frames."""
        link = self.link
        if link is not None and not self._blocked:
            session = self.session
            while (frame := session.next_frame(now)) is not None:
                if not link.send(frame):
                    self._blocked = True
                    break
                if point is not None and session.has_output:
                    failpoints.reach(point)
        self._arm(now)

    def _writable(self) -> None:
        self._blocked = False
        self._pump(self._loop.time())

    # ---- links

    def attach(self, link: Link) -> None:
        """Go on over `link`, which has been secured for this session. A link that was there before is closed."""
        old, self.link = self.link, link
        now = self._loop.time()
        if old is not None:
            self.session.detach(now)
            old.close()
        self.heard = self.attached_at = now
        self.round_trip = link.round_trip
        self.trouble = None
        self._blocked = False
        self.session.attach(now, link.channel.is_reliable, link.secured.frame_bytes)
        link.start(self._frame, lambda why: self._unlinked(link, why), self._writable)
        if self.link is link:
            self._pump(now)

    def _unlinked(self, link: Link, why: BaseException | None) -> None:
        if self.link is not link:
            return
        self.link = None
        self.trouble = why
        self._blocked = False
        now = self._loop.time()
        self.session.detach(now)
        self._arm(now)
        self.peer.unlinked(self, why)

    def say_goodbye(self) -> None:
        """Tell the peer that this is an orderly end."""
        if self.link is not None:
            now = self._loop.time()
            self.session.goodbye(now)
            self._pump(now)

    def lose(self, reason: str, cause: BaseException | None = None) -> None:
        """End it: everybody who waits for an answer gets an error, handlers of the peer's requests are cancelled.

        Args:
            reason: completes the sentence "worker 'x' was lost: ...".
            cause: an error that says more than "lost", and is raised instead where it is one of the handshake.
        """
        if self.is_lost:
            return
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        link, self.link = self.link, None
        if link is not None:
            link.close()
        self.session.fail_all()
        self.session.effects.clear()
        requests, self._requests = self._requests, {}
        for request in requests.values():
            if not request.answer.done():
                request.answer.set_exception(self.peer.loss(self, reason, self._stage(request.kind), cause))
        while self._waiting:
            _, room = self._waiting.popleft()
            if not room.done():
                room.set_exception(self.peer.loss(self, reason, "waiting to send", cause))
        for id in list(self._handlers):
            self._abandon(id)

    # ---- time

    def _arm(self, now: float) -> None:
        """See to it that `_tick` runs when something is due; a timer that is set too early only costs a tick."""
        if self.is_lost:
            return
        when = self.session.next_tick()
        if self.link is None:
            give_up = self.heard + self.peer.limits.silence
            when = give_up if when is None or give_up < when else when
        if when is None or (self._timer is not None and self._timer_at <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = max(when, now + TICK)
        self._timer = self._loop.call_at(self._timer_at, self._tick, context=self._context)

    def _tick(self) -> None:
        now = self._loop.time()
        self._timer = None
        heartbeat = self.peer.limits.heartbeat
        if now - self._timer_at > heartbeat / 2:  # see Note [A worker that was frozen itself]
            self._patience_until = now + heartbeat
        session = self.session
        session.tick(now)
        if session.effects:
            self._apply()
        if self.is_lost:
            return
        link = self.link
        if now >= self._patience_until:
            if link is None:
                if now >= self.heard + self.peer.limits.silence:
                    self.peer.gave_up(self)
                    return
            elif session.is_silent(now):
                link.close(WorkerLostError(f"nothing was heard for {now - self.heard:.1f} s", worker=self.peer.name, stage="heartbeat"))
                return
        self._pump(now)

    # ---- words

    def _known(self) -> Identity:
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


def _expire(room: asyncio.Future[None], error: BaseException) -> None:
    if not room.done():
        room.set_exception(error)


def _raise(error: BaseException) -> None:
    raise error
