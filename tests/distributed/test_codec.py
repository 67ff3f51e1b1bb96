"""Values to bytes and back: nothing is lost, nothing else is accepted, and nothing is allocated for what is only claimed."""

from __future__ import annotations

import enum
import math
import random
import re
import struct
import tracemalloc
from collections import OrderedDict, namedtuple
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.rpc import codec
from aiograd.distributed.rpc.codec import PROLOGUE, Encoding, WireReference, WireTensor, decode, encode, message_size
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.tensor_table import INLINE
from aiograd.errors import ArgumentError, ArgumentTypeError, LimitError, ProtocolError
from tests.distributed.mutation import cases, mutate

LIMITS = Limits()
SMALL = Limits(message_bytes=65_536, head_bytes=8_192, tensors=8, dimensions=4, depth=5)
DTYPES = "f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 b1 c8 c16".split()


def joined(value: object, limits: Limits = LIMITS) -> bytearray:
    return bytearray().join(encode(value, limits))


def there_and_back(value: object, limits: Limits = LIMITS) -> Any:
    return decode(joined(value, limits), limits)


def tensor(*shape: int, dtype: str = "f4", requires_grad: bool = False, encoding: Encoding = Encoding.PLAIN) -> WireTensor:
    return WireTensor((np.arange(math.prod(shape)) % 2).astype(dtype).reshape(shape), requires_grad, encoding)


def facts(item: WireTensor) -> tuple[object, ...]:
    return item.requires_grad, item.encoding, item.array.shape, item.array.dtype.str, item.array.tobytes()


def same(left: Any, right: Any) -> bool:
    """Equal in types, bits and order; NaN equals itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, WireTensor):
        left, right = (facts(item) for item in (left, right))
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


# ---- round trips


@st.composite
def wire_tensors(draw):
    """Any bits, any shape, any strides."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    data = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    array = np.frombuffer(bytes(byte & 1 for byte in data) if dtype.kind == "b" else data, dtype).reshape(shape).copy()
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if array.ndim and draw(st.booleans()):
        array = array[:: draw(st.sampled_from([-1, 2]))]
    return WireTensor(array, draw(st.booleans()))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.complex_numbers(), TEXT, st.binary(max_size=50), wire_tensors(),
    st.builds(WireReference, TEXT, st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), TEXT),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_encoded_is_decoded(value):
    message = joined(value)
    found = decode(message, LIMITS)
    assert same(found, value)
    assert joined(found) == message  # equal values are equal bytes


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), -0.0, math.inf, "", b"", "\x00", "🙂 ü", [], (), {}, {"": [{}]}, [[], ()], (((),),)])
def test_edges(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("bits", [0x7FF0000000000001, 0xFFF8000000000000, 0xFFFFFFFFFFFFFFFF])
def test_nan_keeps_its_bits(bits):
    array = np.array([bits], "u8").view("f8")
    assert there_and_back(WireTensor(array)).array.view("u8")[0] == bits
    number = struct.unpack("<d", struct.pack("<Q", bits))[0]
    assert struct.pack("<d", there_and_back([number])[0]) == struct.pack("<Q", bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (7,), (3, 5), (1,) * 16, (INLINE + 1,), (3, INLINE)])
def test_every_dtype_and_shape(shape, dtype):
    sent = [tensor(*shape, dtype=dtype, requires_grad=True), "between", tensor(*shape, dtype=dtype), tensor(3, dtype=dtype)]
    found = there_and_back(sent)
    assert same(found, sent)
    arrays = [item.array for item in found if isinstance(item, WireTensor)]
    assert all(array.flags.c_contiguous and array.flags.writeable and array.flags.aligned for array in arrays)
    assert not any(np.shares_memory(left, right) for left in arrays for right in arrays if left is not right)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, INLINE - 1, INLINE, INLINE + 1, INLINE + 63, 2 * INLINE])
def test_data_is_aligned_in_the_message_whatever_the_sizes(size):
    sent = [tensor(length, dtype="u1") for length in (size, 0, 1, size, size + 1, 0)]
    message = joined(sent)
    base = np.frombuffer(message, "u1").ctypes.data
    found = decode(message, LIMITS)
    assert same(found, sent)
    assert all((item.array.ctypes.data - base) % 64 == 0 for item in found if item.array.size)


