"""The digest of a state counts paths, dtypes, shapes and bits in their order, and nothing else."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from aiograd.errors import ArgumentTypeError
from aiograd.running.digest import state_digest
from tests.serving.arrays import State, bits_of, states


@given(states(), states())
def test_digests_agree_where_states_do(one: State, other: State) -> None:
    assert (state_digest(one) == state_digest(other)) is (bits_of(one) == bits_of(other))


def test_the_bytes_that_are_hashed() -> None:
    text = b"aiograd state 1\n" + struct.pack("<QBB", 1, 7, 2) + b"wfloat32" + struct.pack("<2Q", 1, 2) + struct.pack("<2f", 1.5, -2.0)
    assert state_digest({"w": np.array([[1.5, -2.0]], np.float32)}) == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": np.zeros(2), "b": np.ones(2)}, {"b": np.ones(2), "a": np.zeros(2)}),
        ({"ab": np.zeros(0)}, {"a": np.zeros(0)}),
        ({"a": np.zeros(2)}, {"a": np.zeros((2, 1))}),
        ({"a": np.zeros(())}, {"a": np.zeros(1)}),
        ({"a": np.zeros(2, np.int64)}, {"a": np.zeros(2)}),
        ({"a": np.zeros(2)}, {"a": -np.zeros(2)}),
        ({"a": np.zeros((0, 3))}, {"a": np.zeros((3, 0))}),
        ({"a": np.zeros(2), "b": np.zeros(2)}, {"a": np.zeros(4)}),
        ({}, {"": np.zeros(0)}),
    ],
)
def test_states_that_differ(one: State, other: State) -> None:
    assert state_digest(one) != state_digest(other)


def test_memory_does_not_count() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    same = [values, np.asfortranarray(values), values.astype(">f4"), np.repeat(values, 2, axis=1)[:, ::2], values[::-1][::-1]]
    assert len({state_digest({"w": array}) for array in same}) == 1
    assert state_digest({"w": np.array(1 + 2j, ">c16")}) == state_digest({"w": np.array(1 + 2j)})


def test_bfloat16() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    values = np.arange(6).astype(bfloat16)
    digests = {state_digest({"w": each}) for each in (values, values.reshape(2, 3), values[::2], values[0:1].reshape(()), values.view(np.uint16))}
    assert len(digests) == 5 and state_digest({"w": values[::2]}) == state_digest({"w": values[::2].copy()})


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"w": [1.0]}, "'w' with a list"),
        ({1: np.zeros(2)}, "1 with an array of float64"),
        ({"w": np.array(["x"])}, "an array of <U1"),
        ({"w": np.array([None])}, "an array of object"),
        ({"w": np.zeros(2, [("x", "f4")])}, "an array of [('x', '<f4')]"),
        ({"w": np.zeros(2, "datetime64[s]")}, "an array of datetime64[s]"),
    ],
)
def test_other_values(state: Any, found: str) -> None:
    with pytest.raises(ArgumentTypeError, match="expected arrays of numbers by paths that are strings") as error:
        state_digest(state)
    assert found in str(error.value)
