"""A server: whole answers, versions, rollback, splits, shadows, limits, and bad input."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, serving
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    DrainingError,
    ForwardError,
    QueueFullError,
    RejectedVersionError,
    ServingError,
    VersionNotFoundError,
)
from aiograd.serving import forward
from aiograd.testing.virtual_clock import VirtualClock
from tests.serving.models import Two, TwoSlowly, ones, state, values
from tests.support import assert_awaiting_raises, assert_raises, bits, random_leaf, reference_counts_only


def mlp() -> Any:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


# ---------------------------------------------------------------- answers are whole


@pytest.mark.parametrize("model", [Two, TwoSlowly])
async def test_no_answer_mixes_two_versions(model: Any) -> None:
    """The model trains in place, versions change in every turn of the loop, and forwards wait between their weights."""
    seen: dict[int, set[float]] = {}

    async def ask() -> None:
        for _ in range(150):
            answer = await server.predict(ones(2))
            seen.setdefault(answer.version, set()).update(values(answer))

    async def change() -> None:
        for n in range(1, 200):
            trained.set(n)
            await asyncio.sleep(0)
            while server.statistics().answers < 14 * n:
                await asyncio.sleep(0)
            if n % 3 == 0:
                await server.publish(metrics={"value": n})
            if n % 7 == 0:
                server.rollback()

    trained = model()
    async with serving.Server(trained, keep=50) as server:
        await asyncio.gather(change(), *(ask() for _ in range(20)))
        assert server.statistics().answers == 3000
    assert len(seen) > 5
    assert all(len(found) == 1 for found in seen.values()), "one value for each version"


async def test_an_answer_has_the_bits_of_its_version() -> None:
    model, x = mlp(), random_leaf(5, 3, grad=False)
    expected = {}
    async with serving.Server(model, max_batch=1) as server:
        for n in range(3):
            expected[server.current.number] = bits(model(x[n : n + 1]))
            with ag.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.25)
            await server.publish()
        for n, number in enumerate(expected):
            answer = await server.predict(x[n : n + 1], version=number)
            assert bits(answer.value) == expected[number]
            assert (answer.version, answer.digest) == (number, server.version(number).digest)
            assert answer.headers == {"X-Model-Version": str(number), "X-Model-Digest": answer.digest}


async def test_one_program_serves_all_versions() -> None:
    model = mlp()
    async with serving.Server(model) as server:
        for _ in range(20):
            with ag.no_grad():
                model[0].weight.add_(1.0)
            await server.publish()
            await server.predict(np.ones((1, 3), np.float32))
        assert server._forward.recordings == 1


async def test_batches_of_all_sizes_need_few_programs() -> None:
    model, x = mlp(), random_leaf(64, 3, grad=False)
    async with serving.Server(model) as server:
        for rows in range(1, 65):
            answer = await server.predict(x[:rows])
            np.testing.assert_allclose(answer.value.numpy(), model(x[:rows]).detach().numpy(), rtol=1e-5, atol=1e-6)
            assert answer.batch == rows
        assert server._forward.recordings <= 20


async def test_a_batch_that_is_slow_by_chance_does_not_move_the_next_to_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch records, and measuring begins with the second; of slow batches after a fast one the fifth is off the loop."""
    seconds = [0.02, 0.0001, 0.0001, 0.05, 0.0001, *[0.05] * 5]
    times = iter([time for duration in seconds for time in (0.0, duration)])
    are_on_loop: list[bool] = []

    def clock() -> float:
        are_on_loop.append(threading.current_thread() is threading.main_thread())
        return next(times)

    monkeypatch.setattr(forward, "clock_of", lambda loop: clock)
    async with serving.Server(mlp()) as server:
        for _ in seconds:
            await server.predict(np.ones((1, 3), np.float32))
    assert are_on_loop[::2] == [False, False, True, True, True, True, True, True, True, False]


