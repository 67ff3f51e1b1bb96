"""ContextLeases: ends the contexts of a worker when their owner releases them or their lease has run out.

See Note [Leases] in `context_table`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aiograd.distributed.autograd.context import Context
from aiograd.distributed.autograd.context_table import ContextTable
from aiograd.distributed.autograd.participant import PassParticipant
from aiograd.distributed.messages.passes import Lease, Release, Renew
from aiograd.distributed.rpc.identity import PeerId, PeerIdentity
from aiograd.distributed.rpc.timers import call_at
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import ContextNotFoundError, ContextReleasedError, DistributedError, UnknownPeerError, WorkerLostError
from aiograd.running.log_fields import structured_logger

logger = structured_logger("aiograd.distributed")

#: the number of times that a release is tried on a lost worker before it is left to the lease there
LOST = 3


class ContextLeases:
    """The ends of the contexts of one worker.

    Args:
        core: the worker.
        contexts: its contexts.
        end_passes: gives up the passes of a context that is being released, and returns them.
    """

    def __init__(self, core: WorkerCore, contexts: ContextTable, end_passes: Callable[[Context], Sequence[PassParticipant]]) -> None:
        self.core = core
        self.contexts = contexts
        self._end_passes = end_passes
        #: workers that were lost and have not come back
        self._lost: set[PeerId] = set()
        self._timer: asyncio.TimerHandle | None = None
        core.serve({Release: self._on_release, Renew: self._on_renew})
        core.on_lost.append(self._on_lost)

    async def aclose(self) -> None:
        """Release all contexts of this worker."""
        try:
            if len(self.contexts):  # without any, gather would ask for an event loop
                await asyncio.gather(*map(self.release, self.contexts))
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _on_lost(self, identity: PeerIdentity, error: WorkerLostError) -> None:
        self._lost.add(identity.peer)

    # ---------------------------------------------------------------- leases

    def watch(self) -> None:
        """Renew and check leases periodically as long as there are contexts. To be called when a context may be new."""
        if self._timer is None:
            core = self.core
            self._timer = call_at(core.endpoint.context, core.loop, core.now() + core.limits.lease_seconds / 3, self._check)

    def _check(self) -> None:
        self._timer = None
        if not len(self.contexts):
            return
        self.watch()
        core = self.core
        for context in self.contexts.expired(core.now()):
            fields = {"worker": core.name, "context": context.id}
            logger.info("worker %s: the lease of context %s was not renewed: released", core.name, context.id, extra=fields)
            core.spawn(self.release(context), "release")
        for (name, principal), renewals in self.contexts.renewals().items():
            core.spawn(self._renew(name, principal, renewals), "renew")

    async def _renew(self, name: str, principal: str, renewals: list[Lease]) -> None:
        try:
            await self.core.ask(name, Renew(renewals), self.core.limits.lease_seconds / 3, principal)
        except DistributedError as error:
            logger.debug("worker %s: renewing leases at %s failed: %s", self.core.name, name, error)

    async def _on_renew(self, caller: PeerIdentity, message: Renew, timeout: float) -> bool:
        self.contexts.renew(caller, message.leases, self.core.now())
        return True

    # ---------------------------------------------------------------- release

    async def release(self, context: Context) -> None:
        """Drop a context here and on every worker where it was opened from here; passes and calls that run in it end.

        Waits a moment for the answers of reachable workers; the others are told in the background after that.
        """
        core = self.core
        if not self.contexts.remove(context, core.now()):
            return
        context.is_released = True
        self._lost = {peer for peer in self._lost if not core.endpoint.is_connected(peer)}
        telling = {name: core.spawn(self._tell_release(context, name), "release") for name in sorted(context.known_workers - {core.name})}
        participants = self._end_passes(context)
        self._end_calls(context)
        for participant in participants:
            await participant.wait_ended()
        context.drop()
        waiting = [task for name, task in telling.items() if PeerId(context.principal, name) not in self._lost]
        if waiting:
            await asyncio.wait(waiting, timeout=core.limits.silence)

    def _end_calls(self, context: Context) -> None:
        """Cancel the calls that run in a context, apart from the one that has released it."""
        current = asyncio.current_task()
        for call in list(context.calls):
            if call is not current:
                call.cancel()

    async def _tell_release(self, context: Context, name: str) -> None:
        core = self.core
        until = core.now() + core.limits.lease_seconds
        pause = core.limits.heartbeat
        lost = 0
        while core.now() < until:
            try:
                await core.ask(name, Release(context.key), min(core.limits.default_deadline, until - core.now()), context.principal)
                return
            except (ContextNotFoundError, ContextReleasedError, UnknownPeerError):
                return
            except WorkerLostError as error:
                lost += 1
                if error.is_gone or lost > LOST or core.endpoint.url_of(PeerId(context.principal, name)) is None:
                    return  # gone, or to find its own way back: there the lease ends
            except (DistributedError, MemoryError) as error:
                logger.debug("worker %s: releasing %s at %s failed: %s", core.name, context.id, name, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10.0)

    async def _on_release(self, caller: PeerIdentity, message: Release, timeout: float) -> bool:
        try:
            context = self.contexts.find(message.key, caller, self.core.now())
        except ContextNotFoundError:
            self.contexts.bury(message.key, caller.principal, self.core.now())
            raise
        if self.contexts.let_go(context, caller):
            await self.release(context)
        return True
