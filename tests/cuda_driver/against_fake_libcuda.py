"""Run by test_bindings.py in a process whose libcuda.so.1 is fake_libcuda.c: NVIDIA's own bindings, our driver, kernels compiled for real."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import cuda

import aiograd as ag
from aiograd.cuda import discovery
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.driver.bindings import Bindings, CallError
from aiograd.cuda.driver.compiling import compile_kernel
from aiograd.cuda.driver.completion import Semaphore
from aiograd.cuda.driver.cublas import Cublas
from aiograd.cuda.driver.hardware import HardwareDriver
from aiograd.cuda.driver.protocol import Pointer
from aiograd.cuda.importing import from_cuda_array, from_dlpack
from aiograd.errors import DeviceMemoryError
from tests.cuda_driver.test_cublas import Library


def add_one(n: Any, out: Any, step: Any) -> None:
    """The function that the fake computes for a kernel of this name."""
    i = cuda.grid(1)
    if i < n:
        out[i] += step


def main() -> None:
    assert discovery.is_available() and discovery.device_count() == 1, discovery.why_not()
    assert discovery.describe() == "cuda:0 Fake 9000; driver for CUDA 13.0"
    calls = Bindings()
    driver = HardwareDriver(0, calls, compile_kernel, launch_blocking=False)
    properties = driver.properties
    assert (properties.name, properties.capability, properties.multiprocessors, properties.shared_memory) == ("Fake 9000", (9, 0), 12, 49152)

    memory = driver.allocate(4096, None)
    sent = np.arange(1000, dtype=np.float32)
    driver.upload(memory, 0, sent, None)
    driver.launch(add_one, (4, 1, 1), (256, 1, 1), (1000, Pointer(memory, 0, np.dtype("f4"), 1000), np.float32(2.5)), None)
    received = driver.host_array((1000,), np.dtype("f4"))
    driver.download(received, memory, 0, None)
    called = threading.Event()
    driver.notify(None, driver.record(None), called.set)
    assert called.wait(10)
    try:
        calls.call_on_host(0, 1, 1)
    except CallError as error:
        assert error.code == 400 and error.call == "cuLaunchHostFunc"
    else:
        raise AssertionError("the fake takes no stream 0")
    library = ctypes.CDLL("libcuda.so.1")
    library.fake_host_function.restype = ctypes.c_void_p
    assert library.fake_host_function() == Semaphore().post_address, "the driver's thread calls the C library, with no Python in between"
    assert np.array_equal(received, sent + 2.5)
    ordinary = np.empty(250, np.float32)
    driver.download(ordinary, memory, 3000, None)
    assert np.array_equal(ordinary, sent[750:] + 2.5)

    stream = driver.create_stream(-1)
    start, end = driver.record(stream, timing=True), driver.record(stream, timing=True)
    driver.wait_for(None, end)
    driver.wait(end)
    assert driver.is_done(start) and driver.elapsed_ms(start, end) == 1.5
    driver.fill_zero(memory, 0, 16, stream)
    driver.copy(memory, 2048, memory, 0, 32, stream)
    driver.download(ordinary[:8], memory, 2048, stream)
    assert ordinary[:8].tolist() == [0, 0, 0, 0, 6.5, 7.5, 8.5, 9.5]
    foreign = driver.foreign_stream(1)
    driver.wait_for(foreign, driver.record(stream))
    driver.wait_for(stream, driver.record(foreign))
    assert driver.stream_address(foreign) == 1 and driver.stream_address(stream) > 2

    polled = []
    thread = threading.Thread(target=lambda: polled.append(driver.is_done(driver.record(None))))
    thread.start()
    thread.join()
    assert polled == [True]

    try:
        driver.allocate(1 << 31, None)
    except DeviceMemoryError as error:
        assert error.free == 1000 and error.asked == 1 << 31
    else:
        raise AssertionError("there is not so much memory")
    try:
        calls.device(5)
    except CallError as error:
        assert error.code == 101 and "cuDeviceGet failed: an error" in str(error)
    else:
        raise AssertionError("there is one device")

    driver.close_stream(stream)
    driver.trim()
    del start, end, received
    driver.close()
    library.fake_count.restype = ctypes.c_long
    left = {what: library.fake_count(what.encode()) for what in ("device", "host", "streams", "events")}
    assert not any(left.values()), left
    assert library.fake_count(b"launches") == 1


def through_the_arrays() -> None:
    """The same from above: ``cuda:0`` by its name, its arrays, and those of others in memory that they keep."""
    device: Any = ag.devices.device("cuda:0")
    values = np.arange(12.0).reshape(3, 4)
    x = device.from_host(values)
    described = x.__cuda_array_interface__
    assert described["stream"] == device.driver.stream_address(None) and described["shape"] == (3, 4)
    allocated = device.memory_stats()["allocated"]
    for whole in (from_dlpack(device, x), from_cuda_array(device, SimpleNamespace(__cuda_array_interface__=described))):
        assert np.array_equal(device.to_host(whole), values)
    flipped = from_dlpack(device, x[::-1, 1::2])
    assert (flipped.shape, flipped.strides) == ((3, 2), (-32, 16))
    assert flipped.buffer.memory.address + flipped.offset == described["data"][0] + 2 * 32 + 8, "the same memory"
    assert device.memory_stats()["allocated"] == allocated, "nothing was copied"
    reference = weakref.ref(x)
    del x, whole, flipped
    ag.cuda.synchronize()  # gives back what others had
    ag.cuda.synchronize()
    gc.collect()
    assert reference() is None
    ag.cuda.synchronize()
    assert device.memory_stats()["allocated"] == 0
    assert np.array_equal(device.to_host(from_dlpack(device, values)), values), "from the host it is copied"

    async def main() -> None:
        await ag.cuda.synchronize()
        await ag.cuda.empty_cache()

    asyncio.run(main())
    assert ag.cuda.memory_stats()["pinned"] == 0 == ag.cuda.memory_stats("cuda:0")["reserved"]
    device.close()


def products() -> None:
    """Products of arrays in every layout reach cuBLAS as it wants them: here one that computes."""
    library = Library()
    device = CudaDevice(HardwareDriver(0, Bindings(), compile_kernel, blas=functools.partial(Cublas, library)))
    rng = np.random.default_rng(0)
    for left, right in (((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((5, 1, 3, 4), (2, 4, 6)), ((5, 3, 4), (1, 4, 6))):
        for turned_left in (False, True):
            for turned_right in (False, True):
                a, b = rng.standard_normal(left), rng.standard_normal(right)
                x = device.from_host(np.ascontiguousarray(a.mT)).swapaxes(-1, -2) if turned_left else device.from_host(a)
                y = device.from_host(np.ascontiguousarray(b.mT)).swapaxes(-1, -2) if turned_right else device.from_host(b)
                asked = len(library.log)
                np.testing.assert_allclose(device.to_host(x @ y), a @ b, rtol=1e-12, atol=1e-12)
                assert "gemm" in [entry[0] for entry in library.log[asked:]], "cuBLAS was asked"
    device.close()
    assert library.handles == 0


main()
through_the_arrays()
products()
print("all is well")