async def test_the_model_stays_as_it_is() -> None:
    """Evaluation mode and no graph are the server's; the model's own modes and buffers are untouched."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    model.train()
    before = bits(*model.state_dict().values())
    async with serving.Server(model) as server:
        answers = [await server.predict(np.ones((4, 3), np.float32)) for _ in range(2)]
        assert bits(answers[0].value) == bits(answers[1].value), "no dropout"
        assert not answers[0].value.requires_grad
    assert model.training and model[1].training and bits(*model.state_dict().values()) == before


async def test_a_forward_of_several_columns_and_outputs() -> None:
    async def forward(module: Any, x: Any, y: Any) -> Any:
        await asyncio.sleep(0)
        return module(x), y * 2

    async with serving.Server(nn.Linear(2, 1), forward=forward, max_batch=4) as server:
        answer = await server.predict(np.ones((10, 2), np.float32), np.arange(10, dtype=np.int64))
        assert answer.value[0].shape == (10, 1) and answer.value[1].tolist() == [2 * n for n in range(10)]


@pytest.mark.parametrize("compiles", [True, False])
async def test_a_failing_forward_fails_its_requests_only(compiles: bool) -> None:
    def forward(module: Any, x: Any) -> Any:
        if x.shape[1] != 2:
            raise KeyError("no such feature")
        if not compiles:
            x.sum().item()
        return module(x)

    async with serving.Server(nn.Linear(2, 1), forward=forward) as server:
        good, bad = await asyncio.gather(
            server.predict(np.ones((1, 2), np.float32)), server.predict(np.ones((1, 3), np.float32)), return_exceptions=True
        )
        assert isinstance(bad, KeyError) and good.value.shape == (1, 1)
        assert server.statistics().failed == 1


async def test_a_model_that_returns_no_rows_is_an_error() -> None:
    async with serving.Server(nn.Linear(2, 1), forward=lambda module, x: module(x).sum()) as server:
        await assert_awaiting_raises(ForwardError, "returned other than Tensors of 3 rows", server.predict(np.ones((3, 2), np.float32)))


async def test_an_argument_error_is_the_models_where_a_row_fails_that_was_answered() -> None:
    is_broken = True

    def forward(module: Any, x: Any) -> Any:
        if is_broken:
            raise ArgumentError("from inside")
        if x.shape[0] > 1:
            raise ArgumentError("one row only")
        return module(x)

    async with serving.Server(Two(), forward=forward) as server:
        await assert_awaiting_raises(ArgumentError, "from inside", server.predict(ones()))
        is_broken = False
        await assert_awaiting_raises(ArgumentError, "one row only", server.predict(ones(2)))
        assert values(await server.predict(ones())) == {0.0}
        await assert_awaiting_raises(ArgumentError, "one row only", server.predict(ones(2)))
        is_broken = True
        with pytest.raises(ForwardError, match=r"forward of Two failed for columns of shapes \[1, 1\]: from inside") as raised:
            await server.predict(ones())
        assert isinstance(raised.value.__cause__, ArgumentError)
        answers = await asyncio.gather(server.predict(ones(3)), server.predict(ones(2)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ForwardError, ForwardError]


# ---------------------------------------------------------------- versions


async def test_versions_rise_and_no_version_changes_when_the_model_trains() -> None:
    model = Two(1.0)
    async with serving.Server(model, keep=3) as server:
        first = server.current
        assert (first.number, first.parent, first.nbytes) == (1, None, 8)
        for n in (2.0, 3.0, 4.0, 5.0):
            model.set(n)
            version = await server.publish(metrics={"loss": n})
            assert version is server.current and version.parent == version.number - 1 and dict(version.metrics) == {"loss": n}
        assert [version.number for version in server.versions] == [3, 4, 5]
        assert [float(version.state["first"][0]) for version in server.versions] == [3.0, 4.0, 5.0]
        assert not server.current.state["first"].flags.writeable
        same = await server.publish()
        assert same.digest == server.version(5).digest and same.number == 6, "a state that is published twice"
        assert same.state["first"] is server.version(5).state["first"], "copy on write"


async def test_rollback_goes_to_what_served_before() -> None:
    async with serving.Server(Two()) as server:
        for n in (1.0, 2.0, 3.0):
            await server.publish(state(n))
        assert server.rollback().number == 3 and values(await server.predict(ones())) == {2.0}
        assert server.rollback(1).number == 1 and values(await server.predict(ones())) == {0.0}
        assert (await server.publish(state(9.0))).parent == 1
        assert server.current.number == 5, "numbers are not given again"
        statistics = server.statistics()
        assert (statistics.rollbacks, statistics.published, statistics.version) == (2, 5, 5)


async def test_a_candidate_answers_only_requests_that_name_it() -> None:
    async with serving.Server(Two()) as server:
        candidate = await server.publish(state(7.0), promote=False)
        assert values(await server.predict(ones())) == {0.0}
        assert values(await server.predict(ones(), version=candidate.number)) == {7.0}
        assert server.promote(candidate.number) is candidate and values(await server.predict(ones())) == {7.0}


async def test_a_state_that_is_not_finite_never_serves() -> None:
    async with serving.Server(Two()) as server:
        await assert_awaiting_raises(RejectedVersionError, "not finite", server.publish(state(np.nan)))
        assert [version.number for version in server.versions] == [1]
        candidate = await server.publish(state(np.inf), promote=False)
        assert candidate.number == 2 and not candidate.is_finite
        assert_raises(RejectedVersionError, "NaN or infinity", server.promote, 2)
        assert_raises(RejectedVersionError, "NaN or infinity", server.split, {1: 0.5, 2: 0.5})
        assert {(await server.predict(ones())).version for _ in range(4)} == {1}
        assert server.current.number == 1
    with pytest.raises(RejectedVersionError):
        async with serving.Server(Two(np.nan)):
            pass


async def test_old_versions_die_by_reference_count() -> None:
    with reference_counts_only():
        async with serving.Server(Two(), keep=1) as server:
            old = weakref.ref(server.current.state["first"])
            await server.predict(ones())
            await server.publish(state(1.0))
            await server.predict(ones())
            await asyncio.sleep(0)
            assert old() is None
    gc.collect()


async def test_a_batch_keeps_its_version_over_every_await(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 1.0
    async with serving.Server(model, keep=1) as server:
        asked = asyncio.ensure_future(server.predict(ones()))
        await asyncio.sleep(0.5)
        for n in (1.0, 2.0, 3.0):
            await server.publish(state(n))
        answer = await asked
        assert answer.version == 1 and values(answer) == {0.0}


async def test_bfloat16_versions_have_zero_low_bits() -> None:
    model = mlp()
    async with serving.Server(model, precision="bfloat16") as server:
        assert all((array.view(np.uint32) & 0xFFFF == 0).all() for array in server.current.state.values())
        answer = await server.predict(np.ones((1, 3), np.float32))
        np.testing.assert_allclose(answer.value.numpy(), model(ag.ones((1, 3))).detach().numpy(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("is_given", [False, True])
async def test_a_step_during_the_copy_is_noticed(is_given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made on the executor; while it runs, a step changes the weights once."""
    from aiograd.serving import copying

    monkeypatch.setattr(copying, "ON_LOOP_BYTES", 0)
    model = Two(1.0)
    async with serving.Server(model) as server:
        taken = copying.snapshot

        def slow(tensors: Any, *rest: Any) -> Any:
            found = {"first": tensors["first"].copy()}
            if model.first.item() == 1.0:
                model.set(2.0)
            return taken({**found, "second": tensors["second"]}, *rest)

        monkeypatch.setattr(copying, "snapshot", slow)
        version = await server.publish(model.state_dict() if is_given else None)
        assert {path: array.tolist() for path, array in version.state.items()} == {"first": [2.0], "second": [2.0]}


