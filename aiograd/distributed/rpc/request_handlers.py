"""RequestHandlers: runs the handlers of the requests that a peer sends in one session, and gives their answers to the session.

Note [Context of handlers]
    Handlers and timers run in copies of the context in which the endpoint was opened, not in the context that is current when a frame
    arrives: a ContextVar of one caller must not leak into the handler of another's request.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from aiograd.distributed import failpoints
from aiograd.distributed.failpoints import RequestPoints
from aiograd.distributed.rpc.codec import NOTHING, decode, encode
from aiograd.distributed.rpc.effects import Deliver
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.session import RpcSession
from aiograd.distributed.rpc.timers import running_task
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import WorkerLostError

#: seconds for which the answer to a request that was served at once is held, where the peer does not wait for it; and the longest such request
HOLD, HOLD_BYTES = 0.005, 64 << 10


#: serves requests: called with the identity of the requester, the kind, the message, and the seconds that are left
Handler: TypeAlias = Callable[[PeerIdentity, int, Any, float], Coroutine[Any, Any, Any]]
#: serves requests that need no task: called with the identity of the requester and the message; True: the peer waits for the answer, which is None
PromptHandler: TypeAlias = Callable[[PeerIdentity, Any], bool]


class HandlingPeer(Protocol):
    """The part of a `Peer` that the handlers of requests use."""

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


class ServedSession(Protocol):
    """The part of a `PeerSession` that its handlers use."""

    @property
    def peer(self) -> HandlingPeer:
        """The owner of the session."""

    rpc_session: RpcSession
    identity: PeerIdentity | None

    def pump(self, now: float, points: RequestPoints | None = None) -> None:
        """Send frames."""


class RequestHandlers:
    """The handlers of the peer's requests in one session.

    Args:
        session: the session.
    """

    __slots__ = ("_session", "_peer", "_running", "_stopping")

    def __init__(self, session: ServedSession) -> None:
        self._session = session
        self._peer = session.peer
        #: by id of the request
        self._running: dict[int, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    def begin(self, effect: Deliver) -> None:
        """Begin to serve a request of the peer."""
        peer = self._peer
        prompt = peer.prompt_handlers.get(effect.kind)
        if prompt is not None:
            peer.context.copy().run(self._serve_promptly, effect, prompt)
        else:
            self._running[effect.id] = peer.loop.create_task(self._serve(effect), context=peer.context.copy())

    async def _serve(self, effect: Deliver) -> None:
        id, kind, message, timeout = effect
        del effect
        value: Any = None
        failed = False
        stop: BaseException | None = None
        answer: Sequence[Buffer]
        peer = self._peer
        try:
            value = decode(message, peer.limits)
            del message
            answer = encode(await peer.handler(self._known(), kind, value, timeout), peer.limits)
        except BaseException as error:
            if isinstance(error, GeneratorExit) and running_task() is not self._running.get(id):
                raise  # this coroutine is closed from outside: there is no answer
            if id not in self._running:  # abandoned: no answer is awaited
                if isinstance(error, SystemExit):
                    return
                raise
            failed = True
            answer = peer.failure(error, kind, value)
            if isinstance(error, KeyboardInterrupt):
                stop = error
        if self._running.pop(id, None) is not None:
            now = self._peer.loop.time()
            self._session.rpc_session.respond(id, answer, now, failed)
            points = peer.failpoints.get(kind)
            self._session.pump(now, points)
            if points is not None:
                failpoints.reach(points.answer_sent)
        if stop is not None:  # it ends the process: it is raised out of the loop, as from any task, but the answer goes first
            self._peer.loop.call_soon(_raise, stop)

    def _serve_promptly(self, effect: Deliver, handler: PromptHandler) -> None:
        """Serve a request that needs no task; its answer goes out after all requests that came with it."""
        id, kind, message, _ = effect
        value: Any = None
        failed, hold = False, 0.0
        answer: Sequence[Buffer] = NOTHING
        size = len(message)
        try:
            value = decode(message, self._peer.limits)
            if not handler(self._known(), value) and size <= HOLD_BYTES:
                hold = HOLD
        except BaseException as error:
            failed = True
            answer = self._peer.failure(error, kind, value)
            if not isinstance(error, Exception):  # it ends the process: see `_serve`
                self._peer.loop.call_soon(_raise, error)
        self._session.rpc_session.respond(id, answer, self._peer.loop.time(), failed, hold)

    def abandon(self, id: int) -> None:
        """Cancel the handler of a request."""
        task = self._running.pop(id, None)
        if task is not None and not task.done():
            self._stopping.add(task)
            task.add_done_callback(self._stopped)
            task.cancel()

    def abandon_all(self) -> None:
        """Cancel all handlers."""
        for id in list(self._running):
            self.abandon(id)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that it is not logged

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of running handlers, including the ones that are being cancelled."""
        return [*self._running.values(), *self._stopping]

    def _known(self) -> PeerIdentity:
        identity = self._session.identity
        if identity is None:
            raise WorkerLostError(f"worker {self._peer.name!r} asked for something before it was known", worker=self._peer.name)
        return identity


def _raise(error: BaseException) -> None:
    raise error
