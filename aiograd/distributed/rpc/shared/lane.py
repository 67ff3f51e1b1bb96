"""SharedLane: the rings of one connection between two processes of a machine; asks for them when there are large frames to send.

Note [How a ring comes about]
    The sender of the first large frame listens at a Unix socket of a random name and invites the peer to it, over the connection. The peer makes
    a ring, connects, and hands it over together with the token from the invitation; both look at the other's user. Until then, and where
    any of it fails (another network namespace, another user, no memory left by the limits), frames go over the connection as between machines.
    It is asked for once per connection and direction.

Note [A full ring]
    `SecureChannel.send` asks its caller to stop as soon as the longest frame would not fit any more, and goes on when the peer tells that it
    has copied bodies out. A peer that does not within `Limits.unread_seconds` does not read, and is dropped like one that leaves
    its connection unread.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence

from aiograd.distributed.rpc.frames import HEADER, destination
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.shared import memory
from aiograd.distributed.rpc.shared.allowance import SharedMemory
from aiograd.distributed.rpc.shared.ring import NAME_BYTES, TOKEN_BYTES, Ring, SharedRecord, broken, pack, unpack
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import WorkerLostError

#: bodies of at least this many bytes go through shared memory
SHARED_FROM = 32 << 10


class SharedLane:
    """Both directions of one connection.

    Args:
        shared: the worker's shared memory; None: the ends are not known to be on one machine, and invitations are declined.
        frame_bytes: of the longest body.
        write: sends a record over the connection.
        writable: called when there is room again.
        drop: closes the connection.
    """

    __slots__ = (
        "is_full",
        "_shared", "_frame_bytes", "_write", "_writable", "_drop", "_loop", "_out", "_in", "_headers", "_held", "_is_asked", "_invitation", "_timer",
    )  # fmt: skip

    def __init__(
        self,
        shared: SharedMemory | None,
        frame_bytes: int,
        write: Callable[[bytes], object],
        writable: Callable[[], None],
        drop: Callable[[BaseException], None],
    ) -> None:
        #: True while the peer has to copy something out before more is sent
        self.is_full = False
        self._shared = shared
        self._frame_bytes = frame_bytes
        self._write = write
        self._writable = writable
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._out: Ring | None = None
        self._in: Ring | None = None
        #: headers of frames with bodies in the ring that are not announced to the peer yet
        self._headers: list[Buffer] = []
        #: bytes of the ring that this side has made
        self._held = 0
        self._is_asked = False
        self._invitation: Invitation | None = None
        self._timer: asyncio.TimerHandle | None = None

    # ---- sending

    @property
    def is_open(self) -> bool:
        """True if this side has a ring to write to."""
        return self._out is not None

    def put(self, parts: Sequence[Buffer]) -> bool:
        """Put the body of a frame into the ring; `flush` tells the peer of it.

        Args:
            parts: the header, and the body in pieces.

        Returns:
            False where the frame itself is to be sent.
        """
        size = 0
        for part in parts:
            size += len(part)
        size -= HEADER.size
        if size < SHARED_FROM:
            return False
        ring = self._out
        if ring is None:
            if not self._is_asked and self._shared is not None:
                self._is_asked = True
                self._invite(self._shared.limits)
            return False
        if not ring.has_room(size):
            return False
        place = ring.take(size)
        at = 0
        for part in parts[1:]:
            if type(part) is memoryview and part.format != "B":
                part = part.cast("B")
            end = at + len(part)
            place[at:end] = part
            at = end
        self._headers.append(parts[0])
        if not ring.has_room(self._frame_bytes):
            self._stop()
        return True

    def flush(self) -> None:
        """Tell the peer of the bodies that it has not been told of."""
        if self._headers:
            headers, self._headers = self._headers, []
            self._write(pack(SharedRecord.BODIES, b"".join(headers)))

    def _invite(self, limits: Limits) -> None:
        size = memory.ring_bytes(self._frame_bytes)
        try:
            self._invitation = contextvars.Context().run(Invitation, self._loop, size, limits.handshake_timeout, self._handed_over)
        except OSError:  # no descriptors left; frames go over the connection
            return
        self._write(pack(SharedRecord.INVITE, self._invitation.name + self._invitation.token))

    def _handed_over(self, ring: mmap.mmap) -> None:
        self._out = Ring(memoryview(ring))

    def _stop(self) -> None:
        self.is_full = True
        if self._shared is not None:
            self._timer = self._loop.call_later(self._shared.limits.unread_seconds, self._late, context=contextvars.Context())

    def _late(self) -> None:
        self._drop(WorkerLostError("it did not take the frames in shared memory in time", stage="transport"))

    def _go_on(self) -> None:
        self.is_full = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._writable()

    # ---- receiving

    def receive(self, record: Buffer) -> Iterator[tuple[bytes, memoryview]]:
        """Take a record about shared memory.

        Args:
            record: in the clear.

        Yields:
            The header and the body of each frame of which it tells; the body is a read-only view that is valid until the next one.

        Raises:
            ProtocolError: it makes no sense.
        """
        kind, content = unpack(record)
        if kind is SharedRecord.BODIES:
            ring = self._in
            if ring is None:
                raise broken("bodies in a ring that does not exist")
            for at in range(0, len(content), HEADER.size):
                header = content[at : at + HEADER.size]
                length = destination(header)[3]
                if length > self._frame_bytes:  # of which the ring holds a few, so that this one is within it
                    raise broken(f"a body of {length} bytes, above the {self._frame_bytes} of the connection")
                with ring.take(length).toreadonly() as view:
                    yield header, view
                if (released := ring.release()) is not None:
                    self._write(released)
        elif kind is SharedRecord.INVITE:
            self._accept(content[:NAME_BYTES], content[NAME_BYTES:])
        elif kind is SharedRecord.DECLINE:
            if self._invitation is None:
                raise broken("an invitation is declined that was not made")
            self._invitation.close()
        else:
            if self._out is None:
                raise broken("a position in a ring that does not exist is released")
            self._out.released(content)
            if self.is_full and self._out.has_room(self._frame_bytes):
                self._go_on()

    def _accept(self, name: bytes, token: bytes) -> None:
        if self._in is not None:
            raise broken("an invitation for a ring that exists")
        shared, size = self._shared, memory.ring_bytes(self._frame_bytes)
        if shared is not None and shared.reserve(size):
            try:
                ring, descriptor = memory.create(size)
            except OSError:
                is_done = False
            else:
                try:
                    is_done = memory.hand_over(name, token, descriptor)
                finally:
                    os.close(descriptor)
            if is_done:
                self._held = size
                self._in = Ring(memoryview(ring))
                return
            shared.release(size)
        self._write(pack(SharedRecord.DECLINE))

    # ---- end

    def close(self) -> None:
        """Give up the rings. Idempotent."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.release(self._held)
        self._held = 0
        for ring in (self._out, self._in):
            if ring is not None:
                ring.close()
        self._out = self._in = None
        if self._invitation is not None:
            self._invitation.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Invitation:
    """Waits for the peer to hand over a ring.

    Args:
        loop: the running loop.
        size: bytes of the ring.
        seconds: time for it.
        done: called with the ring when it is there.

    Attributes:
        name: of the socket.
        token: the proof that the peer has to show.

    Raises:
        OSError: there are no descriptors left.
    """

    __slots__ = ("name", "token", "_loop", "_size", "_done", "_listener", "_guests", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, seconds: float, done: Callable[[mmap.mmap], None]) -> None:
        self.name = os.urandom(NAME_BYTES)
        self.token = os.urandom(TOKEN_BYTES)
        self._loop = loop
        self._size = size
        self._done = done
        self._listener: socket.socket | None = memory.listen(self.name)
        self._guests: set[socket.socket] = set()
        try:
            loop.add_reader(self._listener.fileno(), self._connected)
        except BaseException:
            self._listener.close()
            raise
        self._timer = loop.call_later(seconds, self.close)

    def _connected(self) -> None:
        if self._listener is None:
            return
        try:
            guest, _ = self._listener.accept()
        except OSError:  # it has gone, or there are no descriptors left
            return
        if len(self._guests) >= memory.GUESTS:
            guest.close()
            return
        guest.setblocking(False)
        self._guests.add(guest)
        self._loop.add_reader(guest.fileno(), self._readable, guest)

    def _readable(self, guest: socket.socket) -> None:
        try:
            token, descriptor = memory.receive(guest)
        except BlockingIOError:
            return
        except OSError:
            token, descriptor = b"", None
        self._dismiss(guest)
        if descriptor is None:
            return
        try:
            ring = memory.adopt(descriptor, self._size) if hmac.compare_digest(token, self.token) else None
        finally:
            os.close(descriptor)
        if ring is not None:
            self.close()
            self._done(ring)

    def _dismiss(self, guest: socket.socket) -> None:
        self._guests.discard(guest)
        self._loop.remove_reader(guest.fileno())
        guest.close()

    def close(self) -> None:
        """Wait no more. Idempotent."""
        self._timer.cancel()
        for guest in list(self._guests):
            self._dismiss(guest)
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener.fileno())
            listener.close()
