"""Steps of a trainer: a hand-written loop's to the bit, and whole or not at all; its settings and rows."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import serving
from aiograd.engine.run import current_engine
from aiograd.errors import AiogradError, ArgumentError, ArgumentTypeError, GradientError, RejectedVersionError, ServingError, VersionLogError
from aiograd.serving import copying
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.engine.cases import ticking
from tests.serving.learning import Mover, by_one, cancels_itself, everything, examples, learning, network, squares
from tests.serving.models import Two, ones
from tests.support import assert_awaiting_raises, assert_raises, bits, cancel, custom_function, held_up, leaf

# ---------------------------------------------------------------- the bits of a hand-written loop

OPTIMIZERS = {
    "AdamW": functools.partial(ag.optim.AdamW, lr=0.01),
    "SGD": functools.partial(ag.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
async def test_fifty_steps_have_the_bits_of_a_hand_written_loop(virtual_clock: VirtualClock, name: str) -> None:
    model, optimizer = network(), OPTIMIZERS[name]
    stepper, buffer = optimizer(model.parameters()), serving.ReplayBuffer(1000, seed=1)
    buffer.add(*examples())
    losses = []
    ag.seed(11)
    for _ in range(50):
        x, y = map(ag.tensor, buffer.sample(8))
        stepper.zero_grad()
        loss = squares(model, x, y)
        await loss.backward()
        stepper.step()
        losses.append(loss.item())
    async with learning(optimizer=optimizer, rate=10, serve={"keep": 100}) as trainer:
        ag.seed(11)
        async with trainer:
            while trainer.steps < 50:
                await asyncio.sleep(0.1)
                await trainer.server.predict(*examples(3)[:1])
        assert bits(*trainer.server.model.state_dict().values()) == bits(*model.state_dict().values())
        found = [(version.number, dict(version.metrics)) for version in trainer.server.versions]
        assert found == [(1, {}), *[(n + 2, {"loss": losses[n], "step": n + 1}) for n in range(50)]]
        states = [each.state_dict()["state"] for each in (trainer.optimizer, stepper)]
        tensors = [[each for values in state.values() for each in values.values() if isinstance(each, ag.Tensor)] for state in states]
        assert bits(*tensors[0]) == bits(*tensors[1]) != [] and (trainer.failures, trainer.error) == (0, None)


async def test_losses_that_wait_are_the_same() -> None:
    async def later(model: Any, x: Any, y: Any) -> Any:
        await asyncio.sleep(0)
        return squares(model, x, y)

    class Callable:
        async def __call__(self, model: Any, x: Any, y: Any) -> Any:
            return squares(model, x, y)

    found = []
    for loss in (squares, later, Callable(), lambda *args: later(*args)):
        async with learning(loss) as trainer:
            found.append([await trainer.step() for _ in range(3)])
    assert found[0] == found[1] == found[2] == found[3] and len(set(found[0])) == 3


async def test_modes_are_the_users() -> None:
    async with learning() as trainer:
        model = trainer.server.model
        model.train()
        model[1].eval()
        before = bits(*model[1].buffers())
        await trainer.step()
        assert bits(*model[1].buffers()) == before and not model[1].training and model[3].training


# ---------------------------------------------------------------- a step that fails


def broken_rule(ctx: Any, grad: Any) -> Any:
    raise KeyError("in backward")


def infinite_rule(ctx: Any, grad: Any) -> Any:
    return grad + np.inf


class Outside:
    """A loss that reaches a leaf that is not the model's only."""

    def __call__(self, model: Any, x: Any, y: Any) -> Any:
        return squares(model, x, y).detach() + leaf(1.0, np.float32)


