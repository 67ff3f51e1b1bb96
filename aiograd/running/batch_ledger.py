"""BatchLedger: the batches of a data set that have been handed out, given back and read, so that each is read once. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from aiograd.errors import ArgumentError

#: epoch, and number in the order of the epoch
BatchNumber: TypeAlias = tuple[int, int]


class BatchLedger:
    """Batches that are handed out in order, over epoch after epoch. One that is given back is handed out before all others.

    Args:
        length: batches of an epoch.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        #: the first batch that has never been handed out
        self._next: BatchNumber = (0, 0)
        #: batches that were given back, in order
        self._returned: list[BatchNumber] = []
        #: batches that are handed out
        self._out: set[BatchNumber] = set()

    @property
    def epoch(self) -> int:
        """The first epoch that has not been read to its end."""
        return min((self._next, *self._returned[:1], *self._out))[0]

    def deal(self, count: int, before: int | None = None) -> list[BatchNumber]:
        """Hand out batches.

        Args:
            count: batches at most.
            before: the first epoch that nothing is handed out of; None: there is none.

        Returns:
            The batches, in reading order; fewer where the epochs end.
        """
        dealt: list[BatchNumber] = []
        while len(dealt) < count:
            batch = self._returned[0] if self._returned else self._next
            if before is not None and batch[0] >= before:
                break
            if self._returned:
                del self._returned[0]
            else:
                epoch, number = batch
                self._next = (epoch, number + 1) if number + 1 < self.length else (epoch + 1, 0)
            dealt.append(batch)
        self._out.update(dealt)
        return dealt

    def give_back(self, batches: Iterable[BatchNumber]) -> None:
        """Batches that were handed out were not read."""
        for batch in batches:
            self._out.remove(batch)
            bisect.insort(self._returned, batch)

    def read(self, batches: Iterable[BatchNumber]) -> None:
        """Batches that were handed out were read."""
        self._out.difference_update(batches)

    def state_dict(self) -> dict[str, Any]:
        """The batches that are read; those that are handed out count as not read.

        Returns:
            Numbers and lists of them.
        """
        return {"length": self.length, "next": list(self._next), "left": [list(batch) for batch in sorted({*self._returned, *self._out})]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; batches that are handed out are forgotten.

        Args:
            state: the result of `state_dict`.

        Raises:
            ArgumentError: it belongs to epochs of another length, or is no such state. Nothing has changed.
        """
        try:
            length, (epoch, number) = int(state["length"]), map(int, state["next"])
            left = sorted((int(each), int(other)) for each, other in state["left"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"the place in a data set: expected length, next and left, as state_dict() returns them ({error})") from None
        if length != self.length:
            raise ArgumentError(f"the place in a data set belongs to epochs of {length} batches; there are {self.length}")
        if any(not 0 <= each[1] < length or not (0, 0) <= each < (epoch, number) for each in left) or not 0 <= number < length or epoch < 0:
            raise ArgumentError(f"the place in a data set: batches {left} before {(epoch, number)} cannot be left of epochs of {length} batches")
        self._next, self._returned, self._out = (epoch, number), left, set()
