"""The checks of `tests/gpu/test_training.py` on a simulated device, with tiny networks: what a GPU is tried on is right where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiograd.cuda.device import CudaDevice
from tests.benchmarks import networks
from tests.gpu.test_training import NETWORKS, compiled_is_eager, follows_the_host

TINY: dict[str, Callable[[], networks.Network]] = {
    "mlp": lambda: networks.mlp(2, (3, 4, 2)),
    "cnn": lambda: networks.cnn(2, 8, (1, 2, 3)),
    "transformer": lambda: networks.transformer(2, 3, 4, 2, 1),
    "lstm": lambda: networks.lstm(2, 3, 2),
}


def test_every_network_has_a_tiny_one() -> None:
    assert TINY.keys() == NETWORKS.keys()


@pytest.mark.one_loop
@pytest.mark.parametrize("name", sorted(TINY))
async def test_training_follows_the_host_without_it(device: CudaDevice, name: str) -> None:
    await follows_the_host(TINY[name]())
    assert device.statistics().fallbacks == {}


@pytest.mark.one_loop
@pytest.mark.parametrize("name", sorted(TINY))
async def test_compiled_training_is_eager_training(device: CudaDevice, name: str) -> None:
    await compiled_is_eager(TINY[name]())