def test_the_same_tensor_is_sent_once_and_stays_one():
    shared = tensor(100)
    other = WireTensor(shared.array)
    found = there_and_back([shared, {"x": (shared, other)}, other])
    assert found[0] is found[1]["x"][0] and found[1]["x"][1] is found[2]
    assert found[0] is not found[2] and not np.shares_memory(found[0].array, found[2].array)
    assert len(joined([shared] * 1000)) < len(joined([shared])) + 5000


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_encodings_keep_dtype_and_shape(encoding, dtype):
    sent = [tensor(*shape, dtype=dtype, encoding=encoding, requires_grad=True) for shape in ((3, 50), (), (0,), (50_000,))]
    sent.append(tensor(5))
    assert same(there_and_back(sent), sent)  # zeros and ones are exact in every encoding


def test_message_size():
    buffers = encode([tensor(50_000), "x", tensor(3)], LIMITS)
    assert len(buffers) == 3 and message_size(buffers) == len(b"".join(buffers))


# ---- golden messages


GOLDEN = {
    "values": (
        (None, False, True, -2, 1.5, 1 - 2j, "é", b"\x00\xff", [1], {"k": ()}),
        "57000000 00000000 0000000000000000 090a000000 00 01 02 03feffffffffffffff 04000000000000f83f 05000000000000f03f00000000000000c0"
        " 0602000000c3a9 070200000000ff 0801000000030100000000000000 0a01000000 06010000006b 0900000000",
    ),
    "reference": (
        WireReference("w1", bytes(range(16)), bytes(range(16, 32)), "Net"),
        "2e000000 00000000 0000000000000000 0d 000102030405060708090a0b0c0d0e0f 101112131415161718191a1b1c1d1e1f 020000007731 030000004e6574",
    ),
    "tensor": (
        WireTensor(np.array([[1, -2]], "f4"), True),
        "1d000000 01000000 0800000000000000 0b 03000102 0000000000000000 0800000000000000 01000000 02000000" + " 00" * 19 + "0000803f 000000c0",
    ),
    "again": (
        (lambda item: [item, item, WireTensor(np.array(True)), WireTensor(np.zeros((0, 2), "i8"))])(WireTensor(np.array(7, "u2"))),
        "51000000 03000000 8000000000000000 0804000000 0b 0c00000000 0b 0b 0a000000 0000000000000000 0200000000000000"
        " 0d000000 4000000000000000 0100000000000000 08000002 8000000000000000 0000000000000000 00000000 02000000"
        + " 00" * 31 + "0700" + " 00" * 62 + "01" + " 00" * 63,
    ),
    "encodings": (
        [WireTensor(np.array([1, 2], "f8"), False, item) for item in (Encoding.FLOAT16, Encoding.BFLOAT16, Encoding.BLOCK8)],
        "50000000 03000000 8600000000000000 0803000000 0b0b0b 04010001 0000000000000000 0400000000000000 02000000"
        " 04020001 4000000000000000 0400000000000000 02000000 04030001 8000000000000000 0600000000000000 02000000"
        + " 00" * 32 + "003c0040" + " 00" * 60 + "803f0040" + " 00" * 60 + "00000040407f",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_messages(name):
    value, expected = GOLDEN[name]
    assert joined(value).hex() == bytes.fromhex(expected).hex()
    decode(bytearray.fromhex(expected), LIMITS)


def test_golden_dtypes():
    codes = {dtype: joined(WireTensor(np.zeros((), dtype)))[PROLOGUE.size + 1] for dtype in DTYPES}
    assert codes == {dtype: code for code, dtype in enumerate(DTYPES, 2)}


# ---- no needless copies, and none missing


def test_large_arrays_are_not_copied_and_small_ones_are():
    large, small = np.zeros(INLINE + 1, "u1"), np.zeros(INLINE, "u1")
    buffers = encode([WireTensor(large), WireTensor(small)], LIMITS)
    assert np.shares_memory(np.frombuffer(buffers[1], "u1"), large)
    assert not any(np.shares_memory(np.frombuffer(buffer, "u1"), small) for buffer in buffers)
    large.flags.writeable = False
    assert np.shares_memory(np.frombuffer(encode([WireTensor(large)], LIMITS)[1], "u1"), large)


def test_arrays_are_views_of_the_message():
    message = joined([tensor(3), tensor(INLINE, dtype="c16")])
    found = decode(message, LIMITS)
    assert all(np.shares_memory(item.array, np.frombuffer(message, "u1")) for item in found)
    before = bytes(message)
    found[0].array += 1
    assert bytes(message) != before


def test_a_read_only_message_gives_arrays_of_their_own():
    message = bytes(joined([tensor(3), tensor(4, encoding=Encoding.BFLOAT16)]))
    for source in (message, memoryview(message), memoryview(bytearray(message)).toreadonly()):
        for item in decode(source, LIMITS):
            item.array += 1
    assert same(decode(message, LIMITS), [tensor(3), tensor(4, encoding=Encoding.BFLOAT16)])


def test_a_message_at_an_odd_address_gives_aligned_arrays():
    message = joined([tensor(3, dtype="f8")])
    found = decode(memoryview(b"x" + message)[1:], LIMITS)[0].array
    shifted = decode(memoryview(bytearray(b"x") + message)[1:], LIMITS)[0].array
    assert found.flags.aligned and shifted.flags.aligned and shifted.flags.writeable


def test_strings_and_bytes_do_not_refer_to_the_message():
    message = joined(["text", b"bytes"])
    found = decode(message, LIMITS)
    message[:] = bytes(len(message))
    message.clear()  # no view is left that would forbid it
    assert found == ["text", b"bytes"]


def test_a_bool_that_numpy_keeps_as_another_byte_is_sent_as_one():
    for size in (3, 2 * INLINE):
        array = np.full(size, 2, "u1").view("?")
        assert there_and_back(WireTensor(array)).array.view("u1").tolist() == [1] * size
        assert there_and_back(WireTensor(array[::2])).array.view("u1").tolist() == [1] * -(-size // 2)


# ---- what is not sent


class Whole(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


Pair = namedtuple("Pair", "x y")

REFUSED_TYPES = [
    (np.float64(1), "numpy.float64"), (np.int64(1), "numpy.int64"), (np.zeros(2), "numpy.ndarray"), (Whole.ONE, "Whole"), (Text("x"), "Text"),
    (Pair(1, 2), "Pair"), (OrderedDict(), "collections.OrderedDict"), ({1}, "set"), (bytearray(b"x"), "bytearray"), (object(), "object"),
    (print, "builtin_function_or_method"), (int, "type"), (NotImplemented, "NotImplementedType"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "name"), REFUSED_TYPES, ids=[name for _, name in REFUSED_TYPES])
def test_other_types_are_refused_with_their_place(value, name):
    for wrapped, place in ((value, "argument"), ([0, {"a": 1, "x": (value,)}], r"argument \[1\]\['x'\]\[0\]")):
        with pytest.raises(ArgumentTypeError, match=rf"^encode: {place} is a .*{re.escape(name)}; a message takes None, bool.*dict with str keys"):
            encode(wrapped, LIMITS)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ([{"a": {1: 2}}], ArgumentTypeError, r"argument \[0\]\['a'\] has a key of type int; keys are str"),
        ({Text("x"): 2}, ArgumentTypeError, r"argument has a key of type .*Text; keys are str"),
        ([0, 2**63], ArgumentError, r"argument \[1\] is outside of the 64 bits of an int"),
        (-(2**63) - 1, ArgumentError, r"argument is outside of the 64 bits"),
        ({"a": "\ud800"}, ArgumentError, r"argument \['a'\] has half of a surrogate pair"),
        ({"\ud800": 1}, ArgumentError, r"argument \['\\ud800'\] has half of a surrogate pair"),
        ([WireReference("a", b"x" * 15, b"x" * 16, "T")], ArgumentTypeError, r"argument \[0\] is a reference; .*16 bytes"),
        ([WireReference("a", b"x" * 16, b"x" * 17, "T")], ArgumentTypeError, r"argument \[0\] is a reference"),
        ([WireReference("a", bytearray(16), b"x" * 16, "T")], ArgumentTypeError, r"argument \[0\] is a reference"),
        ([WireReference("a", b"x" * 16, b"x" * 16, None)], ArgumentTypeError, r"argument \[0\] is a reference"),
        (["", WireTensor([1.0])], ArgumentTypeError, r"argument \[1\] holds a list, expected a numpy.ndarray"),
        (WireTensor(np.ma.zeros(3)), ArgumentTypeError, r"holds a numpy\.ma\..*MaskedArray, expected"),
        ({"w": WireTensor(np.zeros(2, ">f4"))}, ArgumentTypeError, r"argument \['w'\] has dtype >f4; .*byte order"),
        (WireTensor(np.zeros(2, "O")), ArgumentTypeError, "has dtype object; a message takes float16, float32.*complex128"),
        (WireTensor(np.zeros(2, "f4,i2")), ArgumentTypeError, "has dtype .*a message takes"),
        (WireTensor(np.zeros(2, "U5")), ArgumentTypeError, "has dtype <U5"),
        (WireTensor(np.zeros(2, "M8[s]")), ArgumentTypeError, "has dtype datetime64"),
        (WireTensor(np.zeros(2, "g")), ArgumentTypeError, "has dtype float128|has dtype longdouble"),
        (WireTensor(np.zeros(2, "i4"), False, Encoding.FLOAT16), ArgumentTypeError, "has dtype int32, but Encoding.FLOAT16 takes float32"),
        (WireTensor(np.zeros(2, "f4"), False, 1), ArgumentTypeError, "has the encoding 1, expected one of Encoding.PLAIN"),
    ],
)  # fmt: skip
def test_other_refusals_name_the_place(value, error, text):
    with pytest.raises(error, match=text):
        encode(value, LIMITS)


def test_an_error_of_encode_has_no_ties_to_the_value():
    with pytest.raises(ArgumentTypeError) as caught:
        encode({"k" * 500: object()}, LIMITS)
    assert len(str(caught.value)) < 400 and caught.value.__cause__ is None and caught.value.__suppress_context__


# ---- limits, which both sides hold to


def nested(levels: int, *wraps: Any) -> Any:
    value: Any = 1
    for level in range(levels):
        value = wraps[level % len(wraps)](value)
    return value


WRAPS = {"lists": lambda value: [value], "tuples": lambda value: (value,), "dicts": lambda value: {"": value}}


WIDE = Limits(message_bytes=2**60, head_bytes=2**24, tensors=2**20, dimensions=64, depth=200)
AT_LIMITS = {
    **{f"depth of {name}": (nested(5, wrap), nested(6, wrap)) for name, wrap in WRAPS.items()},
    "depth of all": (nested(5, *WRAPS.values()), nested(6, *WRAPS.values())),
    "values": ([0] * 127, [0] * 128),
    "values in dicts": ({str(key): 0 for key in range(63)}, {str(key): 0 for key in range(64)}),
    "head_bytes": ("x" * (8_192 - 5), "x" * (8_192 - 4)),
    "head_bytes=": ([b"x" * 4_081, b"x" * 4_096], [b"x" * 4_082, b"x" * 4_096]),
    "head_bytes of short text": (["x" * 1000] * 8 + ["x" * (8_192 - 8_045 - 5)], ["x" * 1000] * 8 + ["x" * (8_192 - 8_045 - 4)]),
    "tensors": ([tensor() for _ in range(8)], [tensor() for _ in range(9)]),
    "dimensions": (tensor(1, 1, 1, 1), tensor(1, 1, 1, 1, 1)),
    "message_bytes": (tensor(65_536 - 64, dtype="u1"), tensor(65_536 - 63, dtype="u1")),
    "message_bytes when decoded": (
        [tensor(1 << 13, encoding=Encoding.BLOCK8), tensor(1 << 13, encoding=Encoding.BLOCK8)],
        [tensor(1 << 13, encoding=Encoding.BLOCK8), tensor((1 << 13) + 1, encoding=Encoding.BLOCK8)],
    ),
    "message_bytes of zeros": (tensor(65_536 // 4, 0), tensor(65_536 // 4 + 1, 0)),
    "message_bytes of many zeros": (tensor(0), tensor(2**31 - 1, 2**20, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_LIMITS)
def test_limits_are_exact_on_both_sides(name):
    within, beyond = AT_LIMITS[name]
    assert same(there_and_back(within, SMALL), within)
    limit = "head_bytes" if name.startswith("values") else re.split(r"\W", name)[0]
    message = joined(beyond, WIDE)
    with pytest.raises(LimitError, match=rf"Limits\.{limit}\b"):
        decode(message, SMALL)
    if name == "message_bytes when decoded":
        return  # 16,385 values take few bytes on the wire: only the receiver minds
    with pytest.raises(LimitError, match=rf"Limits\.{limit}\b"):
        encode(beyond, SMALL)


def test_a_value_in_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(LimitError, match=r"Limits\.depth"):
        encode(loop, LIMITS)
    with pytest.raises(LimitError, match=r"Limits\.depth"):  # not the interpreter's recursion limit
        encode(loop, replace(LIMITS, depth=255))


def test_a_value_that_doubles_at_each_level_is_refused_at_once():
    value: Any = "x" * 4096
    for _ in range(15):
        value = [value] * 10
    with pytest.raises(LimitError, match=r"brings what is not tensor data above Limits\.head_bytes"):
        encode(value, LIMITS)


def test_as_many_dimensions_as_numpy_has():
    sent = tensor(*(2, *(1,) * 63))
    assert same(there_and_back(sent, WIDE), sent)
    with pytest.raises(LimitError, match=r"65 dimensions, above Limits\.dimensions=64"):  # the most that Limits takes
        decode(bytearray(one(shape=(1,) * 65, size=4, data=bytes(4))), WIDE)


def test_a_dimension_beyond_31_bits_is_refused():
    with pytest.raises(LimitError, match="dimension of 2147483648"):
        encode(WireTensor(np.zeros((2**31, 0), "u1")), replace(LIMITS, message_bytes=2**40))


# ---- malformed messages


def text_of(text: str) -> bytes:
    return struct.pack("<BI", 6, len(text.encode())) + text.encode()


def descriptor(code: int = 3, encoding: int = 0, flags: int = 0, start: int = 0, size: int | None = None, shape: tuple[int, ...] = (2,)) -> bytes:
    size = math.prod(shape) * 4 if size is None else size
    return struct.pack(f"<BBBBQQ{len(shape)}I", code, encoding, flags, len(shape), start, size, *shape)


def build(tree: bytes, *descriptors: bytes, data: bytes = b"", count: int | None = None, tail: bytes = b"", **changes: Any) -> bytes:
    head = tree + b"".join(descriptors) + tail
    prologue = {"head": len(head), "count": len(descriptors) if count is None else count, "payload": len(data)} | changes
    message = PROLOGUE.pack(*prologue.values()) + head
    return message + bytes(-len(message) % 64 if data else 0) + data


def one(**changes: Any) -> bytes:
    """A message of one tensor of two float32, with some fields of its descriptor changed."""
    data = changes.pop("data", bytes(8))
    return build(b"\x0b", descriptor(**changes), data=data)


MALFORMED = [
    ("prologue", b""),
    ("prologue", build(b"\x00")[:15]),
    ("length", build(b"\x00") + b"\x00"),
    ("length", build(b"\x00")[:-1]),
    ("length", one()[:-1]),
    ("length", one() + b"\x00"),
    ("length", build(b"\x00", payload=2**64 - 1)),
    ("length", build(b"\x00", head=2)),
    ("count", build(b"\x08" + struct.pack("<I", 2) + b"\x00")),
    ("count", build(b"\x09" + struct.pack("<I", 2**32 - 1))),
    ("count", build(b"\x0a" + struct.pack("<I", 1) + b"\x00")),
    ("count", build(b"\x0a" + struct.pack("<I", 2**31) + bytes(20))),
    ("count", build(b"")),
    ("tag", build(b"\x0e")),
    ("tag", build(b"\xff")),
    ("truncated", build(b"\x03" + bytes(7))),
    ("truncated", build(b"\x04" + bytes(7))),
    ("truncated", build(b"\x05" + bytes(15))),
    ("truncated", build(b"\x06" + bytes(3))),
    ("truncated", build(b"\x06" + struct.pack("<I", 2) + b"x")),
    ("truncated", build(b"\x07" + struct.pack("<I", 2**32 - 1) + b"x")),
    ("truncated", build(b"\x09" + bytes(3))),
    ("truncated", build(b"\x0c" + bytes(3))),
    ("truncated", build(b"\x0d" + bytes(35))),
    ("truncated", build(b"\x0d" + bytes(32) + struct.pack("<I", 9) + b"x")),
    ("truncated", build(b"\x09" + struct.pack("<I", 2) + b"\x07" + struct.pack("<I", 9))),
    ("truncated", build(b"\x0b", descriptor()[:-1], data=bytes(8))),
    ("truncated", build(b"\x0b", b"\x03", data=bytes(8))),
    ("text", build(b"\x06" + struct.pack("<I", 2) + b"\xff\xfe")),
    ("text", build(b"\x06" + struct.pack("<I", 3) + b"\xed\xa0\x80")),
    ("text", build(b"\x0d" + bytes(32) + struct.pack("<I", 1) + b"\xff" + bytes(4))),
    ("key", build(b"\x0a" + struct.pack("<I", 1) + b"\x00\x00")),
    ("key", build(b"\x0a" + struct.pack("<I", 1) + b"\x07" + struct.pack("<I", 0) + b"\x00")),
    ("duplicate_key", build(b"\x0a" + struct.pack("<I", 2) + 2 * (text_of("x") + b"\x00"))),
    ("tensor_number", build(b"\x0c" + bytes(4))),
    ("tensor_number", build(b"\x09" + struct.pack("<I", 2) + b"\x0b\x0c" + struct.pack("<I", 1), descriptor(), data=bytes(8))),
    ("tensor_count", build(b"\x0b")),
    ("tensor_count", build(b"\x00", descriptor(), data=bytes(8))),
    ("tensor_count", build(b"\x09" + struct.pack("<I", 2) + b"\x0b\x0b", descriptor(), data=bytes(8))),
    ("dtype", one(code=0)),
    ("dtype", one(code=1)),
    ("dtype", one(code=16)),
    ("dtype", one(code=255)),
    ("tensor_flags", one(flags=2)),
    ("tensor_flags", one(flags=0x81)),
    ("dimension", one(shape=(2**31,), size=0)),
    ("dimension", one(shape=(0, 2**32 - 1), size=0)),
    ("encoding", one(encoding=4)),
    ("encoding", one(encoding=255)),
    ("encoding", one(code=7, encoding=1, size=4, data=bytes(4))),
    ("encoding", one(code=2, encoding=2, size=4, data=bytes(4))),
    ("tensor_size", one(size=7, data=bytes(7))),
    ("tensor_size", one(shape=(3,), size=8)),
    ("tensor_size", one(shape=(0,), size=8)),
    ("tensor_size", one(size=2**64 - 1)),
    ("tensor_size", one(encoding=1)),
    ("tensor_size", one(encoding=3, size=2, data=bytes(2))),
    ("alignment", one(start=4, size=8, data=bytes(12))),
    ("alignment", one(start=2**64 - 1)),
    ("offset", one(start=64, data=bytes(72))),
    ("offset", build(b"\x09" + struct.pack("<I", 2) + b"\x0b\x0b", descriptor(), descriptor(start=0), data=bytes(72))),
    ("offset", build(b"\x09" + struct.pack("<I", 2) + b"\x0b\x0b", descriptor(), descriptor(start=128), data=bytes(136))),
    ("offset", build(b"\x09" + struct.pack("<I", 2) + b"\x0b\x0b", descriptor(start=64), descriptor(start=0), data=bytes(72))),
    ("head_end", build(b"\x00", tail=b"\x00")),
    ("head_end", build(b"\x0b", descriptor(), data=bytes(8), tail=b"\x00")),
    ("payload", build(b"\x00", data=bytes(8))),
    ("payload", one(data=bytes(9))),
    ("payload", one(data=bytes(7))),
    ("payload", build(b"\x0b", descriptor())),
    ("padding", one()[:55] + b"\x01" + one()[56:]),
    ("padding", build(b"\x09" + struct.pack("<I", 2) + b"\x0b\x0b", descriptor(), descriptor(start=64), data=bytes(63) + b"\x01" + bytes(8))),
    ("padding", build(b"\x09" + struct.pack("<I", 2) + b"\x0b\x0b", descriptor(), descriptor(start=64, shape=(0,)), data=bytes(63) + b"\x01")),
    ("scale", one(encoding=3, size=6, data=struct.pack("<f", math.nan) + bytes(2))),
    ("scale", one(encoding=3, size=6, data=struct.pack("<f", -1) + bytes(2))),
    ("bool", one(code=13, size=2, data=b"\x00\x02")),
    ("bool", one(code=13, size=2 * INLINE, shape=(2 * INLINE,), data=bytes(2 * INLINE - 1) + b"\xff")),
]


@pytest.mark.parametrize(("code", "message"), MALFORMED, ids=[f"{code}-{index}" for index, (code, _) in enumerate(MALFORMED)])
def test_each_malformation_has_its_code(code, message):
    for source in (bytearray(message), message):
        with pytest.raises(ProtocolError) as caught:
            decode(source, LIMITS)
        assert caught.value.code == code


def test_what_the_malformations_are_made_from_is_well_formed():
    two = build(b"\x09" + struct.pack("<I", 2) + b"\x0b\x0b", descriptor(), descriptor(start=64), data=bytes(72))
    encoded = [one(encoding=1, size=4, data=bytes(4)), one(encoding=3, size=6, data=bytes(6))]
    for message in (build(b"\x00"), one(), two, *encoded, one(code=13, size=2, data=b"\0\1")):
        decode(bytearray(message), LIMITS)


def test_every_documented_code_is_tested_and_the_other_way_round():
    table = (codec.__doc__ or "").split("    =============")[1]
    assert {code for code, _ in MALFORMED} == set(re.findall(r"^    (\w+) ", table, re.MULTILINE))


def test_a_limit_comes_before_what_it_protects():
    """Claims beyond the limits are refused for that, also where nothing else fits them."""
    for message, limit in (
        (PROLOGUE.pack(2**32 - 1, 0, 0), "head_bytes"),
        (PROLOGUE.pack(1, 2**32 - 1, 0), "tensors"),
        (one(shape=(2**31 - 1,) * 16, size=0), "message_bytes"),
        (one(shape=(2**31 - 1, 2**31 - 1, 0), size=0), "message_bytes"),
        (one(shape=(1,) * 17), "dimensions"),
    ):
        with pytest.raises(LimitError, match=rf"Limits\.{limit}\b"):
            decode(bytearray(message), LIMITS)
    with pytest.raises(LimitError, match=r"Limits\.message_bytes"):
        decode(bytearray(101), replace(LIMITS, message_bytes=100))


# ---- memory


def peak_of_decode(message: bytearray, limits: Limits) -> int:
    """Most bytes that were allocated at any time beyond what was before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        try:
            decode(message, limits)
        except (ProtocolError, LimitError):
            pass
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def repeated(piece: bytes, count: int, times: int = 1) -> bytearray:
    return bytearray(build(b"\x08" + struct.pack("<I", count * times) + piece * count))


BOMBS = {
    "dicts in dicts": repeated(b"\x0a\x01\x00\x00\x00" + text_of("") + b"\x00", 5_400),
    "empty dicts": repeated(b"\x0a" + bytes(4), 16_000),
    "empty lists": repeated(b"\x08" + bytes(4), 16_000),
    "short text": repeated(text_of("äö"), 16_000),
    "one wide character": bytearray(build(text_of("x" * 1_000_000 + "🙂"))),
    "claimed count": bytearray(build(b"\x08" + struct.pack("<I", 2**32 - 1) + bytes(1000))),
    "claimed text": bytearray(build(b"\x06" + struct.pack("<I", 2**32 - 1) + bytes(1000))),
    "claimed tensor": bytearray(one(shape=(2**20, 2**10), size=2**32)),
    "no bytes, large shape": bytearray(one(shape=(2**31 - 1, 2**31 - 1, 0), size=0, data=b"")),
    "many of no bytes": bytearray(
        build(b"\x08" + struct.pack("<I", 1024) + b"\x0b" * 1024, *[descriptor(shape=(2**26, 0))] * 1024)
    ),
    "same tensor often": bytearray(
        build(b"\x08" + struct.pack("<I", 16_000) + b"\x0b" + b"\x0c\x00\x00\x00\x00" * 15_999, descriptor(), data=bytes(8))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_memory_of_a_hostile_message_is_bounded(name):
    """Tensor data costs nothing, the head at most a few times its limit at any time, however it is made up."""
    assert peak_of_decode(BOMBS[name], LIMITS) <= 2 * len(BOMBS[name]) + 5 * LIMITS.head_bytes


def test_decoding_large_tensors_takes_no_memory():
    message = joined([tensor(10_000_000), tensor(10_000_000, dtype="b1")])
    assert peak_of_decode(message, LIMITS) < 20_000


def test_decoded_bytes_of_small_encodings_are_held_to_the_limit_before_any_is_made():
    count, shape = 100, (1 << 20,)
    piece = 1024 + (1 << 20)
    descriptors = [descriptor(code=4, encoding=3, start=index * piece, size=piece, shape=shape) for index in range(count)]
    message = bytearray(build(b"\x08" + struct.pack("<I", count) + b"\x0b" * count, *descriptors, data=bytes(count * piece)))
    with pytest.raises(LimitError, match="when decoded"):
        decode(message, LIMITS)
    assert peak_of_decode(message, LIMITS) < 200_000


# ---- fuzz


def corpus(rng: random.Random) -> list[bytes]:
    shared = tensor(3, 4, requires_grad=True)
    values = [
        ("square", [tensor(4)], {}, 3, True, None, b"x" * 16),
        {"state": {"a": shared, "b": [shared, tensor(), tensor(0, 3)], "flags": tensor(9, dtype="b1")}, "step": -1, "lr": 0.1},
        [WireReference("worker", rng.randbytes(16), rng.randbytes(16), "Net"), 1 + 2j, "ünï", [[[()]]], {}, False],
        [tensor(40, encoding=item, dtype=dtype) for item in Encoding for dtype in ("f4", "f8")],
        [tensor(5, dtype=dtype) for dtype in DTYPES[:8]],
        None,
        "text" * 50,
    ]
    return [bytes(joined(value, SMALL)) for value in values]


def settle(rng: random.Random, message: bytearray) -> None:
    """Make the prologue agree with the length again, so that the damage gets past it."""
    if len(message) >= PROLOGUE.size:
        size, count, payload = PROLOGUE.unpack_from(message)
        end = PROLOGUE.size + size
        if end > len(message) or (not payload and rng.random() < 0.5):
            size, payload = len(message) - PROLOGUE.size, 0
        elif payload:
            payload = max(len(message) - (end + -end % 64), 0)
        PROLOGUE.pack_into(message, 0, size, count, payload)


def test_damaged_messages_are_values_or_refused_and_nothing_else():
    rng = random.Random("messages")
    valid = corpus(rng)
    codes: set[str] = set()
    accepted = 0
    tracemalloc.start()
    try:
        for _ in range(cases(4_000)):
            message = mutate(rng, rng.choice(valid), rng.choice(valid))
            if rng.random() < 0.7:
                settle(rng, message)
            kept = bytes(message)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            found: Any = None
            try:
                found = decode(message, SMALL)
            except ProtocolError as error:
                codes.add(error.code)
            except LimitError as error:
                assert "Limits." in str(error)
            else:
                accepted += 1
            peak = tracemalloc.get_traced_memory()[1] - before
            encoded = sum(item.array.nbytes for item in tensors_in(found) if item.encoding is not Encoding.PLAIN)
            assert peak <= 2 * (len(message) + encoded) + 64_000
            if not encoded and found is not None:
                assert joined(found, SMALL) == kept  # nothing that was accepted means anything else than what its bytes say
    finally:
        tracemalloc.stop()
    assert accepted > 200 and len(codes) > 15, (accepted, codes)


def tensors_in(value: Any) -> list[WireTensor]:
    if isinstance(value, WireTensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [item for inner in value for item in tensors_in(inner)]
    return []


def test_random_bytes_behind_a_right_prologue():
    rng = random.Random("noise")
    for _ in range(cases(2_000)):
        tree = bytes(rng.choice((*range(14), rng.randrange(256), 0, 0, 0)) for _ in range(rng.randrange(1, 60)))
        try:
            decode(bytearray(build(tree, count=rng.choice((0, 0, 1)))), SMALL)
        except (ProtocolError, LimitError):
            pass
