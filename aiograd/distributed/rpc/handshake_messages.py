"""Messages of the handshake: what `handshake` says, as bytes. Sans-IO.

::

    hello    envelope | Noise message | MAC     envelope: magic, type, versions, key id, names of sender and receiver
    answer   magic, type | Noise message
    finish   magic, type | record without a frame in it
    refusal  envelope | MAC

Nothing here decides whether to believe a message; that is for the two sides in `handshake`.

Note [Across versions]
    The envelope of hello and refusal, and the MAC in their last 32 bytes, are the same in every version, so that two versions with nothing in
    common can still tell each other so.
"""

from __future__ import annotations

import enum
import hmac
import struct
from typing import NamedTuple

from aiograd.distributed.rpc.keyring import Key
from aiograd.distributed.rpc.transport import Buffer

#: the longest message of a handshake
MESSAGE_BYTES = 4096
ID_BYTES = 16
MAC_BYTES = 32
#: the only flag: in a hello, resume this session; in an answer, it is resumed
RESUME = 1

_MAGIC = b"AGRH"
_PREFIX = struct.Struct("<4sB")
#: after the prefix: lowest and highest version, lengths of kid, sender and receiver
_ENVELOPE = struct.Struct("<BBBBB")
_NAMES_AT = _PREFIX.size + _ENVELOPE.size
_PAYLOAD = struct.Struct("<BBI16s16s")


class MessageType(enum.IntEnum):
    """The kinds of message."""

    HELLO = 1
    ANSWER = 2
    FINISH = 3
    REFUSAL = 4


class Payload(NamedTuple):
    """The content of hello and answer in their Noise messages."""

    #: the version chosen; 0 in a hello
    version: int
    flags: int
    #: the longest frame that the sender takes
    frame_bytes: int
    incarnation: bytes
    session: bytes

    def pack(self) -> bytes:
        return _PAYLOAD.pack(*self)

    @classmethod
    def unpack(cls, payload: bytes) -> Payload | None:
        """The payload of these bytes; None if they are too many or too few."""
        return cls(*_PAYLOAD.unpack(payload)) if len(payload) == _PAYLOAD.size else None


class Enveloped(NamedTuple):
    """A hello or a refusal in its parts, neither verified nor believed."""

    versions: tuple[int, int]
    kid: bytes
    sender: bytes
    receiver: bytes
    #: all of the above, as it was sent
    envelope: bytes
    #: determined by the version
    body: bytes
    mac: bytes


def prefix(kind: MessageType) -> bytes:
    """How messages of this type begin."""
    return _PREFIX.pack(_MAGIC, kind)


def envelope(kind: MessageType, versions: tuple[int, int], kid: str, sender: str, receiver: str) -> bytes:
    """The beginning of a hello or a refusal. The names have been checked."""
    return prefix(kind) + _ENVELOPE.pack(*versions, len(kid), len(sender), len(receiver)) + f"{kid}{sender}{receiver}".encode("ascii")


def body_of(kind: MessageType, message: Buffer) -> bytes | None:
    """The bytes of a message behind its prefix; None for bytes that are no such message. Looks at no more than `MESSAGE_BYTES`."""
    if len(message) > MESSAGE_BYTES or message[: _PREFIX.size] != prefix(kind):
        return None
    return bytes(message[_PREFIX.size :])


def open_envelope(kind: MessageType, message: Buffer) -> Enveloped | None:
    """The parts of a hello or a refusal; None for what cannot be one. Looks at no more than `MESSAGE_BYTES`."""
    if not _NAMES_AT + MAC_BYTES <= len(message) <= MESSAGE_BYTES or message[: _PREFIX.size] != prefix(kind):
        return None
    message = bytes(message)
    lowest, highest, kid, sender, receiver = _ENVELOPE.unpack_from(message, _PREFIX.size)
    sender_at = _NAMES_AT + kid
    receiver_at = sender_at + sender
    end = receiver_at + receiver
    if end > len(message) - MAC_BYTES:
        return None
    names = message[_NAMES_AT:sender_at], message[sender_at:receiver_at], message[receiver_at:end]
    return Enveloped((lowest, highest), *names, message[:end], message[end:-MAC_BYTES], message[-MAC_BYTES:])


def mac_of(key: Key, kind: MessageType, text: bytes) -> bytes:
    """The MAC of a hello or a refusal, which is proof before there are keys of the connection."""
    return hmac.digest(key.derive(b"handshake " + kind.name.encode()), text, "sha256")
