"""ContextTable: the contexts that a worker knows, who may use them, and for how long.

Note [Who opens, who may use]
    A context is opened by its worker's own code, or by a call that says so, from an authenticated principal and within its quota. Nothing
    else creates one: an id that is unknown, released, or another principal's is the same error to whoever names it, except that the
    principal that used a context is told when it has been released.

    Contexts are found by principal and id. Another principal's context is therefore not there, whatever is done with its id: a call that
    opens a context of that id opens one of the caller's own, and neither sees the other.

Note [Leases]
    A worker keeps a context for those who opened it there: each renews its lease now and then. When the last lease has run out, or
    the worker that opened the context in the first place releases it, the context goes, and with it what it opened elsewhere.

    Workers that call each other open the context on each other, so leases go in circles. A renewal therefore carries a number that the worker
    which opened the context in the first place counts up and the others pass on, and only a number that is new from there renews
    anything: once that worker is gone, no new ones come, and the circle ends.

Note [Tombstones]
    The id of a released context is remembered until no message about it can be under way any more, so that a late call does not open it
    again. So is one that is released before it was known: a large call may be overtaken by the release of its context. Each principal has
    tombstones of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from aiograd.distributed.context import Context, Runner
from aiograd.distributed.limits import Limits
from aiograd.distributed.safeguards import Safeguards
from aiograd.errors import ContextNotFoundError, ContextReleasedError, Overloaded, ProtocolError

#: released contexts that are remembered at most, of one principal
TOMBSTONES = 1 << 16
#: calls within calls of one context, each made by the handler of the one before
NESTED = 64


class Caller(NamedTuple):
    """Who a request comes from; what the endpoint calls Identity."""

    name: str
    incarnation: bytes
    principal: str


class Heading(NamedTuple):
    """The part of a call that is about its context."""

    key: bytes
    #: worker that opened the context in the first place
    origin: str
    #: place of the call, see Note [Places] in `context`; without its infinities
    place: tuple[float, ...]
    #: message id of the arguments, 0 if none is differentiable
    edge: int
    #: whether the callee may get to know the context by this call
    opens: bool

    @classmethod
    def parse(cls, value: Any) -> Heading:
        """Check what came in a call.

        Raises:
            ProtocolError: it makes no sense.
        """
        if not (isinstance(value, tuple) and len(value) == 5):
            raise ProtocolError("a call with a malformed context", code="call")
        key, origin, place, edge, opens = value
        is_sound = (
            key.__class__ is bytes
            and len(key) == 16
            and origin.__class__ is str
            and 0 < len(origin) <= 128
            and is_place(place)
            and len(place) <= NESTED
            and edge.__class__ is int
            and edge >= 0
            and opens.__class__ is bool
        )
        if not is_sound:
            raise ProtocolError("a call with a malformed context", code="call")
        return cls(key, origin, place, edge, opens)


class ContextTable:
    """The contexts of one worker.

    Args:
        here: name of the worker.
        runner: runs the passes of contexts.
        entropy: gives unguessable bytes.
    """

    def __init__(self, here: str, limits: Limits, safeguards: Safeguards, entropy: Callable[[int], bytes], runner: Runner) -> None:
        self.here = here
        self.limits = limits
        self.safeguards = safeguards
        self._entropy = entropy
        self._runner = runner
        self._open: dict[tuple[str, bytes], Context] = {}
        #: by principal and id: until when; in the order of their ends
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

    def enter(self, caller: Caller, heading: Heading, now: float) -> Context:
        """The context of a call, opened if the call may do that.

        Raises:
            ContextNotFoundError, ContextReleasedError, Overloaded: there is none, and none is opened.
        """
        context = self._find(heading.key, caller.principal)
        is_new = heading.opens and heading.origin != self.here  # only a worker's own code opens a context in its name
        if context is None and (is_new or not self.safeguards.open_only_by_call):
            self._check_tombstone(heading.key, caller.principal, now)
            context = self._add(heading.key, heading.origin, caller.principal)
        if context is None:
            raise self._unknown(heading.key, caller.principal, now)
        if context.openers or context.origin != self.here:
            context.openers[caller.name, caller.incarnation] = now + self.limits.lease_seconds
        return context

    def find(self, key: Any, caller: Caller, now: float) -> Context:
        """The context of a message that is no call.

        Raises:
            ContextNotFoundError, ContextReleasedError: there is none for this caller.
        """
        context = self._find(key, caller.principal) if key.__class__ is bytes else None
        if context is None:
            raise self._unknown(key, caller.principal, now)
        return context

    def _find(self, key: bytes, principal: str) -> Context | None:
        context = self._open.get((principal, key))
        if context is None and not self.safeguards.authorize_first:
            return next((each for each in self._open.values() if each.key == key), None)
        return context

    def _add(self, key: bytes, origin: str, principal: str) -> Context:
        count, limits = self._counts.get(principal, 0), self.limits
        if len(self._open) >= limits.contexts or count >= limits.contexts_per_principal:
            raise Overloaded(
                f"worker {self.here} has {count} open contexts for this principal (Limits.contexts_per_principal={limits.contexts_per_principal}) "
                f"and {len(self._open)} in all (Limits.contexts={limits.contexts}): leave some first, or raise the limits"
            )
        context = self._open[principal, key] = Context(key, origin, principal, self.here, self._runner, self.limits.edges_per_context)
        self._counts[principal] = count + 1
        return context

    def _check_tombstone(self, key: bytes, principal: str, now: float) -> None:
        if self.safeguards.tombstone and key in self._released.get(principal, ()):
            raise self._unknown(key, principal, now)

    def _unknown(self, key: Any, principal: str, now: float) -> ContextNotFoundError | ContextReleasedError:
        if key.__class__ is bytes and self._released.get(principal, {}).get(key, now) > now:
            return ContextReleasedError(f"the context has been released on {self.here}: nothing can be done in it any more")
        return ContextNotFoundError(
            f"worker {self.here} knows no such autograd context: a context becomes known by the first call made in it, and is forgotten when its "
            "worker is restarted"
        )

    # ---------------------------------------------------------------- the end

    def remove(self, context: Context, now: float) -> bool:
        """Forget a context, leaving a tombstone; returns whether it was known."""
        if self._open.pop((context.principal, context.key), None) is None:
            return False
        self._counts[context.principal] -= 1
        if not self._counts[context.principal]:
            del self._counts[context.principal]
        self.bury(context.key, context.principal, now)
        return True

    def bury(self, key: Any, principal: str, now: float) -> None:
        """Remember that a principal's context has been released."""
        if key.__class__ is not bytes or len(key) != 16:
            return
        stones = self._released.setdefault(principal, {})
        stones.pop(key, None)
        while stones and ((oldest := next(iter(stones.items())))[1] <= now or len(stones) >= TOMBSTONES):
            del stones[oldest[0]]
        stones[key] = now + 2 * max(self.limits.default_deadline, self.limits.lease_seconds)

    def let_go(self, context: Context, caller: Caller) -> bool:
        """One of those who opened a context needs it no more; returns whether nobody does.

        The worker that opened it in the first place decides for everybody.
        """
        opener = (caller.name, caller.incarnation)
        if opener not in context.openers:
            return False
        if caller.name == context.origin:
            context.openers.clear()
        else:
            del context.openers[opener]
        return not context.openers

    def renew(self, caller: Caller, renewals: Iterable[Any], now: float) -> None:
        """Renew the leases that a worker names, see Note [Leases]. Others are left alone: a call that opens one may have overtaken this.

        Args:
            renewals: keys of contexts, each with the latest number that the worker knows of it.
        """
        opener = (caller.name, caller.incarnation)
        for renewal in renewals:
            if not (renewal.__class__ is tuple and len(renewal) == 2 and renewal[0].__class__ is bytes and renewal[1].__class__ is int):
                continue
            key, beat = renewal
            context = self._open.get((caller.principal, key))
            if context is not None and opener in context.openers and beat > context.beats.get(opener, 0):
                context.beats[opener] = beat
                context.beat = max(beat, context.beat)
                context.openers[opener] = now + self.limits.lease_seconds

    def expired(self, now: float) -> list[Context]:
        """Contexts whose last lease has run out."""
        over: list[Context] = []
        for context in self:
            if not context.openers:
                continue
            for opener in [opener for opener, until in context.openers.items() if until <= now]:
                del context.openers[opener]
            if not context.openers:
                over.append(context)
        return over

    def renewals(self) -> dict[tuple[str, str], list[tuple[bytes, int]]]:
        """By worker and principal: what `renew` needs there, of the contexts that this worker has made known there."""
        held: dict[tuple[str, str], list[tuple[bytes, int]]] = {}
        for context in self:
            if context.origin == self.here:
                context.beat += 1
            for name in sorted(context.known_workers - {self.here}):
                held.setdefault((name, context.principal), []).append((context.key, context.beat))
        return held


def is_place(value: Any) -> bool:
    """Whether a value that came from a peer is a place, as it travels: see Note [Places] in `context`."""
    return (
        value.__class__ is tuple
        and 0 < len(value) <= NESTED + 1
        and all(number.__class__ is int and -(1 << 63) <= number < 0 for number in value)
    )


def place_of_call(place: tuple[float, ...]) -> tuple[int, ...]:
    """A place as it travels: without the infinity at its end."""
    return tuple(int(number) for number in place if number != -math.inf and number != math.inf)
