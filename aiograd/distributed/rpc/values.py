"""The tree of values in a message: a closed set of types, written as tagged binary.

Note [The tree]
    Every value is a tag byte and what belongs to it, little-endian::

        0 None    1 False    2 True
        3 int     i64
        4 float   f64
        5 complex f64 f64
        6 str     u32 bytes, UTF-8
        7 bytes   u32 bytes
        8 list    u32 count, the values
        9 tuple   u32 count, the values
        10 dict   u32 count, then each key (a str) and its value
        11 tensor the next descriptor
        12 tensor u32 number of a descriptor before: the same tensor again
        13 reference  id 16 bytes, epoch 16 bytes, owner and type name as str

    A value has one form only: equal messages are equal bytes.

Note [Memory of read values]
    Small values take more memory as Python objects than as bytes; an empty dict 88 bytes for 5. So a message has at most one value per
    64 bytes of `Limits.head_bytes` (16,384 by default), which holds the objects to twice `head_bytes`; more numbers than that belong in a
    tensor. Counts are held to the bytes that are there before any container is made. Text takes what Python needs for it, at worst four
    bytes for each of its own, where one character in it is beyond 16 bits. Nothing of this applies to the data of tensors.

Note [No MessagePack]
    msgpack 1.2 and msgspec 0.22 read the same trees in C, with extension types for tuples, complex numbers, tensors and references. But they cannot
    bound the cost of a message before they decode it: neither takes a limit to the number of values or to their depth. 1 MiB of
    empty dicts becomes 72 MiB of objects (here a `LimitError` and nothing made), 500 nested lists are a value, of a key that
    occurs twice the last one counts, and a number has several forms. A walk afterwards finds most of this, when the memory is taken. Nor is
    there less to do when writing: that a tuple is none of the lists, and no subclass its base, takes a walk before msgspec, or msgpack's
    slow way.

    Against that, for a call with eight small arguments: read in 3.5 µs with msgspec and that walk, in 10.5 here; written in 5.5, and 7 here (18 with
    msgpack). That gain is not worth one more run-time dependency.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.tensor_table import TensorTable, WireTensor, broken, name_of
from aiograd.errors import ArgumentError, ArgumentTypeError, LimitError
from aiograd.running.devices import DeviceName
from aiograd.tensors.size import TensorSize

NONE: Final = 0
FALSE: Final = 1
TRUE: Final = 2
INTEGER: Final = 3
FLOAT: Final = 4
COMPLEX: Final = 5
TEXT: Final = 6
BYTES: Final = 7
LIST: Final = 8
TUPLE: Final = 9
DICT: Final = 10
TENSOR: Final = 11
AGAIN: Final = 12
REFERENCE: Final = 13

#: bytes of `Limits.head_bytes` for each value that a message may have
BYTES_PER_VALUE: Final = 64
#: more levels would come near the interpreter's recursion limit, for any limits
_DEEPEST: Final = 200
#: text from this size on is held to the limit at once, shorter one at the end
_LONG: Final = 4096

_ALLOWED: Final = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict with str keys, tensors and references, each of exactly that type; "
    "convert it first"
)
_NONE = bytes([NONE])
_FALSE = bytes([FALSE])
_TRUE = bytes([TRUE])
_NEW_TENSOR = bytes([TENSOR])
#: classes of plain values with more to them, which tensors return, and the class as which each is sent
SENT_AS: Mapping[type, Callable[[Any], Any]] = {TensorSize: int, DeviceName: str}

_pack_integer = struct.Struct("<Bq").pack
_pack_float = struct.Struct("<Bd").pack
_pack_complex = struct.Struct("<Bdd").pack
_pack_sized = struct.Struct("<BI").pack
_unpack_integer = struct.Struct("<q").unpack_from
_unpack_float = struct.Struct("<d").unpack_from
_unpack_complex = struct.Struct("<dd").unpack_from
_pack_length = struct.Struct("<I").pack
_unpack_length = struct.Struct("<I").unpack_from
_ID: Final = 16
#: bytes before the tree in the writer's buffer
_PROLOGUE: Final = 16


class WireReference(NamedTuple):
    """A reference to an object that another worker holds."""

    #: name of that worker
    owner: str
    #: of the object, 16 bytes
    id: bytes
    #: of that worker's process, 16 bytes: after a restart its old references are void
    epoch: bytes
    type_name: str


class _Refused(Exception):
    """A value that cannot be written; on its way out it collects where it is."""

    def __init__(self, error: type[ArgumentError] | type[LimitError], reason: str) -> None:
        super().__init__(reason)
        self.error = error
        self.reason = reason
        self.path: list[int | str] = []


class TreeWriter:
    """Writes one value after the bytes that are in `out`, and its tensors into `table`."""

    __slots__ = ("limits", "out", "table", "_room")

    def __init__(self, limits: Limits, out: bytearray, table: TensorTable) -> None:
        self.limits = limits
        self.out = out
        self.table = table
        self._room = limits.head_bytes // BYTES_PER_VALUE

    def write(self, value: object) -> None:
        """Write `value`.

        Raises:
            ArgumentTypeError, ArgumentError, LimitError: it cannot be written; the text names the place.
        """
        try:
            self._values((value,), min(self.limits.depth, _DEEPEST) + 1)
        except _Refused as refused:
            place = "".join(f"[{part!r:.60}]" for part in reversed(refused.path[:-1]))
            raise refused.error(f"encode: argument{' ' if place else ''}{place} {refused.reason}") from None

    def _values(self, values: tuple[Any, ...] | list[Any], depth: int) -> None:
        """Write values one after the other; `depth` is how many levels there may be, these included."""
        if not depth:
            raise _Refused(LimitError, f"is nested deeper than Limits.depth={self.limits.depth}")
        self._room -= len(values)
        if self._room < 0:
            raise _Refused(LimitError, f"{_too_many(self.limits)}; send many numbers as a tensor")
        out = self.out
        value = None
        try:
            for value in values:
                kind = type(value)
                if kind is str:
                    text = value.encode()
                    out += _pack_sized(TEXT, len(text))
                    out += text
                    if len(text) >= _LONG:
                        self._check_size()
                elif kind is int:
                    out += _pack_integer(INTEGER, value)
                elif value is None:
                    out += _NONE
                elif kind is WireTensor:
                    number = self.table.indices.get(id(value))
                    if number is None:
                        self.table.add(value)
                        out += _NEW_TENSOR
                    else:
                        out += _pack_sized(AGAIN, number)
                elif kind is tuple:
                    out += _pack_sized(TUPLE, len(value))
                    if value:
                        self._values(value, depth - 1)
                elif kind is list:
                    out += _pack_sized(LIST, len(value))
                    if value:
                        self._values(value, depth - 1)
                elif kind is dict:
                    out += _pack_sized(DICT, len(value))
                    if value:
                        self._entries(value, depth - 1)
                elif kind is bool:
                    out += _TRUE if value else _FALSE
                elif kind is bytes:
                    out += _pack_sized(BYTES, len(value))
                    out += value
                    if len(value) >= _LONG:
                        self._check_size()
                elif kind is float:
                    out += _pack_float(FLOAT, value)
                elif kind is WireReference:
                    self._reference(value)
                elif kind is complex:
                    out += _pack_complex(COMPLEX, value.real, value.imag)
                elif kind in SENT_AS:
                    self._values((SENT_AS[kind](value),), depth)
                else:
                    raise _Refused(ArgumentTypeError, f"is a {name_of(kind)}; a message takes {_ALLOWED}")
        except (_Refused, ArgumentError, LimitError, UnicodeEncodeError, struct.error) as error:
            refused = _refused(error, value)
            refused.path.append(next(index for index, item in enumerate(values) if item is value))
            raise refused from None

    def _entries(self, entries: dict[Any, Any], depth: int) -> None:
        flat: list[Any] = []
        for key, value in entries.items():
            if type(key) is not str:
                raise _Refused(ArgumentTypeError, f"has a key of type {name_of(type(key))}; keys are str")
            flat += (key, value)
        try:
            self._values(flat, depth)
        except _Refused as refused:
            if refused.path:
                refused.path[-1] = flat[int(refused.path[-1]) & ~1]
            raise

    def _reference(self, reference: WireReference) -> None:
        owner, identity, epoch, type_name = reference
        if not (type(owner) is type(type_name) is str and type(identity) is type(epoch) is bytes and len(identity) == len(epoch) == _ID):
            raise _Refused(ArgumentTypeError, f"is a reference; its owner and type name are str, its id and epoch {_ID} bytes each")
        self.out += bytes((REFERENCE,)) + identity + epoch
        for name in (owner, type_name):
            text = name.encode()
            self.out += _pack_length(len(text)) + text

    def _check_size(self) -> None:
        """Notice early that the same long text occurs very often."""
        if len(self.out) - _PROLOGUE > self.limits.head_bytes:
            raise _Refused(LimitError, f"brings what is not tensor data above Limits.head_bytes={self.limits.head_bytes}; send it as a tensor")


class TreeReader:
    """Reads one value from the head of a message."""

    __slots__ = ("limits", "head", "position", "tensors", "_declared", "_room")

    def __init__(self, limits: Limits, head: bytes, declared: int) -> None:
        self.limits = limits
        self.head = head
        #: offset of the first unread byte
        self.position = 0
        #: the tensors met so far, still without their arrays
        self.tensors: list[WireTensor] = []
        self._declared = declared
        self._room = limits.head_bytes // BYTES_PER_VALUE

    def read(self) -> Any:
        """Read the value at the start of the head.

        Raises:
            ProtocolError, LimitError: a check has failed.
        """
        try:
            value = self._values(1, min(self.limits.depth, _DEEPEST) + 1)[0]
        except (IndexError, struct.error):
            raise broken("truncated", "it ends within a value") from None
        except UnicodeDecodeError:
            raise broken("text", "a str is not UTF-8") from None
        if self.position > len(self.head):
            raise broken("truncated", "it ends within a str or bytes")
        if len(self.tensors) != self._declared:
            raise broken("tensor_count", f"it has {len(self.tensors)} tensors, but says {self._declared}")
        return value

    def _values(self, count: int, depth: int) -> list[Any]:
        """Read `count` values; `depth` is how many levels there may be, these included.

        A slice of too few bytes is noticed by the next reader, at the latest by `read`: no value is ever made of missing bytes.
        """
        if not depth:
            raise LimitError(f"read a message: a value is nested deeper than Limits.depth={self.limits.depth}")
        head, position = self.head, self.position
        if count > len(head) - position:
            raise broken("count", f"a container has {count} values in {len(head) - position} bytes")
        self._room -= count
        if self._room < 0:
            raise LimitError(f"read a message: it {_too_many(self.limits)}")
        values: list[Any] = []
        append = values.append
        for _ in range(count):
            tag = head[position]
            if tag == TEXT:
                start = position + 5
                position = start + _unpack_length(head, position + 1)[0]
                append(head[start:position].decode())
            elif tag == INTEGER:
                append(_unpack_integer(head, position + 1)[0])
                position += 9
            elif tag == NONE:
                append(None)
                position += 1
            elif tag == TENSOR:
                tensor = WireTensor.__new__(WireTensor)
                self.tensors.append(tensor)
                append(tensor)
                position += 1
            elif LIST <= tag <= DICT:
                size = _unpack_length(head, position + 1)[0]
                self.position = position + 5
                if tag == DICT:
                    append(self._entries(size, depth - 1))
                elif tag == TUPLE:
                    append(tuple(self._values(size, depth - 1)) if size else ())
                else:
                    append(self._values(size, depth - 1) if size else [])
                position = self.position
            elif tag == TRUE:
                append(True)
                position += 1
            elif tag == FALSE:
                append(False)
                position += 1
            elif tag == BYTES:
                start = position + 5
                position = start + _unpack_length(head, position + 1)[0]
                append(head[start:position])
            elif tag == FLOAT:
                append(_unpack_float(head, position + 1)[0])
                position += 9
            elif tag == REFERENCE:
                self.position = position + 1
                append(self._reference())
                position = self.position
            elif tag == AGAIN:
                number = _unpack_length(head, position + 1)[0]
                if number >= len(self.tensors):
                    raise broken("tensor_number", f"a value repeats tensor {number} after {len(self.tensors)} tensors")
                append(self.tensors[number])
                position += 5
            elif tag == COMPLEX:
                append(complex(*_unpack_complex(head, position + 1)))
                position += 17
            else:
                raise broken("tag", f"a value has the tag {tag}, which is none")
        self.position = position
        return values

    def _entries(self, count: int, depth: int) -> dict[str, Any]:
        if not count:
            return {}
        flat = self._values(2 * count, depth)
        keys = flat[::2]
        for key in keys:
            if type(key) is not str:
                raise broken("key", f"a dict has a key of type {type(key).__name__}, expected str")
        entries = dict(zip(keys, flat[1::2], strict=True))
        if len(entries) != count:
            raise broken("duplicate_key", "a dict has a key twice")
        return entries

    def _reference(self) -> WireReference:
        head, start = self.head, self.position
        identity, epoch = head[start : start + _ID], head[start + _ID : start + 2 * _ID]
        position = start + 2 * _ID
        names = []
        for _ in range(2):
            first = position + 4
            position = first + _unpack_length(head, position)[0]
            names.append(head[first:position].decode())
        self.position = position
        return WireReference(names[0], identity, epoch, names[1])


def _refused(error: Exception, value: object) -> _Refused:
    if isinstance(error, _Refused):
        return error
    if isinstance(error, UnicodeEncodeError):
        return _Refused(ArgumentError, "has half of a surrogate pair, which UTF-8 cannot express; send it as bytes")
    if isinstance(error, struct.error):
        return _Refused(ArgumentError, "is outside of the 64 bits of an int; send it as a str" if type(value) is int else "has 4 GiB or more")
    return _Refused(LimitError if isinstance(error, LimitError) else ArgumentTypeError, str(error))  # of a tensor


def _too_many(limits: Limits) -> str:
    most = limits.head_bytes // BYTES_PER_VALUE
    return f"has more than {most} values with all that is in it, one per {BYTES_PER_VALUE} bytes of Limits.head_bytes={limits.head_bytes}"
