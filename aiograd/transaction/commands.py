"""Commands: requests of a transaction to its asyncio shell."""

from __future__ import annotations

from dataclasses import dataclass

from aiograd.transaction.events import Outcome


class TransactionCommand:
    """Something to be done."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Ask(TransactionCommand):
    """Ask each of these peers: a participant asks for the outcome of the transaction, a coordinator whether they are prepared.

    Args:
        peers: their names.
    """

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tell(TransactionCommand):
    """Tell each of these peers the decision, after a delay.

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
    """Mark the result as in doubt: it was dropped here, and may have been committed elsewhere, so nothing may build on it."""


@dataclass(frozen=True, slots=True)
class ClearDoubt(TransactionCommand):
    """It was aborted everywhere: there is no doubt any more."""
