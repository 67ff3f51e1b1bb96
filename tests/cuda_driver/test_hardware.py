"""The driver of a device, on calls that go to ordinary memory: order of calls, failures, retries, leaks."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiograd.cuda.driver.hardware import HardwareDriver
from aiograd.cuda.driver.protocol import Pointer
from aiograd.cuda.driver.staging import CHUNK
from aiograd.errors import DeviceError, DeviceLostError, DeviceMemoryError
from tests.cuda_driver.fake_calls import FakeCalls
from tests.support import assert_raises

MIB = 1 << 20


def kernel(n: Any, out: Any) -> None:
    """Stands for a kernel; nobody runs it."""


def another(n: Any, out: Any) -> None:
    """As above."""


class Compiler:
    """Counts what it compiles."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, kernel: Callable[..., None], args: tuple[Any, ...], capability: tuple[int, int]) -> Any:
        self.compiled.append((kernel.__name__, capability))
        return SimpleNamespace(name=f"{kernel.__name__}{len(self.compiled)}", cubin=b"machine code")


@pytest.fixture
def calls() -> FakeCalls:
    return FakeCalls()


@pytest.fixture
def driver(calls: FakeCalls) -> Iterator[HardwareDriver]:
    driver = HardwareDriver(0, calls, Compiler(), launch_blocking=False)  # type: ignore[arg-type]
    yield driver
    driver.close()


@pytest.fixture
def deferred() -> Iterator[tuple[HardwareDriver, FakeCalls]]:
    calls = FakeCalls(deferred=True)
    driver = HardwareDriver(0, calls, Compiler(), launch_blocking=False)  # type: ignore[arg-type]
    yield driver, calls
    driver.close()


def pointer(driver: HardwareDriver, memory: Any, dtype: Any = np.float32, offset: int = 0) -> Pointer:
    return Pointer(memory, offset, np.dtype(dtype), 4)


# ---------------------------------------------------------------- properties, contexts, closing


def test_properties_come_from_the_device(driver: HardwareDriver) -> None:
    properties = driver.properties
    assert (properties.name, properties.capability, properties.multiprocessors) == ("fake", (9, 0), 10)
    assert (properties.threads, properties.blocks, properties.is_simulated) == (256, 160, False)


def test_making_one_leaves_the_callers_context_alone(calls: FakeCalls) -> None:
    driver = HardwareDriver(0, calls, Compiler())  # type: ignore[arg-type]
    assert calls.names == ["device", "retain_context", "push_context", "create_stream", "pop_context"]
    driver.close()


def test_the_context_is_made_current_once_on_a_thread(driver: HardwareDriver, calls: FakeCalls) -> None:
    driver.fill_zero(driver.allocate(64, None), 0, 64, None)
    driver.synchronize()
    assert calls.names.count("enter_context") == 1


def test_closing_gives_everything_back(calls: FakeCalls) -> None:
    driver = HardwareDriver(0, calls, Compiler())  # type: ignore[arg-type]
    memory = driver.allocate(3 * MIB, None)
    driver.upload(memory, 0, np.arange(100), None)
    event = driver.record(None, timing=True)
    stream = driver.create_stream()
    driver.record(stream)
    driver.close_stream(stream)
    del event
    driver.close()
    driver.close()
    assert calls.leaks == {}


def test_nothing_is_asked_of_a_closed_device(driver: HardwareDriver) -> None:
    driver.close()
    assert_raises(DeviceError, "allocating memory on cuda:0: the device has been closed", driver.allocate, 8, None)


def test_host_arrays_outlive_the_device(calls: FakeCalls) -> None:
    driver = HardwareDriver(0, calls, Compiler())  # type: ignore[arg-type]
    host = driver.host_array((4,), np.dtype(np.int64))
    host[:] = 7
    driver.close()
    assert host.tolist() == [7, 7, 7, 7]
    assert calls.leaks == {"host": 1, "contexts": 1}, "a context that ends takes its pinned memory along"


# ---------------------------------------------------------------- memory


