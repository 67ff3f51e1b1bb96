"""What the thread of a device is given to do, and the lanes (streams) on which the device does it.

Pure of threads and of asyncio: `perform` is called by whoever is the device's thread.

Note [Ordering between streams]
    PyTorch leaves it to its users to say that a tensor made on one stream is used on another, and to forget it. Here each buffer remembers on
    which lane it was last written and used. A command on another lane first makes its lane wait for an event behind those, unless it
    has waited for a later one already; so a program with several streams computes what it would on one.

Note [Done]
    A lane counts its commands. Events are recorded when somebody waits and when the thread has nothing to do; as they come to pass, everything
    up to their count is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from aiograd.cuda.buffer import Buffer
from aiograd.cuda.driver.protocol import Driver
from aiograd.errors import DeviceError

#: from how many recorded events on the oldest is polled when another is recorded
_MARKS = 64


class Lane:
    """A stream of a device, with what is known of how far it is.

    Args:
        driver: of the device.
        handle: the driver's stream.
        name: for people.
    """

    __slots__ = ("driver", "handle", "name", "asked", "performed", "count", "completed", "marks", "waited", "error", "_polling", "__weakref__")

    def __init__(self, driver: Driver, handle: Any, name: str) -> None:
        self.driver = driver
        self.handle = handle
        self.name = name
        #: commands queued for it, and of those the ones that were given to the device
        self.asked = self.performed = 0
        #: what was given to the device so far: commands, copies and events
        self.count = 0
        #: commands known to be done
        self.completed = 0
        #: events that were recorded, with the count they stand for
        self.marks: deque[tuple[int, Any]] = deque()
        #: other lane -> up to which count of its commands this one waits
        self.waited: dict[Lane, int] = {}
        #: why nothing more will be done on it
        self.error: DeviceError | None = None
        self._polling = threading.Lock()

    def mark(self) -> Any:
        """An event behind everything so far; the device's thread only.

        Raises:
            DeviceLostError: the device failed.
        """
        if self.marks and self.marks[-1][0] == self.count:
            return self.marks[-1][1]
        if len(self.marks) > _MARKS:
            self.is_done(self.marks[0][0])
        try:
            event = self.driver.record(self.handle)
        except DeviceError as error:
            self.error = error
            raise
        self.marks.append((self.count, event))
        return event

    def is_idle(self) -> bool:
        """Whether everything asked of it is known to be done; any thread.

        Raises:
            DeviceLostError: the device failed.
        """
        return self.performed == self.asked and self.is_done(self.count)

    def is_done(self, count: int) -> bool:
        """Whether the first `count` commands are known to be done; polls events. Any thread.

        Raises:
            DeviceLostError: the device failed.
        """
        if self.completed >= count:
            return True
        with self._polling:
            while self.completed < count and self.marks:
                reached, event = self.marks[0]
                if not self.driver.is_done(event):
                    return False
                self.marks.popleft()
                self.completed = max(self.completed, reached)
        if self.completed < count and self.error is not None:
            raise self.error
        return self.completed >= count

    def follow(self, other: Lane, count: int) -> None:
        """Let what comes on this lane wait for the first `count` commands of another; the device's thread only."""
        if other is self or self.waited.get(other, 0) >= count or other.completed >= count:
            return
        self.driver.wait_for(self.handle, other.mark())
        self.waited[other] = other.count


class Command:
    """Something for the device to do.

    Args:
        name: of the kernel, for messages.
        run: does it: called with the driver and the handle of the stream once every buffer has memory.
        reads, writes: what it uses.
        lane: where.
        node: of the graph, for which it was asked, if any.
    """

    __slots__ = ("name", "run", "reads", "writes", "lane", "node", "count", "performed")

    def __init__(
        self, name: str, run: Callable[[Driver, Any], None], reads: tuple[Buffer, ...], writes: tuple[Buffer, ...], lane: Lane, node: Any
    ) -> None:
        self.name = name
        self.run: Callable[[Driver, Any], None] | None = run
        self.reads = reads
        self.writes = writes
        self.lane = lane
        self.node = node
        self.count = 0
        self.performed = False

    def is_done(self) -> bool:
        """Whether the device has done it, or failed to. Any thread."""
        if not self.performed:
            return False
        try:
            return self.lane.is_done(self.count)
        except DeviceError:
            return True  # whoever reads will hear of it

    def perform(self, driver: Driver) -> None:
        """Give it to the device. What fails is kept with the buffers it would have written, and raised to whoever needs those."""
        lane = self.lane
        try:
            self._refuse_failed()
            for buffer in self.writes:
                if buffer.memory is None:
                    buffer.memory = driver.allocate(buffer.nbytes, lane.handle)
                    buffer.home = lane
                for user, count in buffer.used.items():
                    lane.follow(user, count)
            for buffer in self.reads:
                if buffer.writer is not None:
                    lane.follow(*buffer.writer)
            self.run(driver, lane.handle)  # type: ignore[misc]
        except BaseException as error:
            self._fail(error)
        lane.performed += 1
        lane.count += 1
        self.count = lane.count
        for buffer in self.writes:
            buffer.writer = (lane, lane.count)
            buffer.used[lane] = lane.count
        for buffer in self.reads:
            buffer.used[lane] = lane.count
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
