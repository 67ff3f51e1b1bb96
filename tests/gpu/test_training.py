"""Whole networks on the device: the gradients and the training are the host's, to single precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from tests.benchmarks import networks

NETWORKS: dict[str, Callable[[], networks.Network]] = {
    "mlp": lambda: networks.mlp(64, (32, 64, 64, 10)),
    "cnn": lambda: networks.cnn(8, 16, (3, 8, 16)),
    "transformer": lambda: networks.transformer(2, 16, 32, 4, 2),
    "lstm": lambda: networks.lstm(5, 16, 4),
}


async def _trained(
    network: networks.Network, dtype: str, device: str, steps: int, *, compiled: bool = False
) -> tuple[list[Any], list[Any]]:
    def put(value: Any, **options: Any) -> Any:
        return ag.tensor(value.astype(dtype), device=device, **options) if value.dtype.kind == "f" else ag.tensor(value)

    data = [put(value) for value in network.data]
    parameters = [put(value, requires_grad=True) for value in network.parameters]
    # some gradients are nothing but rounding (of the keys' bias in attention): a smaller eps would make whole steps of them
    optimizer = ag.optim.AdamW(parameters, lr=1e-3, eps=1e-3)
    first = []

    def loss_of() -> Any:
        return network.loss(ag.nn.functional, data, parameters)

    if compiled:
        loss_of = ag.compile(loss_of)
    for step in range(steps):
        optimizer.zero_grad()
        await loss_of().backward()
        if step == 0:
            first = [(await parameter.grad).numpy().copy() for parameter in parameters]
        optimizer.step()
    return first, [(await parameter).detach().numpy() for parameter in parameters]


async def follows_the_host(network: networks.Network) -> None:
    """The device computes the gradients and the training of the host, to single precision."""
    gradients, values = await _trained(network, "float32", "cuda:0", 5)
    wanted_gradients, wanted_values = await _trained(network, "float64", "cpu", 5)
    for found, wanted in zip(gradients, wanted_gradients, strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-4 * np.linalg.norm(wanted) + 1e-6
    for found, wanted in zip(values, wanted_values, strict=True):
        assert np.linalg.norm(found - wanted) <= 2e-3 * np.linalg.norm(wanted)


async def compiled_is_eager(network: networks.Network) -> None:
    """Compiled training has the bits of the eager one."""
    eager = await _trained(network, "float32", "cuda:0", 5)
    compiled = await _trained(network, "float32", "cuda:0", 5, compiled=True)
    for found, wanted in zip((*compiled[0], *compiled[1]), (*eager[0], *eager[1]), strict=True):
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", sorted(NETWORKS))
async def test_gradients_and_training_are_those_of_the_host(device: Any, name: str) -> None:
    await follows_the_host(NETWORKS[name]())


@pytest.mark.parametrize("name", sorted(NETWORKS))
async def test_compiled_training_has_the_bits_of_the_eager_one(device: Any, name: str) -> None:
    await compiled_is_eager(NETWORKS[name]())


async def test_nothing_is_computed_on_the_host(device: Any) -> None:
    """A training step of each network uses kernels alone."""
    before = device.statistics().fallbacks
    for make in NETWORKS.values():
        await _trained(make(), "float32", "cuda:0", 1)
    after = device.statistics().fallbacks
    assert {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)} == {}