def test_memory_is_used_again_without_asking_the_device(driver: HardwareDriver, calls: FakeCalls) -> None:
    for _ in range(10):
        driver.free(driver.allocate(1000, None), None)
    assert calls.names.count("allocate") == 1 and "free" not in calls.names
    assert driver.memory_stats()["allocations"] == 10


def test_streams_do_not_share_free_memory(driver: HardwareDriver, calls: FakeCalls) -> None:
    stream = driver.create_stream()
    driver.free(driver.allocate(11 * MIB, stream), stream)
    driver.allocate(11 * MIB, None)
    assert calls.names.count("allocate") == 2


def test_memory_of_a_closed_stream_serves_the_first_one(driver: HardwareDriver, calls: FakeCalls) -> None:
    stream = driver.create_stream()
    driver.free(driver.allocate(11 * MIB, stream), stream)
    driver.close_stream(stream)
    driver.allocate(11 * MIB, None)
    assert calls.names.count("allocate") == 1


def test_out_of_memory_waits_gives_back_what_is_idle_and_tries_again() -> None:
    calls = FakeCalls(memory=64 * MIB)
    driver = HardwareDriver(0, calls, Compiler())  # type: ignore[arg-type]
    driver.free(driver.allocate(40 * MIB, None), None)
    driver.allocate(50 * MIB, None)
    names = calls.names[calls.names.index("synchronize") :]
    assert names == ["synchronize", "free", "allocate"]
    assert driver.memory_stats()["out_of_memory"] == 0
    driver.close()
    assert calls.leaks == {}


def test_out_of_memory_uses_what_other_streams_freed() -> None:
    calls = FakeCalls(memory=64 * MIB)
    driver = HardwareDriver(0, calls, Compiler())  # type: ignore[arg-type]
    stream = driver.create_stream()
    driver.free(driver.allocate(10 * MIB, stream), stream)
    kept = driver.allocate(50 * MIB, None)
    assert driver.allocate(10 * MIB, None).size >= 10 * MIB
    assert kept.size == 50 * MIB
    driver.close()


def test_a_small_segment_is_tried_before_giving_up() -> None:
    calls = FakeCalls(memory=10 * MIB)
    driver = HardwareDriver(0, calls, Compiler())  # type: ignore[arg-type]
    assert driver.allocate(3 * MIB, None).size >= 3 * MIB
    assert [entry[1] for entry in calls.log if entry[0] == "allocate"] == [20 * MIB, 4 * MIB]
    driver.close()


def test_no_memory_at_all_says_what_was_asked_and_what_is_free() -> None:
    calls = FakeCalls(memory=32 * MIB)
    driver = HardwareDriver(0, calls, Compiler())  # type: ignore[arg-type]
    kept = driver.allocate(12 * MIB, None)
    with pytest.raises(DeviceMemoryError, match=f"allocating {30 * MIB} bytes on cuda:0: {20 * MIB} of {32 * MIB} bytes are free") as caught:
        driver.allocate(30 * MIB, None)
    assert (caught.value.asked, caught.value.free) == (30 * MIB, 20 * MIB)
    assert driver.memory_stats()["out_of_memory"] == 1
    driver.free(kept, None)
    driver.allocate(30 * MIB, None)  # nothing is left in a bad state
    driver.close()


def test_trimming_gives_idle_memory_back(driver: HardwareDriver, calls: FakeCalls) -> None:
    driver.free(driver.allocate(11 * MIB, None), None)
    driver.upload(driver.allocate(64, None), 0, np.zeros(8), None)
    driver.trim()
    assert driver.memory_stats()["reserved"] == 2 * MIB
    assert driver.memory_stats()["pinned"] == 0


