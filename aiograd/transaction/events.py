"""Something that happens to a transaction. The tables of `states` have its effect in each state."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, StrEnum


class Outcome(StrEnum):
    """A worker's answer to a question about a transaction.

    >>> ag.transaction.Coordinator("left", pause=1.0).outcome
    <Outcome.UNDECIDED: 'undecided'>
    """

    #: it has not prepared, so a commit cannot have been decided; or it is the coordinator, and has not decided
    UNDECIDED = "undecided"
    #: it has prepared, and does not know the decision
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"
    #: it knows nothing of the transaction, or is never told its outcome
    UNKNOWN = "unknown"


class Trouble(Enum):
    """The reason why a worker could not be told of a decision.

    >>> [trouble.value for trouble in ag.transaction.Trouble]
    ['lost', 'busy', 'refused']
    """

    #: contact with it is lost: told again a few times
    LOST = "lost"
    #: it, or this worker, lacks memory or another resource: told again
    BUSY = "busy"
    #: any other reason: not told again before a `Settle`
    REFUSED = "refused"


class TransactionEvent:
    """Something that happened.

    >>> isinstance(ag.transaction.Tick(), ag.transaction.TransactionEvent)
    True
    """

    __slots__ = ()


# ---- to a participant and to its coordinator


@dataclass(frozen=True, slots=True)
class Prepared(TransactionEvent):
    """All work is done, and can be applied or dropped at once.

    For a participant it is about the participant itself, and `until` is the time at which it begins to ask for the decision, if no message comes. For
    a coordinator it is the vote of `peer`, and `until` is the end of the voter's promise.

    Args:
        until: a time on the transaction's clock.
        peer: name of the voter; "" for the participant itself.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.Prepared(until=5.0), now=0.0)
    []
    >>> participant.state, participant.due
    (<TransactionState.PREPARED: 'prepared'>, 5.0)
    """

    until: float = math.inf
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Failed(TransactionEvent):
    """The work has failed, or is not wanted any more.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.Failed(), now=0.0)
    [Drop()]
    >>> participant.outcome
    <Outcome.ABORTED: 'aborted'>
    """


@dataclass(frozen=True, slots=True)
class PeerLost(TransactionEvent):
    """Contact is lost: a participant's with its coordinator, or a coordinator's with a participant.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.PeerLost(), now=1.0)
    [Drop()]
    """


@dataclass(frozen=True, slots=True)
class Applied(TransactionEvent):
    """`Apply` is done.

    >>> coordinator = ag.transaction.Coordinator("left", pause=1.0)
    >>> coordinator.handle(ag.transaction.Prepared(peer="left"), now=0.0)
    [Apply()]
    >>> coordinator.handle(ag.transaction.Applied(), now=0.0)
    []
    >>> coordinator.state
    <TransactionState.COMMITTED: 'committed'>
    """


@dataclass(frozen=True, slots=True)
class ApplyFailed(TransactionEvent):
    """`Apply` was tried and failed; nothing was applied.

    >>> coordinator = ag.transaction.Coordinator("left", pause=1.0)
    >>> coordinator.handle(ag.transaction.Prepared(peer="left"), now=0.0)
    [Apply()]
    >>> coordinator.handle(ag.transaction.ApplyFailed(), now=0.0)
    [Drop()]
    >>> coordinator.state
    <TransactionState.ABORTED: 'aborted'>
    """


# ---- to a participant


@dataclass(frozen=True, slots=True)
class Heard(TransactionEvent):
    """There is a sign that the transaction is alive, and not decided.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0, due=5.0)
    >>> participant.handle(ag.transaction.Heard(), now=2.0)
    []
    >>> participant.due
    12.0
    """


@dataclass(frozen=True, slots=True)
class Tick(TransactionEvent):
    """The time is `Participant.due`.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0, due=5.0)
    >>> participant.handle(ag.transaction.Tick(), now=5.0)
    [Drop()]
    """


@dataclass(frozen=True, slots=True)
class CommitDecided(TransactionEvent):
    """The coordinator has decided to commit.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.Prepared(), now=0.0)
    []
    >>> participant.handle(ag.transaction.CommitDecided(), now=1.0)
    [Apply()]
    """


@dataclass(frozen=True, slots=True)
class AbortDecided(TransactionEvent):
    """The transaction was aborted.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.AbortDecided(), now=0.0)
    [Drop()]
    """


@dataclass(frozen=True, slots=True)
class OutcomeReply(TransactionEvent):
    """A worker has answered a question about the outcome.

    Args:
        peer: name of the worker.
        outcome: the outcome, as far as it knows.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.Prepared(), now=0.0)
    []
    >>> participant.handle(ag.transaction.OutcomeReply("right", ag.transaction.Outcome.COMMITTED), now=1.0)
    [Apply()]
    """

    peer: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Unanswered(TransactionEvent):
    """A worker has not answered a question, or its answer tells nothing about the outcome.

    Args:
        peer: name of the worker.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.Prepared(), now=0.0)
    []
    >>> participant.handle(ag.transaction.Tick(), now=1.0)
    [Ask(peers=('left',))]
    >>> participant.handle(ag.transaction.Unanswered("left"), now=1.5)
    []
    >>> participant.due
    2.5
    """

    peer: str


@dataclass(frozen=True, slots=True)
class LeaseEnded(TransactionEvent):
    """No worker has been able to answer for a whole lease. A participant detects this by itself."""


@dataclass(frozen=True, slots=True)
class OwnerClosed(TransactionEvent):
    """The owner of the transaction is closed: it is dropped, without regard to the decision.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.OwnerClosed(), now=1.0)
    [Drop()]
    """


# ---- to a coordinator


@dataclass(frozen=True, slots=True)
class ParticipantsJoined(TransactionEvent):
    """Workers take part. Each has to prepare before anything is decided, unless it does not vote: then it is only told.

    Args:
        peers: their names.
        votes: False: they are only told.

    >>> coordinator = ag.transaction.Coordinator("left", pause=1.0)
    >>> coordinator.handle(ag.transaction.ParticipantsJoined(["right"]), now=0.0)
    []
    >>> coordinator.others
    ('right',)
    """

    peers: Collection[str]
    votes: bool = True


@dataclass(frozen=True, slots=True)
class ParticipantsLeft(TransactionEvent):
    """Workers take part no more: others are in their places.

    Args:
        peers: their names.

    >>> coordinator = ag.transaction.Coordinator("left", pause=1.0)
    >>> coordinator.handle(ag.transaction.ParticipantsJoined(["right", "top"]), now=0.0)
    []
    >>> coordinator.handle(ag.transaction.ParticipantsLeft(["top"]), now=1.0)
    []
    >>> coordinator.others
    ('right',)
    """

    peers: Collection[str]


@dataclass(frozen=True, slots=True)
class Collect(TransactionEvent):
    """It is time to ask for votes that are missing, or promise nothing any more.

    >>> coordinator = ag.transaction.Coordinator("left", pause=1.0)
    >>> coordinator.handle(ag.transaction.ParticipantsJoined(["right"]), now=0.0)
    []
    >>> coordinator.handle(ag.transaction.Collect(), now=1.0)
    [Ask(peers=('right',))]
    """


@dataclass(frozen=True, slots=True)
class AllPrepared(TransactionEvent):
    """All workers are prepared, and will be for a while. A coordinator detects this by itself."""


@dataclass(frozen=True, slots=True)
class Lapsed(TransactionEvent):
    """Some promises end before all workers have made one. A coordinator detects this by itself."""


@dataclass(frozen=True, slots=True)
class Acknowledged(TransactionEvent):
    """A worker has carried out the decision.

    Args:
        peer: name of the worker.

    >>> ag.transaction.Acknowledged("right").peer
    'right'
    """

    peer: str


@dataclass(frozen=True, slots=True)
class TellFailed(TransactionEvent):
    """A worker could not be told of the decision, or has not said that it was.

    Args:
        peer: name of the worker.
        trouble: the kind of trouble.

    >>> failed = ag.transaction.TellFailed("right", ag.transaction.Trouble.LOST)
    >>> failed.peer, failed.trouble.value
    ('right', 'lost')
    """

    peer: str
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class Settle(TransactionEvent):
    """Repeat the outcome to every participant that has not acknowledged it.

    >>> coordinator = ag.transaction.Coordinator("left", pause=1.0)
    >>> coordinator.handle(ag.transaction.ParticipantsJoined(["right"]), now=0.0)
    []
    >>> coordinator.handle(ag.transaction.Failed(), now=1.0)
    [Drop(), Tell(peers=('right',), outcome=<Outcome.ABORTED: 'aborted'>, after=0.0)]
    >>> coordinator.handle(ag.transaction.Settle(), now=2.0)
    [Tell(peers=('right',), outcome=<Outcome.ABORTED: 'aborted'>, after=0.0)]
    """
