"""Chunks: a state too large for one message, in parts that fit, and whole again.

Pure: `state_transfer` sends the chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from aiograd.distributed.messages.library import StateChunk
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ProtocolError
from aiograd.tensors.core import TensorCore, make

#: bytes allowed for the description of each value in a message: name, type, shape, alignment
EACH = 512


class Capacity(NamedTuple):
    """How much fits into a message; or how much something takes."""

    tensors: int
    #: bytes that are not elements of Tensors
    head: int
    #: bytes, elements included
    size: int

    @classmethod
    def of(cls, limits: Limits) -> Capacity:
        """Capacity for chunks in a message of a worker with these limits; a little is left for what else is in it."""
        return cls(limits.tensors, max(limits.head_bytes - 8 * EACH, 2 * EACH), max(limits.message_bytes - 8 * EACH, 4 * EACH))

    def plus(self, other: Capacity) -> Capacity:
        """Both together."""
        return Capacity(*(one + another for one, another in zip(self, other, strict=True)))

    def within(self, other: Capacity) -> Capacity:
        """The smaller of both capacities, field by field."""
        return Capacity(*map(min, self, other))

    def holds(self, other: Capacity) -> bool:
        """True if `other` fits into this capacity."""
        return all(limit >= taken for limit, taken in zip(self, other, strict=True))


def split(items: Iterable[tuple[Any, Any]], capacity: Capacity) -> Iterator[list[StateChunk]]:
    """Lists of chunks that fit into a message each, unless a single value that is no Tensor does not; at least one list, which may be empty.

    Args:
        items: names and values; the Tensors stay as they are meanwhile.
        capacity: of a message.
    """
    part: list[StateChunk] = []
    taken = nothing = Capacity(0, 0, 0)
    for name, value in items:
        for chunk in _chunks(name, value, capacity.size - EACH):
            more = measure(chunk.value)
            if part and not capacity.holds(taken.plus(more)):
                yield part
                part, taken = [], nothing
            part.append(chunk)
            taken = taken.plus(more)
    yield part


def _chunks(name: Any, value: Any, most: int) -> Iterator[StateChunk]:
    if not isinstance(value, TensorCore) or _bytes(value) <= most or not isinstance(value._data, np.ndarray):
        yield StateChunk(name, None, value)
        return
    flat = value._data.reshape(-1)
    step = max(1, most // flat.itemsize)
    for start in range(0, flat.size, step):
        yield StateChunk(name, tuple(value.shape), make(flat[start : start + step]))


def measure(value: Any) -> Capacity:
    """An upper bound on the capacity that a value takes in a message."""
    if isinstance(value, TensorCore):
        return Capacity(1, EACH, EACH + _bytes(value))
    capacity = Capacity(0, EACH, EACH)
    if isinstance(value, (str, bytes)):
        return capacity.plus(Capacity(0, 4 * len(value), 4 * len(value)))
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        capacity = capacity.plus(measure(each))
    return capacity


def _bytes(tensor: TensorCore) -> int:
    return int(tensor._data.size) * np.dtype(tensor.dtype).itemsize


def join(chunks: Iterable[StateChunk]) -> list[tuple[Any, Any]]:
    """Names and values again.

    Raises:
        ProtocolError: these are no chunks, or not all of them.
    """
    items: list[tuple[Any, Any]] = []
    elements: list[Any] = []
    whole: tuple[Any, Any, Any] | None = None
    missing = 0
    for chunk in chunks:
        name, shape, value = chunk.name, chunk.shape, chunk.value
        if shape is None:
            if missing:
                raise _nonsense()
            items.append((name, value))
            continue
        if not isinstance(value, TensorCore):
            raise _nonsense()
        if not missing:
            whole, missing = (name, shape, value.dtype), math.prod(shape)
        missing -= int(value._data.size)
        if missing < 0 or (name, shape, value.dtype) != whole or value._data.ndim != 1 or not value._data.size:
            raise _nonsense()
        elements.append(value._data)
        if not missing:
            items.append((name, make(np.concatenate(elements).reshape(shape))))
            elements = []
    if missing:
        raise _nonsense()
    return items


def flatten(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """The values inside of the dicts, one by one, as an optimizer keeps one for each parameter: ``((name, key), value)``; see `unflatten`."""
    for name, values in items:
        if isinstance(values, dict) and values:
            yield from (((name, key), value) for key, value in values.items())
        else:
            yield (name,), values


def unflatten(items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The items that `flatten` took apart.

    Raises:
        ProtocolError: it did not.
    """
    gathered: dict[Any, Any] = {}
    for path, value in items:
        if path.__class__ is not tuple or not 1 <= len(path) <= 2 or any(part.__class__ not in (int, str) for part in path):
            raise _nonsense()
        if len(path) == 1:
            gathered[path[0]] = value
        elif gathered.setdefault(path[0], {}).__class__ is dict:
            gathered[path[0]][path[1]] = value
    return list(gathered.items())


def _nonsense() -> ProtocolError:
    return ProtocolError("a malformed state: its chunks do not fit together", code="chunks")
