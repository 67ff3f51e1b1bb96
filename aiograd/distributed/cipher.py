"""Seal and Open: the two ends of one encrypted direction. AES-256-GCM per frame, with a counter for the nonce.

A record is ``counter (u64, little endian) | ciphertext | tag (16 bytes)``. The key is fresh for each connection and each direction, so a
counter is never used twice with one key, and records of another connection or of the other direction fail by their tag.

Note [Lost and late records]
    Channels may lose and reorder frames, so the receiver takes a counter once, anywhere in a window of the latest 1,024. A record that
    was seen before, or is older than the window, raises ``ProtocolError(code="replayed")`` and changes nothing: on a channel that repeats
    frames it can simply be dropped. Everything else that is wrong is an `AuthenticationError`: somebody altered bytes, close the channel.

Note [How much one key may protect]
    2^48 records, and 2^52 bytes, after which an observer's chance to tell the cipher from noise is still below 2^-32 (birthday bound on
    128-bit blocks). Then the sender refuses; a new connection has new keys.

Note [Small and large frames]
    A small frame is joined and sealed in one call. A large one is encrypted piece by piece straight into the record, without the two
    copies of a join, at the cost of setting up a context (3 us).

Note [Buffers that are used again]
    Large records and frames lie in buffers that belong to the connection and serve again as soon as nobody has a view of them, which a
    bytearray knows: it cannot be resized then. Views stay valid for as long as they are held; a buffer that is still looked at is left
    alone and another one is made. Allocating afresh instead makes the C library return the pages to the system and fault them in again for
    each frame, ten times the cost of the cipher (1.0 GB/s against 9 for both sides at 1 MiB, where page faults are dear).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from aiograd.distributed.transport import Buffer
from aiograd.errors import AuthenticationError, LimitError, ProtocolError

KEY_BYTES = 32
SALT_BYTES = 4
COUNTER_BYTES = 8
TAG_BYTES = 16
#: by how much a record is longer than its frame
OVERHEAD = COUNTER_BYTES + TAG_BYTES
WINDOW = 1024
MAX_RECORDS = 1 << 48
MAX_BYTES = 1 << 52
#: frames of at least this many bytes are large, see Note [Small and large frames]
LARGE = 64 << 10
#: large records that a connection keeps for sending: as many as its channel holds before it asks to stop
KEPT_RECORDS = 3

_MASK = (1 << WINDOW) - 1
_COUNTER = struct.Struct("<Q")


class _Buffers:
    """Buffers that are used again, see Note [Buffers that are used again].

    Args:
        kept: how many; when all of them are in use, further ones are made and not kept.
    """

    __slots__ = ("_kept", "_buffers")

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._buffers: list[bytearray] = []

    def take(self, size: int) -> memoryview:
        """`size` writable bytes of unknown content, which belong to the caller while it holds the view or a part of it."""
        buffers = self._buffers
        for index, buffer in enumerate(buffers):
            try:
                buffer.append(0)
            except BufferError:
                continue
            buffer.pop()
            if len(buffer) < size:
                buffers[index] = buffer = bytearray(size)
            return memoryview(buffer)[:size]
        buffer = bytearray(size)
        if len(buffers) < self._kept:
            buffers.append(buffer)
        return memoryview(buffer)


class Seal:
    """Encrypts the frames that one side sends on one connection.

    Args:
        key: 32 bytes, used for nothing else.
        salt: 4 bytes, the fixed part of every nonce.
        frame_bytes: the longest frame.
    """

    __slots__ = ("_key", "_encrypt", "_salt", "_frame_bytes", "_counter", "_bytes", "_buffers")

    def __init__(self, key: bytes, salt: bytes, frame_bytes: int) -> None:
        self._key = algorithms.AES(key)
        self._encrypt = AESGCM(key).encrypt
        self._salt = salt
        self._frame_bytes = frame_bytes
        self._counter = 0
        self._bytes = 0
        self._buffers = _Buffers(KEPT_RECORDS)

    def seal(self, parts: Sequence[Buffer]) -> bytes | memoryview:
        """One record out of one frame.

        Args:
            parts: the frame in pieces; views must be C-contiguous.

        Raises:
            LimitError: the frame is longer than was agreed on.
            ProtocolError: code "key_exhausted": the key has protected enough; connect anew.
        """
        size = 0
        for part in parts:
            size += part.nbytes if type(part) is memoryview else len(part)
        if size > self._frame_bytes:
            raise LimitError(f"sealing a frame of {size} bytes: the connection carries at most {self._frame_bytes}; cut the message into more frames")
        counter = self._counter
        self._bytes += size
        if counter >= MAX_RECORDS or self._bytes > MAX_BYTES:
            raise ProtocolError(
                f"sealing record {counter} of a connection: its key has protected all that it may; close the connection and open a new one",
                code="key_exhausted",
            )
        self._counter = counter + 1
        head = _COUNTER.pack(counter)
        if size < LARGE:
            return head + self._encrypt(self._salt + head, b"".join(parts), None)
        record = self._buffers.take(size + OVERHEAD)
        record[:COUNTER_BYTES] = head
        encryptor = Cipher(self._key, modes.GCM(self._salt + head)).encryptor()
        at = COUNTER_BYTES
        for part in parts:
            if type(part) is memoryview and part.format != "B":
                part = part.cast("B")  # the library takes nothing else
            at += encryptor.update_into(part, record[at:])
        encryptor.finalize()
        record[at:] = encryptor.tag
        return record


class Open:
    """Decrypts the records that one side receives on one connection.

    Args:
        key, salt, frame_bytes: as for the peer's `Seal`.
    """

    __slots__ = ("_key", "_decrypt", "_salt", "_record_bytes", "_highest", "_seen", "_buffers")

    def __init__(self, key: bytes, salt: bytes, frame_bytes: int) -> None:
        self._key = algorithms.AES(key)
        self._decrypt = AESGCM(key).decrypt
        self._salt = salt
        self._record_bytes = frame_bytes + OVERHEAD
        self._highest = -1
        #: bit i: the record with counter `_highest - i` has arrived
        self._seen = 0
        self._buffers = _Buffers(1)

    def open(self, record: Buffer) -> bytes | memoryview:
        """The frame in a record, as bytes or as a view that nobody else has. After an error everything is as it was before.

        Raises:
            AuthenticationError: the peer did not make this record for this connection and direction.
            ProtocolError: code "replayed": it has arrived before, or is too old to know, see Note [Lost and late records].
        """
        if not OVERHEAD <= len(record) <= self._record_bytes:
            raise _refused()
        head = bytes(record[:COUNTER_BYTES])
        (counter,) = _COUNTER.unpack(head)
        if counter >= MAX_RECORDS:
            raise _refused()
        ahead = counter - self._highest
        if ahead <= 0 and (ahead <= -WINDOW or self._seen >> -ahead & 1):
            raise ProtocolError(
                f"opening record {counter} of a connection: it came before, or is {WINDOW} or more behind the latest ({self._highest}); drop it",
                code="replayed",
            )
        try:
            if len(record) < LARGE:
                frame: bytes | memoryview = self._decrypt(self._salt + head, memoryview(record)[COUNTER_BYTES:], None)
            else:
                frame = self._open_large(memoryview(record), self._salt + head)
        except InvalidTag:
            raise _refused() from None
        if ahead > 0:
            self._seen = (self._seen << ahead | 1) & _MASK if ahead < WINDOW else 1
            self._highest = counter
        else:
            self._seen |= 1 << -ahead
        return frame

    def _open_large(self, record: memoryview, nonce: bytes) -> memoryview:
        frame = self._buffers.take(len(record) - OVERHEAD)
        decryptor = Cipher(self._key, modes.GCM(nonce, bytes(record[-TAG_BYTES:]))).decryptor()
        decryptor.update_into(record[COUNTER_BYTES:-TAG_BYTES], frame)
        decryptor.finalize()
        return frame


def _refused() -> AuthenticationError:
    return AuthenticationError("opening a record: its bytes are not what the peer sealed for this connection; close it and connect anew")