def test_memory_of_others_is_kept_until_the_stream_has_come_past(deferred: tuple[HardwareDriver, FakeCalls]) -> None:
    driver, calls = deferred

    class Owner:
        pass

    owner = Owner()
    reference = weakref.ref(owner)
    memory = driver.adopt(4096, 64, owner)
    del owner
    driver.free(memory, None)
    driver.allocate(8, None)
    assert reference() is not None, "the device may still read it"
    driver.synchronize()
    assert reference() is None
    assert "free" not in calls.names


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_large_arrays_are_copied_once_as_soon_as_there_is_room(calls: FakeCalls, dtype: Any) -> None:
    """Later changes of the caller's array change nothing, whichever memory the pieces went through."""
    pytest.importorskip("numba_cuda")
    from aiograd.cuda.device import CudaDevice

    device = CudaDevice(HardwareDriver(0, calls, Compiler(), launch_blocking=False))  # type: ignore[arg-type]
    spare = device.driver.spare_array
    got: list[bool] = []

    def counted(nbytes: int) -> Any:
        found = spare(nbytes)
        got.append(found is not None)
        return found

    device.driver.spare_array = counted
    for round in range(3):
        got.clear()
        values = np.arange(3 * CHUNK // np.dtype(dtype).itemsize + 25).astype(dtype) + dtype(round)
        wanted = values.copy()
        x = device.from_host(values)
        values[...] = 77
        device.synchronize()
        assert np.array_equal(device.to_host(x), wanted)
        assert len(got) == 4 and (round == 0 or got[0])
    turned = np.asfortranarray(np.arange(1 << 20, dtype=np.float64).reshape(1 << 10, -1))
    got.clear()
    assert np.array_equal(device.to_host(device.from_host(turned)), turned) and got == []
    device.close()
    assert device.driver.spare_array(10) is None


@pytest.mark.parametrize("nbytes", [1, 1000, CHUNK, 2 * CHUNK + 13])
def test_what_goes_up_comes_down(driver: HardwareDriver, nbytes: int) -> None:
    sent = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)
    memory = driver.allocate(nbytes + 100, None)
    driver.upload(memory, 100, sent, None)
    received = np.empty_like(sent)
    driver.download(received, memory, 100, None)
    assert np.array_equal(sent, received)


def test_ordinary_memory_goes_up_through_pinned_memory_in_pieces(driver: HardwareDriver, calls: FakeCalls) -> None:
    driver.upload(driver.allocate(3 * CHUNK, None), 0, np.zeros(2 * CHUNK + 8, np.uint8), None)
    copies = [entry[1:] for entry in calls.log if entry[0] == "copy_to_device"]
    assert copies == [(CHUNK, "pinned"), (CHUNK, "pinned"), (8, "pinned")]


def test_pinned_blocks_are_not_touched_while_a_copy_reads_them(deferred: tuple[HardwareDriver, FakeCalls]) -> None:
    driver, calls = deferred
    memory = driver.allocate(64, None)
    driver.upload(memory, 0, np.full(8, 1, np.uint8), None)
    driver.upload(memory, 8, np.full(8, 2, np.uint8), None)
    calls.run()
    assert calls.bytes_at(memory.address, 16) == b"\1" * 8 + b"\2" * 8
    driver.upload(memory, 0, np.full(8, 3, np.uint8), None)
    assert calls.names.count("allocate_host") == 2, "the first is used again"


def test_a_host_array_is_filled_without_waiting(deferred: tuple[HardwareDriver, FakeCalls]) -> None:
    driver, calls = deferred
    memory = driver.allocate(64, None)
    driver.fill_zero(memory, 0, 64, None)
    host = driver.host_array((2, 4), np.dtype(np.float64))
    host.fill(5)
    driver.download(host, memory, 0, None)
    assert host[0, 0] == 5, "the device has not come to it"
    event = driver.record(None)
    assert not driver.is_done(event)
    driver.wait(event)
    assert not host.any()
    assert ("copy_to_host", 64, "pinned") in calls.log


def test_a_host_array_is_not_used_again_while_a_copy_writes_to_it(deferred: tuple[HardwareDriver, FakeCalls]) -> None:
    driver, calls = deferred
    memory = driver.allocate(64, None)
    host = driver.host_array((8,), np.dtype(np.float64))
    driver.download(host, memory, 0, None)
    address = host.ctypes.data
    del host
    assert driver.host_array((8,), np.dtype(np.float64)).ctypes.data != address
    calls.run()
    assert driver.host_array((8,), np.dtype(np.float64)).ctypes.data == address


