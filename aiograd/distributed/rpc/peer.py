"""Peer: another worker, as one principal sees it: dials it, detects its loss, and keeps the sessions with it.

Note [Several sessions]
    Normally there is one. When two workers dial each other at the same moment there are two, one opened by each; both are valid, and both
    sides send new requests over the one that the worker of the smaller name opened. Each ends by itself. A session that was never used is not
    reconnected while there is another.

Note [Finding a way back]
    A session outlives its channel. The side that opened it dials again at once; the other side, if it knows a URL, after a moment in which the
    first usually succeeds. If both dial, the newer channel wins, on each side by its own clock. If the sides
    disagree, both channels end up closed and they try again, at different times.

    The dialling side learns the reason: a refused connection means that the process has ended; another incarnation, that it was
    restarted; a session that is not resumed, that the peer has given it up. In each case all requests under way are lost, at once. While
    the peer merely cannot be reached, it is dialled again, until it has been silent for too long. Where it gets another URL meanwhile, dialling
    begins anew, there and at once: a process that was started again is not taken for the one that has ended at the old address.

Note [When the peer does not know the session]
    A handshake can be complete for the dialler although its last message never arrives. Such a session has not carried a frame from the
    peer, which does not have the session and has run nothing for it: all requests move to the next session, and no worker was lost.

Note [A peer that starts afresh]
    A worker dials without a session to resume only when it has none with us for this principal. Sessions that it had opened before have
    ended there, so they end here. A side that has given up a session reports in the next one which requests of it were run, so that the other
    side can send the rest again.

Note [Handshakes that overtake each other]
    A worker that loses its channel just after the handshake dials again and asks for a session that the peer may not know yet: the last message of
    the first handshake can still be under way, with requests behind it. A peer that has answered "no such session" keeps to it: a session
    that came into being meanwhile ends, its report names the requests that were run, and one that would come into being later is refused.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from aiograd.distributed.failpoints import RequestPoints
from aiograd.distributed.rpc.effects import SessionEnded
from aiograd.distributed.rpc.handshake import Dialler, Secured
from aiograd.distributed.rpc.identity import PeerId, PeerIdentity
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.peer_session import TICK, PeerSession
from aiograd.distributed.rpc.request_handlers import Handler, PromptHandler
from aiograd.distributed.rpc.secure_channel import SecureChannel, dial
from aiograd.distributed.rpc.session import RpcSession
from aiograd.distributed.rpc.transport import Buffer, Channel, Transport, unanswered_text
from aiograd.errors import (
    AddressError,
    AuthenticationError,
    CertificateError,
    DistributedError,
    HostRefusedError,
    NameTakenError,
    Overloaded,
    UnknownPeerError,
    VersionMismatch,
    WorkerLostError,
)

#: the reason for the loss of a peer that another process has replaced
RESTARTED = "it was restarted"
#: seconds between two attempts to reach a peer: the first, and at most; each is drawn from the upper half of its range
FIRST_PAUSE, LONGEST_PAUSE = 0.025, 0.25
#: seconds after which a channel that closes counts as having worked: the peer is dialled without a pause
LONG = 0.5
#: seconds that the side which did not dial leaves to the other before it dials as well, besides a few round trips
COURTESY = 0.02
#: handshakes that fail before it counts as a refusal: one may be an accident of the network
REFUSALS = 5
#: errors that are raised unchanged, instead of `WorkerLostError`, if there never was a connection
REFUSED = (CertificateError, AuthenticationError, AddressError, NameTakenError, Overloaded, VersionMismatch, HostRefusedError)


class LocalEndpoint(Protocol):
    """The interface of an endpoint to its peers."""

    name: str
    incarnation: bytes
    transport: Transport
    keyring: Keyring
    limits: Limits
    loop: asyncio.AbstractEventLoop
    context: contextvars.Context
    handler: Handler
    prompt_handlers: Mapping[int, PromptHandler]
    failpoints: Mapping[int, RequestPoints]

    def failure(self, error: BaseException, kind: int, value: Any) -> Sequence[Buffer]:
        """The message that tells a peer of an error of a handler."""

    def url_of(self, peer: PeerId) -> str | None:
        """The URL of a peer."""

    def new_session(self, peer: PeerId) -> RpcSession:
        """A session that counts against the budget of that peer."""

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of workers that are known, sorted."""

    def opened(self, peer: Peer) -> None:
        """Register a peer with its first session."""

    def seen(self, identity: PeerIdentity, but: PeerSession | None = None) -> None:
        """Called when the identity of a peer is certain: sessions with other incarnations are lost, except `but`, which the caller handles."""

    def lost(self, peer: Peer, session: PeerSession, reason: str) -> None:
        """Called when a session has ended."""

    def ended_sessions(self, identity: PeerIdentity, session: bytes | None = None) -> list[SessionEnded]:
        """The last delivered request of each session of a peer that has ended here; the one of `session` comes last.

        A `session` that is not known is over from now on.
        """

    def is_over(self, identity: PeerIdentity, session: bytes) -> bool:
        """True if a session of a peer has ended here, or was denied."""


