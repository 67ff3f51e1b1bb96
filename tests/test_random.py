"""Generators: reproducible, saved and restored, spawned; the default one per task; replay."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import json
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.random import Generator, default_generator, seed
from aiograd.running.random_streams import Draws, Replay
from tests.support import assert_raises

DRAWS = {
    "normal": lambda g: g.normal((3, 2), mean=1.0, std=2.0),
    "uniform": lambda g: g.uniform((4,), low=-1.0, high=3.0),
    "integers": lambda g: g.integers(-3, 9, (5,)),
    "bernoulli": lambda g: g.bernoulli(0.3, (6,)),
    "dropout_mask": lambda g: g.dropout_mask((6,), 0.4),
    "permutation": lambda g: g.permutation(7),
    "half a word": lambda g: g.integers(0, 100, dtype=np.int32),
}


def values(tensor: Any) -> list[Any]:
    return tensor.reshape(-1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(draw: Any) -> None:
    a, b, other = Generator(5), Generator(5), Generator(6)
    first = [values(draw(a)) for _ in range(5)]
    assert first == [values(draw(b)) for _ in range(5)]
    assert first != [values(draw(other)) for _ in range(5)]
    assert first[0] != first[1] or first[1] != first[2]


def test_the_stream_is_numpys() -> None:
    theirs = np.random.default_rng(3)
    ours = Generator(3)
    np.testing.assert_array_equal(ours.normal((4,), dtype=np.float64).numpy(), theirs.standard_normal(4))
    np.testing.assert_array_equal(ours.permutation(9).numpy(), theirs.permutation(9))


def test_distributions() -> None:
    g = Generator(0)
    n = 100_000
    normal = g.normal((n,), mean=2.0, std=0.5).numpy()
    assert normal.dtype == np.float32
    assert abs(normal.mean() - 2.0) < 0.01
    assert abs(normal.std() - 0.5) < 0.01
    uniform = g.uniform((n,), low=-1.0, high=2.0, dtype=np.float64).numpy()
    assert uniform.dtype == np.float64
    assert uniform.min() >= -1.0
    assert uniform.max() < 2.0
    assert abs(uniform.mean() - 0.5) < 0.02
    assert set(np.unique(g.integers(-1, 3, (1000,)).numpy())) == {-1, 0, 1, 2}
    bits = g.bernoulli(0.25, (n,), dtype=np.bool_).numpy()
    assert bits.dtype == np.bool_
    assert abs(bits.mean() - 0.25) < 0.01
    mask = g.dropout_mask((n,), 0.2).numpy()
    assert set(np.unique(mask)) == {np.float32(0), np.float32(1.25)}
    assert abs(mask.mean() - 1.0) < 0.01
    assert sorted(g.permutation(10).tolist()) == list(range(10))
    assert g.normal((2,), dtype=np.float16).dtype == np.float16


def test_certain_probabilities_draw_nothing() -> None:
    g = Generator(0)
    before = g.state_dict()
    np.testing.assert_array_equal(g.bernoulli(0.0, (3,)).numpy(), np.zeros(3))
    np.testing.assert_array_equal(g.bernoulli(1.0, (3,)).numpy(), np.ones(3))
    np.testing.assert_array_equal(g.dropout_mask((3,), 0.0).numpy(), np.ones(3))
    np.testing.assert_array_equal(g.dropout_mask((3,), 1.0).numpy(), np.zeros(3))
    assert g.state_dict() == before


async def test_the_default_dtype_is_used() -> None:
    ag.set_default_dtype(np.float64)
    g = Generator(0)
    assert {t.dtype for t in (g.normal(), g.uniform(), g.bernoulli(0.5), g.dropout_mask((1,), 0.5))} == {np.dtype(np.float64)}


def test_state_survives_json() -> None:
    g = Generator([1, 2, 3]).spawn(2)[1]
    g.normal((3,))
    g.integers(0, 5, dtype=np.int32)
    g.spawn(1)
    state = json.loads(json.dumps(g.state_dict()))
    restored = Generator().load_state_dict(state)
    assert restored.state_dict() == g.state_dict()
    for draw in DRAWS.values():
        assert values(draw(restored)) == values(draw(g))
    assert values(restored.fork().normal((3,))) == values(g.fork().normal((3,)))


def test_a_generator_from_entropy_can_be_repeated() -> None:
    g = Generator()
    again = Generator().load_state_dict(g.state_dict())
    assert values(g.normal((3,))) == values(again.normal((3,))) != values(Generator().normal((3,)))


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "MT19937"}, {"state": None}, {"state": 1 << 130}, {"seed": -1}, {"seed": "x"}, {"spawn_key": [-1]}, {"extra": 1},
    ],
)  # fmt: skip
def test_a_bad_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    g = Generator(1)
    before = g.state_dict()
    assert_raises(ag.errors.ArgumentError, r"Generator", g.load_state_dict, {**before, **change})
    assert g.state_dict() == before


def test_spawned_generators_are_numpys_and_independent_of_draws() -> None:
    ours = Generator(9)
    ours.normal((10,))
    theirs = np.random.SeedSequence(9).spawn(3)
    for child, sequence in zip([*ours.spawn(2), ours.fork()], theirs, strict=True):
        np.testing.assert_array_equal(child.normal((3,), dtype=np.float64).numpy(), np.random.default_rng(sequence).standard_normal(3))
    assert "spawn_key=(1,)" in repr(Generator(9).spawn(2)[1])


def test_clones_and_deep_copies_go_on_alike_and_apart() -> None:
    g = Generator(2)
    g.normal((3,))
    for copied in (g.clone(), copy.deepcopy(g), copy.copy(g)):
        expected = values(copied.normal((3,)))
        assert values(g.clone().normal((3,))) == expected


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_is_refused_with_advice(protocol: int) -> None:
    assert_raises(ArgumentTypeError, r"generators cannot be pickled.*state_dict\(\)", lambda: pickle.dumps({"nested": Generator(1)}, protocol))


def test_draws_of_several_threads_are_all_different_parts_of_one_stream() -> None:
    g = Generator(0)
    drawn: list[float] = []

    def work() -> None:
        drawn.extend(g.normal((), dtype=np.float64).item() for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == sorted(np.random.default_rng(0).standard_normal(800))


@pytest.mark.parametrize(
    "call",
    [
        lambda g: Generator(-1), lambda g: Generator(1.5), lambda g: Generator([]), lambda g: Generator(True), lambda g: g.normal((-1,)),
        lambda g: g.normal("ab"), lambda g: g.normal(std=-1.0), lambda g: g.normal(mean=float("nan")), lambda g: g.normal(dtype=np.int32),
        lambda g: g.uniform(low=2.0, high=1.0), lambda g: g.uniform(high=float("inf")), lambda g: g.integers(3, 3),
        lambda g: g.integers(0, 300, dtype=np.uint8), lambda g: g.integers(0, 3, dtype=np.float32), lambda g: g.bernoulli(1.5),
        lambda g: g.dropout_mask((2,), -0.1), lambda g: g.permutation(-1), lambda g: g.permutation(2.0), lambda g: g.spawn(-1),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_and_draw_nothing(call: Any) -> None:
    g = Generator(0)
    before = g.state_dict()
    assert_raises(ag.errors.ArgumentError, None, call, g)
    assert g.state_dict() == before


# The default generator


NAN = float("nan")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.exponential_(0), lambda x: x.exponential_(-1), lambda x: x.exponential_(NAN), lambda x: x.exponential_("1"),
        lambda x: x.uniform_(2, 1), lambda x: x.uniform_(NAN, 1), lambda x: x.uniform_("0", 1), lambda x: x.normal_(0, -1),
        lambda x: x.normal_(0, NAN),
        lambda x: x.bernoulli_(1.1), lambda x: x.bernoulli_(NAN), lambda x: x.bernoulli_(x - 1), lambda x: x.random_(5, 0),
        lambda x: x.random_(0, 2.5),
        lambda x: ag.bernoulli(x - 0.1), lambda x: ag.bernoulli(x + 1.1), lambda x: ag.bernoulli(x * NAN), lambda x: ag.normal(x, x * NAN),
        lambda x: ag.normal(x, x - 1), lambda x: ag.randint(0, 2.5, (3,)), lambda x: ag.nn.init.trunc_normal_(x, 0, 0),
        lambda x: ag.nn.init.trunc_normal_(x, 0, NAN), lambda x: default_generator().normal(3, std="1"),
    ],
)  # fmt: skip
def test_parameters_of_no_distribution_are_refused_and_change_nothing(call: Any) -> None:
    x = ag.zeros(3)
    before = default_generator().state_dict()
    assert_raises(ArgumentError, "expected", call, x)
    assert x.tolist() == [0, 0, 0] and default_generator().state_dict() == before


def test_numbers_of_half_precision_stay_below_1_and_keep_their_chances() -> None:
    drawn = Generator(0).uniform(100_000, dtype=np.float16).numpy()
    assert drawn.max() == 1 - 2.0**-11 and drawn.min() == 0 and abs(drawn.mean(dtype=float) - 0.5) < 0.005
    rare = ag.bernoulli(ag.full((200_000,), 1e-4, dtype=np.float16), generator=Generator(1))
    assert 5 <= rare.numpy().sum(dtype=float) <= 40
    waits = ag.zeros(200_000, dtype=np.float16).exponential_(generator=Generator(2))
    assert waits.dtype == np.float16 and waits.numpy().max() > 8


async def test_the_default_generator_belongs_to_the_task() -> None:
    mine = seed(1)
    assert default_generator() is mine

    async def inherits() -> Generator:
        return default_generator()

    async def seeds_its_own() -> Generator:
        return seed(2)

    assert await asyncio.create_task(inherits()) is mine
    assert await asyncio.create_task(seeds_its_own()) is not mine
    assert default_generator() is mine


def test_without_a_seed_there_is_a_default_generator_all_the_same() -> None:
    def body() -> None:
        assert default_generator() is default_generator()

    contextvars.Context().run(body)


# Replay


def test_a_replay_repeats_and_moves_nothing() -> None:
    a, b = Generator(1), Generator(2)
    a.normal((2,))

    def region() -> list[Any]:
        drawn = [values(draw(g)) for g in (a, b, a) for draw in DRAWS.values()]
        return [*drawn, values(a.fork().normal((2,))), values(a.normal((2,)))]

    draws = Draws()
    with draws.recording():
        first = region()
    states = [a.state_dict(), b.state_dict()]
    for _ in range(2):
        with Replay(draws).playing():
            assert region() == first
    assert [a.state_dict(), b.state_dict()] == states
    assert region() != first


def test_a_replay_does_not_depend_on_what_others_drew_in_between() -> None:
    g = Generator(1)
    draws = Draws()
    with draws.recording():
        first = values(g.normal((2,)))
    g.normal((5,))  # another task's
    with draws.recording():
        second = values(g.normal((2,)))
    replay = Replay(draws)
    with replay.playing():
        assert values(g.normal((2,))) == first
    g.normal((5,))
    with replay.playing():
        assert values(g.normal((2,))) == second


def test_regions_nest_in_recordings_and_replays() -> None:
    g = Generator(1)
    inner_draws: list[Draws] = []

    def inner() -> Any:
        draws = Draws()
        inner_draws.append(draws)
        with draws.recording():
            return values(g.normal((2,)))

    outer = Draws()
    with outer.recording():
        first = [values(g.normal((1,))), inner(), values(g.normal((1,)))]
    with Replay(outer).playing():
        assert [values(g.normal((1,))), inner(), values(g.normal((1,)))] == first
    for draws in inner_draws:
        with Replay(draws).playing():
            assert values(g.normal((2,))) == first[1]


def test_a_replay_uses_the_default_generator_of_the_recording() -> None:
    def region() -> list[Any]:
        first = values(default_generator().normal((2,)))
        seed(7)
        return [first, values(default_generator().normal((2,)))]

    draws = Draws()

    def record() -> list[Any]:
        seed(3)
        with draws.recording():
            return region()

    def repeat() -> list[Any]:
        seed(4)
        with Replay(draws).playing():
            return region()

    recorded = contextvars.copy_context().run(record)
    assert contextvars.copy_context().run(repeat) == recorded


def test_generators_made_in_a_region_are_made_again() -> None:
    def region() -> list[Any]:
        g = Generator(4)
        return [values(g.normal((2,))), values(g.normal((2,)))]

    draws = Draws()
    with draws.recording():
        first = region()
    with Replay(draws).playing():
        assert region() == first
