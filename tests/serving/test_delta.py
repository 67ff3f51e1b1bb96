"""Deltas restore every bit, are as small as promised, and refuse all damage."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.errors import ArgumentError, DeltaError
from aiograd.serving.delta import apply_delta, encode_delta
from aiograd.serving.versions import Version
from tests.serving.arrays import State, bits_of, pairs, version_of

_HEAD = len(b"aiograd delta 1\n")


@given(pairs())
def test_a_delta_gives_the_target_to_the_bit(states: tuple[State, State]) -> None:
    base = version_of(7, states[0])
    target = version_of(9, states[1], base, parent=8, metrics={"loss": 0.1, "é": float("inf")}, created=1.7e9 + 0.1)
    result = apply_delta(base, encode_delta(base, target))
    names = ("number", "digest", "parent", "metrics", "created", "is_finite")
    assert [getattr(result, name) for name in names] == [getattr(target, name) for name in names]
    assert bits_of(result.state) == bits_of(target.state)
    for path, array in result.state.items():
        assert (array is base.state[path]) is (target.state[path] is base.state[path]) and not array.flags.writeable


@given(st.integers(1, 3_000), st.floats(0, 1), st.sampled_from(["uint8", "float16", "float32", "float64", "complex128"]), st.integers(0, 9))
def test_any_share_of_changed_words(length: int, share: float, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, length * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    new = np.where(rng.random(length) < share, np.roll(old, 1), old)
    base, target = version_of(1, {"w": old}), version_of(2, {"w": new})
    assert bits_of(apply_delta(base, encode_delta(base, target)).state) == bits_of({"w": new})


def test_gaps_of_every_width() -> None:
    for length, places in ((300, [299]), (300, [0, 256, 257]), (70_000, [0, 69_999]), (70_000, [65_535]), (70_000, [65_536])):
        old = np.zeros(length, np.float32)
        new = old.copy()
        new[places] = 1
        base, target = version_of(1, {"w": old}), version_of(2, {"w": new})
        data = encode_delta(base, target)
        assert len(data) < 400 and bits_of(apply_delta(base, data).state) == bits_of({"w": new})


def test_tied_weights_cost_once_and_stay_tied() -> None:
    rng = np.random.default_rng(0)
    old, new = rng.standard_normal((2, 5_000)).astype(np.float32)
    base, target = version_of(1, {"in": old, "out": old}), version_of(2, {"in": new, "out": new})
    data = encode_delta(base, target)
    result = apply_delta(base, data)
    assert len(data) < 1.05 * len(encode_delta(version_of(1, {"in": old}), version_of(2, {"in": new})))
    assert result.state["in"] is result.state["out"] and bits_of(result.state) == bits_of(target.state)
    apart = version_of(3, {"in": old.copy(), "out": new.copy()}, base)
    again = apply_delta(result, encode_delta(result, apart))
    assert bits_of(again.state) == bits_of(apart.state) and again.state["out"] is result.state["out"]
    joined = version_of(4, {"in": old, "out": old}, again)
    assert apply_delta(again, encode_delta(again, joined)).state["out"] is again.state["in"]


# ---- sizes


def size_of(old: Any, new: Any) -> int:
    base, target = version_of(1, {"w": old}), version_of(2, {"w": new})
    return len(encode_delta(base, target))


def bfloat16(values: Any) -> Any:
    return ((values.astype(np.float32).view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


def test_small_steps_in_bfloat16() -> None:
    """Of a model of 2 bytes per weight, and per word that changed."""
    rng = np.random.default_rng(0)
    old = bfloat16(rng.standard_normal(200_000) * 0.05)
    at = np.flatnonzero(rng.random(old.size) < 0.024)
    new = old.copy()
    new.view(np.uint32)[at] += np.where(rng.random(at.size) < 0.5, 0x10000, 2**32 - 0x10000).astype(np.uint32)
    size = size_of(old, new)
    assert size <= 0.016 * 2 * old.size and size <= 1.3 * at.size
    for step, most in ((1e-6, 0.015), (1e-5, 0.065), (1e-4, 0.25), (1e-3, 0.40)):
        weights = rng.standard_normal(old.size) * 0.05
        assert size_of(bfloat16(weights), bfloat16(weights + step * rng.choice([-1, 1], old.size))) <= most * 2 * old.size


def test_dense_steps_in_float32() -> None:
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(200_000) * 0.02).astype(np.float32)
    for step, most in ((1e-6, 0.40), (1e-4, 0.57), (1e-3, 0.69)):
        new = (old + step * rng.choice([-1, 1], old.size)).astype(np.float32)
        assert 0.3 * old.nbytes < size_of(old, new) <= most * old.nbytes


def test_rows_of_an_embedding_and_single_words() -> None:
    rng = np.random.default_rng(0)
    old = rng.standard_normal((65_536, 16)).astype(np.float32)
    new = old.copy()
    new[rng.choice(65_536, 64, replace=False)] += 0.01
    assert size_of(old, new) < 0.001 * old.nbytes
    assert size_of(old, old) < 280
    old[5, 5] += 1
    assert size_of(old, new) < 0.0011 * old.nbytes


# ---- damage


@pytest.fixture(scope="module")
def versions() -> tuple[Version, Version]:
    rng = np.random.default_rng(0)
    old = {"w": rng.standard_normal(400).astype(np.float32), "b": np.zeros(40), "same": np.ones(3), "n": np.array(5)}
    new = {"w": old["w"] + np.float32(1e-3), "b": old["b"] + (np.arange(40) == 7), "same": old["same"], "n": np.array(6)}
    base = version_of(1, old)
    return base, version_of(2, new, base, parent=1, metrics={"loss": 0.25})


def test_damage_of_any_byte(versions: tuple[Version, Version]) -> None:
    base, target = versions
    data = encode_delta(base, target)
    before = bits_of(base.state)
    for place in range(len(data)):
        for bad in (data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :], data[:place], data[:place] + data[place + 1 :]):
            with pytest.raises(DeltaError, match="no whole delta"):
                apply_delta(base, bad)
    with pytest.raises(DeltaError):
        apply_delta(base, data + b"\0")
    assert bits_of(base.state) == before and apply_delta(base, data).digest == target.digest


def sealed(data: bytes) -> bytes:
    """With the checksum that it ought to have, as a hostile sender writes it."""
    return data + hashlib.blake2b(data, digest_size=16).digest()


def test_damage_behind_a_valid_checksum(versions: tuple[Version, Version]) -> None:
    """The digest of the result finds it; only the header's notes (metrics, time, number, parent) are not covered by it."""
    base, target = versions
    data = encode_delta(base, target)[:-16]
    notes = data.index(b'"parent"'), data.index(b'"records"')
    number = data.index(b'"number"') + 8, data.index(b'"digest"')
    places = [n for n in range(len(data)) if not notes[0] <= n < notes[1] and not number[0] <= n < number[1]]
    for place in places:
        bad = data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
        try:
            result = apply_delta(base, sealed(bad))
        except DeltaError:
            continue
        assert bits_of(result.state) == bits_of(target.state) and result.digest == target.digest


