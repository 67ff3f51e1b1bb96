"""Reduced-precision encodings: tensors that take a half, a quarter or an eighth of their bytes on the wire, if the user asks for it.

The dtype of a tensor is unchanged; only its values are rounded, once, by the sender. All is off by default.

Note [Values that do not fit]
    Finite values stay finite: a value that is too large becomes the largest value of the encoding, with its sign. All rounding is to
    nearest, ties to even, straight from the source: a float64 is not rounded to float32 first.

    ========= ========================= ======================== =================================================
    encoding  bytes of n values         NaN, infinities          largest value, relative error
    ========= ========================= ======================== =================================================
    FLOAT16   2 n                       stay                     65504, 2**-11 (absolute 2**-25 below 2**-14)
    BFLOAT16  2 n                       stay                     3.39e38, 2**-8
    BLOCK8    n + 4 per 4,096           arrive as NaN            3.4e38, 1/254 of the block's largest value
    ========= ========================= ======================== =================================================

    A NaN stays a NaN, its payload does not. BLOCK8 writes 127 times each value over the largest of its block, and that largest as a
    float32 in front; it is for gradients and activations of like size. Blocks run over the values in C order, for any shape.
"""

from __future__ import annotations

import enum
import math
from typing import Any, Final, TypeAlias

import numpy as np

from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import ArgumentTypeError, ProtocolError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: values per scale of BLOCK8
BLOCK: Final = 4096

#: values that are worked on at a time, so that what lies between the steps stays in the cache
_STRETCH: Final = 16 * BLOCK
_HALF_LARGEST: Final = np.float16(65504)
_BRAIN_LARGEST: Final = np.uint16(0x7F7F)
_BRAIN_INFINITE: Final = np.uint16(0x7F80)
_NOT_A_NUMBER: Final = np.int8(-128)
#: the values of the codes of BLOCK8, in parts of the block's largest value, indexed by a code's bits
_PARTS: Array = np.concatenate([np.arange(128), [np.nan], np.arange(-127, 0)]) / 127
_PARTS_OF: Final[dict[int, Array]] = {4: _PARTS.astype(np.float32), 8: _PARTS}
_SINGLE_LARGEST: Final = np.finfo(np.float32).max


class Encoding(enum.IntEnum):
    """The form in which the values of a tensor are written.

    >>> [encoding.name for encoding in dist.Encoding]
    ['PLAIN', 'FLOAT16', 'BFLOAT16', 'BLOCK8']
    """

    #: as they are, bit for bit
    PLAIN = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    #: 8 bits and a scale per 4,096 values
    BLOCK8 = 3


def can_encode(dtype: np.dtype[Any]) -> bool:
    """True if the reduced-precision encodings take tensors of this dtype: float32 and float64."""
    return dtype.kind == "f" and dtype.itemsize in (4, 8)


