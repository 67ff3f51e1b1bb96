"""The task of a trainer: its rate, pauses, failures in a row, requests that go first, and rollbacks by hand."""

from __future__ import annotations

import asyncio
import functools
import logging
from pathlib import Path
from typing import Any

import pytest

import aiograd as ag
from aiograd import serving
from aiograd.errors import ModeError, ServingError
from aiograd.testing.virtual_clock import VirtualClock
from tests.engine.cases import ticking
from tests.serving.learning import Mover, by_one, cancels_itself, examples, learning, phase_of, squares
from tests.serving.models import Two, TwoSlowly, ones, values
from tests.support import assert_awaiting_raises, cancel, held_up

# ---------------------------------------------------------------- the background task


@pytest.mark.parametrize(("rate", "steps"), [(100.0, 200), (7.0, 14), (0.5, 1)])
async def test_steps_are_taken_at_the_rate(virtual_clock: VirtualClock, rate: float, steps: int) -> None:
    async with learning(Mover(1.0), Two(), optimizer=by_one, rate=rate) as trainer, trainer:
        await asyncio.sleep(2.0 - 1e-6)
    assert trainer.steps == steps and trainer.server.current.number == 1 + steps


async def test_a_trainer_that_was_late_makes_up_for_little(virtual_clock: VirtualClock) -> None:
    slow = [1.0]

    async def loss(model: Any, x: Any, y: Any) -> Any:
        if trainer.steps == 10 and slow:
            await asyncio.sleep(slow.pop())
        return Mover(1.0)(model)

    async with learning(loss, Two(), optimizer=by_one, rate=100) as trainer, trainer:
        await asyncio.sleep(1.1 - 1e-6)
        assert trainer.steps == 10
        await asyncio.sleep(1.0)
    assert trainer.steps == pytest.approx(10 + 1 + 10 + 100, abs=1), "a tenth of a second"


async def test_pause_and_resume(virtual_clock: VirtualClock) -> None:
    async with learning(Mover(1.0), Two(), optimizer=by_one, rate=10) as trainer, trainer:
        await asyncio.sleep(0.95)
        trainer.pause()
        await asyncio.sleep(5.0)
        assert trainer.steps == 10 and trainer.is_running
        await trainer.step()
        trainer.resume()
        await asyncio.sleep(0.95)
        assert trainer.steps == 11 + 10, "no step is made up for"


async def test_versions_are_published_every_few_steps(virtual_clock: VirtualClock) -> None:
    async with learning(Mover(1.0), Two(), optimizer=by_one, rate=10, publish_every=4) as trainer, trainer:
        await asyncio.sleep(1.05)
        assert trainer.steps == 11 and values(await trainer.server.predict(ones())) == {8.0}
        assert [version.metrics.get("step") for version in trainer.server.versions] == [None, 4.0, 8.0]


async def test_it_waits_for_rows(virtual_clock: VirtualClock) -> None:
    for add in ("learn", "buffer"):
        async with learning(rows=0, rate=100) as trainer, trainer:
            await assert_awaiting_raises(ServingError, "the buffer has no rows", trainer.step())
            await asyncio.sleep(1.0)
            assert (trainer.steps, trainer.failures) == (0, 0)
            if add == "learn":
                await trainer.learn(*examples())
            else:
                trainer.buffer.add(*examples())
            await asyncio.sleep(1.0)
            assert trainer.steps in (99, 100)


