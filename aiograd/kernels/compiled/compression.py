"""The largest values of each block, and blocks of small integers, as compressed arrays keep them; see `aiograd.kernels.compression`.

The kernels give the bytes of numpy's path: they compute in the same order, without fused multiply-add (``exact``), and from the scaled magnitudes on
in integers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from aiograd.kernels.compiled.jit import inline, kernel, reads, real, whole, writes

#: stands for the exponent of a block with a value that is not finite
NOT_FINITE = 1 << 20


def _bit_patterns(real: Any) -> Any:
    return types.Array(types.int32 if real == types.float32 else types.int64, 1, "C")


@inline(flags=set())
def _write_total(values: Any, residual: Any, decay: Any, total: Any) -> None:
    if not residual.size:
        for i in range(total.size):
            total[i] = values[i]
    elif decay == 1:
        for i in range(total.size):
            total[i] = values[i] + residual[i]
    else:
        for i in range(total.size):
            total[i] = values[i] + decay * residual[i]


@inline
def _peak(patterns: Any, rest_of_sign: Any) -> Any:
    """The bit pattern of the largest magnitude; NaN counts as the largest."""
    peak = patterns[0] & rest_of_sign
    for i in range(patterns.size):
        pattern = patterns[i] & rest_of_sign
        if pattern > peak:
            peak = pattern
    return peak


@inline
def _count(magnitudes: Any, least: Any) -> int:
    count = 0
    for i in range(magnitudes.size):
        if magnitudes[i] >= least:
            count += 1
    return count


@inline
def _put(record: Any, start: int, fields: Any, width: int) -> None:
    """Write fields of `width` bits one after the other, the lowest bit first."""
    waiting, held = 0, 0
    for i in range(fields.size):
        waiting |= fields[i] << held
        held += width
        while held >= 8:
            record[start] = waiting & 255
            start += 1
            waiting >>= 8
            held -= 8
    if held:
        record[start] = waiting


@inline
def _get(record: Any, start: int, fields: Any, width: int) -> None:
    waiting: Any = 0
    held = 0
    for i in range(fields.size):
        while held < width:
            waiting |= np.int64(record[start]) << held
            start += 1
            held += 8
        fields[i] = waiting & ((1 << width) - 1)
        waiting >>= width
        held -= width


@kernel(reads(2), reads(2), real, writes(2), writes(2, types.uint8), writes(2, types.int64), _bit_patterns, *5 * (whole,), exact=True)
def pack_largest(
    values: Any, residual: Any, decay: float, rest: Any, records: Any, heads: Any, like: Any, kept: int, low_bits: int, high_at: int, bits: int,
    least: int, block: int, low: int, high: int,
) -> None:
    """Records of the largest values of each row, without their first five bytes, and these as exponent, lowest and highest level."""
    cast = values.dtype.type
    length = values.shape[1]
    patterns = np.empty(length, like.dtype)
    magnitudes = patterns.view(values.dtype)
    pattern = np.empty(1, like.dtype)
    magnitude = pattern.view(values.dtype)
    found = np.empty(length + 1, np.int64)
    candidates = np.empty(length, like.dtype)
    fields = np.empty(kept, np.int64)
    positions = np.empty(kept, np.int64)
    first_step = 1 << (21 if values.itemsize == 4 else 50)  # a quarter of a binade
    codes_at = high_at + (kept + ((length - 1) >> low_bits) + 7) // 8
    steps = (1 << (bits - 1)) - 1
    guess: Any = 0
    for row in range(low, high):
        total = rest[row]
        _write_total(values[row], residual[row if residual.size else 0], cast(decay), total)
        for i in range(length):
            magnitudes[i] = abs(total[i])
        pattern[0] = _peak(patterns, like.dtype.type(-1))
        if not np.isfinite(magnitude[0]):
            heads[row, 0] = NOT_FINITE
            continue
        # bisect the bit patterns: at least `kept` are from `least_kept` on, and fewer from `too_large` on
        least_kept: Any = 0
        too_large: Any = np.int64(pattern[0]) + 1
        number, larger, middle, step = length, 0, guess, first_step
        while number > 2 * kept + 8 and too_large - least_kept > 1:
            if not least_kept < middle < too_large:
                middle = least_kept + (too_large - least_kept) // 2
            count = _count(patterns, like.dtype.type(middle))
            if count >= kept:
                least_kept, number = middle, count
                middle = middle + step if step < too_large - middle else least_kept
            else:
                too_large, larger = middle, count
                middle -= step
            step = min(2 * step, first_step << 8)
        guess = least_kept
        count = 0
        for i in range(length):
            found[count] = i
            count += patterns[i] >= least_kept
        for i in range(number):
            candidates[i] = patterns[found[i]]
        while number > kept and too_large - least_kept > 1:
            middle = least_kept + (too_large - least_kept) // 2
            count = _count(candidates[:number], like.dtype.type(middle))
            if count >= kept:
                least_kept = middle
                remaining = 0
                for i in range(number):
                    found[remaining] = found[i]
                    candidates[remaining] = candidates[i]
                    remaining += candidates[i] >= middle
                number = remaining
            else:
                too_large, larger = middle, count
        ties, count = kept - larger, 0
        for i in range(number):
            if candidates[i] >= too_large:
                positions[count] = found[i]
                count += 1
            elif ties:
                positions[count] = found[i]
                count += 1
                ties -= 1
        # positions by Elias and Fano
        record = records[row]
        record[:] = 0
        for i in range(kept):
            fields[i] = positions[i] & ((1 << low_bits) - 1)
            bit = (positions[i] >> low_bits) + i
            record[high_at + (bit >> 3)] |= 1 << (bit & 7)
        _put(record, 5, fields, low_bits)
        # magnitudes as integers, from which the levels come
        exponent = max(math.frexp(np.float64(magnitude[0]))[1] - 11, least)
        inverse, scale = cast(math.ldexp(1.0, -exponent)), cast(math.ldexp(1.0, exponent))
        smallest: Any = 2047
        largest: Any = 0
        for i in range(kept):
            field: Any = min(np.int64(np.rint(magnitudes[positions[i]] * inverse)), 2047)
            fields[i] = field
            smallest, largest = min(smallest, field), max(largest, field)
        if steps == 1:
            lower, lowers, upper, uppers = 0, 0, 0, 0
            for i in range(kept):
                if 2 * fields[i] > smallest + largest:
                    upper += fields[i]
                    uppers += 1
                else:
                    lower += fields[i]
                    lowers += 1
            first = (2 * lower + lowers) // (2 * lowers) if smallest else 0
            last = (2 * upper + uppers) // (2 * uppers) if uppers else first
        else:
            margin = (largest - smallest) // (2 * steps + 2)
            first = smallest + margin if smallest >= margin else 0
            last = largest - margin
        heads[row, 0], heads[row, 1], heads[row, 2] = exponent, first, last
        span = last - first
        for i in range(kept):
            code = 0
            if span > 0:
                code = min(max((2 * steps * (fields[i] - first) + span) // (2 * span), 0), steps)
            level = (2 * (first * (steps - code) + last * code) + steps) // (2 * steps)
            at = positions[i]
            if total[at] < 0:
                level = -level
                code += steps + 1
            fields[i] = code
            total[at] -= cast(level) * scale
        _put(record, codes_at, fields, bits)


@kernel(reads(2, types.uint8), reads(1), reads(2, types.int64), writes(2), writes(1, types.uint8), *4 * (whole,), exact=True)
def unpack_largest(
    records: Any, scales: Any, heads: Any, values: Any, malformed: Any, kept: int, low_bits: int, high_at: int, bits: int, block: int, low: int,
    high: int,
) -> None:
    """Values of each row, which are zeros before, and a mark for each row with malformed positions."""
    cast = values.dtype.type
    length = values.shape[1]
    low_parts, codes, ones = np.empty(kept, np.int64), np.empty(kept, np.int64), np.empty(kept + 1, np.int64)
    high_bits = kept + ((length - 1) >> low_bits)
    codes_at = high_at + (high_bits + 7) // 8
    steps = (1 << (bits - 1)) - 1
    for row in range(low, high):
        record = records[row]
        _get(record, 5, low_parts, low_bits)
        _get(record, codes_at, codes, bits)
        count = 0
        for bit in range(high_bits):  # without branches, which would be mispredicted for every other bit
            ones[min(count, kept)] = bit
            count += (record[high_at + (bit >> 3)] >> (bit & 7)) & 1
        before, is_malformed = -1, count != kept
        for i in range(0 if is_malformed else kept):
            at = ((ones[i] - i) << low_bits) | low_parts[i]
            if before < at < length:
                code = codes[i] & steps
                level = (2 * (heads[row, 1] * (steps - code) + heads[row, 2] * code) + steps) // (2 * steps)
                values[row, at] = cast(-level if codes[i] > steps else level) * scales[row]
            else:
                is_malformed = True
            before = at
        malformed[row] = is_malformed


@kernel(reads(2), reads(2), real, writes(2), writes(2, types.uint8), writes(2, types.int64), _bit_patterns, *2 * (whole,), exact=True)
def pack_blocks(
    values: Any, residual: Any, decay: float, rest: Any, records: Any, heads: Any, like: Any, bits: int, least: int, block: int, low: int, high: int
) -> None:
    """Records of rows as integers of `bits` bits, without their first three bytes, and these as exponent and factor."""
    cast = values.dtype.type
    length = values.shape[1]
    pattern = np.empty(1, like.dtype)
    magnitude = pattern.view(values.dtype)
    rest_of_sign = like.dtype.type(0x7FFFFFFF if values.itemsize == 4 else 0x7FFFFFFFFFFFFFFF)
    codes = np.zeros(length + 1, np.uint8)
    most = (1 << (bits - 1)) - 1
    bound, middle = cast(most), np.int32(most + 1)
    for row in range(low, high):
        total = rest[row]
        _write_total(values[row], residual[row if residual.size else 0], cast(decay), total)
        pattern[0] = _peak(total.view(like.dtype), rest_of_sign)
        if not np.isfinite(magnitude[0]):
            heads[row, 0] = NOT_FINITE
            continue
        exponent = max(math.frexp(np.float64(magnitude[0]))[1] - 11, least)
        inverse = cast(math.ldexp(1.0, -exponent))
        factor = min(np.int64(np.ceil(magnitude[0] * inverse / bound)), 2047 // most)
        heads[row, 0], heads[row, 1] = exponent, factor
        inverse = inverse / cast(max(factor, 1))
        scale = cast(factor) * cast(math.ldexp(1.0, exponent))
        for i in range(length):
            code = min(max(np.rint(total[i] * inverse), -bound), bound) + cast(0)  # no negative zero
            total[i] -= code * scale
            codes[i] = np.int32(code) + middle
        record = records[row]
        if bits == 8:
            for i in range(length):
                record[3 + i] = codes[i]
        else:
            for i in range((length + 1) // 2):
                record[3 + i] = codes[2 * i] | (codes[2 * i + 1] << 4)


@kernel(reads(2, types.uint8), reads(1), writes(2), writes(1, types.uint8), whole, exact=True)
def unpack_blocks(records: Any, scales: Any, values: Any, malformed: Any, bits: int, block: int, low: int, high: int) -> None:
    """Values of each row, and a mark for each row with the one code that stands for nothing."""
    cast = values.dtype.type
    length = values.shape[1]
    for row in range(low, high):
        record, scale, smallest = records[row], scales[row], np.uint8(255)
        if bits == 8:
            for i in range(length):
                code = record[3 + i]
                smallest = min(smallest, code)
                values[row, i] = cast(np.int32(code) - np.int32(128)) * scale
        else:
            for i in range(length):
                code = (record[3 + i // 2] >> np.uint8(4 * (i % 2))) & np.uint8(15)
                smallest = min(smallest, code)
                values[row, i] = cast(np.int32(code) - np.int32(8)) * scale
        malformed[row] = smallest == 0