def test_views_keep_a_host_array(driver: HardwareDriver) -> None:
    host = driver.host_array((4, 4), np.dtype(np.int32))
    address, view = host.ctypes.data, host[1:, ::2]
    del host
    gc.collect()
    assert driver.host_array((4, 4), np.dtype(np.int32)).ctypes.data != address
    view[:] = 1


def test_host_arrays_go_up_as_they_are(driver: HardwareDriver, calls: FakeCalls) -> None:
    host = driver.host_array((8,), np.dtype(np.float32))
    host[:] = np.arange(8)
    memory = driver.allocate(32, None)
    driver.upload(memory, 0, host, None)
    assert calls.names.count("copy_to_device") == calls.names.count("allocate_host") == 1
    assert calls.bytes_at(memory.address, 32) == host.tobytes()


def test_a_host_array_is_not_used_again_while_a_copy_reads_it(deferred: tuple[HardwareDriver, FakeCalls]) -> None:
    driver, calls = deferred
    memory = driver.allocate(64, None)
    host = driver.host_array((8,), np.dtype(np.float64))
    host[:] = 3
    driver.upload(memory, 0, host, None)
    del host
    driver.host_array((8,), np.dtype(np.float64))[:] = 4
    calls.run()
    assert calls.bytes_at(memory.address, 64) == np.full(8, 3.0).tobytes()


def test_copies_stay_within_their_memory(driver: HardwareDriver) -> None:
    memory = driver.allocate(512, None)
    with pytest.raises(DeviceError, match="copying to the device: bytes 505 to 513 of memory that has 512"):
        driver.upload(memory, 505, np.zeros(1), None)
    assert_raises(DeviceError, "copying to the host", lambda: driver.download(np.zeros(65), memory, 0, None))
    assert_raises(DeviceError, "filling memory", driver.fill_zero, memory, -1, 8, None)
    assert_raises(DeviceError, "copying: bytes 0 to 600", driver.copy, memory, 0, memory, 0, 600, None)


def test_copying_and_filling(driver: HardwareDriver, calls: FakeCalls) -> None:
    memory = driver.allocate(64, None)
    driver.upload(memory, 0, np.arange(8, dtype=np.uint8), None)
    driver.copy(memory, 16, memory, 2, 6, None)
    driver.fill_zero(memory, 0, 3, None)
    assert calls.bytes_at(memory.address, 8) == bytes([0, 0, 0, 3, 4, 5, 6, 7])
    assert calls.bytes_at(memory.address + 16, 6) == bytes([2, 3, 4, 5, 6, 7])
    driver.copy(memory, 0, memory, 0, 0, None)
    driver.fill_zero(memory, 0, 0, None)
    driver.upload(memory, 0, np.zeros(0), None)
    assert calls.names.count("copy") == calls.names.count("fill") == 1, "nothing is asked for nothing"


# ---------------------------------------------------------------- kernels


def test_a_kernel_is_compiled_once_for_each_type(driver: HardwareDriver, calls: FakeCalls) -> None:
    memory = driver.allocate(64, None)
    compiler: Any = driver._compiler
    for args in ((1, pointer(driver, memory)), (2, pointer(driver, memory, offset=8)), (3, pointer(driver, memory, np.float64))):
        driver.launch(kernel, (1, 1, 1), (32, 1, 1), args, None)
    driver.launch(another, (1, 1, 1), (32, 1, 1), (1, pointer(driver, memory)), None)
    assert [name for name, _ in compiler.compiled] == ["kernel", "kernel", "another"]
    assert [entry[0] for entry in calls.launched] == ["kernel1", "kernel1", "kernel2", "another3"]


def test_scalars_of_different_types_are_different_kernels(driver: HardwareDriver) -> None:
    compiler: Any = driver._compiler
    for value in (1, 1.0, True, np.float32(1), np.float16(1), np.int32(1), 2):
        driver.launch(kernel, (1, 1, 1), (1, 1, 1), (value,), None)
    assert len(compiler.compiled) == 6