async def test_it_stops_after_failures_in_a_row_and_serving_goes_on(virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    fails = {1, 2, 4, 5, 6}
    calls = 0

    def loss(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in fails:
            raise KeyError(f"call {calls}")
        return squares(*args)

    with caplog.at_level(logging.WARNING, "aiograd.serving"):
        async with learning(loss, rate=10, max_failures=3) as trainer, trainer:
            await asyncio.sleep(0.25)
            assert trainer.is_running and trainer.error is None and trainer.failures == 2
            await asyncio.sleep(5.0)
            assert not trainer.is_running and (trainer.steps, trainer.failures) == (1, 5)
            assert isinstance(trainer.error, KeyError) and trainer.error.args == ("call 6",)
            assert "1 steps, not running" in repr(trainer)
            assert (await trainer.server.predict(*examples(3)[:1])).version == 2
            await trainer.learn(*examples())
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 5 + ["ERROR"]
    assert "KeyError" in caplog.text and "3 failures in a row" in caplog.text


async def test_a_loss_that_is_cancelled_from_within_does_not_end_the_trainer(virtual_clock: VirtualClock) -> None:
    calls = 0

    async def loss(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return await cancels_itself(*args) if calls == 1 else squares(*args)

    async with learning(loss, rate=10) as trainer, trainer:
        await asyncio.sleep(0.55)
        assert trainer.is_running and (trainer.steps, trainer.failures) == (5, 1)


async def test_steps_by_hand_and_the_background_task_take_turns(virtual_clock: VirtualClock) -> None:
    running = 0

    async def loss(model: Any, x: Any, y: Any) -> Any:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.01)
        running -= 1
        return Mover(1.0)(model)

    async with learning(loss, Two(), optimizer=by_one) as trainer, trainer:
        await asyncio.gather(*(trainer.step() for _ in range(20)))
        await asyncio.sleep(0.1)
    assert trainer.failures == 0 and trainer.steps > 20 and trainer.server.model.first.item() == trainer.steps


async def test_two_trainers_on_one_loop(virtual_clock: VirtualClock) -> None:
    async with learning(rate=10) as one, learning(rate=30, patience=0.01) as other, one, other:
        await asyncio.sleep(1.0 - 1e-6)
        assert (one.steps, other.steps) == (10, 30) and one.failures == other.failures == 0


def beside(trainer: serving.Trainer, **options: Any) -> serving.Trainer:
    """Another trainer of the same server."""
    return serving.Trainer(trainer.server, trainer.optimizer, trainer.loss, buffer=trainer.buffer, **options)


async def test_a_server_has_one_trainer_at_a_time(virtual_clock: VirtualClock) -> None:
    async with learning(rate=10) as one:
        other = beside(one, rate=10)
        async with one:
            await asyncio.sleep(0.05)
            one.pause()
            await assert_awaiting_raises(ModeError, "trains that server: leave its", other.__aenter__())
            await assert_awaiting_raises(ModeError, "trains that server: leave its", other.step())
            one.resume()
        assert (one.steps, one.failures, other.steps) == (1, 0, 0)
        async with other:
            await asyncio.sleep(0.15)
            await assert_awaiting_raises(ModeError, "trains that server", one.step())
        assert (other.steps, other.failures) == (2, 0)
        steps = asyncio.gather(one.step(), other.step(), return_exceptions=True)
        assert [type(found) for found in await steps] == [float, ModeError], "two steps by hand at a time"
        await other.step()
        await one.step()


async def test_a_trainer_that_takes_over_ends_the_comparison_of_the_one_before(virtual_clock: VirtualClock) -> None:
    gate = serving.Gate(lambda outputs, y: (outputs - y).numpy()[:, 0] ** 2, window=4)
    async with learning(gate=gate, serve={"keep": 1}) as one:
        await one.step()
        compared = one.server.versions
        other = beside(one, gate=gate)
        await other.step()
        assert [phase_of(trainer) for trainer in (one, other)] == ["idle", "candidate"] and len(compared) == 2
        kept = [version.number for version in one.server.versions]
        assert kept == [1, 3], "the candidate of the one before is not pinned any more"
        await one.server.publish(promote=False)
        assert {1, 3} <= {version.number for version in one.server.versions}, "the ones that are compared are"
        await one.learn(*examples(8))
        await other.learn(*examples(8))
        assert phase_of(other) != "candidate" and phase_of(one) == "idle"


# ---------------------------------------------------------------- requests go first


async def test_a_step_waits_for_rows_in_the_queue_but_not_for_long(virtual_clock: VirtualClock) -> None:
    """Forwards of 20 ms: three queued rows are answered before the loss; where rows always wait, each stop takes `patience`."""
    model = TwoSlowly()
    model.seconds = 0.02
    began: list[float] = []

    def loss(model: Any, *columns: Any) -> Any:
        began.append(virtual_clock.time())
        return Mover(0.0)(model)

    async with learning(loss, model, optimizer=by_one, serve={"max_batch": 1}) as trainer:
        asked = [asyncio.ensure_future(trainer.server.predict(ones())) for _ in range(3)]
        await asyncio.sleep(0)
        await trainer.step()
        assert began == [pytest.approx(0.04)] and virtual_clock.time() == pytest.approx(0.04), "the last one runs"
        await asyncio.gather(*asked)
        asked = [asyncio.ensure_future(trainer.server.predict(ones())) for _ in range(100)]
        started = virtual_clock.time()
        await asyncio.sleep(0)
        await trainer.step()
        assert [began[1] - started, virtual_clock.time() - started] == [pytest.approx(0.05), pytest.approx(0.15)]
        await asyncio.gather(*asked)


async def test_slices_of_backward_wait_for_rows(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 0.02

    def loss(model: Any, *columns: Any) -> Any:
        result = Mover(0.0)(model)
        for _ in range(2000):
            result = result * 1.0
        return result

    seconds = []
    async with ag.Engine(clock=ticking(), budget=20):
        for patience in (0.0, 0.05):
            async with learning(loss, model, optimizer=by_one, serve={"max_batch": 1, "max_queue": 10**6}, patience=patience) as trainer:
                asked = [asyncio.ensure_future(trainer.server.predict(ones())) for _ in range(1000)]
                await asyncio.sleep(0)
                started = virtual_clock.time()
                await trainer.step()
                seconds.append(virtual_clock.time() - started)
                for request in asked:
                    request.cancel()
                await asyncio.wait(asked)
    assert seconds[0] < 0.01 and seconds[1] > 5 * 0.05


async def test_it_learns_under_a_load_that_never_ends(virtual_clock: VirtualClock) -> None:
    model = TwoSlowly()
    model.seconds = 0.02

    async def ask(server: Any) -> None:
        while True:
            await server.predict(ones())

    async with learning(Mover(1.0), model, optimizer=by_one, serve={"max_batch": 1}) as trainer, trainer:
        clients = [asyncio.ensure_future(ask(trainer.server)) for _ in range(8)]
        await asyncio.sleep(10.0)
        for client in clients:
            await cancel(client)
        assert 10.0 / 0.15 - 2 < trainer.steps < 10.0 / 0.1 and trainer.server.statistics().answers > 490


# ---------------------------------------------------------------- rollbacks by hand


async def test_after_a_rollback_by_hand_the_model_goes_on_from_what_serves() -> None:
    async with learning(Mover(1.0), Two(), optimizer=functools.partial(ag.optim.SGD, lr=1.0, momentum=0.5)) as trainer:
        server = trainer.server
        for _ in range(3):
            await trainer.step()
        server.rollback(2)
        await trainer.step()
        assert values(await server.predict(ones())) == {2.0} and server.current.number == 5, "from 1.0, without momentum"
        await trainer.step()
        assert values(await server.predict(ones())) == {3.5}


async def test_a_step_during_which_the_server_is_rolled_back_is_not_published(virtual_clock: VirtualClock) -> None:
    async def loss(model: Any, *columns: Any) -> Any:
        await asyncio.sleep(1.0)
        return Mover(1.0)(model)

    async with learning(loss, Two(), optimizer=by_one) as trainer:
        server = trainer.server
        await trainer.step()
        running = asyncio.ensure_future(trainer.step())
        await asyncio.sleep(0.5)
        server.rollback()
        await running
        assert server.current.number == 1 and server.model.first.item() == 0.0 and len(server.versions) == 2
        await trainer.step()
        assert server.current.number == 3 and values(await server.predict(ones())) == {1.0}


@pytest.mark.parametrize("gate", [None, serving.Gate(len)])
async def test_a_rollback_while_a_version_is_published_wins(gate: Any) -> None:
    async with learning(Mover(1.0), Two(), optimizer=by_one, gate=gate) as trainer:
        server = trainer.server
        trainer.server.model.set(5.0)
        await server.publish()
        async with server._publishing:
            running = asyncio.ensure_future(trainer.step())
            while not trainer.steps:
                await asyncio.sleep(0)
            server.rollback()
        await running
        assert server.current.number == 1 and values(await server.predict(ones())) == {0.0} == {server.model.first.item()}
        assert phase_of(trainer) == "idle" and server.statistics().promoted == 2, "the version of the step has never served"


async def test_a_rollback_to_a_version_that_only_a_shadow_keeps_wins_over_a_publication() -> None:
    async with learning(Mover(1.0), Two(), optimizer=by_one, serve={"keep": 1}) as trainer:
        server = trainer.server
        server.shadow(1)
        server.model.set(5.0)
        await server.publish()
        async with server._publishing:
            running = asyncio.ensure_future(trainer.step())
            while not trainer.steps:
                await asyncio.sleep(0)
            server.rollback(1)
            server.shadow(None)
        await running
        assert server.current.number == 1 and trainer.failures == 0 and server.model.first.item() == 0.0


async def roll_back_while_written(trainer: serving.Trainer, number: int | None) -> None:
    """Take a step; while its version is written to the log, go back to an earlier one."""
    slow, begun, go = held_up(serving.VersionLog.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving.VersionLog, "append", slow)
        running = asyncio.ensure_future(trainer.step())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        trainer.server.rollback(number)
        go.set()
        await running


async def test_a_rollback_while_the_log_is_written_wins(tmp_path: Path) -> None:
    async with learning(Mover(1.0), Two(), optimizer=by_one, serve={"log": tmp_path}) as trainer:
        server = trainer.server
        server.model.set(5.0)
        await server.publish()
        await roll_back_while_written(trainer, None)
        assert server.current.number == 1 and server.model.first.item() == 0.0
        assert [version.number for version in server.versions] == [1, 2, 3]
    log = serving.VersionLog(tmp_path)
    assert log.promoted == 1 and log.numbers() == [1, 2, 3]


async def test_a_version_whose_file_a_publication_deletes_is_in_the_log_when_it_serves(tmp_path: Path) -> None:
    """By a rollback while that publication is written, and later, where the log keeps fewer versions than the server."""
    async with learning(Mover(1.0), Two(), optimizer=by_one, serve={"log": serving.VersionLog(tmp_path, keep=2), "keep": 5}) as trainer:
        server = trainer.server
        for value in (5.0, 6.0):
            server.model.set(value)
            await server.publish()
        await roll_back_while_written(trainer, 1)
        while server._log_task is not None and not server._log_task.done():
            await asyncio.sleep(0.001)
        log = serving.VersionLog(tmp_path)
        assert log.promoted == 1 and log.load(1).digest == server.current.digest
        for value in (7.0, 8.0, 9.0):
            server.model.set(value)
            await server.publish()
        server.rollback(3)
    log = serving.VersionLog(tmp_path)
    assert log.promoted == 3 and log.load(3).state["first"].tolist() == [6.0]
