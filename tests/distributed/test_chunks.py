"""Chunks: whatever is cut comes together again, and each part fits where it has to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiograd as ag
from aiograd.coordination.message_form import parse
from aiograd.distributed.messages.library import StateChunk
from aiograd.distributed.objects.chunks import EACH, Capacity, flatten, join, measure, split, unflatten
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ProtocolError

SHAPES = [(), (0,), (1,), (3, 5), (700,), (41, 17), (2, 0, 3)]
DTYPES = ["float32", "int8", "complex128"]


def tensor(shape: tuple[int, ...], dtype: str) -> Any:
    return ag.tensor(np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype))


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, ag.Tensor):
        return bool(one == other)
    return one.dtype == other.dtype and np.array_equal(one.numpy(), other.numpy()) and one.shape == other.shape


@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)) | st.sampled_from([1, "x" * 300, None, [2.5]]), max_size=12),
    st.integers(1, 4),
    st.integers(2 * EACH, 5000),
)
@settings(max_examples=150, deadline=None)
def test_what_is_cut_fits_and_comes_together_again(kinds: list[Any], tensors: int, size: int) -> None:
    items = [(f"n{i}", tensor(*kind) if isinstance(kind, tuple) else kind) for i, kind in enumerate(kinds)]
    capacity = Capacity(tensors, size, size)
    parts = list(split(items, capacity))
    assert parts and all(part for part in parts[1:])
    for part in parts:
        taken = Capacity(0, 0, 0)
        for chunk in part:
            taken = taken.plus(measure(chunk.value))
        assert capacity.holds(taken) or (len(part) == 1 and not isinstance(part[0].value, ag.Tensor))
    found = join(chunk for part in parts for chunk in part)
    assert [name for name, _ in found] == [name for name, _ in items]
    assert all(same(one, other) for (_, one), (_, other) in zip(found, items, strict=True))


def test_a_state_of_an_optimizer_comes_apart_and_together() -> None:
    items: list[tuple[Any, Any]] = [(0, {"step": 1, "m": 2.0}), (1, {}), ("x", 3), (7, {"step": 4})]
    assert unflatten(join([StateChunk(path, None, value) for path, value in flatten(items)])) == items


HALF = ag.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    "chunks",
    [
        [3], [("a", None)], [("a", (4,), HALF)], [("a", (4,), HALF), ("b", None, 1)], [("a", (3,), HALF), ("a", (3,), HALF)],
        [("a", (4,), HALF), ("b", (4,), HALF)], [("a", (4,), HALF), ("a", (2, 2), HALF)], [("a", (4,), HALF), ("a", (4,), ag.tensor([1, 2]))],
        [("a", [2], HALF)], [("a", ("2",), HALF)], [("a", (-2, -1), HALF)], [("a", (2, 1), HALF.reshape(2, 1))], [("a", (4,), 3)],
        [("a", (1 << 80,), HALF)], [("a", (0,), ag.tensor([]))],
    ],
    ids=str,
)  # fmt: skip
def test_pieces_that_make_no_sense(chunks: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        join([parse(StateChunk, chunk) for chunk in chunks])


@pytest.mark.parametrize("path", [3, (), (1, 2, 3), ([],)], ids=str)
def test_paths_that_make_no_sense(path: Any) -> None:
    with pytest.raises(ProtocolError):
        unflatten([(path, 1)])


def test_a_message_of_pieces_leaves_room_for_what_else_is_in_it() -> None:
    assert Capacity.of(Limits()).holds(Capacity(1024, 512 * 1024, 250 << 20))
    assert Capacity.of(Limits(message_bytes=1, head_bytes=1)).size > EACH
