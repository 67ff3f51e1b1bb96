"""Snapshots, and the store of versions against a model of it."""

from __future__ import annotations

import gc
import math
import weakref
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aiograd.errors import ArgumentError, ArgumentTypeError, RejectedVersionError, VersionNotFoundError
from aiograd.serving.versions import Version, VersionStore, all_finite, check_fits, snapshot
from tests.serving.arrays import State, bits_of, pairs, version_of

# ---- snapshots


@given(pairs())
def test_an_array_of_the_same_bits_is_the_one_of_the_base(states: tuple[State, State]) -> None:
    old, new = states
    base = version_of(1, old)
    later = snapshot(new, base)
    assert bits_of(base.state) == bits_of(old) and bits_of(later) == bits_of(new)
    for path, array in later.items():
        assert (array is base.state[path]) is (bits_of({path: array}) == bits_of({path: old[path]}))
        assert not array.flags.writeable and array.flags.c_contiguous and not np.may_share_memory(array, new[path])


@pytest.mark.parametrize("place", [0, 65_536, 70_001, 131_072, 200_002])
def test_one_bit_is_a_difference(place: int) -> None:
    old = np.zeros(200_003, np.uint8)
    base = version_of(1, {"w": old})
    assert snapshot({"w": old}, base)["w"] is base.state["w"]
    old[place] = 128
    assert snapshot({"w": old}, base)["w"] is not base.state["w"]


def test_layouts_and_byte_orders() -> None:
    values = np.arange(6.0).reshape(2, 3)
    base = version_of(1, {"w": values})
    for array in (np.asfortranarray(values), values.astype(">f8"), np.repeat(values, 2, axis=1)[:, ::2]):
        assert snapshot({"w": array}, base)["w"] is base.state["w"]
        copy = snapshot({"w": array})["w"]
        assert copy.dtype == np.dtype("=f8") and copy.flags.c_contiguous and copy.tolist() == values.tolist()


def test_tied_weights_stay_tied() -> None:
    weight = np.ones(3)
    first = version_of(1, {"in": weight, "out": weight, "view": weight[:], "part": weight[:2]})
    assert first.state["in"] is first.state["out"] is first.state["view"] is not first.state["part"]
    assert first.nbytes == 24 + 16
    weight += 1
    later = snapshot({"in": weight, "out": weight}, first)
    assert later["in"] is later["out"] is not first.state["in"]


def test_a_base_of_another_shape_or_dtype() -> None:
    base = version_of(1, {"w": np.zeros(4, np.float32)})
    for other in (np.zeros((2, 2), np.float32), np.zeros(4, np.int32), np.zeros(2, np.float32)):
        assert snapshot({"w": other}, base)["w"].dtype == other.dtype


def nearest_bfloat16(value: float) -> Fraction:
    """The nearest bfloat16 of a normal or subnormal number, ties to even, in exact arithmetic."""
    exact = Fraction(value)
    exponent = max(math.frexp(value)[1] - 8, -133)
    return round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent


@given(arrays.arrays("float32", st.integers(0, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_rounding_to_bfloat16_is_exact(values: Any) -> None:
    rounded = snapshot({"w": values}, precision="bfloat16")["w"]
    assert rounded.dtype == np.float32 and not (rounded.view(np.uint32) & 0xFFFF).any()
    for found, value in zip(rounded.tolist(), values.tolist(), strict=True):
        expected = nearest_bfloat16(value)
        assert math.copysign(1, found) == math.copysign(1, value)
        assert found == expected if abs(expected) < 2**128 else math.isinf(found)


def test_bits_of_bfloat16() -> None:
    words = {
        0x3F808000: 0x3F800000,  # ties go to even
        0x3F818000: 0x3F820000,
        0x3F808001: 0x3F810000,
        0x7F7FFFFF: 0x7F800000,  # overflow is infinite
        0xFF7FFFFF: 0xFF800000,
        0x7F800000: 0x7F800000,
        0x7F800001: 0x7FC00000,  # NaN stays NaN, with its sign
        0xFFFFFFFF: 0xFFFF0000,
        0x80000000: 0x80000000,
    }
    values = np.array(list(words), np.uint32).view(np.float32)
    assert snapshot({"w": values}, precision="bfloat16")["w"].view(np.uint32).tolist() == list(words.values())
    assert snapshot({"w": values[:0]}, precision="bfloat16")["w"].shape == (0,)


@pytest.mark.parametrize("place", [0, 255, 256, 65_535, 65_536, 70_000, 140_000])
def test_a_change_of_one_word_is_found_wherever_it_is(place: int) -> None:
    state = {"w": np.zeros(140_001, np.float64)}
    base = Version.of(1, snapshot(state), digest="")
    assert snapshot(state, base)["w"] is base.state["w"]
    state["w"][place] = -0.0
    assert snapshot(state, base)["w"] is not base.state["w"]


def test_bfloat16_rounds_float32_only_and_shares_with_the_base() -> None:
    state = {"w": np.full((70_000, 2), 1.001, np.float32), "x": np.array(1.001), "n": np.array(70_001)}
    base = Version.of(1, snapshot(state, None, "bfloat16"), digest="")
    assert base.state["w"][0, 0] == 1 and base.state["w"][-1, -1] == 1 and base.state["x"] == 1.001 and state["w"][0, 0] == np.float32(1.001)
    state["w"] += np.float32(1e-4)
    again = snapshot(state, base, "bfloat16")
    assert all(again[path] is base.state[path] for path in state), "steps that rounding hides change nothing"


@given(arrays.arrays(st.sampled_from(["float32", "float64", "float16", "complex64", "int64", "bool"]), arrays.array_shapes(min_dims=0, min_side=0)))
def test_finite(array: Any) -> None:
    assert all_finite({"w": array}) is bool(np.isfinite(array).all())
    assert Version.of(1, {"w": array.copy()}, digest="").is_finite is bool(np.isfinite(array).all())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_whose_squares_are_too_large_are_finite(dtype: str) -> None:
    array = np.full((300, 300), np.finfo(dtype).max, dtype)
    assert all_finite({"w": array}) and all_finite({"w": -array[:, ::2]})
    for value in (np.nan, np.inf, -np.inf):
        array[-1, -1] = value
        assert not all_finite({"w": array}) and not all_finite({"w": array[:, ::-1]})


def test_arrays_of_a_finite_base_are_not_looked_at() -> None:
    nan = np.array(math.nan)
    known = Version.of(1, {"w": nan}, digest="", is_finite=True)
    assert all_finite({"w": nan}, known) and not all_finite({"w": nan.copy()}, known)
    assert not all_finite({"w": nan}, Version.of(1, {"w": nan}, digest=""))


def test_a_version_is_frozen() -> None:
    version = version_of(3, {"w": np.zeros(2)}, metrics={"loss": np.float32(0.5)}, parent=2, created=5.0)
    other = version_of(3, {"w": np.zeros(2)}, metrics={"loss": 0.5}, parent=2, created=5.0)
    assert version.digest == other.digest and version != other and len({version, other}) == 2
    assert type(version.metrics["loss"]) is float
    with pytest.raises(AttributeError):
        version.number = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        version.state["w"].fill(1)
    for mapping in (version.state, version.metrics):
        with pytest.raises(TypeError):
            mapping["w"] = 1  # type: ignore[index]
    for metrics in ({"loss": "low"}, {"loss": None}, "loss", 5):
        with pytest.raises(ArgumentTypeError, match="metrics of version 1: expected numbers by name"):
            Version.of(1, {}, digest="", metrics=metrics)  # type: ignore[arg-type]


def test_a_state_that_fits() -> None:
    template = {"b": np.zeros(2), "a": np.zeros((1, 2), np.float32)}
    state = dict(reversed(template.items()))
    assert list(check_fits(state, template)) == ["b", "a"]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "no 'a', no 'b'. Give"),
        ({"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2)}, "another model: unexpected 'c'. Give"),
        ({"a": np.zeros(3), "b": np.zeros(2, np.float32)}, "'a' is float64 [3], expected float64 [2], 'b' is float32 [2], expected float64 [2]"),
        ({"v": 1, "w": 1, "x": 1, "y": 1}, "no 'a', no 'b', unexpected 'v', and 3 more"),
    ],
)
def test_a_state_of_another_model(state: Any, text: str) -> None:
    with pytest.raises(ArgumentError) as error:
        check_fits(state, {"a": np.zeros(2), "b": np.zeros(2)})
    assert text in str(error.value)


# ---- the store


def add(store: VersionStore, value: float = 0.0, promote: bool = True) -> Version:
    version = Version.of(store.next_number, {"w": np.array(value)}, digest=str(value))
    store.admit(version, promote=promote)
    return version


def adopt(store: VersionStore, version: Version) -> None:
    store.admit(version, promote=True)


def numbers(store: VersionStore) -> list[int]:
    return [version.number for version in store.versions]


def test_a_store_from_its_beginning() -> None:
    store = VersionStore(keep=3)
    with pytest.raises(VersionNotFoundError, match="no version serves yet"):
        store.current  # noqa: B018
    with pytest.raises(VersionNotFoundError, match="no version serves yet"):
        store.rollback()
    add(store, promote=False)
    assert numbers(store) == [1]
    with pytest.raises(VersionNotFoundError, match="no version serves yet"):
        store.current  # noqa: B018
    first = add(store)
    assert store.current is first and add(store).number == 3 and store.next_number == 4


def test_numbers_are_never_given_twice() -> None:
    store = VersionStore(keep=2)
    store.skip(40)
    assert [add(store).number for _ in range(3)] == [41, 42, 43]
    assert store.rollback().number == 42
    assert add(store).number == 44
    adopt(store, version_of(7, {"w": np.zeros(1)}))
    assert store.current.number == 7 and add(store).number == 45


def test_what_is_not_finite_never_serves() -> None:
    store = VersionStore(keep=5)
    add(store)
    with pytest.raises(RejectedVersionError, match="version 2 may not serve: its state has NaN or infinity"):
        add(store, math.nan)
    assert numbers(store) == [1] and store.next_number == 2
    assert add(store, math.inf, promote=False).number == 2
    for act in (store.promote, store.rollback):
        with pytest.raises(RejectedVersionError):
            act(2)
    with pytest.raises(RejectedVersionError):
        adopt(store, version_of(9, {"w": np.array(math.nan)}))
    assert store.current.number == 1 and numbers(store) == [1, 2] and store.next_number == 3


def test_rollbacks_go_further_back() -> None:
    store = VersionStore(keep=10)
    for _ in range(4):
        add(store)
    store.promote(2)
    assert store.rollback().number == 4 and store.rollback().number == 3 and store.rollback().number == 1, "2 was promoted last"
    with pytest.raises(VersionNotFoundError, match="rollback from version 1: none that is kept served before it"):
        store.rollback()
    for number in (2, 3, 4):
        store.promote(number)
    assert store.rollback(2).number == 2 and store.rollback().number == 1
    assert store.rollback(4).number == 4 and store.rollback().number == 1, "to a version ahead is a promotion"


def test_a_version_that_served_and_is_gone_ends_the_history() -> None:
    store = VersionStore(keep=2)
    add(store)
    add(store, promote=False)
    add(store)
    assert numbers(store) == [2, 3]
    with pytest.raises(VersionNotFoundError, match="rollback from version 3"):
        store.rollback()


@pytest.mark.parametrize("number", [3, 0, -1, "1", None, 1.5, (1,)])
def test_versions_that_are_not_kept(number: Any) -> None:
    store = VersionStore(keep=5)
    add(store)
    add(store)
    for act in (store.get, store.promote):
        with pytest.raises(VersionNotFoundError, match="is not kept; kept: 1, 2. Keep more with `keep`"):
            act(number)


def test_a_follower_keeps_what_came_last_and_forgets_the_numbers_of_another_leader() -> None:
    store = VersionStore(keep=2)
    for number in (90, 91, 92):
        adopt(store, version_of(number, {"w": np.array(float(number))}))
    assert numbers(store) == [91, 92]
    adopt(store, version_of(1, {"w": np.array(1.0)}))
    adopt(store, version_of(2, {"w": np.array(2.0)}))
    assert numbers(store) == [1, 2], "the leader was restarted"
    other = version_of(2, {"w": np.array(3.0)})
    adopt(store, other)
    assert store.get(2) is store.current is other and numbers(store) == [1, 2]


def test_arrays_die_with_their_versions() -> None:
    store = VersionStore(keep=1)
    shared, own = np.zeros(3), np.zeros(4)
    first = version_of(1, {"shared": shared, "own": own})
    references = [weakref.ref(first.state[path]) for path in ("shared", "own")]
    adopt(store, first)
    del first
    own += 1
    store.admit(version_of(2, {"shared": shared, "own": own}, store.current), promote=True)
    gc.collect()
    assert [reference() is not None for reference in references] == [True, False]


_EVENTS = st.one_of(
    st.tuples(st.just("add"), st.booleans()),
    st.tuples(st.sampled_from(["promote", "rollback", "get"]), st.integers(1, 12)),
    st.tuples(st.just("rollback"), st.none()),
    st.tuples(st.just("pin"), st.sets(st.integers(1, 12), max_size=2)),
)


@given(st.integers(1, 4), st.lists(_EVENTS, max_size=25))
def test_a_store_is_its_model(keep: int, events: list[tuple[str, Any]]) -> None:
    store = VersionStore(keep)
    model = SimpleNamespace(next=1, kept=set[int](), pinned=set[int](), served=[])

    def serve(number: int) -> None:
        model.served = [*(each for each in model.served if each != number), number]

    for event, value in events:
        try:
            if event == "add":
                number = add(store, promote=value).number
                assert number == model.next
                model.next += 1
                model.kept.add(number)
                if value:
                    serve(number)
            elif event == "pin":
                store.retain(value)
                model.pinned = value
            elif event == "rollback" and value is None:
                assert store.rollback().number == model.served[-2]
                model.served.pop()
            elif event == "rollback":
                store.rollback(value)
                if value in model.served:
                    model.served = model.served[: model.served.index(value) + 1]
                serve(value)
            elif event == "promote":
                assert store.promote(value) is store.current
                serve(value)
            else:
                assert store.get(value).number == value
                assert value in model.kept
        except VersionNotFoundError:
            assert len(model.served) < 2 if value is None else value not in model.kept
        model.kept &= {*range(model.next - keep, model.next), *model.pinned, *model.served[-1:]}
        while not set(model.served) <= model.kept:
            model.served.pop(0)
        assert numbers(store) == sorted(model.kept) and store.next_number == model.next
        if model.served:
            assert store.current.number == model.served[-1]