@given(st.binary(max_size=200), st.booleans())
def test_noise(data: bytes, is_sealed: bool) -> None:
    base = version_of(1, {"w": np.zeros(10)})
    with pytest.raises(DeltaError):
        apply_delta(base, sealed(b"aiograd delta 1\n" + data) if is_sealed else data)


def forged(base: Version, change: Callable[[dict[str, Any]], Any], streams: bytes = b"") -> bytes:
    header: dict[str, Any] = {"base": base.digest, "number": 2, "digest": "0" * 64, "parent": 1, "metrics": {}, "created": 0.0, "records": []}
    change(header)
    text = json.dumps(header).encode()
    return sealed(b"aiograd delta 1\n" + struct.pack("<Q", len(text)) + text + streams)


def deflated(data: bytes) -> bytes:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflate.compress(data) + deflate.flush()


@pytest.mark.parametrize(
    "records",
    [
        [[0, 0, 10, [0, 0, 0]]],
        [[0, 0, 9, [0] * 8]],
        [[0, 0, 11, [0] * 8]],
        [[0, 0, -10, [0] * 8]],
        [[0, 0, 10, [-1] + [0] * 7]],
        [[0, 0, 10, [1] + [0] * 7]],
        [[0, 1, 9, [0] * 9]],
        [[0, 1, 0, [0] * 9]],
        [[0, 1, 2**63, [0] * 9]],
        [[0, 8, 1, [0] * 16]],
        [[0, 3, 1, [0] * 11]],
        [[0, 1.0, 1, [0] * 9]],
        [[2, 0, 10, [0] * 8]],
        [[-1, 0, 10, [0] * 8]],
        [[0, 0, 10, [0] * 8], [0, 0, 10, [0] * 8]],
        [[1, 0, 10, [0] * 8], [0, 0, 10, [0] * 8]],
        [[1, 0]],
        [[0, 0]],
        [[0, 5]],
        [[0]],
        [[]],
        [7],
        7,
        None,
        [["0", 0, 10, [0] * 8]],
        [[0, 0, 10, 8]],
        [[0, 0, 10.0, [0] * 8]],
        [[0, 0, 10, [0.5] * 8]],
    ],
)
def test_records_that_fit_no_array(records: Any) -> None:
    base = version_of(1, {"w": np.zeros(10), "v": np.zeros(3)})
    with pytest.raises(DeltaError, match="does not fit version 1"):
        apply_delta(base, forged(base, lambda header: header.update(records=records)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("number", "2"),
        ("number", True),
        ("number", -1),
        ("parent", 0.5),
        ("digest", 5),
        ("metrics", {"loss": "low"}),
        ("metrics", 3),
        ("created", "now"),
        ("created", None),
    ],
)
def test_notes_of_other_types(key: str, value: Any) -> None:
    base = version_of(1, {"w": np.zeros(10)})
    with pytest.raises(DeltaError, match="does not fit version 1"):
        apply_delta(base, forged(base, lambda header: header.update({key: value})))
    with pytest.raises(DeltaError, match="does not fit version 1"):
        apply_delta(base, forged(base, lambda header: header.pop(key)))


