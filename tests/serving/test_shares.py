"""Shares of requests: stable per key, and exact without keys."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.errors import ArgumentError, ArgumentTypeError, VersionNotFoundError
from aiograd.serving.versions import VersionSplit


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_shares_are_exact_to_one_request_at_every_moment(weights: list[int]) -> None:
    exact = {number: Fraction(weight, sum(weights)) for number, weight in enumerate(weights)}
    split = VersionSplit({number: float(share) for number, share in exact.items()}, known=exact)
    counts = Counter[int]()
    for requests in range(1, 2 * sum(weights) + 1):
        counts[split.choose()] += 1
        assert all(abs(counts[number] - requests * share) < 1 for number, share in exact.items())
    assert counts == {number: 2 * weight for number, weight in enumerate(weights)}


def test_keys_get_their_shares_and_keep_their_version() -> None:
    shares = {1: 0.6, 2: 0.3, 3: 0.1, 4: 0.0}
    one, other = VersionSplit(shares, known=range(5)), VersionSplit(dict(reversed(shares.items())), known=range(5))
    keys: list[Any] = [*range(10_000), *(f"user {n}" for n in range(10_000)), *(b"session %d" % n for n in range(10_000))]
    chosen = [one.choose(key) for key in keys]
    assert chosen == [other.choose(key) for key in keys] and one.shares.keys() == {1, 2, 3}
    counts = Counter(chosen)
    assert counts.keys() == {1, 2, 3} and all(abs(counts[number] / len(keys) - shares[number]) < 0.01 for number in counts)


def test_a_larger_share_takes_no_key_away_from_the_last_version() -> None:
    few, more = (VersionSplit({17: 1 - share, 18: share}, known=[17, 18]) for share in (0.1, 0.2))
    assert {key for key in range(2_000) if few.choose(key) == 18} < {key for key in range(2_000) if more.choose(key) == 18}


@pytest.mark.parametrize(
    ("shares", "error"),
    [
        ({}, ArgumentError),
        ({1: 0.5}, ArgumentError),
        ({1: 0.5, 2: 0.500002}, ArgumentError),
        ({1: 1.5, 2: -0.5}, ArgumentError),
        ({1: float("nan"), 2: 1.0}, ArgumentError),
        ({1: float("inf"), 2: -float("inf")}, ArgumentError),
        ({1: 1e308, 2: 1e308}, ArgumentError),
        ({1: "all"}, ArgumentTypeError),
        ({1: None}, ArgumentTypeError),
        ({1: 0.5, "2": 0.5}, ArgumentTypeError),
        ([0.5, 0.5], ArgumentTypeError),
        ({1: 0.5, 7: 0.5}, VersionNotFoundError),
        ({1: 1.0, 7: 0.0}, VersionNotFoundError),
    ],
)
def test_shares_that_cannot_be(shares: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="^split"):
        VersionSplit(shares, known=[1, 2])


def test_shares_to_rounding() -> None:
    thirds = VersionSplit(dict.fromkeys((1, 2, 3), 1 / 3), known=[1, 2, 3])
    assert Counter(thirds.choose() for _ in range(3_000)) == {1: 1_000, 2: 1_000, 3: 1_000}
    assert abs(sum(VersionSplit({1: 0.5, 2: 0.5 + 9e-7}, known=[1, 2]).shares.values()) - 1) < 1e-15


@pytest.mark.parametrize("key", [1.5, (1,), object()])
def test_keys_of_other_types(key: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="the key of a request: expected str, bytes or int"):
        VersionSplit({1: 1.0}, known=[1]).choose(key)
