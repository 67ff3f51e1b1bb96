"""Values to bytes and back: what crosses between workers is a closed set of types, never code.

Note [A message]
    ::

        bytes of the head u32 | number of tensors u32 | bytes of the payload u64
        head: the tree of values, then one descriptor per tensor     (Note [The tree] in `values`, and `tensors_table`)
        zeros up to a multiple of 64, where there is a payload
        payload: the data of the tensors

    Little-endian throughout; content with a meaning that the bytes alone do not give is refused. A message that breaks the format raises
    `ProtocolError`, whose `code` names the check; one that is well-formed, but larger than this worker takes, raises `LimitError`, which
    names the limit. The codes, in the order of the checks:

    ============= =================================================================================
    prologue      fewer bytes than the prologue has
    length        more or fewer bytes than the prologue says
    count         a container of more values than there are bytes
    tag           a value of no known kind
    truncated     the head ends within a value or a descriptor
    text          a str that is not UTF-8
    key           a key that is no str
    duplicate_key a key twice in one dict
    tensor_number a repeated tensor that has not occurred before
    tensor_count  more or fewer tensors in the tree than the prologue says
    dtype         a dtype code that is not in the table
    tensor_flags  a reserved flag of a tensor is set
    dimension     a dimension above 2**31 - 1, or more than 64 of them
    encoding      no such encoding, or not for this dtype
    tensor_size   dtype, shape and encoding take another number of bytes than the descriptor says
    alignment     data at no multiple of 64
    offset        data elsewhere than right behind the data before
    head_end      bytes in the head after the last descriptor
    payload       bytes after the data of the last tensor, or data beyond the end
    padding       padding that is not zero
    scale         a scale of BLOCK8 that is negative or not finite
    bool          a bool that is neither 0 nor 1
    ============= =================================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.tensor_table import TensorTable, WireTensor, broken, read_arrays, read_descriptors
from aiograd.distributed.rpc.transport import Buffer
from aiograd.distributed.rpc.values import TreeReader, TreeWriter, WireReference
from aiograd.errors import LimitError

__all__ = ["NOTHING", "Encoding", "WireReference", "WireTensor", "decode", "encode", "message_size"]

#: bytes of the head, number of tensors, bytes of the payload
PROLOGUE: Final = struct.Struct("<IIQ")

_EMPTY: Final = bytes(PROLOGUE.size)
_ZEROS: Final = bytes(64)
_pack_prologue = PROLOGUE.pack_into
_unpack_prologue = PROLOGUE.unpack_from


def encode(value: object, limits: Limits) -> list[Buffer]:
    """Write a value as a message.

    Args:
        value: None, bool, int of 64 bits, float, complex, str, bytes, list, tuple, dict with str keys, `WireTensor`, `WireReference`, in
            each other up to `limits.depth` levels. Exactly these types: their subclasses may mean something that would be lost.
        limits: the limits of a message; it must fit the receiver's, too.

    Returns:
        Buffers that are the message when put behind each other. The data of large contiguous arrays is not copied: such an array must stay
        as it is until the message has been delivered.

    Raises:
        ArgumentTypeError: a type or dtype that no message takes. ArgumentError: an int beyond 64 bits, or text that is not Unicode.
        LimitError: more than the limits allow. The texts name the place, such as ``argument [1]['x']``.
    """
    head = bytearray(_EMPTY)
    table = TensorTable(limits)
    TreeWriter(limits, head, table).write(value)
    if table.descriptors:
        head += table.descriptors
    size = len(head) - PROLOGUE.size
    if size > limits.head_bytes:
        raise LimitError(
            f"encode: all but the data of the tensors takes {size} bytes, above Limits.head_bytes={limits.head_bytes}; "
            "send long text and bytes as a tensor of uint8"
        )
    _pack_prologue(head, 0, size, len(table.pieces), table.payload)
    whole = _start_of_payload(size, table.payload) + table.payload
    if whole > limits.message_bytes:
        raise LimitError(
            f"encode: the message takes {whole} bytes, above Limits.message_bytes={limits.message_bytes}; send it in parts, or raise the "
            "limit on both workers"
        )
    return table.lay_out(head)


def decode(message: Buffer, limits: Limits) -> Any:
    """Read what `encode` wrote.

    Args:
        message: the whole message. The caller gives it away: the arrays of the value are views into it. (Where it is read-only, they
            are copies.)
        limits: the limits of messages that this worker accepts.

    Returns:
        The value; its arrays are writable and share no memory with each other.

    Raises:
        ProtocolError: bytes that make no sense, see Note [A message]. LimitError: more than the limits allow.
    """
    view = memoryview(message)
    length = len(view)
    if length > limits.message_bytes:
        raise LimitError(f"read a message: it has {length} bytes, above Limits.message_bytes={limits.message_bytes}")
    if length < PROLOGUE.size:
        raise broken("prologue", f"it has {length} bytes, fewer than the {PROLOGUE.size} of its prologue")
    size, count, payload = _unpack_prologue(view)
    if size > limits.head_bytes:
        raise LimitError(f"read a message: all but the data of its tensors takes {size} bytes, above Limits.head_bytes={limits.head_bytes}")
    if count > limits.tensors:
        raise LimitError(f"read a message: it has {count} tensors, above Limits.tensors={limits.tensors}")
    start = _start_of_payload(size, payload)
    if start + payload != length:
        raise broken("length", f"it has {length} bytes, but says {start + payload}")
    end = PROLOGUE.size + size
    head = bytes(view[PROLOGUE.size : end])
    reader = TreeReader(limits, head, count)
    value = reader.read()
    if count or payload or reader.position != size:
        plans = read_descriptors(head, reader.position, reader.tensors, payload, limits)
        if view[end:start] != _ZEROS[: start - end]:
            raise broken("padding", "there is data between its head and its tensors")
        read_arrays(view, start, reader.tensors, plans)
    return value


def message_size(buffers: Sequence[Buffer]) -> int:
    """Bytes of a message that is in several buffers."""
    return sum(map(len, buffers))


def _start_of_payload(head: int, payload: int) -> int:
    end = PROLOGUE.size + head
    return end + (-end & 63) if payload else end


#: the message None
NOTHING: Final[Sequence[Buffer]] = (bytes(encode(None, Limits())[0]),)
