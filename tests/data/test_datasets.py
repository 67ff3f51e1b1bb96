"""`Subset` and `random_split`: parts of a source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.data import DataLoader, Subset, random_split
from aiograd.errors import ArgumentError, ArgumentTypeError, IndexRangeError
from tests.data.test_loader import taken
from tests.support import assert_raises


@pytest.mark.parametrize("indices", [[3, 0, -1, 3], (3, 0, -1, 3), np.array([3, 0, -1, 3]), ag.tensor([3, 0, -1, 3])])
def test_a_subset_has_the_examples_at_its_indices(indices: Any) -> None:
    subset = Subset("abcde", indices)
    assert [subset[i] for i in range(-4, 4)] == [*"daed", *"daed"] and len(subset) == 4 and subset.indices == [3, 0, -1, 3]
    assert list(DataLoader(subset, 3)) == [["d", "a", "e"], ["d"]]
    assert [Subset(subset, [1, 2])[i] for i in range(2)] == ["a", "e"] and list(Subset("ab", [])) == []
    with pytest.raises(IndexError):
        subset[4]


async def test_a_subset_of_a_source_that_is_awaited_or_gives_many_at_once() -> None:
    class Later:
        def __len__(self) -> int:
            return 5

        async def __getitem__(self, index: int) -> int:
            return index * 10

    class Many(Later):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [i * 100 for i in indices]

    assert await taken(DataLoader(Subset(Later(), [4, 2, 0]), 2)) == [[40, 20], [0]]
    assert await taken(DataLoader(Subset(Subset(Many(), [4, 2, 0]), [2, 1]), 2)) == [[0, 200]]


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [([7, 3], [7, 3]), ([0.75, 0.25], [8, 2]), ([0.33, 0.33, 0.34], [4, 3, 3]), ([0, 10], [0, 10]), (np.array([4, 6]), [4, 6]), ([1.0], [10])],
)
def test_a_random_split_has_every_example_once(lengths: Any, sizes: list[int]) -> None:
    first, second = (random_split(range(10), lengths, ag.Generator(2)) for _ in range(2))
    assert [len(part) for part in first] == sizes and sorted(i for part in first for i in part) == list(range(10))
    assert [part.indices for part in first] == [part.indices for part in second]
    ag.seed(2)
    assert [part.indices for part in random_split(range(10), lengths)] == [part.indices for part in first]
    assert [i for part in first for i in part] != list(range(10))


def test_parts_that_make_no_sense_are_refused() -> None:
    for lengths in ([3, 3], [11, -1], [0.5, 0.4], [1.5, -0.5], [5.0, 5.0], [float("nan")], ["10"]):
        assert_raises(ArgumentError, "expected ints that sum to 10, or fractions to 1", random_split, range(10), lengths)
    assert_raises(ArgumentTypeError, "expected a source with", random_split, iter([1]), [1])
    assert_raises(ArgumentTypeError, "found float64", Subset, "abc", [0.0])
    assert_raises(ArgumentTypeError, "found bool", Subset, "abc", [True, False, True])
    assert_raises(ArgumentTypeError, r"of shape \[1, 1\]", Subset, "abc", [[0]])
    for index in (3, -4):
        assert_raises(IndexRangeError, f"found index {index}, but str has 3 examples", Subset, "abc", [0, index])