FAILURES: dict[str, tuple[Any, type[Exception], str]] = {
    "raises": (lambda model, x, y: 1 / (0 * squares(model, x, y).item()), ZeroDivisionError, "division"),
    "is NaN": (lambda model, x, y: squares(model, x, y) * np.nan, GradientError, "the loss is nan"),
    "is infinite": (lambda model, x, y: squares(model, x, y) * np.inf, GradientError, "the loss is inf"),
    "has an infinite gradient": (lambda *args: custom_function()(infinite_rule).apply(squares(*args)), GradientError, "gradient is not finite"),
    "has a rule that raises": (lambda model, x, y: custom_function()(broken_rule).apply(squares(model, x, y)), Exception, "in backward"),
    "reaches no parameter": (Outside(), GradientError, "no parameter of the optimizer has a gradient"),
    "is in no graph": (lambda model, x, y: squares(model, x, y).detach(), AiogradError, "grad"),
    "returns None": (lambda model, x, y: squares(model, x, y) and None, ArgumentTypeError, "returned a NoneType"),
    "returns a float": (lambda model, x, y: squares(model, x, y).item(), ArgumentTypeError, "returned a float"),
    "returns one number per row": (lambda model, x, y: (model(x) - y)[:, 0], ArgumentTypeError, r"float32 Tensor of shape \[8\]"),
    "is complex": (lambda model, x, y: squares(model, x, y) * 1j, ArgumentTypeError, "a complex64 Tensor"),
    "is cancelled from within": (cancels_itself, ServingError, "the loss was cancelled"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_step_that_fails_changes_nothing_and_is_counted_once(name: str) -> None:
    failing, error, text = FAILURES[name]
    async with learning(optimizer=lambda parameters: ag.optim.AdamW([*parameters][1:], lr=0.01)) as trainer:  # one is not stepped
        await trainer.step()
        before = everything(trainer)
        trainer.loss = failing
        with np.errstate(invalid="ignore"):
            raised = await assert_awaiting_raises(error, text, trainer.step())
        assert everything(trainer) == before
        assert (trainer.failures, trainer.error, trainer.rejected) == (1, raised, 0)
        trainer.loss = squares
        await trainer.step()
        assert (trainer.steps, trainer.failures, trainer.error) == (2, 1, None)


def overflowing(parameters: Any) -> Any:
    return ag.optim.SGD(parameters, lr=1e38, momentum=0.5)


class Broken(ag.optim.SGD):
    """Fails when one of its parameters has been updated."""

    def _run(self, collected: Any, withdrawn: Any = ()) -> None:
        super()._run([collected[0][:1]])
        raise MemoryError("in the middle")


@pytest.mark.parametrize("publish_every", [1, 5])
@pytest.mark.parametrize("optimizer", [overflowing, functools.partial(Broken, lr=0.1, momentum=0.5)])
async def test_after_a_step_that_breaks_parameters_the_model_goes_on_from_what_serves(optimizer: Any, publish_every: int) -> None:
    async with learning(lambda *args: squares(*args) * 100, optimizer=optimizer, publish_every=publish_every) as trainer:
        with np.errstate(all="ignore"):
            await assert_awaiting_raises(RejectedVersionError, "goes on from the version that serves", trainer.step())
        server = trainer.server
        assert bits(*server.model.state_dict().values()) == bits(*map(ag.tensor, server.current.state.values()))
        assert trainer.optimizer.state_dict()["state"] == {} and server.current.number == 1
        assert (trainer.steps, trainer.failures, trainer.rejected) == (0, 1, 1)
        trainer.optimizer.param_groups[0]["lr"] = 1e-3
        if not isinstance(trainer.optimizer, Broken):
            await trainer.step()
            assert (trainer.steps, server.current.number) == (1, 2 if publish_every == 1 else 1)


@pytest.mark.parametrize("gate", [None, serving.Gate(len)])
async def test_weights_that_are_rounded_to_infinity_are_rejected(gate: Any) -> None:
    largest = float(np.finfo(np.float32).max)
    async with learning(Mover(0.0), Two(1.0), optimizer=by_one, serve={"precision": "bfloat16"}, gate=gate) as trainer:
        trainer.server.model.set(largest)
        await assert_awaiting_raises(RejectedVersionError, "not finite", trainer.step())
        assert trainer.server.model.first.item() == 1.0 and trainer.rejected == 1


async def test_a_publication_that_fails_is_made_up_for_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async with learning() as trainer:

        async def publish(*args: Any) -> Any:
            raise VersionLogError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(trainer.server, "_publish", publish)
            await assert_awaiting_raises(VersionLogError, "no space", trainer.step())
            assert (trainer.steps, trainer.failures, trainer.server.current.number) == (1, 1, 1)
        await trainer.step()
        assert (trainer.steps, trainer.server.current.number, trainer.server.current.metrics["step"]) == (2, 2, 2.0)


# ---------------------------------------------------------------- cancelled


async def slowly(model: Any, x: Any, y: Any) -> Any:
    loss = squares(model, x, y)
    await asyncio.sleep(0.01)
    for _ in range(200):
        loss = loss * 1.0
    return loss + await ag.offload(squares, model, x, y)


async def test_a_forward_in_a_thread_that_outlasts_its_step_leaves_no_trace_in_buffers() -> None:
    forward, begun, go = held_up(squares)
    async with learning(lambda *args: ag.offload(forward, *args)) as trainer:
        before, norm = everything(trainer), trainer.server.model[1]
        running = asyncio.ensure_future(trainer.step())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        await cancel(running)
        assert everything(trainer) == before
        trainer.loss = squares
        following = asyncio.ensure_future(trainer.step())
        await asyncio.sleep(0.01)
        assert trainer.steps == 0 and norm.num_batches_tracked.item() == 0, "it waits for the thread"
        go.set()
        await following
        assert trainer.steps == 1 and norm.num_batches_tracked.item() == 1


async def _cancelled_step(step: int) -> str:
    """Cancel a step at a step of the loop; how it ended."""
    loop: Any = asyncio.get_running_loop()
    async with ag.Engine(clock=ticking(), budget=3), learning(slowly) as trainer:
        await trainer.step()
        before, seen = everything(trainer), trainer.failures
        running = asyncio.ensure_future(trainer.step())
        if step > loop.steps:
            loop.at_step(step, running.cancel)
        await asyncio.wait([running])
        if not running.cancelled():
            assert (trainer.steps, trainer.failures, trainer.server.current.number) == (2, 0, 3)
            ended = "taken"
        elif trainer.steps == 1:
            assert everything(trainer) == before and trainer.failures - seen in (0, 1)
            ended = "not begun" if trainer.failures == seen else "cancelled"
        else:
            assert (trainer.steps, trainer.failures) == (2, 1)
            ended = "not published" if trainer.server.current.number == 2 else "published"
        assert current_engine().pass_gates == []
        await trainer.step()
        assert trainer.server.current.metrics["step"] == trainer.steps
        return ended


def test_a_step_cancelled_at_every_turn_is_taken_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "ON_LOOP_BYTES", 0)
    undisturbed = simulated_run(_cancelled_step, 0)
    ended = [simulated_run(_cancelled_step, step) for step in range(1, undisturbed.steps + 1)]
    assert not any(each.leftover_tasks for each in ended)
    found = [each.value for each in ended]
    assert found.count("cancelled") > 20 and {"taken", "not begun", "cancelled", "not published"} <= set(found)


async def _left(step: int) -> bool:
    """Leave the block of a trainer at a step of the loop; True if a step was running."""
    loop: Any = asyncio.get_running_loop()
    left = loop.create_future()
    losses: list[None] = []

    async def loss(*args: Any) -> Any:
        losses.append(None)
        return await slowly(*args)

    async with ag.Engine(clock=ticking(), budget=3), learning(loss, rate=20) as trainer:
        if step > loop.steps:
            loop.at_step(step, lambda: left.done() or left.set_result(None))
        loop.call_later(0.2, lambda: left.done() or left.set_result(None))
        async with trainer:
            await left
        assert not trainer.is_running and (trainer.error, trainer.failures) == (None, 0)
        assert len(trainer.server.versions) in (trainer.steps + 1, trainer.steps)
        before = everything(trainer)
        await asyncio.sleep(1.0)
        assert everything(trainer) == before
        return len(losses) > trainer.steps


def test_the_block_is_left_at_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "ON_LOOP_BYTES", 0)
    runs = [simulated_run(_left, step) for step in range(1, 120)]
    assert not any(run.leftover_tasks for run in runs) and 10 < sum(run.value for run in runs) < len(runs)


