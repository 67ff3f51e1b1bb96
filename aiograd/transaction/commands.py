"""A request of a transaction to its driver."""

from __future__ import annotations

from dataclasses import dataclass

from aiograd.transaction.events import Outcome


class TransactionCommand:
    """Something to be done."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Ask(TransactionCommand):
    """Ask each of these: a participant asks what became of the transaction, a coordinator whether they are prepared.

    Args:
        peers: their names.
    """

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tell(TransactionCommand):
    """Tell each of these what was decided, so many seconds from now.

    Args:
        peers: their names.
        outcome: the decision.
        after: seconds from now.
    """

    peers: tuple[str, ...]
    outcome: Outcome
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Apply(TransactionCommand):
    """Make everything that was prepared visible, all of it or nothing; then say `Applied` or `ApplyFailed`."""


@dataclass(frozen=True, slots=True)
class Drop(TransactionCommand):
    """Let go of everything that was done or prepared."""


@dataclass(frozen=True, slots=True)
class MarkInDoubt(TransactionCommand):
    """Nothing may be built on what is here: it was dropped, and may have been committed elsewhere."""


@dataclass(frozen=True, slots=True)
class ClearDoubt(TransactionCommand):
    """It was aborted everywhere: there is no doubt any more."""
