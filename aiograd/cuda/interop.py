"""Arrays of a device for other libraries, and theirs for it, without copying: DLPack and ``__cuda_array_interface__``.

Note [Handing streams over]
    The work that fills an array may still be running when it is handed out. With DLPack the reader names the stream it will use, and that stream is
    made to wait; with the other protocol the array names its own stream and the reader waits for that. Either way no thread blocks, but the commands
    must have been given to the device: the caller waits until the device's thread has come that far, not until the work is done. In the other
    direction the roles change. The per-thread default stream is another one on each thread, so the device's thread cannot name the reader's: for
    that one it waits until the work is done.

Note [Afterwards]
    Later uses of the memory by the reader are not seen here: writing to an array that a node saved goes unnoticed. Memory is kept until the
    reader lets go of it; where it read on one of the device's two default streams, the memory is not used again before those
    are done.

Note [Simulated devices]
    Their memory is the host's, and DLPack says so: to other libraries such an array is one on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from aiograd.cuda.buffer import Buffer
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.dlpack import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, VERSION, Strided, make_capsule, open_capsule
from aiograd.cuda.layout import contiguous_strides
from aiograd.cuda.stream_state import StreamState
from aiograd.cuda.view import BufferView
from aiograd.errors import ArgumentError, DeviceError, DeviceMismatchError
from aiograd.running.types import Shape

#: the device's own two streams, as both protocols number them
_DEFAULT_STREAMS = (1, 2)
#: the second of them, which is the calling thread's own
PER_THREAD_STREAM = 2
#: a reader that orders its work itself
_NO_STREAM = -1


def dlpack_device(array: BufferView) -> tuple[int, int]:
    """Kind of device and its number, as DLPack has them."""
    return _device(array.device)


def to_dlpack(
    array: BufferView,
    *,
    stream: int | None = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    is_copy: bool = False,
) -> Any:
    """The DLPack capsule that ``__dlpack__`` returns.

    Args:
        stream: address of the reader's stream; None or 1 for the legacy default stream, 2 for the per-thread one, -1 for no synchronization.
        max_version: newest version of DLPack that the reader supports.
        dl_device: device on which the reader wants the array; it must be there already.
        is_copy: True if the memory belongs to the capsule alone.

    Raises:
        BufferError: the array cannot be had on that device without copying it over. ArgumentError: no such stream.
        DeviceError: the values could not be computed.
    """
    target = _device(array.device)
    if dl_device is not None and tuple(dl_device) != target:
        raise BufferError(f"__dlpack__ of an array of {array.device.name}: asked for on device {dl_device}, it is on {target}; use .to() first")
    if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int) or stream == 0 or stream < _NO_STREAM):
        raise ArgumentError(f"__dlpack__ with stream={stream!r}: expected None, 1, 2, -1 or the address of a stream (0 would be ambiguous)")
    reader = _NO_STREAM if target[0] == CPU else 1 if stream is None else stream
    address, stream_state = _given(array, reader)
    strided = Strided(address, array.shape, array.strides, array.dtype, target, array)
    released = None
    if reader in _DEFAULT_STREAMS:
        released = functools.partial(_follow_reader, array.buffer, stream_state, reader)
    return make_capsule(strided, max_version=max_version, is_copy=is_copy, released=released)


def cuda_array_interface(array: BufferView) -> dict[str, Any]:
    """The dict that ``__cuda_array_interface__`` returns, version 3.

    Raises:
        AttributeError: the device is simulated and has no device memory.
    """
    device = array.device
    if device.properties.is_simulated:
        raise AttributeError(f"{device.name} is simulated: its arrays have no __cuda_array_interface__")
    address, stream_state = _given(array, _NO_STREAM)
    driver: Any = device.driver
    return {
        "shape": array.shape,
        "typestr": array.dtype.str,
        "data": (address, False),
        "version": 3,
        "strides": None if array.is_contiguous else array.strides,
        "stream": driver.stream_address(stream_state.handle),
    }


def open_dlpack(device: DeviceCore, source: Any) -> Strided | np.ndarray[Any, Any]:
    """Take over an array that has ``__dlpack__``; a numpy array where it lies on the host.

    The device's current stream waits for what fills it.

    Raises:
        DeviceMismatchError: it is on another device. ArgumentError: no array.
    """
    try:
        kind, number = source.__dlpack_device__()
    except AttributeError:
        raise ArgumentError(f"from_dlpack({type(source).__name__}): it has no __dlpack_device__; expected an array") from None
    if kind in (CPU, CUDA_HOST):
        return np.from_dlpack(source)
    ours = _device(device)
    if kind not in (CUDA, CUDA_MANAGED) or ours != (CUDA, number):
        raise DeviceMismatchError(f"from_dlpack: the array is on device {(int(kind), number)}, {device.name} is {ours}")
    driver: Any = device.driver
    stream = driver.stream_address(device.current_stream_state().handle)
    try:
        capsule = source.__dlpack__(stream=stream, max_version=VERSION)
    except TypeError:  # from before there were versions
        capsule = source.__dlpack__(stream=stream)
    return open_capsule(capsule)


def open_cuda_array(device: DeviceCore, source: Any) -> tuple[Strided, int | None]:
    """An array that has ``__cuda_array_interface__``, and the address of the stream that fills it, if one is named.

    Raises:
        ArgumentError: it has none, or one that makes no sense.
    """
    described = getattr(source, "__cuda_array_interface__", None)
    if not isinstance(described, Mapping):
        raise ArgumentError(f"taking over a {type(source).__name__}: it has no __cuda_array_interface__")
    try:
        shape: Shape = tuple(int(extent) for extent in described["shape"])
        dtype = np.dtype(described["typestr"])
        address, is_read_only = described["data"]
        strides = described.get("strides")
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"taking over a {type(source).__name__}: its __cuda_array_interface__ cannot be read: {error}") from error
    if described.get("mask") is not None:
        raise ArgumentError(f"taking over a {type(source).__name__}: it has a mask, which aiograd's arrays have not")
    stream = described.get("stream")
    if stream == 0:
        raise ArgumentError(f"taking over a {type(source).__name__}: its __cuda_array_interface__ names stream 0, which would be ambiguous")
    if strides is None:
        strides = contiguous_strides(shape, dtype.itemsize)
    found = Strided(int(address or 0), shape, tuple(strides), dtype, _device(device), source, bool(is_read_only))
    return found, None if stream is None else int(stream)


def _device(device: DeviceCore) -> tuple[int, int]:
    return (CPU, 0) if device.properties.is_simulated else (CUDA, device.driver.ordinal)


def _given(array: BufferView, reader: int) -> tuple[int, StreamState]:
    """Address of the first element and the stream that fills the array, once the device has all its commands; `reader` waits for that stream."""
    device = array.device
    array.flush()

    def job() -> tuple[int, StreamState]:
        buffer = array.buffer
        if buffer.error is not None:
            raise buffer.error
        stream_state = device.default_stream_state if buffer.writer is None else buffer.writer[0]
        if buffer.memory is None:
            if buffer.nbytes:
                raise DeviceError(f"handing out an array of {device.name} that was never written")
            return 0, stream_state
        if reader != _NO_STREAM and buffer.writer is not None:
            driver: Any = device.driver
            if reader == PER_THREAD_STREAM:
                driver.wait(stream_state.mark())
            else:
                driver.wait_for(driver.foreign_stream(reader), stream_state.mark())
        return _address(buffer.memory) + array.offset, stream_state

    found: tuple[int, StreamState] = device.thread.submit(job).result()
    return found


def _address(memory: Any) -> int:
    if isinstance(memory, np.ndarray):
        return int(memory.ctypes.data)
    address = getattr(memory, "address", None)
    if address is None:
        raise DeviceError("handing out an array of a device that only compiles: it has no memory")
    return int(address)


def follow_foreign(driver: Any, stream_state: StreamState, address: int) -> None:
    """Make our stream wait for all present work of another library's; the device's thread only."""
    if address == PER_THREAD_STREAM:
        driver.synchronize()
    else:
        driver.wait_for(stream_state.handle, driver.record(driver.foreign_stream(address)))


def _follow_reader(buffer: Buffer, stream_state: StreamState, reader: int) -> None:
    """Make the stream wait for the work queued on a reader's stream; the memory is freed behind that. Any thread."""

    def job() -> None:
        follow_foreign(buffer.device.driver, stream_state, reader)
        stream_state.count += 1
        buffer.used[stream_state] = stream_state.count

    buffer.device.thread.release(job)
