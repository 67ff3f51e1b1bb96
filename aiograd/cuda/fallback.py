"""The host as a device's last resort: operations without a kernel are computed by numpy, on the device's thread.

The call returns at once, like any other: the shapes and dtypes of the result are found by running the function on stand-ins (ones, identity
matrices, index 0), then a job on the device's thread copies the arguments to the host, runs the function and copies the results back. Correct for
every numpy function with a result shape that follows from shapes, and slow; `CudaDevice.statistics` counts them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.cuda.array import CudaArray, check_same, device_of, empty
from aiograd.cuda.command import enqueue
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.driver.protocol import DeviceDriver
from aiograd.errors import DeviceError
from aiograd.running.trees import leaves_of, map_tree

#: types that numpy returns where a device returns an array: arrays, and scalars for arrays without axes
_RESULTS = (np.ndarray, np.generic)


def on_host(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``function(*args, **kwargs)`` by numpy on the host; arrays of the result become CudaArrays.

    Raises:
        DeviceMismatchError: arrays of several devices. DeviceError: the result is no array, so computing it would block.
        Exceptions of `function` for these shapes and dtypes.
    """
    sources: list[CudaArray] = leaves_of((args, kwargs), CudaArray)
    device = device_of(sources)
    check_same(device, name, sources)
    device.fell_back(name)
    with np.errstate(all="ignore"):
        stand_ins = {id(source): stand_in(source) for source in sources}
        outline_args, outline_kwargs = map_tree(lambda source: stand_ins[id(source)], (args, kwargs), CudaArray)
        outline = function(*outline_args, **outline_kwargs)
    promised: list[CudaArray] = []

    def promise(value: Any) -> CudaArray:
        promised.append(empty(device, value.shape, value.dtype))
        return promised[-1]

    result = map_tree(promise, outline, _RESULTS)
    if not promised:
        raise DeviceError(f"{name} on {device.name}: its result is no array, so its value would have to be waited for")
    args, kwargs = map_tree(np.ndarray.copy, (args, kwargs), np.ndarray)
    _enqueue(device, name, function, args, kwargs, sources, promised)
    return result


def _enqueue(
    device: DeviceCore, name: str, function: Callable[..., Any], args: Any, kwargs: Any, sources: list[CudaArray], promised: list[CudaArray]
) -> None:
    with device.lock:
        for source in sources:
            source.flush()

        def run(driver: DeviceDriver, stream: Any) -> None:
            with np.errstate(all="ignore"):
                host_args, host_kwargs = map_tree(lambda source: _fetch(driver, stream, source), (args, kwargs), CudaArray)
                driver.wait(driver.record(stream))
                results = map(np.asarray, leaves_of(function(*host_args, **host_kwargs), _RESULTS))
            for array, value in zip(promised, results, strict=True):
                if value.shape != array.shape or value.dtype != array.dtype:
                    found, wanted = f"{list(value.shape)}, {value.dtype}", f"{list(array.shape)}, {array.dtype}"
                    raise DeviceError(f"{name} on {device.name}: its result depends on values, not on shapes alone: found {found}; expected {wanted}")
                if value.nbytes:
                    driver.upload(array.buffer.memory, 0, np.ascontiguousarray(value), stream)

        reads = tuple({id(source.buffer): source.buffer for source in sources}.values())
        enqueue(device, name, run, reads, tuple(array.buffer for array in promised))


def _fetch(driver: DeviceDriver, stream: Any, array: CudaArray) -> np.ndarray[Any, Any]:
    """A host array with the layout of a device array; its values come with the stream."""
    buffer = array.buffer
    whole = np.empty(buffer.nbytes, np.uint8)
    if buffer.nbytes:
        driver.download(whole, buffer.memory, 0, stream)
    return np.ndarray(array.shape, array.dtype, whole.data, array.offset, array.strides)


def stand_in(array: CudaArray) -> np.ndarray[Any, Any]:
    """A host array of the same shape and dtype with harmless values: ones, identity matrices, index 0."""
    if array.size == 0:
        return np.empty(array.shape, array.dtype)
    if array.dtype.kind not in "fc":
        return np.zeros(array.shape, array.dtype)
    if array.ndim >= 2 and array.shape[-1] == array.shape[-2]:
        return np.broadcast_to(np.eye(array.shape[-1], dtype=array.dtype), array.shape).copy()
    return np.ones(array.shape, array.dtype)
