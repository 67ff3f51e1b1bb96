"""TopK and Blockwise: arrays of gradients as payloads of a fraction of their size, with the rest kept for later. Pure.

Note [Error feedback]
    The values that a payload leaves out are not lost: `encode` returns them, and they are added to the next values. So the sum of all decoded
    payloads and the last residual is the sum of all values, up to rounding.

Note [Hostile payloads]
    The length of a payload follows from the compressor and the number of values, so decoding allocates nothing on the word of a peer. Positions are
    increasing and within their block, codes and exponents in their range, or decoding raises `ProtocolError`. Everything else decodes to finite
    values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, ProtocolError
from aiograd.kernels import compression as records_of
from aiograd.kernels.arrays import flat
from aiograd.running.types import Array

#: bounds of the number of values in a block
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 65_536
#: the largest exponent of a block's power of two
_LARGEST_EXPONENT = {np.dtype(np.float32): 117, np.dtype(np.float64): 1013}


class _Section(NamedTuple):
    """Blocks of one length: their values and records, and the number of the first."""

    values: slice
    records: slice
    length: int
    first: int


class Compressor(ABC):
    """Turns arrays into payloads and back. `TopK` and `Blockwise` are the kinds.

    ::

        payload, residual = compressor.encode(gradient, residual)   # on each worker, with the residual of the call before
        gradient = compressor.decode(payload, gradient.size, gradient.dtype).reshape(gradient.shape)

    A decoded value is an integer of at most 12 bits times the power of two of its block, so weighted sums of few payloads are exact in float64. The
    bytes are the same with every kernel set and on every machine.

    >>> compressor = dist.Blockwise(8)
    >>> gradient = np.array([0.5, -2.0, 1.0], np.float32)
    >>> payload, residual = compressor.encode(gradient)
    >>> compressor.decode(payload, gradient.size) + residual == gradient
    array([ True,  True,  True])
    """

    __slots__ = ()

    bits: int
    block: int
    decay: float

    @abstractmethod
    def _record_bytes(self, length: int) -> int:
        """Bytes of the record of a block."""

    @abstractmethod
    def _pack(self, values: Array, residual: Array | None, rest: Array, records: Array) -> bool:
        """Write `rest` and `records` of blocks of one length; False if a sum is not finite."""

    @abstractmethod
    def _unpack(self, records: Array, out: Array, first: int) -> Array:
        """Write the values of blocks of one length to `out`, which is zero; returns exponents."""

    def packed_size(self, size: int) -> int:
        """Bytes of the payload of an array.

        Args:
            size: number of values.

        Returns:
            The number of bytes.

        Raises:
            ArgumentError: `size` is no number of values.

        >>> dist.TopK(1 / 64, bits=2).packed_size(4096), dist.Blockwise(8).packed_size(4096)
        (85, 4099)
        """
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise ArgumentError(f"{self}: size={size!r}; expected a number of values, a whole number from 0")
        full, rest = divmod(int(size), self.block)
        return full * self._record_bytes(self.block) + (self._record_bytes(rest) if rest else 0)

    def encode(self, values: Array, residual: Array | None = None) -> tuple[bytes, Array]:
        """Compress ``values + decay * residual``; neither is written to.

        Args:
            values: of any shape, float32 or float64.
            residual: the second result of the call before, of the same shape and dtype; None: zeros.

        Returns:
            The payload, of `packed_size` bytes, and the new residual: the sum minus the decoded values, to the bit, in the shape and dtype of
            `values`.

        Raises:
            ArgumentError: a value or sum that is not finite, or a residual of another shape. ArgumentTypeError: no array, or of another dtype.

        >>> compressor = dist.TopK(1 / 2, block=64)
        >>> payload, residual = compressor.encode(np.array([8.0, -0.25, 0.5, -8.0]))
        >>> compressor.decode(payload, 4), residual
        (array([ 8.,  0.,  0., -8.], dtype=float32), array([ 0.  , -0.25,  0.5 ,  0.  ]))
        """
        self._check_array("values", values)
        if residual is not None:
            self._check_array("residual", residual)
            if residual.shape != values.shape or residual.dtype != values.dtype:
                raise ArgumentError(
                    f"{self}.encode: residual is {residual.dtype}{list(residual.shape)} and values {values.dtype}{list(values.shape)}; expected the "
                    f"residual that encoding an array of this shape and dtype returned"
                )
        given, before = flat(values), None if residual is None else flat(residual)
        rest, buffer = np.empty_like(given), BytesIO()  # its bytes become the payload without a copy
        if given.size:
            buffer.seek(self.packed_size(given.size) - 1)
            buffer.write(b"\0")
        if not self._write(np.frombuffer(buffer.getbuffer(), np.uint8), given, before, rest):
            raise self._not_finite(values, residual)
        return buffer.getvalue(), rest.reshape(values.shape)

    def _write(self, payload: Array, values: Array, residual: Array | None, rest: Array) -> bool:
        for section in self._sections(values.size):
            shape = (-1, section.length)
            old = None if residual is None else residual[section.values].reshape(shape)
            records = payload[section.records].reshape(-1, self._record_bytes(section.length))
            if not self._pack(values[section.values].reshape(shape), old, rest[section.values].reshape(shape), records):
                return False
        return True

    def decode(self, payload: Any, size: int, dtype: Any = np.float32) -> Array:
        """The values that a payload stands for.

        Args:
            payload: bytes, or a uint8 array, from anywhere.
            size: number of values.
            dtype: float32 or float64. float32 rounds values below its range to zero.

        Returns:
            An array of one axis.

        Raises:
            ProtocolError: `payload` is no encoding of `size` values, or exceeds the range of `dtype`. ArgumentError: no such size or
                dtype. ArgumentTypeError: `payload` is no bytes.

        >>> compressor = dist.Blockwise(8)
        >>> compressor.decode(compressor.encode(np.array([127.0, -3.0]))[0], 2)
        array([127.,  -3.], dtype=float32)
        """
        try:
            wanted = np.dtype(dtype)
        except TypeError:
            raise ArgumentError(f"{self}.decode: dtype is {dtype!r}; expected float32 or float64") from None
        if wanted not in _LARGEST_EXPONENT:
            raise ArgumentError(f"{self}.decode: dtype is {wanted}; expected float32 or float64")
        found = self._bytes_of(payload, size)
        values = np.zeros(size, wanted)
        for section in self._sections(size):
            records = found[section.records].reshape(-1, self._record_bytes(section.length))
            exponents = self._unpack(records, values[section.values].reshape(-1, section.length), section.first)
            self._check_exponents(exponents, wanted, section.first)
        return values

    def add_decoded(self, payload: Any, total: Array, weight: float = 1.0) -> None:
        """Add ``weight * decode(payload, total.size)`` to an array, without rounding the product to less than float64.

        Args:
            payload: as `decode` takes it.
            total: float64 of one axis, C-contiguous; unchanged where an error is raised.
            weight: a factor; the sum is exact for a whole number.

        Raises:
            ProtocolError: as from `decode`.

        >>> compressor, total = dist.Blockwise(8), np.zeros(2)
        >>> compressor.add_decoded(compressor.encode(np.array([127.0, -3.0]))[0], total, 2.0)
        >>> total
        array([254.,  -6.])
        """
        decoded = self.decode(payload, total.size, np.float64)
        if weight != 1:
            decoded *= weight
        total += decoded

    def _sections(self, size: int) -> Iterator[_Section]:
        full = size // self.block
        values, records = full * self.block, full * self._record_bytes(self.block)
        if full:
            yield _Section(slice(0, values), slice(0, records), self.block, 0)
        if size > values:
            yield _Section(slice(values, size), slice(records, None), size - values, full)

    def _check_array(self, name: str, array: Any) -> None:
        if not isinstance(array, np.ndarray):
            raise ArgumentTypeError(f"{self}.encode: {name} is a {type(array).__name__}; expected an array of float32 or float64")
        if array.dtype not in _LARGEST_EXPONENT:
            raise ArgumentTypeError(f"{self}.encode: {name} has the dtype {array.dtype}; expected float32 or float64")

    def _not_finite(self, values: Array, residual: Array | None) -> ArgumentError:
        what, array = "the value", values
        if np.isfinite(values).all() and residual is not None:
            what, array = "the residual", residual
            if np.isfinite(residual).all():
                with np.errstate(all="ignore"):
                    what, array = "the sum of value and residual", values + values.dtype.type(self.decay) * residual
        index = np.argwhere(~np.isfinite(array))[0].tolist()
        at = index[0] if len(index) == 1 else tuple(index)
        return ArgumentError(f"{self}.encode: {what} at index {at} is {array[tuple(index)]}; only finite values can be compressed")

    def _bytes_of(self, payload: Any, size: int) -> Array:
        expected = self.packed_size(size)
        try:
            found = np.frombuffer(payload, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise ArgumentTypeError(f"{self}.decode: payload is a {type(payload).__name__}; expected bytes: {error}") from error
        if found.size != expected:
            raise ProtocolError(f"{self}.decode: a payload of {found.size} bytes; {size} values take {expected} bytes")
        return found

    def _check_exponents(self, exponents: Array, dtype: np.dtype, first: int) -> None:
        largest = _LARGEST_EXPONENT[dtype]
        if exponents.max() > largest:
            index = int(np.argmax(exponents > largest))
            raise ProtocolError(f"{self}.decode: block {first + index} has the exponent {exponents[index]}; {dtype} takes exponents up to {largest}")

    def _malformed(self, block: int, what: str) -> ProtocolError:
        return ProtocolError(f"{self}.decode: block {block} of the payload is malformed: {what}")


def _check_block(name: str, block: Any) -> None:
    if isinstance(block, bool) or not isinstance(block, int) or not SMALLEST_BLOCK <= block <= LARGEST_BLOCK:
        raise ArgumentError(f"{name}: block={block!r}; expected a whole number of values from {SMALLEST_BLOCK} to {LARGEST_BLOCK}")


def _check_bits(name: str, bits: Any, allowed: tuple[int, ...]) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in allowed:
        raise ArgumentError(f"{name}: bits={bits!r}; expected one of {', '.join(map(str, allowed))}")


@dataclass(frozen=True, slots=True)
class TopK(Compressor):
    """Keeps the largest values of each block, with few bits for each of them and about 8 bits for its position.

    Ties are kept in the order of their indices. Kept values are rounded to ``2 ** (bits - 1)`` magnitudes between the smallest and the largest kept
    value of their block, with a sign.

    Args:
        fraction: of the values of a block that are kept, at least one of each block; at most 1.
        bits: of a kept value: 2, 4 or 8.
        block: values in a block, from 64 to 65,536; the last block of an array may be shorter.
        decay: factor of the residual when it is added to new values, from 0 to 1.

    Raises:
        ArgumentError: no such argument.

    >>> dist.TopK(1 / 16, bits=4) == dist.TopK(0.0625, 4)
    True
    """

    fraction: float = 1 / 64
    bits: int = 2
    block: int = field(default=4096, kw_only=True)
    decay: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in (("fraction", self.fraction), ("decay", self.decay)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 <= value <= 1:
                raise ArgumentError(f"TopK: {name}={value!r}; expected a number from 0 to 1")
        if not self.fraction:
            raise ArgumentError("TopK: fraction=0 keeps no values; expected a number above 0")
        _check_bits("TopK", self.bits, (2, 4, 8))
        _check_block("TopK", self.block)

    def _layout(self, length: int) -> records_of.LargestLayout:
        return records_of.LargestLayout(length, max(1, round(self.fraction * length)), self.bits)

    def _record_bytes(self, length: int) -> int:
        return self._layout(length).nbytes

    def _pack(self, values: Array, residual: Array | None, rest: Array, records: Array) -> bool:
        return records_of.pack_largest(values, residual, self.decay, rest, records, self._layout(values.shape[1]))

    def _unpack(self, records: Array, out: Array, first: int) -> Array:
        exponents, malformed = records_of.unpack_largest(records, out, self._layout(out.shape[1]))
        if malformed is not None:
            raise self._malformed(first + malformed, "its positions do not increase within the block")
        return exponents


@dataclass(frozen=True, slots=True)
class Blockwise(Compressor):
    """Keeps all values, as integers of few bits with one scale for each block.

    Args:
        bits: of a value: 8 or 4.
        block: values in a block, from 64 to 65,536; the last block of an array may be shorter.

    Raises:
        ArgumentError: no such argument.

    >>> dist.Blockwise(4).packed_size(1_000_000)
    500735
    """

    bits: int = 8
    block: int = field(default=4096, kw_only=True)

    @property
    def decay(self) -> float:  # type: ignore[override]
        """Factor of the residual when it is added to new values: one."""
        return 1.0

    def __post_init__(self) -> None:
        _check_bits("Blockwise", self.bits, (8, 4))
        _check_block("Blockwise", self.block)

    def _record_bytes(self, length: int) -> int:
        return records_of.block_bytes(length, self.bits)

    def _pack(self, values: Array, residual: Array | None, rest: Array, records: Array) -> bool:
        return records_of.pack_blocks(values, residual, rest, records, self.bits)

    def _unpack(self, records: Array, out: Array, first: int) -> Array:
        exponents, malformed, too_large = records_of.unpack_blocks(records, out, self.bits)
        for block, what in ((malformed, "the code 0 stands for no value"), (too_large, "its factor has too many bits")):
            if block is not None:
                raise self._malformed(first + block, what)
        return exponents
