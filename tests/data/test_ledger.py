"""BatchLedger: every batch is read once, given back or not, and the state has the batches that were read."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.data.ledger import BatchLedger, BatchPlace
from aiograd.errors import ArgumentError, ModeError
from tests.support import assert_raises

ACTIONS = st.lists(st.tuples(st.sampled_from(["take", "take", "take at", "read", "give back", "resume"]), st.integers(0, 5)), max_size=80)


class Model:
    """Sets of places, and a search through all of them in order."""

    def __init__(self, length: int, epochs: int) -> None:
        self.places = [(epoch, number) for epoch in range(epochs) for number in range(length)]
        self.returned: set[tuple[int, int]] = set()
        self.open: set[tuple[int, int]] = set()
        self.read: list[tuple[int, int]] = []
        #: the last place that was taken in its turn, or that a state says was read
        self.last = (0, -1)

    def waiting(self) -> list[tuple[int, int]]:
        new = [place for place in self.places if place not in self.open and place not in self.read and place not in self.returned]
        return sorted(self.returned) + new


@given(ACTIONS, st.integers(1, 4), st.integers(1, 3))
def test_every_batch_is_read_once_and_returned_ones_come_first(actions: list[tuple[str, int]], length: int, epochs: int) -> None:
    ledger, model = BatchLedger(length), Model(length, epochs)
    for action, which in actions:
        waiting = model.waiting()
        assert list(ledger.upcoming(epochs)) == waiting
        if action == "take":
            assert ledger.take(epochs) == (waiting[0] if waiting else None)
            if waiting:
                model.returned.discard(waiting[0])
                model.open.add(waiting[0])
                model.last = max(model.last, waiting[0])
        elif action == "take at":
            if waiting:
                place = waiting[which % len(waiting)]
                ledger.take_at(place)
                model.returned.discard(place)
                model.open.add(place)
        elif action == "resume":
            state = json.loads(json.dumps(ledger.state_dict()))
            ledger = BatchLedger(length, state)
            assert ledger.state_dict() == state
            model.open, model.returned, model.last = set(), set(), (0, -1)
        elif model.open:
            place = sorted(model.open)[which % len(model.open)]
            model.open.remove(place)
            if action == "read":
                ledger.read(place)
                model.read.append(place)
            else:
                ledger.give_back(place)
                if place < max(model.last, ledger.first):
                    model.returned.add(place)
        assert ledger.open == model.open
        unread = [place for place in model.places if place not in model.read]
        assert ledger.first == (unread[0] if unread else (epochs, 0))
        assert ledger.state_dict()["ahead"] == [list(place) for place in sorted(model.read) if place > ledger.first]
    while (place := ledger.take(epochs)) is not None:
        ledger.read(place)
        model.read.append(place)
    for place in ledger.open:
        ledger.read(place)
        model.read.append(place)
    assert sorted(model.read) == model.places and ledger.first == (epochs, 0)


def test_an_epoch_of_unknown_length_has_no_end() -> None:
    ledger = BatchLedger(None, {"epoch": 2, "batches": 5, "ahead": [[2, 7]]})
    assert [ledger.take(), ledger.take(3), ledger.take(2)] == [(2, 5), (2, 6), None]
    assert list(islice(ledger.upcoming(), 2)) == [(2, 8), (2, 9)]
    ledger.give_back((2, 6))
    ledger.read((2, 5))
    assert ledger.first == BatchPlace(2, 6) and list(ledger.upcoming(2)) == [] and next(ledger.upcoming(3)) == (2, 6)
    assert ledger.state_dict() == {"epoch": 2, "batches": 6, "ahead": [[2, 7]]}
    assert repr(ledger) == "BatchLedger(first=(2, 6), open=0, given back=1)"


@given(st.integers(1, 6), st.sets(st.integers(0, 11)), st.randoms(use_true_random=False))
def test_a_loaded_state_hands_out_all_that_it_does_not_say_was_read(length: int, read: set[int], random: Any) -> None:
    places = [divmod(each, length) for each in range(12)]
    unread = [place for index, place in enumerate(places) if index not in read]
    first = unread[0] if unread else divmod(12, length)
    ahead = [list(place) for place in places if place not in unread and place > first]
    ledger = BatchLedger(length, {"epoch": first[0], "batches": first[1], "ahead": ahead})
    open_places, found = [], []
    while len(found) < len(unread):
        if open_places and random.random() < 0.6:
            ledger.read(open_places.pop(random.randrange(len(open_places))))
        elif len(found) < len(unread):
            place = ledger.take()
            open_places.append(place)
            found.append(place)
    assert found == unread


def test_what_is_not_handed_out_can_neither_be_read_nor_given_back() -> None:
    ledger = BatchLedger(3)
    place: Any = ledger.take()
    ledger.read(place)
    for each in (place, (0, 1), (4, 0)):
        assert_raises(ModeError, rf"batch {each[1]} of epoch {each[0]} is not handed out", ledger.read, each)
        assert_raises(ModeError, "is not handed out", ledger.give_back, each)
    assert ledger.state_dict() == {"epoch": 0, "batches": 1, "ahead": []}


def test_a_place_is_handed_out_of_its_turn_while_it_waits() -> None:
    ledger = BatchLedger(3, {"epoch": 0, "batches": 1, "ahead": [[0, 2]]})
    ledger.take_at((10**9, 2))
    for place in ((0, 0), (0, 2), (10**9, 2)):
        assert_raises(ModeError, f"batch {place[1]} of epoch {place[0]} (was read|is handed out) already", ledger.take_at, place)
    for place in ((0, 3), (-1, 0), (0, -1)):
        assert_raises(ArgumentError, "an epoch has 3 batches", ledger.take_at, place)
    assert list(islice(ledger.upcoming(), 3)) == [(0, 1), (1, 0), (1, 1)] and ledger.open == {(10**9, 2)}
    assert_raises(ArgumentError, "any number of batches", BatchLedger().take_at, (1, 0))


@pytest.mark.parametrize(
    "state",
    [
        3, {}, {"epoch": 0, "batches": 0}, {"epoch": -1, "batches": 0, "ahead": []}, {"epoch": 0, "batches": 3, "ahead": []},
        {"epoch": 0, "batches": "x", "ahead": []}, {"epoch": 0, "batches": 0, "ahead": [3]}, {"epoch": 1, "batches": 0, "ahead": [[0, 2]]},
        {"epoch": 0, "batches": 0, "ahead": [[0, 3]]}, {"epoch": None, "batches": 0, "ahead": []},
    ],
)  # fmt: skip
def test_states_that_are_none_are_refused(state: Any) -> None:
    assert_raises(ArgumentError, "BatchLedger: expected a state of epoch, batches and ahead", BatchLedger, 3, state)


def test_an_epoch_of_unknown_length_is_the_only_one() -> None:
    assert_raises(ArgumentError, None, BatchLedger, None, {"epoch": 0, "batches": 0, "ahead": [[1, 0]]})
    for length in (0, -1, True, 1.5):
        assert_raises(ArgumentError, r"BatchLedger\(length=", BatchLedger, length)
