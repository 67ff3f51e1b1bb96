"""FrameOutput: the side of a WebSocket channel that sends.

Note [Masks]
    A browser masks its frames with bytes that a web page cannot foresee, so that no page can write a request of its choice into a connection
    that a proxy between them reads as HTTP. From the second attachment on frames are sealed, and no byte of them can be foreseen; the
    mask is then zero, which every receiver understands and which costs neither side anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

from aiograd.distributed.rpc.http import framing
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.transport import Buffer

#: header and payload up to this size are joined, so that they leave in one packet
JOIN = 16 << 10
#: bytes that the system takes beyond the bytes that it can send; see Note [Small frames beside large ones]
UNSENT = 256 << 10
#: written bytes that a peer takes in `unread_seconds` at least, unless it takes all of them
TRICKLE = 64 << 10
#: bytes of random masks that are drawn at a time
KEYS = 2048

#: the first byte of a message of one frame
WHOLE = framing.FIN | framing.BINARY
NO_MASK = bytes(4)


class FrameOutput(asyncio.BufferedProtocol):
    """The side of a channel that sends; `WebSocketChannel` is the whole.

    Args:
        limits: sizes and times.
        masking: True if this side masks its frames.
    """

    __slots__ = (
        "_limits", "_masking", "_mask_bit", "_is_sealed", "_loop", "_transport", "_socket", "_on_writable", "_closing", "_lost", "_keys",
        "_keys_used", "_joined", "_joined_bytes", "_paused", "_written", "_unread_mark", "_unread_since",
    )  # fmt: skip

    def __init__(self, limits: Limits, masking: bool) -> None:
        self._limits = limits
        self._masking = masking
        self._mask_bit = framing.MASKED if masking else 0
        #: True if the frames that are sent are sealed; see Note [Masks]
        self._is_sealed = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._socket: Any = None
        self._on_writable: Callable[[], None] | None = None
        self._closing = False
        self._lost = False
        self._keys = b""
        self._keys_used = 0
        #: heads and small frames that wait for more, and bytes of these frames
        self._joined: list[Buffer] = []
        self._joined_bytes = 0
        self._paused = False
        self._written = 0
        self._unread_mark = 0
        self._unread_since = 0.0

    def _drop(self, reason: str) -> None:
        """Drop the connection at once."""
        raise NotImplementedError

    def _ensure_watch(self) -> None:
        """Watch the peer until it has read all output."""
        raise NotImplementedError

    def send(self, frame: Buffer, more: bool = False) -> bool:
        """Queue one frame, see `Channel.send`. It must not change afterwards: it may be sent from where it is."""
        if self._closing:
            return False
        length = len(frame)
        head = framing.header(WHOLE, length, self._mask_bit)
        if self._masking:
            if self._is_sealed:
                head += NO_MASK
            else:
                key = self._next_key()
                head += key
                frame = framing.masked(frame, key)
        self._written += length
        if length <= JOIN:
            self._joined += (head, frame)
            self._joined_bytes += length
            if more and self._joined_bytes <= JOIN and not self._paused:
                return True
            self.flush()
        else:
            self.flush()
            self._transport.writelines((head, frame))
        if self._paused:
            if self._transport.get_write_buffer_size() > self._limits.unread_bytes:
                self._drop(f"it left more than {self._limits.unread_bytes} bytes unread")
            return False
        return True

    def flush(self) -> None:
        """Let frames leave, see `Channel.flush`."""
        joined = self._joined
        if joined and not self._closing:
            data = b"".join(joined)
            joined.clear()
            self._joined_bytes = 0
            self._transport.write(data)

    def pace(self, frame_bytes: int) -> None:
        """See `Channel.pace`."""
        high = min(2 * frame_bytes, self._limits.unread_bytes)
        if self._lost:
            return
        self._transport.set_write_buffer_limits(high=high, low=high // 2)
        if self._socket is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with contextlib.suppress(OSError):  # the connection is gone, as is said in a moment
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, min(UNSENT, frame_bytes))

    def _next_key(self) -> bytes:
        at = self._keys_used
        if at == len(self._keys):
            self._keys, at = os.urandom(KEYS), 0
        self._keys_used = at + 4
        return self._keys[at : at + 4]

    def _control(self, opcode: int, payload: bytes) -> None:
        head = framing.header(framing.FIN | opcode, len(payload), self._mask_bit)
        if self._masking:
            key = self._next_key()
            head += key + framing.masked(payload, key)
        else:
            head += payload
        self.flush()
        self._transport.write(head)

    def pause_writing(self) -> None:
        self._paused = True
        self._mark(self._written - self._transport.get_write_buffer_size())
        self._ensure_watch()

    def _mark(self, left: int) -> None:
        """Give the peer `unread_seconds` to read all output, or `TRICKLE` bytes of it."""
        self._unread_mark, self._unread_since = min(self._written, left + TRICKLE), self._loop.time()

    def resume_writing(self) -> None:
        self._paused = False
        if self._on_writable is not None and not self._closing:
            self._on_writable()
