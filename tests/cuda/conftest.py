"""Tests of `aiograd.cuda` in numba's simulator, which is chosen before numba is first imported: ``make test`` runs them in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

#: numba-cuda is there for Linux only
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" and importlib.util.find_spec("numba_cuda") is not None
collect_ignore_glob = [] if SIMULATED else ["test_*.py"]

if SIMULATED:
    from aiograd.cuda.device import CudaDevice
    from aiograd.cuda.driver.simulator import SimulatorDriver
    from aiograd.running.devices import register_device, unregister_device
elif TYPE_CHECKING:
    from aiograd.cuda.device import CudaDevice


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers of the test's own: the same whatever ran before."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    """``cuda:0`` in the simulator. What a test allocates there it gives back."""
    device = CudaDevice(SimulatorDriver())
    register_device(device)
    yield device
    unregister_device("cuda:0")
    device.close()


@pytest.fixture
def pair(device: CudaDevice) -> Iterator[tuple[CudaDevice, CudaDevice]]:
    """``cuda:0`` and ``cuda:1``."""
    other = CudaDevice(SimulatorDriver(1))
    register_device(other)
    yield device, other
    unregister_device("cuda:1")
    other.close()
