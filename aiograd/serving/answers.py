"""Requests and answers of a server: the rows of a request, checked, and the answer that names its version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.array_functions import public as af
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.tensors.core import TensorCore, host_array, make
from aiograd.tensors.plain import plain_array


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.

    Attributes:
        value: the model's outputs for the rows of the request, a Tensor or a tuple of Tensors; they share no memory with anything else.
        version: number of the version that computed it.
        digest: SHA-256 of that version's state, as hexadecimal text.
        batch: the number of rows in the batch that the request was part of; of a request that ran as several, of its first.
        waited: seconds between the request and the start of its batch.

    >>> async with ag.serving.Server(ag.nn.Linear(2, 1)) as server:
    ...     answer = await server.predict(np.ones((3, 2), np.float32))
    >>> answer.version, answer.batch, answer.headers["X-Model-Version"]
    (1, 3, '1')
    """

    value: Any
    version: int
    digest: str
    batch: int
    waited: float

    @property
    def headers(self) -> dict[str, str]:
        """Headers of an HTTP response that name the version."""
        return {"X-Model-Version": str(self.version), "X-Model-Digest": self.digest}


def rows_of(columns: Sequence[Any], what: str = "predict") -> tuple[Any, ...]:
    """The columns of a request, Tensors, arrays or lists, as Tensors outside of any graph; error messages name the call `what`."""
    tensors = tuple([_column(what, n, column) for n, column in enumerate(columns)])
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) != 1 or 0 in sizes:
        found = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "no columns"
        raise ArgumentError(f"{what}: expected columns with the same number of rows, at least one; found shapes {found}")
    return tensors


def _column(what: str, n: int, column: Any) -> Any:
    array = host_array(column) if isinstance(column, TensorCore) else plain_array(column)
    if not isinstance(array, np.ndarray):
        try:
            array = np.asarray(column)
        except ValueError as error:
            raise ArgumentError(f"{what}: column {n} has rows of different lengths, expected one shape for all ({error})") from None
        if array.dtype == np.float64:
            array = array.astype(np.float32)
    if array.dtype.kind not in "bifuc" and array.dtype.name != "bfloat16":
        raise ArgumentTypeError(f"{what}: column {n} is a {type(column).__name__} of dtype {array.dtype}; expected numbers")
    if not array.ndim:
        raise ArgumentError(f"{what}: column {n} is a single number; expected rows along the first dimension")
    return make(array)


def own(outputs: Any) -> Any:
    """Copies of the outputs of a forward, which may be views of its arguments, of weights, or of the outputs for other requests."""
    return tuple([own(output) for output in outputs]) if isinstance(outputs, tuple) else make(host_array(outputs).copy())


def joined(parts: Sequence[Any]) -> Any:
    """The outputs of parts as the outputs of the whole request: a Tensor or a tuple of Tensors, as each part is."""
    if isinstance(parts[0], tuple):
        return tuple([joined(outputs) for outputs in zip(*parts, strict=True)])
    return af.concat(parts, axis=0)
