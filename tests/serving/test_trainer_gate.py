"""A trainer with a gate: candidates are judged before they serve, and promotions afterwards; what that does to server, model and optimizer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import serving
from aiograd.errors import ArgumentError, ServingError
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.serving.learning import Mover, learning, phase_of
from tests.serving.models import Two, TwoSlowly, ones, values
from tests.support import assert_awaiting_raises, cancel

WINDOW = 8


def distance(outputs: Any, targets: Any) -> Any:
    """The metric: how far both outputs of a `Two` are from the target, for a row of 1."""
    return np.abs(outputs.numpy() - targets).mean(axis=1)


def targets(value: float, rows: int = 4) -> Any:
    return np.full((rows, 1), value, np.float32)


@contextlib.asynccontextmanager
async def judging(model: Any = None, metric: Any = distance, *, keep: int = 10, **options: Any) -> AsyncIterator[serving.Trainer]:
    """A trainer; each step moves the model by 1, so candidate n computes n - 1."""
    optimizer = functools.partial(ag.optim.SGD, lr=1.0, momentum=1e-20)
    gate = serving.Gate(metric, window=WINDOW)
    async with learning(
        Mover(1.0), Two() if model is None else model, optimizer=optimizer, rows=0, gate=gate, serve={"keep": keep}, **options
    ) as trainer:
        trainer.buffer.add(ones(4), targets(0.0))
        yield trainer


async def teach(trainer: serving.Trainer, value: float, times: int = WINDOW // 4) -> None:
    """Learn from examples with the target `value`."""
    for _ in range(times):
        await trainer.learn(ones(4), targets(value))


def state_of(trainer: serving.Trainer) -> tuple[Any, ...]:
    """The version that serves, the phase of the gate, and the counts of candidates that were dropped and promotions that were taken back."""
    assert trainer.gate is not None
    return trainer.server.current.number, phase_of(trainer), trainer.rejected, trainer.rollbacks


async def test_a_good_candidate_is_promoted_and_kept() -> None:
    async with judging() as trainer:
        await trainer.step()
        assert state_of(trainer) == (1, "candidate", 0, 0) and values(await trainer.server.predict(ones())) == {0.0}
        await teach(trainer, 5.0, 1)
        await trainer.step()
        assert len(trainer.server.versions) == 2, "one candidate at a time"
        await teach(trainer, 5.0, 1)
        assert state_of(trainer) == (2, "probation", 0, 0) and values(await trainer.server.predict(ones())) == {1.0}
        await teach(trainer, 5.0)
        assert state_of(trainer) == (2, "idle", 0, 0)
        await trainer.step()
        assert state_of(trainer) == (2, "candidate", 0, 0) and trainer.server.version(3).metrics["step"] == 3
        assert trainer.server.model.first.item() == 3.0


async def test_a_bad_candidate_is_dropped_and_learning_goes_on() -> None:
    async with judging() as trainer:
        await trainer.step()
        await teach(trainer, -5.0)
        assert state_of(trainer) == (1, "idle", 1, 0)
        assert trainer.server.model.first.item() == 1.0 and trainer.optimizer.state_dict()["state"]
        await trainer.step()
        assert state_of(trainer) == (1, "candidate", 1, 0) and trainer.server.version(3).metrics["step"] == 2


async def test_a_promotion_is_taken_back_when_the_stream_drifts() -> None:
    async with judging() as trainer:
        await trainer.step()
        await teach(trainer, 5.0)
        for _ in range(3):
            await trainer.step()
        assert trainer.server.model.first.item() == 4.0 and trainer.optimizer.state_dict()["state"]
        await teach(trainer, -5.0)
        assert state_of(trainer) == (1, "idle", 0, 1) and values(await trainer.server.predict(ones())) == {0.0}
        assert trainer.server.model.first.item() == 0.0 and trainer.optimizer.state_dict()["state"] == {}
        await trainer.step()
        assert state_of(trainer) == (1, "candidate", 0, 1) and trainer.server.statistics().rollbacks == 1
        assert trainer.server.version(3).state["first"].tolist() == [1.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_a_metric_that_is_not_finite_is_the_worst(bad: float) -> None:
    def metric(outputs: Any, wanted: Any) -> Any:
        return np.where(outputs.numpy() == 1.0, bad, 1e9).mean(axis=1)

    async with judging(metric=metric) as trainer:
        await trainer.step()
        await teach(trainer, 5.0)
        assert state_of(trainer) == (1, "idle", 1, 0)


async def test_examples_are_judged_before_they_are_learned_from() -> None:
    seen = []

    def metric(outputs: Any, wanted: Any) -> Any:
        seen.append(trainer.buffer.seen)
        return distance(outputs, wanted)

    async with judging(metric=metric) as trainer:
        await trainer.step()
        await teach(trainer, 5.0, 2)
        assert seen == [4, 4, 8, 8] and trainer.buffer.seen == 12


async def test_an_example_without_a_comparison_is_not_judged() -> None:
    async with judging(metric=lambda *args: 1 / 0) as trainer:
        await teach(trainer, 5.0)
        assert trainer.buffer.seen == 12


@pytest.mark.parametrize(("metric", "error"), [(lambda *args: 1 / 0, ZeroDivisionError), (lambda outputs, wanted: 0.5, ArgumentError)])
async def test_errors_of_a_metric_go_to_the_caller_and_leave_the_examples_out(metric: Any, error: type[Exception]) -> None:
    async with judging() as trainer:
        await trainer.step()
        await teach(trainer, 5.0, 1)
        assert trainer.gate is not None
        trainer.gate.metric = metric
        await assert_awaiting_raises(error, None, trainer.learn(ones(4), targets(5.0)))
        assert trainer.buffer.seen == 8 and state_of(trainer) == (1, "candidate", 0, 0)
        trainer.gate.metric = distance
        await teach(trainer, 5.0, 1)
        assert state_of(trainer) == (2, "probation", 0, 0)


async def test_the_columns_beyond_the_inputs_are_targets() -> None:
    def metric(outputs: Any, *wanted: Any) -> Any:
        assert [type(column) for column in wanted] == [np.ndarray, np.ndarray] and wanted[1].tolist() == [[2.0]] * 4
        return wanted[0][:, 0]

    async with judging(metric=metric) as trainer:
        trainer.buffer = serving.ReplayBuffer(10)
        await trainer.learn(ones(4), targets(1.0), targets(2.0))
        await trainer.step()
        await trainer.learn(ones(4), targets(1.0), targets(2.0))


# ---------------------------------------------------------------- beside other calls


async def test_calls_at_the_same_time_end_a_window_once(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 0.01
    async with judging(model) as trainer:
        await trainer.step()
        await asyncio.gather(*(trainer.learn(ones(4), targets(5.0)) for _ in range(10)))
        assert state_of(trainer) == (2, "probation", 0, 0) and trainer.buffer.seen == 44
        await teach(trainer, -5.0, 1)
        assert state_of(trainer) == (2, "probation", 0, 0), "outputs from before the promotion are not in the second window"
        await asyncio.gather(*(trainer.learn(ones(4), targets(-5.0)) for _ in range(10)))
        assert state_of(trainer) == (1, "idle", 0, 1) and trainer.server.statistics().rollbacks == 1


@pytest.mark.parametrize("phase", ["candidate", "probation"])
@pytest.mark.parametrize("change", ["publish", "promote", "rollback"])
async def test_a_version_that_is_made_to_serve_by_hand_ends_the_comparison(phase: str, change: str) -> None:
    async with judging() as trainer:
        server = trainer.server
        other = await server.publish({"first": np.float32([9.0]), "second": np.float32([9.0])}, promote=change == "rollback")
        await trainer.step()
        candidate = server.versions[-1].number
        if phase == "probation":
            await teach(trainer, 1.0)
        assert phase_of(trainer) == phase
        if change == "publish":
            await server.publish()
        elif change == "promote":
            server.promote(other.number if phase == "probation" else candidate)
        else:
            server.rollback()
        serving_now = server.current.number
        await teach(trainer, 1.0, 4)
        assert state_of(trainer) == (serving_now, "idle", 0, 0)
        await trainer.step()
        assert phase_of(trainer) == "candidate" and server.versions[-1].parent == serving_now


async def test_a_version_made_to_serve_while_examples_are_judged(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 1.0
    async with judging(model) as trainer:
        await trainer.step()
        judged = asyncio.ensure_future(trainer.learn(ones(WINDOW), targets(5.0, WINDOW)))
        await asyncio.sleep(1.5)
        await trainer.server.publish()
        await judged
        assert state_of(trainer) == (3, "idle", 0, 0) and trainer.buffer.seen == 4 + WINDOW


async def test_both_versions_are_kept_while_they_are_compared() -> None:
    async with judging(keep=1) as trainer:
        server = trainer.server

        async def crowd() -> list[int]:
            for _ in range(5):
                await server.publish(promote=False)
            server.split({server.current.number: 1.0})
            server.split({})
            return [version.number for version in server.versions]

        await trainer.step()
        assert (await crowd())[:2] == [1, 2]
        await teach(trainer, 5.0)
        assert (await crowd())[:2] == [1, 2]
        await teach(trainer, -5.0)
        assert state_of(trainer) == (1, "idle", 0, 1)
        assert 2 not in await crowd()


async def test_a_step_that_runs_while_the_promotion_is_taken_back_is_not_published(virtual_clock: VirtualClock) -> None:
    async def loss(model: Any, *columns: Any) -> Any:
        await asyncio.sleep(1.0)
        return Mover(1.0)(model)

    async with judging() as trainer:
        await trainer.step()
        await teach(trainer, 5.0)
        trainer.loss = loss
        running = asyncio.ensure_future(trainer.step())
        await asyncio.sleep(0.5)
        await teach(trainer, -5.0, 1)
        judged = asyncio.ensure_future(teach(trainer, -5.0, 1))
        await asyncio.sleep(0.1)
        assert trainer.server.current.number == 1 and not running.done()
        await asyncio.gather(running, judged)
        assert state_of(trainer) == (1, "idle", 0, 1) and len(trainer.server.versions) == 2
        assert trainer.server.model.first.item() == 0.0 and trainer.optimizer.state_dict()["state"] == {}


async def _cancelled_learn(step: int) -> tuple[bool, Any]:
    """Examples that end the second window, cancelled at a step of the loop."""
    loop: Any = asyncio.get_running_loop()
    model = TwoSlowly()
    model.seconds = 0.01

    async def loss(model: Any, *columns: Any) -> Any:
        await asyncio.sleep(0.05)
        return Mover(1.0)(model)

    async with judging(model) as trainer:
        await trainer.step()
        await teach(trainer, 5.0)
        trainer.loss = loss
        seen = trainer.buffer.seen
        running = asyncio.ensure_future(trainer.learn(ones(WINDOW), targets(-5.0, WINDOW)))
        stepping = asyncio.ensure_future(trainer.step())
        if step > loop.steps:
            loop.at_step(step, running.cancel)
        await asyncio.wait([running, stepping])
        assert trainer.buffer.seen - seen == (0 if running.cancelled() else WINDOW)
        found = state_of(trainer)
        if found[1] == "probation":
            await teach(trainer, -5.0)
        await trainer.step()
        assert state_of(trainer) == (1, "candidate", 0, 1)
        assert trainer.server.versions[-1].state["first"].tolist() == [trainer.server.model.first.item()] == [1.0]
        return running.cancelled(), found


def test_learn_cancelled_at_every_turn() -> None:
    undisturbed = simulated_run(_cancelled_learn, 0)
    found = [simulated_run(_cancelled_learn, step) for step in range(1, undisturbed.steps + 1)]
    assert not any(each.leftover_tasks for each in found)
    kinds = {(is_cancelled, state[1]) for is_cancelled, state in (each.value for each in found)}
    assert kinds >= {(False, "idle"), (True, "probation"), (True, "idle")}, "also while it waits for the step to end"


async def test_leaving_ends_the_comparison() -> None:
    async with judging(keep=1, rate=0.001) as trainer:
        async with trainer:
            await trainer.step()
            assert state_of(trainer)[:2] == (1, "candidate")
        assert state_of(trainer) == (1, "idle", 0, 0)
        await trainer.server.publish()
        assert [version.number for version in trainer.server.versions] == [trainer.server.current.number]


async def test_trainers_may_share_a_gate() -> None:
    async with judging() as one:
        async with learning(Mover(1.0), Two(), optimizer=functools.partial(ag.optim.SGD, lr=1.0), rows=0, gate=one.gate) as other:
            other.buffer.add(ones(4), targets(0.0))
            for trainer in (one, other):
                await trainer.step()
            await asyncio.gather(teach(one, 5.0), teach(other, -5.0))
            assert (state_of(one), state_of(other)) == ((2, "probation", 0, 0), (1, "idle", 1, 0))


async def test_candidates_that_are_not_finite_are_rejected() -> None:
    async with judging() as trainer:
        trainer.loss = lambda model, *columns: (model.first * -3e38 + model.second).sum()
        trainer.optimizer.param_groups[0]["lr"] = 2.0
        with np.errstate(over="ignore"):
            await assert_awaiting_raises(ServingError, "not finite", trainer.step())
        assert state_of(trainer) == (1, "idle", 1, 0) and len(trainer.server.versions) == 1


async def test_good_bad_and_drifting_streams_in_the_background(virtual_clock: VirtualClock) -> None:
    """Candidates are promoted while the targets are ahead of the model, and dropped or taken back when they are behind it."""
    async with judging(rate=20) as trainer:

        async def stream(value: float) -> None:
            while True:
                await trainer.learn(ones(2), targets(value, 2))
                await asyncio.sleep(0.01)

        async with trainer:
            for value in (1000.0, -1000.0):
                before = trainer.server.statistics().promoted
                teacher = asyncio.ensure_future(stream(value))
                await asyncio.sleep(5.0)
                await cancel(teacher)
                if value > 0:
                    assert trainer.server.statistics().promoted - before > 20 and trainer.rejected == trainer.rollbacks == 0
                else:
                    assert trainer.server.statistics().promoted - before <= 1 and trainer.rejected > 20
        assert trainer.failures == 0 and {len(values(await trainer.server.predict(ones(), version=v.number))) for v in trainer.server.versions} == {1}
