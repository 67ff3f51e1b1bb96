"""ContextTable: the contexts of a worker, the principals that may use them, and their leases.

Note [Access to contexts]
    A context is opened by its worker's own code, or by a call that says so, from an authenticated principal and within its quota. Nothing
    else creates one: an id that is unknown, released, or another principal's gives the same error, except that the
    principal that used a context is told when it has been released.

    Contexts are found by principal and id. A principal can therefore not reach another principal's context by its id: a call that
    opens a context of that id opens one of the caller's own, separate from the other.

Note [Leases]
    A worker keeps a context for the workers that opened it there: each renews its lease now and then. When the last lease has run out, or
    the worker that first opened the context releases it, the context is dropped, and so are the contexts that it opened on further workers.

    Workers that call each other open the context on each other, so leases form cycles. A renewal therefore carries a counter that only the worker
    which first opened the context increments and the others pass on, and a lease is renewed only by a counter value that is
    new: once that worker is gone, no new values come, and all leases in the cycle end.

Note [Tombstones]
    The id of a released context is remembered until no message about it can be under way any more, so that a late call does not open it
    again. This also holds for a context that is released before it was opened: a release may overtake a large call. Each principal has
    tombstones of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from aiograd.distributed.autograd.context import Context, DistributedPassRunner
from aiograd.distributed.messages.calls import CallHeader
from aiograd.distributed.messages.passes import Lease
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ContextNotFoundError, ContextReleasedError, Overloaded

#: the largest number of released contexts of one principal that are remembered
TOMBSTONES = 1 << 16

class ContextTable:
    """The contexts of one worker.

    Args:
        here, incarnation: name and incarnation of the worker.
        runner: runs the passes of contexts.
        entropy: gives unguessable bytes.
    """

    def __init__(self, here: str, incarnation: bytes, limits: Limits, entropy: Callable[[int], bytes], runner: DistributedPassRunner) -> None:
        self.here = here
        self.incarnation = incarnation
        self.limits = limits
        self._entropy = entropy
        self._runner = runner
        self._open: dict[tuple[str, bytes], Context] = {}
        #: principal -> id -> time until which the release is remembered, in ascending order
        self._released: dict[str, dict[bytes, float]] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Any:
        return iter(list(self._open.values()))

    # ---------------------------------------------------------------- opening and finding

    def open(self, principal: str) -> Context:
        """A new context of this worker's own code.

        Raises:
            Overloaded: there are too many.
        """
        return self._add(self._entropy(16), self.here, principal)

    def enter(self, caller: PeerIdentity, header: CallHeader, now: float) -> Context:
        """The context of a call, opened if the call may do that.

        Raises:
            ContextNotFoundError, ContextReleasedError, Overloaded: there is no such context, and it cannot be opened.
        """
        context = self._find(header.key, caller.principal)
        if context is None and self._may_open(header):
            self._check_tombstone(header.key, caller.principal, now)
            context = self._add(header.key, header.origin, caller.principal)
        if context is None:
            raise self._unknown(header.key, caller.principal, now)
        if context.openers or context.origin != self.here:
            context.openers[caller.name, caller.incarnation] = now + self.limits.lease_seconds
        return context

    def _may_open(self, header: CallHeader) -> bool:
        """True if the call may open its context: its header says so, and this worker is not the one that first opened it."""
        return header.opens and header.origin != self.here

    def find(self, key: bytes, caller: PeerIdentity, now: float) -> Context:
        """The context of a message that is no call.

        Raises:
            ContextNotFoundError, ContextReleasedError: there is none for this caller.
        """
        context = self._find(key, caller.principal)
        if context is None:
            raise self._unknown(key, caller.principal, now)
        return context

    def _find(self, key: bytes, principal: str) -> Context | None:
        return self._open.get((principal, key))

    def _add(self, key: bytes, origin: str, principal: str) -> Context:
        count, limits = self._counts.get(principal, 0), self.limits
        if len(self._open) >= limits.contexts or count >= limits.contexts_per_principal:
            raise Overloaded(
                f"worker {self.here} has {count} open contexts for this principal (Limits.contexts_per_principal={limits.contexts_per_principal}) "
                f"and {len(self._open)} in all (Limits.contexts={limits.contexts}): leave some first, or raise the limits"
            )
        context = self._open[principal, key] = Context(
            key, origin, principal, self.here, self.incarnation, self._runner, self.limits.edges_per_context
        )
        self._counts[principal] = count + 1
        return context

    def _check_tombstone(self, key: bytes, principal: str, now: float) -> None:
        if key in self._released.get(principal, ()):
            raise self._unknown(key, principal, now)

    def _unknown(self, key: bytes, principal: str, now: float) -> ContextNotFoundError | ContextReleasedError:
        if self._released.get(principal, {}).get(key, now) > now:
            return ContextReleasedError(f"the context has been released on {self.here}: nothing can be done in it any more")
        return ContextNotFoundError(
            f"worker {self.here} knows no such autograd context: a context becomes known by the first call made in it, and is forgotten when its "
            "worker is restarted"
        )

    # ---------------------------------------------------------------- the end

    def remove(self, context: Context, now: float) -> bool:
        """Remove a context, leaving a tombstone; returns True if it was known."""
        if self._open.pop((context.principal, context.key), None) is None:
            return False
        self._counts[context.principal] -= 1
        if not self._counts[context.principal]:
            del self._counts[context.principal]
        self.bury(context.key, context.principal, now)
        return True

    def bury(self, key: bytes, principal: str, now: float) -> None:
        """Remember that a principal's context has been released."""
        stones = self._released.setdefault(principal, {})
        stones.pop(key, None)
        while stones and ((oldest := next(iter(stones.items())))[1] <= now or len(stones) >= TOMBSTONES):
            del stones[oldest[0]]
        stones[key] = now + 2 * max(self.limits.default_deadline, self.limits.lease_seconds)

    def let_go(self, context: Context, caller: PeerIdentity) -> bool:
        """Remove an opener that does not need the context any more; returns True if no opener is left.

        If the worker that first opened the context lets it go, it is released for all.
        """
        opener = (caller.name, caller.incarnation)
        if opener not in context.openers:
            return False
        if caller.name == context.origin:
            context.openers.clear()
        else:
            del context.openers[opener]
        return not context.openers

    def renew(self, caller: PeerIdentity, leases: Iterable[Lease], now: float) -> None:
        """Renew the leases that a worker names, see Note [Leases]. A lease of an unknown context is ignored: it may overtake the opening call."""
        opener = (caller.name, caller.incarnation)
        for lease in leases:
            context = self._open.get((caller.principal, lease.key))
            if context is not None and opener in context.openers and lease.counter > context.known_counters.get(opener, 0):
                context.known_counters[opener] = lease.counter
                context.counter = max(lease.counter, context.counter)
                context.openers[opener] = now + self.limits.lease_seconds

    def expired(self, now: float) -> list[Context]:
        """Contexts without a valid lease."""
        over: list[Context] = []
        for context in self:
            if not context.openers:
                continue
            for opener in [opener for opener, until in context.openers.items() if until <= now]:
                del context.openers[opener]
            if not context.openers:
                over.append(context)
        return over

    def renewals(self) -> dict[tuple[str, str], list[Lease]]:
        """(worker, principal) -> the arguments of `renew` there, for the contexts that this worker has opened there."""
        held: dict[tuple[str, str], list[Lease]] = {}
        for context in self:
            if context.origin == self.here:
                context.counter += 1
            for name in sorted(context.known_workers - {self.here}):
                held.setdefault((name, context.principal), []).append(Lease(context.key, context.counter))
        return held
