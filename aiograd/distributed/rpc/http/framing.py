"""Framing: the few bytes that RFC 6455 puts around a message, as pure functions.

Only what two workers need: whole binary messages, close, ping and pong; nothing is compressed. Fragments of other clients are understood
(`channel`), never sent.
"""

from __future__ import annotations

import struct

import numpy as np

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
FIN = 0x80
MASKED = 0x80

#: reasons to close
NORMAL, PROTOCOL_FAULT, UNSUPPORTED, TOO_BIG, TRY_AGAIN = 1000, 1002, 1003, 1009, 1013

#: more than this is cheaper to mask with numpy than as one large integer
_NUMPY_FROM = 900

_SHORT = struct.Struct("!BB")
_MEDIUM = struct.Struct("!BBH")
_LONG = struct.Struct("!BBQ")


def header(first: int, length: int, mask_bit: int) -> bytes:
    """The header of one frame up to its mask.

    Args:
        first: opcode and FIN.
        length: bytes of payload.
        mask_bit: MASKED where a mask follows, else 0.
    """
    if length < 126:
        return _SHORT.pack(first, mask_bit | length)
    if length < 65536:
        return _MEDIUM.pack(first, mask_bit | 126, length)
    return _LONG.pack(first, mask_bit | 127, length)


def masked(data: bytes | bytearray | memoryview, key: bytes) -> bytes | memoryview:
    """A copy of `data` with every byte combined with one of the four of `key`, which both masks and unmasks."""
    length = len(data)
    if length <= _NUMPY_FROM:
        pattern = (key * (length // 4 + 1))[:length]
        return (int.from_bytes(data, "little") ^ int.from_bytes(pattern, "little")).to_bytes(length, "little")
    result = np.empty(length, np.uint8)
    words = length // 4
    np.bitwise_xor(np.frombuffer(data, np.uint32, words), np.frombuffer(key, np.uint32)[0], out=result[: words * 4].view(np.uint32))
    for index in range(words * 4, length):
        result[index] = data[index] ^ key[index % 4]
    return result.data


def mask_in_place(data: bytearray, key: bytes) -> None:
    """Mask or unmask `data` where it is."""
    words = len(data) // 4
    view = np.frombuffer(data, np.uint32, words)
    np.bitwise_xor(view, np.frombuffer(key, np.uint32)[0], out=view)
    for index in range(words * 4, len(data)):
        data[index] ^= key[index % 4]