# ---------------------------------------------------------------- bad input

BAD_SETTINGS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "no server": ({"server": Two()}, ArgumentTypeError),
    "no optimizer": ({"optimizer": Two()}, ArgumentTypeError),
    "an optimizer with a closure": ({"optimizer": ag.optim.LBFGS([leaf(1.0)])}, ArgumentTypeError),
    "no buffer": ({"buffer": []}, ArgumentTypeError),
    "no gate": ({"gate": len}, ArgumentTypeError),
    "no loss": ({"loss": "mse"}, ArgumentTypeError),
    "a batch of none": ({"batch": 0}, ArgumentError),
    "half a batch": ({"batch": 0.5}, ArgumentError),
    "no inputs": ({"inputs": 0}, ArgumentError),
    "no failures": ({"max_failures": 0}, ArgumentError),
    "no publication": ({"publish_every": None}, ArgumentError),
    "a rate of 0": ({"rate": 0}, ArgumentError),
    "a rate of NaN": ({"rate": float("nan")}, ArgumentError),
    "a rate of text": ({"rate": "fast"}, ArgumentError),
    "a negative patience": ({"patience": -1}, ArgumentError),
    "no patience": ({"patience": None}, ArgumentError),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
async def test_settings_that_cannot_be(name: str) -> None:
    options, error = BAD_SETTINGS[name]
    model = Two()
    settings = {"server": serving.Server(model), "optimizer": by_one(model.parameters()), "loss": squares, "buffer": serving.ReplayBuffer(3)}
    assert_raises(error, r"^Trainer\(.*expected", lambda: serving.Trainer(**{**settings, **options}))


BAD_ROWS: dict[str, tuple[tuple[Any, ...], str]] = {
    "none": ((), "learn: .*no columns"),
    "no inputs": ((ones(),), "1 columns; expected at least the 2"),
    "other numbers of rows": ((ones(2), ones(3)), r"learn: .*\[2, 1\], \[3, 1\]"),
    "text": (("one", ones()), "expected numbers"),
    "another width": ((np.ones((1, 4), np.float32), ones()), "as in the first add"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
async def test_rows_that_cannot_be(name: str) -> None:
    columns, text = BAD_ROWS[name]
    async with learning(inputs=2) as trainer:
        await assert_awaiting_raises(ArgumentError, text, trainer.learn(*columns))
        assert trainer.buffer.seen == 40


async def test_entering() -> None:
    model = Two()
    trainer = serving.Trainer(serving.Server(model), by_one(model.parameters()), squares, buffer=serving.ReplayBuffer(3))
    with pytest.raises(ServingError, match="use `async with`"):
        async with trainer:
            pass
    async with learning() as entered:
        for _ in range(2):
            with contextlib.ExitStack() as stack:
                if entered._task is not None:
                    stack.enter_context(pytest.raises(ServingError, match="entered once"))
                async with entered:
                    assert entered.is_running
        assert not entered.is_running
