"""Blocks of an array as short records: the largest values of each with their positions, or all values as small integers.

Note [Records]
    Each block of values becomes one record of bytes, and records stand one after the other. A decoded value is an integer of at most 11 bits and a
    sign times its block's power of two, so it is exact in float32 and in float64, and sums of such values with integer weights are as well. Bits are
    filled in from the lowest bit of the first byte on; a section of a record begins with a byte of its own.

    ========  ==============================================================================================================================
    `TopK`    5 bytes: exponent of the power of two plus `BIAS` (12 bits), lowest and highest level (11 bits each). Positions in the way of Elias
              and Fano: the low bits of each, then a row of bits in which the bit ``(position >> low_bits) + index`` is set for each. Codes of
              `bits` bits: the number of the level, evenly spaced from the lowest to the highest, and the sign as the highest bit.
    blocks    3 bytes: exponent plus `BIAS` (12 bits) and a factor (12 bits); a code for each value, which is code minus half of the range of
              codes, times the factor. The code 0 stands for nothing, so that codes are symmetric.
    ========  ==============================================================================================================================

    The power of two makes the largest magnitude of the block an integer from 1024 to 2047, unless it would be no normal number. Everything after
    that is computed in integers, which is why numpy and the compiled kernels give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aiograd.kernels.arrays import nothing, row_blocks
from aiograd.kernels.pool import run
from aiograd.kernels.selection import compiled

NDArray = npt.NDArray[Any]

#: added to exponents, so that they are positive
BIAS = 1100
#: the exponent of the smallest normal number
_LEAST = {np.dtype(np.float32): -126, np.dtype(np.float64): -1022}
#: bits of an integer that a magnitude becomes
_INTEGER_BITS = 11
_LARGEST = (1 << _INTEGER_BITS) - 1
#: bytes of a record before its codes and positions
LARGEST_HEAD, BLOCK_HEAD = 5, 3


class LargestLayout(NamedTuple):
    """Where the parts of a record of the largest values stand."""

    #: values in the block, and how many of them are kept
    length: int
    kept: int
    #: of a code
    bits: int

    @property
    def low_bits(self) -> int:
        """Bits of a position that are written as they are."""
        return (self.length // self.kept).bit_length() - 1

    @property
    def high_bits(self) -> int:
        """Length of the row of bits for the rest of all positions."""
        return self.kept + ((self.length - 1) >> self.low_bits)

    @property
    def high_at(self) -> int:
        """Offset of that row in a record."""
        return LARGEST_HEAD + -(-self.kept * self.low_bits // 8)

    @property
    def codes_at(self) -> int:
        """Offset of the codes."""
        return self.high_at + -(-self.high_bits // 8)

    @property
    def nbytes(self) -> int:
        """Length of a record."""
        return self.codes_at + -(-self.kept * self.bits // 8)


def pack_largest(values: NDArray, residual: NDArray | None, decay: float, rest: NDArray, records: NDArray, layout: LargestLayout) -> bool:
    """Write the records of the largest values of each row of ``values + decay * residual``.

    Args:
        values: (blocks, length), float32 or float64, C-contiguous.
        residual: the same, or None for zeros.
        decay: factor of the residual.
        rest: gets the sum minus the values that the records stand for.
        records: (blocks, `layout.nbytes`), written.
        layout: of a record.

    Returns:
        True if all sums are finite; else `records` and `rest` are of no use.
    """
    heads = np.zeros((len(values), 3), np.int64)
    kernels = compiled(values.size, values, residual)
    if kernels is not None:
        run(
            kernels.compression.pack_largest, len(values), values.size, values, _given(residual, values), float(decay), rest, records, heads,
            _bit_patterns(values), layout.kept, layout.low_bits, layout.high_at, layout.bits, _LEAST[values.dtype],
        )  # fmt: skip
        is_finite = not (heads[:, 0] == kernels.compression.NOT_FINITE).any()
    else:
        is_finite = _are_packed(values, residual, decay, rest, lambda total, part: _pack_largest(total, records[part], heads[part], layout))
    if not is_finite:
        return False
    records[:, :LARGEST_HEAD] = _as_bytes((heads[:, 0] + BIAS) | heads[:, 1] << 12 | heads[:, 2] << (12 + _INTEGER_BITS), LARGEST_HEAD)
    return True


def _pack_largest(total: NDArray, records: NDArray, heads: NDArray, layout: LargestLayout) -> bool:
    length, kept, bits = layout
    magnitudes = np.abs(total)
    peaks = magnitudes.max(axis=1)
    if not np.isfinite(peaks).all():
        return False
    least_kept = np.partition(magnitudes, length - kept, axis=1)[:, length - kept, None]
    chosen = magnitudes >= least_kept
    surplus = np.count_nonzero(chosen, axis=1) - kept
    for row in np.flatnonzero(surplus):
        ties = np.flatnonzero(magnitudes[row] == least_kept[row])
        chosen[row, ties[ties.size - surplus[row] :]] = False
    positions = np.nonzero(chosen)[1].reshape(-1, kept)
    records[:, LARGEST_HEAD : layout.high_at] = _packed(positions & ((1 << layout.low_bits) - 1), layout.low_bits)
    high = np.zeros((len(total), layout.high_bits), np.bool_)
    np.put_along_axis(high, (positions >> layout.low_bits) + np.arange(kept), True, axis=1)
    records[:, layout.high_at : layout.codes_at] = np.packbits(high, axis=1, bitorder="little")
    exponents, scales = _scales(peaks)
    inverses = np.ldexp(total.dtype.type(1), -exponents)
    values = np.take_along_axis(total, positions, axis=1)
    integers = np.minimum(np.rint(np.abs(values) * inverses[:, None]), _LARGEST).astype(np.int64)
    first, last = _end_levels(integers, bits)
    heads[:, 0], heads[:, 1], heads[:, 2] = exponents, first, last
    first, span, steps = first[:, None], (last - first)[:, None], (1 << (bits - 1)) - 1
    codes = np.where(span > 0, np.clip((2 * steps * (integers - first) + span) // np.maximum(2 * span, 1), 0, steps), 0)
    levels, negative = _levels(codes, heads, bits), values < 0
    records[:, layout.codes_at :] = _packed(codes + negative * (steps + 1), bits)
    decoded = np.where(negative, -levels, levels).astype(total.dtype) * scales[:, None]
    np.put_along_axis(total, positions, values - decoded, axis=1)
    return True


def _end_levels(integers: NDArray, bits: int) -> tuple[NDArray, NDArray]:
    """The lowest and the highest level of each row of magnitudes: two means, or the ends of evenly spaced levels that no magnitude is far from.

    The lowest level is zero where a magnitude is, and where it would be more than twice the smallest magnitude: decoding increases no block.
    """
    smallest, largest = integers.min(axis=1), integers.max(axis=1)
    if bits > 2:
        margin = (largest - smallest) >> bits
        return np.where(smallest >= margin, smallest + margin, 0), largest - margin
    is_upper = 2 * integers > (smallest + largest)[:, None]
    uppers = is_upper.sum(axis=1)
    upper = np.where(is_upper, integers, 0).sum(axis=1)
    lower, lowers = integers.sum(axis=1) - upper, integers.shape[1] - uppers
    first = np.where(smallest > 0, (2 * lower + lowers) // (2 * lowers), 0)
    return first, np.where(uppers > 0, (2 * upper + uppers) // np.maximum(2 * uppers, 1), first)


def _levels(codes: NDArray, heads: NDArray, bits: int) -> NDArray:
    steps = (1 << (bits - 1)) - 1
    levels: NDArray = (2 * (heads[:, 1, None] * (steps - codes) + heads[:, 2, None] * codes) + steps) // (2 * steps)
    return levels


def unpack_largest(records: NDArray, values: NDArray, layout: LargestLayout) -> tuple[NDArray, int | None]:
    """Write the values that records stand for.

    Args:
        records: (blocks, `layout.nbytes`), from anywhere.
        values: (blocks, length), zeros, which are kept where no value is; float32 or float64, C-contiguous.
        layout: of a record.

    Returns:
        Exponents (blocks,), and the first block with malformed positions, or None if there is none.
    """
    heads = np.empty((len(records), 3), np.int64)
    fields = _as_integers(records[:, :LARGEST_HEAD])
    heads[:, 0], heads[:, 1], heads[:, 2] = (fields & 4095) - BIAS, fields >> 12 & _LARGEST, fields >> (12 + _INTEGER_BITS) & _LARGEST
    scales = _powers(heads[:, 0], values.dtype)
    malformed = np.zeros(len(records), np.uint8)
    kernels = compiled(values.size, values)
    if kernels is not None:
        run(
            kernels.compression.unpack_largest, len(records), values.size, records, scales, heads, values, malformed, layout.kept, layout.low_bits,
            layout.high_at, layout.bits,
        )  # fmt: skip
    else:
        with np.errstate(all="ignore"):
            for low, high in _rows(values):
                part = slice(low, high)
                _unpack_largest(records[part], scales[part], heads[part], values[part], malformed[part], layout)
    return heads[:, 0], _first(malformed)


def _unpack_largest(records: NDArray, scales: NDArray, heads: NDArray, values: NDArray, malformed: NDArray, layout: LargestLayout) -> None:
    length, kept, bits = layout
    high = np.unpackbits(records[:, layout.high_at : layout.codes_at], axis=1, count=layout.high_bits, bitorder="little")
    malformed[:] = np.count_nonzero(high, axis=1) != kept
    high[malformed.view(np.bool_)] = np.arange(layout.high_bits) < kept
    low = _unpacked(records[:, LARGEST_HEAD : layout.high_at], kept, layout.low_bits)
    positions = (np.nonzero(high)[1].reshape(-1, kept) - np.arange(kept)) << layout.low_bits | low
    malformed |= (positions[:, -1] >= length) | (np.diff(positions, axis=1) <= 0).any(axis=1)
    if malformed.any():
        return
    codes = _unpacked(records[:, layout.codes_at :], kept, bits)
    half = 1 << (bits - 1)
    levels = _levels(codes & (half - 1), heads, bits)
    np.put_along_axis(values, positions, np.where(codes >= half, -levels, levels).astype(values.dtype) * scales[:, None], axis=1)


def block_bytes(length: int, bits: int) -> int:
    """Length of the record of a block of integers."""
    return BLOCK_HEAD + -(-length * bits // 8)


def pack_blocks(values: NDArray, residual: NDArray | None, rest: NDArray, records: NDArray, bits: int) -> bool:
    """Write the records of each row of ``values + residual`` as integers of 4 or 8 bits.

    Args:
        values: (blocks, length), float32 or float64, C-contiguous.
        residual: the same, or None for zeros.
        rest: gets the sum minus the values that the records stand for.
        records: (blocks, `block_bytes`), written.
        bits: 4 or 8.

    Returns:
        True if all sums are finite; else `records` and `rest` are of no use.
    """
    heads = np.zeros((len(values), 2), np.int64)
    kernels = compiled(values.size, values, residual)
    if kernels is not None:
        run(
            kernels.compression.pack_blocks, len(values), values.size, values, _given(residual, values), 1.0, rest, records, heads,
            _bit_patterns(values), bits, _LEAST[values.dtype],
        )  # fmt: skip
        is_finite = not (heads[:, 0] == kernels.compression.NOT_FINITE).any()
    else:
        is_finite = _are_packed(values, residual, 1.0, rest, lambda total, part: _pack_blocks(total, records[part], heads[part], bits))
    if not is_finite:
        return False
    records[:, :BLOCK_HEAD] = _as_bytes((heads[:, 0] + BIAS) | heads[:, 1] << 12, BLOCK_HEAD)
    return True


def _pack_blocks(total: NDArray, records: NDArray, heads: NDArray, bits: int) -> bool:
    peaks = np.abs(total).max(axis=1)
    if not np.isfinite(peaks).all():
        return False
    cast, most = total.dtype.type, (1 << (bits - 1)) - 1
    exponents, scales = _scales(peaks)
    inverses = np.ldexp(cast(1), -exponents)
    factors = np.minimum(np.ceil(peaks * inverses / cast(most)).astype(np.int64), _LARGEST // most)
    heads[:, 0], heads[:, 1] = exponents, factors
    inverses /= np.maximum(factors, 1).astype(total.dtype)
    codes = total * inverses[:, None]
    np.clip(np.rint(codes, out=codes), -most, most, out=codes)
    codes += cast(0)  # no negative zero
    bytes_ = (codes + cast(most + 1)).astype(np.uint8)
    codes *= (factors.astype(total.dtype) * scales)[:, None]
    total -= codes
    if bits == 8:
        records[:, BLOCK_HEAD:] = bytes_
    else:
        records[:, BLOCK_HEAD:] = bytes_[:, ::2]
        records[:, BLOCK_HEAD : BLOCK_HEAD + bytes_.shape[1] // 2] |= bytes_[:, 1::2] << 4
    return True


def unpack_blocks(records: NDArray, values: NDArray, bits: int) -> tuple[NDArray, int | None, int | None]:
    """The values that records stand for.

    Args:
        records: (blocks, `block_bytes`), from anywhere.
        values: (blocks, length), written; float32 or float64, C-contiguous.
        bits: 4 or 8.

    Returns:
        Exponents (blocks,); the first block with a code that stands for nothing, and the first with too large a factor, or None.
    """
    fields = _as_integers(records[:, :BLOCK_HEAD])
    exponents, factors = (fields & 4095) - BIAS, fields >> 12
    scales = _powers(exponents, values.dtype)
    with np.errstate(all="ignore"):
        scales *= factors.astype(values.dtype)
    malformed = np.zeros(len(records), np.uint8)
    kernels = compiled(values.size, values)
    if kernels is not None:
        run(kernels.compression.unpack_blocks, len(records), values.size, records, scales, values, malformed, bits)
    else:
        half = 1 << (bits - 1)
        with np.errstate(all="ignore"):
            for low, high in _rows(values):
                codes = records[low:high, BLOCK_HEAD:]
                if bits == 4:
                    codes = np.stack((codes & 15, codes >> 4), axis=2).reshape(len(codes), -1)[:, : values.shape[1]]
                malformed[low:high] = codes.min(axis=1) == 0
                np.subtract(codes, values.dtype.type(half), out=values[low:high], casting="unsafe")
                values[low:high] *= scales[low:high, None]
    return exponents, _first(malformed), _first(factors > _LARGEST // ((1 << (bits - 1)) - 1))


# -------------------------------------------------------------------- both kinds of records


def _rows(values: NDArray) -> list[tuple[int, int]]:
    """Ranges of rows that stay in a core's cache."""
    rows = row_blocks(len(values), values.shape[1])
    return [(low, min(low + rows.step, len(values))) for low in rows]


