"""The host as a device's last resort: operations without a kernel are computed by numpy, on the device's thread.

The call returns at once, like any other: what shapes and dtypes come out is found by running the function on stand-ins (ones, identity
matrices, index 0), then a job on the device's thread copies the arguments to the host, runs the function and copies the results back. Correct for
everything that numpy can do whose result's shape follows from shapes, and slow; `CudaDevice.statistics` counts them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, device_of, empty
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.driver.protocol import Driver
from aiograd.errors import DeviceError


def on_host(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What numpy would return for ``function(*args, **kwargs)``, with CudaArrays for arrays.

    Raises:
        DeviceMismatchError: arrays of several devices. DeviceError: the result is no array, so its value would have to be waited for.
        Whatever `function` raises for these shapes and dtypes.
    """
    sources: list[CudaArray] = []
    _map((args, kwargs), sources.append)
    device = device_of(sources)
    device.check_same(name, sources)
    device.fell_back(name)
    with np.errstate(all="ignore"):
        stand_ins = {id(source): stand_in(source) for source in sources}
        outline_args, outline_kwargs = _map((args, kwargs), lambda source: stand_ins[id(source)])
        outline = function(*outline_args, **outline_kwargs)
    promised: list[CudaArray] = []

    def promise(value: np.ndarray[Any, Any]) -> CudaArray:
        promised.append(empty(device, value.shape, value.dtype))
        return promised[-1]

    result = _each(outline, promise)
    if not promised:
        raise DeviceError(f"{name} on {device.name}: its result is no array, so its value would have to be waited for")
    args, kwargs = _map((args, kwargs), lambda source: source, lambda value: value.copy() if isinstance(value, np.ndarray) else value)
    _enqueue(device, name, function, args, kwargs, sources, promised)
    return result


tables.FUNCTIONS["host"] = on_host


def _enqueue(
    device: CudaDevice, name: str, function: Callable[..., Any], args: Any, kwargs: Any, sources: list[CudaArray], promised: list[CudaArray]
) -> None:
    with device.lock:
        for source in sources:
            source.flush()

        def run(driver: Driver, stream: Any) -> None:
            with np.errstate(all="ignore"):
                host_args, host_kwargs = _map((args, kwargs), lambda source: _fetch(driver, stream, source))
                driver.wait(driver.record(stream))
                results: list[np.ndarray[Any, Any]] = []
                _each(function(*host_args, **host_kwargs), results.append)
            for array, value in zip(promised, results, strict=True):
                if value.shape != array.shape or value.dtype != array.dtype:
                    found, wanted = f"{list(value.shape)}, {value.dtype}", f"{list(array.shape)}, {array.dtype}"
                    raise DeviceError(f"{name} on {device.name}: its result depends on values, not on shapes alone: found {found}; expected {wanted}")
                if value.nbytes:
                    driver.upload(array.buffer.memory, 0, np.ascontiguousarray(value), stream)

        reads = tuple({id(source.buffer): source.buffer for source in sources}.values())
        device.enqueue(name, run, reads, tuple(array.buffer for array in promised))


def _fetch(driver: Driver, stream: Any, array: CudaArray) -> np.ndarray[Any, Any]:
    """A host array with the layout of a device array, whose values come with the stream."""
    buffer = array.buffer
    whole = np.empty(buffer.nbytes, np.uint8)
    if buffer.nbytes:
        driver.download(whole, buffer.memory, 0, stream)
    return np.ndarray(array.shape, array.dtype, whole.data, array.offset, array.strides)


def stand_in(array: CudaArray) -> np.ndarray[Any, Any]:
    """A host array of the same shape and dtype, whose values are harmless: ones, identity matrices, index 0."""
    if array.size == 0:
        return np.empty(array.shape, array.dtype)
    if array.dtype.kind not in "fc":
        return np.zeros(array.shape, array.dtype)
    if array.ndim >= 2 and array.shape[-1] == array.shape[-2]:
        return np.broadcast_to(np.eye(array.shape[-1], dtype=array.dtype), array.shape).copy()
    return np.ones(array.shape, array.dtype)


def _map(value: Any, of_array: Callable[[CudaArray], Any], of_other: Callable[[Any], Any] | None = None) -> Any:
    """`value` with every CudaArray in its tuples, lists, dicts and slices replaced."""
    cls = value.__class__
    if cls is CudaArray:
        return of_array(value)
    if cls is tuple or cls is list:
        return cls(_map(item, of_array, of_other) for item in value)
    if cls is dict:
        return {key: _map(item, of_array, of_other) for key, item in value.items()}
    if cls is slice:
        return slice(*[_map(item, of_array, of_other) for item in (value.start, value.stop, value.step)])
    return value if of_other is None else of_other(value)


def _each(value: Any, of_array: Callable[[np.ndarray[Any, Any]], Any]) -> Any:
    """What a function returned, with its arrays (and scalars that stand for arrays of no axes) replaced."""
    if isinstance(value, (np.ndarray, np.generic)):
        return of_array(np.asarray(value))
    if isinstance(value, tuple):
        items = [_each(item, of_array) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_each(item, of_array) for item in value]
    return value
