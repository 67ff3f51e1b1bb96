"""ToyArray: an array whose values are computed later, by the thread of its device.

It is a numpy array behind a curtain: its shape and dtype are known at once, its values when the device got to them. Everything that
can be done with it is a kernel that the device runs in order.

Note [Outlines]
    What a kernel will return is found out by running it on stand-ins with the same shape, dtype and strides, so a call with shapes that do
    not fit raises at once, as on the host. Strides matter, since they decide whether a reshape is a view. On the device's own thread
    everything before has been computed, so there a kernel runs straight away and nothing is pending.

Note [Views share]
    A view refers to the array that owns the memory (``base``). Writes are kernels like any other, so they come in order; whoever asks
    whether a view's data is there also asks for the last write to its owner.

Rejected: computing at the call and only pretending to be pending (a test would find nothing); a thread per array.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from aiograd.engine.run import loop_is_running
from aiograd.errors import DeviceError, DeviceMismatchError, NotReadyError
from aiograd.running.trees import leaves_of, map_tree
from aiograd.running.types import Shape
from tests.toy_device.queue import Queue, wait_for

#: types that numpy returns where a device returns an array: arrays, and scalars for those of no axes
_RESULTS = (np.ndarray, np.generic)
#: numpy functions that ask for nothing but shapes and dtypes
_METADATA = frozenset({np.shape, np.ndim, np.size, np.result_type, np.can_cast, np.iscomplexobj, np.isrealobj})


class ArrayDevice(Protocol):
    """A `ToyDevice` as its arrays see it."""

    queue: Queue

    @property
    def name(self) -> str:
        """``kind:ordinal``."""

    def kernel_of(self, op: Any) -> Callable[..., Any] | None:
        """The kernel for a row of the op tables, None where it has none."""

    def enqueue(self, function: Callable[[], None]) -> Future[Any]:
        """Run a function on the device's thread, after what was queued before."""

    def compute(self, name: str, function: Callable[[], Any]) -> Any:
        """Run a kernel; on the device's thread only."""

    def check_alive(self, what: str) -> None:
        """Raise if the device is dead."""

    def allocated(self, size: int) -> None:
        """Count memory that an array owns."""

    def freed(self, size: int) -> None:
        """Count memory that an array no longer owns."""


