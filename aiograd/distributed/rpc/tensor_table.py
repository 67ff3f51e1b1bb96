"""The tensors of a message: their descriptors, and their data laid out behind them.

A descriptor says the dtype (a code in a closed table, never text for numpy to interpret), the encoding, whether a gradient is wanted, the
shape, and where the data is. Data starts at multiples of 64 bytes, in the order of the descriptors, without gaps other than zeros up to
the next multiple, and ends where the message ends; so no two tensors share bytes and no byte of a message is without meaning.

Note [Claims take no memory]
    All descriptors are checked against each other, the limits and the length of the message before the first array exists. Arrays of
    PLAIN tensors are views into the message; arrays of reduced-precision encodings are new, and the bytes of all of them together, counted
    as decoded, are held to `Limits.message_bytes`. A shape such as (2**31 - 1, 2**31 - 1, 0) has no bytes, but reductions over it would
    have many, so zeros count as ones when a shape is held to that limit.
"""

from __future__ import annotations

import struct
from typing import Any, Final, TypeAlias

import numpy as np

from aiograd.distributed.rpc.encodings import Encoding, can_encode, pack, packed_size, unpack
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import ArgumentTypeError, LimitError, ProtocolError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

ALIGNMENT: Final = 64
#: data up to this size is copied next to the head: cheaper than to send it as a piece of its own
INLINE: Final = 16384

#: the closed table of dtypes; positions are codes on the wire and never change. 0 is no dtype, 1 is kept for bfloat16
_NAMES: Final = (None, None, "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1", "c8", "c16")
_DTYPES: Final = tuple(None if name is None else np.dtype("<" + name) for name in _NAMES)
_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
_BOOL: Final = _NAMES.index("b1")
_RESERVED_BFLOAT16: Final = 1
_ENCODINGS: Final = tuple(Encoding)

#: dtype, encoding, flags, dimensions, offset in the payload, bytes; then one u32 per dimension
_FIXED: Final = struct.Struct("<BBBBQQ")
_MOST_DIMENSIONS: Final = 64  # of any numpy array
_DESCRIPTORS: Final = tuple(struct.Struct(f"<BBBBQQ{count}I").pack for count in range(_MOST_DIMENSIONS + 1))
_SHAPES: Final = tuple(struct.Struct(f"<{count}I") for count in range(_MOST_DIMENSIONS + 1))
_LARGEST_DIMENSION: Final = 2**31 - 1
_REQUIRES_GRAD: Final = 1
_ZEROS: Final = bytes(ALIGNMENT)
_BOOLEANS: Final = b"\x00\x01"
_PLAIN: Final = Encoding.PLAIN
_unpack_fixed = _FIXED.unpack_from


class WireTensor:
    """A tensor in a message.

    Sent once however often the same object occurs in a value; it decodes to one object that occurs as often.

    Attributes:
        array: its values on the host; encoding takes any strides and keeps no copy of large ones, so they must not change until the
            message has been delivered. Decoding gives C-contiguous, writable arrays that share no memory with each other.
        requires_grad: True if a gradient is to flow back to it.
        encoding: how its values travel.
    """

    __slots__ = ("array", "encoding", "requires_grad")

    def __init__(self, array: Array, requires_grad: bool = False, encoding: Encoding = _PLAIN) -> None:
        self.array = array
        self.requires_grad = requires_grad
        self.encoding = encoding

    def __repr__(self) -> str:
        return f"WireTensor(shape={self.array.shape}, dtype={self.array.dtype}, requires_grad={self.requires_grad}, encoding={self.encoding.name})"


