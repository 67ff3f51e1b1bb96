"""Seal and Open: the two ends of one encrypted direction, a Noise CipherState at each. AES-256-GCM per frame, with a counter for the nonce.

A record is ``ciphertext | tag (16 bytes)``, a transport message of the Noise Protocol Framework, except that it may be longer than 65,535
bytes. Both sides count the records; the counter is not sent. The key is fresh for each connection and each direction, so a counter is never
used twice with one key, and records of another connection or of the other direction fail by their tag.

Note [One record after the other]
    Channels carry frames once and in order, so the receiver opens each record with the counter that comes next and no other. One that was
    seen before, or before which another is missing, fails by its tag like an altered one: an `AuthenticationError`, and the channel
    is closed.

Note [How much one key may protect]
    2^48 records, and 2^52 bytes, after which an observer's chance to tell the cipher from noise is still below 2^-32 (birthday bound on
    128-bit blocks). Then the sender refuses; a new connection has new keys.

Note [Small and large frames]
    A small frame is joined and sealed in one call. A large one is encrypted piece by piece straight into the record, without the two
    copies of a join, at the cost of setting up a context (3 us).

Note [Buffers that are used again]
    Large records lie in buffers that belong to the connection and serve again as soon as no view of them is left, which a bytearray knows: it cannot
    be resized then. Views stay valid for as long as they are held; a buffer that is still looked at is left alone and another one is made. Allocating
    afresh instead makes the C library return the pages to the system and fault them in again for each frame, ten times the cost of the cipher (1.0
    GB/s against 9 for both sides at 1 MiB, where page faults are dear).

Note [Heads and bodies]
    The first bytes of a large frame say where the rest of it belongs, so that it is decrypted to there and not copied. They are
    decrypted first, and are worth nothing until the tag has been checked, when all is decrypted: the code that gives a place for the body must do no
    more than that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import AuthenticationError, LimitError, ProtocolError

#: of the tag, by which a record is longer than its frame
TAG_BYTES = 16
MAX_RECORDS = 1 << 48
MAX_BYTES = 1 << 52
#: frames of at least this many bytes are large, see Note [Small and large frames]
LARGE = 64 << 10
#: large records that a connection keeps for sending: as many as its channel holds before it asks to stop
KEPT_RECORDS = 3
#: gives memory for the body of a frame, which overwrites all of it; None: new memory is to be made
Place: TypeAlias = Callable[[Buffer], memoryview | None]

#: of a counter
_NONCE = struct.Struct(">4xQ")


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
        frame_bytes: the longest frame.
    """

    __slots__ = ("_key", "_encrypt", "_frame_bytes", "_counter", "_bytes", "_buffers")

    def __init__(self, key: bytes, frame_bytes: int) -> None:
        self._key = algorithms.AES(key)
        self._encrypt = AESGCM(key).encrypt
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
        nonce = _NONCE.pack(counter)
        if size < LARGE:
            return self._encrypt(nonce, b"".join(parts), None)
        record = self._buffers.take(size + TAG_BYTES)
        encryptor = Cipher(self._key, modes.GCM(nonce)).encryptor()
        at = 0
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
        key, frame_bytes: as for the peer's `Seal`.
    """

    __slots__ = ("_key", "_decrypt", "_record_bytes", "_next")

    def __init__(self, key: bytes, frame_bytes: int) -> None:
        self._key = algorithms.AES(key)
        self._decrypt = AESGCM(key).decrypt
        self._record_bytes = frame_bytes + TAG_BYTES
        #: the counter of the next record
        self._next = 0

    def open(self, record: Buffer) -> bytes:
        """The frame in a record. After an error everything is as it was before.

        Raises:
            AuthenticationError: this is not the next record that the peer made for this connection and direction.
        """
        counter = self._next
        if not TAG_BYTES <= len(record) <= self._record_bytes or counter >= MAX_RECORDS:
            raise _refused()
        try:
            frame = self._decrypt(_NONCE.pack(counter), record, None)
        except InvalidTag:
            raise _refused() from None
        self._next = counter + 1
        return frame

    def open_in_place(self, record: Buffer, head_bytes: int, place: Place) -> tuple[bytes, memoryview | None]:
        """The frame in a record: a small one and None, a large one as its head and its body; see Note [Heads and bodies].

        Args:
            head_bytes: the length of the head of a large frame.
            place: called with that head for the place of the body.

        Returns:
            The frame and None; or the head, and the body as a writable view: of its place, or of memory of its own.

        Raises:
            AuthenticationError: as for `open`, and after it everything is as it was before, but for the bytes at the place of the body.
        """
        if len(record) < LARGE:
            return self.open(record), None
        counter = self._next
        if len(record) > self._record_bytes or counter >= MAX_RECORDS:
            raise _refused()
        view = memoryview(record)
        try:
            decryptor = Cipher(self._key, modes.GCM(_NONCE.pack(counter), bytes(view[-TAG_BYTES:]))).decryptor()
            head = decryptor.update(view[:head_bytes])
            rest = view[head_bytes:-TAG_BYTES]
            body = place(head)
            if body is None or len(body) != len(rest):
                body = np.empty(len(rest), np.uint8).data
            decryptor.update_into(rest, body)
            decryptor.finalize()
        except InvalidTag:
            raise _refused() from None
        self._next = counter + 1
        return head, body


def _refused() -> AuthenticationError:
    return AuthenticationError("opening a record: it is not what the peer sealed next for this connection; close it and connect anew")
