"""Streams of parameters: a state that is cut comes together again, and each part fits into its message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiograd as ag
from aiograd.coordination.message_form import parse
from aiograd.distributed.messages.library import ReadModule, StateChunk
from aiograd.distributed.objects.parameter_stream import EACH, Capacity, fetch, join, measure, split
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ProtocolError
from tests.distributed.workers import workers

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
def test_parts_fit_and_come_together_again(kinds: list[Any], tensors: int, size: int) -> None:
    state = {f"n{i}": tensor(*kind) if isinstance(kind, tuple) else kind for i, kind in enumerate(kinds)}
    capacity = Capacity(tensors, size, size)
    parts = list(split(state, capacity))
    assert parts and all(part for part in parts[1:])
    for part in parts:
        taken = Capacity(0, 0, 0)
        for chunk in part:
            taken = taken.plus(measure(chunk.value))
        assert capacity.holds(taken) or (len(part) == 1 and not isinstance(part[0].value, ag.Tensor))
    found = join(chunk for part in parts for chunk in part)
    assert list(found) == list(state) and all(map(same, found.values(), state.values()))


def test_a_state_of_an_optimizer_comes_apart_and_together() -> None:
    state = {0: {"step": 1, "m": 2.0}, 1: {}, "x": 3, 7: {"step": 4, "deep": {"y": 5}}}
    parts = list(split(state, Capacity(1, EACH, 2 * EACH)))
    assert [chunk.path for part in parts for chunk in part] == [(0, "step"), (0, "m"), (1,), ("x",), (7, "step"), (7, "deep")] and len(parts) > 3
    assert join(chunk for part in parts for chunk in part) == state


HALF, A, B = ag.tensor([1.0, 2.0]), ("a",), ("b",)


@pytest.mark.parametrize(
    "chunks",
    [
        [3], [(A, None)], [(A, (4,), HALF)], [(A, (4,), HALF), (B, None, 1)], [(A, (3,), HALF), (A, (3,), HALF)],
        [(A, (4,), HALF), (B, (4,), HALF)], [(A, (4,), HALF), (A, (2, 2), HALF)], [(A, (4,), HALF), (A, (4,), ag.tensor([1, 2]))],
        [(A, [2], HALF)], [(A, ("2",), HALF)], [(A, (-2, -1), HALF)], [(A, (2, 1), HALF.reshape(2, 1))], [(A, (4,), 3)],
        [(A, (1 << 80,), HALF)], [(A, (0,), ag.tensor([]))], [(A, (4,), HALF), (A, None, HALF)], [(A, None, 1), (("a", "b"), None, 1)],
        [(3, None, 1)], [((), None, 1)], [((1, 2, 3), None, 1)], [(([],), None, 1)], [((True,), None, 1)],
    ],
    ids=str,
)  # fmt: skip
def test_chunks_that_do_not_fit_together(chunks: list[Any]) -> None:
    with pytest.raises(ProtocolError, match=r"^a malformed StateChunk: (field \w+(\[0\])? is|it is) .*; expected "):
        join([parse(StateChunk, chunk) for chunk in chunks])


async def test_arrays_of_any_object_are_read() -> None:
    """A state of arrays, larger than a message, of an object that is no module."""
    arrays = {"weight": np.arange(30_000, dtype=np.float32).reshape(-1, 2), "count": np.int64(7)}

    class Version:
        def state_dict(self) -> dict[str, Any]:
            return arrays

    async with workers("a", "b", limits=Limits(message_bytes=40_000)) as (a, b):
        ref = a._calls.reference(b.refer(Version()).to_wire())
        head, state = await fetch(a, ref, ReadModule, 10.0)
        assert head is None and list(state) == list(arrays)
        assert all(np.array_equal(state[name].numpy(), array) and state[name].dtype == array.dtype for name, array in arrays.items())


def test_a_message_of_chunks_leaves_room_for_its_other_fields() -> None:
    assert Capacity.of(Limits()).holds(Capacity(1024, 512 * 1024, 250 << 20))
    assert Capacity.of(Limits(message_bytes=1, head_bytes=1)).size > EACH
