"""Stages on devices, and where stages run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import DeviceError, PipelineError
from aiograd.pipeline import Pipeline, Stage, make_schedule
from tests.pipeline.models import blocks, data, mean_square, serial, values
from tests.toy_device import ToyDevice


@pytest.fixture(params=[False, True])
def toys(request: pytest.FixtureRequest) -> Iterator[tuple[ToyDevice, ToyDevice]]:
    with ToyDevice("toy:0", launches_ahead=request.param) as first, ToyDevice("toy:1", launches_ahead=request.param) as second:
        yield first, second


def bits(parameter: Any) -> Any:
    return None if parameter.grad is None else parameter.grad.to("cpu").numpy().tobytes()


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("places", [("toy:0", "toy:1", "cpu"), ("cpu", "toy:0", "toy:0"), ("toy:1", "cpu", "toy:0")])
async def test_stages_on_devices(toys: Any, name: str, places: tuple[str, ...]) -> None:
    x, target = data(9)
    alone, cut = blocks(3), blocks(3)
    losses = await serial(alone, 4, x, target)
    pipe = Pipeline(
        [Stage(m.to(device), device=device) for m, device in zip(cut, places, strict=True)], make_schedule(name, 3, 4), loss_fn=mean_square
    )
    found = await pipe.step(x, target)
    assert values([loss.to("cpu") for loss in found]) == losses
    parameters = [p for module in cut for p in module.parameters()]
    for parameter in parameters:
        assert parameter.grad.device == parameter.device
        await parameter.grad
    assert [bits(p) for p in parameters] == [bits(p) for module in alone for p in module.parameters()]
    result = await pipe.eval(x)
    await result
    assert result.device == places[-1] and result.shape == x.shape


async def test_a_batch_that_wants_a_gradient_from_a_device(toys: Any) -> None:
    x, target = data(9)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    alone, cut = blocks(1), blocks(1)
    await serial(alone, 3, other, target)
    await Pipeline([Stage(cut[0].to("toy:0"), device="toy:0")], make_schedule("GPipe", 1, 3), loss_fn=mean_square).step(mine, target)
    assert mine.grad.device == "cpu" and np.array_equal(mine.grad.numpy(), other.grad.numpy())


async def test_a_device_that_fails_late() -> None:
    """Before the commit: no gradient has changed."""
    x, target = data(8)
    with ToyDevice("toy:0") as toy:
        modules = [module.to("toy:0") for module in blocks(2)]
        pipe = Pipeline([Stage(module, device="toy:0") for module in modules], make_schedule("1F1B", 2, 4), loss_fn=mean_square)
        for module in modules:
            for parameter in module.parameters():
                await parameter
        before = toy.statistics().kernels
        await pipe.step(x, target)
        for module in modules:
            for parameter in module.parameters():
                await parameter.grad
                parameter.grad = None
        kernels = toy.statistics().kernels - before
        for at in (5, kernels // 2, kernels - 2, kernels):  # the last are those that add up the gradients of the last microbatch
            await ag.tensor([0.0]).to("toy:0")  # what was queued before is done
            toy.fail(at, "error")
            with pytest.raises((PipelineError, DeviceError)):
                await pipe.step(x, target)
            assert all(p.grad is None for module in modules for p in module.parameters())


async def test_where_stages_run() -> None:
    seen: dict[str, bool] = {}
    modules = blocks(4)

    def note(name: str, module: Any) -> Any:
        def stage(x: Any) -> Any:
            seen[name] = threading.current_thread() is threading.main_thread()
            return module(x)

        return stage

    async def waits(x: Any) -> Any:
        return note("coroutine", modules[2])(x)

    stages = [
        note("default", modules[0]),
        Stage(note("loop", modules[1]), where="loop"),
        waits,
        Stage(note("executor", modules[3]), where="executor"),
    ]
    await Pipeline(stages, make_schedule("GPipe", 4, 2), loss_fn=mean_square).step(*data(4))
    assert seen == {"default": False, "loop": True, "coroutine": True, "executor": False}


async def test_stages_follow_the_modes_of_the_caller() -> None:
    seen: list[Any] = []

    def stage(x: Any) -> Any:
        seen.append((ag.get_default_dtype(), ag.is_grad_enabled()))
        return x * 1.0

    module = blocks(1, dtype=np.float64)[0]
    pipe = Pipeline([stage, module], make_schedule("GPipe", 2, 2), loss_fn=mean_square)
    x, target = data(4, dtype=np.float64)
    ag.set_default_dtype(np.float64)
    try:
        await pipe.step(x, target)
        await pipe.eval(x)
    finally:
        ag.set_default_dtype(np.float32)
    assert seen == [(np.float64, True)] * 2 + [(np.float64, False)] * 2
