"""WorkerCore: the services that all parts of a worker share: name, limits, clock, endpoint, requests to peers, and background tasks.

It does not depend on contexts, calls, passes or objects. `aiograd.distributed.worker` makes these, and they register their handlers with the core.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from aiograd.coordination.message_form import WireMessage, encode, encode_answer, parse, parse_answer
from aiograd.coordination.silence import unless_silent
from aiograd.distributed.loop_lag import LoopLag
from aiograd.distributed.messages.calls import FunctionCall
from aiograd.distributed.messages.fields import TraceContext
from aiograd.distributed.messages.library import CallMethod, CreateObject
from aiograd.distributed.messages.requests import REQUESTS
from aiograd.distributed.meter import Meter
from aiograd.distributed.multicast import Multicast
from aiograd.distributed.rpc.codec import WireReference
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.identity import PeerId, PeerIdentity
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.distributed.rpc.limits import Limits, check_number
from aiograd.distributed.rpc.request_handlers import PromptHandler
from aiograd.distributed.rpc.transport import Transport
from aiograd.distributed.scope import SCOPE
from aiograd.distributed.service import Service
from aiograd.distributed.wait_tables import WaitTable
from aiograd.engine.run.failures import clear_frames
from aiograd.errors import DeadlineError, DistributedError, ProtocolError, WorkerLostError
from aiograd.running.log_fields import structured_logger

logger = structured_logger("aiograd.distributed")

#: serves requests: called with the caller's identity, the wire value or the message, and the seconds that are left
Handler = Callable[[PeerIdentity, Any, float], Awaitable[Any]]


class Watch(Protocol):
    """The interface of a dashboard to its worker."""

    def recorder(self, is_recorded: bool) -> Any:
        """The recorder for a piece of work, or None. `is_recorded`: the peer that asks for it records its own part."""


class WorkerCore:
    """State and services that the parts of a worker share.

    Args:
        worker: the public object, which handlers see.
        name, service, keyring, limits, transport: as for `Worker`.
        encoding, gradient_encoding: the wire encodings of floating-point values and of gradients.

    Attributes:
        handlers: by kind of request, on wire values; `serve` adds them.
        prompt_handlers: the same for kinds that are served without a task; see `Endpoint`.
        on_lost: called with each peer that is lost and the error, in order.
        principal: the principal that the worker's own code acts for.
        profiler: records the functions and passes that this worker runs for peers, or None.
        watch: records the work of this worker for a dashboard, or None; see `recorder`.
        meter: counts exchanges with other workers.
        loop_lag: how late timers of the loop fire.
        multicast: sends messages to many workers at once.
        wait_tables: readers of what waits in the parts of the worker; see `wait_tables`.
        is_closing: True from the beginning of `aclose`.
        loop: the event loop on which the worker was opened.
    """

    def __init__(
        self,
        worker: Any,
        name: str,
        *,
        service: Service,
        keyring: Keyring,
        limits: Limits,
        transport: Transport,
        encoding: Encoding,
        gradient_encoding: Encoding,
    ) -> None:
        self.worker = worker
        self.name = name
        self.service = service
        self.limits = limits
        self.entropy: Callable[[int], bytes] = transport.entropy
        self.encoding = encoding
        self.gradient_encoding = gradient_encoding
        self.principal: str = keyring.default_principal
        self.profiler: Any = None
        self.watch: Watch | None = None
        self.meter: Meter = Meter()
        self.loop_lag: LoopLag = LoopLag()
        self.handlers: dict[int, Handler] = {}
        self.prompt_handlers: dict[int, PromptHandler] = {}
        self._servers: dict[type[WireMessage], Handler] = {}
        self.wait_tables: list[WaitTable] = []
        self.on_lost: list[Callable[[PeerIdentity, WorkerLostError], None]] = []
        self.endpoint: Endpoint = Endpoint(
            name,
            transport=transport,
            keyring=keyring,
            limits=limits,
            handler=self._handle,
            prompt_handlers=self.prompt_handlers,
            on_lost=self._on_lost,
            describe=_describe,
            failpoints=REQUESTS.failpoints,
        )
        self.multicast: Multicast = Multicast(self)
        self.is_closing: bool = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.loop: asyncio.AbstractEventLoop

    # ---------------------------------------------------------------- life

    async def open(self, host: str, port: int) -> str:
        """Start to listen; returns the URL."""
        self.loop = asyncio.get_running_loop()
        return await self.endpoint.open(host, port)

    async def aclose(self) -> None:
        """Stop listening, say goodbye, and cancel the tasks that were spawned. Idempotent."""
        self.is_closing = True
        self.loop_lag.stop()
        try:
            await self.endpoint.aclose()
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def check_open(self) -> None:
        """Raise unless the worker is open."""
        if not self.endpoint.is_open:
            raise DistributedError(f"worker {self.name!r} is not open; use it within `async with`")

    def closed_error(self, stage: str) -> WorkerLostError:
        """The error for requests that end early because this worker closes."""
        return WorkerLostError(f"worker {self.name!r} was lost ({stage}): it was closed", worker=self.name, stage=stage)

    # ---------------------------------------------------------------- time

    def now(self) -> float:
        """Time of the loop, in seconds."""
        return self.loop.time()

    def time_for(self, timeout: float | None) -> float:
        """Seconds that a call or pass may take: `timeout`, but not more than the time left to the request that is being served.

        Raises:
            ArgumentTypeError: no number. ArgumentError: not above 0, or above `Limits.max_deadline`. DeadlineError: no time is left.
        """
        if timeout is None:
            seconds = self.limits.default_deadline
        else:
            check_number("timeout", timeout, self.limits.max_deadline, "Limits.max_deadline")
            seconds = timeout
        scope = SCOPE.get()
        if scope is not None and scope.deadline is not None and scope.worker is self.worker:
            left = scope.deadline - self.now()
            if left <= 0:
                raise DeadlineError("the request that is being served has expired: nothing more is asked on its behalf")
            seconds = min(seconds, left)
        return seconds

    # ---------------------------------------------------------------- tasks

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str, context: contextvars.Context | None = None) -> asyncio.Task[None]:
        """Run a coroutine that outlives its caller. It is cancelled when the worker closes; an error goes to the log."""
        task = self.loop.create_task(coroutine, name=f"aiograd:{self.name}:{name}", context=context)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("worker %s: %s failed: %s", self.name, task.get_name(), error)

    # ---------------------------------------------------------------- requests

    async def ask(self, peer: str, message: WireMessage, timeout: float, principal: str | None = None) -> Any:
        """Send a request to another worker, or to this one; returns the answer, of the type of answers of the request."""
        request = type(message)
        return parse_answer(request, await self.endpoint.request(peer, request.form.kind, encode(message), timeout, principal), peer)

    def unless_silent(self, request: Coroutine[Any, Any, Any], peer: str, stage: str, principal: str | None = None) -> Coroutine[Any, Any, Any]:
        """Make a request at the end of a transaction, for as long as the worker may be heard; see `coordination.silence.unless_silent`.

        Args:
            request: the request.
            peer, principal: as for `ask`.
            stage: its name.

        Returns:
            To be awaited: the answer.
        """
        return unless_silent(request, peer, lambda: self.silence_left(peer, principal), stage, self.limits.heartbeat / 2)

    def silence_left(self, peer: str, principal: str | None = None) -> float:
        """Seconds in which a worker may still be heard, before it is lost; 0: it is. See Note [Silence is counted once] in `coordination.silence`."""
        return self.endpoint.silence_left(PeerId(self.principal if principal is None else principal, peer))

    def serve(self, servers: Mapping[type[WireMessage], Handler]) -> None:
        """Serve requests, by their classes; a handler returns the answer, of the type of answers of the request."""
        self._servers.update(servers)
        self.handlers.update({request.form.kind: functools.partial(self._serve, request.form.kind) for request in servers})

    async def _serve(self, kind: int, caller: PeerIdentity, value: Any, timeout: float) -> Any:
        message = REQUESTS.parse(kind, value)
        request = type(message)
        return encode_answer(request, await self._servers[request](caller, message, timeout))

    def serve_promptly(self, request: type[WireMessage], handler: PromptHandler) -> None:
        """Serve a request without a task: the handler gets the caller's identity and the message, see `PromptHandler`."""
        self.prompt_handlers[request.form.kind] = lambda caller, value: handler(caller, parse(request, value))

    def recorder(self, caller: PeerIdentity, trace: TraceContext) -> Any:
        """The recorder of work for a peer, or None: the worker's `profiler`, else a dashboard's, for peers of the worker's own principal."""
        if self.profiler is not None or self.watch is None or caller.principal != self.principal:
            return self.profiler
        return self.watch.recorder(trace.is_recorded)

    def acting_principal(self) -> str:
        """The principal that the running code acts for: the principal of the request it serves, else the worker's own."""
        scope = SCOPE.get()
        return self.principal if scope is None or scope.worker is not self.worker or scope.principal is None else scope.principal

    async def _handle(self, peer: PeerIdentity, kind: int, value: Any, timeout: float) -> Any:
        handler = self.handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"a request of unknown kind {kind}", code="kind")
        try:
            return await handler(peer, value, timeout)
        except BaseException as error:
            clear_frames(error, "aiograd.distributed.")
            raise

    def _on_lost(self, identity: PeerIdentity, error: WorkerLostError) -> None:
        for listener in self.on_lost:
            listener(identity, error)


def _describe(kind: int, value: Any) -> str:
    """The subject of a request, for errors."""
    if kind == FunctionCall.form.kind:
        call = parse(FunctionCall, value)
        function, args = call.function, call.args
        if function == CallMethod.form.name and len(args) > 1 and isinstance(args[0], WireReference):
            return f"{args[0].type_name:.80}.{args[1]!s:.80}"
        if function == CreateObject.form.name and args:
            return f"{args[0]!s:.80}"
        return function[:80]
    return REQUESTS.name_of(kind)
