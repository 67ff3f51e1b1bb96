"""Channels of a simulated network: two ends, and for each direction a pipe that holds the frames on their way.

Note [Steps of the receiver]
    A frame is delivered in a step of the host it arrives at, so a host that is killed receives nothing, and one that is frozen
    receives it when it is resumed. A step delivers all that is due. No step runs code of two hosts.

Note [The order of a channel]
    Steps may be run in any order where the loop's order is permuted, so a step does not carry the frame it delivers: it takes the
    first in the pipe.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from aiograd.distributed.rpc.shared.allowance import SharedMemory
from aiograd.distributed.rpc.transport import Buffer
from aiograd.testing.network.access import Flow
from aiograd.testing.network.link import SimulatedLink
from aiograd.testing.owner import HandleOwner, context_of


class Place(Protocol):
    """The host that an end of a channel belongs to."""

    name: str
    owner: HandleOwner
    channels: dict[SimulatedChannel, None]

    @property
    def is_replaced(self) -> bool:
        """True if another incarnation has taken the name."""


class EndOfStream:
    """Marks in a pipe that the channel ends there."""

    __slots__ = ("error",)

    def __init__(self, error: ConnectionError | None) -> None:
        self.error = error


class Pipe:
    """One direction of a channel: the frames on their way, in the order of their arrival."""

    __slots__ = (
        "chunk_at", "link", "queued", "_arrived", "_chunk_due", "_down", "_end", "_is_stalled", "_items", "_loop", "_not_before", "_source",
        "_target", "_timer", "_timer_due", "_up",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, link: SimulatedLink, source: SimulatedChannel, target: SimulatedChannel) -> None:
        self.link = link
        #: bytes on their way
        self.queued = 0
        self._loop = loop
        self._source = source
        self._target = target
        #: when each arrives at the earliest, ascending; its bytes; when its first byte arrives; the number of its last byte on lines
        self._items: deque[tuple[float, bytes | EndOfStream, float, int]] = deque()
        #: bytes before the sender's line, and before the receiver's; None: frames arrive as wholes
        self._up: Flow | None = None
        self._down: Flow | None = None
        if link.is_shared:
            self._up = Flow(loop, link.up, lambda: not link.is_down and self._is_used(), self._leave)
            self._down = Flow(loop, link.down, self._is_used, self._arrive)
        #: when the latest chunk arrives at the receiver's line
        self._chunk_due = 0.0
        #: bytes for the lines, and bytes that have passed both
        self._end = self._arrived = 0
        #: when a chunk last passed both
        self.chunk_at = 0.0
        #: nothing arrives any more, and no end notices
        self._is_stalled = False
        self._timer: asyncio.Handle | None = None
        self._timer_due = 0.0
        self._not_before = 0.0
        link.carriers[self] = None

    def push(self, frame: bytes, due: float) -> None:
        """Let `frame` arrive at the time `due`, and not before earlier frames."""
        self.queued += len(frame)
        self._put(frame, due)
        self._arm()

    def hold(self, frame: bytes, now: float) -> None:
        """Keep `frame` until the link has healed."""
        self.queued += len(frame)
        self._put(frame, now)

    def end(self, error: ConnectionError | None, now: float) -> None:
        """Let the other end learn that the channel is closed, after the frames on their way."""
        self._put(EndOfStream(error), now + self.link.latency)
        self._arm()

    def is_arriving(self, now: float) -> bool:
        """True if a part of a frame arrives just now, or something waits for the host."""
        if not self._items or self.link.is_down or now < self._not_before:
            return False
        return self._items[0][2] <= now and self._items[0][3] <= self._arrived

    def break_off(self, now: float) -> None:
        """The connection breaks: this end learns it at once, the other one after the frames that still arrive."""
        self.lose_some("reset", is_counted=False)
        error = ConnectionResetError(f"simulated network: connection {self.link.source} > {self.link.target} was reset")
        self.end(error, now)
        self._source.shut(error)

    def stall(self) -> None:
        """The connection goes silent in this direction: later frames wait for ever."""
        self._is_stalled = True

    def lose_some(self, kind: str, *, is_counted: bool = True) -> None:
        """The connection ends: of the frames that are on their way the first few arrive, how many of them by chance."""
        items, lost = self._items, 0
        for _ in range(len(items) - self.link.prefix(len(items))):
            item = items.pop()[1]
            if isinstance(item, bytes):
                lost += len(item)
                if is_counted:
                    self.link.hit(kind, item)
        self.queued -= lost
        if self._up is not None:
            self._end -= lost
            self._up.drop(lost)

    def resume(self, due: float) -> None:
        """The link has healed: frames that were held arrive at `due` or later."""
        self._not_before = due
        if self._up is not None:
            self._up.resume()
        self._arm()

    def _put(self, item: bytes | EndOfStream, due: float) -> None:
        if self._is_stalled:
            return
        due = first = max(due, self._items[-1][0]) if self._items else due
        size = 0 if isinstance(item, EndOfStream) else len(item)
        if self._up is not None:
            self._end += size
        elif size:
            due += self.link.pause(size)
            slow = self.link.faults.slow
            first = due if slow is None else due - size / slow
        self._items.append((due, item, first, self._end))
        if self._up is not None and size:
            self._up.offer(size)

    def _is_used(self) -> bool:
        return not (self._source.is_closed and self._target.is_closed)

    def _leave(self, size: int) -> None:
        """A chunk has passed the sender's line."""
        now, down = self._loop.time(), cast("Flow", self._down)
        self._chunk_due = max(self._chunk_due, now + self.link.delay(size, now)) + self.link.pause(size)
        if self._chunk_due <= now:
            down.offer(size)
        else:
            self._loop.call_at(self._chunk_due, down.offer, size, context=contextvars.Context())

    def _arrive(self, size: int) -> None:
        """A chunk has passed both lines."""
        self._arrived += size
        if not self.link.is_down:
            self.chunk_at = self._loop.time()
        self._arm()

    def _arm(self) -> None:
        """See to it that a step runs when the first in the pipe is due."""
        if not self._items or self.link.is_down or self._items[0][3] > self._arrived:
            return  # `resume` or `_arrive` comes back to it
        due = max(self._items[0][0], self._not_before)
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due
        if due <= self._loop.time():
            self._timer = self._loop.call_soon(self._deliver, context=self._target.context)
        else:
            self._timer = self._loop.call_at(due, self._deliver, context=self._target.context)

    def _deliver(self) -> None:
        self._timer = None
        items, link, target = self._items, self.link, self._target
        now = self._loop.time()
        try:
            while items and items[0][0] <= now >= self._not_before and items[0][3] <= self._arrived and not link.is_down:
                item = items.popleft()[1]
                if isinstance(item, EndOfStream):
                    target.shut(item.error)
                else:
                    self.queued -= len(item)
                    link.delivered()
                    target.receive(item)
        finally:
            self._arm()
            self._source.relieve()