def test_arguments_of_a_type_no_kernel_takes(driver: HardwareDriver) -> None:
    assert_raises(DeviceError, "complex128", lambda: driver.launch(kernel, (1, 1, 1), (1, 1, 1), (np.complex128(1),), None))
    assert_raises(DeviceError, "type str", driver.launch, kernel, (1, 1, 1), (1, 1, 1), ("x",), None)


def test_a_kernel_that_cannot_be_started_leaves_the_device_as_it_was(driver: HardwareDriver, calls: FakeCalls) -> None:
    calls.failures["launch"] = [1]
    with pytest.raises(DeviceError, match=r"kernel kernel on a grid of \(1, 70000, 1\) blocks") as caught:
        driver.launch(kernel, (1, 70000, 1), (1, 1, 1), (1,), None)
    assert not isinstance(caught.value, DeviceLostError)
    driver.launch(kernel, (1, 1, 1), (1, 1, 1), (1,), None)


def test_blocking_launches_name_the_kernel_that_failed() -> None:
    calls = FakeCalls()
    driver = HardwareDriver(0, calls, Compiler(), launch_blocking=True)  # type: ignore[arg-type]
    driver.launch(another, (1, 1, 1), (1, 1, 1), (1,), None)
    calls.failures["synchronize"] = [700]
    with pytest.raises(DeviceLostError, match="kernel kernel on a grid of .*700.*newest first: kernel, another.$"):
        driver.launch(kernel, (1, 1, 1), (1, 1, 1), (1,), None)
    driver.close()


# ---------------------------------------------------------------- streams and events


def test_events_are_used_again(driver: HardwareDriver, calls: FakeCalls) -> None:
    for _ in range(5):
        driver.record(None)
    timed = [driver.record(None, timing=True) for _ in range(2)]
    assert [entry[1] for entry in calls.log if entry[0] == "create_event"] == [False, True, True]
    assert driver.elapsed_ms(*timed) == 2.5


def test_an_event_that_is_done_is_not_asked_about_again(driver: HardwareDriver, calls: FakeCalls) -> None:
    event = driver.record(None)
    assert driver.is_done(event) and driver.is_done(event)
    driver.wait(event)
    driver.wait_for(None, event)
    assert calls.names.count("is_done") == 1 and "wait" not in calls.names and "wait_for" not in calls.names


def test_events_are_polled_on_any_thread_and_leave_its_context_alone(deferred: tuple[HardwareDriver, FakeCalls]) -> None:
    driver, calls = deferred
    event = driver.record(None)
    found = []
    thread = threading.Thread(target=lambda: found.append((driver.is_done(event), getattr(calls._current, "stack", None))))
    thread.start()
    thread.join()
    assert found == [(False, [])]


def test_streams_wait_for_events(deferred: tuple[HardwareDriver, FakeCalls]) -> None:
    driver, calls = deferred
    stream = driver.create_stream(-1)
    driver.wait_for(stream, driver.record(None))
    assert ("create_stream", -1) in calls.log
    assert ("wait_for", driver.stream_address(stream)) in calls.log
    calls.run()


def test_notify_calls_back_when_the_device_has_come_there(deferred: tuple[HardwareDriver, FakeCalls]) -> None:
    driver, calls = deferred
    called = threading.Event()
    driver.notify(None, driver.record(None), called.set)
    assert not called.is_set()
    calls.run()
    assert called.wait(10)


def test_notify_by_waiting_threads() -> None:
    calls = FakeCalls()
    driver = HardwareDriver(0, calls, Compiler(), wait_in_threads=True)  # type: ignore[arg-type]
    called = threading.Event()
    driver.notify(None, driver.record(None), called.set)
    assert called.wait(10)
    assert "call_on_host" not in calls.names
    driver.close()
    assert calls.leaks == {}


# ---------------------------------------------------------------- a lost device


