"""Trees of receivers: everybody is reached once, and what one of them knows reaches all that ask."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aiograd.transaction import tree
from aiograd.transaction.tree import FANOUT, are_many, branches, witnesses

COUNTS = (1, 2, FANOUT, FANOUT + 1, 100, 1000, 5000)


@pytest.mark.parametrize("count", [0, *COUNTS])
def test_everybody_is_in_one_branch(count: int) -> None:
    found = branches(range(count))
    assert [each for part in found for each in part] == list(range(count))
    assert len(found) == min(count, FANOUT) and max(map(len, found), default=0) - min(map(len, found), default=0) <= 1


@pytest.mark.parametrize("fanout", [1, 2, FANOUT])
def test_a_tree_reaches_everybody_once(fanout: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "FANOUT", fanout)
    reached: list[int] = []
    most = depth = 0

    def tell(receivers: Sequence[int], level: int) -> None:
        nonlocal most, depth
        parts = branches(receivers)
        most, depth = max(most, len(parts)), max(depth, level)
        for part in parts:
            reached.append(part[0])
            tell(part[1:], level + 1)

    tell(range(200), 0)
    assert sorted(reached) == list(range(200)) and most <= fanout
    assert depth == {1: 200, 2: 7, FANOUT: 2}[fanout]


@pytest.mark.parametrize("count", COUNTS)
def test_whatever_one_knows_reaches_all_that_ask_their_witnesses(count: int) -> None:
    names = [f"w{number:04}" for number in range(count)]
    asks = {name: witnesses(names, name) for name in names}
    if not are_many(names):
        assert all(asked == names for asked in asks.values())
        return
    assert all(name not in asked and len(asked) <= 2 * count.bit_length() for name, asked in asks.items())
    assert len(witnesses(names, "somebody else")) <= 2 * count.bit_length()
    known, rounds = {names[count // 3]}, 0
    while len(known) < count:
        known |= {name for name, asked in asks.items() if not known.isdisjoint(asked)}
        rounds += 1
        assert rounds <= count.bit_length()
