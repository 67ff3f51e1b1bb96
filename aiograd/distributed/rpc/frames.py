"""The header of every frame between two workers: the message that the frame belongs to, and its purpose.

A message (a call, a reply, the gradients of an edge) is sent as one or more frames, so that a large message does not delay small ones: a
channel sends one frame at a time. This module turns a header into bytes and back and rejects malformed ones; `session` interprets
the frames of a request.

Note [Order of the checks]
    Is the header complete, is it ours (magic, version, kind, reserved bits), do its numbers fit the limits and each other? Nothing is
    allocated for a header's claims, and no check reads the body: the seal of the record that carried the frame has shown that it is unaltered. Each
    check has a code of its own in `ProtocolError.code`:

    ========== ====================================================================================
    short      fewer bytes than a header has
    magic      not a frame
    version    `VersionMismatch`
    kind       no such kind of frame
    flags      a reserved bit is set, or a request kind on a frame that is no request
    frame_size more bytes after the header than `Limits.frame_bytes`
    length     more or fewer bytes after the header than it says
    total      an answer longer than `Limits.message_bytes`; a request is refused (see Note [Limits] in `inbound`)
    fragment   bytes that reach beyond the end of the message, or none of a message that has some
    control    a control frame with a body (only HEARTBEAT may have one, and ENDED has), an offset, a total or a deadline
    id         a frame about a message without its id, or the other way round
    ========== ====================================================================================
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import ProtocolError, VersionMismatch

#: magic, version, kind, flags, message id, offset, total, length of the body, deadline in ms, clock of the sender in ms, watermark
HEADER: Final = struct.Struct("<4sBBHQQQIIIQ")
MAGIC: Final = b"AGRD"
#: oldest and newest version of the protocol that this side speaks
PROTOCOL_VERSIONS: Final = (5, 5)

_OLDEST, _NEWEST = PROTOCOL_VERSIONS
_SIZE = HEADER.size
_pack = HEADER.pack
_unpack = HEADER.unpack_from


class FrameKind(enum.IntEnum):
    """The purpose of a frame."""

    REQUEST = 1
    RESPONSE = 2
    #: a response that is an error
    FAILURE = 3
    #: the whole request has arrived and is running, or its response is known to the requester
    RECEIVED = 4
    #: asks what became of a request
    PROBE = 5
    #: the result of a request is no longer wanted
    CANCEL = 6
    #: answers a probe: no such request here
    UNKNOWN = 7
    #: a sign of life; its body, if any, says which requests are unresolved
    HEARTBEAT = 8
    #: an orderly end: no more frames follow
    GOODBYE = 9
    #: of an earlier session, which its body names: requests from this id on were not delivered
    ENDED = 10


_KINDS: Final = tuple({int(kind): kind for kind in FrameKind}.get(code) for code in range(256))
#: kinds above this one carry no piece of a message
_LAST_WITH_BODY: Final = int(FrameKind.FAILURE)
_REQUEST: Final = int(FrameKind.REQUEST)
_FIRST_WITHOUT_ID: Final = int(FrameKind.HEARTBEAT)
_ENDED: Final = int(FrameKind.ENDED)
#: bytes of the body of a ENDED
SESSION_BYTES: Final = 16


class Frame(NamedTuple):
    """One parsed frame."""

    kind: FrameKind
    #: the kind of a REQUEST, a number that this layer does not interpret; 0 on other frames
    request_kind: int
    #: the id of the request that the frame is about, counted by the requester from 1; 0 if it is about none
    id: int
    #: the position of `body` in the message, and the length of the message
    offset: int
    total: int
    #: milliseconds the requester still waits; 0: not said
    deadline_ms: int
    #: the sender's clock, see Note [Deadlines] in `frame_age`
    sent_ms: int
    #: the sender's lowest unresolved request
    watermark: int
    #: a view into the frame, which others may use again; where it is writable, memory of its own, which is given away
    body: memoryview


def pack_header(
    kind: FrameKind,
    message_id: int,
    body: Sequence[Buffer] = (),
    *,
    request_kind: int = 0,
    offset: int = 0,
    total: int = 0,
    deadline_ms: int = 0,
    sent_ms: int = 0,
    watermark: int = 0,
) -> bytes:
    """Make the header that goes before `body`.

    Args:
        kind: of the frame.
        message_id: of the request it is about; 0 for HEARTBEAT and GOODBYE.
        body: the pieces of the frame's body, each of one-byte items.
        request_kind: 0 to 255, of a REQUEST.
        offset: of the body in the message, bytes.
        total: of the message, bytes.
        deadline_ms: how long the requester still waits, milliseconds; 0 says nothing.
        sent_ms: the clock of this side, see `frame_age.clock`.
        watermark: the sender's lowest unresolved request.

    Returns:
        `HEADER.size` bytes.
    """
    length = 0
    for piece in body:
        length += len(piece)
    return _pack(MAGIC, _NEWEST, kind, request_kind, message_id, offset, total, length, deadline_ms, sent_ms, watermark)


def destination(header: Buffer) -> tuple[int, int, int, int]:
    """The kind, message id, offset and length of body that a header claims; nothing is checked."""
    _, _, kind, _, message_id, offset, _, length, _, _, _ = _unpack(header)
    return kind, message_id, offset, length


def parse(frame: Buffer, limits: Limits, body: memoryview | None = None) -> Frame:
    """Read and check one frame; see Note [Order of the checks].

    Args:
        frame: the header and the body, nothing else; the header alone where there is `body`.
        limits: `frame_bytes` bounds the body, `message_bytes` the answer it belongs to.
        body: the body, where it is in memory of its own.

    Returns:
        The frame; its body is `body` or a view into `frame`.

    Raises:
        VersionMismatch: another version of the protocol; names both sides' versions. ProtocolError: anything else that is wrong.
    """
    size = len(frame) if body is None else _SIZE + len(body)
    if size < _SIZE:
        raise _broken("short", f"found {size} bytes, expected at least the {_SIZE} of a header")
    magic, version, code, flags, message_id, offset, total, length, deadline_ms, sent_ms, watermark = _unpack(frame)
    if magic != MAGIC:
        raise _broken("magic", f"it starts with {magic.hex()}, expected {MAGIC.hex()}; the other side speaks another protocol")
    if not _OLDEST <= version <= _NEWEST:
        raise version_mismatch(version, version)
    kind = _KINDS[code]
    if kind is None:
        raise _broken("kind", f"found kind {code}, expected 1 to {len(FrameKind)}")
    if flags and (flags > 0xFF or code != _REQUEST):
        raise _broken("flags", f"{kind.name} has flags {flags:#06x}, of which reserved ones are set")
    if length > limits.frame_bytes:
        raise _broken("frame_size", f"{kind.name} has {length} bytes after the header, above Limits.frame_bytes={limits.frame_bytes}")
    if length != size - _SIZE:
        raise _broken("length", f"{kind.name} says that {length} bytes follow its header, found {size - _SIZE}")
    if code <= _LAST_WITH_BODY:
        if total > limits.message_bytes and code != _REQUEST:
            raise _broken("total", f"{kind.name} belongs to a message of {total} bytes, above Limits.message_bytes={limits.message_bytes}")
        if offset + length > total or (not length and total):
            raise _broken("fragment", f"{kind.name} has {length} bytes at {offset} of a message of {total}")
    elif offset or total or deadline_ms or (length != SESSION_BYTES if code == _ENDED else length and code != _FIRST_WITHOUT_ID):
        raise _broken("control", f"{kind.name} has {length} bytes at {offset} of {total} and deadline {deadline_ms}, expected none of them")
    if (code < _FIRST_WITHOUT_ID or code == _ENDED) != (message_id > 0):
        raise _broken("id", f"{kind.name} has id {message_id}, expected {'none' if message_id else 'a request'}")
    return Frame(kind, flags, message_id, offset, total, deadline_ms, sent_ms, watermark, memoryview(frame)[_SIZE:] if body is None else body)


def version_mismatch(oldest: int, newest: int) -> VersionMismatch:
    """The error for a peer that speaks the versions `oldest` to `newest`, when none of them is spoken here."""
    return VersionMismatch(
        f"the peer speaks protocol versions {oldest} to {newest}, this side {_OLDEST} to {_NEWEST}; upgrade aiograd on "
        f"{'the side of the peer' if newest < _OLDEST else 'this side'}",
        code="version",
    )


def _broken(code: str, found: str) -> ProtocolError:
    return ProtocolError(f"read a frame: {found}", code=code)
