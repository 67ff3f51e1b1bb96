"""Trees: leaves of a type are found in order and replaced, and everything around them keeps its form."""

from __future__ import annotations

from typing import Any, NamedTuple

from aiograd.running.trees import leaves_of, map_tree


class Pair(NamedTuple):
    left: Any
    right: Any


TREE = (1, [2.0, "three", (4, None)], {"b": 5, "a": Pair(6, [7])}, slice(8, None, 9), Pair([], 10))


def test_leaves_come_in_order() -> None:
    assert leaves_of(TREE, int) == [1, 4, 5, 6, 7, 8, 9, 10]
    assert leaves_of(TREE, (float, str)) == [2.0, "three"]
    assert leaves_of(TREE, bytes) == [] and leaves_of(3, int) == [3]


def test_leaves_are_replaced_where_they_stand() -> None:
    found = map_tree(lambda leaf: -leaf, TREE, int)
    assert found == (-1, [2.0, "three", (-4, None)], {"b": -5, "a": Pair(-6, [-7])}, slice(-8, None, -9), Pair([], -10))
    assert type(found[2]["a"]) is Pair and list(found[2]) == ["b", "a"]
    assert leaves_of(found, int) == [-leaf for leaf in leaves_of(TREE, int)]


def test_a_leaf_may_be_a_container() -> None:
    assert map_tree(len, [Pair(1, 2), (3,)], Pair) == [2, (3,)]
    assert leaves_of([[1], (2, [3])], list) == [[[1], (2, [3])]]


def test_leaves_are_found_however_deep_they_lie() -> None:
    tree: Any = 1
    for _ in range(100_000):
        tree = [tree]
    assert leaves_of(tree, int) == [1]
    while tree != 1:  # taken apart by hand: letting go of it all at once is deep too
        (tree,) = tree
