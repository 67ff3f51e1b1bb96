"""Compressed arrays: the values that are kept, the residual to the bit, both kernel sets alike, and payloads from anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aiograd import distributed as dist
from aiograd.distributed import Blockwise, Compressor, TopK
from aiograd.errors import ArgumentError, ArgumentTypeError, ProtocolError
from aiograd.kernels import pool, selection

COMPRESSORS = (
    TopK(),
    TopK(1 / 16, bits=4),
    TopK(1 / 8, bits=8, block=100, decay=0.9),
    TopK(1.0, bits=2, block=64),
    Blockwise(8),
    Blockwise(4, block=77),
)
LARGEST = {np.dtype(np.float32): 117, np.dtype(np.float64): 1013}
DTYPES = (np.float32, np.float64)


def drawn(kind: str, size: int, dtype: type, seed: int = 0) -> np.ndarray:
    """Values with a difficulty."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size)
    largest = float(np.finfo(dtype).max)
    with np.errstate(all="ignore"):
        made = {
            "normal": lambda: values,
            "zeros": lambda: values * 0.0,
            "mostly zero": lambda: np.where(rng.random(size) < 0.02, values, -0.0),
            "ties": lambda: rng.integers(-3, 4, size).astype(float),
            "one value": lambda: np.full(size, -0.375),
            "huge": lambda: np.clip(values, -1, 1) * largest / 2,
            "the largest": lambda: np.where(values > 0, largest, -largest),
            "denormal": lambda: values * float(np.finfo(dtype).smallest_subnormal) * 1000,
            "smallest": lambda: np.where(values > 0, float(np.finfo(dtype).smallest_subnormal), 0.0),
            "all exponents": lambda: np.ldexp(values, rng.integers(-1000, 1000, size) if dtype is np.float64 else rng.integers(-140, 125, size)),
            "2**127": lambda: np.where(values > 0, 2.0**127, values),
        }[kind]()
        return np.asarray(made, dtype)


KINDS = ("normal", "zeros", "mostly zero", "ties", "one value", "huge", "the largest", "denormal", "smallest", "all exponents", "2**127")


def kept_by(compressor: TopK, total: np.ndarray) -> np.ndarray:
    """True where the definition says that a value is kept."""
    kept = np.zeros(total.size, bool)
    for low in range(0, total.size, compressor.block):
        magnitudes = np.abs(total[low : low + compressor.block])
        count = max(1, round(compressor.fraction * magnitudes.size))
        kept[low + np.argsort(-magnitudes, kind="stable")[:count]] = True
    return kept


def check(compressor: Compressor, values: np.ndarray, residual: np.ndarray | None) -> tuple[bytes, np.ndarray]:
    """Encode, and compare with the definition."""
    before = (values.copy(), None if residual is None else residual.copy())
    payload, rest = compressor.encode(values, residual)
    assert values.tobytes() == before[0].tobytes()
    assert residual is None or residual.tobytes() == before[1].tobytes()  # type: ignore[union-attr]
    assert isinstance(payload, bytes) and len(payload) == compressor.packed_size(values.size)
    assert rest.shape == values.shape and rest.dtype == values.dtype
    total = values.reshape(-1)
    if residual is not None:
        total = total + (residual if compressor.decay == 1 else values.dtype.type(compressor.decay) * residual).reshape(-1)
    decoded = compressor.decode(payload, values.size, values.dtype)
    assert decoded.dtype == values.dtype and decoded.shape == (values.size,)
    assert (total - decoded).tobytes() == rest.tobytes()
    if isinstance(compressor, TopK):
        kept = kept_by(compressor, total)
        assert not decoded[~kept].any()
        assert rest.reshape(-1)[~kept].tobytes() == total[~kept].tobytes()
    for low in range(0, values.size, compressor.block):
        part = slice(low, low + compressor.block)
        exact, of_block = decoded[part].astype(np.float64), total[part].astype(np.float64)
        # an integer of at most 12 bits with its sign, times a power of two
        exponent = max(math.frexp(float(np.abs(of_block).max()))[1] - 11, int(np.finfo(values.dtype).minexp))
        integers = np.ldexp(exact, -exponent)
        assert (integers == np.rint(integers)).all() and np.abs(integers).max() <= 2047
        whole = np.ldexp(of_block, -exponent)
        left = whole - integers
        assert left @ left <= (whole @ whole) * (1 + 1e-6)  # no block gets larger
        assert not exact[of_block == 0].any()
    return payload, rest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_the_residual_is_the_sum_minus_the_decoded_values(compressor: Compressor, dtype: type, kind: str) -> None:
    values = drawn(kind, 4096 + 300, dtype).reshape(4, -1)
    _, residual = check(compressor, values, None)
    if kind not in ("huge", "the largest", "2**127"):
        check(compressor, values[::-1], residual)


