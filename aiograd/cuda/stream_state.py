"""StreamState: a stream of a device, and the number of its commands that are known to be done.

Note [Done]
    A stream's commands are counted. Events are recorded for waiting callers and while the device's thread is idle; when an event completes, all
    commands up to its count are done.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from aiograd.cuda.driver.protocol import DeviceDriver
from aiograd.errors import DeviceError

#: from how many recorded events on the oldest is polled when another is recorded
_MARKS = 64


class StreamState:
    """A stream of a device, and how far the device is with it.

    Args:
        driver: the driver of the device.
        handle: the driver's stream.
        name: for people.
    """

    __slots__ = ("driver", "handle", "name", "asked", "performed", "count", "completed", "marks", "waited", "error", "_polling", "__weakref__")

    def __init__(self, driver: DeviceDriver, handle: Any, name: str) -> None:
        self.driver: DeviceDriver = driver
        self.handle: Any = handle
        self.name: str = name
        #: commands queued for it, and of those the ones that were given to the device
        self.asked: int = 0
        self.performed: int = 0
        #: the number of commands, copies and events given to the device so far
        self.count: int = 0
        #: commands known to be done
        self.completed: int = 0
        #: events that were recorded, with the count they stand for
        self.marks: deque[tuple[int, Any]] = deque()
        #: other stream -> up to which count of its commands this one waits
        self.waited: dict[StreamState, int] = {}
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
        """True if everything asked of it is known to be done; any thread.

        Raises:
            DeviceLostError: the device failed.
        """
        return self.performed == self.asked and self.is_done(self.count)

    def is_done(self, count: int) -> bool:
        """True if the first `count` commands are known to be done; polls events. Any thread.

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

    def follow(self, other: StreamState, count: int) -> None:
        """Make later commands of this stream wait for the first `count` commands of another; the device's thread only."""
        if other is self or self.waited.get(other, 0) >= count or other.completed >= count:
            return
        self.driver.wait_for(self.handle, other.mark())
        self.waited[other] = other.count
