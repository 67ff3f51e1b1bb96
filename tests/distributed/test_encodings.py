"""Reduced-precision encodings against exact arithmetic, at the edges of their ranges, and with bytes that no encoder wrote."""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.rpc.encodings import BLOCK, Encoding, can_encode, pack, packed_size, unpack
from aiograd.errors import ArgumentTypeError, ProtocolError
from tests.distributed.mutation import cases

REDUCED = (Encoding.FLOAT16, Encoding.BFLOAT16, Encoding.BLOCK8)
F32, F64 = np.dtype("f4"), np.dtype("f8")
MAX32 = float(np.finfo(np.float32).max)
#: encoding -> bits of the mantissa without the leading one, exponent of the smallest normal number, largest value
FORMATS = {Encoding.FLOAT16: (10, -14, 65504.0), Encoding.BFLOAT16: (7, -126, 2.0**127 * (2 - 2**-7))}


def there_and_back(array, encoding):
    return unpack(pack(array, encoding), encoding, array.shape, array.dtype)


def rounded(value: float, encoding: Encoding) -> float:
    """The nearest value of the format, ties to even, held to the largest; by exact arithmetic."""
    mantissa, lowest, largest = FORMATS[encoding]
    if value == 0 or not math.isfinite(value):
        return value
    exponent = max(math.frexp(value)[1] - 1, lowest)
    step = Fraction(2) ** (exponent - mantissa)
    nearest = round(Fraction(value) / step) * step  # round() of a Fraction goes to even
    return math.copysign(min(abs(float(nearest)), largest), value)


def samples(dtype: np.dtype, encoding: Encoding) -> np.ndarray:
    """Values where rounding may go wrong: all exponents, and the middles between two results with their next neighbours."""
    mantissa, lowest, largest = FORMATS[encoding]
    rng = random.Random("samples")
    values = [0.0, -0.0, math.inf, -math.inf, largest, -largest, largest * (1 + 2.0 ** (-mantissa - 2)), largest * 1.5, MAX32, 1e-45, 5e-324, 1e308]
    for _ in range(3000):
        exponent = rng.randrange(lowest - mantissa - 3, 20 if encoding is Encoding.FLOAT16 else 128)
        middle = (rng.randrange(2**mantissa) + 2**mantissa + 0.5) * 2.0**-mantissa * 2.0**exponent
        values += [middle, float(np.nextafter(middle, 0)), float(np.nextafter(middle, math.inf)), rng.uniform(1, 2) * 2.0**exponent]
        values += [float(np.nextafter(np.float32(middle), np.float32(0))), -float(np.nextafter(np.float32(middle), np.float32(math.inf)))]
    with np.errstate(over="ignore"):
        return np.array(values).astype(dtype)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("encoding", list(FORMATS))
def test_halves_are_the_nearest_value_ties_to_even(encoding, dtype):
    array = samples(dtype, encoding)
    expected = np.array([rounded(float(value), encoding) for value in array], dtype)
    np.testing.assert_array_equal(there_and_back(array, encoding).view(f"u{dtype.itemsize}"), expected.view(f"u{dtype.itemsize}"))


def test_a_float64_is_rounded_once():
    """1 + 2**-8 + 2**-40 is nearer to 1 + 2**-7; rounding to float32 first would make it a tie, and 1."""
    values = np.array([1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40, 1 + 2**-8])
    np.testing.assert_array_equal(there_and_back(values, Encoding.BFLOAT16), [1 + 2**-7, 1 + 2**-7, 1])


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("encoding", list(FORMATS))
def test_nan_stays_nan_whatever_its_bits(encoding, dtype):
    bits = [0x7FC00000, 0x7F800001, 0xFF800001, 0xFFFFFFFF, 0x7FFFFFFF]
    array = np.array([0x7FF0000000000001, 0xFFF8000000000000, 2**64 - 1], "u8").view("f8") if dtype == F64 else np.array(bits, "u4").view("f4")
    assert np.isnan(there_and_back(array, encoding)).all()


@pytest.mark.parametrize("encoding", [Encoding.FLOAT16, Encoding.BFLOAT16])
def test_what_has_been_rounded_travels_exactly(encoding):
    every = np.arange(2**16, dtype="u2")
    wide = unpack(every.tobytes(), encoding, (2**16,), F32)
    again = np.frombuffer(pack(wide, encoding), "u2")
    np.testing.assert_array_equal(again[~np.isnan(wide)], every[~np.isnan(wide)])


@pytest.mark.parametrize("dtype", [F32, F64])
@given(size=st.sampled_from([1, 2, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]), scale=st.integers(-140, 127), seed=st.integers(0, 2**32 - 1))
def test_block8_is_within_half_a_step(dtype, size, scale, seed):
    rng = np.random.default_rng(seed)
    array = np.ldexp(rng.uniform(-1, 1, size), scale).astype(dtype)
    found = there_and_back(array, Encoding.BLOCK8)
    for start in range(0, size, BLOCK):
        true = array[start : start + BLOCK].astype("f8")
        step = np.abs(true).max() / 127
        # scales are float32: beside their relative error there is the spacing of their subnormal numbers, 127-fold at most
        assert np.abs(found[start : start + BLOCK] - true).max() <= step * 0.5001 + 128 * 2.0**-149


