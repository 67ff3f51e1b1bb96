"""AccessLink: the line between a host and the network, which all connections of the host share.

Note [How connections share a line]
    Either direction of a line is a queue of its own. Connections with bytes to carry take turns in the order in which they had
    bytes, one chunk each: the packets of about 20 ms, from one of 1,460 bytes to 8. So n busy connections get an n-th each, a lone one gets
    everything, and a small message waits for one chunk of each other connection, not for a whole large message. Bytes of one connection stay in
    order: a frame arrives with its last chunk. A chunk passes the line of its sender (up), then the latency and the faults of the link, then the
    line of its receiver (down). The time of a chunk is its size through the rate; there is no congestion window.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiograd.errors import ArgumentError

#: bytes of a packet
PACKET = 1460
#: the seconds of a turn, and the most packets in it
TURN, MOST_PACKETS = 0.02, 8


@dataclass(frozen=True, slots=True)
class AccessLink:
    """The line of a host, see Note [How connections share a line] in `aiograd.testing.network.access`.

    Args:
        up: bytes per second that the host sends, over all its connections together; ``math.inf``: any number.
        down: bytes per second that it receives.

    Raises:
        ArgumentError: a rate that is no number above 0.

    >>> home = ag.testing.AccessLink(up=125_000, down=1_250_000)
    >>> network = ag.testing.SimulatedNetwork(seed=1, access={"left": home, "right": home})
    """

    up: float
    down: float

    def __post_init__(self) -> None:
        for direction in ("up", "down"):
            rate = getattr(self, direction)
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
                raise ArgumentError(f"AccessLink({direction}={rate!r}): expected bytes per second, a number above 0 (1 Mbit/s is 125_000)")


#: the line of each host, by its name; None or no entry: any number of bytes at once
Access = Mapping[str, AccessLink] | Callable[[str], AccessLink | None]


class AccessQueue:
    """One direction of a host's line.

    Args:
        rate: bytes per second.
    """

    __slots__ = ("_chunk", "_is_busy", "_rate", "_flows")

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._chunk = PACKET * round(min(MOST_PACKETS, max(1, TURN * rate / PACKET)))
        self._is_busy = False
        #: the flows with bytes to carry, in the order of their turns
        self._flows: deque[Flow] = deque()

    def join(self, flow: Flow) -> None:
        """Give `flow` a turn, behind the flows that have one."""
        if not flow.is_queued:
            flow.is_queued = True
            self._flows.append(flow)
            if not self._is_busy:
                self._serve()

    def _serve(self) -> None:
        self._is_busy = False
        while self._flows and not self._is_busy:
            flow = self._flows.popleft()
            flow.is_queued = False
            size = flow.take(self._chunk)
            if size:
                self._is_busy = True
                flow.loop.call_later(size / self._rate, self._carry, flow, size, context=contextvars.Context())

    def _carry(self, flow: Flow, size: int) -> None:
        self.join(flow)
        self._serve()
        flow.carried(size)


class Flow:
    """A connection's bytes before one line.

    Args:
        loop: where time passes.
        queue: the line; None: everything passes at once.
        is_open: tells whether anything may enter the line.
        carried: called with the size of each chunk that has passed.
    """

    __slots__ = ("carried", "is_queued", "loop", "waiting", "_is_open", "_queue")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, queue: AccessQueue | None, is_open: Callable[[], bool], carried: Callable[[int], None]
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.carried: Callable[[int], None] = carried
        self.is_queued: bool = False
        #: bytes that have not entered the line
        self.waiting: int = 0
        self._is_open = is_open
        self._queue = queue

    def offer(self, size: int) -> None:
        """Let `size` more bytes pass, after the bytes that wait."""
        self.waiting += size
        self.resume()

    def resume(self) -> None:
        """Let the bytes that wait pass, if the line is open to them."""
        if self._queue is not None:
            self._queue.join(self)
        elif size := self.take(self.waiting):
            self.carried(size)

    def drop(self, size: int) -> None:
        """Forget the last `size` bytes, as far as they wait."""
        self.waiting -= min(size, self.waiting)

    def take(self, most: int) -> int:
        """Remove a chunk of at most `most` bytes, and return its size: 0 where nothing may pass."""
        size = min(most, self.waiting) if self._is_open() else 0
        self.waiting -= size
        return size
