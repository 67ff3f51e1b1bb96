"""CudaArray: an array on a CUDA device that speaks numpy's protocols.

Its shape, dtype and strides are known at once, its values when the device got to them; every operation returns without waiting.

Note [Where operations run]
    ==============================  ==================================================================================================
    element-wise ufuncs             a pending expression (`aiograd.cuda.elementwise`), launched when the memory is needed
    views and basic indexing        arithmetic on strides: numpy makes the view of a stand-in without memory
    functions in `tables`           their kernels
    everything else                 the host, by way of the device's thread (`aiograd.cuda.fallback`)
    ==============================  ==================================================================================================

Note [Writes]
    A write to a buffer is a command like any other, so it comes in order. Pending expressions that read the buffer are launched before it.

Rejected: numba's device array (it allocates and frees by itself, on any thread, waiting for the device); a class per dtype or layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from aiograd.cuda import interop, tables
from aiograd.cuda.buffer import Buffer
from aiograd.cuda.command import enqueue
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.driver.staging import CHUNK
from aiograd.cuda.layout import contiguous_strides
from aiograd.cuda.stream_state import StreamState
from aiograd.cuda.view import BufferView
from aiograd.engine.run import loop_is_running
from aiograd.errors import DeviceError, DeviceMismatchError, NotReadyError
from aiograd.running.types import Shape

#: from how many bytes on an array of the host is copied piece by piece
_IN_PIECES = 1 << 20

#: numpy functions that ask for nothing but shapes and dtypes
_METADATA = frozenset({np.shape, np.ndim, np.size, np.result_type, np.can_cast, np.iscomplexobj, np.isrealobj})


class UnaskedCopyError(DeviceError):
    """Raised when numpy is about to read an array of a device as memory of the host."""


class CudaArray(BufferView, NDArrayOperatorsMixin):
    """An array on a `aiograd.cuda.device.CudaDevice`; made by the device and by operations on other such arrays.

    It takes the arguments of `BufferView`.
    """

    __slots__ = ()

    __aiograd_priority__ = 100

    @classmethod
    def make(cls, device: DeviceCore, shape: Shape, dtype: np.dtype[Any]) -> CudaArray:
        """An array with memory of its own, C-contiguous and not written yet."""
        strides = contiguous_strides(shape, dtype.itemsize)
        return cls(Buffer(device, math.prod(shape) * dtype.itemsize), 0, shape, strides, dtype, None)

    @classmethod
    def from_host(cls, device: DeviceCore, array: np.ndarray[Any, Any]) -> CudaArray:
        """An array with the values of a host array, which are copied at once: large ones into memory that the device reads, where some is free."""
        spare = getattr(device.driver, "spare_array", None)
        in_pieces = isinstance(array, np.ndarray) and array.nbytes >= _IN_PIECES and array.flags.c_contiguous and not array.dtype.hasobject
        host = array if spare is not None and in_pieces else np.array(array, order="C", copy=True)
        result = cls.make(device, host.shape, host.dtype)
        buffer = result.buffer
        device.uploads += 1
        if spare is not None and in_pieces:
            flat = host.reshape(-1).view(np.uint8)
            for start in range(0, flat.nbytes, CHUNK):
                part = flat[start : start + CHUNK]
                piece = spare(part.nbytes)
                if piece is None:
                    piece = part.copy()
                else:
                    piece[...] = part
                _upload(device, buffer, start, piece)
        elif host.nbytes:
            _upload(device, buffer, 0, host)
        return result

    def __repr__(self) -> str:
        state = "" if self.buffer.is_ready else ", pending"
        return f"CudaArray({self.device.name}, {list(self.shape)}, {self.dtype}{state})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    # ---------------------------------------------------------------- for the engine

    @property
    def __aiograd_device__(self) -> str:
        return self.buffer.device.name

    @property
    def __aiograd_stream__(self) -> Any:
        """The stream for the caller's work, for a node that is being recorded; see `DeviceCore.current_stream_state`."""
        return self.buffer.device.current_stream_state()

    def __aiograd_is_ready__(self) -> bool:
        """True if reading would not block; an array that could not be computed is ready, and raises."""
        if self.buffer.expression is not None:
            self.flush()  # so that asking again and again gets somewhere
        return self.buffer.is_ready

    async def __aiograd_wait__(self) -> None:
        """Wait until the data is there. Cancelling stops the waiting only: memory in use stays until the device is done with it.

        Raises:
            DeviceError: it could not be computed. DeviceLostError: the device failed.
        """
        self.flush()
        buffer = self.buffer
        if not buffer.is_ready:
            await self.device.thread.wait(lambda: buffer.writer)
        self._raise_failure()

    def _raise_failure(self) -> None:
        buffer = self.buffer
        if buffer.error is not None:
            raise buffer.error
        if buffer.writer is not None:
            stream_state, count = buffer.writer
            stream_state.is_done(count)  # raises where the device is lost

    def __aiograd_op__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = tables.ROW_KERNELS.get(op.name)
        if kernel is not None:
            result = kernel(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if op.name in tables.ROWS_ON_HOST:
            return tables.ARRAY_OPERATIONS.on_host(op.name, op.forward, args, kwargs)
        try:
            return op.forward(*args, **kwargs)
        except UnaskedCopyError:  # it is no composition of numpy functions
            return tables.ARRAY_OPERATIONS.on_host(op.name, op.forward, args, kwargs)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        for value in inputs:
            if value.__class__ is not CudaArray and not isinstance(value, (np.ndarray, np.generic, int, float, complex)):
                return NotImplemented
        result: Any = NotImplemented
        if method == "__call__":
            implementation = tables.FUNCTIONS.get(ufunc)
            if implementation is not None:
                result = implementation(*inputs, **kwargs)
            name = ufunc.__name__
        else:
            implementation = tables.METHODS.get((ufunc, method))
            if implementation is not None:
                result = implementation(*inputs, **kwargs)
            name = f"{ufunc.__name__}.{method}"
        if result is NotImplemented:
            result = tables.ARRAY_OPERATIONS.on_host(name, getattr(ufunc, method), inputs, kwargs)
        if out is None:
            return result
        (target,) = out
        target[...] = result
        return target

    def __array_function__(self, function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not all(issubclass(cls, (CudaArray, np.ndarray)) for cls in types):
            return NotImplemented
        if function in _METADATA:
            return function(*[_outline(value) for value in args], **kwargs)
        implementation = tables.FUNCTIONS.get(function)
        if implementation is not None:
            result = implementation(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return tables.ARRAY_OPERATIONS.on_host(function.__name__, function, args, kwargs)

    # ---------------------------------------------------------------- indexing, and the methods that forwards of rows use

    def __getitem__(self, index: Any) -> Any:
        return tables.ARRAY_OPERATIONS.getitem(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        tables.ARRAY_OPERATIONS.setitem(self, index, value)

    @property
    def T(self) -> Any:
        """Axes in reverse order."""
        return self.view(self.shape[::-1], self.strides[::-1])

    @property
    def real(self) -> Any:
        """The real parts."""
        return np.real(self)

    @property
    def imag(self) -> Any:
        """The imaginary parts."""
        return np.imag(self)

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> Any:
        """The elements in another shape: a view where there can be one."""
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)) else shape
        return tables.FUNCTIONS[np.reshape](self, wanted, order, copy=copy)

    def ravel(self) -> Any:
        """The elements in one axis."""
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> Any:
        """The axes in another order."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], (int, np.integer)) else axes
        return np.transpose(self, order or None)

    def swapaxes(self, axis1: int, axis2: int) -> Any:
        """Two axes exchanged."""
        return np.swapaxes(self, axis1, axis2)

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        """The elements with another dtype."""
        dtype = np.dtype(dtype)
        if dtype == self.dtype and not copy:
            return self
        return tables.ARRAY_OPERATIONS.cast(self, dtype)

    def copy(self) -> Any:
        """The elements in memory of their own, in C order."""
        return tables.ARRAY_OPERATIONS.cast(self, self.dtype)

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        """Sum along axes."""
        return np.sum(self, axis=axis, dtype=dtype, keepdims=keepdims)

    def contiguous(self) -> CudaArray:
        """Itself where its elements lie in C order, else a copy."""
        return self if self.is_contiguous else self.copy()

    # ---------------------------------------------------------------- memory

    def view(self, shape: Shape, strides: Shape, offset: int = 0, dtype: np.dtype[Any] | None = None) -> CudaArray:
        """Another array in the same memory.

        Args:
            shape, strides: elements per axis, and bytes between neighbours.
            offset: bytes from this array's first element.
            dtype: the dtype to read the bytes as; by default this array's.
        """
        base = self if self.base is None else self.base
        return CudaArray(self.buffer, self.offset + offset, tuple(shape), tuple(strides), dtype or self.dtype, base)

    # ---------------------------------------------------------------- values

    def to_host(self) -> np.ndarray[Any, Any]:
        """A copy of the values; waits for them.

        Raises:
            NotReadyError: they are pending and an event loop is running. DeviceError: they could not be computed, or are lost.
        """
        thread = self.device.thread
        if thread.is_current():
            return self.read()
        ready = self.__aiograd_is_ready__()
        if not ready and loop_is_running():
            raise NotReadyError(f"reading an array of {self.device.name} that is still being computed would block the loop: await it first")

        def start() -> tuple[np.ndarray[Any, Any], StreamState, CudaArray, int]:
            host, stream_state, whole = self._start_reading(finished=ready)
            count = stream_state.count
            return host, stream_state, whole, 0 if thread.is_soon_done(stream_state, count) else count

        started: tuple[np.ndarray[Any, Any], StreamState, CudaArray, int] = thread.submit(start, urgent=ready).result()
        host, stream_state, whole, count = started
        if count:
            thread.block(lambda: (stream_state, count))
        del whole, started  # in use until now
        stream_state.is_done(count)  # raises where the device is lost
        return host

    def read(self) -> np.ndarray[Any, Any]:
        """The values; on the device's thread only."""
        host, stream_state, _ = self._start_reading(finished=False)
        self.device.driver.wait(stream_state.mark())
        return host

    def _start_reading(self, *, finished: bool) -> tuple[np.ndarray[Any, Any], StreamState, CudaArray]:
        """A host array that has the values when the stream has come this far, and the objects that must live until then."""
        device = self.device
        self.flush()
        whole = self.contiguous()
        whole.flush()
        buffer = whole.buffer
        host = device.driver.host_array(whole.shape, whole.dtype)
        if buffer.error is not None:
            raise buffer.error
        device.downloads += 1
        stream_state = device.default_stream_state if buffer.writer is None else buffer.writer[0]
        if host.nbytes:
            if buffer.memory is None:
                raise DeviceError(f"reading an array of {device.name} that was never written")
            if finished and whole is self:
                stream_state = device.reading_stream_state()
            device.driver.download(host, buffer.memory, whole.offset, stream_state.handle)
            stream_state.count += 1
            buffer.used[stream_state] = stream_state.count
        return host, stream_state, whole

    def item(self) -> Any:
        """The only element; waits for it.

        Raises:
            NotReadyError: it is pending and an event loop is running.
        """
        return self.to_host().item()

    def __bool__(self) -> bool:
        return bool(self.to_host())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise UnaskedCopyError(
            f"an array of {self.device.name} was about to be copied to the host unasked; use the device's to_host(), or Tensor.to('cpu')"
        )

    # ---------------------------------------------------------------- other libraries

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return interop.cuda_array_interface(self)

    def __dlpack__(
        self, *, stream: Any = None, max_version: tuple[int, int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None
    ) -> Any:
        array = self.copy() if copy else self
        return interop.to_dlpack(array, stream=stream, max_version=max_version, dl_device=dl_device, is_copy=bool(copy))

    def __dlpack_device__(self) -> tuple[int, int]:
        return interop.dlpack_device(self)


def _upload(device: DeviceCore, buffer: Buffer, offset: int, host: np.ndarray[Any, Any]) -> None:
    enqueue(device, "upload", lambda driver, stream: driver.upload(buffer.memory, offset, host, stream), (), (buffer,))


def empty(device: DeviceCore, shape: Shape, dtype: Any) -> CudaArray:
    """A C-contiguous array that is not written yet."""
    return CudaArray.make(device, tuple(shape), np.dtype(dtype))


def zeros(device: DeviceCore, shape: Shape, dtype: Any) -> CudaArray:
    """A C-contiguous array of zeros."""
    array = empty(device, shape, dtype)
    if array.nbytes:
        buffer = array.buffer
        enqueue(device, "fill_zero", lambda driver, stream: driver.fill_zero(buffer.memory, 0, buffer.nbytes, stream), (), (buffer,))
    return array


def as_cuda(device: DeviceCore, value: Any, dtype: Any = None) -> CudaArray:
    """An array on the device: `value` itself, or a copy of a host array or scalar."""
    if not isinstance(value, CudaArray):
        return CudaArray.from_host(device, np.asarray(value, dtype))
    return value if dtype is None else value.astype(dtype, copy=False)


def bits(array: CudaArray) -> CudaArray:
    """The elements as unsigned integers of their size: one kernel copies every dtype. Complex ones of 16 bytes are pairs along a new last axis."""
    if array.itemsize == 16:
        return array.view((*array.shape, 2), (*array.strides, 8), 0, np.dtype(np.uint64))
    return array.view(array.shape, array.strides, 0, np.dtype(f"u{array.itemsize}"))


def device_of(*values: Any) -> DeviceCore:
    """The device of the first CudaArray among values, tuples and lists.

    Raises:
        DeviceError: there is none.
    """
    for value in values:
        if isinstance(value, CudaArray):
            return value.device
        if isinstance(value, (tuple, list)):
            for item in value:
                if isinstance(item, CudaArray):
                    return item.device
    raise DeviceError("an operation on a CUDA device was called without an array that lives on one")


def check_same(device: DeviceCore, what: str, values: Any) -> None:
    """Raise where an array lives on another device.

    Raises:
        DeviceMismatchError
    """
    for value in values:
        if value.__class__ is CudaArray and value.buffer.device is not device:
            raise DeviceMismatchError(f"{what}: arrays live on {device.name} and {value.device.name}. Move them to one device with .to().")


def _outline(value: Any) -> Any:
    """A stand-in with the shape and dtype, and the memory of one element."""
    return np.broadcast_to(np.zeros((), value.dtype), value.shape) if isinstance(value, CudaArray) else value