class ToyArray(NDArrayOperatorsMixin):
    """An array on a `ToyDevice`; made by the device and by operations on other such arrays.

    Args:
        device: the device.
        shape: the extents.
        dtype: the dtype.
        strides: bytes from one element to the next, per axis.
        base: the array that owns the memory; None: this one.
    """

    __slots__ = ("owner_device", "shape", "dtype", "strides", "base", "_value", "_error", "_made", "_written", "_counted", "__weakref__")

    __aiograd_priority__ = 100

    def __init__(self, device: ArrayDevice, shape: Shape, dtype: np.dtype[Any], strides: Shape, base: ToyArray | None) -> None:
        self.owner_device = device
        self.shape = shape
        self.dtype = dtype
        self.strides = strides
        #: the array that owns the memory, None for one that owns its own
        self.base = base
        self._value: np.ndarray[Any, Any] | None = None
        self._error: BaseException | None = None
        #: the job that computes the value, None where there never was one
        self._made: Future[Any] | None = None
        #: the last job that writes to the memory
        self._written: Future[Any] | None = None
        self._counted = False

    def __del__(self) -> None:
        if self._counted:
            self.owner_device.freed(self.nbytes)

    def __repr__(self) -> str:
        state = "" if self.__aiograd_is_ready__() else ", pending"
        return f"ToyArray({self.owner_device.name}, {list(self.shape)}, {self.dtype}{state})"

    # ---------------------------------------------------------------- what can be known at once

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    # ---------------------------------------------------------------- what the engine asks for

    @property
    def __aiograd_device__(self) -> str:
        return self.owner_device.name

    def __aiograd_is_ready__(self) -> bool:
        """True if reading would not block; an array whose kernel failed is ready, and raises."""
        return all(job is None or job.done() for job in (self._made, self.owner._written))

    async def __aiograd_wait__(self) -> None:
        """Wait until the data is there. Cancelling stops the waiting only.

        Raises:
            DeviceError: it could not be computed.
        """
        for job in (self._made, self.owner._written):
            if job is not None:
                await wait_for(job, self.owner_device.queue)
        self.read()

    def __aiograd_op__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = self.owner_device.kernel_of(op)
        return NotImplemented if kernel is None else launch(op.name, kernel, args, kwargs)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        if method == "at" or not all(isinstance(value, (ToyArray, np.ndarray, np.generic, int, float, complex)) for value in inputs):
            return NotImplemented
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        result = launch(name, getattr(ufunc, method), inputs, kwargs)
        if out is None:
            return result
        (target,) = out
        target[...] = result
        return target

    def __array_function__(self, function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not all(issubclass(cls, (ToyArray, np.ndarray)) for cls in types):
            return NotImplemented
        if function in _METADATA:
            return function(*map_tree(stand_in, args, ToyArray), **map_tree(stand_in, kwargs, ToyArray))
        return launch(function.__name__, function, args, kwargs)

    # ---------------------------------------------------------------- indexing, and the methods that forwards of rows use

    def __getitem__(self, index: Any) -> Any:
        return launch("getitem", operator.getitem, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        device = self.owner_device
        outline: Any = map_tree(stand_in, (index, value), ToyArray)
        stand_in(self)[outline[0]] = outline[1]  # raises at once if it does not fit
        index, value = map_tree(np.ndarray.copy, (index, value), np.ndarray)

        def write() -> None:
            real = map_tree(ToyArray.get, (index, value), ToyArray)
            self.get()[real[0]] = real[1]

        owner = self.owner
        if device.queue.is_current():
            device.compute("setitem", write)
            return

        def job() -> None:
            try:
                device.compute("setitem", write)
            except BaseException as error:
                owner._error = error

        owner._written = device.queue.submit(job)

    @property
    def T(self) -> Any:
        """Axes in reverse order."""
        return launch("transpose", np.transpose, (self,), {})

    @property
    def real(self) -> Any:
        """The real parts."""
        return launch("real", np.real, (self,), {})

    def reshape(self, *shape: Any) -> Any:
        """The elements in another shape.

        Args:
            *shape: the extents, as ints or as one tuple.

        Returns:
            An array of the device, pending.
        """
        return launch("reshape", np.ndarray.reshape, (self, *shape), {})

    def transpose(self, *axes: Any) -> Any:
        """The axes in another order.

        Args:
            *axes: the axes, as ints or as one tuple; none: reversed.

        Returns:
            An array of the device, pending.
        """
        return launch("transpose", np.ndarray.transpose, (self, *axes), {})

    def swapaxes(self, axis1: int, axis2: int) -> Any:
        """Two axes exchanged.

        Args:
            axis1: the one axis.
            axis2: the other.

        Returns:
            An array of the device, pending.
        """
        return launch("swapaxes", np.ndarray.swapaxes, (self, axis1, axis2), {})

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        """The elements with another dtype.

        Args:
            dtype: the dtype.
            copy: as of numpy's method.

        Returns:
            An array of the device, pending.
        """
        return launch("astype", np.ndarray.astype, (self, dtype), {"copy": copy})

    def copy(self) -> Any:
        """The elements in memory of their own.

        Returns:
            An array of the device, pending.
        """
        return launch("copy", np.ndarray.copy, (self,), {})

    # ---------------------------------------------------------------- values

    @property
    def owner(self) -> ToyArray:
        """The array that owns the memory."""
        return self if self.base is None else self.base

    def own(self, value: np.ndarray[Any, Any]) -> None:
        """Take the computed value; called on the device's thread.

        Args:
            value: the values.
        """
        if self.base is None:
            self.owner_device.allocated(value.nbytes)
            self._counted = True
        self.strides = value.strides
        self._value = value

    def get(self) -> np.ndarray[Any, Any]:
        """The memory, on the device's own thread.

        Returns:
            A numpy array.

        Raises:
            DeviceError: it could not be computed.
        """
        error = self._error or self.owner._error
        if error is None and self._value is None and self._made is not None and self._made.done():
            error = self._made.exception()
        if error is not None:
            raise DeviceError(f"{self.owner_device.name}: the data was never computed: {error}") from error
        if self._value is None:
            raise DeviceError(f"{self.owner_device.name}: the data is not there yet")
        return self._value

    def read(self) -> np.ndarray[Any, Any]:
        """The memory, from anywhere: blocks until the data is there.

        Returns:
            A numpy array.

        Raises:
            NotReadyError: it is not, and an event loop is running. DeviceError: it could not be computed, or is lost.
        """
        device = self.owner_device
        device.check_alive("reading an array")
        if not device.queue.is_current():
            for job in (self._made, self.owner._written):
                if job is not None and not job.done():
                    if loop_is_running():
                        raise NotReadyError(f"reading an array of {device.name} that is still being computed would block the loop: await it first")
                    device.queue.wait(job)
        error = self._error
        if error is not None:
            raise error
        return self.get()

    def item(self) -> Any:
        """The only element.

        Returns:
            A Python number.
        """
        return self.read().item()

    def __bool__(self) -> bool:
        return bool(self.read())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise DeviceError(f"an array of {self.owner_device.name} was about to be copied to the host unasked; use the device's to_host()")


def launch(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Have the device compute ``function(*args, **kwargs)`` on numpy arrays; returns what numpy would, with ToyArrays for arrays.

    Raises:
        DeviceMismatchError: arrays of several devices. Whatever `function` raises for these shapes and dtypes.
    """
    sources: list[ToyArray] = leaves_of((args, kwargs), ToyArray)
    device = sources[0].owner_device
    for source in sources:
        if source.owner_device is not device:
            raise DeviceMismatchError(f"{name}: arrays live on {device.name} and {source.owner_device.name}")
    if device.queue.is_current():
        real = map_tree(ToyArray.get, map_tree(np.ndarray.copy, (args, kwargs), np.ndarray), ToyArray)
        result = device.compute(name, lambda: function(*real[0], **real[1]))
        return map_tree(lambda value: _finished(device, np.asarray(value), sources), result, _RESULTS)
    with np.errstate(all="ignore"):
        stand_ins = {id(source): stand_in(source) for source in sources}
        outline_args = map_tree(lambda source: stand_ins[id(source)], (args, kwargs), ToyArray)
        outline = function(*outline_args[0], **outline_args[1])
    promised: list[ToyArray] = []

    def promise(value: np.ndarray[Any, Any]) -> ToyArray:
        shared = next((source.owner for source in sources if np.may_share_memory(value, stand_ins[id(source)])), None)
        array = ToyArray(device, value.shape, value.dtype, value.strides, shared)
        promised.append(array)
        return array

    result = map_tree(lambda value: promise(np.asarray(value)), outline, _RESULTS)
    if not promised:
        raise DeviceError(f"{name} on {device.name}: its result is no array, so its value would have to be waited for")
    args, kwargs = map_tree(np.ndarray.copy, (args, kwargs), np.ndarray)
    made = device.enqueue(lambda: _fulfil(device, name, function, args, kwargs, promised))
    for array in promised:
        array._made = made
    return result


def _fulfil(device: ArrayDevice, name: str, function: Callable[..., Any], args: Any, kwargs: Any, promised: list[ToyArray]) -> None:
    """Compute what was promised; an exception becomes that of the arrays."""
    try:
        real = map_tree(ToyArray.get, (args, kwargs), ToyArray)
        results = map(np.asarray, leaves_of(device.compute(name, lambda: function(*real[0], **real[1])), _RESULTS))
        for array, value in zip(promised, results, strict=True):
            if value.shape != array.shape or value.dtype != array.dtype:
                found, wanted = f"{list(value.shape)}, {value.dtype}", f"{list(array.shape)}, {array.dtype}"
                raise DeviceError(f"kernel {name} on {device.name} returned {found}; expected {wanted}")
            array.own(value)
    except BaseException as error:
        while promised:
            promised.pop()._error = error  # whose traceback refers to this frame


def _finished(device: ArrayDevice, value: np.ndarray[Any, Any], sources: list[ToyArray]) -> ToyArray:
    """The result of a kernel that ran at once."""
    shared = next((source.owner for source in sources if np.may_share_memory(value, source.get())), None)
    array = ToyArray(device, value.shape, value.dtype, value.strides, shared)
    array.own(value)
    return array


def stand_in(array: ToyArray) -> np.ndarray[Any, Any]:
    """A host array of the same shape, dtype and strides, whose values are harmless: ones, identity matrices, index 0."""
    if array.size == 0:
        return np.empty(array.shape, array.dtype)
    low = sum(min(0, (extent - 1) * stride) for extent, stride in zip(array.shape, array.strides, strict=True))
    high = sum(max(0, (extent - 1) * stride) for extent, stride in zip(array.shape, array.strides, strict=True))
    buffer = np.zeros(high - low + array.itemsize, np.uint8)
    image: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, buffer, -low, array.strides)
    if array.dtype.kind in "fc":
        square = array.ndim >= 2 and array.shape[-1] == array.shape[-2] and 0 not in array.strides
        image[...] = np.eye(array.shape[-1]) if square else 1
    return image
