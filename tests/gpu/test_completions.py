"""Waiting for a device: many waits, both loops, nothing held up, nothing lost."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from tests.support import cancel

pytestmark = pytest.mark.timeout(600)


async def test_a_hundred_thousand_completions(device: Any) -> None:
    """Every one is answered, in batches of a thousand that wait at the same time."""
    driver, loop = device.driver, asyncio.get_running_loop()
    for _ in range(100):
        futures = [loop.create_future() for _ in range(1000)]

        def start(futures: list[Any] = futures) -> None:
            for future in futures:
                event = driver.record(None)
                driver.notify(None, event, lambda future=future: loop.call_soon_threadsafe(future.set_result, None))

        device.submit(start)
        await asyncio.wait_for(asyncio.gather(*futures), 60)


async def test_the_loop_goes_on_while_the_device_works(device: Any) -> None:
    """A second's worth of products is launched and awaited; the loop is never away for long."""
    x = ag.tensor(np.random.default_rng(0).standard_normal((4096, 4096)).astype(np.float32), device="cuda:0")
    await ((x @ x) * 1e-2)  # compiled before the clock runs
    longest, stopped = 0.0, False

    async def heartbeat() -> None:
        nonlocal longest
        while not stopped:
            before = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - before)

    beating = asyncio.ensure_future(heartbeat())
    y = x
    for _ in range(100):
        y = (y @ x) * 1e-2
    await y
    stopped = True
    await beating
    assert longest < 0.05, f"the loop was away for {longest * 1e3:.1f} ms"


async def test_a_cancelled_wait_leaves_the_work_alone(device: Any) -> None:
    x = ag.tensor(np.full((4096, 4096), 1e-4, np.float32), device="cuda:0")
    y = x @ x @ x @ x
    waiting = asyncio.ensure_future(ag.ready(y))
    await asyncio.sleep(0)
    await cancel(waiting)
    assert np.isfinite((await y).numpy()).all()


async def test_device_and_host_in_one_graph(device: Any) -> None:
    """Device, host, device, and back through all of it."""
    a = ag.tensor(np.arange(6, dtype=np.float64).reshape(2, 3), device="cuda:0", requires_grad=True)
    middle = await (a * 2)
    b = (middle.to("cpu") ** 2).to("cuda:0").sum()
    await b.backward()
    assert a.grad.device == "cuda:0"
    assert np.array_equal((await a.grad).numpy(), 8 * np.arange(6).reshape(2, 3))


async def test_streams_overlap_and_keep_order(device: Any) -> None:
    first, second = ag.cuda.Stream(), ag.cuda.Stream()
    x = ag.tensor(np.ones((2048, 2048), np.float32), device="cuda:0")
    for _ in range(20):
        with first:
            y = x + 1
        with second:
            z = y * 2
        with first:
            x = z - 3
    assert np.array_equal((await x).numpy(), np.ones((2048, 2048), np.float32)), "(x + 1) · 2 − 3 leaves 1 as it is"


async def test_collecting_garbage_everywhere_at_once(device: Any) -> None:
    """Arrays are dropped on many threads while others are made; everything comes back to the pool."""
    gc.collect()
    await ag.cuda.synchronize()
    await ag.cuda.synchronize()  # what was dropped while the first one waited
    before = device.memory_stats()["allocated"]
    stop = threading.Event()
    failures: list[BaseException] = []

    def churn() -> None:
        try:
            while not stop.is_set():
                arrays = [device.from_host(np.ones(1000, np.float32)) for _ in range(20)]
                cycle: list[Any] = [arrays[0] + arrays[1]]
                cycle.append(cycle)
                device.submit(lambda: None).result()  # no further ahead of the device's thread than this
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    x = ag.tensor(np.ones((256, 256), np.float32), device="cuda:0", requires_grad=True)
    for _ in range(30):
        await (x @ x).sum().backward()
        x.grad = None
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    del x
    gc.collect()
    await ag.cuda.synchronize()
    await ag.cuda.synchronize()
    assert device.memory_stats()["allocated"] == before
