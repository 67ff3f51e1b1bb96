"""SessionOutbox: what one side of a session has to send, and in which order it goes out.

Note [Fairness]
    Control frames go first: they are small and the peer waits for them. Messages of one frame come next, in the order they were queued.
    Larger ones share the rest, one frame of each in turn, so that a small message waits for one frame of a large one at most. When
    small messages never end, a large one still gets a frame for each frame's worth of them.

Note [No copies]
    A message is a list of buffers which are never joined: a frame is its header and slices of those buffers. A fragment that spans the
    end of a buffer is two slices. The buffers belong to the session until the message is done with, since it may have to be sent again;
    so they must not be changed after a message is queued.

Note [Messages that are held]
    A packet of its own costs the peer a wake-up, which is more than a small answer is worth if no caller waits for it. Such a message is held until
    there is something else to send, which it precedes, or until its allowed time is over.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from aiograd.distributed.rpc.frames import FrameKind
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import ArgumentError, LimitError

#: cost of a message in bytes, in addition to its length, when small messages alternate with large ones
OVERHEAD = 64


class Outgoing:
    """A message on its way out.

    Args:
        frame_kind: REQUEST, RESPONSE or FAILURE.
        id: of the request that it is or answers.
        message: its buffers; concatenated they are the message.
        limits: `message_bytes` bounds it.

    Attributes:
        total: bytes of the message.
        offset: how many of them have been cut off; all of them when it is sent.
        queued: True if it is in the outbox.
        deadline: when it is not worth sending any more, seconds; infinite for answers.
        request_kind: of a request.
        buffers: the message.

    Raises:
        LimitError: it is too large.
    """

    __slots__ = ("frame_kind", "id", "request_kind", "deadline", "total", "offset", "queued", "buffers", "_index", "_within")

    def __init__(
        self, frame_kind: FrameKind, id: int, message: Sequence[Buffer], limits: Limits, request_kind: int = 0, deadline: float = math.inf
    ) -> None:
        total = 0
        for buffer in message:
            if type(buffer) is memoryview and (buffer.ndim != 1 or buffer.itemsize != 1):
                message = _flat(message)
                total = sum(map(len, message))
                break
            total += len(buffer)
        if total > limits.message_bytes:
            raise LimitError(f"a message of {total} bytes is above Limits.message_bytes={limits.message_bytes}; send it in parts or raise the limit")
        self.frame_kind: FrameKind = frame_kind
        self.id: int = id
        self.request_kind: int = request_kind
        self.deadline: float = deadline
        self.total: int = total
        self.offset: int = 0
        self.queued: bool = False
        self.buffers: Sequence[Buffer] = message
        self._index = 0
        self._within = 0

    def cut(self, most: int) -> Sequence[Buffer]:
        """Slices of the next `most` bytes, fewer at the end."""
        if not self.offset and self.total <= most:
            self.offset = self.total
            return self.buffers
        buffers = self.buffers
        index, within = self._index, self._within
        left = min(most, self.total - self.offset)
        self.offset += left
        parts: list[Buffer] = []
        while left:
            buffer = buffers[index]
            end = within + left
            size = len(buffer)
            if end < size:
                parts.append(memoryview(buffer)[within:end])
                within = end
                break
            if size > within:
                parts.append(memoryview(buffer)[within:] if within else buffer)
            left = end - size
            index += 1
            within = 0
        self._index, self._within = index, within
        return parts

    def rewind(self) -> None:
        """Send it from its beginning again."""
        self.offset = self._index = self._within = 0


def _flat(message: Sequence[Buffer]) -> list[Buffer]:
    """The buffers as views of bytes, without empty ones."""
    flat: list[Buffer] = []
    for buffer in message:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise ArgumentError(f"a message holds a buffer of shape {view.shape} with strides {view.strides}; expected contiguous ones")
        if view.nbytes:
            flat.append(view.cast("B"))
    return flat


class SessionOutbox:
    """Messages and control frames that wait for room in the channel. See Note [Fairness].

    Args:
        frame_bytes: bytes of a message in one frame, at most.

    Attributes:
        control: (kind, id) of control frames, in order, each once.
        unsent: bytes of messages that have not been cut off yet.
        held_until: when the messages that are held are sent at the latest, seconds; infinite where there are none.
    """

    __slots__ = ("frame_bytes", "control", "unsent", "held_until", "_small", "_large", "_held", "_credit")

    def __init__(self, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.control: OrderedDict[tuple[FrameKind, int], None] = OrderedDict()
        self.unsent = 0
        self.held_until = math.inf
        #: messages that are held, in order; see Note [Messages that are held]
        self._held: dict[Outgoing, None] = {}
        self._small: OrderedDict[Outgoing, None] = OrderedDict()
        self._large: OrderedDict[Outgoing, None] = OrderedDict()
        #: bytes of small messages that may go before the next frame of a large one
        self._credit = frame_bytes

    def __bool__(self) -> bool:
        return bool(self._small or self._large or self.control)

    @property
    def has_small(self) -> bool:
        """True if a message of one frame waits."""
        return bool(self._small)

    def put(self, message: Outgoing) -> None:
        """Queue a message; one that is queued already stays where it is."""
        if message.queued:
            return
        message.queued = True
        if message.offset:
            message.rewind()
        self.unsent += message.total
        if message.total <= self.frame_bytes:
            self._small[message] = None
        else:
            self._large[message] = None

    def hold(self, message: Outgoing, until: float) -> None:
        """Queue a new message of one frame that may wait; see Note [Messages that are held]."""
        message.queued = True
        self.unsent += message.total
        self._held[message] = None
        self.held_until = min(self.held_until, until)

    def release(self) -> None:
        """Let the messages that are held go out, before all others of one frame."""
        for message in reversed(self._held):
            waiting = self._small if message.total <= self.frame_bytes else self._large
            waiting[message] = None
            waiting.move_to_end(message, last=False)
        self._held.clear()
        self.held_until = math.inf

    def withdraw(self, message: Outgoing) -> None:
        """Take a message out, even if it is sent in part. Idempotent."""
        if message.queued:
            message.queued = False
            self.unsent -= message.total - message.offset
            if message in self._held:
                del self._held[message]
            elif message in self._small:
                del self._small[message]
            else:
                del self._large[message]

    def take(self) -> tuple[Outgoing, int, Sequence[Buffer]] | None:
        """The next fragment of a message: the message, the offset in it and slices of its bytes. None where there is none."""
        small, large = self._small, self._large
        if small and (self._credit > 0 or not large):
            message = small.popitem(last=False)[0]
            self._credit -= message.total + OVERHEAD
        elif large:
            message = next(iter(large))
            self._credit = self.frame_bytes
            if message.total - message.offset <= self.frame_bytes:
                del large[message]
            else:
                large.move_to_end(message)
                offset = message.offset
                parts = message.cut(self.frame_bytes)
                self.unsent -= message.offset - offset
                return message, offset, parts
        else:
            return None
        offset = message.offset
        parts = message.cut(self.frame_bytes)
        self.unsent -= message.offset - offset
        message.queued = False
        return message, offset, parts

    def resize(self, frame_bytes: int) -> None:
        """Cut the rest of the message into frames of so many bytes at most."""
        if frame_bytes < self.frame_bytes:
            for message in [message for message in self._small if message.total > frame_bytes]:
                del self._small[message]
                self._large[message] = None
        self.frame_bytes = frame_bytes
        self._credit = min(self._credit, frame_bytes)

    def interrupt(self, frame_bytes: int) -> list[Outgoing]:
        """The channel is gone, or another one is there: messages that were sent in part have to start again.

        Args:
            frame_bytes: bytes of a message in one frame of the next channel.

        Returns:
            The messages that were sent in part; they are taken out.
        """
        self.release()
        started = [message for message in self._large if message.offset]
        for message in started:
            self.withdraw(message)
        waiting = [*self._small, *self._large]
        self._small.clear()
        self._large.clear()
        self.frame_bytes = self._credit = frame_bytes
        for message in waiting:
            (self._small if message.total <= frame_bytes else self._large)[message] = None
        return started

    def clear(self) -> None:
        """Take everything out."""
        self.release()
        for message in (*self._small, *self._large):
            message.queued = False
        self._small.clear()
        self._large.clear()
        self.control.clear()
        self.unsent = 0
