"""Office: everything a worker has, under one roof: its endpoint, contexts, passes, calls and references.

`aiograd.distributed.worker.Worker` is its public face.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiograd.distributed.codec import WireReference
from aiograd.distributed.context import Context
from aiograd.distributed.contexts import Caller, ContextTable
from aiograd.distributed.driver.calls import Calls
from aiograd.distributed.driver.endpoint import Endpoint
from aiograd.distributed.driver.membership import Membership
from aiograd.distributed.driver.objects import Objects
from aiograd.distributed.driver.part import Part
from aiograd.distributed.driver.passes import Passes
from aiograd.distributed.driver.timers import call_at
from aiograd.distributed.encodings import Encoding
from aiograd.distributed.identity import Identity, PeerId
from aiograd.distributed.keyring import Keyring
from aiograd.distributed.kinds import Kind
from aiograd.distributed.limits import Limits, check_number
from aiograd.distributed.references import RemoteRef
from aiograd.distributed.scope import SCOPE
from aiograd.distributed.service import Service
from aiograd.distributed.transport import Transport
from aiograd.errors import (
    ContextNotFoundError,
    ContextReleasedError,
    DeadlineError,
    DistributedError,
    ProtocolError,
    UnknownPeerError,
    WorkerLostError,
)

logger = logging.getLogger("aiograd.distributed")

#: times that a worker is found lost before it is left to its lease to release a context there
LOST = 3


class Office:
    """What a worker is made of.

    Args:
        worker: the public object, which handlers see.
        name, service, keyring, limits, transport: as of `Worker`.
        encoding, gradient_encoding: how floating-point values and gradients travel.
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
        self.safeguards = transport.safeguards
        self.entropy = transport.entropy
        self.encoding = encoding
        self.gradient_encoding = gradient_encoding
        #: what records the functions and passes that this worker runs for others, or None
        self.profiler: Any = None
        self.endpoint = Endpoint(
            name, transport=transport, keyring=keyring, limits=limits, handler=self._handle, on_lost=self._on_lost, describe=_describe
        )
        self.principal = keyring.default_principal
        self.passes = Passes(self)
        self.contexts = ContextTable(name, limits, transport.safeguards, transport.entropy, self.passes)
        self.calls = Calls(self)
        self.objects = Objects(self)
        self.membership = Membership(worker, name, self.principal, self.calls.builtins)
        self.is_closing = False
        self.passes_begun = 0
        self.passes_committed = 0
        self.passes_aborted = 0
        self._kept: dict[asyncio.Task[None], None] = {}
        #: workers that were lost, and have not been seen to be back
        self._lost: set[PeerId] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop
        self._handlers: dict[int, Callable[[Caller, Any, float], Awaitable[Any]]] = {
            Kind.CALL: self.calls.on_call,
            Kind.MARK: self.passes.on_mark,
            Kind.GRADIENT: self.passes.on_gradient,
            Kind.COMMIT: self.passes.on_commit,
            Kind.ABORT: self.passes.on_abort,
            Kind.OUTCOME: self.passes.on_outcome,
            Kind.RELEASE: self._on_release,
            Kind.RENEW: self._on_renew,
        }

    # ---------------------------------------------------------------- life

    async def open(self, host: str, port: int) -> str:
        """Start to listen; returns the URL."""
        self._loop = asyncio.get_running_loop()
        return await self.endpoint.open(host, port)

    async def aclose(self) -> None:
        """Release this worker's contexts, end what runs, say goodbye. Idempotent."""
        self.is_closing = True
        try:
            if len(self.contexts):  # without any, gather would ask for an event loop
                await asyncio.gather(*map(self.release, self.contexts))
        finally:
            if self._sweeper is not None:
                self._sweeper.cancel()
                self._sweeper = None
            try:
                await self.endpoint.aclose()
            finally:
                self.objects.table.clear()
                self.objects.adapters.clear()
                self.objects.transfers.clear()
                kept = list(self._kept)
                for task in kept:
                    task.cancel()
                if kept:
                    await asyncio.wait(kept)

    def check_open(self) -> None:
        """Raise unless the worker is open."""
        if not self.endpoint.is_open:
            raise DistributedError(f"worker {self.name!r} is not open; use it within `async with`")

    def now(self) -> float:
        """Time of the loop, in seconds."""
        return self._loop.time()

    def time_for(self, timeout: float | None) -> float:
        """Seconds that a call or pass may take: what was asked for, but not more than is left to the request that is being served.

        Raises:
            ArgumentTypeError: no number. ArgumentError: not above 0, or above `Limits.max_deadline`. DeadlineError: nothing is left.
        """
        if timeout is None:
            seconds = self.limits.default_deadline
        else:
            check_number("timeout", timeout, self.limits.max_deadline, "Limits.max_deadline")
            seconds = timeout
        scope = SCOPE.get()
        if scope is not None and scope.deadline is not None and scope.worker is self.worker and self.safeguards.shrink_deadline:
            left = scope.deadline - self.now()
            if left <= 0:
                raise DeadlineError("the request that is being served has expired: nothing more is asked on its behalf")
            seconds = min(seconds, left)
        return seconds

    def leaving(self, stage: str) -> WorkerLostError:
        """What a worker that is being closed says to those for whom something runs there."""
        return WorkerLostError(f"worker {self.name!r} was lost ({stage}): it was closed", worker=self.name, stage=stage)

    def keep(self, coroutine: Coroutine[Any, Any, None], name: str, context: contextvars.Context | None = None) -> asyncio.Task[None]:
        """Run something that outlives its caller; it is cancelled when the worker closes."""
        task = self._loop.create_task(coroutine, name=f"aiograd:{self.name}:{name}", context=context)
        self._kept[task] = None
        task.add_done_callback(self._let_go)
        return task

    def _let_go(self, task: asyncio.Task[None]) -> None:
        self._kept.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("worker %s: %s failed: %s", self.name, task.get_name(), error)

    # ---------------------------------------------------------------- requests

    def request(self, peer: str, kind: int, value: Any, timeout: float, principal: str | None = None) -> Coroutine[Any, Any, Any]:
        """Ask another worker, or this one; see `Endpoint.request`."""
        return self.endpoint.request(peer, kind, value, timeout, principal)

    async def _handle(self, peer: Identity, kind: int, value: Any, timeout: float) -> Any:
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"a request of unknown kind {kind}", code="kind")
        return await handler(Caller(*peer), value, timeout)

    def reference(self, wire: WireReference) -> RemoteRef:
        """A reference that came in a message."""
        return RemoteRef(wire, self.objects.request, self.objects.local)

    def part_ended(self, part: Part) -> None:
        """A pass is over on this worker."""
        if part.state == "committed":
            self.passes_committed += 1
        else:
            self.passes_aborted += 1

    def _on_lost(self, identity: Identity, error: WorkerLostError) -> None:
        self._lost.add(identity.peer)
        self.objects.transfers.forget(identity)
        self.passes.on_lost(identity.name, identity.principal, error)
        self.membership.peer_lost(identity)

    # ---------------------------------------------------------------- contexts

    def context_entered(self) -> None:
        """A context may be new here: see that leases are looked after."""
        if self._sweeper is None:
            self._sweeper = call_at(self.endpoint.context, self._loop, self.now() + self.limits.lease_seconds / 3, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        if not len(self.contexts):
            return
        self.context_entered()
        for context in self.contexts.expired(self.now()):
            logger.info("worker %s: nobody has renewed the lease of context %s: released", self.name, context.id)
            self.keep(self.release(context), "release")
        for (name, principal), renewals in self.contexts.renewals().items():
            self.keep(self._renew(name, principal, renewals), "renew")

    async def _renew(self, name: str, principal: str, renewals: list[tuple[bytes, int]]) -> None:
        try:
            await self.request(name, Kind.RENEW, (renewals,), self.limits.lease_seconds / 3, principal)
        except DistributedError as error:
            logger.debug("worker %s: renewing leases at %s failed: %s", self.name, name, error)

    async def release(self, context: Context) -> None:
        """Drop a context here and on every worker that got to know it from here; passes and calls that run in it end.

        Waits for those of the other workers that are within reach, for a moment; telling them goes on after that.
        """
        if not self.contexts.remove(context, self.now()):
            return
        context.is_released = True
        self._lost = {peer for peer in self._lost if not self.endpoint.is_connected(peer)}
        telling = {name: self.keep(self._tell_release(context, name), "release") for name in sorted(context.known_workers - {self.name})}
        parts = self.passes.on_released(context)
        current = asyncio.current_task()
        if self.safeguards.release_ends_calls:
            for call in list(context.calls):
                if call is not current:
                    call.cancel()
        for part in parts:
            await part.wait_ended()
        context.drop()
        waiting = [task for name, task in telling.items() if PeerId(context.principal, name) not in self._lost]
        if waiting:
            await asyncio.wait(waiting, timeout=self.limits.silence)

    async def _tell_release(self, context: Context, name: str) -> None:
        until = self.now() + self.limits.lease_seconds
        pause = self.limits.heartbeat
        lost = 0
        while self.now() < until:
            try:
                await self.request(name, Kind.RELEASE, (context.key,), min(self.limits.default_deadline, until - self.now()), context.principal)
                return
            except (ContextNotFoundError, ContextReleasedError, UnknownPeerError):
                return
            except WorkerLostError as error:
                lost += 1
                if error.is_gone or lost > LOST or self.endpoint.url_of(PeerId(context.principal, name)) is None:
                    return  # gone, or to find its own way back: there the lease ends
            except (DistributedError, MemoryError) as error:
                logger.debug("worker %s: releasing %s at %s failed: %s", self.name, context.id, name, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10.0)

    async def _on_release(self, caller: Caller, value: Any, timeout: float) -> bool:
        if not (isinstance(value, tuple) and len(value) == 1):
            raise ProtocolError("a malformed release", code="release")
        try:
            context = self.contexts.find(value[0], caller, self.now())
        except ContextNotFoundError:
            self.contexts.bury(value[0], caller.principal, self.now())
            raise
        if self.contexts.let_go(context, caller):
            await self.release(context)
        return True

    async def _on_renew(self, caller: Caller, value: Any, timeout: float) -> bool:
        if not (isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], list)):
            raise ProtocolError("a malformed renewal", code="renew")
        self.contexts.renew(caller, value[0], self.now())
        return True


def _describe(kind: int, value: Any) -> str:
    """What a request was about, for errors."""
    if kind == Kind.CALL and isinstance(value, tuple) and value and isinstance(value[0], str):
        function, args = value[0], value[1] if len(value) > 1 and isinstance(value[1], list) else []
        if function == "aiograd.reference.call" and len(args) > 1 and isinstance(args[0], WireReference):
            return f"{args[0].type_name:.80}.{args[1]!s:.80}"
        if function == "aiograd.reference.create" and args:
            return f"{args[0]!s:.80}"
        return function[:80]
    return Kind(kind).name.lower() if kind in Kind._value2member_map_ else f"kind {kind}"
