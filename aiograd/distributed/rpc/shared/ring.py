"""Ring: places in shared memory for the bodies of frames, and the records that stand for them in the stream. Sans-IO.

A connection between two processes of one machine carries all frames in order, as any other does. The body of a large one may lie in a ring of
shared memory, one for each direction; the connection then carries a sealed record with the frame's header in its place. So order, sessions,
resending, budgets and limits apply as to every frame, and a connection that is lost takes its rings with it.

Note [No places on the wire]
    Bodies are put behind each other; one that would reach beyond the end begins at the start. Both sides know the lengths (they are in the
    headers) and so compute the same places, and there is no offset that a peer could get wrong or forge. The receiver copies a body out as
    soon as it hears of it, in order, so all that the sender must be told is the position up to which it may write again.

Note [Fewer wake-ups]
    Copying a frame takes less time than telling the peer of it, which wakes another process. So one record tells of all frames that were put in
    at a time.

Note [Copied, never mapped]
    The peer can go on writing to the ring at any time. So sessions get a read-only view, which they copy to private memory once before they look
    at anything in it (`Frame.body`): the bytes that are checked are the bytes that are used. A peer that overwrites its own bodies has sent
    other numbers, which it may do anyway.

    ============ =========================== ==========================================================================
    record       content                     meaning
    ============ =========================== ==========================================================================
    INVITE       name 16, token 32 bytes     the sender has large frames: connect to its socket of this name and hand over a ring
    DECLINE                                  there will be none
    BODIES       headers of frames           frames with their bodies next in the ring
    RELEASED     position u64                bodies up to here have been copied out
    ============ =========================== ==========================================================================
"""

from __future__ import annotations

import enum
import struct
from typing import Final

from aiograd.distributed.rpc.frames import HEADER
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import ProtocolError

#: how records about shared memory begin; frames begin otherwise
MARK: Final = b"AGSM"
#: bytes of the name of a socket, and of the token that proves that the connecting process has read the invitation
NAME_BYTES, TOKEN_BYTES = 16, 32
#: frames that a ring holds
RING_FRAMES = 4
#: bodies begin at multiples of this
_ALIGNMENT = 64

_RELEASED = struct.Struct("<Q")


class SharedRecord(enum.IntEnum):
    """The purpose of a record."""

    INVITE = 1
    DECLINE = 2
    BODIES = 3
    RELEASED = 4


_LENGTHS: Final = {
    SharedRecord.INVITE: NAME_BYTES + TOKEN_BYTES,
    SharedRecord.DECLINE: 0,
    SharedRecord.BODIES: HEADER.size,
    SharedRecord.RELEASED: _RELEASED.size,
}


def pack(kind: SharedRecord, content: bytes = b"") -> bytes:
    """One record."""
    return MARK + bytes([kind]) + content


def unpack(record: Buffer) -> tuple[SharedRecord, bytes]:
    """Read a record that begins with `MARK`.

    Raises:
        ProtocolError: code "shared": no such kind, or too long or too short for its kind.
    """
    code = record[len(MARK)] if len(record) > len(MARK) else 0
    content = bytes(record[len(MARK) + 1 :])
    expected = _LENGTHS.get(code)  # type: ignore[call-overload]
    if expected is None or (len(content) != expected and (code != SharedRecord.BODIES or not content or len(content) % expected)):
        raise broken(f"a record of kind {code} has {len(content)} bytes")
    return SharedRecord(code), content


def broken(found: str) -> ProtocolError:
    """The error for a record that makes no sense."""
    return ProtocolError(f"read a record about shared memory: {found}", code="shared")


class Ring:
    """One direction, on one side. See Note [No places on the wire].

    Args:
        memory: all of the ring; a multiple of 64 bytes.

    Attributes:
        begin: the position up to which bodies have been copied out, as far as the sender has been told. Positions count all bytes ever put in.
        end: the position after the last body.
    """

    __slots__ = ("begin", "end", "_memory", "_size")

    def __init__(self, memory: memoryview) -> None:
        self.begin = 0
        self.end = 0
        self._memory = memory
        self._size = len(memory)

    def _start(self, length: int) -> int:
        within = self.end % self._size
        return self.end if within + length <= self._size else self.end + self._size - within

    def has_room(self, length: int) -> bool:
        """True if the next body may have that length."""
        return length <= self._size and self._start(length) + length - self.begin <= self._size

    def take(self, length: int) -> memoryview:
        """The place of the next body; `has_room` has said that there is room for it."""
        start = self._start(length)
        self.end = start + length + (-length % _ALIGNMENT)
        at = start % self._size
        return self._memory[at : at + length]

    def released(self, content: bytes) -> None:
        """The receiver tells a position.

        Raises:
            ProtocolError: it has released that much before, or more than was put in.
        """
        (position,) = _RELEASED.unpack(content)
        if not self.begin < position <= self.end:
            raise broken(f"position {position} is released, where bodies are from {self.begin} to {self.end}")
        self.begin = position

    def release(self) -> bytes | None:
        """The record that tells the sender which bodies have been copied out; None while there is little to tell."""
        if 2 * (self.end - self.begin) < self._size:
            return None
        self.begin = self.end
        return pack(SharedRecord.RELEASED, _RELEASED.pack(self.end))

    def close(self) -> None:
        """Release the memory, even if the ring is still referenced."""
        self._memory.release()
