"""The recipes of the README, run as they stand there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag

IMAGES = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
LABELS = np.arange(16) % 10


@pytest.fixture
def model() -> ag.nn.Module:
    ag.seed(0)
    return ag.nn.Sequential(ag.nn.Linear(64, 128), ag.nn.ReLU(), ag.nn.Linear(128, 10))


def model_and_loss(model: ag.nn.Module) -> Any:
    return ag.nn.functional.cross_entropy(model(ag.asarray(IMAGES)), LABELS)


async def test_train_and_save(model: ag.nn.Module, tmp_path: Path) -> None:
    optimizer = ag.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model_and_loss(model)
        optimizer.zero_grad()
        await loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    ag.save(model.state_dict(), tmp_path / "model.safetensors")
    for name, value in ag.load(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(value.numpy(), model.state_dict()[name].detach().numpy())


async def test_a_timeout_that_does_not_strike_changes_nothing_but_the_gradients(model: ag.nn.Module) -> None:
    async with asyncio.timeout(60):
        await model_and_loss(model).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class RemoteScale(ag.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, client: Any) -> Any:
        ctx.client = client
        return x * 2

    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:
        return ag.asarray(await ctx.client.scale(g.numpy())), None


class Client:
    async def scale(self, g: Any) -> Any:
        await asyncio.sleep(0)
        return g * 2


async def test_a_function_whose_backward_waits_for_somebody_else() -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    await RemoteScale.apply(x, Client()).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


async def test_attribution_touches_no_gradient(model: ag.nn.Module) -> None:
    image = ag.tensor(IMAGES[:1], requires_grad=True)
    (attribution,) = await ag.grad(model(image)[0, 3], [image])
    assert attribution.shape == (1, 64)
    assert image.grad is None and all(parameter.grad is None for parameter in model.parameters())


async def test_offload_and_checkpoint_give_the_same_gradients(model: ag.nn.Module) -> None:
    gradients = []
    for loss in (model_and_loss(model), await ag.offload(model_and_loss, model), ag.checkpoint(model_and_loss, model)):
        await loss.backward()
        gradients.append([parameter.grad.numpy().copy() for parameter in model.parameters()])
        for parameter in model.parameters():
            parameter.grad = None
    for others in gradients[1:]:
        for one, other in zip(gradients[0], others, strict=True):
            np.testing.assert_array_equal(one, other)


async def test_optimizer_in_backward(model: ag.nn.Module) -> None:
    def step(parameter: Any) -> None:
        with ag.no_grad():
            parameter -= 0.01 * parameter.grad
        parameter.grad = None

    before = model_and_loss(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step, eager=True)
    await before.backward()
    assert model_and_loss(model).item() < before.item()
    assert all(parameter.grad is None for parameter in model.parameters())


async def test_see_what_happens(model: ag.nn.Module, tmp_path: Path) -> None:
    with ag.profiler.profile() as prof:
        loss = model_and_loss(model)
        await loss.backward()
    assert "linear" in prof.table()
    prof.chrome_trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 0
    assert "LinearBackward" in ag.viz.graph_svg(loss)
