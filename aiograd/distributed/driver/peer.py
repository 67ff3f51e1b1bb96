"""Peer: another worker, as one principal sees it: how to reach it, whether it is there, and what is said with it.

Note [Several conversations]
    Normally there is one. When two workers dial each other in the same moment there are two, one opened by each; both are good, and both
    sides send new requests over the one that the worker of the smaller name opened. Each ends by itself. One that was never used is not
    opened again while there is another.

Note [Finding a way back]
    A conversation outlives its link. Who opened it dials again at once; the other side, if it knows a URL, after a moment in which the
    first usually succeeds. Both may therefore come to dial; then the newer link wins, on each side by its own clock. Should the sides
    disagree, both links end up closed and they try again, at different times.

    Whoever dials finds out what has happened: a refused connection is a process that is gone; another incarnation is one that was
    restarted; a session that is not resumed is one that the peer has given up. In each case all that was under way is lost, at once. As
    long as the peer merely cannot be reached, it is tried again, until it has been silent for too long.

Note [When the peer does not know the session]
    A handshake can be complete for who dialled while its last message never arrives. Such a session has not carried a frame from the
    peer, which knows nothing of it and has run nothing for it: everything moves to the next one, and nobody was lost.

Note [A peer that starts afresh]
    A worker dials without a session to resume only when it has none with us for this principal. Sessions that it had opened before are
    over for it, so they are over for us. Whoever has given up a session says in the next one what of it was run, so that the rest can be
    asked for again.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeAlias

from aiograd.distributed.driver.conversation import Conversation
from aiograd.distributed.driver.link import Link, dial
from aiograd.distributed.effects import Former
from aiograd.distributed.handshake import Dialler
from aiograd.distributed.identity import Identity, PeerId
from aiograd.distributed.keyring import Keyring
from aiograd.distributed.limits import Limits
from aiograd.distributed.safeguards import Safeguards
from aiograd.distributed.session import Session
from aiograd.distributed.transport import Buffer, Channel, Transport
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

#: why a peer is lost whose process has been replaced by another
RESTARTED = "it was restarted"
#: seconds between two attempts to reach a peer: the first, and at most; each is drawn from the upper half of its range
FIRST_PAUSE, LONGEST_PAUSE = 0.025, 0.25
#: seconds after which a link that closes counts as having worked: the peer is dialled without a pause
LONG = 0.5
#: seconds that the side which did not dial leaves to the other before it dials as well, besides a few round trips
COURTESY = 0.02
#: handshakes that fail before it counts as a refusal: one may be an accident of the network
REFUSALS = 5
#: what is raised as it is, instead of `WorkerLostError`, where there never was a connection
REFUSED = (CertificateError, AuthenticationError, AddressError, NameTakenError, Overloaded, VersionMismatch, HostRefusedError)


Handler: TypeAlias = Callable[[Identity, int, Any, float], Coroutine[Any, Any, Any]]


class Owner(Protocol):
    """What a peer needs of its endpoint."""

    name: str
    incarnation: bytes
    transport: Transport
    keyring: Keyring
    limits: Limits
    loop: asyncio.AbstractEventLoop
    context: contextvars.Context
    handler: Handler

    def failure(self, error: BaseException, kind: int, value: Any) -> Sequence[Buffer]:
        """The message that tells a peer of an error of a handler."""

    def url_of(self, peer: PeerId) -> str | None:
        """Where a peer is."""

    def new_session(self, peer: PeerId) -> Session:
        """A session that counts against the budget of that peer."""

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of workers that are known, sorted."""

    def opened(self, peer: Peer) -> None:
        """A peer has its first conversation."""

    def seen(self, identity: Identity, but: Conversation | None = None) -> None:
        """A peer has proved who it is: what was under way with earlier incarnations is lost, except for `but`, which is looked at."""

    def lost(self, peer: Peer, conversation: Conversation, reason: str) -> None:
        """A conversation has ended."""

    def former(self, identity: Identity, session: bytes | None = None) -> list[Former]:
        """The last delivered request of each session of a peer that has ended here; that of `session` comes last where it is given."""


