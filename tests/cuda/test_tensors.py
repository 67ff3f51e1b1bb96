"""Tensors on a simulated CUDA device: forward, backward, chains across devices, failures that come late, waiting and cancelling."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np

import aiograd as ag
from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from aiograd.errors import DeviceError, DeviceLostError, DeviceMemoryError, DeviceMismatchError, NotReadyError
from tests.support import assert_awaiting_raises, assert_raises, cancel
from tests.tolerance import tolerance

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((4, 2)).astype(np.float32)


async def gradients(place: str | None) -> list[np.ndarray]:
    x, w = ag.tensor(X, device=place, requires_grad=True), ag.tensor(W, device=place, requires_grad=True)
    y = ag.tanh(x @ w)
    loss = (y * y + ag.exp(-y)).sum()
    await loss.backward()
    found = [loss.detach(), x.grad, w.grad]
    assert all(each.device == (place or "cpu") for each in found)
    await ag.ready(found)
    return [each.to("cpu").numpy() for each in found]


async def test_gradients_are_those_of_the_host(device: CudaDevice) -> None:
    for ours, wanted in zip(await gradients("cuda:0"), await gradients(None), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=tolerance(np.float32), atol=tolerance(np.float32))


async def test_the_same_bits_every_time(device: CudaDevice) -> None:
    first, second = await gradients("cuda:0"), await gradients("cuda:0")
    assert [each.tobytes() for each in first] == [each.tobytes() for each in second]


async def test_reading_what_is_pending_is_refused_inside_a_loop_and_awaiting_it_is_not(device: CudaDevice) -> None:
    go = threading.Event()
    device.submit(go.wait)
    y = ag.exp(ag.tensor(X, device="cuda:0"))
    try:
        assert_raises(NotReadyError, "the tensor first", y.numpy)
    finally:
        go.set()
    assert (await y) is y
    np.testing.assert_allclose(y.numpy(), np.exp(X), rtol=tolerance(np.float32))


def test_reading_outside_of_a_loop_waits(device: CudaDevice) -> None:
    np.testing.assert_allclose(ag.exp(ag.tensor(X, device="cuda:0")).numpy(), np.exp(X), rtol=tolerance(np.float32))


async def test_device_to_host_to_device_in_one_graph(device: CudaDevice) -> None:
    x = ag.tensor(X, requires_grad=True)
    hidden = ag.exp(x.to("cuda:0")) * 2
    back = (await hidden).to("cpu") + 1
    loss = (ag.tanh(back).to("cuda:0") * 3).sum()
    await loss.backward()
    y = 2 * np.exp(X) + 1
    assert x.grad.device == "cpu"
    np.testing.assert_allclose(x.grad.numpy(), 3 * (1 - np.tanh(y) ** 2) * 2 * np.exp(X), rtol=1e-4, atol=1e-6)


async def test_arrays_of_two_devices_do_not_mix(pair: tuple[CudaDevice, CudaDevice]) -> None:
    assert_raises(DeviceMismatchError, "cuda:0.*cuda:1", lambda: ag.tensor(X, device="cuda:0") + ag.tensor(X, device="cuda:1"))
    moved = (await ag.tensor(X, device="cuda:0")).to("cuda:1")
    assert moved.device == "cuda:1"
    await moved
    np.testing.assert_array_equal(moved.numpy(), X)


async def test_a_kernel_that_fails_is_a_pass_that_fails_and_no_grad_changes(device: CudaDevice) -> None:
    x = ag.tensor(X, device="cuda:0", requires_grad=True)
    loss = ag.exp(x).sum()
    await loss
    gc.collect()
    for name in ("multiply", "expand_multiply", "cast"):
        device.driver.faults[name] = DeviceError("as asked for")
    await assert_awaiting_raises(DeviceError, "as asked for", loss.backward())
    device.driver.faults.clear()
    assert x.grad is None
    await ag.exp(x).sum().backward()
    np.testing.assert_allclose((await x.grad).numpy(), np.exp(X), rtol=tolerance(np.float32))


async def test_a_lost_device_says_so_and_the_host_goes_on(device: CudaDevice) -> None:
    x = ag.tensor(X, device="cuda:0")
    device.driver.faults["exp"] = DeviceLostError("an illegal address")
    await assert_awaiting_raises(DeviceLostError, "illegal address", ag.exp(x))
    await assert_awaiting_raises(DeviceLostError, "lost since an earlier kernel", x + 1)
    y = ag.tensor(X, requires_grad=True)
    await (y * y).sum().backward()
    np.testing.assert_allclose(y.grad.numpy(), 2 * X)


async def test_out_of_memory_says_how_much_and_leaves_everything_usable(device: CudaDevice) -> None:
    x = ag.tensor(np.ones((1024, 1024), np.float32), device="cuda:0")
    caught = await assert_awaiting_raises(DeviceMemoryError, "bytes", ag.broadcast_to(x, (1000, 1024, 1024)).clone())
    assert caught.asked == 1000 * 2**22
    assert caught.free == 256 * 2**20 - 2**22
    await ag.zeros((2, 2), device="cuda:0")


async def test_memory_goes_back(device: CudaDevice) -> None:
    await gradients("cuda:0")
    gc.collect()
    device.synchronize()
    stats = device.memory_stats()
    assert stats["allocated"] == 0
    assert stats["allocations"] == stats["frees"] > 0


async def test_cancelling_a_wait_stops_the_waiting_only(device: CudaDevice) -> None:
    go = threading.Event()
    device.submit(go.wait)
    y = ag.exp(ag.tensor(X, device="cuda:0"))
    waiting = asyncio.ensure_future(ag.ready(y))
    await asyncio.sleep(0)
    await cancel(waiting)
    go.set()
    await y
    np.testing.assert_allclose(y.numpy(), np.exp(X), rtol=tolerance(np.float32))


async def test_an_array_is_never_copied_to_the_host_unasked(device: CudaDevice) -> None:
    array = device.from_host(X)
    assert isinstance(array, CudaArray)
    assert_raises(DeviceError, "to_host", np.asarray, array)


async def test_everything_a_pass_delivers_is_started_before_the_first_wait(device: CudaDevice) -> None:
    """However many gradients there are, the loop waits for the device about once."""
    leaves = [ag.tensor(X * i, device="cuda:0", requires_grad=True) for i in range(20)]
    loss = sum((ag.tanh(x) for x in leaves[1:]), ag.tanh(leaves[0])).sum()
    await ag.ready(leaves)
    order: list[str] = []
    launch, record = device.driver.launch, device.driver.record

    def launched(kernel: Any, *args: Any) -> None:
        order.append("launch")
        launch(kernel, *args)

    def recorded(stream: Any, **options: Any) -> Any:
        order.append("event")
        return record(stream, **options)

    device.driver.launch, device.driver.record = launched, recorded
    go = threading.Event()
    device.submit(go.wait)
    running = asyncio.ensure_future(loss.backward())
    for _ in range(1000):
        await asyncio.sleep(0)
    go.set()
    await running
    assert order.count("launch") >= 20
    assert "launch" not in order[order.index("event") :], order


async def test_a_device_that_is_lost_after_the_launch_is_noticed_by_whoever_waits(device: CudaDevice) -> None:
    """Kernels fail long after they were started: the next event is what says so, and no gradient of that pass is committed."""
    x = ag.tensor(X, device="cuda:0", requires_grad=True)
    loss = ag.exp(x).sum()
    await loss
    device.synchronize()
    lost = DeviceLostError("an illegal address, noticed late")
    launch = device.driver.launch

    def launched(*args: Any) -> None:
        launch(*args)
        device.driver._lost = lost

    device.driver.launch = launched
    await assert_awaiting_raises(DeviceLostError, "noticed late", loss.backward())
    assert x.grad is None
    for _ in range(3):  # its thread goes on, and says so each time
        await assert_awaiting_raises(DeviceLostError, "noticed late", x * 2)
        await assert_awaiting_raises(DeviceLostError, "noticed late", ag.cuda.synchronize())
    del x, loss
    gc.collect()
    await assert_awaiting_raises(DeviceLostError, None, ag.cuda.current_stream().done())


def test_reading_from_a_device_that_is_lost_meanwhile_gives_no_garbage(device: CudaDevice) -> None:
    y = device.from_host(X)
    device.synchronize()
    download = device.driver.download

    def downloaded(*args: Any) -> None:
        download(*args)
        device.driver._lost = DeviceLostError("lost on the way")

    device.driver.download = downloaded
    assert_raises(DeviceLostError, "lost on the way", device.to_host, y)
