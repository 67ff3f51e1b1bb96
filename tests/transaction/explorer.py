"""Explorer: every state that a coordinator and its participants can reach together, whatever happens to messages, workers and time.

Note [The world]
    A world is the coordinator and the participants, each with a flag that says if it is alive. Messages are not kept: one that was sent can be
    delivered at any later moment, any number of times, or never. So a vote can be delivered from the moment its participant was prepared, the
    decision from the moment it was made, and what a worker answers from then on for ever where it says "committed", "aborted" or "unknown". That
    something is undecided may be an old answer at any time. A question may stay unanswered, at once or after the lease of whoever asks has ended;
    contact may be lost with anybody, rightly or not; and a worker may die between any two events. That is more than what connections, resends,
    freezes and crashes can do.

    Participants that differ only in their names make worlds that differ only in names; one of these stands for all of them.

Note [What is checked]
    In every world: *atomicity*: where somebody has applied, nobody has dropped what it had prepared unless it is marked in doubt; *no apply before
    all are prepared*: neither the coordinator's nor anybody's; and *termination*: when nothing goes wrong any more and timers run, everybody alive
    ends, and has acknowledged the decision unless it is in doubt. That is: from each world the step that is due leads on, and never in a circle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from aiograd.transaction import (
    AbortDecided,
    Acknowledged,
    Applied,
    ApplyFailed,
    CommitDecided,
    Coordinator,
    Failed,
    Outcome,
    OutcomeReply,
    Participant,
    ParticipantsJoined,
    PeerLost,
    Prepared,
    Tick,
    TransactionEvent,
    TransactionState,
    Unanswered,
)

#: moments: before the lease of anybody ends, and after
NOW, LATE = 0.0, 1000.0
ENDED = (TransactionState.COMMITTED, TransactionState.ABORTED, TransactionState.IN_DOUBT)
STABLE = (Outcome.COMMITTED, Outcome.ABORTED, Outcome.UNKNOWN)


class Broken(Exception):
    """A world that must not be reached; the events that lead to it are in its notes."""


class P(NamedTuple):
    """A participant, as far as it matters."""

    state: TransactionState = TransactionState.ACTIVE
    #: names, as bits
    asked: int = 0
    has_due: bool = False
    unanswered: int = 0
    #: it has voted
    was_prepared: bool = False
    is_alive: bool = True


class C(NamedTuple):
    """The coordinator."""

    state: TransactionState = TransactionState.ACTIVE
    #: names, as bits
    voted: int = 0
    unacknowledged: int = 0
    #: it remembers the transaction
    knows: bool = True
    is_alive: bool = True


World = tuple[C, tuple[P, ...]]


class Explorer:
    """The worlds of one coordinator and some participants.

    Args:
        count: of participants.
        participant, coordinator: classes; others than the real ones to see that the checks find what is wrong with them.
        listeners: how many of the participants have nothing to apply, and do not vote; they are only told.
        forgets: when the coordinator may forget a transaction.
        crashes: how many workers may die.
    """

    def __init__(
        self,
        count: int,
        *,
        participant: type[Participant] = Participant,
        coordinator: type[Coordinator] = Coordinator,
        listeners: int = 0,
        forgets: Callable[[C], bool] = lambda c: not c.unacknowledged,
        crashes: int = 9,
    ) -> None:
        self.names = tuple(f"p{i}" for i in range(count))
        self.listeners = frozenset(self.names[count - listeners :])
        self._participant = participant
        self._coordinator = coordinator
        self._forgets = forgets
        self._crashes = crashes
        self._known: dict[Any, Any] = {}
        voters = count - listeners
        self._orders = [(*a, *b) for a in itertools.permutations(range(voters)) for b in itertools.permutations(range(voters, count))]
        self._bit = {name: 1 << i for i, name in enumerate(("c", *self.names))}
        #: by order: every set of names, with names changed
        self._moved = [self._moves(order) for order in self._orders]
        self._renamed: dict[World, World] = {}

    # ---------------------------------------------------------------- the real machines, one step at a time

    def participant(self, index: int, p: P, event: TransactionEvent, now: float = NOW) -> P:
        """A participant after an event."""
        key = index, p, event, now
        found = self._known.get(key)
        if found is None:
            name = self.names[index]
            machine = self._participant("c", lease=100.0, pause=1.0, votes=name not in self.listeners)
            machine.others = tuple(other for other in self.names if other != name)
            machine.state, machine.asked, machine.unanswered = p.state, frozenset(self.who(p.asked)), p.unanswered
            machine.due = NOW if p.has_due else None
            machine.handle(event, now)
            prepared = p.was_prepared or machine.state is TransactionState.PREPARED
            unanswered = machine.unanswered if machine.state is TransactionState.UNCERTAIN else 0
            found = P(machine.state, self._bits(machine.asked), machine.due is not None, unanswered, prepared, p.is_alive)
            self._known[key] = found
        return found  # type: ignore[no-any-return]

    def coordinator(self, c: C, event: TransactionEvent) -> C:
        """The coordinator after an event."""
        key = c, event
        found = self._known.get(key)
        if found is None:
            machine = self._coordinator("c", pause=1.0)
            machine.handle(ParticipantsJoined([name for name in self.names if name not in self.listeners]), NOW)
            machine.handle(ParticipantsJoined([*self.listeners], votes=False), NOW)
            machine.state, machine.unacknowledged = c.state, frozenset(self.who(c.unacknowledged))
            machine.promises = dict.fromkeys(self.who(c.voted), LATE)
            machine.handle(event, NOW)
            voted, unacknowledged = self._bits(machine.promises), self._bits(machine.unacknowledged)
            found = self._known[key] = C(machine.state, voted, unacknowledged, c.knows, c.is_alive)
        return found  # type: ignore[no-any-return]

    def says(self, c: C, ps: tuple[P, ...], peer: str) -> Outcome:
        """The answer of a worker, or the one it gave before it died."""
        if peer == "c":
            return self._coordinator.outcomes[c.state] if c.knows else Outcome.UNKNOWN
        says = self._participant.outcomes[ps[self.names.index(peer)].state]
        return says if peer not in self.listeners or says is Outcome.COMMITTED else Outcome.UNKNOWN

    # ---------------------------------------------------------------- what may happen

    def after(self, world: World) -> Iterator[tuple[str, World]]:
        """Everything that may happen in a world, and the worlds after it."""
        c, ps = world
        if c.is_alive:
            for what, event in self._to_coordinator(c, ps):
                yield what, (self.coordinator(c, event), ps)
            if c.knows and c.state in ENDED and self._forgets(c):
                yield "c forgets", (c._replace(knows=False), ps)
        for i, p in enumerate(ps):
            if p.is_alive and p.state is not TransactionState.ABORTED:
                for event, now in self._to_participant(i, p, c, ps):
                    yield f"{self.names[i]}: {event}{' late' if now else ''}", (c, self._with(ps, i, self.participant(i, p, event, now)))
        if sum(not each.is_alive for each in (c, *ps)) < self._crashes:
            if c.is_alive:
                yield "c dies", (C(c.state, knows=c.knows, is_alive=False), ps)
            for i, p in enumerate(ps):
                if p.is_alive:  # all that is left of it are answers that it gave
                    answers = (TransactionState.COMMITTING, TransactionState.COMMITTED, TransactionState.ABORTED)
                    left = p.state if p.state in answers else TransactionState.ACTIVE
                    yield f"{self.names[i]} dies", (c, self._with(ps, i, P(left, was_prepared=p.was_prepared, is_alive=False)))

    def _to_coordinator(self, c: C, ps: tuple[P, ...]) -> Iterator[tuple[str, TransactionEvent]]:
        if c.state is TransactionState.ACTIVE:
            if not c.voted & 1:
                yield "c is prepared", Prepared(LATE, "c")
            yield "c fails", Failed()
            yield "c loses somebody", PeerLost()
        if c.state is TransactionState.COMMITTING:
            yield "c applies", Applied()
            yield "c cannot apply", ApplyFailed()
            yield "c loses somebody", PeerLost()
        for name, p in zip(self.names, ps, strict=True):
            if p.was_prepared and not c.voted & self._bit[name] and name not in self.listeners:
                yield f"{name}'s vote", Prepared(LATE, name)
            if c.unacknowledged & self._bit[name] and (p.state is c.state or (name in self.listeners and p.state in ENDED)):
                yield f"{name} acknowledges", Acknowledged(name)

    def _to_participant(self, i: int, p: P, c: C, ps: tuple[P, ...]) -> Iterator[tuple[TransactionEvent, float]]:
        if c.state is TransactionState.COMMITTED and p.state is not TransactionState.IN_DOUBT:
            yield CommitDecided(), NOW
        if c.state is TransactionState.ABORTED:
            yield AbortDecided(), NOW
        if p.state is TransactionState.ACTIVE:
            yield from ((event, NOW) for event in (Failed(), PeerLost(), Tick()))
            if self.names[i] not in self.listeners:
                yield Prepared(NOW), NOW
        elif p.state in (TransactionState.PREPARED, TransactionState.UNCERTAIN):
            yield Failed(), NOW
            if p.state is TransactionState.PREPARED:
                yield PeerLost(), NOW
            if p.has_due:
                yield Tick(), NOW
            for peer in self.who(p.asked):
                stable = self.says(c, ps, peer)
                for outcome in {Outcome.UNDECIDED, stable} if stable in STABLE else {Outcome.UNDECIDED}:
                    yield OutcomeReply(peer, outcome), NOW
                yield Unanswered(peer), NOW
                yield Unanswered(peer), LATE
        elif p.state is TransactionState.COMMITTING:
            yield from ((event, NOW) for event in (Applied(), ApplyFailed(), Failed(), AbortDecided()))

    # ---------------------------------------------------------------- when nothing goes wrong any more

    def due(self, world: World) -> World | None:
        """The next state of a world in which nothing goes wrong any more; None: everybody has ended."""
        c, ps = world
        if c.is_alive:
            for event in self._due_at_coordinator(c, ps):
                if (then := self.coordinator(c, event)) != c:
                    return then, ps
        for i, p in enumerate(ps):
            if p.is_alive:
                for event, now in self._due_at_participant(i, p, c, ps):
                    if (after := self.participant(i, p, event, now)) != p:
                        return c, self._with(ps, i, after)
        for i, p in enumerate(ps):  # only when there is nothing else to do: that the time is over
            if p.is_alive and p.has_due and (after := self.participant(i, p, Tick(), LATE)) != p:
                return c, self._with(ps, i, after)
        return None

    def _due_at_coordinator(self, c: C, ps: tuple[P, ...]) -> Iterator[TransactionEvent]:
        voters = [p for name, p in zip(self.names, ps, strict=True) if name not in self.listeners]
        if c.state is TransactionState.ACTIVE:
            if any(not p.is_alive or p.state is TransactionState.ABORTED for p in voters):
                yield PeerLost()
            else:
                yield Prepared(LATE, "c")
                yield from (Prepared(LATE, name) for name, p in zip(self.names, ps, strict=True) if p.was_prepared)
        elif c.state is TransactionState.COMMITTING:
            yield Applied()
        for name, p in zip(self.names, ps, strict=True):
            if p.is_alive and (p.state is c.state or (name in self.listeners and p.state in ENDED)):
                yield Acknowledged(name)

    def _due_at_participant(self, i: int, p: P, c: C, ps: tuple[P, ...]) -> Iterator[tuple[TransactionEvent, float]]:
        can_be_told = p.state is not TransactionState.IN_DOUBT or c.state is TransactionState.ABORTED
        if c.is_alive and c.state in (TransactionState.COMMITTED, TransactionState.ABORTED) and can_be_told:
            yield (CommitDecided() if c.state is TransactionState.COMMITTED else AbortDecided()), NOW
        elif p.state is TransactionState.ACTIVE and not c.is_alive:
            yield PeerLost(), NOW
        elif p.state is TransactionState.ACTIVE and self.names[i] not in self.listeners:
            yield Prepared(NOW), NOW
        if p.state is TransactionState.COMMITTING:
            yield Applied(), NOW
        for peer in self.who(p.asked):
            is_alive = c.is_alive if peer == "c" else ps[self.names.index(peer)].is_alive
            yield (OutcomeReply(peer, self.says(c, ps, peer)) if is_alive else Unanswered(peer)), LATE

    # ---------------------------------------------------------------- what must hold

    def check(self, world: World) -> None:
        """Raise if there is something wrong with a world."""
        c, ps = world
        voters = [p for name, p in zip(self.names, ps, strict=True) if name not in self.listeners]
        if c.state in (TransactionState.COMMITTING, TransactionState.COMMITTED) and not all(p.was_prepared for p in voters):
            raise Broken("decided before everybody was prepared")
        if any(p.state in (TransactionState.COMMITTING, TransactionState.COMMITTED) for p in ps) and c.state is not TransactionState.COMMITTED:
            raise Broken("applied before it was decided")
        if c.state is TransactionState.COMMITTED and any(p.state is TransactionState.ABORTED for p in voters):
            raise Broken("applied here and dropped there, without a mark")

    def check_end(self, world: World) -> None:
        """Raise if somebody has not ended in a world in which nothing is left to do."""
        c, ps = world
        for name, p in zip(("c", *self.names), (c, *ps), strict=True):
            if p.is_alive and p.state not in ENDED:
                raise Broken(f"{name} does not end")
        unacknowledged = [p for name, p in zip(self.names, ps, strict=True) if c.unacknowledged & self._bit[name]]
        if c.is_alive and any(p.is_alive and p.state is not TransactionState.IN_DOUBT for p in unacknowledged):
            raise Broken("somebody is never told")

    def explore(self) -> int:
        """Reach every world and check it; returns how many there are, up to names.

        Raises:
            Broken: one is wrong.
        """
        first = self._named((C(), (P(),) * len(self.names)))
        came: dict[World, tuple[World, str] | None] = {first: None}
        stack = [first]
        while stack:
            world = stack.pop()
            try:
                self.check(world)
            except Broken as broken:
                _tell(broken, came, world)
            for what, following in self.after(world):
                following = self._named(following)
                if following not in came:
                    came[following] = world, what
                    stack.append(following)
        ending: set[World] = set()
        for world in came:
            path: dict[World, None] = {}
            here: World | None = world
            try:
                while here is not None and here not in ending:
                    if here in path:
                        raise Broken("somebody goes on for ever")
                    path[here] = None
                    last, then = here, self.due(here)
                    here = None if then is None else self._named(then)
                if here is None:
                    self.check_end(last)
            except Broken as broken:
                _tell(broken, came, world)
            ending.update(path)
        return len(came)

    # ---------------------------------------------------------------- worlds

    @staticmethod
    def _with(ps: tuple[P, ...], index: int, p: P) -> tuple[P, ...]:
        return (*ps[:index], p, *ps[index + 1 :])

    def _named(self, world: World) -> World:
        """The world that stands for all that differ from it in names only."""
        found = self._renamed.get(world)
        if found is None:
            same = [self._in_order(world, order, moved) for order, moved in zip(self._orders, self._moved, strict=True)]
            found = min(same)
            self._renamed.update(dict.fromkeys(same, found))
        return found

    def _in_order(self, world: World, order: tuple[int, ...], moved: Sequence[int]) -> World:
        c, ps = world
        new_c = c if not c.voted | c.unacknowledged else c._replace(voted=moved[c.voted], unacknowledged=moved[c.unacknowledged])
        return new_c, tuple([ps[old] if not ps[old].asked else ps[old]._replace(asked=moved[ps[old].asked]) for old in order])

    def _moves(self, order: tuple[int, ...]) -> list[int]:
        new = {old + 1: index + 1 for index, old in enumerate(order)} | {0: 0}
        return [sum(1 << new[bit] for bit in new if mask >> bit & 1) for mask in range(2 << len(order))]

    def who(self, mask: int) -> list[str]:
        """The names of a set."""
        return [name for name, bit in self._bit.items() if mask & bit]

    def _bits(self, names: Iterable[str]) -> int:
        return sum(self._bit[name] for name in names)


def _tell(broken: Broken, came: dict[World, tuple[World, str] | None], world: World) -> None:
    steps: list[str] = []
    origin = came[world]
    while origin is not None:
        steps.append(origin[1])
        origin = came[origin[0]]
    broken.add_note("; ".join(reversed(steps)))
    broken.add_note(repr(world))
    raise broken