class Peer:
    """One worker and one principal.

    Args:
        owner: the endpoint.
        id: of the worker and the principal on whose behalf is spoken.
    """

    __slots__ = (
        "owner", "id", "name", "principal", "limits", "safeguards", "loop", "context", "handler", "failure", "conversations",
        "_best", "_dialling",
    )  # fmt: skip

    def __init__(self, owner: Owner, id: PeerId) -> None:
        self.owner = owner
        self.id = id
        self.principal, self.name = id
        self.limits = owner.limits
        self.safeguards: Safeguards = owner.transport.safeguards
        self.loop = owner.loop
        self.context = owner.context
        self.handler = owner.handler
        self.failure = owner.failure
        self.conversations: list[Conversation] = []
        self._best: Conversation | None = None
        self._dialling: dict[Conversation, asyncio.Task[None]] = {}

    # ---- which conversation

    def conversation(self) -> Conversation:
        """The one to ask the next thing in; dials where there is none.

        Raises:
            UnknownPeerError: there is none, and no URL to dial.
            AuthenticationError: there is no key for the principal.
        """
        if self._best is not None:
            return self._best
        if self.owner.url_of(self.id) is None:
            known = ", ".join(name for name in self.owner.peers if self.owner.url_of(PeerId(self.principal, name))) or "nobody"
            raise UnknownPeerError(
                f"worker {self.owner.name!r} knows no worker {self.name!r}, and none of that name is connected; it knows {known}; call "
                "add_peer(name, url) first"
            )
        self.owner.keyring.key_for(self.principal)
        conversation = self._open(dialled=True)
        self._reach(conversation, 0.0)
        return conversation

    def _open(self, *, dialled: bool) -> Conversation:
        conversation = Conversation(self, self.owner.new_session(self.id), dialled=dialled)
        self.conversations.append(conversation)
        self.owner.opened(self)
        self._choose()
        return conversation

    def _choose(self) -> None:
        first = min(self.name, self.owner.name) == self.owner.name  # whether what we dialled is preferred
        self._best = max(self.conversations, key=lambda each: (each.link is not None, each.dialled is first), default=None)

    # ---- links come

    def accept(self, link: Link, asked: bytes | None) -> None:
        """A link that the peer dialled, which asked to resume a session or for a new one."""
        secured = link.secured
        if secured.resumed:
            conversation = self.find(secured.session)
            if conversation is None:  # lost while the handshake went on
                link.close()
            else:
                self._attach(conversation, link)
            return
        over = [each for each in self.conversations if asked is None and not each.dialled]  # see Note [A peer that starts afresh]
        conversation = self._open(dialled=False)
        for old in over:
            self.lose(old, "it opened another session, having given up this one", heir=conversation)
        for former in () if asked is None else self.owner.former(secured.peer, asked):
            conversation.session.tell_former(former)
        self._begin(conversation, link)

    def find(self, session: bytes) -> Conversation | None:
        """The conversation of this id."""
        for conversation in self.conversations:
            if conversation.id == session and not conversation.is_lost:
                return conversation
        return None

    def _begin(self, conversation: Conversation, link: Link) -> None:
        conversation.id = link.secured.session
        conversation.identity = link.secured.peer
        self._attach(conversation, link)

    def _attach(self, conversation: Conversation, link: Link) -> None:
        task = self._dialling.pop(conversation, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        conversation.attach(link)
        self._choose()

    def _dialled(self, conversation: Conversation, link: Link) -> None:
        """A link that we dialled for `conversation`."""
        secured = link.secured
        self.owner.seen(secured.peer, but=conversation)
        known = conversation.identity
        if known is None:
            for former in self.owner.former(secured.peer):
                conversation.session.tell_former(former)
        if known is None or (secured.resumed and secured.peer == known) or not self.safeguards.epoch_fence:
            self._begin(conversation, link)
            return
        is_restarted = secured.peer != known
        reason = RESTARTED if is_restarted else "it has given up the session"
        if len(self.conversations) > 1 and (is_restarted or not conversation.has_requests):
            self.lose(conversation, reason)
            link.close()  # one is enough
            return
        successor = self._open(dialled=True)
        self.lose(conversation, reason, heir=None if is_restarted else successor)
        self._begin(successor, link)

    # ---- links go

    def unlinked(self, conversation: Conversation, why: BaseException | None) -> None:
        """Called by a conversation that has lost its link."""
        self._choose()
        if conversation.is_lost:
            return
        if not conversation.is_used and len(self.conversations) > 1:
            self.lose(conversation, "it was not needed")
        elif self.owner.url_of(self.id) is not None:
            conversation.short_lived = 0 if self.loop.time() - conversation.attached_at >= LONG else conversation.short_lived + 1
            pause = self._pause(conversation.short_lived - 1) if conversation.short_lived else 0.0
            if not conversation.dialled:
                pause += COURTESY + 4 * conversation.round_trip
            self._reach(conversation, pause)

    def left(self, conversation: Conversation) -> None:
        """Called by a conversation whose peer said goodbye."""
        self.lose(conversation, "it was closed")

    def gave_up(self, conversation: Conversation) -> None:
        """Called when the peer has been silent for too long."""
        self.lose(conversation, f"nothing was heard from it for {self.limits.silence:g} s", conversation.trouble)

    def lose(self, conversation: Conversation, reason: str, cause: BaseException | None = None, heir: Conversation | None = None) -> None:
        """End a conversation and tell those concerned; `heir` goes on with what was not run."""
        if conversation.is_lost:
            return
        task = self._dialling.pop(conversation, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self.conversations.remove(conversation)
        self._choose()
        conversation.lose(reason, cause, heir)
        self.owner.lost(self, conversation, reason)

    def close(self, reason: str) -> list[asyncio.Task[None]]:
        """End everything because this side is closed; returns the tasks to wait for."""
        tasks = [*self._dialling.values(), *(task for conversation in self.conversations for task in conversation.handlers)]
        for conversation in list(self.conversations):
            self.lose(conversation, reason)
        return tasks

    def loss(self, conversation: Conversation, reason: str, stage: str, cause: BaseException | None) -> DistributedError:
        """The error for one of those who wait."""
        for kind in REFUSED:
            if not conversation.is_confirmed and isinstance(cause, kind):
                refusal = kind(str(cause))
                vars(refusal).update(vars(cause))
                return refusal
        text = f"worker {self.name!r} was lost ({stage}): {reason}"
        is_gone = reason == RESTARTED or isinstance(cause, ConnectionRefusedError)
        error = WorkerLostError(
            text if cause is None else f"{text} ({type(cause).__name__}: {cause})", worker=self.name, stage=stage, is_gone=is_gone
        )
        error.__cause__ = cause
        return error

    # ---- dialling

    def _reach(self, conversation: Conversation, pause: float) -> None:
        if conversation not in self._dialling:
            name = f"dial {self.name}"
            self._dialling[conversation] = self.loop.create_task(self._keep_dialling(conversation, pause), name=name, context=self.context.copy())

    async def _keep_dialling(self, conversation: Conversation, pause: float) -> None:
        refusals = attempt = 0
        while True:
            if pause:
                await asyncio.sleep(pause)
            left = conversation.left()
            url = self.owner.url_of(self.id)
            if left <= 0 or url is None:
                self._dialling.pop(conversation, None)
                return  # the conversation's own timer ends it
            seconds = min(left, self.limits.handshake_timeout)
            try:
                link = await dial(self.owner.transport, url, functools.partial(self._dialler, conversation), self.name, seconds)
            except ConnectionRefusedError as error:
                self.lose(conversation, f"nobody listens at {url}", error)
                return
            except AuthenticationError as error:
                conversation.trouble = error
                refusals += 1
                is_final = isinstance(error, CertificateError) and error.is_certain and not conversation.is_confirmed
                if is_final or refusals == REFUSALS:
                    self.lose(conversation, "it refuses the handshake", error)
                    return
            except (AddressError, Overloaded) as error:
                conversation.trouble = error
                if not conversation.is_confirmed:  # else it worked before, and may again
                    self.lose(conversation, "it cannot be connected to", error)
                    return
            except DistributedError as error:
                self.lose(conversation, "the handshake failed", error)
                return
            except OSError as error:  # it cannot be reached now; TimeoutError is one
                conversation.trouble = error
            except Exception as error:  # a URL that makes no sense, a fault of the transport
                self.lose(conversation, f"dialling {url} failed", error)
                return
            else:
                self._dialling.pop(conversation, None)
                self._dialled(conversation, link)
                return
            pause = self._pause(attempt)
            attempt += 1

    def _dialler(self, conversation: Conversation, channel: Channel) -> Dialler:
        owner = self.owner
        return Dialler(
            owner.name, owner.incarnation, owner.keyring.key_for(self.principal), self.name, conversation.id or None, owner.transport.entropy,
            owner.limits, certified_names=channel.certified_names,
        )  # fmt: skip

    def _pause(self, attempt: int) -> float:
        most = min(FIRST_PAUSE * 2.0**attempt, LONGEST_PAUSE)
        return most * (0.5 + self.owner.transport.entropy(1)[0] / 512)
