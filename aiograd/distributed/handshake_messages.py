"""Messages and keys of the handshake: what `handshake` says, as bytes, and what both sides derive from it. Sans-IO.

Nothing here decides whether to believe a message; that is for the two sides in `handshake`.

Note [Across versions]
    The envelope of hello and refusal, up to and including the names, and the MAC in their last 32 bytes, are the same in every version, so
    that two versions with nothing in common can still tell each other so.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from aiograd.distributed.cipher import KEY_BYTES, SALT_BYTES
from aiograd.distributed.keyring import Key
from aiograd.distributed.transport import Buffer

#: the longest message of a handshake
MESSAGE_BYTES = 4096
NONCE_BYTES = 32
ID_BYTES = 16
MAC_BYTES = 32
#: the only flag: in a hello, resume this session; in an answer, it is resumed
RESUME = 1

_MAGIC = b"AGRH"
#: magic, type, lowest and highest version, lengths of kid, sender and receiver
_ENVELOPE = struct.Struct("<4sBBBBBB")
_BODY = struct.Struct("<BBI32s32s16s16s")
_KEY_AND_SALT = KEY_BYTES + SALT_BYTES


class MessageType(enum.IntEnum):
    """What a message is; part of what its MAC covers."""

    HELLO = 1
    ANSWER = 2
    FINISH = 3
    REFUSAL = 4


class Body(NamedTuple):
    """What hello and answer say after the names."""

    #: the version chosen; 0 in a hello
    version: int
    flags: int
    #: the longest frame that the sender takes
    frame_bytes: int
    nonce: bytes
    ephemeral: bytes
    incarnation: bytes
    session: bytes

    def pack(self) -> bytes:
        return _BODY.pack(*self)


class Message(NamedTuple):
    """A message in its parts, neither verified nor believed."""

    type: int
    versions: tuple[int, int]
    kid: bytes
    sender: bytes
    receiver: bytes
    #: what the version determines
    rest: bytes
    #: all of the above, as it was sent
    authentic: bytes
    mac: bytes

    def body(self) -> Body | None:
        """The rest as a `Body`; None where it is none."""
        return Body(*_BODY.unpack(self.rest)) if len(self.rest) == _BODY.size else None


class ConnectionKeys(NamedTuple):
    """What both sides derive for one connection: two MAC keys, and a key and a salt for each direction."""

    answer: bytes
    finish: bytes
    from_dialler: tuple[bytes, bytes]
    from_answerer: tuple[bytes, bytes]


def envelope(kind: MessageType, versions: tuple[int, int], kid: str, sender: str, receiver: str) -> bytes:
    """The beginning of a message. The names have been checked."""
    return _ENVELOPE.pack(_MAGIC, kind, *versions, len(kid), len(sender), len(receiver)) + f"{kid}{sender}{receiver}".encode("ascii")


def split(message: Buffer) -> Message | None:
    """The parts of a message; None for what cannot be one. Looks at no more than `MESSAGE_BYTES`."""
    if not _ENVELOPE.size + MAC_BYTES <= len(message) <= MESSAGE_BYTES:
        return None
    message = bytes(message)
    authentic = message[:-MAC_BYTES]
    magic, kind, lowest, highest, kid, sender, receiver = _ENVELOPE.unpack_from(authentic)
    sender_at = _ENVELOPE.size + kid
    receiver_at = sender_at + sender
    end = receiver_at + receiver
    if magic != _MAGIC or end > len(authentic):
        return None
    names = authentic[_ENVELOPE.size : sender_at], authentic[sender_at:receiver_at], authentic[receiver_at:end]
    return Message(kind, (lowest, highest), *names, authentic[end:], authentic, message[-MAC_BYTES:])


def early_mac(key: Key, kind: MessageType, text: bytes) -> bytes:
    """The MAC of a message that is made before there are ephemeral keys: a hello or a refusal."""
    return hmac.digest(key.derive(b"handshake " + kind.name.encode()), text, "sha256")


def transcript_of(hello: bytes, answer: bytes) -> bytes:
    """A hash of everything said up to and including the answer without its MAC."""
    return hashlib.sha256(struct.pack("<I", len(hello)) + hello + answer).digest()


def derive_keys(key: Key, private: X25519PrivateKey, public: bytes, transcript: bytes) -> ConnectionKeys:
    """All keys of a connection, out of the pre-shared key, the ephemeral secret and everything said.

    Raises:
        ValueError: the peer's ephemeral key is one of the few that make the secret predictable.
    """
    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    size = 2 * MAC_BYTES + 2 * _KEY_AND_SALT
    material = HKDF(SHA256(), size, salt=key.derive(b"connection"), info=b"aiograd connection" + transcript).derive(shared)
    there = material[2 * MAC_BYTES : -_KEY_AND_SALT]
    back = material[-_KEY_AND_SALT:]
    return ConnectionKeys(
        material[:MAC_BYTES],
        material[MAC_BYTES : 2 * MAC_BYTES],
        (there[:KEY_BYTES], there[KEY_BYTES:]),
        (back[:KEY_BYTES], back[KEY_BYTES:]),
    )


def finish_message(keys: ConnectionKeys, transcript: bytes) -> bytes:
    """The last message. Both sides can make it, so the answerer compares; the MAC covers everything said through the transcript."""
    head = _ENVELOPE.pack(_MAGIC, MessageType.FINISH, 0, 0, 0, 0, 0)
    return head + hmac.digest(keys.finish, transcript + head, "sha256")