class TensorTable:
    """The tensors of one message that is being written."""

    __slots__ = ("limits", "descriptors", "pieces", "payload", "indices")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.descriptors = bytearray()
        #: data of each tensor, without padding
        self.pieces: list[Buffer] = []
        #: bytes of data and padding so far
        self.payload = 0
        #: id of each tensor -> its number
        self.indices: dict[int, int] = {}

    def add(self, tensor: WireTensor) -> None:
        """Append a tensor that is not yet in the table.

        Raises:
            ArgumentTypeError: an array that no message takes. LimitError: it is too large, or one too many.
        """
        array = tensor.array
        if type(array) is not np.ndarray:
            raise ArgumentTypeError(f"holds a {name_of(type(array))}, expected a numpy.ndarray; make it one with numpy.asarray")
        dtype = array.dtype
        code = _CODES.get(dtype)
        if code is None:
            raise _no_such_dtype(dtype)
        shape, size = array.shape, array.nbytes
        number = len(self.pieces)
        if number >= self.limits.tensors:
            raise LimitError(f"is one tensor more than Limits.tensors={self.limits.tensors}; send fewer, or join them into larger ones")
        if not 0 < size <= _LARGEST_DIMENSION or len(shape) > 1:
            check_shape(shape, dtype.itemsize, self.limits)
        encoding = tensor.encoding
        data: Buffer
        if encoding is not _PLAIN:
            encoding = _known(encoding, dtype)
            data = pack(array, encoding) if encoding is not _PLAIN else _plain(array, code)
            size = len(data)
        elif size <= INLINE and code != _BOOL:
            data = array.tobytes()
        else:
            data = _plain(array, code)
        start = self.payload + (-self.payload & 63)
        self.descriptors += _DESCRIPTORS[len(shape)](code, encoding, 1 if tensor.requires_grad else 0, len(shape), start, size, *shape)
        self.payload = start + size
        self.pieces.append(data)
        self.indices[id(tensor)] = number

    def lay_out(self, head: bytearray) -> list[Buffer]:
        """The buffers of the message: `head`, then the data, padded so that all of it is aligned."""
        if not self.payload:
            return [head]
        buffers: list[Buffer] = []
        out = head
        padding = -len(head) & 63
        for piece in self.pieces:
            out += _ZEROS[:padding]
            size = len(piece)
            if size <= INLINE:
                out += piece
            else:
                if out:
                    buffers.append(out)
                    out = bytearray()
                buffers.append(piece)
            padding = -size & 63
        if out:
            buffers.append(out)
        return buffers


#: one checked descriptor: dtype, its code, encoding, shape, and from where to where in the payload its data is; plain, since it is made
#: for each tensor of each call
_Plan: TypeAlias = "tuple[np.dtype[Any], int, Encoding, tuple[int, ...], int, int]"


