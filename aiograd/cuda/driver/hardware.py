"""A CUDA device: `Bindings` for the calls, `DeviceMemory`, `Staging` for pinned memory, a compiler for its kernels.

Note [Failures]
    A call that fails leaves the device as it was and raises a DeviceError, except for errors that stay (an address out of range in a
    kernel, a fault of the memory): the driver repeats those for every later call in the process. From the first one on the device counts as
    lost, and everything but giving memory back raises the same DeviceLostError. Kernels run after the call that starts them returned, so
    the error names the kernels that were started last; with AIOGRAD_CUDA_SYNC=1 each is waited for, and the one that failed is named.

Note [Contexts]
    The device's primary context, which all libraries of the process share, is current on the device's thread. Events may be polled on
    any thread, which is left as it was found.

Rejected: raising the limits of a block's shared memory (kernels keep to what every device has).

Source: Driver API of CUDA 13.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from aiograd.cuda.driver.arguments import Arguments
from aiograd.cuda.driver.bindings import INVALID_CONTEXT, STICKY, Bindings, CallError
from aiograd.cuda.driver.completion import Completions, HostFunctionCompletions, WaitingThreads
from aiograd.cuda.driver.handles import EventHandle, Foreign
from aiograd.cuda.driver.memory import DeviceMemory
from aiograd.cuda.driver.pool import Block
from aiograd.cuda.driver.protocol import Pointer, Properties
from aiograd.cuda.driver.staging import CHUNK, Staging
from aiograd.errors import DeviceError, DeviceLostError

_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 16
#: how many of the kernels started last an error names
_REMEMBERED = 5


class Code(Protocol):
    """The result of a compiler."""

    @property
    def name(self) -> str: ...
    @property
    def cubin(self) -> bytes: ...


#: a kernel, the arguments of a launch and the device's capability -> machine code
Compiler = Callable[[Callable[..., None], tuple[Any, ...], tuple[int, int]], Code]


class HardwareDriver:
    """A `aiograd.cuda.driver.protocol.Driver` for a device that is there.

    Besides the protocol it has `host_array`, `spare_array`, `adopt`, `foreign_stream`, `stream_address`, and `gemm` where cuBLAS was found.

    Args:
        ordinal: number of the device.
        calls: the CUDA driver.
        compiler: makes machine code of kernels.
        blas: makes what multiplies matrices, given this driver; None: there is no such library.
        wait_in_threads: learn of completed work by blocking threads instead of host functions.
        launch_blocking: wait for each kernel; None takes AIOGRAD_CUDA_SYNC.

    Raises:
        CallError: there is no such device, or it cannot be used.
    """

    gemm: Callable[..., None]

    def __init__(
        self,
        ordinal: int,
        calls: Bindings,
        compiler: Compiler,
        *,
        blas: Callable[[HardwareDriver], Any] | None = None,
        wait_in_threads: bool = False,
        launch_blocking: bool | None = None,
    ) -> None:
        self.ordinal = ordinal
        self._calls = calls
        self._compiler = compiler
        self._launch_blocking = os.environ.get("AIOGRAD_CUDA_SYNC", "0") not in ("", "0") if launch_blocking is None else launch_blocking
        self._device = calls.device(ordinal)
        self.properties = _properties(calls, self._device)
        self._context = calls.retain_context(self._device)
        #: thread-local: set if the context is current on the calling thread
        self._thread = threading.local()
        self._memory = DeviceMemory(f"cuda:{ordinal}", calls, self._failure, self.synchronize, self.is_done)
        self._staging = Staging(calls.allocate_host, calls.free_host, self.is_done, self.wait)
        self._loaded: dict[tuple[Any, ...], tuple[Any, Arguments]] = {}
        self._recent: deque[str] = deque(maxlen=_REMEMBERED)
        self._lost: DeviceLostError | None = None
        #: events of collected objects, without and with timing
        self._spare: tuple[list[Any], list[Any]] = ([], [])
        self._closed = False
        calls.push_context(self._context)
        try:
            self._first = calls.create_stream(0)
        finally:
            calls.pop_context()
        name = f"aiograd-cuda:{ordinal}-completions"
        self._completions: Completions = (
            WaitingThreads(self.wait, name) if wait_in_threads else HostFunctionCompletions(calls.call_on_host, self.is_done, name)
        )
        self._blas = None if blas is None else blas(self)
        if self._blas is not None:
            self.gemm = self._multiply

    # ---------------------------------------------------------------- memory

    def allocate(self, nbytes: int, stream: Any) -> Block:
        """See `DeviceDriver.allocate`. Out of memory waits for the device once, gives back what lies in reserve, and tries again."""
        self._enter("allocating memory")
        return self._memory.allocate(nbytes, self.stream_address(stream))

    def free(self, memory: Any, stream: Any) -> None:
        """See `DeviceDriver.free`."""
        if self._closed:
            return
        if isinstance(memory, Block):
            self._memory.free(memory, self.stream_address(stream))
        elif self._lost is None:
            self._memory.let_go(memory, self.record(stream))

    def memory_stats(self) -> dict[str, int]:
        """See `DeviceDriver.memory_stats`; and ``pinned``, bytes of the host."""
        return {**self._memory.stats(), "pinned": self._staging.pinned}

    def trim(self) -> None:
        """See `DeviceDriver.trim`; waits for the device."""
        self.synchronize()
        self._memory.give_back(self.stream_address(None))
        self._staging.trim()

    def host_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An uninitialised host array that `download` and `upload` copy without waiting; pinned, unless it is very large.

        The memory goes back to a pool when the array and its views are gone and the copies are done.
        """
        self._enter("pinning host memory")
        host: np.ndarray[Any, Any] = self._guard("pinning host memory", self._staging.array, shape, dtype)
        return host

    def spare_array(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        """Bytes as of `host_array`, if there are some that nothing uses, for a thread that copies an array of the host; any thread, never waits."""
        if self._closed or self._lost is not None:
            return None
        try:
            return self._staging.spare(nbytes)
        except DeviceError:  # the device has failed: the copy will say so
            return None

    def adopt(self, address: int, nbytes: int, owner: Any) -> Foreign:
        """Memory that another library has on this device; `owner` keeps it alive, and is dropped when the last stream that uses it has come past."""
        return Foreign(address, nbytes, owner)

    def upload(self, memory: Any, offset: int, host: np.ndarray[Any, Any], stream: Any) -> None:
        """See `DeviceDriver.upload`. Ordinary memory is copied into pinned memory first, piece by piece."""
        self._enter("copying to the device")
        _check_range("copying to the device", memory, offset, host.nbytes)
        handle, source, target = self._stream(stream), host.ctypes.data, memory.address + offset
        lent = self._staging.lent(source)
        if lent is not None:
            self._guard("copying to the device", self._calls.copy_to_device, target, source, host.nbytes, handle)
            lent.event = self.record(stream)
            return
        for start in range(0, host.nbytes, CHUNK):
            size = min(CHUNK, host.nbytes - start)
            block = self._guard("pinning host memory", self._staging.take, size)
            event = None
            try:
                ctypes.memmove(block.address, source + start, size)
                self._guard("copying to the device", self._calls.copy_to_device, target + start, block.address, size, handle)
                event = self.record(stream)
            finally:
                self._staging.give(block, event)

    def download(self, host: np.ndarray[Any, Any], memory: Any, offset: int, stream: Any) -> None:
        """See `DeviceDriver.download`. Returns at once for a `host_array`, otherwise when the copy is done."""
        self._enter("copying to the host")
        _check_range("copying to the host", memory, offset, host.nbytes)
        if not host.nbytes:
            return
        target = host.ctypes.data
        self._guard("copying to the host", self._calls.copy_to_host, target, memory.address + offset, host.nbytes, self._stream(stream))
        lent = self._staging.lent(target)
        if lent is not None:
            lent.event = self.record(stream)

    def copy(self, target: Any, target_offset: int, source: Any, source_offset: int, nbytes: int, stream: Any) -> None:
        """See `DeviceDriver.copy`."""
        self._enter("copying")
        _check_range("copying", target, target_offset, nbytes)
        _check_range("copying", source, source_offset, nbytes)
        if nbytes:
            self._guard(
                "copying", self._calls.copy, target.address + target_offset, source.address + source_offset, nbytes, self._stream(stream)
            )

    def fill_zero(self, memory: Any, offset: int, nbytes: int, stream: Any) -> None:
        """See `DeviceDriver.fill_zero`."""
        self._enter("filling memory")
        _check_range("filling memory", memory, offset, nbytes)
        if nbytes:
            self._guard("filling memory", self._calls.fill, memory.address + offset, 0, nbytes, self._stream(stream))

    # ---------------------------------------------------------------- kernels

    def launch(
        self, kernel: Callable[..., None], grid: tuple[int, int, int], block: tuple[int, int, int], args: tuple[Any, ...], stream: Any
    ) -> None:
        """See `DeviceDriver.launch`."""
        self._enter("starting a kernel")
        key = (kernel, *[value.dtype if value.__class__ is Pointer else value.__class__ for value in args])
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._loaded[key] = self._load(kernel, args)
        function, arguments = loaded
        arguments.fill(args)
        self._recent.append(kernel.__name__)
        try:
            self._calls.launch(function, grid, block, self._stream(stream), arguments.parameters)
            if self._launch_blocking:
                self._calls.synchronize()
        except CallError as error:
            what = f"kernel {kernel.__name__} on a grid of {grid} blocks of {block} threads"
            raise self._failure(what, error) from error

    def _load(self, kernel: Callable[..., None], args: tuple[Any, ...]) -> tuple[Any, Arguments]:
        arguments = Arguments(args)
        code = self._compiler(kernel, args, self.properties.capability)
        return self._guard(f"loading kernel {kernel.__name__}", self._calls.load, code.cubin, code.name), arguments

    def _multiply(self, *args: Any) -> None:
        """``gemm(out, a, b, m, n, k, batch, (lda, trans_a, stride_a), (ldb, trans_b, stride_b), (ldc, stride_c), alpha, beta, stream)``.

        Row-major matrices ``out = alpha · op(a) @ op(b) + beta · out``; strides between matrices and rows in elements; see
        `aiograd.cuda.driver.cublas.Cublas.gemm`.
        """
        self._enter("multiplying matrices")
        *values, stream = args
        try:
            self._blas.gemm(*values, self._stream(stream))  # type: ignore[union-attr]
            if self._launch_blocking:
                self._calls.synchronize()
        except CallError as error:
            raise self._failure("multiplying matrices", error) from error

    # ---------------------------------------------------------------- streams and events

    def create_stream(self, priority: int = 0) -> Any:
        """See `DeviceDriver.create_stream`; lower numbers go first, as the CUDA driver has it."""
        self._enter("creating a stream")
        return self._guard("creating a stream", self._calls.create_stream, priority)

    def close_stream(self, stream: Any) -> None:
        """See `DeviceDriver.close_stream`."""
        if self._closed or self._lost is not None:
            return
        self._enter("closing a stream")
        if self._blas is not None:
            self._blas.forget(stream)
        self._memory.stream_closed(self.stream_address(stream), self.stream_address(None))
        self._guard("closing a stream", self._calls.destroy_stream, stream)

    def foreign_stream(self, address: int) -> Any:
        """A stream of another library, to be waited for and to wait."""
        return self._calls.foreign_stream(address)

    def stream_address(self, stream: Any) -> int:
        """The address of a stream, by which other libraries know it."""
        return int(self._stream(stream))

    def record(self, stream: Any, *, timing: bool = False) -> EventHandle:
        """See `DeviceDriver.record`."""
        self._enter("recording an event")
        spare = self._spare[timing]
        handle = spare.pop() if spare else self._guard("recording an event", self._calls.create_event, timing)
        event = EventHandle(handle, timing, spare)
        self._guard("recording an event", self._calls.record, handle, self._stream(stream))
        return event

    def wait_for(self, stream: Any, event: EventHandle) -> None:
        """See `DeviceDriver.wait_for`."""
        if not event.done:
            self._enter("waiting for an event")
            self._guard("waiting for an event", self._calls.wait_for, self._stream(stream), event.handle)

    def is_done(self, event: EventHandle) -> bool:
        """See `DeviceDriver.is_done`; any thread."""
        if event.done:
            return True
        if self._lost is not None:
            raise self._lost
        try:
            try:
                event.done = self._calls.is_done(event.handle)
            except CallError as error:
                if error.code != INVALID_CONTEXT:
                    raise
                self._calls.push_context(self._context)
                try:
                    event.done = self._calls.is_done(event.handle)
                finally:
                    self._calls.pop_context()
        except CallError as error:
            raise self._failure("polling an event", error) from error
        return event.done

    def elapsed_ms(self, start: EventHandle, end: EventHandle) -> float:
        """See `DeviceDriver.elapsed_ms`."""
        self._enter("measuring time")
        elapsed: float = self._guard("measuring time", self._calls.elapsed_ms, start.handle, end.handle)
        return elapsed

    def wait(self, event: EventHandle) -> None:
        """See `DeviceDriver.wait`."""
        if not event.done:
            self._enter("waiting for the device")
            self._guard("waiting for the device", self._calls.wait, event.handle)
            event.done = True

    def notify(self, stream: Any, event: EventHandle, callback: Callable[[], None]) -> None:
        """See `DeviceDriver.notify`."""
        self._enter("waiting for the device")
        self._guard("waiting for the device", self._completions.notify, self._stream(stream), event, callback)

    def synchronize(self) -> None:
        """See `DeviceDriver.synchronize`."""
        self._enter("waiting for the device")
        self._guard("waiting for the device", self._calls.synchronize)
        self._memory.reap()

    def close(self) -> None:
        """See `DeviceDriver.close`. Host arrays that are still in use stay valid."""
        if self._closed:
            return
        if self._lost is None:
            try:
                self.synchronize()
            except DeviceError:
                self._lost = self._lost or DeviceLostError(f"cuda:{self.ordinal} failed while it was closed")
        self._completions.close()
        if self._lost is None:
            self._return_everything()
        self._closed = True

    def _return_everything(self) -> None:
        if self._blas is not None:
            self._blas.close()
        self._memory.close()
        self._staging.close()
        for handle in (*self._spare[False], *self._spare[True]):
            self._calls.destroy_event(handle)
        self._calls.destroy_stream(self._first)
        if not self._staging.pinned:
            self._calls.release_context(self._device)

    # ---------------------------------------------------------------- within

    def _stream(self, stream: Any) -> Any:
        return self._first if stream is None else stream

    def _enter(self, what: str) -> None:
        """Prepare the calling thread for calls of the driver; raise if the device is lost or closed."""
        if self._lost is not None:
            raise self._lost
        if self._closed:
            raise DeviceError(f"{what} on cuda:{self.ordinal}: the device has been closed")
        if not getattr(self._thread, "is_ready", False):
            self._calls.enter_context(self._context)
            self._thread.is_ready = True

    def _guard(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except CallError as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: CallError) -> DeviceError:
        if error.code not in STICKY:
            return DeviceError(f"{what} on cuda:{self.ordinal}: {error}")
        if self._lost is None:
            kernels = ", ".join(reversed(self._recent)) or "none"
            advice = "" if self._launch_blocking else " Run with AIOGRAD_CUDA_SYNC=1 to learn which."
            self._lost = DeviceLostError(
                f"{what} on cuda:{self.ordinal}: {error}. The device cannot be used in this process any more. "
                f"Kernels started last, the newest first: {kernels}.{advice}"
            )
        return self._lost


def _properties(calls: Bindings, device: Any) -> Properties:
    multiprocessors = calls.attribute("MULTIPROCESSOR_COUNT", device)
    return Properties(
        name=calls.name(device),
        capability=(calls.attribute("COMPUTE_CAPABILITY_MAJOR", device), calls.attribute("COMPUTE_CAPABILITY_MINOR", device)),
        total_memory=calls.total_memory(device),
        multiprocessors=multiprocessors,
        shared_memory=calls.attribute("MAX_SHARED_MEMORY_PER_BLOCK", device),
        threads=_THREADS,
        blocks=multiprocessors * _BLOCKS_PER_MULTIPROCESSOR,
        is_simulated=False,
    )


def _check_range(what: str, memory: Any, offset: int, nbytes: int) -> None:
    if offset < 0 or offset + nbytes > memory.size:
        raise DeviceError(f"{what}: bytes {offset} to {offset + nbytes} of memory that has {memory.size}")
