"""Memory on hardware: running out of it, getting it back, copies that overlap."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

import aiograd as ag
from aiograd.errors import DeviceMemoryError
from tests.support import assert_awaiting_raises


async def test_running_out_of_memory_is_an_error_and_no_more(device: Any) -> None:
    await ag.cuda.empty_cache()
    total = device.properties.total_memory
    before = device.memory_stats()
    caught = await assert_awaiting_raises(DeviceMemoryError, "bytes are free", ag.zeros((total // 4 + 2**28,), dtype=np.float32, device="cuda:0"))
    assert caught.asked > total and 0 < caught.free < total
    del caught
    gc.collect()
    assert device.memory_stats()["out_of_memory"] == before["out_of_memory"] + 1
    x = ag.tensor(np.arange(5.0), device="cuda:0")
    assert (await (x + 1)).numpy().tolist() == [1, 2, 3, 4, 5]


async def test_what_lies_in_reserve_is_used_before_giving_up(device: Any) -> None:
    """Half of the memory as one piece, freed, then the other way round: the reserve is given back and asked for again."""
    half = device.properties.total_memory // 2
    await ag.cuda.empty_cache()
    for size in (half, half // 3, half + half // 4):
        x = ag.zeros((size,), dtype=np.uint8, device="cuda:0")
        await x
        del x
        gc.collect()
    assert device.memory_stats()["reserved"] <= device.properties.total_memory


async def test_a_training_step_asks_the_device_for_nothing(device: Any) -> None:
    x = ag.tensor(np.ones((512, 512), np.float32), device="cuda:0", requires_grad=True)

    async def step() -> None:
        await (ag.tanh(x @ x) * 0.5).sum().backward()
        x.grad = None

    for _ in range(3):
        await step()
    calls = device.driver._calls
    asked: list[str] = []
    pinned = device.memory_stats()["pinned"]
    for name in ("allocate", "free", "synchronize", "load"):
        original = getattr(calls, name)
        setattr(calls, name, lambda *args, name=name, original=original: (asked.append(name), original(*args))[1])
    try:
        for _ in range(3):
            await step()
    finally:
        for name in ("allocate", "free", "synchronize", "load"):
            delattr(calls, name)
    assert asked == [] and device.memory_stats()["pinned"] == pinned


async def test_large_arrays_go_there_and_back(device: Any) -> None:
    values = np.random.default_rng(0).integers(0, 2**31, 50_000_003).astype(np.int32)
    assert np.array_equal((await ag.tensor(values, device="cuda:0")).numpy(), values)
