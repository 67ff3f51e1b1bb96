"""Budgets: how many bytes of unfinished messages are held, for one peer and for all of them together.

Bytes are reserved before memory for them is allocated and given back when the message they belong to is done with, however it ends. A
budget that refuses costs nothing: the sender is told to come back later.
"""

from __future__ import annotations

from aiograd.errors import ArgumentError


class Budget:
    """The bytes a worker holds for all its peers; each peer takes from a child.

    Args:
        per_peer: bytes that one peer may hold.
        total: bytes that all of them may hold together.

    Attributes:
        held: bytes that are reserved now.
    """

    __slots__ = ("per_peer", "total", "held")

    def __init__(self, per_peer: int, total: int) -> None:
        self.per_peer: int = per_peer
        self.total: int = total
        self.held: int = 0

    def child(self) -> PeerBudget:
        """A budget for one peer, which takes from this one as well."""
        return PeerBudget(self)


class PeerBudget:
    """The bytes held for one peer; may serve several sessions with it.

    Attributes:
        limit: the most bytes that can be held if there are no other holders.
        held: bytes that are reserved now.
    """

    __slots__ = ("_parent", "limit", "held")

    def __init__(self, parent: Budget) -> None:
        self._parent = parent
        self.limit: int = min(parent.per_peer, parent.total)
        self.held: int = 0

    def reserve(self, count: int) -> bool:
        """Take `count` bytes from this budget and its parent; False, and nothing taken, where either has too few left."""
        parent = self._parent
        held = self.held + count
        if held > self.limit or parent.held + count > parent.total:
            return False
        self.held = held
        parent.held += count
        return True

    def release(self, count: int) -> None:
        """Give `count` bytes back.

        Raises:
            ArgumentError: more than is held.
        """
        if count > self.held:
            raise ArgumentError(f"release of {count} bytes from a budget that holds {self.held}; give back what was reserved, once")
        self.held -= count
        self._parent.held -= count
