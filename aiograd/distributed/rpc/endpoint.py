"""Endpoint: one worker's place in the network. Sends requests to peers by name, and has a handler for requests of peers.

Code that awaits is here and in the modules beside it; the session, handshake and codec below are pure and decide.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiograd.distributed.error_wire import to_wire
from aiograd.distributed.failpoints import RequestPoints
from aiograd.distributed.rpc.budget import Budget, PeerBudget
from aiograd.distributed.rpc.codec import encode
from aiograd.distributed.rpc.effects import NOT_KNOWN, SessionEnded
from aiograd.distributed.rpc.handshake import Answerer
from aiograd.distributed.rpc.handshake_log import HandshakeLog
from aiograd.distributed.rpc.identity import PeerId, PeerIdentity
from aiograd.distributed.rpc.keyring import Keyring, check_name
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.loopback import Loopback
from aiograd.distributed.rpc.lost_peers import LostPeers
from aiograd.distributed.rpc.peer import RESTARTED, Peer
from aiograd.distributed.rpc.peer_session import PeerSession
from aiograd.distributed.rpc.request_handlers import Handler, PromptHandler
from aiograd.distributed.rpc.secure_channel import SecureChannel, ServerHandshake
from aiograd.distributed.rpc.session import RpcSession
from aiograd.distributed.rpc.statistics import EndpointStatistics, PeerStatistics
from aiograd.distributed.rpc.transport import Buffer, Channel, Transport
from aiograd.errors import ArgumentError, DeadlineError, DistributedError, LimitError, Overloaded, WorkerLostError
from aiograd.running.log_fields import structured_logger

logger = structured_logger("aiograd.distributed")

#: seconds that cancelled handlers have to stop when an endpoint is closed
GRACE = 1.0
#: the number of ended sessions of one principal that are remembered, and the number of them that a peer is told of when it is dialled
ENDED_SESSIONS, ENDED_TOLD = 4096, 8


class Endpoint:
    """One worker's place in the network.

    Args:
        name: of this worker; peers must know it by this name.
        transport: carries frames; the endpoint closes it.
        keyring: the secrets shared with peers.
        limits: limits on requests of peers, and timeouts.
        handler: ``await handler(peer, kind, value, timeout)`` answers a request, in a task of its own, which is cancelled when the
            requester gives up, the deadline passes or the peer is lost.
        prompt_handlers: by kind of request, the handlers of requests that are served as they come, without a task, by ``handler(peer, value)``: it
            returns True where the requester waits for the answer, which is None; else that may be held for a moment, to go with something else.
        on_lost: called with a peer that is lost, after requests that waited for it have failed; may be called again for one that comes
            back and is lost again.
        incarnation: 16 bytes that differ each time the worker starts; None: drawn.
        describe: names the function that a request is about, for errors; None: the kind of the request.
        failpoints: by kind of request, where its requests and answers pass any.

    Raises:
        ArgumentError, ArgumentTypeError: the name cannot be used.
    """

    def __init__(
        self,
        name: str,
        *,
        transport: Transport,
        keyring: Keyring,
        limits: Limits,
        handler: Handler,
        prompt_handlers: Mapping[int, PromptHandler] | None = None,
        on_lost: Callable[[PeerIdentity, WorkerLostError], None] | None = None,
        incarnation: bytes | None = None,
        describe: Callable[[int, Any], str] | None = None,
        failpoints: Mapping[int, RequestPoints] | None = None,
    ) -> None:
        self.name: str = check_name("worker name", name)
        self.transport = transport
        self.keyring = keyring
        self.limits = limits
        self.handler = handler
        self.prompt_handlers: Mapping[int, PromptHandler] = {} if prompt_handlers is None else prompt_handlers
        self.failpoints: Mapping[int, RequestPoints] = failpoints or {}
        self.incarnation: bytes = transport.entropy(16) if incarnation is None else incarnation
        self.url: str | None = None
        #: True if a worker keeps its name for as long as it is connected; otherwise the latest worker to connect takes it over
        self.keeps_names = False
        #: (principal or None for all, name) -> URL of the peer
        self._urls: dict[tuple[str | None, str], str] = {}
        self.loop: asyncio.AbstractEventLoop
        self.context: contextvars.Context
        self._on_lost = on_lost
        self._describe = describe
        self._budget = Budget(limits.bytes_per_peer, limits.bytes_total)
        self._budgets: dict[PeerId, PeerBudget] = {}
        self._peers: dict[PeerId, Peer] = {}
        #: principal -> ended session -> its peer, its first request that was not delivered, the time until which it is kept; oldest first
        self._ended: dict[str, dict[bytes, tuple[PeerIdentity, int, float]]] = {}
        self._lost_peers = LostPeers(ENDED_SESSIONS)
        self._handshakes: dict[ServerHandshake, None] = {}
        self._loopback = Loopback(self)
        self._stopping: list[asyncio.Task[None]] = []
        text = f"worker {name!r} holds as many requests or bytes as its limits or its memory allow, of this peer or of all; try again in a second"
        self._refusal: Sequence[Buffer] = encode(to_wire(Overloaded(text), name, "admission", ""), limits)
        text = f"the request is longer than Limits.message_bytes={limits.message_bytes} of worker {name!r}; send it in parts or raise the limit there"
        self._too_long: Sequence[Buffer] = encode(to_wire(LimitError(text), name, "admission", ""), limits)
        self._is_open = False
        self.refused_pulses: int = 0
        self._handshake_log = HandshakeLog(self.name)
        self._failed_handshakes = self._lost = 0

    # ---- life

    async def open(self, host: str, port: int) -> str:
        """Start to listen.

        Cancelling it leaves nothing open.

        Returns:
            The URL under which peers reach this worker.

        Raises:
            DistributedError: it has been opened before.
            OSError: it cannot listen there.
        """
        if self.url is not None or self._is_open:
            raise DistributedError(f"opening worker {self.name!r}: it has been opened before; make a new one")
        self.loop = asyncio.get_running_loop()
        self.context = contextvars.copy_context()
        self._is_open = True
        try:
            self.url = await self.transport.listen(host, port, self._accept)
        except BaseException:
            self._is_open = False
            await self.transport.aclose()
            raise
        return self.url

    @property
    def is_open(self) -> bool:
        """True if the worker has been opened, and not closed since."""
        return self._is_open

    async def aclose(self) -> None:
        """Say goodbye to all peers, cancel the handlers and wait for them, close the transport. Idempotent.

        Requests that wait get a `DistributedError`. A handler that does not stop within a second is left behind and reported to the log.
        Cancelling it skips the waiting; everything is closed even then.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            for handshake in list(self._handshakes):
                handshake.close()
            sessions = self.sessions()
            for session in sessions:
                session.say_goodbye()
            await asyncio.sleep(0)  # lets the transport pass it on
        finally:
            for peer in list(self._peers.values()):
                self._stopping += peer.close(f"worker {self.name!r} is being closed")
            self._stopping += self._loopback.close()
            self._handshake_log.close()
            try:
                await self._wait_for_tasks()
            finally:
                await self.transport.aclose()

    async def _wait_for_tasks(self) -> None:
        me = asyncio.current_task()  # a handler may close its own worker
        tasks = [task for task in self._stopping if task is not me]
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=GRACE)
            for task in pending:
                logger.error("worker %s: %s did not stop within %g s of being cancelled", self.name, task.get_name(), GRACE)

    # ---- peers

    def add_peer(self, name: str, url: str, principal: str | None = None) -> None:
        """Set the URL of a peer. A URL given before is replaced; connections stay, and what is being dialled is dialled at the new one at once.

        Args:
            principal: the principal that the URL holds for; None: all principals without a URL of their own.

        Raises:
            ArgumentError, ArgumentTypeError: a name cannot be used, or is this worker's own with another URL.
        """
        check_name("peer name", name)
        if principal is not None:
            check_name("principal", principal)
        if name == self.name:
            if url != self.url:
                raise ArgumentError(f"add_peer({name!r}, {url!r}): that is this worker's own name; expected names that differ")
            return
        before, self._urls[principal, name] = self._urls.get((principal, name)), url
        for peer in [each for each in self._peers.values() if each.name == name and before != url]:
            peer.redial()

    def remove_peer(self, name: str) -> None:
        """Remove the URL of a peer, if it is known. Connections stay until they are lost."""
        for known in [key for key in self._urls if key[1] == name]:
            del self._urls[known]

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the workers that are known by URL or connected, sorted."""
        return tuple(sorted({name for _, name in (*self._urls, *self._peers)}))

    def url_of(self, peer: PeerId) -> str | None:
        """The URL of a peer; None if this worker has none."""
        return self._urls.get(peer) or self._urls.get((None, peer.name))

    def is_connected(self, peer: PeerId) -> bool:
        """True if there is a connection to a peer."""
        known = self._peers.get(peer)
        return known is not None and any(session.channel is not None for session in known.sessions)

    def silence_left(self, peer: PeerId) -> float:
        """Seconds until a peer is lost: of its silence, from its last frame in any session or, before that, from its first dialling; 0: it is."""
        known, over = self._peers.get(peer), self._lost_peers.over(peer)
        left = None if known is None else known.silence_left(was_heard=over is not None)
        if left is None:
            return self.limits.silence if over is None else max(0.0, over - self.loop.time())
        return left

    async def request(  # the deadline travels with the request
        self, peer: str, kind: int, value: Any, timeout: float, principal: str | None = None
    ) -> Any:
        """Send a request to a peer and wait for the answer. Connects first where needed; the peer may be this worker itself.

        Cancelling it tells the peer, which cancels the handler; the handler may have run to its end before.

        Args:
            peer: name of a worker.
            kind: the kind of the request, 0 to 255.
            value: a value for `encode`; its arrays must not change until the answer has come.
            timeout: seconds for everything: connecting, waiting for room, the handler, the answer.
            principal: the principal that the request is made for; None: the keyring's default.

        Returns:
            The result of the peer's handler.

        Raises:
            DeadlineError: no answer in time.
            WorkerLostError: the peer crashed, fell silent, was restarted or cannot be reached. It may or may not have run the handler.
            UnknownPeerError: no URL is known for it, and it is not connected.
            AuthenticationError, VersionMismatch: the peer and this worker cannot agree on a handshake. HostRefusedError: the peer does not accept
                the name in its URL. CertificateError, AddressError: TLS fails, or the URL is wrong. Overloaded: it takes no more connections.
            ArgumentTypeError, ArgumentError, LimitError: the value cannot be sent.
            DistributedError: this worker is closed; or the exception of the peer's handler, see `error_wire`.
        """
        if not self._is_open:
            raise DistributedError(f"request to worker {peer!r}: worker {self.name!r} is not open; use it within `async with`")
        if timeout <= 0:
            raise DeadlineError(f"request to worker {peer!r}: no time is left for it (timeout={timeout:g} s)")
        if not timeout < math.inf:
            raise ArgumentError(f"request to worker {peer!r}: timeout={timeout!r}; expected a finite number of seconds")
        if principal is None:
            principal = self.keyring.default_principal
        if peer == self.name:
            return await self._loopback.request(kind, value, timeout, principal)
        id = PeerId(principal, peer)
        entry = self._peers.get(id)
        if entry is None:
            entry = Peer(self, id)
        return await entry.session().request(kind, value, timeout)

    def statistics(self) -> EndpointStatistics:
        """Counts of the work so far and of open connections and requests."""
        peers = []
        for session in self.sessions():
            figures = session.rpc_session.statistics()
            peers.append(
                PeerStatistics(
                    name=session.peer.name,
                    principal=session.peer.principal,
                    is_connected=session.channel is not None,
                    outstanding=figures.outstanding,
                    running=figures.running,
                    bytes_in=figures.bytes_in,
                    bytes_out=figures.bytes_out,
                    frames_in=figures.frames_in,
                    frames_out=figures.frames_out,
                    resent=figures.resent,
                    bytes_held=figures.bytes_held,
                    round_trip=figures.round_trip,
                )
            )
        return EndpointStatistics(
            name=self.name,
            peers=tuple(peers),
            bytes_held=self._budget.held,
            handshakes=len(self._handshakes),
            failed_handshakes=self._failed_handshakes,
            lost=self._lost,
        )

    def pulse(self, message: bytes) -> bool:
        """Take a pulse of a peer's watchdog; returns False where it is refused: it is of no session, forged, altered, or was there before."""
        is_taken = any(session.pulse(message) for session in self.sessions())
        self.refused_pulses += not is_taken
        return is_taken

    def sessions(self) -> list[PeerSession]:
        """All sessions. To be called from any thread."""
        return [session for peer in list(self._peers.values()) for session in list(peer.sessions)]

    # ---- for peers

    def failure(self, error: BaseException, kind: int, value: Any) -> Sequence[Buffer]:
        """The message that tells a peer of an error of a handler."""
        try:
            return encode(to_wire(error, self.name, self.describe(kind, value), self.transport.entropy(8).hex()), self.limits)
        except MemoryError:
            return self._overloaded()

    def describe(self, kind: int, value: Any) -> str:
        """The function that a request is about."""
        if self._describe is not None:
            try:
                return self._describe(kind, value)
            except Exception:  # the value may be anything
                logger.debug("worker %s: naming the function of a request failed", self.name, exc_info=True)
        return str(getattr(kind, "name", f"kind {kind}"))

    def new_session(self, peer: PeerId) -> RpcSession:
        """A session that counts against the budget of that peer."""
        budget = self._budgets.get(peer)
        if budget is None:
            budget = self._budgets[peer] = self._budget.child()
        return RpcSession(self.limits, budget, overloaded=self._overloaded, too_long=self._too_long)

    def _overloaded(self) -> Sequence[Buffer]:
        """The message that refuses a request; the same each time, since refusing must be cheap and possible without free memory."""
        return self._refusal

    def opened(self, peer: Peer) -> None:
        """Register a peer with its first session."""
        self._peers[peer.id] = peer

    def seen(self, identity: PeerIdentity, but: PeerSession | None = None) -> None:
        """Called when the identity of a peer is certain: sessions with other incarnations are lost, except `but`, which the caller handles."""
        peer = self._peers.get(identity.peer)
        if peer is None:
            return
        for session in list(peer.sessions):
            if session is not but and session.identity not in (None, identity):
                peer.lose(session, RESTARTED)

    def lost(self, peer: Peer, session: PeerSession, reason: str) -> None:
        """Called when a session with a peer has ended."""
        if not peer.sessions:
            self._peers.pop(peer.id, None)
            self._budgets.pop(peer.id, None)
        self._stopping = [task for task in (*self._stopping, *session.handlers) if not task.done()]
        self._lost_peers.note(peer.id, self.loop.time() + session.left(), was_heard=session.attached_at > -math.inf)
        identity = session.identity
        if identity is None or not self._is_open:
            return
        self._remember(session.id, identity, session.rpc_session.delivered + 1)
        if session.successor is not None and not session.is_confirmed:
            return  # the peer never knew of it
        self._lost += 1
        fields = {"worker": self.name, "peer": peer.name}
        logger.info("worker %s: lost worker %s (principal %s): %s", self.name, peer.name, peer.principal, reason, extra=fields)
        if session.is_used and self._on_lost is not None:
            try:
                since = math.inf if session.successor is None else session.spared_since
                self._on_lost(identity, WorkerLostError(f"worker {peer.name!r} was lost: {reason}", worker=peer.name, spared_since=since))
            except Exception as error:
                self.loop.call_exception_handler({"message": "on_lost raised", "exception": error})

    def _remember(self, session: bytes, identity: PeerIdentity, first: int) -> None:
        now = self.loop.time()
        known = self._ended.setdefault(identity.principal, {})
        while known and ((oldest := next(iter(known.items())))[1][2] <= now or len(known) >= ENDED_SESSIONS):
            del known[oldest[0]]
        known[session] = identity, first, now + self.limits.max_deadline

    def ended_sessions(self, identity: PeerIdentity, session: bytes | None = None) -> list[SessionEnded]:
        """The last delivered request of each session of a peer that has ended here; the one of `session` comes last.

        A `session` that is not known is over from now on.
        """
        known = {id: first for id, (whose, first, _) in self._ended.get(identity.principal, {}).items() if whose == identity}
        last: list[SessionEnded] = []
        if session is not None:
            last.append(SessionEnded(session, known.pop(session, NOT_KNOWN)))
            if last[0].first == NOT_KNOWN:
                self._remember(session, identity, NOT_KNOWN)
        return [SessionEnded(id, first) for id, first in known.items()][-ENDED_TOLD:] + last

    def is_over(self, identity: PeerIdentity, session: bytes) -> bool:
        """True if a session of a peer has ended here, or was denied."""
        known = self._ended.get(identity.principal, {}).get(session)
        return known is not None and known[0] == identity

    def was_there(self, peer: PeerId) -> bool:
        """True if there was a session with a peer, lately, that has ended."""
        return any(whose.peer == peer for whose, _, _ in self._ended.get(peer.principal, {}).values())

    # ---- incoming connections

    def _accept(self, channel: Channel) -> None:
        if not self._is_open or len(self._handshakes) >= self.limits.connections:
            channel.close()
            return
        asked: list[bytes] = []
        answerer = Answerer(
            self.name,
            self.incarnation,
            self.keyring,
            self.transport.entropy,
            self.limits,
            functools.partial(self._may_resume, asked),
            is_taken=self._is_taken,
            certified_names=channel.certified_names,
        )
        handshake = ServerHandshake(channel, answerer, self.limits.handshake_timeout, functools.partial(self._handshake_done, asked))
        if not handshake.is_done:
            self._handshakes[handshake] = None

    def _is_taken(self, identity: PeerIdentity) -> bool:
        peer = self._peers.get(identity.peer) if self.keeps_names else None
        return peer is not None and any(each.channel is not None and each.identity not in (None, identity) for each in peer.sessions)

    def _may_resume(self, asked: list[bytes], identity: PeerIdentity, session: bytes) -> bool:
        asked.append(session)
        peer = self._peers.get(identity.peer)
        found = None if peer is None else peer.find(session)
        return found is not None and found.identity == identity

    def _handshake_done(self, asked: list[bytes], handshake: ServerHandshake, channel: SecureChannel | None, why: BaseException | None) -> None:
        self._handshakes.pop(handshake, None)
        if channel is None:
            self._failed_handshakes += 1
            self._handshake_log.failed(handshake.remote, why, self.context)
            return
        identity = channel.secured.peer
        self.seen(identity)
        peer = self._peers.get(identity.peer)
        if peer is None:
            peer = Peer(self, identity.peer)
        peer.accept(channel, asked[0] if asked else None)

