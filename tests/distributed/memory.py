"""A transport within one process: channels in pairs, with a switchboard that can close, refuse and hold.

Frames cross in the next turn of the loop, in order. Works on any event loop, the simulated one included.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable

from aiograd.distributed.rpc.shared.allowance import SharedMemory
from aiograd.distributed.rpc.transport import Buffer


class Switchboard:
    """Who listens where, and what is wrong with the network."""

    def __init__(self, *, high_water: int = 1 << 20) -> None:
        self.high_water = high_water
        self.listeners: dict[str, MemoryTransport] = {}
        self.channels: list[MemoryChannel] = []
        #: URLs that do not answer at all
        self.unreachable: set[str] = set()
        #: False for a frame that does not arrive, nor anything that is sent after it over its channel, and nobody is told
        self.passes: Callable[[MemoryChannel, bytes], bool] = lambda channel, frame: True
        self.latency = 0.0
        self.dials = 0
        self.transports = 0

    def transport(self, host: str, **options: object) -> MemoryTransport:
        return MemoryTransport(self, host, **options)  # type: ignore[arg-type]

    def reset(self, error: BaseException | None = None) -> None:
        """Close every connection."""
        for channel in list(self.channels):
            channel.abort(error or ConnectionResetError("reset"))

    def hold(self) -> None:
        """Frames wait."""
        for channel in self.channels:
            channel.held = True

    def let_go(self) -> None:
        for channel in self.channels:
            channel.release()


class MemoryChannel:
    """One end of a connection."""

    def __init__(self, board: Switchboard, remote: str, side: str) -> None:
        self.board = board
        self.remote = remote
        self.side = side
        self.certified_names: frozenset[str] | None = None
        self.shared_memory: SharedMemory | None = None
        self.other: MemoryChannel
        self.closed = False
        self.held = False
        self.is_silent = False
        self.queued = 0
        self.sent = 0
        self._on_its_way: deque[bytes] = deque()
        self._early: list[bytes] = []
        self._on_frame: Callable[[bytes | memoryview], None] | None = None
        self._on_closed: Callable[[BaseException | None], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        self._ended: list[BaseException | None] = []
        self._full = False
        self.loop = asyncio.get_running_loop()
        self.heard_at = self.loop.time()
        board.channels.append(self)

    def attach(self, on_frame, on_closed, on_writable) -> None:  # type: ignore[no-untyped-def]
        self._on_frame, self._on_closed, self._on_writable = on_frame, on_closed, on_writable
        while self._early and self._on_frame is on_frame:
            on_frame(self._early.pop(0))
        if self._ended and self._on_closed is not None:
            self._report(self._ended[0])

    def flush(self) -> None:
        """Frames never wait for more."""

    def pace(self, frame_bytes: int) -> None:
        """There is always as much room as the switchboard says."""

    def send(self, frame: Buffer, more: bool = False) -> bool:
        if self.closed:
            return True
        frame = bytes(frame)
        self.sent += 1
        self.queued += len(frame)
        self.is_silent = self.is_silent or not self.board.passes(self, frame)
        if not self.is_silent:
            self._on_its_way.append(frame)
            self._soon(self._cross)
        self._full = self.queued > self.board.high_water
        return not self._full

    def _soon(self, callback: Callable[..., object], *arguments: object) -> None:
        if self.board.latency:
            self.loop.call_later(self.board.latency, callback, *arguments)
        else:
            self.loop.call_soon(callback, *arguments)

    def _cross(self) -> None:
        """The next frame arrives, unless it is held."""
        if self.held or not self._on_its_way:
            return
        frame = self._on_its_way.popleft()
        self.queued -= len(frame)
        other = self.other
        if not other.closed:
            other.heard_at = self.loop.time()
            if other._on_frame is None:
                other._early.append(frame)
            else:
                other._on_frame(frame)
        if self._full and self.queued <= self.board.high_water // 2 and not self.closed:
            self._full = False
            if self._on_writable is not None:
                self._on_writable()

    def release(self) -> None:
        self.held = False
        for _ in self._on_its_way:
            self.loop.call_soon(self._cross)

    def close(self) -> None:
        """Orderly: what was sent before still arrives, then the other side sees the end."""
        if not self.closed:
            self._end(None)
            if not self.held:
                self._soon(self.other._end, None)

    def abort(self, error: BaseException) -> None:
        self._end(error)
        self.other._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self.closed:
            return
        self.closed = True
        self.board.channels.remove(self)
        if self._on_closed is None:
            self._ended.append(error)
        else:
            self._report(error)

    def _report(self, error: BaseException | None) -> None:
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            self.loop.call_soon(on_closed, error)


class MemoryTransport:
    """One worker's access to the switchboard."""

    def __init__(self, board: Switchboard, host: str, *, certified: frozenset[str] | None = None) -> None:
        self.board = board
        self.host = host
        self.url = f"memory://{host}"
        self.accept: Callable[[MemoryChannel], None] | None = None
        board.transports += 1
        self._seed = f"{host}:{board.transports}"
        self.is_dead = False
        self._drawn = 0
        self._mine: list[MemoryChannel] = []

    def entropy(self, count: int) -> bytes:
        self._drawn += 1
        return hashlib.shake_128(f"{self._seed}:{self._drawn}".encode()).digest(count)

    async def listen(self, host: str, port: int, accept: Callable[[MemoryChannel], None]) -> str:
        await asyncio.sleep(0)
        self.accept = accept
        self.board.listeners[self.url] = self
        return self.url

    async def connect(self, url: str, timeout: float) -> MemoryChannel:
        self.board.dials += 1
        await asyncio.sleep(self.board.latency)
        if url in self.board.unreachable or self.is_dead:
            async with asyncio.timeout(timeout):
                await asyncio.Event().wait()
        listener = self.board.listeners.get(url)
        if listener is None or listener.accept is None:
            raise ConnectionRefusedError(f"no process listens at {url}")
        mine = MemoryChannel(self.board, url, self.host)
        theirs = MemoryChannel(self.board, self.url, listener.host)
        mine.other, theirs.other = theirs, mine
        self._mine.append(mine)
        listener._mine.append(theirs)
        listener.accept(theirs)
        return mine

    async def aclose(self) -> None:
        self.stop()
        for channel in self._mine:
            channel.close()
        await asyncio.sleep(0)

    def stop(self) -> None:
        if self.board.listeners.get(self.url) is self:
            del self.board.listeners[self.url]

    def crash(self) -> None:
        """As when the process is killed: nobody listens, connections are reset, and nothing is said."""
        self.stop()
        self.is_dead = True
        for channel in list(self._mine):
            channel.abort(ConnectionResetError("killed"))
