"""Requests, models and callers that would disturb others: each fails by itself, and what serves stays as it is."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
import aiograd.distributed as dist
from aiograd import nn, serving
from aiograd.errors import ArgumentError, ArgumentTypeError, DeadlineError, LoopError, ModeError, ServingError, VersionNotFoundError
from aiograd.serving import statistics
from aiograd.testing.virtual_clock import VirtualClock
from tests.serving.learning import examples, squares
from tests.serving.models import Two, ones, state, values
from tests.support import assert_awaiting_raises, assert_raises


class Recommend(nn.Module):
    """Rows of a table: an index beyond it is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3)

    def forward(self, index: Any) -> Any:
        return self.table(index)


async def test_a_bad_value_fails_its_request_and_not_those_that_meet_it() -> None:
    async with serving.Server(Recommend()) as server:
        asked = [server.predict(np.array([index])) for index in (1, 99, 3, 77, 5)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer).__name__ for answer in answers] == ["Answer", "ArgumentError", "Answer", "ArgumentError", "Answer"]
        assert answers[1] is not answers[3] and "99" in str(answers[1]) and "77" in str(answers[3])
        alone = await server.predict(np.array([3]))
        assert answers[2].value.tolist() == alone.value.tolist() and answers[2].batch == 1
        assert server.statistics().failed == 2


async def test_tasks_that_run_apart_keep_their_deadlines_and_can_be_cancelled(virtual_clock: VirtualClock) -> None:
    async def forward(module: Any, x: Any) -> Any:
        await asyncio.sleep(1.0)
        if x.shape[0] > 1:
            raise ValueError("too many")
        return x

    server = await serving.Server(Two(), forward=forward).__aenter__()
    first, late, cancelled, last, failed = (
        asyncio.ensure_future(server.predict(ones(), deadline=deadline)) for deadline in (None, 2.5, None, None, None)
    )
    await asyncio.sleep(1.5)
    cancelled.cancel()
    assert (await first).waited == 1.0
    await assert_awaiting_raises(DeadlineError, "the deadline passed", late)
    assert (await last).value.shape == (1, 1)
    await server.aclose()
    await assert_awaiting_raises(ServingError, "closed|cancelled", failed)
    assert server.statistics().failed == 0


class Ended(BaseException):
    """As the exceptions by which pytest fails a test."""


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_forward_that_ends_otherwise_than_by_an_exception_answers_by_an_error(is_async: bool) -> None:
    def forward(module: Any, x: Any) -> Any:
        if x.shape[1] == 2:
            raise Ended
        return x

    async def awaits(module: Any, x: Any) -> Any:
        return forward(module, x)

    async with serving.Server(Two(), forward=awaits if is_async else forward) as server:
        bad, waiting = (asyncio.ensure_future(server.predict(np.ones((1, width), np.float32))) for width in (2, 1))
        await assert_awaiting_raises(ServingError, "was ended by Ended", bad)
        await asyncio.wait([waiting])
        assert isinstance(waiting.exception(), ServingError)
        worker = server._batcher._worker
        assert worker is not None and isinstance(worker.exception(), Ended)
        assert (await server.predict(ones())).value.shape == (1, 1)


async def test_a_loss_that_ends_otherwise_than_by_an_exception_is_a_failure() -> None:
    def loss(*_: Any) -> Any:
        raise Ended("so")

    async with serving.Server(nn.Linear(3, 1)) as server:
        trainer = serving.Trainer(server, ag.optim.SGD(server.model.parameters(), 0.1), loss, buffer=serving.ReplayBuffer(50))
        await trainer.learn(*examples())
        with pytest.raises(Ended):
            await trainer.step()
        assert trainer.failures == 1 and "ended by Ended: so" in str(trainer.error)


async def test_a_model_that_has_changed_is_not_published() -> None:
    model = Two(1.0)
    async with serving.Server(model) as server:
        model.extra = nn.Parameter(ag.ones(2))
        await assert_awaiting_raises(ArgumentError, "of another model: unexpected 'extra'", server.publish())
        del model.extra
        model.second = nn.Parameter(ag.ones(3))
        await assert_awaiting_raises(ArgumentError, r"'second' is float32 \[3\], expected float32 \[1\]", server.publish())
        model.second = nn.Parameter(ag.ones(1, dtype=ag.float64))
        await assert_awaiting_raises(ArgumentError, "'second' is float64", server.publish())
        assert values(await server.predict(ones())) == {1.0} and server.current.number == 1


async def test_a_shadow_compares_what_was_asked_and_answered() -> None:
    """Callers may use their arrays again."""
    async with serving.Server(Two(1.0)) as server:
        same = await server.publish(state(1.0), promote=False)
        server.shadow(same.number)
        request = ones(2)
        for n in range(5):
            answer = await server.predict(request)
            request[...] = n
            answer.value.numpy()[...] *= 2.0
            while server.statistics().comparisons[same.number].requests < n + 1:
                await asyncio.sleep(0)
        assert server.statistics().comparisons[same.number].mean_difference == 0.0


