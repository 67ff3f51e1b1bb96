"""WebSocketChannel: frames between two workers over one upgraded connection.

It takes the connection over from the HTTP library once the WebSocket handshake is done and talks to the event loop's transport itself.

Note [Why not the library's own reader and writer]
    A frame that goes through a queue costs a future, two turns of the loop and, for a large one, three copies. Here the loop writes received bytes
    straight into the buffer of their frame, and `on_frame` is called from there: no task, no queue and no copy of large frames.

Note [Peers that do not read, and peers that do not finish]
    Output that the peer does not take collects in the transport. `send` says False from a frame or two on; a peer that lets more than
    `unread_bytes` collect, or in `unread_seconds` takes neither all nor `TRICKLE` bytes of it, is dropped. Nothing ever waits for it. A
    stranger's message must be complete within `handshake_timeout` of its first byte; of a peer's, since its link may be slow, at least `SLOWEST`
    bytes must come in each such time. One timer per connection watches both, and runs only while there is something to watch.

Note [Small frames beside large ones]
    A small frame waits for the large frames ahead of it in a connection: in the transport, at most two frames
    and one that is being written; in the socket, where the system is told to take no more than one frame, and `UNSENT`, that it cannot send yet;
    and at the receiver. There libuv reads a socket that has enough up to 32 times before other callbacks get a turn, which would be 32 frames; so
    after each large one reading pauses for a turn of the loop, which serves the messages received before.

Note [Fewer wake-ups]
    A system on the same machine or network delivers a large frame in pieces of at most 64 KiB, and wakes the receiver for each, which costs
    more than the copy. So while a large frame comes in, the system is told to wait for `WAKE` bytes, or for the rest of the frame.

Note [Strangers]
    A stranger could announce large messages before its handshake, and have memory set aside for them. On a channel that was
    accepted, messages are therefore small until it is attached a second time: that is when the handshake is done. From then on
    it counts as a peer's; there may be no room for one, then it is closed.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

from aiograd.distributed.rpc.http import framing
from aiograd.distributed.rpc.http.admission import ConnectionPermit
from aiograd.distributed.rpc.http.frame_output import NO_MASK, WHOLE, FrameOutput
from aiograd.distributed.rpc.http.sockets import unread_bytes
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.shared.allowance import SharedMemory
from aiograd.errors import ProtocolError, WorkerLostError

#: bytes by which a message may exceed a frame: header, seal and the like
OVERHEAD = 64 << 10
#: the largest message of a peer that has not been greeted
STRANGER = 4 << 10
#: received at once where no large frame is expected
RECEIVE = 64 << 10
#: a frame larger than this gets a buffer of its own
OWN_BUFFER = 16 << 10
#: bytes of a large frame that the system collects before it says so; see Note [Fewer wake-ups]
WAKE = 512 << 10
#: bytes of a frame that a peer sends in `handshake_timeout` at least, if it does not end in that time
SLOWEST = 4 << 10
#: seconds that a closed connection has for the rest of its output
LINGER = 1.0



class WebSocketChannel(FrameOutput):
    """See `Channel`.

    Args:
        remote: address of the peer, for logs.
        limits: sizes and times.
        masking: True if this side dialled: it then masks its frames, and the other side does not.
        certified_names: the names in the peer's verified certificate.
        on_lost: called when the connection is gone, before `on_closed`.
        permit: of a connection that was accepted.
        shared: the worker's shared memory; it is of use where both ends of the connection have one address.
    """

    __slots__ = (
        "remote", "certified_names", "shared_memory", "_peer_mask_bit", "_on_lost", "_permit", "_message_limit", "_on_frame", "_on_closed", "_error",
        "_buffer", "_view", "_end", "_body", "_body_end", "_body_first", "_body_key", "_connection", "_wake_at", "_fragments", "_began", "_watch",
        "_heard_at", "_waiting", "_came",
    )  # fmt: skip

    def __init__(
        self,
        remote: str,
        limits: Limits,
        *,
        masking: bool,
        certified_names: frozenset[str] | None,
        on_lost: Callable[[WebSocketChannel], None],
        permit: ConnectionPermit | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        super().__init__(limits, masking)
        self.remote = remote
        self.certified_names = certified_names
        self.shared_memory = shared
        self._peer_mask_bit = 0 if masking else framing.MASKED
        self._on_lost = on_lost
        self._permit = permit
        self._message_limit = limits.frame_bytes + OVERHEAD if masking else STRANGER
        self._on_frame: Callable[[bytes | memoryview], None] | None = None
        self._on_closed: Callable[[BaseException | None], None] | None = None
        self._error: BaseException | None = None
        # input: bytes that are not parsed, the large frame that is being received, the fragments of a message before it
        self._buffer = bytearray(RECEIVE)
        self._view = memoryview(self._buffer)
        self._end = 0
        self._body: memoryview | None = None
        self._body_end = 0
        self._body_first = 0
        self._body_key = NO_MASK
        #: the socket, where the system can be told when to wake this side, and the number of bytes at which it does
        self._connection: Any = None
        self._wake_at = 1
        self._fragments: bytearray | None = None
        #: since when the message that is being received takes too long, and bytes of it that had come by then
        self._began: float | None = None
        self._came = 0
        #: when something last came; and the bytes in the socket that were not read when it was last asked
        self._heard_at = self._loop.time()
        self._waiting = 0
        self._watch: asyncio.TimerHandle | None = None

    # ---- life

    def start(self, transport: asyncio.Transport, received: bytes) -> None:
        """Take over a connection; `received` is what came after the HTTP head. Nothing is read until the channel is attached."""
        self._transport = transport
        transport.pause_reading()
        if (transport.get_extra_info("peername") or (None,))[0] != (transport.get_extra_info("sockname") or ("",))[0]:
            self.shared_memory = None
        self._socket = connection = transport.get_extra_info("socket")
        if connection is not None and sys.platform == "linux" and transport.get_extra_info("sslcontext") is None:
            self._connection = connection
        self.pace(self._limits.frame_bytes)
        transport.set_protocol(self)
        if self._permit is not None:
            self._permit.held_by(transport.abort)
        if len(received) > RECEIVE:
            self._fail(framing.PROTOCOL_FAULT, "sent before the handshake was done")
            return
        self._buffer[: len(received)] = received
        self._end = len(received)

    def attach(
        self, on_frame: Callable[[bytes | memoryview], None], on_closed: Callable[[BaseException | None], None], on_writable: Callable[[], None]
    ) -> None:
        """Say what to call, see `Channel.attach`."""
        first = self._on_frame is None
        self._on_frame, self._on_closed, self._on_writable = on_frame, on_closed, on_writable
        if not first:
            self._is_sealed = True
            self._message_limit = self._limits.frame_bytes + OVERHEAD
            if self._permit is not None and not self._permit.promote():
                self._close(framing.TRY_AGAIN)
            return
        if self._end:
            self._parse()
        if self._lost and self._on_closed is not None:
            self._on_closed(self._error)
        elif not self._closing:
            self._transport.resume_reading()

    def close(self) -> None:
        """Close, see `Channel.close`."""
        self._close(framing.NORMAL)

    def _close(self, code: int) -> None:
        if self._closing:
            return
        self._control(framing.CLOSE, code.to_bytes(2, "big"))
        self._closing = True
        self._unwatch()
        self._transport.close()
        self._watch = self._loop.call_later(LINGER, self._transport.abort)

    def _drop(self, reason: str) -> None:
        """Give the peer up, at once."""
        self._closing = True
        self._error = WorkerLostError(f"the connection with {self.remote} was dropped: {reason}", stage="transport")
        self._transport.abort()

    def _fail(self, code: int, what: str) -> None:
        """Close because the peer broke the protocol."""
        if not self._closing:
            self._error = ProtocolError(f"WebSocket frame from {self.remote}: {what}", code="websocket")
            self._close(code)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Never called: the connection was made before this protocol got it."""

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closing:  # what goes wrong while it is being closed is of no interest
            self._error = error
        self._closing = self._lost = True
        self._unwatch()
        self._body = self._fragments = None
        if self._permit is not None:
            self._permit.release()
        self._on_lost(self)
        if self._on_closed is not None:
            self._on_closed(self._error)

    def eof_received(self) -> bool:
        return False

    # ---- input

    @property
    def heard_at(self) -> float:
        """See `Channel.heard_at`."""
        waiting = unread_bytes(self._socket)
        if waiting > self._waiting:
            self._heard_at = self._loop.time()
        self._waiting = waiting
        return self._heard_at

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is not None:
            return self._body[self._body_end :]
        return self._view[self._end :] if self._end else self._view

    def buffer_updated(self, count: int) -> None:
        if self._closing:
            return
        self._heard_at = self._loop.time()
        self._waiting = 0
        try:
            body = self._body
            if body is None:
                self._end += count
                self._parse()
                return
            self._body_end += count
            rest = len(body) - self._body_end
            if rest < self._wake_at:
                self._wake_when(rest)
            if not rest:
                self._body = None
                if self._body_key != NO_MASK:
                    framing.mask_in_place(body.obj, self._body_key)  # type: ignore[arg-type]
                self._deliver(self._body_first, body)
                self._rest()
        except MemoryError:
            self._drop("there is no memory for what it sends")

    def _wake_when(self, count: int) -> None:
        """Let the system collect `count` bytes, if it can; see Note [Fewer wake-ups]."""
        count = min(count, WAKE) or 1
        if count != self._wake_at and self._connection is not None:
            self._wake_at = count
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _rest(self) -> None:
        """Let others have the loop; see Note [Small frames beside large ones]."""
        if not (self._closing or self._transport.is_closing()):
            self._transport.pause_reading()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not (self._closing or self._transport.is_closing()):
            self._transport.resume_reading()

    def _parse(self) -> None:
        """Deliver the frames that are complete in the buffer; leave the rest at its start, or move it to a buffer of its own."""
        buffer, view, end, position = self._buffer, self._view, self._end, 0
        mask_bit = self._peer_mask_bit
        while end - position >= 2:
            first, second = buffer[position], buffer[position + 1]
            length = second & 0x7F
            at = position + 2
            if length >= 126:
                size = 2 if length == 126 else 8
                if end - at < size:
                    break
                length = int.from_bytes(buffer[at : at + size], "big")
                at += size
                if length < (126 if size == 2 else 65536):
                    self._fail(framing.PROTOCOL_FAULT, f"length {length} in {size} bytes")
                    return
            usual = first == WHOLE and second & framing.MASKED == mask_bit and length <= self._message_limit and self._fragments is None
            if not (usual or self._acceptable(first, second, length)):
                return
            key = NO_MASK
            if mask_bit:
                if end - at < 4:
                    break
                key = bytes(buffer[at : at + 4])
                at += 4
            if end - at < length:
                if length > OWN_BUFFER:
                    self._begin_body(first, key, length, view[at:end])
                    position = end
                break
            position = at + length
            payload = bytes(view[at:position]) if key == NO_MASK else framing.masked(view[at:position], key)
            if usual and self._on_frame is not None:
                self._began = None
                self._on_frame(payload)
            else:
                self._deliver(first, payload)
            if self._closing:
                return
        rest = end - position
        if rest and position:
            buffer[:rest] = buffer[position:end]
        self._end = rest
        if (rest or self._body is not None) and self._began is None:
            self._begin_watch()

    def _acceptable(self, first: int, second: int, length: int) -> bool:
        """Check a header, before memory is allocated for its frame; closes where it is wrong."""
        opcode, final, begun = first & 0x0F, first & framing.FIN, self._fragments
        if (second & framing.MASKED) != self._peer_mask_bit:
            self._fail(framing.PROTOCOL_FAULT, "masked by the wrong side")
        elif first & 0x70:
            self._fail(framing.PROTOCOL_FAULT, "reserved bits are set")
        elif opcode in (framing.CLOSE, framing.PING, framing.PONG):
            if final and length <= 125:
                return True
            self._fail(framing.PROTOCOL_FAULT, "a control frame that is long or in fragments")
        elif opcode == framing.TEXT:
            self._fail(framing.UNSUPPORTED, "text, where binary is expected")
        elif opcode not in (framing.BINARY, framing.CONTINUATION) or (opcode == framing.CONTINUATION) != (begun is not None):
            self._fail(framing.PROTOCOL_FAULT, f"opcode {opcode} at a wrong place or unknown")
        elif length + len(begun or b"") > self._message_limit:
            self._fail(framing.TOO_BIG, f"a message of {length + len(begun or b'')} bytes or more, where at most {self._message_limit} are accepted")
        else:
            return True
        return False

    def _begin_body(self, first: int, key: bytes, length: int, start: memoryview) -> None:
        self._body = memoryview(bytearray(length))
        self._body_end = len(start)
        self._body[: self._body_end] = start
        self._body_first = first
        self._body_key = key
        self._wake_when(length - len(start))

    def _deliver(self, first: int, payload: bytes | memoryview) -> None:
        if first == WHOLE:
            self._began = None
            if self._on_frame is not None:
                self._on_frame(payload)
            return
        opcode = first & 0x0F
        if opcode == framing.PING:
            if not self._paused:
                self._control(framing.PONG, bytes(payload))
        elif opcode == framing.CLOSE:
            self._close(framing.NORMAL)
        elif opcode != framing.PONG:
            if self._fragments is None:
                self._fragments = bytearray()
                if self._began is None:
                    self._begin_watch()
            self._fragments += payload
            if first & framing.FIN:
                message, self._fragments = self._fragments, None
                self._began = None
                if self._on_frame is not None:
                    self._on_frame(memoryview(message))

    # ---- watching

    def _begin_watch(self) -> None:
        """A message has begun to come."""
        self._began, self._came = self._loop.time(), 0
        self._ensure_watch()

    def _ensure_watch(self) -> None:
        if self._watch is None and not self._closing:
            period = min(1.0, self._limits.handshake_timeout / 4, self._limits.unread_seconds / 4)
            self._watch = self._loop.call_later(period, self._look)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _look(self) -> None:
        self._watch = None
        now = self._loop.time()
        if self._began is not None and now - self._began >= self._limits.handshake_timeout:
            came = (self._end if self._body is None else self._body_end) + len(self._fragments or b"")
            if not self._is_sealed or came - self._came < SLOWEST:
                self._drop(f"it did not finish a message within {self._limits.handshake_timeout} s")
                return
            self._began, self._came = now, came
        if self._paused:
            left = self._written - self._transport.get_write_buffer_size()
            if left >= self._unread_mark:
                self._mark(left)
            elif now - self._unread_since >= self._limits.unread_seconds:
                self._drop(f"it did not read for {self._limits.unread_seconds} s")
                return
        if self._paused or self._began is not None:
            self._ensure_watch()