def packed_size(encoding: Encoding, size: int, itemsize: int = 4) -> int:
    """Bytes that `size` values take; `itemsize`, the bytes of one value as it is, matters for PLAIN only."""
    if encoding is Encoding.PLAIN:
        return size * itemsize
    if encoding is Encoding.BLOCK8:
        return size + 4 * -(-size // BLOCK)
    return 2 * size


def pack(array: Array, encoding: Encoding) -> Buffer:
    """Write the values of an array, in C order.

    Args:
        array: float32 or float64 of any shape and strides; of PLAIN any dtype without objects.
        encoding: how to write them; see Note [Values that do not fit].

    Returns:
        `packed_size` bytes; of PLAIN possibly a view of the array.

    Raises:
        ArgumentTypeError: a dtype that the encoding does not take.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    if encoding is Encoding.PLAIN:
        return flat.view(np.uint8).data
    if not can_encode(array.dtype):
        raise ArgumentTypeError(f"pack: {encoding.name} takes float32 and float64, found {array.dtype}; send it with Encoding.PLAIN")
    packed = np.empty(packed_size(encoding, flat.size), np.uint8)
    with np.errstate(all="ignore"):
        if encoding is Encoding.BLOCK8:
            scales = packed[: packed.size - flat.size].view("<f4")
            codes = packed[packed.size - flat.size :].view(np.int8)
            for start in range(0, flat.size, _STRETCH):
                stop = min(start + _STRETCH, flat.size)
                _pack_blocks(flat[start:stop], scales[start // BLOCK : -(-stop // BLOCK)], codes[start:stop])
        else:
            pack_stretch = _pack_half if encoding is Encoding.FLOAT16 else _pack_brain
            halves = packed.view("<u2")
            for start in range(0, flat.size, _STRETCH):
                pack_stretch(flat[start : start + _STRETCH], halves[start : start + _STRETCH])
    return packed.data


def unpack(buffer: Buffer, encoding: Encoding, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Read what `pack` wrote into an array of its own.

    Args:
        buffer: `packed_size` bytes.
        encoding: how they were written.
        shape: of the array.
        dtype: of the array; float32 or float64 unless the encoding is PLAIN.

    Raises:
        ProtocolError: a scale that is not a finite number (code ``scale``), or a wrong number of bytes (code ``tensor_size``).
    """
    size = math.prod(shape)
    expected = packed_size(encoding, size, dtype.itemsize)
    if len(buffer) != expected:
        raise ProtocolError(f"unpack: found {len(buffer)} bytes, expected {expected} for {size} values as {encoding.name}", code="tensor_size")
    array = np.empty(shape, dtype)
    flat = array.reshape(-1)
    if not size:
        return array
    packed = np.frombuffer(buffer, np.uint8)
    with np.errstate(all="ignore"):
        if encoding is Encoding.PLAIN:
            flat.view(np.uint8)[:] = packed
        elif encoding is Encoding.FLOAT16:
            flat[:] = packed.view("<f2")
        elif encoding is Encoding.BFLOAT16:
            halves = packed.view("<u2")
            for start in range(0, flat.size, _STRETCH):
                wide = halves[start : start + _STRETCH].astype(np.uint32)
                wide <<= np.uint32(16)
                flat[start : start + _STRETCH] = wide.view(np.float32)
        else:
            _unpack_blocks(packed, flat)
    return array


def _pack_half(values: Array, out: Array) -> None:
    halves = values.astype(np.float16)
    lost = np.isinf(halves)
    if lost.any():
        lost &= np.isfinite(values)
        halves[lost] = np.copysign(_HALF_LARGEST, halves[lost])
    out[:] = halves.view(np.uint16)


def _pack_brain(values: Array, out: Array) -> None:
    single = values.astype(np.float32)
    bits = single.view(np.uint32)
    if values.dtype.itemsize == 8:
        # Rounding twice is wrong where the first rounding ends in the middle between two results: lean towards the true value there.
        middle = (bits & np.uint32(0xFFFF)) == 0x8000
        if middle.any():
            true, rounded = np.abs(values[middle]), np.abs(single[middle]).astype(np.float64)
            bits[middle] = bits[middle] + (true > rounded) - (true < rounded).astype(np.uint32)
    strange = ~np.isfinite(single)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded_bits = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    lost = (rounded_bits & np.uint16(0x7FFF)) == _BRAIN_INFINITE
    if strange.any():  # here adding might carry into the sign or make a NaN infinite
        cut = (bits[strange] >> np.uint32(16)).astype(np.uint16)
        rounded_bits[strange] = np.where(np.isnan(single[strange]), cut | np.uint16(0x40), cut)
        lost |= strange
    if lost.any():
        lost &= np.isfinite(values)
        rounded_bits[lost] = (rounded_bits[lost] & np.uint16(0x8000)) | _BRAIN_LARGEST
    out[:] = rounded_bits


def _pack_blocks(values: Array, scales: Array, codes: Array) -> None:
    """A stretch of whole blocks; the last block of all may be shorter."""
    blocks = len(scales)
    padded = values if values.size == blocks * BLOCK else np.concatenate([values, np.zeros(blocks * BLOCK - values.size, values.dtype)])
    grid = padded.reshape(blocks, BLOCK)
    strange = ~np.isfinite(grid)
    some = bool(strange.any())
    if some:
        grid = np.where(strange, values.dtype.type(0), grid)
    largest = np.maximum(grid.max(axis=1), -grid.min(axis=1))
    scales[:] = np.abs(np.minimum(largest, _SINGLE_LARGEST))  # of a block of zeros it may be -0.0
    used = scales.astype(values.dtype)
    used[used == 0] = 1  # of a block of zeros, or of values too small for a float32: all become zero
    steps = grid / used[:, None]
    steps *= 127
    np.rint(steps, out=steps)
    np.clip(steps, -127, 127, out=steps)
    if some:
        steps[strange] = _NOT_A_NUMBER
    codes[:] = steps.reshape(-1)[: values.size].astype(np.int8)


def _unpack_blocks(packed: Array, flat: Array) -> None:
    split = packed.size - flat.size
    scales = packed[:split].copy().view("<f4")
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise ProtocolError("unpack: BLOCK8 with a scale that is negative or not finite", code="scale")
    codes, parts = packed[split:], _PARTS_OF[flat.dtype.itemsize]
    for start in range(0, flat.size, _STRETCH):
        stretch = flat[start : start + _STRETCH]
        np.take(parts, codes[start : start + _STRETCH], out=stretch, mode="clip")
        first, whole = start // BLOCK, stretch.size // BLOCK
        grid = stretch[: whole * BLOCK].reshape(whole, BLOCK)
        grid *= scales[first : first + whole, None]
        stretch[whole * BLOCK :] *= scales[first + whole] if stretch.size > whole * BLOCK else 1
