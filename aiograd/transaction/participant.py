"""Participant: one worker's side of a transaction that another worker decides. See Note [Participant] in `states`."""

from __future__ import annotations

from collections.abc import Mapping

from aiograd.errors import TransactionError
from aiograd.transaction.commands import Apply, Ask, ClearDoubt, Drop, MarkInDoubt, TransactionCommand
from aiograd.transaction.events import Heard, LeaseEnded, Outcome, OutcomeReply, PeerLost, Prepared, Tick, TransactionEvent, Unanswered
from aiograd.transaction.states import LISTENER, OUTCOMES, REPLIES, TRANSITIONS, StateTransitions, TransactionState, TransitionRule


class Participant:
    """One worker's side of a transaction. It does nothing by itself: `handle` returns commands.

    Args:
        coordinator: name of the worker that decides; "" if it cannot be asked.
        lease: seconds for which it keeps its prepared changes once it is uncertain.
        pause: seconds between two rounds of questions.
        is_read_only: True if it has nothing to apply.
        votes: True if no decision is made without it; see Note [Participant] in `states`.
        due: the time at which it aborts unless it hears of the transaction; None: it does not abort by itself.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.Prepared(until=5.0), now=0.0)
    []
    >>> participant.handle(ag.transaction.CommitDecided(), now=1.0)
    [Apply()]
    >>> participant.state
    <TransactionState.COMMITTING: 'committing'>
    """

    __slots__ = ("state", "coordinator", "others", "lease", "pause", "is_read_only", "votes", "due", "asked", "since", "unanswered")

    #: the tables of `states`
    transitions: Mapping[TransactionState, StateTransitions] = TRANSITIONS
    listener: Mapping[tuple[TransactionState, type[TransactionEvent]], TransactionState | TransitionRule] = LISTENER
    replies: Mapping[tuple[Outcome, bool], type[TransactionEvent]] = REPLIES
    outcomes: Mapping[TransactionState, Outcome] = OUTCOMES
    #: rounds of questions in a row without an answer before a lease may end: the asking worker may have been frozen while the others were there
    rounds = 3

    def __init__(
        self, coordinator: str, *, lease: float, pause: float, is_read_only: bool = False, votes: bool = True, due: float | None = None
    ) -> None:
        self.state: TransactionState = TransactionState.ACTIVE
        self.coordinator: str = coordinator
        #: other workers that may know the outcome; kept up to date by the asyncio shell
        self.others: tuple[str, ...] = ()
        self.lease: float = lease
        self.pause: float = pause
        self.is_read_only: bool = is_read_only
        self.votes: bool = votes
        #: the time of its next `Tick`; None: it needs none
        self.due = due
        #: the workers that have not answered yet in this round of questions
        self.asked: frozenset[str] = frozenset()
        #: the time since which it is uncertain, and the rounds in a row without an answer
        self.since: float = 0.0
        self.unanswered: int = 0

    @property
    def outcome(self) -> Outcome:
        """Its answer to a question about the outcome."""
        return self.outcomes[self.state] if self.votes or self.is_decided else Outcome.UNKNOWN

    @property
    def is_prepared(self) -> bool:
        """True if it waits for the decision."""
        return self.state in (TransactionState.PREPARED, TransactionState.UNCERTAIN)

    @property
    def is_decided(self) -> bool:
        """True if it is to commit, or has."""
        return self.state in (TransactionState.COMMITTING, TransactionState.COMMITTED)

    @property
    def is_doubtful(self) -> bool:
        """True if changes are, or were, prepared and the decision is not known."""
        return not self.is_read_only and (self.is_prepared or self.state is TransactionState.IN_DOUBT)

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
        if not self.votes:
            after = self.listener.get((before, kind), after)
        if after is TransitionRule.REFUSED:
            raise TransactionError(f"{kind.__name__} cannot happen to a participant that is {before}")
        if after is TransitionRule.NOTHING:
            return []
        if after is TransitionRule.REPLY:
            return self._reply(event, now) if isinstance(event, OutcomeReply) else []
        if not isinstance(after, TransactionState):
            raise TransactionError(f"nothing is known of {kind.__name__} where a participant is {before}")
        self.state = after
        if after is TransactionState.UNCERTAIN:
            return self._ask(event, before, now)
        self.asked = frozenset()
        self.due = self._next_tick(event, before, now)
        return self._entered(before)

    def _reply(self, event: OutcomeReply, now: float) -> list[TransactionCommand]:
        means = self.replies[event.outcome, event.peer == self.coordinator]
        return self.handle(Unanswered(event.peer) if means is Unanswered else means(), now)

    def _next_tick(self, event: TransactionEvent, before: TransactionState, now: float) -> float | None:
        if self.state is TransactionState.PREPARED:
            return event.until if isinstance(event, Prepared) else now + self.pause
        if self.state is TransactionState.ACTIVE and isinstance(event, Heard) and before is TransactionState.ACTIVE:
            return None if self.due is None else now + self.lease
        return None

    def _entered(self, before: TransactionState) -> list[TransactionCommand]:
        if self.state is TransactionState.COMMITTING:
            return [Apply()]
        if self.state is TransactionState.IN_DOUBT:
            return [Drop()] if self.is_read_only else [MarkInDoubt(), Drop()]
        if self.state is TransactionState.ABORTED:
            return [ClearDoubt()] if before is TransactionState.IN_DOUBT else [Drop()]
        return []

    # ---------------------------------------------------------------- asking

    def _ask(self, event: TransactionEvent, before: TransactionState, now: float) -> list[TransactionCommand]:
        """The next questions; the state is UNCERTAIN."""
        if isinstance(event, Tick | PeerLost):
            if before is TransactionState.PREPARED:
                self.since, self.unanswered = now, 0
            elif self.asked:
                return []  # a round is under way
            self.due = None
            return self._question((self.coordinator,) if self.coordinator else self.others, now)
        if isinstance(event, Unanswered) and event.peer in self.asked:
            self.asked -= {event.peer}
            if not self.asked:
                return self._question(self.others if event.peer == self.coordinator else (), now)
        return []

    def _question(self, peers: tuple[str, ...], now: float) -> list[TransactionCommand]:
        if peers:
            self.asked = frozenset(peers)
            return [Ask(peers)]
        self.unanswered = min(self.unanswered + 1, self.rounds)
        if self.unanswered == self.rounds and now >= self.since + self.lease:
            return self.handle(LeaseEnded(), now)
        self.due = now + self.pause
        return []