def test_a_delta_that_would_unpack_to_gigabytes() -> None:
    base = version_of(1, {"w": np.zeros(1_000)})
    bomb = deflated(bytes(1 << 26))
    for record in ([0, 0, 1_000, [len(bomb)] + [0] * 7], [0, 1, 10, [len(bomb)] + [0] * 8], [0, 1, 10, [0, len(bomb)] + [0] * 7]):
        data = forged(base, lambda header, record=record: header.update(records=[record]), bomb)
        tracemalloc.start()
        with pytest.raises(DeltaError, match="a stream is not"):
            apply_delta(base, data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10 * len(bomb) < 1 << 21


def test_streams_that_are_not_whole_or_too_long() -> None:
    base = version_of(1, {"w": np.zeros(10, np.uint8)})
    plane = deflated(bytes(range(1, 11)))
    for streams in (plane[:-1], plane + b"x", deflated(bytes(9)), deflated(bytes(11)), b"\xff\xff"):
        data = forged(base, lambda header, streams=streams: header.update(records=[[0, 0, 10, [len(streams)]]]), streams)
        with pytest.raises(DeltaError, match="does not fit version 1"):
            apply_delta(base, data)
    with pytest.raises(DeltaError, match="1 bytes too many"):
        apply_delta(base, forged(base, lambda header: header.update(records=[[0, 0, 10, [len(plane)]]]), plane + b"x"))
    with pytest.raises(DeltaError, match="the result is not version 2: its digest is not 000"):
        apply_delta(base, forged(base, lambda header: header.update(records=[[0, 0, 10, [len(plane)]]]), plane))
    far = deflated(b"\xff")
    with pytest.raises(DeltaError, match="does not fit version 1"):
        apply_delta(base, forged(base, lambda header: header.update(records=[[0, 1, 1, [len(far), 0]]]), far))


def test_another_base() -> None:
    base, other = version_of(1, {"w": np.zeros(10)}), version_of(1, {"w": np.ones(10)})
    target = version_of(2, {"w": np.full(10, 2.0)})
    data = encode_delta(base, target)
    with pytest.raises(DeltaError, match="the delta is from another version than 1"):
        apply_delta(other, data)
    assert apply_delta(version_of(77, {"w": np.zeros(10)}), data).number == 2, "the digest counts, and not the number"


def test_versions_of_other_models() -> None:
    base = version_of(1, {"w": np.zeros(10), "v": np.zeros(3)})
    with pytest.raises(ArgumentError, match="another model"):
        encode_delta(base, version_of(2, {"w": np.zeros(11), "v": np.zeros(3)}))
    with pytest.raises(DeltaError, match="other orders"):
        encode_delta(base, version_of(2, {"v": np.zeros(3), "w": np.zeros(10)}))


def test_a_target_that_is_not_finite_travels_and_says_so() -> None:
    base = version_of(1, {"w": np.zeros(10)})
    target = version_of(2, {"w": np.full(10, np.nan)})
    assert not apply_delta(base, encode_delta(base, target)).is_finite