def test_after_a_fault_everything_raises_the_same_error(driver: HardwareDriver, calls: FakeCalls) -> None:
    memory = driver.allocate(64, None)
    event = driver.record(None)
    driver.launch(kernel, (1, 1, 1), (1, 1, 1), (1,), None)
    calls.sticky = 700
    assert_raises(DeviceLostError, "used in this process any more. Kernels started last.*: kernel. Run with AIOGRAD_CUDA_SYNC=1", driver.synchronize)
    calls.sticky = None
    asked = len(calls.log)
    raised = []
    for again in (
        lambda: driver.allocate(8, None), lambda: driver.record(None), lambda: driver.wait(event), lambda: driver.is_done(event),
        lambda: driver.launch(kernel, (1, 1, 1), (1, 1, 1), (1,), None), lambda: driver.notify(None, event, lambda: None),
        lambda: driver.upload(memory, 0, np.zeros(1), None), lambda: driver.trim(),
    ):  # fmt: skip
        caught = assert_raises(DeviceLostError, None, again)
        raised.append(caught)
    assert len(set(map(id, raised))) == 1
    driver.free(memory, None)
    driver.close()
    assert len(calls.log) == asked, "a lost device is not asked for anything"


@pytest.mark.parametrize("name", ["allocate", "record", "copy_to_device", "allocate_host", "fill", "create_stream", "load"])
def test_a_call_that_fails_leaves_the_device_usable(driver: HardwareDriver, calls: FakeCalls, name: str) -> None:
    memory = driver.allocate(64, None)
    calls.failures[name] = [1]
    with pytest.raises(DeviceError, match="on cuda:0.* failed: on purpose") as caught:
        {
            "allocate": lambda: driver.allocate(30 * MIB, None),
            "record": lambda: driver.record(None),
            "copy_to_device": lambda: driver.upload(memory, 0, np.zeros(8), None),
            "allocate_host": lambda: driver.upload(memory, 0, np.zeros(8), None),
            "fill": lambda: driver.fill_zero(memory, 0, 8, None),
            "create_stream": driver.create_stream,
            "load": lambda: driver.launch(kernel, (1, 1, 1), (1, 1, 1), (1,), None),
        }[name]()
    assert not isinstance(caught.value, DeviceLostError)
    del caught  # its traceback holds what failed
    driver.upload(memory, 0, np.ones(8), None)
    driver.launch(kernel, (1, 1, 1), (1, 1, 1), (1,), None)
    driver.synchronize()
    driver.close()
    assert calls.leaks == {}


def test_those_who_wait_are_called_when_the_device_is_lost(deferred: tuple[HardwareDriver, FakeCalls]) -> None:
    driver, calls = deferred
    called = threading.Event()
    driver.notify(None, driver.record(None), called.set)
    calls.sticky = 719
    assert called.wait(10), "the device never comes to its host functions"
    calls.sticky = None
    assert_raises(DeviceLostError, "719", driver.synchronize)


# ---------------------------------------------------------------- matrix products


def test_products_are_offered_only_with_a_library(calls: FakeCalls, driver: HardwareDriver) -> None:
    assert not hasattr(driver, "gemm")


def test_products_go_to_the_library_with_the_handle_of_the_stream(calls: FakeCalls) -> None:
    asked: list[tuple[Any, ...]] = []

    class Blas:
        def gemm(self, *args: Any) -> None:
            asked.append(args)

        def forget(self, stream: Any) -> None:
            asked.append(("forget", stream))

        def close(self) -> None:
            asked.append(("close",))

    driver = HardwareDriver(0, calls, Compiler(), blas=lambda driver: Blas())  # type: ignore[arg-type]
    stream = driver.create_stream()
    driver.gemm(1, 2, 3, stream)
    driver.gemm(4, None)
    driver.close_stream(stream)
    driver.close()
    assert asked == [(1, 2, 3, stream), (4, driver._first), ("forget", stream), ("close",)]


def test_scratch_memory_is_ordinary() -> None:
    """The fake is what it says: bytes nobody wrote are 0xFF."""
    calls = FakeCalls()
    calls.enter_context("context")
    address = calls.allocate(16)
    assert ctypes.string_at(address, 16) == b"\xff" * 16
