"""BatchLedger: which batches are handed out, given back and read, so that each is read once.

Pure: no batch, no clock, no event loop. A loader has a ledger for each epoch; a coordinator that deals batches to others, one for all epochs.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, overload

from aiograd.errors import ArgumentError, ModeError


class BatchPlace(NamedTuple):
    """The place of a batch: the epoch, and the number of the batch in it. Places compare by epoch, then by number."""

    epoch: int
    number: int


class BatchLedger:
    """Every batch is waiting, handed out (`take`) or read (`read`); `give_back` makes one that is handed out wait again.

    Batches that were given back are handed out first, the lowest place first, then the others in their order. The state has the batches that were
    read: after it is loaded every other batch waits.

    Args:
        length: batches of every epoch; None: not known, and then all batches are of one epoch, which has no end here.
        state: the result of `state_dict`; None: nothing is read.

    Raises:
        ArgumentError: a length below 1, or no such state.
    """

    __slots__ = ("length", "_first", "_read", "_next", "_given_back", "_open")

    def __init__(self, length: int | None = None, state: Mapping[str, Any] | None = None) -> None:
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ArgumentError(f"BatchLedger(length={length!r}): expected an int of at least 1, or None")
        self.length: int | None = length
        #: the first place that is not read, and the places behind it that are
        self._first, self._read = _places(length, {"epoch": 0, "batches": 0, "ahead": []} if state is None else state)
        #: no place from here on was handed out
        self._next = self._first
        self._given_back: list[BatchPlace] = []
        self._open: set[BatchPlace] = set()
        self._advance()

    @property
    def first(self) -> BatchPlace:
        """The first place that is not read."""
        return self._first

    @property
    def open(self) -> frozenset[BatchPlace]:
        """The places that are handed out, and neither read nor given back."""
        return frozenset(self._open)

    def upcoming(self, epochs: int | None = None) -> Iterator[BatchPlace]:
        """The places that `take` gives next, in turn.

        Args:
            epochs: only places of the epochs below; None: of all, without end.
        """
        for place in self._given_back:
            if epochs is None or place.epoch < epochs:
                yield place
        place = self._next
        while epochs is None or place.epoch < epochs:
            if place not in self._read and place not in self._open:
                yield place
            place = self._after(place)

    @overload
    def take(self) -> BatchPlace: ...

    @overload
    def take(self, epochs: int | None) -> BatchPlace | None: ...

    def take(self, epochs: int | None = None) -> BatchPlace | None:
        """Hand out the next place.

        Args:
            epochs: only places of the epochs below; None: of all.

        Returns:
            The place; None where all are handed out or read.
        """
        place = next(self.upcoming(epochs), None)
        if place is None:
            return None
        if place < self._next:
            self._given_back.remove(place)
        else:
            self._next = self._after(place)
        self._open.add(place)
        return place

    def take_at(self, place: tuple[int, int]) -> None:
        """Hand out a place out of its turn.

        Args:
            place: epoch and number.

        Raises:
            ArgumentError: there is no such place. ModeError: it was read, or is handed out.
        """
        found = BatchPlace(*place)
        if min(found) < 0 or (found.epoch != self._first.epoch if self.length is None else found.number >= self.length):
            raise ArgumentError(f"there is no batch {found.number} of epoch {found.epoch}: an epoch has {self.length or 'any number of'} batches")
        if found in self._open or found in self._read or found < self._first:
            raise ModeError(f"batch {found.number} of epoch {found.epoch} {'is handed out' if found in self._open else 'was read'} already")
        if found < self._next:
            self._given_back.remove(found)
        self._open.add(found)

    def read(self, place: tuple[int, int]) -> None:
        """A place that is handed out was read.

        Args:
            place: epoch and number.

        Raises:
            ModeError: it is not handed out.
        """
        self._read.add(self._no_longer_open(place))
        self._advance()

    def give_back(self, place: tuple[int, int]) -> None:
        """A place that is handed out was not read, and waits again.

        Args:
            place: epoch and number.

        Raises:
            ModeError: it is not handed out.
        """
        found = self._no_longer_open(place)
        if found < self._next:  # else its turn comes
            bisect.insort(self._given_back, found)

    def state_dict(self) -> dict[str, Any]:
        """The places that were read.

        Returns:
            ``epoch`` and ``batches``: everything before them was read; ``ahead``: pairs of epoch and number read beyond them, in order.
        """
        return {"epoch": self._first.epoch, "batches": self._first.number, "ahead": [list(place) for place in sorted(self._read)]}

    def _no_longer_open(self, place: tuple[int, int]) -> BatchPlace:
        found = BatchPlace(*place)
        if found not in self._open:
            raise ModeError(f"batch {found.number} of epoch {found.epoch} is not handed out: it can be read or given back once, after take()")
        self._open.remove(found)
        return found

    def _after(self, place: BatchPlace) -> BatchPlace:
        return BatchPlace(place.epoch, place.number + 1) if place.number + 1 != self.length else BatchPlace(place.epoch + 1, 0)

    def _advance(self) -> None:
        while self._first in self._read:
            self._read.remove(self._first)
            self._first = self._after(self._first)
        self._next = max(self._next, self._first)  # behind places that a state says were read

    def __repr__(self) -> str:
        first = self._first
        return f"BatchLedger(first=({first.epoch}, {first.number}), open={len(self._open)}, given back={len(self._given_back)})"


def _places(length: int | None, state: Any) -> tuple[BatchPlace, set[BatchPlace]]:
    """The first place of a state that is not read, and the places beyond it that are."""
    expected = "BatchLedger: expected a state of epoch, batches and ahead as state_dict() returns it"
    if not isinstance(state, Mapping) or state.keys() != {"epoch", "batches", "ahead"}:
        raise ArgumentError(f"{expected}, found {sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__}")
    try:
        first, *read = (BatchPlace(int(epoch), int(number)) for epoch, number in [(state["epoch"], state["batches"]), *state["ahead"]])
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{expected}; its values are no places ({error})") from None
    for place in (first, *read):
        is_outside = length is not None and place.number >= length
        if min(place) < 0 or is_outside or (place != first and (place < first or (length is None and place.epoch != first.epoch))):
            raise ArgumentError(
                f"{expected}; found epoch {place.epoch}, batch {place.number} beside the first that is not read, {tuple(first)}, "
                f"with {'any number of' if length is None else length} batches in an epoch"
            )
    return first, set(read)
