"""The calls of the CUDA driver that aiograd makes, one method each, through NVIDIA's cuda-bindings.

This is the seam at which tests put a device made of ordinary memory. Nothing is decided here: handles and addresses in, handles and
addresses out, and `CallError` where a call says no.

Rejected: cuda.core's objects for streams, events and memory (their finalizers call the driver on whichever thread drops them, and memory
of theirs is freed where the garbage collector happens to run); the driver's library through ctypes (the names of versioned entry points
and their types are NVIDIA's to keep), but for host functions: cuda-bindings 12.9 puts Python code that takes the interpreter's lock around
each, on the driver's own thread.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

#: results of calls that are told apart
OUT_OF_MEMORY = 2
INVALID_CONTEXT = 201
NOT_READY = 600
#: after these nothing works any more in this process: the context holds an error that every later call repeats
STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999})

_NON_BLOCKING_STREAM = 1
_BLOCKING_EVENT = 1
_EVENT_WITHOUT_TIMING = 2
_PORTABLE_HOST_MEMORY = 1


class CallError(RuntimeError):
    """A call of the CUDA driver failed.

    Attributes:
        call: its name.
        code: CUresult as a number.
    """

    def __init__(self, call: str, code: int, text: str = "") -> None:
        super().__init__(f"{call} failed: {text or 'error'} ({code})")
        self.call = call
        self.code = code


class Bindings:
    """The driver's calls. Creating one loads the driver's library and initialises it.

    Raises:
        CallError: the driver could not be initialised.
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._launch = driver.cuLaunchKernel
        self._query = driver.cuEventQuery
        self._record = driver.cuEventRecord
        self._attributes = driver.CUdevice_attribute
        self._call_on_host = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
        self._call_on_host.argtypes = (ctypes.c_void_p,) * 3
        self._call("cuInit", 0)

    # ---------------------------------------------------------------- devices and contexts

    def device(self, ordinal: int) -> Any:
        """The device of a number."""
        return self._call("cuDeviceGet", ordinal)

    def name(self, device: Any) -> str:
        """The name of the device, as the driver reports it."""
        name: bytes = self._call("cuDeviceGetName", 128, device)
        return name.split(b"\0")[0].decode()

    def attribute(self, name: str, device: Any) -> int:
        """A property of a device, by the driver's name without its prefix, such as ``MULTIPROCESSOR_COUNT``."""
        return int(self._call("cuDeviceGetAttribute", getattr(self._attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    def total_memory(self, device: Any) -> int:
        """The memory of a device in bytes."""
        return int(self._call("cuDeviceTotalMem", device))

    def retain_context(self, device: Any) -> Any:
        """The context that all libraries in the process share."""
        return self._call("cuDevicePrimaryCtxRetain", device)

    def release_context(self, device: Any) -> None:
        """Undo `retain_context`."""
        self._call("cuDevicePrimaryCtxRelease", device)

    def enter_context(self, context: Any) -> None:
        """Make a context the calling thread's."""
        self._call("cuCtxSetCurrent", context)

    def push_context(self, context: Any) -> None:
        """Make a context the calling thread's until `pop_context`."""
        self._call("cuCtxPushCurrent", context)

    def pop_context(self) -> None:
        """Undo `push_context`."""
        self._call("cuCtxPopCurrent")

    def synchronize(self) -> None:
        """Wait for everything in the thread's context."""
        self._call("cuCtxSynchronize")

    # ---------------------------------------------------------------- memory

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int) -> int:
        """Address of so many bytes of the device."""
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """Undo `allocate`; waits for the device."""
        self._call("cuMemFree", address)

    def allocate_host(self, nbytes: int) -> int:
        """Address of host memory that the device reads and writes by itself."""
        return int(self._call("cuMemHostAlloc", nbytes, _PORTABLE_HOST_MEMORY))

    def free_host(self, address: int) -> None:
        """Undo `allocate_host`."""
        self._call("cuMemFreeHost", address)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy from an address of the host to the device."""
        self._call("cuMemcpyHtoDAsync", target, source, nbytes, stream)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy from the device to an address of the host; if that memory is not pinned, returns when the copy is done."""
        self._call("cuMemcpyDtoHAsync", target, source, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy within the device."""
        self._call("cuMemcpyDtoDAsync", target, source, nbytes, stream)

    def fill(self, target: int, value: int, nbytes: int, stream: Any) -> None:
        """Set bytes."""
        self._call("cuMemsetD8Async", target, value, nbytes, stream)

    # ---------------------------------------------------------------- streams and events

    def create_stream(self, priority: int) -> Any:
        """A stream that does not wait for the legacy default stream."""
        return self._call("cuStreamCreateWithPriority", _NON_BLOCKING_STREAM, priority)

    def foreign_stream(self, address: int) -> Any:
        """The stream of another library; it is not closed here."""
        return self._driver.CUstream(address)

    def destroy_stream(self, stream: Any) -> None:
        """Destroy a stream."""
        self._call("cuStreamDestroy", stream)

    def create_event(self, timing: bool) -> Any:
        """An event on which waiting does not spin."""
        return self._call("cuEventCreate", _BLOCKING_EVENT if timing else _BLOCKING_EVENT | _EVENT_WITHOUT_TIMING)

    def destroy_event(self, event: Any) -> None:
        """Destroy an event."""
        self._call("cuEventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        """Put an event behind everything asked of a stream."""
        (status,) = self._record(event, stream)
        if status != 0:
            raise self._error("cuEventRecord", status)

    def is_done(self, event: Any) -> bool:
        """True if the device has come to an event."""
        (status,) = self._query(event)
        if status == 0:
            return True
        if status == NOT_READY:
            return False
        raise self._error("cuEventQuery", status)

    def wait(self, event: Any) -> None:
        """Block until the device has come to an event; other Python threads run."""
        self._call("cuEventSynchronize", event)

    def wait_for(self, stream: Any, event: Any) -> None:
        """Make a stream wait for an event."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two events with timing."""
        return float(self._call("cuEventElapsedTime", start, end))

    def call_on_host(self, stream: Any, function: int, argument: int) -> None:
        """Make the driver's thread call a C function ``void (void *)`` by its address when a stream has come this far."""
        status = self._call_on_host(int(stream), function, argument)
        if status != 0:
            raise self._error("cuLaunchHostFunc", self._driver.CUresult(status))

    # ---------------------------------------------------------------- kernels

    def load(self, cubin: bytes, name: str) -> Any:
        """A kernel of a compiled module, which stays loaded."""
        image = np.frombuffer(cubin, np.uint8)  # the driver copies it
        module = self._call("cuModuleLoadData", image.ctypes.data)
        return self._call("cuModuleGetFunction", module, name.encode())

    def launch(self, function: Any, grid: tuple[int, int, int], block: tuple[int, int, int], stream: Any, parameters: int) -> None:
        """Start a kernel; `parameters` is the address of an array of addresses, which are read before this returns."""
        (status,) = self._launch(function, *grid, *block, 0, stream, parameters, 0)
        if status != 0:
            raise self._error("cuLaunchKernel", status)

    # ---------------------------------------------------------------- how calls fail

    def _call(self, name: str, *args: Any) -> Any:
        status, *results = getattr(self._driver, name)(*args)
        if status != 0:
            raise self._error(name, status)
        return None if not results else results[0] if len(results) == 1 else results

    def _error(self, name: str, status: Any) -> CallError:
        failed, text = self._driver.cuGetErrorString(status)
        reason = text.decode() if failed == 0 and text else ""
        return CallError(name, int(status), f"{reason} [{getattr(status, 'name', status)}]".strip())
