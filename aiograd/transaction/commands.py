"""Commands: requests of a transaction to its asyncio shell."""

from __future__ import annotations

from dataclasses import dataclass

from aiograd.transaction.events import Outcome


class TransactionCommand:
    """Something to be done.

    >>> isinstance(ag.transaction.Apply(), ag.transaction.TransactionCommand)
    True
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Ask(TransactionCommand):
    """Ask each of these peers: a participant asks for the outcome of the transaction, a coordinator whether they are prepared.

    Args:
        peers: their names.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.Prepared(), now=0.0)
    []
    >>> participant.handle(ag.transaction.PeerLost(), now=1.0)
    [Ask(peers=('left',))]
    """

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tell(TransactionCommand):
    """Tell each of these peers the decision, after a delay.

    Args:
        peers: their names.
        outcome: the decision.
        after: seconds from now.

    >>> coordinator = ag.transaction.Coordinator("left", pause=1.0)
    >>> coordinator.handle(ag.transaction.ParticipantsJoined(["right"]), now=0.0)
    []
    >>> coordinator.handle(ag.transaction.Failed(), now=1.0)
    [Drop(), Tell(peers=('right',), outcome=<Outcome.ABORTED: 'aborted'>, after=0.0)]
    """

    peers: tuple[str, ...]
    outcome: Outcome
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Apply(TransactionCommand):
    """Make everything that was prepared visible, all of it or nothing; then say `Applied` or `ApplyFailed`.

    >>> coordinator = ag.transaction.Coordinator("left", pause=1.0)
    >>> coordinator.handle(ag.transaction.Prepared(peer="left"), now=0.0) == [ag.transaction.Apply()]
    True
    """


@dataclass(frozen=True, slots=True)
class Drop(TransactionCommand):
    """Let go of everything that was done or prepared.

    >>> coordinator = ag.transaction.Coordinator("left", pause=1.0)
    >>> coordinator.handle(ag.transaction.Failed(), now=0.0)
    [Drop()]
    """


@dataclass(frozen=True, slots=True)
class MarkInDoubt(TransactionCommand):
    """Mark the result as in doubt: it was dropped here, and may have been committed elsewhere, so nothing may build on it.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.Prepared(), now=0.0)
    []
    >>> participant.handle(ag.transaction.OwnerClosed(), now=1.0)
    [MarkInDoubt(), Drop()]
    """


@dataclass(frozen=True, slots=True)
class ClearDoubt(TransactionCommand):
    """It was aborted everywhere: there is no doubt any more.

    >>> participant = ag.transaction.Participant("left", lease=10.0, pause=1.0)
    >>> participant.handle(ag.transaction.Prepared(), now=0.0)
    []
    >>> participant.handle(ag.transaction.OwnerClosed(), now=1.0)
    [MarkInDoubt(), Drop()]
    >>> participant.handle(ag.transaction.AbortDecided(), now=2.0)
    [ClearDoubt()]
    """
