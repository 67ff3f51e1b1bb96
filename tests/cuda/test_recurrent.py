"""LSTM steps and sequences on a simulated device."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.device import CudaDevice
from aiograd.errors import ShapeError
from aiograd.ops.op import ROWS
from tests.cuda.fused_on_both import fused_agrees
from tests.support import assert_raises


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1, 4)], ids=str)
def test_a_step(device: CudaDevice, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    fused_agrees(device, "lstm_cell", (normal(rng, *shape[:-1], 4 * shape[-1]) * 3, normal(rng, *shape)), {}, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("steps", "biases"), [(3, "both"), (1, "none"), (2, "one")])
def test_a_sequence(device: CudaDevice, steps: int, biases: str, dtype: str, rng: np.random.Generator) -> None:
    batch, size, hidden = 2, 3, 2
    bias = {"both": (normal(rng, 8), normal(rng, 8)), "one": (normal(rng, 8), None), "none": (None, None)}[biases]
    states, weights = (normal(rng, batch, hidden), normal(rng, batch, hidden)), (normal(rng, 8, size), normal(rng, 8, hidden))
    fused_agrees(device, "lstm", (normal(rng, steps, batch, size), *states, *weights, *bias), {}, dtype)


def test_a_step_of_a_sequence_is_a_product_and_one_launch(device: CudaDevice, rng: np.random.Generator) -> None:
    fused = device.fused("lstm")
    assert fused is not None
    args = [device.from_host(normal(rng, *shape).astype(np.float32)) for shape in ((5, 2, 3), (2, 2), (2, 2), (8, 3), (8, 2))]
    fused.forward(*args, None, None)
    device.synchronize()
    assert device.driver.history.count("lstm_step") == 5


def test_shapes_that_do_not_fit(device: CudaDevice) -> None:
    gates, c = (device.from_host(np.zeros(shape, np.float32)) for shape in ((2, 7), (2, 2)))
    assert_raises(ShapeError, "lstm_cell", lambda: ROWS["lstm_cell"](gates, c))


async def test_the_module(device: CudaDevice, rng: np.random.Generator) -> None:
    x = normal(rng, 3, 2, 3).astype(np.float32)

    async def gradients(place: str) -> list[np.ndarray]:
        module = ag.nn.LSTM(3, 2, generator=ag.Generator(0)).to(place)
        t = ag.tensor(x, device=place, requires_grad=True)
        out, (h, c) = module(t)
        await ((out * out).sum() + h.sum() + (c * c).sum()).backward()
        wanted = [t, *module.parameters()]
        await ag.ready([each.grad for each in wanted])
        return [each.grad.to("cpu").numpy() for each in wanted]

    for ours, theirs in zip(await gradients("cuda:0"), await gradients("cpu"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert device.statistics().fallbacks == {}