def _given(residual: NDArray | None, values: NDArray) -> NDArray:
    return np.empty((1, 0), values.dtype) if residual is None else residual


def _bit_patterns(values: NDArray) -> NDArray:
    """An empty array of the integers that have as many bits as the values."""
    return nothing(np.dtype(np.int32 if values.dtype == np.float32 else np.int64))


def _are_packed(values: NDArray, residual: NDArray | None, decay: float, rest: NDArray, pack: Callable[[NDArray, slice], bool]) -> bool:
    """Pack the sums of a few rows at a time; False as soon as `pack` returns that."""
    with np.errstate(all="ignore"):
        return all(pack(_total(values, residual, decay, rest, part), part) for part in (slice(*rows) for rows in _rows(values)))


def _total(values: NDArray, residual: NDArray | None, decay: float, rest: NDArray, part: slice) -> NDArray:
    total = rest[part]
    if residual is None:
        total[:] = values[part]
    elif decay == 1:
        np.add(values[part], residual[part], out=total)
    else:
        np.multiply(residual[part], values.dtype.type(decay), out=total)
        np.add(values[part], total, out=total)
    return total


def _scales(peaks: NDArray) -> tuple[NDArray, NDArray]:
    """The exponent of each block's power of two, and the power."""
    exponents = np.maximum(np.frexp(peaks)[1].astype(np.int64) - _INTEGER_BITS, _LEAST[peaks.dtype])
    return exponents, _powers(exponents, peaks.dtype)


def _powers(exponents: NDArray, dtype: np.dtype[Any]) -> NDArray:
    with np.errstate(all="ignore"):
        powers: NDArray = np.ldexp(dtype.type(1), exponents)
    return powers


def _as_bytes(fields: NDArray, count: int) -> NDArray:
    return fields.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :count]


def _as_integers(records: NDArray) -> NDArray:
    padded = np.zeros((len(records), 8), np.uint8)
    padded[:, : records.shape[1]] = records
    return padded.view("<i8").reshape(-1).astype(np.int64)


def _packed(fields: NDArray, width: int) -> NDArray:
    """Rows of integers as bits, from the lowest bit of the first byte on."""
    bits = (fields[:, :, None] >> np.arange(width) & 1).astype(np.uint8).reshape(len(fields), -1)
    return np.packbits(bits, axis=1, bitorder="little")


def _unpacked(records: NDArray, count: int, width: int) -> NDArray:
    bits = np.unpackbits(records, axis=1, count=count * width, bitorder="little").reshape(len(records), count, width)
    fields: NDArray = (bits.astype(np.int64) << np.arange(width)).sum(axis=2)
    return fields


def _first(marks: NDArray) -> int | None:
    found = np.flatnonzero(marks)
    return int(found[0]) if found.size else None
