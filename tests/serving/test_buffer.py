"""The replay buffer: the rows that it keeps, its draws, its state, its bounds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, ServingError
from aiograd.serving.buffer import ReplayBuffer

_BATCHES = st.lists(st.integers(1, 12), min_size=1, max_size=15)


def fill(buffer: ReplayBuffer, batches: list[int]) -> None:
    """Rows whose columns say which row they are."""
    for count in batches:
        rows = np.arange(buffer.seen, buffer.seen + count)
        buffer.add(rows, np.stack([rows, -rows], axis=1).astype(np.float32))


def kept(buffer: ReplayBuffer) -> list[int]:
    """The numbers of the rows in the buffer; all columns agree about them."""
    rows, pairs = buffer.state_dict()["columns"]
    assert pairs.tolist() == [[row, -row] for row in rows.tolist()]
    return sorted(rows.tolist())


@given(_BATCHES, st.integers(1, 20))
def test_the_latest_rows_stay(batches: list[int], rows: int) -> None:
    buffer = ReplayBuffer(rows)
    fill(buffer, batches)
    seen = sum(batches)
    assert buffer.seen == seen and len(buffer) == min(rows, seen) and kept(buffer) == list(range(max(0, seen - rows), seen))
    assert buffer.nbytes <= rows * 16


@given(_BATCHES, st.integers(1, 20), st.integers(0, 3))
def test_a_reservoir_keeps_distinct_rows(batches: list[int], rows: int, seed: int) -> None:
    buffer = ReplayBuffer(rows, policy="reservoir", seed=seed)
    fill(buffer, batches)
    assert len(set(kept(buffer))) == len(buffer) == min(rows, sum(batches)) and max(kept(buffer)) < sum(batches)


@pytest.mark.parametrize("batches", [[9, *[1] * 6, 25], [7, 13, 20], [40]])
def test_a_reservoir_keeps_each_row_with_the_same_probability(batches: list[int]) -> None:
    counts = Counter[int]()
    for seed in range(1_000):
        buffer = ReplayBuffer(10, policy="reservoir", seed=seed)
        fill(buffer, batches)
        counts.update(kept(buffer))
    # 1,000 draws of probability 1/4: a standard deviation of 13.7
    assert len(counts) == 40 and all(abs(count - 250) < 5 * 13.7 for count in counts.values())
    assert abs(sum(count for row, count in counts.items() if row >= 20) - 5_000) < 5 * 50


def test_the_last_of_several_rows_that_draw_one_place_has_it() -> None:
    one_by_one, at_once = (ReplayBuffer(1, policy="reservoir", seed=3) for _ in range(2))
    fill(one_by_one, [1] * 2_000)
    fill(at_once, [2_000])
    assert kept(one_by_one) == kept(at_once) and one_by_one.state_dict()["random"] == at_once.state_dict()["random"]


@given(st.integers(1, 30), st.integers(1, 40), st.sampled_from(["latest", "reservoir"]))
def test_samples(rows: int, count: int, policy: Any) -> None:
    buffer = ReplayBuffer(20, policy=policy, seed=1)
    fill(buffer, [rows])
    numbers, pairs = buffer.sample(count)
    assert numbers.shape == (count,) and pairs.shape == (count, 2) and pairs.dtype == np.float32
    assert pairs[:, 0].tolist() == numbers.tolist() and set(numbers.tolist()) <= set(kept(buffer))
    if count <= len(buffer):
        assert len(set(numbers.tolist())) == count, "without replacement"


def test_samples_are_uniform_and_follow_from_the_seed() -> None:
    one, same, other = (ReplayBuffer(8, seed=seed) for seed in (5, 5, 6))
    for buffer in (one, same, other):
        fill(buffer, [13])
    draws = [[buffer.sample(3)[0].tolist() for _ in range(4_000)] for buffer in (one, same, other)]
    assert draws[0] == draws[1] != draws[2]
    counts = Counter(row for draw in draws[0] for row in draw)
    assert counts.keys() == set(range(5, 13)) and all(abs(count - 1_500) < 5 * 37 for count in counts.values())


def test_it_has_copies_of_its_own() -> None:
    x, y = np.zeros((3, 2)), ag.ones(3, requires_grad=True)
    buffer = ReplayBuffer(4)
    buffer.add(x, y)
    x += 5
    with ag.no_grad():
        y.fill_(7)
    drawn, targets = buffer.sample(3)
    assert not drawn.any() and targets.tolist() == [1, 1, 1]
    drawn += 1
    assert not buffer.sample(3)[0].any()
    saved = buffer.state_dict()
    saved["columns"][0] += 9
    assert not buffer.sample(3)[0].any()


def test_bounds_in_bytes() -> None:
    buffer = ReplayBuffer(1_000, bytes=100)  # rows of 16 bytes
    fill(buffer, [1, 4, 30])
    assert len(buffer) == 6 and buffer.nbytes == 96 and kept(buffer) == list(range(29, 35))
    small = ReplayBuffer(3, bytes=10**6)
    fill(small, [50])
    assert len(small) == 3 and small.nbytes == 48
    with pytest.raises(ArgumentError, match="a row has 16 bytes, the buffer room for 15"):
        fill(ReplayBuffer(3, bytes=15), [1])
    empty_rows = ReplayBuffer(3, bytes=1)
    empty_rows.add(np.zeros((5, 0)))
    assert len(empty_rows) == 3 and empty_rows.sample(2)[0].shape == (2, 0)


def test_memory_grows_with_the_rows() -> None:
    buffer = ReplayBuffer(10**9)
    sizes = set()
    for _ in range(100):
        fill(buffer, [3])
        sizes.add(buffer.nbytes)
        assert buffer.nbytes <= 2 * 16 * buffer.seen
    assert len(sizes) < 10 and kept(buffer) == list(range(300))


# ---- states


@pytest.mark.parametrize("policy", ["latest", "reservoir"])
@pytest.mark.parametrize("batches", [[], [3], [3, 5, 9]])
def test_a_state_goes_through_a_file_and_continues_to_the_bit(tmp_path: Path, policy: Any, batches: list[int]) -> None:
    buffer = ReplayBuffer(8, bytes=10_000, policy=policy, seed=2)
    fill(buffer, batches)
    if batches:
        buffer.sample(5)
    ag.save({"buffer": buffer.state_dict()}, tmp_path / "state.safetensors")
    other = ReplayBuffer(8, bytes=10_000, policy=policy, seed=77)
    if policy == "latest":
        fill(other, [20])
    other.load_state_dict(ag.load(tmp_path / "state.safetensors")["buffer"])
    for _ in range(3):
        for each in (buffer, other):
            fill(each, [6, 1])
        drawn = [each.sample(4) for each in (buffer, other)]
        assert all(np.array_equal(*columns) for columns in zip(*drawn, strict=True))
        assert kept(buffer) == kept(other) and (buffer.seen, len(buffer)) == (other.seen, len(other))


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    buffer = ReplayBuffer(8, seed=2)
    fill(buffer, [5])
    good = buffer.state_dict()
    columns = good["columns"]
    bad: list[Any] = [
        None,
        {},
        {**good, "more": 1},
        {**good, "rows": 9},
        {**good, "bytes": 100},
        {**good, "policy": "reservoir"},
        {**good, "seen": -1},
        {**good, "seen": "5"},
        {**good, "seen": 6},
        {**good, "seen": 4},
        {**good, "columns": None},
        {**good, "columns": []},
        {**good, "columns": columns[:1]},
        {**good, "columns": columns[::-1]},
        {**good, "columns": [columns[0], columns[1].astype(np.float64)]},
        {**good, "columns": [columns[0], columns[1][:, :1]]},
        {**good, "columns": [columns[0][:4], columns[1]]},
        {**good, "columns": [columns[0], "text"]},
        {**good, "random": {}},
        {**good, "random": None},
        {**good, "random": {**good["random"], "state": "x"}},
    ]
    for state in bad:
        with pytest.raises(ArgumentError):
            buffer.load_state_dict(state)
    assert kept(buffer) == [0, 1, 2, 3, 4] and buffer.state_dict()["random"] == good["random"]


# ---- bad input


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ((), "no columns"),
        ((np.zeros(2),), "found rows of float64 [], expected int64 [], float32 [2]"),
        ((np.arange(2), np.zeros((2, 3), np.float32)), "float32 [3], expected int64 [], float32 [2]"),
        ((np.arange(2), np.zeros((2, 2))), "found rows of int64 [], float64 [2]"),
        ((np.arange(2), np.zeros((2, 2), np.float32), np.zeros(2)), "expected int64 [], float32 [2] as in the first add"),
        ((np.arange(2), np.zeros((3, 2), np.float32)), "expected columns with the same number of rows, at least one; found shapes [2], [3, 2]"),
        ((np.arange(0), np.zeros((0, 2), np.float32)), "shapes [0], [0, 2]"),
        ((np.array(1), np.zeros((1, 2), np.float32)), "column 0 is a single number; expected rows"),
        ((["a", "b"], np.zeros((2, 2), np.float32)), "column 0 is a list of dtype <U1; expected numbers"),
        (("text", np.zeros((2, 2), np.float32)), "column 0 is a str of dtype <U4"),
        (([None, 1], np.zeros((2, 2), np.float32)), "column 0 is a list of dtype object"),
        ((np.ma.array([1, 2], mask=[True, False]), np.zeros((2, 2), np.float32)), "expected no masked elements"),
        (([[1], [1, 2]], np.zeros((2, 2), np.float32)), "column 0 has rows of different lengths"),
    ],
)
def test_columns_that_do_not_fit(columns: Any, text: str) -> None:
    buffer = ReplayBuffer(8, policy="reservoir")
    fill(buffer, [9])
    before = kept(buffer), buffer.seen, buffer.state_dict()["random"]
    with pytest.raises(ArgumentError) as error:
        buffer.add(*columns)
    assert text in str(error.value) and (kept(buffer), buffer.seen, buffer.state_dict()["random"]) == before
    if not columns or "as in the first add" not in str(error.value):
        fresh = ReplayBuffer(8)
        with pytest.raises(ArgumentError):
            fresh.add(*columns)
        fill(fresh, [2])
        assert len(fresh) == 2


def test_other_byte_orders_are_the_same_numbers() -> None:
    buffer = ReplayBuffer(8)
    buffer.add(np.array([1.0, 2.0], ">f8"))
    buffer.add(np.array([3.0]))
    column = buffer.sample(3)[0]
    assert sorted(column.tolist()) == [1, 2, 3] and column.dtype.isnative


@pytest.mark.parametrize("count", [0, -1, 1.0, "3", None, True])
def test_counts_of_a_sample(count: Any) -> None:
    buffer = ReplayBuffer(8)
    with pytest.raises(ServingError, match="the buffer is empty"):
        buffer.sample(1)
    fill(buffer, [2])
    with pytest.raises(ArgumentError, match="expected an int of at least 1"):
        buffer.sample(count)


@pytest.mark.parametrize(
    "options",
    [{"rows": 0}, {"rows": 2.0}, {"rows": "8"}, {"bytes": 0}, {"bytes": 1e6}, {"policy": "oldest"}, {"policy": None}, {"seed": -1}, {"seed": None}],
)
def test_options_of_a_buffer(options: Any) -> None:
    with pytest.raises(ArgumentError, match="^ReplayBuffer"):
        ReplayBuffer(**{"rows": 8, **options})


def test_text_is_a_wrong_type() -> None:
    with pytest.raises(ArgumentTypeError):
        ReplayBuffer(8).add(["a"])