@pytest.mark.parametrize("steps", [1, 100])
async def test_a_step_between_the_turns_of_a_copy_is_noticed(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks have a turn after each array; with steps in every one of them the copy is made in one section at last."""
    from aiograd.serving import copying

    monkeypatch.setattr(copying, "TURN_BYTES", 1)
    model = Two(0.0)
    async with serving.Server(model) as server:
        published = asyncio.ensure_future(server.publish())
        await asyncio.sleep(0)
        taken = 0
        while not published.done():
            if taken < steps:
                taken += 1
                model.set(float(taken))
            await asyncio.sleep(0)
        first, second = (array.item() for array in published.result().state.values())
        assert first == second and 1.0 <= first <= taken and (steps == 1 or copying.MOST_COPIES <= taken < steps)


async def test_arrays_that_are_given_are_copied_in_one_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no counters by which a change between turns would be noticed."""
    from aiograd.serving import copying

    monkeypatch.setattr(copying, "TURN_BYTES", 1)
    given = state(1.0)
    async with serving.Server(Two()) as server:
        published = asyncio.ensure_future(server.publish(given))
        while not published.done():
            await asyncio.sleep(0)
            for array in given.values():
                array += 1.0
        found = {array.item() for array in published.result().state.values()}
        assert len(found) == 1


# ---------------------------------------------------------------- split and shadow


async def test_a_split_answers_shares_and_a_rollback_ends_it() -> None:
    async with serving.Server(Two()) as server:
        await server.publish(state(1.0))
        server.split({1: 0.75, 2: 0.25})
        found = [(await server.predict(ones())).version for _ in range(40)]
        assert found.count(2) == 10
        by_key = {key: {(await server.predict(ones(), key=key)).version for _ in range(3)} for key in range(50)}
        assert all(len(versions) == 1 for versions in by_key.values())
        assert {2} in by_key.values() and {1} in by_key.values()
        assert (await server.predict(ones(), version=2)).version == 2, "a version goes before the split"
        server.rollback()
        assert {(await server.predict(ones())).version for _ in range(8)} == {1}


async def test_requests_of_a_split_that_wait_are_answered_by_the_rollback(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 1.0
    async with serving.Server(model) as server:
        await server.publish(state(1.0))
        running = asyncio.ensure_future(server.predict(ones()))
        await asyncio.sleep(0.5)
        server.split({2: 1.0})
        waiting = asyncio.ensure_future(server.predict(ones()))
        await asyncio.sleep(0.1)
        server.rollback()
        assert ((await running).version, (await waiting).version) == (2, 1)


async def test_versions_of_a_split_and_a_shadow_are_kept() -> None:
    async with serving.Server(Two(), keep=1) as server:
        await server.publish(state(1.0))
        server.split({2: 1.0})
        server.shadow(2)
        for n in (2.0, 3.0):
            await server.publish(state(n))
        assert [version.number for version in server.versions] == [2, 4]
        server.split({})
        server.shadow(None)
        assert [version.number for version in server.versions] == [4]


async def test_a_shadow_is_compared() -> None:
    async with serving.Server(Two(1.0)) as server:
        shadow = await server.publish(state(3.0), promote=False)
        server.shadow(shadow.number, 0.5)
        for n in range(8):
            assert values(await server.predict(ones())) == {1.0}
            while server.statistics().comparisons[shadow.number].requests < (n + 1) // 2:
                await asyncio.sleep(0)
        comparison = server.statistics().comparisons[shadow.number]
        assert (comparison.requests, comparison.errors, comparison.mean_difference) == (4, 0, 2.0)


async def test_a_shadow_that_is_replaced_stops(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly(1.0)
    model.seconds = 1.0
    async with serving.Server(model) as server:
        shadows = [await server.publish(state(value), promote=False) for value in (2.0, 3.0)]
        server.shadow(shadows[0].number)
        await server.predict(ones())
        await asyncio.sleep(0.1)
        server.shadow(shadows[1].number)
        await server.predict(ones())
        await asyncio.sleep(2.0)
        comparisons = server.statistics().comparisons
        assert [comparisons[shadow.number].requests for shadow in shadows] == [0, 1]


async def test_errors_of_a_shadow_are_counted() -> None:
    def forward(module: Any, x: Any) -> Any:
        if float(module.first.item()) == 3.0:
            raise ValueError("of the shadow")
        return module(x)

    async with serving.Server(Two(1.0), forward=forward) as server:
        shadow = await server.publish(state(3.0), promote=False)
        server.shadow(shadow.number)
        await server.predict(ones())
        while not (comparison := server.statistics().comparisons[shadow.number]).requests:
            await asyncio.sleep(0)
        assert (comparison.requests, comparison.errors) == (1, 1)


# ---------------------------------------------------------------- limits


async def test_requests_that_meet_run_together(virtual_clock: VirtualClock) -> None:
    async with serving.Server(Two(1.0), max_batch=8) as server:
        answers = await asyncio.gather(*(server.predict(ones()) for _ in range(20)))
        assert [answer.batch for answer in answers] == [8] * 16 + [4] * 4
        statistics = server.statistics()
        assert (statistics.batches, statistics.rows, statistics.answers, statistics.queued) == (3, 20, 20, 0)
        assert sum(statistics.latency.values()) == 20 and statistics.answers_by_version == {1: 20}


async def test_a_request_of_many_rows_is_answered_by_one_version(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 1.0
    async with serving.Server(model, max_batch=2) as server:
        asked = asyncio.ensure_future(server.predict(ones(7)))
        for n in (1.0, 2.0, 3.0):
            await asyncio.sleep(1.0)
            await server.publish(state(n))
        answer = await asked
        assert answer.value.shape == (7, 2) and values(answer) == {0.0} and answer.batch == 2


async def test_a_full_queue_says_when_to_come_back(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 1.0
    async with serving.Server(model, max_batch=2, max_queue=4) as server:
        asked = [asyncio.ensure_future(server.predict(ones(2)))]
        await asyncio.sleep(0.5)
        asked += [asyncio.ensure_future(server.predict(ones(2))) for _ in range(2)]
        await asyncio.sleep(0.0)
        error = await assert_awaiting_raises(QueueFullError, "4 of 4 rows wait", server.predict(ones()))
        assert 0.0 < error.retry_after < 2.0
        await asyncio.gather(*asked)
        assert server.statistics().refused == 1


async def test_deadlines(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 1.0
    async with serving.Server(model, max_batch=1, deadline=1.5) as server:
        first, second = asyncio.ensure_future(server.predict(ones())), asyncio.ensure_future(server.predict(ones()))
        third = asyncio.ensure_future(server.predict(ones(), deadline=0.3))
        started = asyncio.get_running_loop().time()
        await assert_awaiting_raises(DeadlineError, "queue", third)
        assert asyncio.get_running_loop().time() - started == pytest.approx(0.3)
        assert (await first).version == 1
        await assert_awaiting_raises(DeadlineError, "batch", second)
        assert asyncio.get_running_loop().time() - started == pytest.approx(1.5)
        assert server.statistics().expired == 2


async def test_cancelling_takes_the_rows_out(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 1.0
    async with serving.Server(model, max_batch=1) as server:
        first, second, third = [asyncio.ensure_future(server.predict(ones())) for _ in range(3)]
        await asyncio.sleep(0.5)
        second.cancel()
        await third
        assert asyncio.get_running_loop().time() == pytest.approx(2.0), "the cancelled rows were not computed"
        assert first.done() and server.statistics().cancelled == 1


async def test_drain_answers_what_was_admitted_and_refuses_the_rest(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 1.0
    async with serving.Server(model, max_batch=1) as server:
        asked = [asyncio.ensure_future(server.predict(ones())) for _ in range(3)]
        await asyncio.sleep(0.1)
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0.1)
        await assert_awaiting_raises(DrainingError, "drain", server.predict(ones()))
        assert await draining and all(task.done() for task in asked)
        assert len({(await task).version for task in asked}) == 1


async def test_closing_fails_what_waits(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 1.0
    async with serving.Server(model, max_batch=1) as server:
        asked = [asyncio.ensure_future(server.predict(ones())) for _ in range(2)]
        later = asyncio.ensure_future(server.predict(ones(), at_least=5))
        await asyncio.sleep(0.1)
        await server.aclose()
        results = await asyncio.gather(*asked, later, return_exceptions=True)
        assert [type(result) for result in results] == [DrainingError, DrainingError, ServingError]
        await server.aclose()


async def test_at_least_waits_for_a_version(virtual_clock: VirtualClock) -> None:
    async with serving.Server(Two()) as server:
        asked = asyncio.ensure_future(server.predict(ones(), at_least=3))
        for n in (1.0, 2.0):
            await asyncio.sleep(1.0)
            assert not asked.done()
            await server.publish(state(n))
        assert values(await asked) == {2.0}
        server.split({1: 1.0})
        assert (await server.predict(ones())).version == 1
        assert (await server.predict(ones(), at_least=3)).version == 3, "a wanted version goes before a split"
        await assert_awaiting_raises(DeadlineError, "version 9", server.predict(ones(), at_least=9, deadline=0.5))


# ---------------------------------------------------------------- bad input

BAD_SETTINGS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "no rows in a batch": ({"max_batch": 0}, ArgumentError),
    "a batch of text": ({"max_batch": "64"}, ArgumentError),
    "a queue of none": ({"max_queue": 0}, ArgumentError),
    "no versions": ({"keep": 0}, ArgumentError),
    "a negative delay": ({"max_delay": -1.0}, ArgumentError),
    "a delay that is NaN": ({"max_delay": float("nan")}, ArgumentError),
    "a deadline of 0": ({"deadline": 0.0}, ArgumentError),
    "another precision": ({"precision": "float8"}, ArgumentError),
    "a forward that is none": ({"forward": 3}, ArgumentTypeError),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_that_cannot_be(name: str) -> None:
    options, error = BAD_SETTINGS[name]
    assert_raises(error, "expected", serving.Server, Two(), **options)


def test_what_is_no_model() -> None:
    assert_raises(ArgumentTypeError, "expected a Module", serving.Server, lambda x: x)


BAD_COLUMNS: dict[str, tuple[tuple[Any, ...], type[Exception]]] = {
    "none": ((), ArgumentError),
    "text": (("one",), ArgumentTypeError),
    "objects": ((np.array([None, 1]),), ArgumentTypeError),
    "a number": ((1.0,), ArgumentError),
    "no rows": ((np.ones((0, 1), np.float32),), ArgumentError),
    "different numbers of rows": ((ones(2), ones(3)), ArgumentError),
    "rows of different lengths": (([[1.0], [1.0, 2.0]],), ArgumentError),
    "a masked array": ((np.ma.array([[1.0]], mask=True),), ArgumentTypeError),
    "more rows than may wait": ((ones(17),), ArgumentError),
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
async def test_columns_that_cannot_be(name: str) -> None:
    columns, error = BAD_COLUMNS[name]
    async with serving.Server(Two(), max_queue=16) as server:
        await assert_awaiting_raises(error, "expected", server.predict(*columns))
        assert values(await server.predict(ones())) == {0.0}, "serving goes on"


BAD_STATES: dict[str, Any] = {
    "no mapping": ([1.0], ArgumentTypeError),
    "a path is missing": ({"first": np.ones(1, np.float32)}, ArgumentError),
    "another path": ({**state(1.0), "third": np.ones(1, np.float32)}, ArgumentError),
    "another shape": ({**state(1.0), "first": np.ones(2, np.float32)}, ArgumentError),
    "another dtype": ({**state(1.0), "first": np.ones(1, np.float64)}, ArgumentError),
    "text": ({**state(1.0), "first": "one"}, ArgumentError),
}


@pytest.mark.parametrize("name", BAD_STATES)
async def test_states_that_cannot_be(name: str) -> None:
    given, error = BAD_STATES[name]
    async with serving.Server(Two()) as server:
        await assert_awaiting_raises(error, "expected|state", server.publish(given))
        assert len(server.versions) == 1 and (await server.publish()).number == 2


async def test_calls_that_cannot_be() -> None:
    server = serving.Server(Two())
    await assert_awaiting_raises(ServingError, "before it is entered", server.predict(ones()))
    async with server:
        for deadline in (0.0, -1.0, float("nan"), "soon"):
            await assert_awaiting_raises(ArgumentError, "expected seconds", server.predict(ones(), deadline=deadline))
        await assert_awaiting_raises(VersionNotFoundError, "kept: 1", server.predict(ones(), version=7))
        for call in (server.promote, server.rollback, server.version, server.shadow):
            assert_raises(VersionNotFoundError, "kept: 1", call, 7)
        assert_raises(VersionNotFoundError, "served before", server.rollback)
        assert_raises(ArgumentError, "1 in all", server.split, {1: 0.5})
        assert_raises(VersionNotFoundError, "not kept", server.split, {7: 1.0})
        assert_raises(ArgumentError, "from 0 to 1", server.shadow, 1, 2.0)
        assert values(await server.predict(ones())) == {0.0}
    await assert_awaiting_raises(ServingError, "after it was closed", server.predict(ones()))
    with pytest.raises(ServingError, match="entered once"):
        async with server:
            pass


async def test_a_model_without_state_has_no_versions() -> None:
    with pytest.raises(ArgumentError, match="no parameters"):
        async with serving.Server(nn.ReLU()):
            pass
