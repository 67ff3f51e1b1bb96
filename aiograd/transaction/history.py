"""History: a worker's memory of finished transactions, for questions of other workers and for late messages."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from aiograd.transaction.events import Outcome

Key = TypeVar("Key", bound=Hashable)


class History(Generic[Key]):
    """Outcomes by transaction. The oldest are forgotten, except transactions in doubt and held ones.

    Args:
        limit: the number of other transactions that are remembered.

    >>> history = ag.transaction.History[str](limit=1)
    >>> history.remember("first", ag.transaction.Outcome.COMMITTED)
    >>> history.remember("second", ag.transaction.Outcome.ABORTED)
    >>> history.outcome("first").value, history.outcome("second").value
    ('unknown', 'aborted')
    """

    __slots__ = ("outcomes", "in_doubt", "held", "_limit")

    def __init__(self, limit: int) -> None:
        self.outcomes: dict[Key, Outcome] = {}
        #: transactions with results that nothing may build on: this worker could not learn the outcome, or they may not be committed everywhere
        self.in_doubt: set[Key] = set()
        #: transactions that a participant has not acknowledged yet, and may ask for: see Note [Presumed abort] in `states`
        self.held: set[Key] = set()
        self._limit = limit

    def __contains__(self, key: Key) -> bool:
        return key in self.outcomes

    def outcome(self, key: Key) -> Outcome:
        """Outcome of a transaction; UNKNOWN also where nothing is remembered of it.

        Args:
            key: of the transaction.

        Returns:
            The outcome.
        """
        return self.outcomes.get(key, Outcome.UNKNOWN)

    def remember(self, key: Key, outcome: Outcome) -> None:
        """Note the outcome of a transaction.

        Args:
            key: of the transaction.
            outcome: its end.
        """
        self.outcomes[key] = outcome
        if len(self.outcomes) > self._limit:
            oldest = next((known for known in self.outcomes if known not in self.in_doubt and known not in self.held), None)
            if oldest is not None:
                del self.outcomes[oldest]

    def clear(self) -> None:
        """Forget everything, except transactions in doubt."""
        self.outcomes.clear()
        self.held.clear()
