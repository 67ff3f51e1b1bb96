"""PayloadForm: the pseudo-gradients of a round as bytes, and the mean that every member computes of them. Pure.

Note [The same mean everywhere]
    The mean of a parameter is the sum of rows times value, in float64 and in the order of the contributors, divided by the sum of the rows, and
    rounded once to the dtype of the parameter. Members compute it of the payloads as they came, or get the mean itself where that takes fewer bytes.
    With a compressor of answers they get the sum, compressed together with the residual of the sums before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.coordination.buckets import ParameterSpec
from aiograd.coordination.compression import Compressor
from aiograd.errors import ArgumentError, ProtocolError
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore, make

#: by parameter the values that were left out so far; empty: none were
Residuals = Sequence[Array | None]


class PayloadForm:
    """The form of the payloads of one model.

    Args:
        specs: of the parameters that are trained, by path.
        compress, answer: compressors of the pseudo-gradients of members, and of their sum; None: they are sent as they are.

    Raises:
        ArgumentError: a parameter has a dtype that cannot be compressed.
    """

    def __init__(self, specs: Mapping[str, ParameterSpec], compress: Compressor | None = None, answer: Compressor | None = None) -> None:
        self._specs = dict(specs)
        self._sizes = [int(np.prod(spec.shape, dtype=np.int64)) for spec in specs.values()]
        self.compress: Compressor | None = compress
        self.answer: Compressor | None = answer
        for path, spec in specs.items():
            if (compress or answer) and spec.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
                raise ArgumentError(f"LocalSteps(compress=...): the parameter {path} is {spec.dtype}; expected float32 or float64")

    @property
    def size(self) -> int:
        """Bytes of the values of all parameters."""
        return sum(size * spec.dtype.itemsize for size, spec in zip(self._sizes, self._specs.values(), strict=True))

    # ---------------------------------------------------------------- bytes

    def pack(self, values: Iterable[Array], residuals: Residuals = (), compress: Compressor | None = None) -> tuple[Array, list[Array | None]]:
        """Values by parameter as bytes.

        Args:
            values: arrays, of which one at a time is needed.
            residuals: of the call before.
            compress: of the values; None: they are sent as they are.

        Returns:
            The payload, and the new residuals.

        Raises:
            ArgumentError: a value is not finite.
        """
        found: Array = np.empty(self.size if compress is None else sum(map(compress.packed_size, self._sizes)), np.uint8)
        rests: list[Array | None] = []
        begin = 0
        for path, given, before in zip(self._specs, values, residuals or [None] * len(self._specs), strict=True):
            value = np.asarray(given)  # arithmetic on arrays without an axis gives scalars
            if not np.isfinite(value).all():
                index = np.argwhere(~np.isfinite(value))[0].tolist()
                raise ArgumentError(f"the pseudo-gradient of {path} is {value[tuple(index)]} at {index}; expected finite values")
            if compress is None:
                part = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            else:
                payload, rest = compress.encode(value, before)
                part = np.frombuffer(payload, np.uint8)
                rests.append(rest)
            found[begin : begin + part.size] = part
            begin += part.size
        return found, rests

    def unpack(self, payload: Any, compress: Compressor | None = None, dtype: Any = None) -> list[Array]:
        """The values of a payload by parameter.

        Args:
            payload: a Tensor of bytes.
            compress: as of `pack`.
            dtype: of the values; None: the dtype of each parameter.

        Returns:
            Arrays.

        Raises:
            ProtocolError: it is no payload of this model.
        """
        return list(self._unpacked(payload, compress, dtype))

    def _unpacked(self, payload: Any, compress: Compressor | None = None, dtype: Any = None) -> Iterator[Array]:
        data = payload._data if isinstance(payload, TensorCore) else None
        wanted = [spec.dtype if dtype is None else np.dtype(dtype) for spec in self._specs.values()]
        lengths = [
            size * each.itemsize if compress is None else compress.packed_size(size) for size, each in zip(self._sizes, wanted, strict=True)
        ]
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (sum(lengths),):
            shown = f"a {data.dtype} array of shape {list(data.shape)}" if isinstance(data, np.ndarray) else f"a {type(payload).__name__}"
            raise ProtocolError(f"the payload of a round is {shown}; expected {sum(lengths)} bytes", code="local-steps")
        begin = 0
        for spec, size, length, each in zip(self._specs.values(), self._sizes, lengths, wanted, strict=True):
            part, begin = data[begin : begin + length], begin + length
            values = np.frombuffer(part, each) if compress is None else compress.decode(part, size, each)
            yield values.reshape(spec.shape)

    # ---------------------------------------------------------------- means

    def sums(self, payloads: Sequence[Any], rows: Sequence[int]) -> Iterator[Array]:
        """The weighted sums in float64, one parameter after the other; see Note [The same mean everywhere]."""
        unpacked = [self._unpacked(payload, self.compress) for payload in payloads]
        for _ in self._specs:
            total: Any = None
            term: Any = None
            for values, count in zip(unpacked, rows, strict=True):  # one at a time
                term = np.asarray(np.multiply(next(values), np.float64(count), out=term, dtype=np.float64))
                total, term = (term, None) if total is None else (np.add(total, term, out=total), term)
            term = None
            yield total

    def _divided(self, sums: Iterable[Array], rows: Sequence[int]) -> Iterator[Array]:
        """The means of weighted sums."""
        return (np.asarray(each / sum(rows), spec.dtype) for each, spec in zip(sums, self._specs.values(), strict=True))

    def formed(self, payloads: Sequence[Any], rows: Sequence[int], residuals: Residuals) -> tuple[str, list[Any], list[Array | None]]:
        """The kind and the payloads of an answer, and the new residuals of the compressor of answers.

        Args:
            payloads, rows: of the contributors.
            residuals: of the answer before.
        """
        if self.answer is not None:
            payload, rest = self.pack(self.sums(payloads, rows), residuals, self.answer)
            return "sum", [make(payload)], rest
        if sum(each._data.nbytes for each in payloads) <= self.size:
            return "each", list(payloads), []
        return "mean", [make(self.pack(self._divided(self.sums(payloads, rows), rows))[0])], []

    def means(self, kind: str, payloads: Sequence[Any], rows: Sequence[int]) -> list[Array]:
        """The means of an answer.

        Raises:
            ProtocolError: it makes no sense.
        """
        if not rows or len(payloads) != (len(rows) if kind == "each" else 1) or (kind == "sum") != (self.answer is not None):
            raise ProtocolError(f"the answer of a round has {len(payloads)} payloads ({kind}) of {len(rows)} contributors", code="local-steps")
        if kind == "mean":
            return self.unpack(payloads[0])
        sums = self._unpacked(payloads[0], self.answer, np.float64) if kind == "sum" else self.sums(payloads, rows)
        return list(self._divided(sums, rows))