class Peer:
    """One worker and one principal.

    Args:
        owner: the endpoint.
        id: the worker's name, and the principal that this side speaks for.
    """

    __slots__ = (
        "owner", "id", "name", "principal", "limits", "loop", "context", "handler", "prompt_handlers", "failpoints", "failure", "sessions",
        "_best", "_dialling",
    )  # fmt: skip

    def __init__(self, owner: LocalEndpoint, id: PeerId) -> None:
        self.owner: LocalEndpoint = owner
        self.id: PeerId = id
        self.principal: str = id.principal
        self.name: str = id.name
        self.limits: Limits = owner.limits
        self.loop: asyncio.AbstractEventLoop = owner.loop
        self.context: contextvars.Context = owner.context
        self.handler: Handler = owner.handler
        self.prompt_handlers: Mapping[int, PromptHandler] = owner.prompt_handlers
        self.failpoints: Mapping[int, RequestPoints] = owner.failpoints
        self.failure: Callable[[BaseException, int, Any], Sequence[Buffer]] = owner.failure
        self.sessions: list[PeerSession] = []
        self._best: PeerSession | None = None
        self._dialling: dict[PeerSession, asyncio.Task[None]] = {}

    # ---- which session

    def session(self) -> PeerSession:
        """The session for the next request; dials if there is none.

        Raises:
            UnknownPeerError: there is none, and no URL to dial.
            AuthenticationError: there is no key for the principal.
        """
        if self._best is not None:
            return self._best
        if self.owner.url_of(self.id) is None:
            known = ", ".join(name for name in self.owner.peers if self.owner.url_of(PeerId(self.principal, name))) or "none"
            raise UnknownPeerError(
                f"worker {self.owner.name!r} knows no worker {self.name!r}, and none of that name is connected; it knows {known}; call "
                "add_peer(name, url) first"
            )
        self.owner.keyring.key_for(self.principal)
        session = self._open(dialled=True)
        self._reach(session, 0.0)
        return session

    def _open(self, *, dialled: bool) -> PeerSession:
        session = PeerSession(self, self.owner.new_session(self.id), dialled=dialled)
        self.sessions.append(session)
        self.owner.opened(self)
        self._choose()
        return session

    def _choose(self) -> None:
        first = min(self.name, self.owner.name) == self.owner.name  # whether what we dialled is preferred
        self._best = max(self.sessions, key=lambda each: (each.channel is not None, each.dialled is first), default=None)

    # ---- channels come

    def accept(self, channel: SecureChannel, asked: bytes | None) -> None:
        """A channel that the peer dialled, which asked to resume a session or for a new one."""
        secured = channel.secured
        if secured.resumed:
            session = self.find(secured.session)
            if session is None:  # lost while the handshake went on
                channel.close()
            else:
                self._attach(session, channel)
            return
        if self.owner.is_over(secured.peer, secured.session):
            channel.close()  # see Note [Handshakes that overtake each other]
            return
        if asked is None:  # see Note [A peer that starts afresh]
            over = [each for each in self.sessions if not each.dialled]
        else:
            over = [each for each in self.sessions if each.id == asked]
        session = self._open(dialled=False)
        for old in over:
            self.lose(old, "it opened another session, having given up this one", successor=session)
        for ended in () if asked is None else self.owner.ended_sessions(secured.peer, asked):
            session.rpc_session.tell_ended(ended)
        self._begin(session, channel)

    def find(self, id: bytes) -> PeerSession | None:
        """The session of an id."""
        for session in self.sessions:
            if session.id == id and not session.is_lost:
                return session
        return None

    def _begin(self, session: PeerSession, channel: SecureChannel) -> None:
        session.id = channel.secured.session
        session.identity = channel.secured.peer
        self._attach(session, channel)

    def _attach(self, session: PeerSession, channel: SecureChannel) -> None:
        task = self._dialling.pop(session, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        session.attach(channel)
        self._choose()

    def _dialled(self, session: PeerSession, channel: SecureChannel) -> None:
        """A channel that we dialled for `session`."""
        secured = channel.secured
        self.owner.seen(secured.peer, but=session)
        known = session.identity
        if known is None:
            for ended in self.owner.ended_sessions(secured.peer):
                session.rpc_session.tell_ended(ended)
        if known is None or self._is_resumed(secured, known):
            self._begin(session, channel)
            return
        is_restarted = secured.peer != known
        reason = RESTARTED if is_restarted else "it has given up the session"
        if len(self.sessions) > 1 and (is_restarted or not session.has_requests):
            self.lose(session, reason)
            channel.close()  # one is enough
            return
        successor = self._open(dialled=True)
        self.lose(session, reason, successor=None if is_restarted else successor)
        if not is_restarted:
            for ended in self.owner.ended_sessions(known, session.id):
                successor.rpc_session.tell_ended(ended)
        self._begin(successor, channel)

    def _is_resumed(self, secured: Secured, known: PeerIdentity) -> bool:
        """True if a channel goes on with a session, and the peer is the incarnation that the session is with."""
        return secured.resumed and secured.peer == known

    # ---- silence

    def silence_left(self, *, was_heard: bool) -> float | None:
        """Seconds until a session ends because nothing was heard in it, at least a moment; None where there is none.

        Args:
            was_heard: the peer was heard before; then a session counts once it is heard in it.
        """
        left = [session.left() for session in self.sessions if session.attached_at > -math.inf or not was_heard]
        return max(*left, TICK) if left else None

    # ---- channels go

    def disconnected(self, session: PeerSession, why: BaseException | None) -> None:
        """Called by a session that has lost its channel."""
        self._choose()
        if session.is_lost:
            return
        if not session.is_used and len(self.sessions) > 1:
            self.lose(session, "it was not needed")
        elif self.owner.url_of(self.id) is not None:
            session.short_lived = 0 if self.loop.time() - session.attached_at >= LONG else session.short_lived + 1
            pause = self._pause(session.short_lived - 1) if session.short_lived else 0.0
            if not session.dialled:
                pause += COURTESY + 4 * session.round_trip
            self._reach(session, pause)

    def left(self, session: PeerSession) -> None:
        """Called by a session when its peer says goodbye."""
        self.lose(session, "it was closed")

    def timed_out(self, session: PeerSession) -> None:
        """Called when the peer has been silent for too long."""
        url = self.owner.url_of(self.id)
        if session.trouble is None and not session.is_confirmed and url is not None:  # dialling ends in this moment too, or a little later
            session.trouble = TimeoutError(unanswered_text(url, self.limits.silence))
        self.lose(session, session.detector.reason(self.loop.time()), session.trouble)

    def lose(self, session: PeerSession, reason: str, cause: BaseException | None = None, successor: PeerSession | None = None) -> None:
        """End a session and fail its requests; requests that were not run move to the session `successor`."""
        if session.is_lost:
            return
        task = self._dialling.pop(session, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self.sessions.remove(session)
        self._choose()
        session.lose(reason, cause, successor)
        self.owner.lost(self, session, reason)

    def close(self, reason: str) -> list[asyncio.Task[None]]:
        """End everything because this side is closed; returns the tasks to wait for."""
        tasks = [*self._dialling.values(), *(task for session in self.sessions for task in session.handlers)]
        for session in list(self.sessions):
            self.lose(session, reason)
        return tasks

    def loss(self, session: PeerSession, reason: str, stage: str, cause: BaseException | None) -> DistributedError:
        """The error for a request that waits."""
        for kind in REFUSED:
            if not session.is_confirmed and isinstance(cause, kind):
                refusal = kind(str(cause))
                vars(refusal).update(vars(cause))
                return refusal
        head = f"worker {self.name!r} was lost ({stage}): "
        what = "" if cause is None else f"{type(cause).__name__}: {cause}"
        if not what:
            text = head + reason
        elif session.is_confirmed:
            text = f"{head}{reason} ({what})"
        else:  # it has never been reached: the server that answers at the address comes first
            text = f"{head}{what} ({reason})"
        is_gone = reason == RESTARTED or isinstance(cause, ConnectionRefusedError)
        error = WorkerLostError(text, worker=self.name, stage=stage, is_gone=is_gone)
        error.__cause__ = cause
        return error

    # ---- dialling

    def _reach(self, session: PeerSession, pause: float) -> None:
        if session not in self._dialling:
            name = f"dial {self.name}"
            self._dialling[session] = self.loop.create_task(self._keep_dialling(session, pause), name=name, context=self.context.copy())

    def redial(self) -> None:
        """Called when the peer has another URL, or its first: sessions without a channel are dialled there at once."""
        for session in self.sessions:
            if session.channel is None:
                if (task := self._dialling.pop(session, None)) is not None:
                    task.cancel()
                self._reach(session, 0.0)

    async def _keep_dialling(self, session: PeerSession, pause: float) -> None:
        refusals = attempt = 0
        while True:
            if pause:
                await asyncio.sleep(pause)
            left = session.left()
            url = self.owner.url_of(self.id)
            if left <= 0 or url is None:
                self._dialling.pop(session, None)
                return  # the session's own timer ends it
            seconds = min(left, self.limits.handshake_timeout)
            try:
                channel = await dial(self.owner.transport, url, functools.partial(self._dialler, session), self.name, seconds)
            except ConnectionRefusedError as error:
                self.lose(session, f"no process listens at {url}", error)
                return
            except AuthenticationError as error:
                session.trouble = error
                refusals += 1
                is_final = isinstance(error, CertificateError) and error.is_certain and not session.is_confirmed
                if is_final or refusals == REFUSALS:
                    self.lose(session, "it refuses the handshake", error)
                    return
            except (AddressError, Overloaded) as error:
                session.trouble = error
                if not session.is_confirmed:  # else it worked before, and may again
                    self.lose(session, "it cannot be connected to", error)
                    return
            except DistributedError as error:
                self.lose(session, "the handshake failed", error)
                return
            except OSError as error:  # it cannot be reached now; TimeoutError is one
                session.trouble = error
            except Exception as error:  # a URL that makes no sense, a fault of the transport
                self.lose(session, f"dialling {url} failed", error)
                return
            else:
                self._dialling.pop(session, None)
                self._dialled(session, channel)
                return
            pause = self._pause(attempt)
            attempt += 1

    def _dialler(self, session: PeerSession, channel: Channel) -> Dialler:
        owner = self.owner
        return Dialler(
            owner.name, owner.incarnation, owner.keyring.key_for(self.principal), self.name, session.id or None, owner.transport.entropy,
            owner.limits, certified_names=channel.certified_names,
        )  # fmt: skip

    def _pause(self, attempt: int) -> float:
        most = min(FIRST_PAUSE * 2.0**attempt, LONGEST_PAUSE)
        return most * (0.5 + self.owner.transport.entropy(1)[0] / 512)
