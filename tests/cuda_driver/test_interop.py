"""Handing arrays to other libraries and taking theirs: who waits for which stream, and who keeps the memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiograd.cuda.dlpack import CPU, CUDA, Strided, make_capsule, open_capsule
from aiograd.cuda.driver.hardware import HardwareDriver
from aiograd.cuda.interop import cuda_array_interface, dlpack_device, follow_foreign, open_cuda_array, open_dlpack, to_dlpack
from aiograd.cuda.stream_state import StreamState
from aiograd.errors import ArgumentError, DeviceError, DeviceMismatchError
from tests.cuda_driver.fake_calls import FakeCalls
from tests.support import assert_raises


class Thread:
    """The device's thread, which does everything at once."""

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future

    def release(self, function: Callable[[], None]) -> None:
        function()


class Array:
    """As much of a CudaArray as is asked for here."""

    def __init__(self, device: Any, host: np.ndarray[Any, Any], stream_state: StreamState) -> None:
        self.device, self.shape, self.strides, self.dtype = device, host.shape, host.strides, host.dtype
        self.offset = 64
        self.is_contiguous = host.flags.c_contiguous
        memory = device.driver.allocate(host.nbytes + 64, stream_state.handle)
        self.buffer = SimpleNamespace(
            device=device, memory=memory, nbytes=host.nbytes + 64, error=None, writer=(stream_state, 1), used={stream_state: 1}
        )
        stream_state.count = 1
        self.flushed = 0

    def flush(self) -> None:
        self.flushed += 1


@pytest.fixture
def calls() -> FakeCalls:
    return FakeCalls(deferred=True)


@pytest.fixture
def device(calls: FakeCalls) -> Iterator[Any]:
    driver = HardwareDriver(0, calls, lambda *args: None)  # type: ignore[arg-type]
    stream_state = StreamState(driver, None, "default")
    yield SimpleNamespace(
        driver=driver, properties=driver.properties, name="cuda:0", default_stream_state=stream_state, current_stream_state=lambda: stream_state,
        thread=Thread(),
    )  # fmt: skip
    calls.run()
    driver.close()


@pytest.fixture
def stream_state(device: Any) -> StreamState:
    return StreamState(device.driver, device.driver.create_stream(), "other")


@pytest.fixture
def array(device: Any, stream_state: StreamState) -> Array:
    return Array(device, np.zeros((3, 4), np.float32)[:, ::2], stream_state)


def waits(calls: FakeCalls) -> list[tuple[str, int]]:
    return [entry for entry in calls.log if entry[0] in ("record", "wait_for")]


@pytest.mark.parametrize(("asked", "reader"), [(None, 1), (1, 1), (94147767683472, 94147767683472)])
def test_the_readers_stream_waits_for_what_fills_the_array(
    calls: FakeCalls, stream_state: StreamState, array: Array, asked: Any, reader: int
) -> None:
    capsule = to_dlpack(array, stream=asked)  # type: ignore[arg-type]
    assert array.flushed == 1, "what is pending is launched first"
    assert waits(calls) == [("record", int(stream_state.handle)), ("wait_for", reader)]
    found = open_capsule(capsule)
    assert (found.address, found.shape, found.strides, found.device) == (array.buffer.memory.address + 64, (3, 2), (16, 8), (CUDA, 0))


def test_a_thread_s_own_default_stream_is_waited_for_on_the_host(calls: FakeCalls, stream_state: StreamState, array: Array) -> None:
    """On the device's thread its name would stand for another stream than the reader's."""
    found = open_capsule(to_dlpack(array, stream=2))  # type: ignore[arg-type]
    assert [name for name, *_ in calls.log if name in ("record", "wait", "wait_for", "synchronize")] == ["record", "wait"]
    used = array.buffer.used[stream_state]
    calls.log.clear()
    del found
    gc.collect()
    assert [name for name, *_ in calls.log if name in ("record", "wait", "wait_for", "synchronize")] == ["synchronize"]
    assert array.buffer.used[stream_state] == used + 1
    calls.log.clear()
    follow_foreign(array.device.driver, stream_state, 2)
    assert [name for name, *_ in calls.log] == ["synchronize"]


def test_a_reader_that_orders_its_work_itself(calls: FakeCalls, array: Array) -> None:
    to_dlpack(array, stream=-1)  # type: ignore[arg-type]
    assert waits(calls) == []


@pytest.mark.parametrize("stream", [0, -2, "x", True, 1.0])
def test_streams_that_are_none(array: Array, stream: Any) -> None:
    assert_raises(ArgumentError, "__dlpack__ with stream=", to_dlpack, array, stream=stream)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_the_memory_waits_for_the_readers_default_stream(calls: FakeCalls, stream_state: StreamState, array: Array, version: Any) -> None:
    found = open_capsule(to_dlpack(array, stream=1, max_version=version))  # type: ignore[arg-type]
    used = array.buffer.used[stream_state]
    calls.log.clear()
    del found
    gc.collect()
    assert waits(calls) == [("record", 1), ("wait_for", int(stream_state.handle))]
    assert array.buffer.used[stream_state] == stream_state.count == used + 1, "whoever frees the memory waits for that"