def read_descriptors(head: bytes, position: int, tensors: list[WireTensor], payload: int, limits: Limits) -> list[_Plan]:
    """Check all descriptors of a message and fill in `tensors`.

    Args:
        head: of the message; it must end with the last descriptor.
        position: of the first descriptor in it.
        tensors: as many as the message has, their arrays still missing.
        payload: bytes of data the message has.
        limits: see Note [Claims take no memory].

    Raises:
        ProtocolError, LimitError: a check has failed.
    """
    plans: list[_Plan] = []
    last = decoded = 0
    for tensor in tensors:
        try:
            code, encoding_code, flags, dimensions, start, size = _unpack_fixed(head, position)
            if dimensions > limits.dimensions:
                raise LimitError(f"read a message: a tensor of {dimensions} dimensions, above Limits.dimensions={limits.dimensions}")
            reader = _SHAPES[dimensions]
            shape = reader.unpack_from(head, position + _FIXED.size)
        except struct.error:
            raise broken("truncated", "it ends within the descriptors of its tensors") from None
        position += _FIXED.size + reader.size
        dtype = _DTYPES[code] if code < len(_DTYPES) else None
        if dtype is None:
            advice = "; bfloat16 is not taken, send float32 with Encoding.BFLOAT16" if code == _RESERVED_BFLOAT16 else ""
            raise broken("dtype", f"a tensor has the dtype code {code}, which is none{advice}")
        if flags > _REQUIRES_GRAD:
            raise broken("tensor_flags", f"a tensor has flags {flags:#04x}, of which reserved ones are set")
        if shape and max(shape) > _LARGEST_DIMENSION:
            raise broken("dimension", f"a tensor has the shape {shape}, with a dimension above {_LARGEST_DIMENSION}")
        try:
            expected = check_shape(shape, dtype.itemsize, limits)
        except LimitError as error:
            raise LimitError(f"read a message: a tensor {error}") from None
        if encoding_code:
            if encoding_code >= len(_ENCODINGS) or not can_encode(dtype):
                raise broken("encoding", f"a tensor of {dtype} has the encoding code {encoding_code}")
            decoded += expected
            if decoded > limits.message_bytes:
                raise LimitError(f"read a message: its tensors take more than Limits.message_bytes={limits.message_bytes} when decoded")
            expected = packed_size(_ENCODINGS[encoding_code], expected // dtype.itemsize)
        if size != expected:
            raise broken("tensor_size", f"a tensor of {dtype} and shape {shape} has {size} bytes, expected {expected}")
        if start & (ALIGNMENT - 1):
            raise broken("alignment", f"the data of a tensor starts at {start}, which is no multiple of {ALIGNMENT}")
        if start != last + (-last & 63):
            raise broken("offset", f"the data of a tensor starts at {start}, expected right after the one before, at {last + (-last & 63)}")
        last = start + size
        tensor.requires_grad = flags == _REQUIRES_GRAD
        tensor.encoding = encoding = _ENCODINGS[encoding_code]
        plans.append((dtype, code, encoding, shape, start, last))
    if position != len(head):
        raise broken("head_end", f"its head has {len(head)} bytes, its values and descriptors take {position}")
    if last != payload:
        raise broken("payload", f"it has {payload} bytes of data, its tensors take {last}")
    return plans


def read_arrays(message: memoryview, first: int, tensors: list[WireTensor], plans: list[_Plan]) -> None:
    """Give each tensor its array: a view into the message, or a copy where the message is read-only or its data is not aligned.

    Args:
        message: the whole message.
        first: where its payload starts.
        tensors: those to fill.
        plans: their checked descriptors.

    Raises:
        ProtocolError: a byte of a bool that is neither 0 nor 1, padding that is not zero, or a bad scale.
    """
    last = first
    for tensor, (dtype, code, encoding, shape, start, end) in zip(tensors, plans, strict=True):
        start += first
        end += first
        if start != last and message[last:start] != _ZEROS[: start - last]:
            raise broken("padding", "there is data between its tensors")
        last = end
        if start == end:
            tensor.array = np.empty(shape, dtype)
            continue
        if encoding is not _PLAIN:
            tensor.array = unpack(message[start:end], encoding, shape, dtype)
            continue
        if code == _BOOL and not _is_boolean(message[start:end]):
            raise broken("bool", "a tensor of bool has a byte that is neither 0 nor 1")
        array: Array = np.ndarray(shape, dtype, message, start)
        tensor.array = array if array.flags.carray else array.copy()


def check_shape(shape: tuple[int, ...], itemsize: int, limits: Limits) -> int:
    """Hold a shape to the limits; returns its bytes.

    Raises:
        LimitError: too many dimensions, or one too long, or too many bytes where zeros count as ones.
    """
    if len(shape) > limits.dimensions:
        raise LimitError(f"has {len(shape)} dimensions, above Limits.dimensions={limits.dimensions}; reshape it")
    bound = exact = itemsize
    for length in shape:
        if length > _LARGEST_DIMENSION:
            raise LimitError(f"has a dimension of {length}, above {_LARGEST_DIMENSION}; reshape it")
        exact *= length
        bound *= length or 1
    if bound > limits.message_bytes:
        raise LimitError(f"has the shape {shape} and {bound} bytes, zeros counted as ones, above Limits.message_bytes={limits.message_bytes}")
    return exact


def broken(code: str, found: str) -> ProtocolError:
    """The error for a message that makes no sense."""
    return ProtocolError(f"read a message: {found}", code=code)


def _plain(array: Array, code: int) -> Buffer:
    """The bytes of an array in C order; a view of it where that saves copying much."""
    if code == _BOOL and array.size and not _is_boolean(memoryview(array.tobytes() if array.nbytes <= INLINE else _bytes_of(array))):
        array = array.view(np.uint8) != 0  # numpy keeps bytes such as 2, which no reader of a message takes
    return array.tobytes() if array.nbytes <= INLINE else _bytes_of(array)


def _bytes_of(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _is_boolean(data: memoryview) -> bool:
    if len(data) <= INLINE:
        return not bytes(data).strip(_BOOLEANS)
    return bool(np.frombuffer(data, np.uint8).max() <= 1)


def _known(encoding: Any, dtype: np.dtype[Any]) -> Encoding:
    if type(encoding) is not Encoding:
        raise ArgumentTypeError(f"has the encoding {encoding!r}, expected one of {', '.join(f'Encoding.{item.name}' for item in Encoding)}")
    if encoding is not _PLAIN and not can_encode(dtype):
        raise ArgumentTypeError(f"has dtype {dtype}, but Encoding.{encoding.name} takes float32 and float64; send it with Encoding.PLAIN")
    return encoding


def _no_such_dtype(dtype: np.dtype[Any]) -> ArgumentTypeError:
    advice = "convert it with .astype"
    if not dtype.isnative:
        advice = "convert it to this machine's byte order with .astype(dtype.newbyteorder('='))"
    elif dtype.name == "bfloat16":
        advice = "convert it to float32 and send that with Encoding.BFLOAT16, which loses nothing"
    names = ", ".join(item.name for item in _DTYPES if item is not None)
    return ArgumentTypeError(f"has dtype {dtype!s:.80}; a message takes {names}; {advice}")


def name_of(kind: type) -> str:
    """A type's name as users write it."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
