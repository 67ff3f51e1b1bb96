"""Coordinator: the side of the worker that decides a transaction. See Note [Coordinator] in `states`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from aiograd.errors import TransactionError
from aiograd.transaction.commands import Apply, Ask, Drop, Tell, TransactionCommand
from aiograd.transaction.events import (
    Acknowledged,
    AllPrepared,
    Collect,
    Lapsed,
    Outcome,
    ParticipantsJoined,
    ParticipantsLeft,
    Prepared,
    Settle,
    TellFailed,
    TransactionEvent,
    Trouble,
)
from aiograd.transaction.states import COORDINATOR_OUTCOMES, COORDINATOR_TRANSITIONS, StateTransitions, TransactionState, TransitionRule

#: rounds of questions with answers that may promise too little time
ROUNDS = 3
#: times that a lost worker is told again
AGAIN = 2


class Coordinator:
    """The side of the worker that decides. It does nothing by itself: `handle` returns commands.

    It waits for its own vote as well. Every participant is told the decision until it has acknowledged it.

    Args:
        name: of this worker.
        pause: seconds until a worker that could not be told is told again.

    >>> coordinator = ag.transaction.Coordinator("left", pause=1.0)
    >>> coordinator.handle(ag.transaction.Prepared(peer="left"), now=0.0)
    [Apply()]
    >>> coordinator.handle(ag.transaction.Applied(), now=0.0)
    []
    >>> coordinator.outcome
    <Outcome.COMMITTED: 'committed'>
    """

    __slots__ = ("state", "name", "pause", "voters", "listeners", "promises", "rounds", "unacknowledged", "tell_until", "tries")

    #: the tables of `states`
    transitions: Mapping[TransactionState, StateTransitions] = COORDINATOR_TRANSITIONS
    outcomes: Mapping[TransactionState, Outcome] = COORDINATOR_OUTCOMES

    def __init__(self, name: str, *, pause: float) -> None:
        self.state: TransactionState = TransactionState.ACTIVE
        self.name: str = name
        self.pause: float = pause
        #: the workers that have to prepare, and the workers that are only told
        self.voters: frozenset[str] = frozenset((name,))
        self.listeners: frozenset[str] = frozenset()
        #: by worker that has prepared: the time until which it surely keeps its changes
        self.promises: dict[str, float] = {}
        self.rounds: int = 0
        self.unacknowledged: frozenset[str] = frozenset()
        #: the time until which workers are told again after a failure, without a `Settle`
        self.tell_until: float = math.inf
        self.tries: Mapping[str, int] = {}

    @property
    def outcome(self) -> Outcome:
        """Its answer to a question about the outcome."""
        return self.outcomes[self.state]

    #: as of a `Participant`: a coordinator does not wait for another's decision
    is_prepared = False
    is_doubtful = False
    due: float | None = None

    @property
    def is_decided(self) -> bool:
        """True if it is to commit, or has."""
        return self.state in (TransactionState.COMMITTING, TransactionState.COMMITTED)

    @property
    def others(self) -> tuple[str, ...]:
        """The names of all other workers that take part, sorted."""
        return tuple(sorted((self.voters | self.listeners) - {self.name}))

    def missing(self, now: float) -> tuple[str, ...]:
        """The other workers that have not prepared, or with an expired promise.

        Args:
            now: the time, on the clock of the events.

        Returns:
            Their names, sorted.
        """
        return tuple(sorted(name for name in self.voters - {self.name} if self.promises.get(name, -math.inf) <= now))

    def handle(self, event: TransactionEvent, now: float) -> list[TransactionCommand]:
        """Take note of an event.

        Args:
            event: the event.
            now: the time.

        Returns:
            The commands, in this order.

        Raises:
            TransactionError: it cannot happen in this state; nothing has changed.
        """
        before, kind = self.state, type(event)
        after = self.transitions[before][kind]
        if after is TransitionRule.REFUSED:
            raise TransactionError(f"{kind.__name__} cannot happen to a coordinator that is {before}")
        if not isinstance(after, TransactionState):
            return []
        self.state = after
        if after is before:
            return self._noted(event, now)
        if after is TransactionState.COMMITTING:
            return [Apply()]
        self.unacknowledged = frozenset(self.others)
        tell = self._tell(self.others)
        return tell if after is TransactionState.COMMITTED else [Drop(), *tell]

    def _tell(self, peers: Iterable[str], after: float = 0.0) -> list[TransactionCommand]:
        names = tuple(peers)
        return [Tell(names, self.outcome, after)] if names else []

    def _noted(self, event: TransactionEvent, now: float) -> list[TransactionCommand]:
        """The commands of an event that does not change the state by itself."""
        match event:
            case ParticipantsJoined(peers, votes):
                return self._join(frozenset(peers), votes)
            case ParticipantsLeft(peers):
                gone = frozenset(peers)
                self.promises = {}  # others may be gone as well
                self.voters, self.listeners, self.unacknowledged = self.voters - gone, self.listeners - gone, self.unacknowledged - gone
            case Prepared(until, peer):
                self.promises[peer] = until
                return self._decide(now)
            case Collect():
                return self._collect(now)
            case Acknowledged(peer):
                self.unacknowledged -= {peer}
            case TellFailed(peer, trouble):
                return self._tell_again(peer, trouble, now)
            case Settle():
                self.tries = {}
                return self._tell(sorted(self.unacknowledged))
        return []

    def _join(self, peers: frozenset[str], votes: bool) -> list[TransactionCommand]:
        new = peers - self.voters - self.listeners
        if votes:
            self.voters |= peers
        else:
            self.listeners |= new
        if self.state is TransactionState.ACTIVE:
            return []
        self.unacknowledged |= new
        return self._tell(sorted(new))

    def _decide(self, now: float) -> list[TransactionCommand]:
        if len(self.promises) < len(self.voters) or not self.voters <= self.promises.keys():
            return []
        return self.handle(Lapsed() if self.missing(now) else AllPrepared(), now)

    def _collect(self, now: float) -> list[TransactionCommand]:
        missing = self.missing(now)
        if any(name in self.promises for name in missing):
            self.rounds += 1
            if self.rounds == ROUNDS:
                return self.handle(Lapsed(), now)
        return [Ask(missing)] if missing else []

    def _tell_again(self, peer: str, trouble: Trouble, now: float) -> list[TransactionCommand]:
        if peer not in self.unacknowledged or trouble is Trouble.REFUSED:
            return []
        if trouble is Trouble.LOST:
            self.tries = {**self.tries, peer: self.tries.get(peer, 0) + 1}
            if self.tries[peer] > AGAIN:
                return []
        return self._tell((peer,), self.pause) if now + self.pause <= self.tell_until else []
