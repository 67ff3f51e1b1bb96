"""The device, for tests that need a real one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda import discovery

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
def device() -> Any:
    """``cuda:0``, with its threads started and its libraries loaded, so that no test seems to leave them behind."""
    found: Any = ag.devices.device("cuda:0")
    x = ag.tensor(np.ones((4, 4), np.float32), device="cuda:0")
    (x @ x + 1).numpy()
    called = threading.Event()
    found.submit(lambda: found.driver.notify(None, found.driver.record(None), called.set)).result()
    called.wait()
    return found


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
