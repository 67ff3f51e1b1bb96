"""Structured damage to valid bytes, for the fuzz tests of what reads bytes from peers."""

from __future__ import annotations

import os
import random
import struct

INTERESTING = (0, 1, 2, 7, 15, 16, 63, 64, 65, 127, 128, 255, 1024, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)


def cases(default: int) -> int:
    """How many mutated inputs a fuzz test draws: `default`, or what the environment variable AIOGRAD_FUZZ says."""
    return int(os.environ.get("AIOGRAD_FUZZ", default))


def mutate(rng: random.Random, data: bytes, other: bytes) -> bytearray:
    """`data` after one to four changes, each drawn from `rng`; `other` is where foreign bytes come from."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(_CHANGES)(rng, result, other)
    return result


def _flip(rng: random.Random, data: bytearray, other: bytes) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, other: bytes) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 255, rng.randrange(16), rng.randrange(256)))


def _number(rng: random.Random, data: bytearray, other: bytes) -> None:
    """Overwrite a field, as lengths, counts and offsets are."""
    width = rng.choice((1, 2, 4, 8))
    if len(data) >= width:
        place = rng.randrange(len(data) - width + 1)
        old = int.from_bytes(data[place : place + width], "little")
        new = rng.choice((rng.choice(INTERESTING), old + 1, old - 1, old * 2, len(data), rng.getrandbits(8 * width)))
        data[place : place + width] = struct.pack("<Q", new % 2**64)[:width]


def _cut(rng: random.Random, data: bytearray, other: bytes) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _extend(rng: random.Random, data: bytearray, other: bytes) -> None:
    data += rng.choice((bytes(rng.randrange(1, 100)), rng.randbytes(rng.randrange(1, 100))))


def _remove(rng: random.Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.randrange(1, 9)]


def _insert(rng: random.Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = rng.randbytes(rng.randrange(1, 9))


def _splice(rng: random.Random, data: bytearray, other: bytes) -> None:
    """Put a part of another input in the place of a part of this one."""
    start, source = rng.randrange(len(data) + 1), rng.randrange(len(other) + 1)
    size = rng.randrange(1, 65)
    data[start : start + size] = other[source : source + rng.choice((size, rng.randrange(1, 65)))]


def _repeat(rng: random.Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(len(data) + 1)
    piece = bytes(data[start : start + rng.randrange(1, 65)])
    data[start:start] = piece * rng.choice((1, 2, 50))


_CHANGES = (_flip, _flip, _set, _set, _number, _number, _number, _cut, _extend, _remove, _insert, _splice, _repeat)
