"""``ag.cuda``: what it says and does, in a loop and without one."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest

import aiograd as ag
from aiograd import cuda
from aiograd.cuda import loading, stream
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.driver.simulator import SimulatorDriver
from aiograd.errors import ArgumentError, DeviceError, DeviceUnavailableError
from tests.support import assert_awaiting_raises, assert_raises


def test_the_simulator_counts_as_one_device() -> None:
    assert cuda.is_available() and cuda.device_count() == 1 and cuda.why_not() is None


def test_devices_are_made_by_their_names() -> None:
    device = loading.make_device(0)
    assert isinstance(device, CudaDevice) and isinstance(device.driver, SimulatorDriver)
    device.close()
    assert_raises(DeviceUnavailableError, "cuda:3 cannot be used: device 3 was asked for", loading.make_device, 3)
    assert_raises(DeviceUnavailableError, "cuda:3 cannot be used", ag.tensor, [1.0], device="cuda:3")


def test_names_that_need_numba_are_found_when_asked_for() -> None:
    assert cuda.Stream is stream.Stream and cuda.Event is stream.Event and cuda.current_stream is stream.current_stream
    assert {"Stream", "Event", "current_stream", "synchronize"} <= set(dir(cuda))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cuda.nothing  # noqa: B018


def test_synchronize_blocks_where_there_is_no_loop(device: CudaDevice) -> None:
    x = ag.tensor(np.arange(3.0), device="cuda:0") + 1
    x._data.flush()
    cuda.synchronize()
    assert x._data.__aiograd_is_ready__()


async def test_synchronize_is_awaited_in_a_loop(device: CudaDevice) -> None:
    x = ag.tensor(np.arange(3.0), device="cuda:0") + 1
    x._data.flush()
    await cuda.synchronize("cuda:0")
    assert x._data.__aiograd_is_ready__()
    await cuda.empty_cache(0)
    for coroutine in (cuda.synchronize(), cuda.empty_cache(0)):
        assert re.search(rf"(synchronize|empty_cache), called at {re.escape(__file__)}:\d+$", str(coroutine.__qualname__))  # type: ignore[attr-defined]
        coroutine.close()  # type: ignore[attr-defined]


def test_what_synchronize_returns_outside_a_loop_can_be_awaited_too(device: CudaDevice) -> None:
    waiting = cuda.synchronize()

    async def main() -> None:
        await waiting

    asyncio.run(main())


async def test_a_device_that_failed_says_so_when_waited_for(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise DeviceError("on purpose")

    monkeypatch.setattr(device.driver, "synchronize", fails)
    await assert_awaiting_raises(DeviceError, "on purpose", cuda.synchronize())


def test_memory_and_work_are_counted(device: CudaDevice) -> None:
    x = ag.tensor(np.ones(100, np.float32), device="cuda:0")
    cuda.synchronize()
    assert cuda.memory_stats()["allocated"] == cuda.memory_stats("cuda:0")["allocated"] >= 400
    assert cuda.statistics(0).uploads == 1
    del x


@pytest.mark.parametrize("name", ["cpu", "toy:0", ""])
def test_devices_of_other_kinds_are_refused(name: str) -> None:
    assert_raises(ArgumentError, "expected a CUDA device such as 'cuda:0'", cuda.memory_stats, name)