@pytest.mark.parametrize(
    "compressor",
    (TopK(block=64), TopK(1 / 8, bits=4, block=64), TopK(1.0, bits=8, block=64), Blockwise(8, block=64), Blockwise(4, block=64)),
    ids=repr,
)
def test_all_sizes_around_a_block(compressor: Compressor) -> None:
    for size in range(1, 201):
        check(compressor, drawn("normal", size, np.float32, size), None)
    for size in (0, 4095, 4096, 4097):
        for each in COMPRESSORS:
            payload, residual = each.encode(drawn("ties", size, np.float64))
            assert len(payload) == each.packed_size(size) and residual.shape == (size,)
            assert each.decode(payload, size).size == size


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    hnp.arrays(np.float32, st.integers(1, 300), elements=st.one_of(st.just(np.float32(0)), finite.map(lambda x: x / 4))),
    st.sampled_from(
        (TopK(block=64), TopK(0.3, bits=4, block=65, decay=0.5), TopK(1.0, bits=8, block=128), Blockwise(8, block=64), Blockwise(4, block=65))
    ),
)
def test_any_finite_values(values: np.ndarray, compressor: Compressor) -> None:
    _, residual = check(compressor, values, None)
    check(compressor, values, residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compressor", (TopK(), TopK(1 / 8, bits=4), TopK(1 / 8, bits=8), Blockwise(8), Blockwise(4)), ids=repr)
def test_error_feedback_loses_nothing(compressor: Compressor, dtype: type) -> None:
    rng = np.random.default_rng(1)
    gradient, residual = rng.standard_normal(5000).astype(dtype), None
    received, norms = np.zeros(5000), []
    for step in range(1, 201):
        payload, residual = compressor.encode(gradient, residual)
        compressor.add_decoded(payload, received)
        norms.append(float(np.abs(received / step - gradient).mean()))
    assert norms[-1] < 0.5 * norms[20] or norms[-1] < 1e-3
    np.testing.assert_allclose(received + residual, 200 * gradient, rtol=1e-3, atol=1e-3)


def test_constant_blocks_are_exact() -> None:
    for compressor in (TopK(1.0, bits=2, block=64), TopK(1.0, bits=8, block=64)):
        values = np.where(np.arange(64) % 3, 3.0, -3.0)
        np.testing.assert_array_equal(compressor.decode(compressor.encode(values)[0], 64), values)


def test_positions_take_eight_bits_each() -> None:
    for bits in (2, 4, 8):
        compressor = TopK(1 / 64, bits=bits)
        record = compressor.packed_size(4096)
        assert record * 8 - 64 * bits - 40 <= 8.1 * 64  # five bytes of exponent and levels
    assert TopK().packed_size(1_000_000) <= 21_000
    assert 3 * 8 * 1_000_000 * 30 / 4 / TopK().packed_size(1_000_000) > 1000


def test_a_payload_of_float64_in_float32_rounds_what_is_too_small_and_refuses_what_is_too_large() -> None:
    for compressor in (TopK(1.0, block=64), Blockwise(8)):
        small, _ = compressor.encode(np.array([1e-300, -1e-310]))
        assert compressor.decode(small, 2).tolist() == [0.0, 0.0]
        large, _ = compressor.encode(np.array([1e300, 1.0]))
        with pytest.raises(ProtocolError, match=r"block 0 has the exponent \d+; float32 takes exponents up to 117"):
            compressor.decode(large, 2)
        assert compressor.decode(large, 2, np.float64)[0] == pytest.approx(1e300, rel=1e-2)


# -------------------------------------------------------------------- hostile payloads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_a_payload_from_anywhere_is_refused_or_finite(compressor: Compressor, dtype: type) -> None:
    rng = np.random.default_rng(3)
    outcomes = {"refused": 0, "finite": 0}
    size = 2 * compressor.block + 10
    for attempt in range(300):
        payload = bytearray(compressor.encode(drawn("normal", size, np.float32, attempt))[0])
        if attempt % 3 == 0:
            payload[:] = rng.bytes(len(payload))
        for _ in range(attempt % 4):
            payload[rng.integers(len(payload))] = rng.integers(256)
        try:
            values = compressor.decode(payload, size, dtype)
        except ProtocolError:
            outcomes["refused"] += 1
        else:
            outcomes["finite"] += 1
            assert np.isfinite(values).all() and values.size == size
    assert min(outcomes.values()) > 10, outcomes


def test_the_length_of_a_payload_is_looked_at_before_anything_is_made() -> None:
    for compressor in COMPRESSORS:
        payload, _ = compressor.encode(drawn("normal", 500, np.float32))
        for wrong in (payload[:-1], payload + b"\0", b""):
            with pytest.raises(ProtocolError, match=f"a payload of {len(wrong)} bytes; 500 values take {len(payload)} bytes"):
                compressor.decode(wrong, 500)
        with pytest.raises(ProtocolError, match="values take"):
            compressor.decode(payload, 1 << 50)


def test_malformed_records_are_named() -> None:
    compressor = TopK(1 / 2, block=64)
    payload = bytearray(compressor.encode(drawn("normal", 128, np.float32))[0])
    record = len(payload) // 2
    at = record + 5 + 4
    payload[at : at + 8] = b"\xff" * 8  # too many positions
    with pytest.raises(ProtocolError, match="block 1 of the payload is malformed: its positions do not increase within the block"):
        compressor.decode(payload, 128)
    blocks = Blockwise(8, block=64)
    payload = bytearray(blocks.encode(drawn("normal", 100, np.float32))[0])
    for at, value, what in (
        (67 + 5, 0, "block 1 of the payload is malformed: the code 0"),
        (2, 255, "block 0 of the payload is malformed: its factor"),
    ):
        wrong = payload.copy()
        wrong[at] = value
        with pytest.raises(ProtocolError, match=what):
            blocks.decode(wrong, 100)


def test_an_error_leaves_the_total_as_it_was() -> None:
    total = np.ones(100)
    payload = bytearray(Blockwise(8, block=64).encode(drawn("normal", 100, np.float32))[0])
    payload[-1] = 0
    with pytest.raises(ProtocolError):
        Blockwise(8, block=64).add_decoded(payload, total)
    assert (total == 1).all()


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_values_that_are_not_finite_are_named(compressor: Compressor) -> None:
    values = drawn("normal", 300, np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        wrong = values.copy()
        wrong[[123, 200]] = bad
        with pytest.raises(ArgumentError, match=f"the value at index 123 is {bad}"):
            compressor.encode(wrong)
        with pytest.raises(ArgumentError, match=r"the value at index \(41, 0\) is"):
            compressor.encode(wrong.reshape(100, 3))
        with pytest.raises(ArgumentError, match="the residual at index 123 is"):
            compressor.encode(values, wrong)
    largest = np.full(300, np.finfo(np.float32).max)
    with pytest.raises(ArgumentError, match="the sum of value and residual at index 0 is inf"):
        compressor.encode(largest, largest)


def test_arguments_are_checked() -> None:
    compressor, values = TopK(), np.zeros(10, np.float32)
    for wrong in ([1.0], 1.0, None, np.zeros(3, np.int64), np.zeros(3, np.float16), np.zeros(3, ">f4"), np.zeros(3, np.complex128)):
        with pytest.raises(ArgumentTypeError, match="expected (an array of )?float32 or float64"):
            compressor.encode(wrong)  # type: ignore[arg-type]
    for residual in (np.zeros(9, np.float32), np.zeros(10), np.zeros((10, 1), np.float32)):
        with pytest.raises(ArgumentError, match="expected the residual that encoding"):
            compressor.encode(values, residual)
    payload = compressor.encode(values)[0]
    for size in (-1, 1.5, True, None):
        with pytest.raises(ArgumentError, match="expected a number of values"):
            compressor.decode(payload, size)  # type: ignore[arg-type]
    for dtype in (np.int32, "x", 3, object):
        with pytest.raises(ArgumentError, match="expected float32 or float64"):
            compressor.decode(payload, 10, dtype)
    for given_payload in ("text", None, 5):
        with pytest.raises(ArgumentTypeError, match="expected bytes"):
            compressor.decode(given_payload, 10)


@pytest.mark.parametrize("fraction", (0, -0.1, 1.5, math.nan, math.inf, True, "1/64", None))
def test_such_a_fraction_is_refused(fraction: object) -> None:
    with pytest.raises(ArgumentError, match="fraction="):
        TopK(fraction)  # type: ignore[arg-type]


def test_such_options_are_refused() -> None:
    for bits in (0, 1, 3, 16, 2.0, True, None):
        for kind in (lambda bits: TopK(1 / 64, bits), Blockwise):
            with pytest.raises(ArgumentError, match="bits="):
                kind(bits)
    with pytest.raises(ArgumentError, match="bits=2; expected one of 8, 4"):
        Blockwise(2)
    for block in (63, 65_537, 64.0, None, True):
        for kind in (TopK, Blockwise):
            with pytest.raises(ArgumentError, match="expected a whole number of values from 64 to 65536"):
                kind(block=block)
    for decay in (-0.1, 1.1, math.nan, "1"):
        with pytest.raises(ArgumentError, match="decay="):
            TopK(decay=decay)  # type: ignore[arg-type]


def test_compressors_are_values() -> None:
    assert TopK() == dist.TopK(1 / 64, 2, block=4096, decay=1.0) != TopK(1 / 64, 4)
    assert Blockwise() == dist.Blockwise(8, block=4096) != Blockwise(4)
    assert len({TopK(), TopK(1 / 64, bits=2), Blockwise(), Blockwise(bits=8), TopK(decay=0.5)}) == 3
    assert TopK() != Blockwise()  # type: ignore[comparison-overlap]
    with pytest.raises(AttributeError):
        TopK().bits = 4  # type: ignore[misc]


# -------------------------------------------------------------------- kernel sets


@pytest.fixture
def _small_arrays_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of numba are used from one element on; the process's own choice comes back afterwards."""
    before = selection.selected()
    monkeypatch.setattr(selection, "THRESHOLD", 1)
    monkeypatch.setattr(pool, "GRAIN", 512)
    yield
    selection._chosen = before


MANY_COMPRESSORS = (*COMPRESSORS, TopK(1 / 64, block=65_536), TopK(1e-9, block=65_536), Blockwise(4, block=65_535))


@pytest.mark.skipif(not selection.available(), reason="numba is not installed")
@pytest.mark.timeout(900)  # compiles all kernels where the user's cache does not hold them yet
@pytest.mark.usefixtures("_small_arrays_too")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_both_kernel_sets_give_the_same_bytes(kind: str, dtype: type) -> None:
    for compressor in MANY_COMPRESSORS:
        for size in (1, 65, 4096, 3 * 4096 + 77, 70_001):
            values = drawn(kind, size, dtype, size)
            residual = drawn("normal", size, dtype, size + 1)
            found = []
            for name in ("numpy", "numba"):
                selection.use(name)  # type: ignore[arg-type]
                for before in (None, residual):
                    payload, rest = compressor.encode(values, before)
                    found.append((payload, rest.tobytes(), compressor.decode(payload, size, dtype).tobytes()))
            assert found[:2] == found[2:], (compressor, kind, size, dtype)


@pytest.mark.skipif(not selection.available(), reason="numba is not installed")
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_small_arrays_too")
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_kernel_sets_refuse_the_same(dtype: type) -> None:
    for compressor in MANY_COMPRESSORS:
        wrong = np.random.default_rng(5)
        for _ in range(30):
            payload, outcomes = bytearray(wrong.bytes(compressor.packed_size(500))), []
            for name in ("numpy", "numba"):
                selection.use(name)  # type: ignore[arg-type]
                try:
                    outcomes.append(compressor.decode(payload, 500, dtype).tobytes())
                except ProtocolError as error:
                    outcomes.append(str(error).encode())
            assert outcomes[0] == outcomes[1]
        bad = drawn("normal", 500, dtype)
        bad[499] = np.nan
        for name in ("numpy", "numba"):
            selection.use(name)  # type: ignore[arg-type]
            with pytest.raises(ArgumentError, match="index 499"):
                compressor.encode(bad)