class SimulatedChannel:
    """One end of a connection, see `aiograd.distributed.rpc.transport.Channel`.

    Args:
        loop: where it is used.
        place: the host it belongs to.
        remote: where the peer is.
        room: bytes on their way from which the sender is asked to stop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, place: Place, remote: str, room: int) -> None:
        self.remote = remote
        self.certified_names: frozenset[str] | None = None
        self.shared_memory: SharedMemory | None = None
        #: the context in which arriving frames are handled
        self.context: contextvars.Context = context_of(place.owner)
        self.place = place
        self._loop = loop
        self._room = room
        self._out: Pipe
        self._peer: SimulatedChannel
        self._inbox: list[bytes] = []
        self._on_frame: Callable[[bytes | memoryview], None] | None = None
        self._on_closed: Callable[[BaseException | None], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        #: for this end
        self.is_closed = False
        self._is_told = False
        self._is_full = False
        self._heard_at = loop.time()
        self._is_orphan = False
        self._error: BaseException | None = None
        place.channels[self] = None

    @property
    def peer_name(self) -> str:
        """Name of the host at the other end."""
        return self._peer.place.name

    @property
    def other_end(self) -> SimulatedChannel:
        """The other end."""
        return self._peer

    def join(self, peer: SimulatedChannel, link: SimulatedLink) -> None:
        """Lay the pipe to the other end."""
        self._peer = peer
        self._out = Pipe(self._loop, link, self, peer)

    # ---- what its user calls

    def attach(
        self, on_frame: Callable[[bytes | memoryview], None], on_closed: Callable[[BaseException | None], None], on_writable: Callable[[], None]
    ) -> None:
        """Say what to call; frames that arrived before are delivered now."""
        self._on_frame, self._on_closed, self._on_writable = on_frame, on_closed, on_writable
        self.context = context_of(self.place.owner, contextvars.copy_context())
        while self._inbox and self._on_frame is on_frame:
            on_frame(self._inbox.pop(0))
        if self.is_closed:
            self._loop.call_soon(self._tell, context=self.context)

    def send(self, frame: Buffer, more: bool = False) -> bool:
        """Queue one frame. False where the sender should stop until `on_writable` is called."""
        if self.is_closed or self.place.owner.is_dead:
            return True
        if self._peer.place.owner.is_dead:
            self._send_to_none()
            return True
        self._out.link.carry(self._out, frame if type(frame) is bytes else bytes(frame), self._loop.time())
        self._is_full = self._out.queued >= self._room and not self.is_closed
        return not self._is_full

    def flush(self) -> None:
        """Frames never wait for more."""

    @property
    def heard_at(self) -> float:
        """When something last came, a part of a frame as well."""
        now = self._loop.time()
        incoming = self._peer._out
        return now if incoming.is_arriving(now) else max(self._heard_at, incoming.chunk_at)

    def pace(self, frame_bytes: int) -> None:
        """A connection takes as many frames ahead as it has room for, as through a router with a queue that no sender sees."""

    def close(self) -> None:
        """Close at once. The other end learns it; frames on their way may be lost where the link has faults."""
        if not self.is_closed and not self.place.owner.is_dead:
            if not self._out.link.faults.is_plain:
                self._out.lose_some("close")
            self._out.end(None, self._loop.time())
            self.shut(None)

    # ---- calls of the network

    def receive(self, frame: bytes) -> None:
        """A frame has arrived."""
        if self.is_closed:
            return
        self._heard_at = self._loop.time()
        if self._on_frame is None:
            self._inbox.append(frame)
        else:
            self._on_frame(frame)

    def relieve(self) -> None:
        """Something has left the pipe."""
        if self._is_full and self._out.queued <= self._room // 2:
            self._is_full = False
            self._loop.call_soon(self._writable, context=self.context)

    def shut(self, error: BaseException | None) -> None:
        """The channel is closed for this end."""
        if self.is_closed:
            return
        self.is_closed = True
        self._error = error
        self.place.channels.pop(self, None)
        self._forget_incoming()
        if self._on_closed is not None:
            self._loop.call_soon(self._tell, context=self.context)

    def reset(self, now: float) -> None:
        """The connection breaks."""
        if not self.is_closed:
            self._out.break_off(now)

    def crash(self, silent: bool, now: float) -> None:
        """The host is dead: the other end learns it, unless `silent`."""
        if not self.is_closed:
            self.is_closed = self._is_told = True
            self.place.channels.pop(self, None)
            self._forget_incoming()
            self._out.lose_some("crash")
            if not silent:
                self._out.end(ConnectionResetError(f"simulated network: {self.place.name} is gone"), now)

    def _forget_incoming(self) -> None:
        incoming = self._peer._out
        incoming.link.carriers.pop(incoming, None)

    def _send_to_none(self) -> None:
        """The peer died without a word: the next owner of its address resets the connection."""
        out = self._out.link
        if self._peer.place.is_replaced and not self._is_orphan and not out.is_down:
            self._is_orphan = True
            error = ConnectionResetError(f"simulated network: {self._peer.place.name} was restarted and knows nothing of this connection")
            self._loop.call_later(2 * out.latency, self.shut, error, context=self.context)

    def _tell(self) -> None:
        if not self._is_told and self._on_closed is not None:
            self._is_told = True
            self._on_closed(self._error)

    def _writable(self) -> None:
        if not self.is_closed and self._on_writable is not None:
            self._on_writable()