def test_other_devices_are_refused(array: Array) -> None:
    assert dlpack_device(array) == (CUDA, 0)  # type: ignore[arg-type]
    to_dlpack(array, stream=-1, dl_device=(CUDA, 0))  # type: ignore[arg-type]
    assert_raises(BufferError, r"asked for on device \(1, 0\), it is on \(2, 0\)", to_dlpack, array, dl_device=(CPU, 0))


def test_values_that_could_not_be_computed(array: Array) -> None:
    array.buffer.error = DeviceError("it failed")
    assert_raises(DeviceError, "it failed", to_dlpack, array)
    array.buffer.error, array.buffer.memory = None, None
    assert_raises(DeviceError, "never written", to_dlpack, array)


def test_cuda_array_interface_names_the_stream_that_fills_the_array(calls: FakeCalls, stream_state: StreamState, array: Array) -> None:
    described = cuda_array_interface(array)  # type: ignore[arg-type]
    assert described == {
        "shape": (3, 2), "typestr": "<f4", "data": (array.buffer.memory.address + 64, False), "version": 3, "strides": (16, 8),
        "stream": int(stream_state.handle),
    }  # fmt: skip
    assert waits(calls) == []
    array.is_contiguous = True
    assert cuda_array_interface(array)["strides"] is None  # type: ignore[arg-type]


def test_simulated_devices_are_the_host(device: Any, array: Array) -> None:
    device.properties = SimpleNamespace(is_simulated=True)
    array.buffer.memory = np.zeros(200, np.uint8)
    assert dlpack_device(array) == (CPU, 0)  # type: ignore[arg-type]
    assert open_capsule(to_dlpack(array)).address == array.buffer.memory.ctypes.data + 64  # type: ignore[arg-type]
    assert_raises(AttributeError, None, cuda_array_interface, array)


class Torch:
    """An array of a library on this device.

    Args:
        kind: what it says of its device.
        knows_versions: whether it takes ``max_version``.
    """

    def __init__(self, kind: tuple[int, int] = (CUDA, 0), *, knows_versions: bool = True) -> None:
        self.kind, self.knows_versions = kind, knows_versions
        self.asked: dict[str, Any] = {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind

    def __dlpack__(self, **asked: Any) -> Any:
        if not self.knows_versions and "max_version" in asked:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.asked = asked
        return make_capsule(Strided(4096, (2, 3), (12, 4), np.dtype("f4"), self.kind, self), max_version=asked.get("max_version"))


@pytest.mark.parametrize("knows_versions", [True, False])
def test_taking_over_an_array_lets_our_stream_wait(device: Any, knows_versions: bool) -> None:
    theirs = Torch(knows_versions=knows_versions)
    found = open_dlpack(device, theirs)
    assert isinstance(found, Strided) and (found.address, found.shape) == (4096, (2, 3))
    assert theirs.asked["stream"] == device.driver.stream_address(None)
    reference = weakref.ref(theirs)
    del theirs
    gc.collect()
    assert reference() is not None
    del found
    gc.collect()
    assert reference() is None


def test_arrays_of_the_host_and_of_other_devices(device: Any) -> None:
    host = np.arange(3.0)
    read = open_dlpack(device, host)
    assert isinstance(read, np.ndarray) and read.ctypes.data == host.ctypes.data
    assert_raises(DeviceMismatchError, r"the array is on device \(2, 1\), cuda:0 is \(2, 0\)", lambda: open_dlpack(device, Torch((CUDA, 1))))
    assert_raises(DeviceMismatchError, None, lambda: open_dlpack(device, Torch((10, 0))))
    assert_raises(ArgumentError, "no __dlpack_device__", open_dlpack, device, [1, 2])


def described(**changes: Any) -> Any:
    fields = {"shape": (2, 3), "typestr": "<f8", "data": (4096, False), "version": 3, "strides": None, **changes}
    return SimpleNamespace(__cuda_array_interface__=fields)


def test_reading_a_cuda_array_interface(device: Any) -> None:
    found, stream = open_cuda_array(device, described(stream=2))
    assert (found.address, found.shape, found.strides, found.dtype, stream) == (4096, (2, 3), (24, 8), np.dtype("f8"), 2)
    found, stream = open_cuda_array(device, described(strides=(8, 16), data=(4096, True)))
    assert (found.strides, found.is_read_only, stream) == ((8, 16), True, None)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (object(), "no __cuda_array_interface__"),
        (described(stream=0), "names stream 0"),
        (described(mask=object()), "a mask"),
        (described(typestr="nonsense"), "cannot be read"),
        (described(data=None), "cannot be read"),
    ],
)
def test_interfaces_that_make_no_sense(device: Any, source: Any, words: str) -> None:
    assert_raises(ArgumentError, words, open_cuda_array, device, source)