def test_block8_marks_what_is_not_finite_and_spares_its_neighbours():
    array = np.linspace(-1, 1, 2 * BLOCK + 10, dtype="f4")
    array[[5, BLOCK, -1]] = [math.nan, math.inf, -math.inf]
    found = there_and_back(array, Encoding.BLOCK8)
    assert np.flatnonzero(np.isnan(found)).tolist() == [5, BLOCK, 2 * BLOCK + 9]
    finite = np.isfinite(array)
    np.testing.assert_allclose(found[finite], array[finite], atol=0.5 / 127 * 1.001)


@pytest.mark.parametrize("encoding", REDUCED)
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_finite_values_stay_finite_and_keep_their_sign(encoding, values):
    found = there_and_back(np.array(values), encoding)
    assert np.isfinite(found).all()
    assert (np.sign(found) * np.sign(values) >= 0).all()


@pytest.mark.parametrize("dtype", [F32, F64])
def test_block8_at_the_ends_of_its_range(dtype):
    top = np.array([np.finfo(dtype).max, -np.finfo(dtype).max, 0], dtype)
    np.testing.assert_array_equal(there_and_back(top, Encoding.BLOCK8), [MAX32, -MAX32, 0])
    tiny = np.array([5e-324 if dtype == F64 else 1e-45, 0], dtype)
    np.testing.assert_array_equal(there_and_back(tiny, Encoding.BLOCK8), [0 if dtype == F64 else tiny[0], 0])


@pytest.mark.parametrize("dtype", [F32, F64])
def test_block8_keeps_each_largest_value_and_zero(dtype):
    largest = np.array([3.7, 1e-30, 2.0**100], "f4").astype(dtype)
    array = np.zeros((3, BLOCK), dtype)
    array[:, 17] = largest
    array[:, 18] = -largest
    np.testing.assert_array_equal(there_and_back(array, Encoding.BLOCK8), array)


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [*((item, dtype) for item in Encoding for dtype in (F32, F64)), *((Encoding.PLAIN, np.dtype(kind)) for kind in ("i2", "c16", "?"))],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (16, BLOCK + 3)])
def test_every_shape_and_stride(encoding, dtype, shape):
    base = (np.arange(math.prod(shape) * 2) % 97).astype(dtype).reshape(*shape, 2)
    for array in (base[..., 0], base[..., 0].T, base[..., 0].copy()):
        packed = pack(array, encoding)
        assert len(packed) == packed_size(encoding, array.size, dtype.itemsize)
        found = unpack(packed, encoding, array.shape, dtype)
        assert found.shape == array.shape and found.dtype == dtype
        assert found.flags.c_contiguous and found.flags.writeable and not np.shares_memory(found, array)
        np.testing.assert_allclose(found, array, atol=0.0 if encoding is not Encoding.BLOCK8 else 96 / 254 * 1.01)


def test_golden_bytes():
    array = np.array([1, -2.5, 0.1, 65504, 3e38, np.inf], "f4")
    assert bytes(pack(array, Encoding.FLOAT16)).hex() == "003c00c1662eff7bff7b007c"
    assert bytes(pack(array, Encoding.BFLOAT16)).hex() == "803f20c0cd3d8047627f807f"
    assert bytes(pack(np.array([127, -63.5, 1.4, -127], "f4"), Encoding.BLOCK8)).hex() == "0000fe427fc00181"
    assert {item.name: int(item) for item in Encoding} == {"PLAIN": 0, "FLOAT16": 1, "BFLOAT16": 2, "BLOCK8": 3}


@pytest.mark.parametrize("encoding", REDUCED)
@pytest.mark.parametrize("dtype", ["f2", "i4", "?", "c8", "g"])
def test_other_dtypes_are_refused(encoding, dtype):
    assert not can_encode(np.dtype(dtype))
    with pytest.raises(ArgumentTypeError, match=rf"{encoding.name} takes float32 and float64, found {np.dtype(dtype)}"):
        pack(np.ones(3, dtype), encoding)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1e-30])
def test_a_scale_that_no_encoder_writes_is_refused(scale):
    with pytest.raises(ProtocolError) as caught:
        unpack(struct.pack("<f3b", scale, 1, 0, -1), Encoding.BLOCK8, (3,), F32)
    assert caught.value.code == "scale"


def test_a_wrong_number_of_bytes_is_refused():
    for encoding in Encoding:
        with pytest.raises(ProtocolError) as caught:
            unpack(bytes(packed_size(encoding, 5) + 1), encoding, (5,), F32)
        assert caught.value.code == "tensor_size"


def test_any_bytes_are_numbers_or_refused():
    """No warning of numpy (an error here) and no other exception comes out, whatever the bits."""
    rng = random.Random("encodings")
    for _ in range(cases(500)):
        encoding, dtype, size = rng.choice(REDUCED), rng.choice((F32, F64)), rng.randrange(40)
        data = rng.randbytes(packed_size(encoding, size))
        try:
            found = unpack(data, encoding, (size,), dtype)
        except ProtocolError as error:
            assert error.code == "scale"
        else:
            pack(found, encoding)