async def test_buffers_that_are_in_no_version_stay_as_they_were() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(ag.ones(1))
            self.register_buffer("scale", ag.ones(1), persistent=False)

        def forward(self, x: Any) -> Any:
            return x * self.weight * self.scale

    model: Any = Scaled()
    async with serving.Server(model) as server:
        model.scale.fill_(7.0)
        assert values(await server.predict(ones())) == {1.0}


async def test_an_answer_shares_no_memory_with_requests_weights_and_other_answers() -> None:
    def forward(module: Any, x: Any) -> Any:
        return x, x[:, :1], ag.expand_dims(module.first, 1) if x.shape[0] == 1 else x, x * 2

    rows = [np.ones((1, 3), np.float32) for _ in range(3)]
    async with serving.Server(Two(), forward=forward) as server:
        alone = await server.predict(rows[0])
        met = await asyncio.gather(*[server.predict(each) for each in rows[1:]])
        assert met[0].batch == 2
        arrays = [output._data for answer in (alone, *met) for output in answer.value]
        assert all(array.base is None and array.flags.writeable for array in arrays)
        for array in arrays:
            array[...] = 7.0
        assert all((each == 1.0).all() for each in rows) and server.current.state["first"].tolist() == [0.0]


async def test_the_default_forward_calls_the_module() -> None:
    class Doubled(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 2

    model = Doubled(2, 1)
    x = np.ones((3, 2), np.float32)
    async with serving.Server(model) as server:
        assert (await server.predict(x)).value.tolist() == model(ag.asarray(x)).tolist()


async def test_a_function_that_returns_a_coroutine_is_a_forward_that_awaits() -> None:
    class Waits(nn.Linear):
        async def forward(self, x: Any) -> Any:
            await asyncio.sleep(0)
            return super().forward(x)

    model = Waits(2, 1)
    x = np.ones((3, 2), np.float32)
    async with serving.Server(model, forward=lambda module, x: module(x)) as server:
        answers = await asyncio.gather(*[server.predict(x) for _ in range(3)])
        expected = (await model(ag.asarray(x))).tolist()
        assert [answer.value.tolist() for answer in answers] == 3 * [expected]


async def test_answers_are_counted_of_the_last_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiograd.serving import server as module

    assert module.MOST_COUNTED == statistics.MOST_COUNTED == 1000
    monkeypatch.setattr(module, "MOST_COUNTED", 3)
    model = Two()
    async with serving.Server(model) as server:
        for n in range(6):
            model.set(n)
            await server.publish()
            await server.predict(ones())
        assert server.statistics().answers_by_version == {5: 1, 6: 1, 7: 1} and server.statistics().answers == 6


async def test_times_and_numbers_that_cannot_be() -> None:
    async with serving.Server(Two()) as server:
        for timeout in (float("nan"), -1.0, "soon"):
            await assert_awaiting_raises(ArgumentError, "expected seconds, 0 or more", server.drain(timeout))  # type: ignore[arg-type]
        for number in ("1", 1.5, True, float("nan")):
            await assert_awaiting_raises(ArgumentTypeError, "expected the number of a version", server.predict(ones(), at_least=number))  # type: ignore[arg-type]
        for deadline in (10**400, True, np.array([1.0])):
            await assert_awaiting_raises(ArgumentError, "expected seconds above 0", server.predict(ones(), deadline=deadline))  # type: ignore[arg-type]
        for share in ("x", None, True, np.ones(2)):
            assert_raises(ArgumentTypeError, "expected a number from 0 to 1", server.shadow, 1, share)
        for shares in (None, 1, [1.0], {1: "1.0"}, {1: True}, {1.0: 1.0}, {True: 1.0}, {"1": 1.0}):
            assert_raises(ArgumentTypeError, "expected", server.split, shares)
        for number in (True, 1.0, "1"):
            assert_raises(VersionNotFoundError, "kept: 1", server.version, number)
        assert values(await server.predict(ones())) == {0.0}
    for options in ({"max_delay": "x"}, {"max_delay": None}, {"log": 5}, {"log": b"x"}):
        assert_raises(ArgumentTypeError, "expected", serving.Server, Two(), **options)


async def test_numbers_of_numpy_are_taken_as_pythons() -> None:
    one, second = np.int64(1), np.float32(1)
    options = {"max_batch": np.int32(8), "max_queue": np.int64(16), "keep": np.uint8(3), "max_delay": np.float32(0), "deadline": second}
    async with serving.Server(Two(), **options) as server:  # type: ignore[arg-type]
        await server.publish()
        for version, expected in ((one, 1), (None, 2)):
            assert (await server.predict(ones(), version=version, deadline=second, at_least=one)).version == expected
        server.shadow(one, np.float32(0.5))
        server.split({one: np.float32(1.0)})
        assert (await server.predict(ones(), key=one)).version == 1
        assert server.version(one).number == server.promote(one).number == server.rollback(one).number == 1
        optimizer = ag.optim.SGD(server.model.parameters(), 0.1)
        buffer = serving.ReplayBuffer(np.int64(4), bytes=np.int64(999), seed=np.int64(3))
        gate = serving.Gate(lambda outputs, y: y, window=np.int64(2), tolerance=np.float32(0.5))
        serving.Trainer(
            server, optimizer, squares, buffer=buffer, batch=np.int64(2), rate=np.float32(3), publish_every=np.int8(1), inputs=one, max_failures=one,
            patience=np.float32(0.5), gate=gate,
        )  # type: ignore[arg-type]  # fmt: skip
        buffer.add(ones(5))
        assert len(buffer.sample(np.int64(2))[0]) == 2
        restored = serving.ReplayBuffer(4, bytes=999)
        restored.load_state_dict(buffer.state_dict())
        assert len(restored) == 4


async def test_another_event_loop_is_refused() -> None:
    """Every call leaves the server as it was, also one from a thread without a loop."""
    trainer = serving.Trainer(
        server := serving.Server(nn.Linear(3, 1)), ag.optim.SGD(server.model.parameters(), 0.1), squares, buffer=serving.ReplayBuffer(50)
    )
    x, y = examples()

    async def call() -> None:
        for coroutine in (
            server.predict(x), server.publish(), server.drain(), server.aclose(), server.__aexit__(None, None, None), trainer.learn(x, y),
            trainer.step(), trainer.__aenter__(),
        ):  # fmt: skip
            await assert_awaiting_raises(LoopError, "run_coroutine_threadsafe", coroutine)
        call_at_once()

    def call_at_once() -> None:
        for function, *args in ((server.promote, 1), (server.rollback, 1), (server.split, {}), (server.shadow, None)):
            assert_raises(LoopError, "run_coroutine_threadsafe", function, *args)  # type: ignore[arg-type]

    async with server:
        await asyncio.to_thread(asyncio.run, call())
        await asyncio.to_thread(call_at_once)
        future = await asyncio.to_thread(asyncio.run_coroutine_threadsafe, server.predict(x), asyncio.get_running_loop())
        assert (await asyncio.wrap_future(future)).version == 1
        assert not len(trainer.buffer) and server.statistics().rollbacks == 0


def test_a_server_may_be_used_between_two_runs_of_its_loop() -> None:
    with asyncio.Runner() as runner:
        server = runner.run(serving.Server(Two()).__aenter__())
        runner.run(server.publish())
        assert server.rollback().number == 1
        runner.run(server.aclose())


async def test_a_batcher_that_works_on_another_event_loop_takes_no_rows(virtual_clock: VirtualClock) -> None:
    pool = dist.moe.TaskPool(lambda x: x * 2, max_batch_size=8, min_batch_size=2)
    first = asyncio.ensure_future(pool.submit(ag.ones(1)))
    await asyncio.sleep(0)

    async def call() -> None:
        await assert_awaiting_raises(LoopError, "TaskPool: runs batches on another event loop", pool.submit(ag.ones(1)))

    await asyncio.get_running_loop().run_in_executor(None, asyncio.run, call())
    await pool.submit(ag.ones(1))
    assert (await first).tolist() == [2.0]


async def test_a_trainer_of_a_server_that_is_not_open() -> None:
    server = serving.Server(nn.Linear(3, 1))
    trainer = serving.Trainer(server, ag.optim.SGD(server.model.parameters(), 0.1), squares, buffer=serving.ReplayBuffer(50))
    await trainer.learn(*examples())
    before = server.model.weight.tolist()
    await assert_awaiting_raises(ServingError, "before it is entered", trainer.step())
    async with server:
        assert server.current.number == 1
    await assert_awaiting_raises(ServingError, "after it was closed", trainer.step())
    await assert_awaiting_raises(ServingError, "after it was closed", trainer.__aenter__())
    assert server.model.weight.tolist() == before


async def test_a_step_within_a_step_is_refused() -> None:
    async def loss(model: Any, x: Any, y: Any) -> Any:
        await trainer.step()

    async with serving.Server(nn.Linear(3, 1)) as server:
        trainer = serving.Trainer(server, ag.optim.SGD(server.model.parameters(), 0.1), loss, buffer=serving.ReplayBuffer(50))
        await trainer.learn(*examples())
        await assert_awaiting_raises(ModeError, "within a step", trainer.step())
