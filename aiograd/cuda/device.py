"""CudaDevice: what the engine and the arrays see of a CUDA device. See `aiograd.devices` for what a device must offer."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, empty
from aiograd.cuda.buffer import Buffer
from aiograd.cuda.command import Command, Lane
from aiograd.cuda.driver.protocol import Driver, Properties
from aiograd.cuda.executor import DeviceThread
from aiograd.engine.run import loop_is_running
from aiograd.errors import DeviceError, DeviceMismatchError, NotReadyError
from aiograd.graph import current_node
from aiograd.ops.op import Fused
from aiograd.types import Array, Shape


@dataclass(frozen=True)
class CudaStatistics:
    """Figures of a device since it was first used."""

    #: commands queued for the device
    commands: int
    #: operations that had no kernel and were computed on the host
    host_fallbacks: int
    #: what those were, with how often
    fallbacks: dict[str, int]
    #: arrays copied from the host, and to it
    uploads: int
    downloads: int


class CudaDevice:
    """A device ``cuda:ordinal``; an `aiograd.devices.Device`.

    Args:
        driver: what talks to it.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.properties: Properties = driver.properties
        self._name = f"cuda:{driver.ordinal}"
        #: held while pending expressions are looked at or changed, and while commands are queued
        self.lock = threading.RLock()
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        self.thread = DeviceThread(f"aiograd-{self._name}", driver, self._lanes)
        self.default_lane = Lane(driver, None, "default")
        self._lanes.add(self.default_lane)
        #: the lane of the caller, where it chose one
        self.lane_of_caller: contextvars.ContextVar[Lane | None] = contextvars.ContextVar(f"aiograd-{self._name}", default=None)
        #: see `aiograd.cuda.generate.chain`
        self.plans: dict[Any, Any] = {}
        #: finished data is read on a lane of its own, behind nothing else
        self._reading: Lane | None = None
        self._commands = self._uploads = self._downloads = 0
        self._fallbacks: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<CudaDevice {self._name}: {self.properties.name}>"

    # ---------------------------------------------------------------- what the engine asks for

    @property
    def name(self) -> str:
        """``cuda:ordinal``."""
        return self._name

    @property
    def launches_ahead(self) -> bool:
        """Operations only queue work, so the rules of rows stay on the loop."""
        return True

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run on the device's thread, in order of submission."""
        return self.thread.submit(function)

    def fused(self, row: str) -> Fused | None:
        """The device's own kernels for a row."""
        return tables.FUSED.get(row)

    def update_parameters(self, kind: str, members: Sequence[tuple[Array, Array, Sequence[Array]]], options: Mapping[str, Any]) -> bool:
        """A step of an optimizer for many parameters in few launches; see `aiograd.devices.UpdatesParameters`."""
        return bool(tables.FUNCTIONS["update_parameters"](self, kind, members, options))

    def sum_of_squares(self, arrays: Sequence[Array]) -> Array | None:
        """See `aiograd.devices.ScalesGradients`."""
        return tables.FUNCTIONS["sum_of_squares"](self, arrays)

    def scaled(self, arrays: Sequence[Array], scale: Array) -> Sequence[Array] | None:
        """See `aiograd.devices.ScalesGradients`."""
        scaled: Sequence[Array] | None = tables.FUNCTIONS["scaled"](self, arrays, scale)
        return scaled

    def dropout_mask(self, seed: tuple[int, int], shape: Shape, p: float, dtype: Any) -> Array:
        """See `aiograd.devices.DrawsMasks`."""
        return tables.FUNCTIONS["dropout_mask"](self, seed, shape, p, dtype)

    def from_host(self, array: np.ndarray[Any, Any]) -> CudaArray:
        """A device array with the same values; those of `array` are copied at once."""
        host = np.array(array, order="C", copy=True)
        result = empty(self, host.shape, host.dtype)
        self._uploads += 1
        if host.nbytes:
            self.enqueue("upload", lambda driver, stream: driver.upload(result.buffer.memory, 0, host, stream), (), (result.buffer,))
        return result

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """A copy of the values; waits for them.

        Raises:
            NotReadyError: they are pending and an event loop is running. DeviceError: they could not be computed, or are lost.
            DeviceMismatchError: an array of another device.
        """
        if not isinstance(array, CudaArray) or array.device is not self:
            raise DeviceMismatchError(f"copying an array from {self._name} to the host: it lives elsewhere")
        if self.thread.is_current():
            return self.read(array)
        ready = array.__aiograd_is_ready__()
        if not ready and loop_is_running():
            raise NotReadyError(f"reading an array of {self._name} that is still being computed would block the loop: await it first")
        started: tuple[np.ndarray[Any, Any], Lane, CudaArray]
        started = self.thread.submit(lambda: self._start_reading(array, finished=ready), urgent=ready).result()
        host, lane, whole = started
        count = lane.count
        self.thread.block(lambda: (lane, count))
        del whole  # in use until now
        lane.is_done(count)  # raises where the device is lost
        return host

    # ---------------------------------------------------------------- what arrays and operations need

    def current_lane(self) -> Lane:
        """Where the caller's work goes: its stream, or that of the forward work of the node that is being run."""
        lane = self.lane_of_caller.get()
        if lane is not None:
            return lane
        node = current_node()
        recorded = None if node is None else getattr(node, "stream", None)
        return recorded if isinstance(recorded, Lane) and recorded.driver is self.driver else self.default_lane

    def new_lane(self, name: str, priority: int = 0) -> Lane:
        """Another stream; made on the device's thread."""
        lane = Lane(self.driver, self.thread.submit(lambda: self.driver.create_stream(priority)).result(), name)
        self._lanes.add(lane)
        return lane

    def enqueue(
        self,
        name: str,
        run: Callable[[Driver, Any], None],
        reads: tuple[Buffer, ...],
        writes: tuple[Buffer, ...],
        lane: Lane | None = None,
        node: Any = None,
    ) -> Command:
        """Queue a command; returns at once.

        Args:
            name: for messages.
            run: called on the device's thread, when every buffer has memory, with the driver and the handle of the stream.
            reads, writes: buffers that it uses.
            lane, node: where and for which node of the graph; by default those of the caller.
        """
        command = Command(name, run, reads, writes, lane or self.current_lane(), node or current_node())
        with self.lock:
            self._commands += 1
            command.lane.asked += 1
            for buffer in writes:
                buffer.last = command
            self.thread.enqueue(command)
        return command

    def before_write(self, buffer: Buffer) -> None:
        """Launch every pending expression that reads a buffer which is about to be written; the lock is held."""
        if buffer.readers:
            readers, buffer.readers = buffer.readers, []
            for reader in readers:
                expression = reader()
                if expression is not None:
                    expression.flush()

    def release(self, memory: Any, home: Lane | None, used: dict[Lane, int]) -> None:
        """Give memory back, behind everything that uses it; any thread, finalizers included."""

        def free() -> None:
            if home is not None:
                for lane, count in used.items():
                    home.follow(lane, count)
            self.driver.free(memory, None if home is None else home.handle)

        self.thread.release(free)

    def read(self, array: CudaArray) -> np.ndarray[Any, Any]:
        """The values; on the device's thread only."""
        host, lane, _ = self._start_reading(array, finished=False)
        self.driver.wait(lane.mark())
        return host

    def _start_reading(self, array: CudaArray, *, finished: bool) -> tuple[np.ndarray[Any, Any], Lane, CudaArray]:
        """A host array that has the values when the lane has come this far, and what must live until then."""
        array.flush()
        whole = array.contiguous()
        whole.flush()
        buffer = whole.buffer
        host = self.driver.host_array(whole.shape, whole.dtype)
        if buffer.error is not None:
            raise buffer.error
        self._downloads += 1
        lane = self.default_lane if buffer.writer is None else buffer.writer[0]
        if host.nbytes:
            if buffer.memory is None:
                raise DeviceError(f"reading an array of {self._name} that was never written")
            if finished and whole is array:
                lane = self._reading_lane()
            self.driver.download(host, buffer.memory, whole.offset, lane.handle)
            lane.count += 1
            buffer.used[lane] = lane.count
        return host, lane, whole

    def check_same(self, what: str, values: Any) -> None:
        """Raise where an array lives on another device.

        Raises:
            DeviceMismatchError
        """
        for value in values:
            if value.__class__ is CudaArray and value.buffer.device is not self:
                raise DeviceMismatchError(f"{what}: arrays live on {self._name} and {value.device.name}. Move them to one device with .to().")

    def fell_back(self, name: str) -> None:
        """Count an operation that is computed on the host."""
        with self.lock:
            self._fallbacks[name] = self._fallbacks.get(name, 0) + 1

    def statistics(self) -> CudaStatistics:
        """Figures as of now."""
        with self.lock:
            return CudaStatistics(self._commands, sum(self._fallbacks.values()), dict(self._fallbacks), self._uploads, self._downloads)

    def memory_stats(self) -> dict[str, int]:
        """Bytes and counts of the memory pool; see `aiograd.cuda.memory_stats`."""
        return self.driver.memory_stats()

    def synchronize(self) -> None:
        """Block until everything asked for so far is done.

        Raises:
            DeviceLostError: the device failed.
        """
        self.thread.submit(self.finish).result()

    def finish(self) -> None:
        """Wait for the device; on its thread only."""
        for lane in list(self._lanes):
            lane.mark()  # so that everything is known to be done afterwards
        self.driver.synchronize()

    def from_dlpack(self, source: Any) -> CudaArray:
        """The array of another library in the memory it has on this device; see `aiograd.cuda.importing`."""
        return tables.FUNCTIONS["from_dlpack"](self, source)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Do what is queued, end the thread, give everything back. Idempotent."""
        self.thread.close()
        self.driver.close()

    def _reading_lane(self) -> Lane:
        if self._reading is None:
            self._reading = Lane(self.driver, self.driver.create_stream(), "reading")
            self._lanes.add(self._reading)
        return self._reading

