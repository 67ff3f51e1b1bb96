"""Commands: units of work that the thread of a device gives to the device, each on a stream.

Note [Ordering between streams]
    In PyTorch the user has to say that a tensor made on one stream is used on another. Here each buffer remembers on
    which stream it was last written and used. A command on another stream first makes its stream wait for an event behind those, unless it
    has waited for a later one already; so a program with several streams computes the same as with one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiograd.cuda.buffer import Buffer
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.driver.protocol import DeviceDriver
from aiograd.cuda.stream_state import StreamState
from aiograd.errors import DeviceError
from aiograd.graph import current_node


def enqueue(
    device: DeviceCore,
    name: str,
    run: Callable[[DeviceDriver, Any], None],
    reads: tuple[Buffer, ...],
    writes: tuple[Buffer, ...],
    stream_state: StreamState | None = None,
    node: Any = None,
) -> None:
    """Queue a command; returns at once.

    Args:
        device: the device that runs it.
        name: for messages.
        run: called on the device's thread, when every buffer has memory, with the driver and its handle of the stream.
        reads, writes: buffers that it uses.
        stream_state, node: the stream to run on, and the node of the graph; by default the caller's.
    """
    command = DeviceCommand(name, run, reads, writes, stream_state or device.current_stream_state(), node or current_node())
    with device.lock:
        device.commands += 1
        command.stream_state.asked += 1
        for buffer in writes:
            buffer.last = command
        device.thread.perform(command.perform)


class DeviceCommand:
    """Something for the device to do.

    Args:
        name: of the kernel, for messages.
        run: does it: called with the driver and its handle of the stream once every buffer has memory.
        reads, writes: the buffers that it reads and writes.
        stream_state: the stream that it runs on.
        node: the node of the graph that it was asked for, if any.
    """

    __slots__ = ("name", "run", "reads", "writes", "stream_state", "node", "count", "performed")

    def __init__(
        self,
        name: str,
        run: Callable[[DeviceDriver, Any], None],
        reads: tuple[Buffer, ...],
        writes: tuple[Buffer, ...],
        stream_state: StreamState,
        node: Any,
    ) -> None:
        self.name = name
        self.run: Callable[[DeviceDriver, Any], None] | None = run
        self.reads = reads
        self.writes = writes
        self.stream_state = stream_state
        self.node = node
        self.count = 0
        self.performed = False

    def is_done(self) -> bool:
        """True if the device has done it, or failed to. Any thread."""
        if not self.performed:
            return False
        try:
            return self.stream_state.is_done(self.count)
        except DeviceError:
            return True  # the read of the buffer raises it

    def perform(self) -> None:
        """Give it to the device; on the device's thread.

        An error is kept with the buffers that the command would have written, and raised when these are needed.
        """
        stream_state = self.stream_state
        driver = stream_state.driver
        try:
            self._refuse_failed()
            for buffer in self.writes:
                if buffer.memory is None:
                    buffer.memory = driver.allocate(buffer.nbytes, stream_state.handle)
                    buffer.home = stream_state
                for user, count in buffer.used.items():
                    stream_state.follow(user, count)
            for buffer in self.reads:
                if buffer.writer is not None:
                    stream_state.follow(*buffer.writer)
            self.run(driver, stream_state.handle)  # type: ignore[misc]
        except BaseException as error:
            self._fail(error)
        stream_state.performed += 1
        stream_state.count += 1
        self.count = stream_state.count
        for buffer in self.writes:
            buffer.writer = (stream_state, stream_state.count)
            buffer.used[stream_state] = stream_state.count
        for buffer in self.reads:
            buffer.used[stream_state] = stream_state.count
        self.run = None  # it refers to its arguments
        self.reads = self.writes = ()
        self.performed = True

    def _refuse_failed(self) -> None:
        for buffer in (*self.reads, *self.writes):
            if buffer.error is not None:
                raise buffer.error
        for buffer in self.reads:
            if buffer.memory is None and buffer.nbytes:
                raise DeviceError(f"{self.name} on {buffer.device.name}: it reads memory that was never written")

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, DeviceError) and not getattr(error, "_named", False):
            node = "" if self.node is None else f", for node {self.node.name}"
            error.add_note(f"in kernel {self.name} on {self.writes[0].device.name if self.writes else 'the device'}{node}")
            error._named = True  # type: ignore[attr-defined]
        for buffer in self.writes:
            buffer.error = error
