"""PayloadForm: the pseudo-gradients of a round as bytes, and the mean that every member computes of them. Pure.

Note [The same mean everywhere]
    The mean of a parameter is the sum of rows times value, in float64 and in the order of the contributors, divided by the sum of the rows, and
    rounded once to the dtype of the parameter. Members compute it of the payloads as they came, or get the mean itself where that takes fewer bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.coordination.buckets import ParameterSpec
from aiograd.errors import ArgumentError, ProtocolError
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore, make


class PayloadForm:
    """The form of the payloads of one model.

    Args:
        specs: of the parameters that are trained, by path.
    """

    def __init__(self, specs: Mapping[str, ParameterSpec]) -> None:
        self._paths = list(specs)
        self._specs = list(specs.values())
        self._sizes = [int(np.prod(spec.shape, dtype=np.int64)) for spec in self._specs]
        #: of a payload
        self.size = sum(size * spec.dtype.itemsize for size, spec in zip(self._sizes, self._specs, strict=True))

    def pack(self, values: Sequence[Array]) -> Array:
        """Values by parameter as bytes.

        Raises:
            ArgumentError: a value is not finite.
        """
        for path, value in zip(self._paths, values, strict=True):
            if not np.isfinite(value).all():
                index = np.argwhere(~np.isfinite(value))[0].tolist()
                raise ArgumentError(f"the pseudo-gradient of {path} is {value[tuple(index)]} at {index}; expected finite values")
        return np.concatenate([np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values])

    def unpack(self, payload: Any) -> list[Array]:
        """The values of a payload by parameter.

        Raises:
            ProtocolError: it is no payload of this model.
        """
        data = payload._data if isinstance(payload, TensorCore) else None
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (self.size,):
            shown = f"a {data.dtype} array of shape {list(data.shape)}" if isinstance(data, np.ndarray) else f"a {type(payload).__name__}"
            raise ProtocolError(f"the payload of a round is {shown}; expected {self.size} bytes", code="local-steps")
        found: list[Array] = []
        begin = 0
        for spec, size in zip(self._specs, self._sizes, strict=True):
            found.append(np.frombuffer(data, spec.dtype, size, begin).reshape(spec.shape))
            begin += size * spec.dtype.itemsize
        return found

    def mean(self, payloads: Sequence[Any], rows: Sequence[int]) -> list[Array]:
        """The mean by parameter; see Note [The same mean everywhere]."""
        total: list[Any] = [None] * len(self._specs)
        for payload, count in zip(payloads, rows, strict=True):
            for index, value in enumerate(self.unpack(payload)):
                term = value.astype(np.float64) * count
                total[index] = term if total[index] is None else total[index] + term
        return [(each / sum(rows)).astype(spec.dtype) for each, spec in zip(total, self._specs, strict=True)]

    def shortest(self, payloads: Sequence[Any], means: Sequence[Array]) -> tuple[list[Any], bool]:
        """The shortest values of which a member computes these means, and whether they are the means."""
        if sum(each._data.nbytes for each in payloads) <= self.size:
            return list(payloads), False
        return [make(self.pack(means))], True

    def means(self, payloads: Sequence[Any], rows: Sequence[int], *, is_mean: bool) -> list[Array]:
        """The means of an answer.

        Raises:
            ProtocolError: it makes no sense.
        """
        if not rows or len(payloads) != (1 if is_mean else len(rows)):
            raise ProtocolError(f"the answer of a round has {len(payloads)} payloads of {len(rows)} contributors", code="local-steps")
        return self.unpack(payloads[0]) if is_mean else self.mean(payloads, rows)
