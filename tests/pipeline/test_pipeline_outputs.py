"""Steps that also return what the last stage gave, and profiles that show what a step does."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, MicrobatchError
from aiograd.pipeline import Pipeline, Stage, make_schedule
from tests.distributed.workers import workers
from tests.pipeline.models import ONE_FORWARD_ONE_BACKWARD, TURN, ZERO_BUBBLE, blocks, chunks, data, gradients, mean_square, schedule, serial, values
from tests.pipeline.remote import Head, behind, place, service

ORDERS = {"1F1B": ONE_FORWARD_ONE_BACKWARD, "zero bubble": ZERO_BUBBLE, "turn": TURN}


async def forward(modules: list[Any], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x.detach().numpy()


@pytest.mark.parametrize("name", ORDERS)
async def test_the_outputs_of_a_step_are_those_of_the_serial_run(name: str) -> None:
    order = ORDERS[name]
    x, target = data(9)
    modules, alone = blocks(order.num_stages), blocks(order.num_stages)
    pipe = Pipeline(modules, order, loss_fn=mean_square)
    losses, outputs = await pipe.step(x, target, return_outputs=True)
    assert values(losses) == await serial(alone, order.num_microbatches, x, target)
    assert gradients(modules) == gradients(alone)
    assert np.array_equal(outputs.numpy(), (await pipe.eval(x)).numpy())
    assert not outputs.requires_grad and outputs.grad_fn is None and outputs.shape == x.shape
    again = await pipe.step(x, target)
    assert values(again) == values(losses), "without the outputs it is the losses alone"


@pytest.mark.parametrize("homes", ["ab", "a.", ".b"])
async def test_the_outputs_of_stages_on_workers(homes: str) -> None:
    x, target = data(9)
    async with workers("driver", "a", "b", service=service) as opened:
        modules = await place(opened[0], [None if home == "." else home for home in homes])
        async with Pipeline(modules, make_schedule("1F1B", 2, 4), loss_fn=mean_square) as pipe:
            losses, outputs = await pipe.step(x, target, return_outputs=True)
            assert np.array_equal(outputs.numpy(), (await pipe.eval(x)).numpy())
            alone = blocks(2)
            assert values(losses) == await serial(alone, 4, x, target)
            assert gradients(behind(module, *opened) for module in modules) == gradients(alone)


async def test_outputs_that_are_nested() -> None:
    modules = blocks(2)

    def last(x: Any) -> Any:
        return {"y": modules[1](x), "rows": (x.sum(axis=1), "same")}

    def loss(output: Any, target: Any) -> Any:
        return mean_square(output["y"], target)

    x, target = data(8)
    _, outputs = await Pipeline([modules[0], last], ONE_FORWARD_ONE_BACKWARD, loss_fn=loss).step(x, target, return_outputs=True)
    alone = [await forward(modules, part) for part in chunks(x, 4)]
    assert np.array_equal(outputs["y"].numpy(), np.concatenate(alone)) and outputs["rows"][0].shape == (8,) and outputs["rows"][1] == "same"


async def test_outputs_that_cannot_be_put_together_make_the_step_fail() -> None:
    modules = blocks(2)
    calls: list[None] = []

    def last(x: Any) -> Any:
        calls.append(None)
        return modules[1](x), len(calls)

    pipe = Pipeline([modules[0], last], ONE_FORWARD_ONE_BACKWARD, loss_fn=lambda output, target: mean_square(output[0], target))
    with pytest.raises(MicrobatchError):
        await pipe.step(*data(8), return_outputs=True)
    assert gradients(modules) == [None] * 4, "nothing was committed"
    await pipe.step(*data(8))
    assert None not in gradients(modules)


async def test_a_last_stage_that_returns_the_loss_has_no_outputs() -> None:
    modules = blocks(2)
    pipe = Pipeline([modules[0], lambda x, target: mean_square(modules[1](x), target)], ONE_FORWARD_ONE_BACKWARD)
    with pytest.raises(ArgumentError, match="returns the loss itself"):
        await pipe.step(*data(8), return_outputs=True)
    async with workers("driver", "a", service=service) as opened:
        ref = await opened[0].remote("a", Head, 1)
        async with Pipeline([modules[0], ref], make_schedule("1F1B", 2, 4), worker=opened[0]) as remote:
            with pytest.raises(ArgumentError, match="returns the loss itself"):
                await remote.step(*data(8), return_outputs=True)


async def test_outputs_that_are_not_asked_for_are_not_kept() -> None:
    modules = blocks(1)
    made: list[Any] = []
    alive: list[int] = []

    def last(x: Any) -> Any:
        gc.collect()
        alive.append(sum(each() is not None for each in made))
        out = modules[0](x) + 1
        made.append(weakref.ref(out._data))
        return out

    async def loss(output: Any, target: Any) -> Any:
        return (output * target).sum()

    pipe = Pipeline([Stage(last, where="loop")], schedule("0F0 0B0 0F1 0B1 0F2 0B2"), loss_fn=loss)  # threads let go of results a little late
    await pipe.step(*data(6))
    assert alive == [0, 0, 0]
    alive.clear(), made.clear()
    _, outputs = await pipe.step(*data(6), return_outputs=True)
    assert alive == [0, 1, 2] and outputs.shape == (6, 5)


# ---------------------------------------------------------------- profiles


@pytest.mark.parametrize("name", ORDERS)
async def test_a_profile_shows_every_action(name: str) -> None:
    order = ORDERS[name]
    pipe = Pipeline(blocks(order.num_stages), order, loss_fn=mean_square)
    await pipe.eval(data(8)[0])
    with ag.profiler.profile() as profile:
        await pipe.step(*data(8))
    (step,) = [event for event in profile.events if event.operation == "PP:step"]
    assert step.name == f"PP:step {order.name}" and step.category == "scope"
    scopes = [event for event in profile.events if event.category == "scope" and event is not step]
    assert all(step.start <= event.start and event.end <= step.end for event in scopes)
    assert sorted(event.name for event in scopes) == sorted(f"PP:{action}" for row in order.lower().ranks for action in row if action)
    assert {event.task_name for event in scopes} == {"aiograd:rank 0", "aiograd:rank 1"}
    for event in scopes:
        assert event.operation == f"PP:{event.name.removeprefix('PP:').lstrip('0123456789').rstrip('0123456789')}"
    operations = [event for event in profile.events if event.name == "tanh"]
    forwards = [event for event in scopes if event.operation == "PP:F"]
    assert len(operations) == order.num_stages * order.num_microbatches
    assert all(any(scope.start <= each.start and each.end <= scope.end for scope in forwards) for each in operations)
    assert sum(event.ended - event.began for event in pipe.events) > 0, "the timeline is there as without a profile"
    names = {event["name"] for event in profile.chrome_trace()["traceEvents"]}
    assert {"PP:0F0", "PP:1F0"} <= names and "PP:F" in profile.table()


async def test_a_profile_shows_evaluations_and_actions_that_fail() -> None:
    modules = blocks(2)
    with ag.profiler.profile() as profile:
        await Pipeline(modules, ONE_FORWARD_ONE_BACKWARD, loss_fn=mean_square).eval(data(8)[0])
    names = {event.name for event in profile.events if event.name.startswith("PP:")}
    assert {"PP:0F3", "PP:1F3"} <= names and not any("B" in name for name in names)
    with ag.profiler.profile() as profile, pytest.raises(ag.errors.PipelineError):
        await Pipeline(modules, ONE_FORWARD_ONE_BACKWARD, loss_fn=lambda *_: 1 / 0).step(*data(8))
    assert "PP:1F0" in {event.name for event in profile.events}


async def test_a_worker_that_is_profiled_shows_its_actions() -> None:
    async with workers("driver", "a", service=service) as opened:
        modules = await place(opened[0], ["a", None])
        profile = ag.profiler.profile()
        opened[1].profiler = profile.recorder
        async with Pipeline(modules, make_schedule("1F1B", 2, 2), loss_fn=mean_square) as pipe:
            await pipe.step(*data(8))
        found = {event.name for event in profile.events if event.category == "scope"}
        assert found == {"PP:0F0", "PP:0F1", "PP:0SEND_F0", "PP:0SEND_F1", "PP:0RECV_B0", "PP:0RECV_B1", "PP:0B0", "PP:0B1"}
