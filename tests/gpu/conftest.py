"""The device, for tests that need a real one."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda import discovery
from aiograd.testing.leaks import LeakCheck, Leaks, refuse

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a device that is not simulated."""
    missing = "NUMBA_ENABLE_CUDASIM is set" if discovery.is_simulated() else discovery.why_not()
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.gpu)
            if missing is not None:
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {missing}"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Any:
    """``cuda:0``, with its threads started and all libraries loaded, so that no test seems to leave them behind."""
    others = any(item.path.stem == "test_interop" for item in request.session.items)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an import that a warning ends halfway cannot be done again
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # jax would take three quarters of the device's memory
        for name in ("torch", "cupy", "jax") if others else ():
            try:
                importlib.import_module(name)
            except ImportError:
                continue
    found: Any = ag.devices.device("cuda:0")
    x = ag.tensor(np.ones((4, 4), np.float32), device="cuda:0")
    (x @ x + 1).numpy()
    called = threading.Event()
    found.submit(lambda: found.driver.notify(None, found.driver.record(None), called.set)).result()
    called.wait()
    return found


def of_the_driver(descriptor: str) -> bool:
    """True for files that the CUDA driver opens when it needs them first, and keeps."""
    return descriptor.startswith("/dev/nvidia") or descriptor == "anon_inode:[eventfd]"


@pytest.fixture
def leak_check(device: Any) -> Iterator[None]:
    """As everywhere, with the device there before, and without the files of its driver."""
    check = LeakCheck()
    yield
    leaks = check.find()
    refuse(Leaks(threads=leaks.threads, descriptors=tuple(each for each in leaks.descriptors if not of_the_driver(each))))


@pytest.fixture(autouse=True)
def _poisoned(device: Any) -> None:
    """Memory that tests get and do not write is full of NaN."""
    poison(device)


def poison(device: Any) -> None:
    """Fill what lies in the pool with bytes 0xFF."""

    def job() -> None:
        driver = device.driver
        blocks = [driver.allocate(1 << power, None) for power in range(9, 25) for _ in range(4)]
        for block in blocks:
            driver._calls.fill(block.address, 0xFF, block.size, driver._stream(None))
        for block in blocks:
            driver.free(block, None)

    device.submit(job).result()
