"""Graphs that leave a CUDA device: to workers that compute on devices of their own, through pipelines and mapped calls."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.cuda.device import CudaDevice
from aiograd.errors import DeviceError, DeviceMemoryError, PipelineError, RemoteError
from aiograd.pipeline import Pipeline, Stage, make_schedule
from tests.distributed.workers import leaf, until, values, view, workers
from tests.pipeline.models import blocks, data, mean_square, serial
from tests.support import assert_awaiting_raises


class Rig:
    """A service whose function computes with a weight on ``cuda:1``."""

    def __init__(self) -> None:
        self.weight = ag.tensor([2.0, 3.0], device="cuda:1", requires_grad=True)
        self.service = dist.Service()

        @self.service.function
        async def on_device(x: ag.Tensor) -> ag.Tensor:
            return x.to("cuda:1") * self.weight


async def test_device_to_worker_with_a_device_and_back(pair: tuple[CudaDevice, CudaDevice]) -> None:
    rig = Rig()
    async with workers("a", "b", service=rig.service) as (a, b), a.context() as ctx:
        x = leaf(5, 7)
        here = await ag.exp(x.to("cuda:0") / 10)
        y = await a.call("b", "on_device", here.to("cpu"))
        loss = (y.to("cuda:0") * here).sum()
        await ctx.backward(loss)
        e = np.exp(np.array([0.5, 0.7]))
        np.testing.assert_allclose(values(ctx.grads[x]), 2 * np.array([2, 3]) * e * e / 10, rtol=1e-5)
        grad = await view(b, ctx).grads[rig.weight]
        assert grad.device == "cuda:1"
        np.testing.assert_allclose(grad.numpy(), e * e, rtol=1e-5)


@pytest.mark.parametrize("error", [DeviceError("as asked for"), DeviceMemoryError("as asked for", asked=8, free=4)])
async def test_a_device_that_fails_on_a_worker_fails_the_pass_and_nothing_is_committed(pair: tuple[CudaDevice, CudaDevice], error: Exception) -> None:
    rig = Rig()
    await rig.weight
    async with workers("a", "b", service=rig.service) as (a, b):
        async with a.context() as ctx:
            x = leaf(5, 7)
            y = await a.call("b", "on_device", x)
            pair[1].driver.faults["multiply"] = error
            await assert_awaiting_raises(RemoteError, "Error on Node b", ctx.backward((y * y).sum(), timeout=5))
            assert not [*ctx.grads]
            assert not [*view(b, ctx).grads]
        pair[1].driver.faults.clear()
        await until(lambda: not b.statistics().passes)
        async with a.context() as ctx:  # and everything goes on
            x = leaf(5, 7)
            await ctx.backward((await a.call("b", "on_device", x)).sum())
            assert values(ctx.grads[x]) == [2, 3]


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("places", [("cuda:0", "cuda:1", "cpu"), ("cpu", "cuda:0", "cuda:0")])
async def test_a_pipeline_over_devices(pair: tuple[CudaDevice, CudaDevice], name: str, places: tuple[str, ...]) -> None:
    x, target = data(6)
    alone, cut = blocks(3), blocks(3)
    losses = await serial(alone, 3, x, target)
    stages = [Stage(module.to(device), device=device) for module, device in zip(cut, places, strict=True)]
    found = await Pipeline(stages, make_schedule(name, 3, 3), loss_fn=mean_square).step(x, target)
    for ours, wanted in zip(found, losses, strict=True):
        np.testing.assert_allclose((await ours).to("cpu").numpy(), wanted, rtol=1e-5)
    for mine, other in zip(cut, alone, strict=True):
        for ours, theirs in zip(mine.parameters(), other.parameters(), strict=True):
            assert ours.grad.device == ours.device
            np.testing.assert_allclose((await ours.grad).to("cpu").numpy(), theirs.grad.numpy(), rtol=1e-4, atol=1e-6)


async def test_a_stage_whose_device_fails_leaves_every_grad_as_it_was(device: CudaDevice) -> None:
    x, target = data(6)
    modules = [module.to("cuda:0") for module in blocks(2)]
    pipe = Pipeline([Stage(module, device="cuda:0") for module in modules], make_schedule("1F1B", 2, 3), loss_fn=mean_square)
    await pipe.step(x, target)
    device.driver.history.clear()
    await pipe.step(x, target)  # now there are gradients to add to
    names = list(device.driver.history)
    parameters = [p for module in modules for p in module.parameters()]
    before = [(await p.grad).numpy().tobytes() for p in parameters]
    for name in dict.fromkeys(names):
        device.driver.faults[name] = DeviceError("as asked for")
        await assert_awaiting_raises((PipelineError, DeviceError), None, pipe.step(x, target))
        device.driver.faults.clear()
        assert [(await p.grad).numpy().tobytes() for p in parameters] == before, name


async def test_calls_in_parallel_on_a_device(device: CudaDevice) -> None:
    weight = ag.tensor(np.eye(3, dtype=np.float32) * 2, device="cuda:0", requires_grad=True)
    inputs = [ag.tensor(np.full((2, 3), i + 1, np.float32), device="cuda:0") for i in range(3)]
    results = await ag.parallel.map_with_parallel_backward(lambda x: ag.tanh(x @ weight), *[(x,) for x in inputs])
    await sum((y.sum() for (y,) in results[1:]), results[0][0].sum()).backward()
    wanted = ag.tensor(np.eye(3, dtype=np.float32) * 2, requires_grad=True)
    hosts = [ag.tanh(ag.tensor(np.full((2, 3), i + 1, np.float32)) @ wanted).sum() for i in range(3)]
    await sum(hosts[1:], hosts[0]).backward()
    np.testing.assert_allclose((await weight.grad).numpy(), wanted.grad.numpy(), rtol=1e-4, atol=1e-6)
