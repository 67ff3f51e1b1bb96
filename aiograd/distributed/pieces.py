"""Pieces: a state too large for one message, in parts that fit, and together again.

Pure: what is cut here is sent by `aiograd.distributed.driver.transfers`. A piece is ``(name, shape, value)``: a value under its name, with shape
None; or, of a Tensor that is too large by itself, some of its elements in order, with the shape of the whole. Pieces of one Tensor follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from aiograd.distributed.limits import Limits
from aiograd.errors import ProtocolError
from aiograd.tensors.core import TensorCore, make

Piece: TypeAlias = tuple[Any, tuple[int, ...] | None, Any]
#: bytes allowed for what a message says of each value beside its elements: name, type, shape, alignment
EACH = 512


class Room(NamedTuple):
    """How much fits into a message; or how much something takes."""

    tensors: int
    #: bytes that are not elements of Tensors
    head: int
    #: bytes, elements included
    size: int

    @classmethod
    def of(cls, limits: Limits) -> Room:
        """Room for pieces in a message of a worker with these limits; a little is left for what else is in it."""
        return cls(limits.tensors, max(limits.head_bytes - 8 * EACH, 2 * EACH), max(limits.message_bytes - 8 * EACH, 4 * EACH))

    def plus(self, other: Room) -> Room:
        """Both together."""
        return Room(*(one + another for one, another in zip(self, other, strict=True)))

    def within(self, other: Room) -> Room:
        """What fits into both."""
        return Room(*map(min, self, other))

    def holds(self, other: Room) -> bool:
        """Whether that fits."""
        return all(limit >= taken for limit, taken in zip(self, other, strict=True))


def cut(items: Iterable[tuple[Any, Any]], room: Room) -> Iterator[list[Piece]]:
    """Lists of pieces that fit into a message each, unless a single value that is no Tensor does not; at least one list, which may be empty.

    Args:
        items: names and values; the Tensors stay as they are meanwhile.
        room: of a message.
    """
    part: list[Piece] = []
    taken = nothing = Room(0, 0, 0)
    for name, value in items:
        for piece in _pieces(name, value, room.size - EACH):
            more = measure(piece[2])
            if part and not room.holds(taken.plus(more)):
                yield part
                part, taken = [], nothing
            part.append(piece)
            taken = taken.plus(more)
    yield part


def _pieces(name: Any, value: Any, most: int) -> Iterator[Piece]:
    if not isinstance(value, TensorCore) or _bytes(value) <= most or not isinstance(value._data, np.ndarray):
        yield name, None, value
        return
    flat = value._data.reshape(-1)
    step = max(1, most // flat.itemsize)
    for start in range(0, flat.size, step):
        yield name, tuple(value.shape), make(flat[start : start + step])


def measure(value: Any) -> Room:
    """What a value takes in a message, rather too much than too little."""
    if isinstance(value, TensorCore):
        return Room(1, EACH, EACH + _bytes(value))
    room = Room(0, EACH, EACH)
    if isinstance(value, (str, bytes)):
        return room.plus(Room(0, 4 * len(value), 4 * len(value)))
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        room = room.plus(measure(each))
    return room


def _bytes(tensor: TensorCore) -> int:
    return int(tensor._data.size) * np.dtype(tensor.dtype).itemsize


def join(pieces: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Names and values again.

    Raises:
        ProtocolError: these are no pieces, or not all of them.
    """
    items: list[tuple[Any, Any]] = []
    elements: list[Any] = []
    whole: tuple[Any, Any, Any] | None = None
    missing = 0
    for piece in pieces:
        if not (isinstance(piece, tuple) and len(piece) == 3):
            raise _nonsense()
        name, shape, value = piece
        if shape is None:
            if missing:
                raise _nonsense()
            items.append((name, value))
            continue
        if not isinstance(value, TensorCore) or not isinstance(shape, tuple) or any(size.__class__ is not int or size < 1 for size in shape):
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


def apart(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """The values inside of the dicts, one by one, as an optimizer keeps one for each parameter: ``((name, key), value)``; see `together`."""
    for name, values in items:
        if isinstance(values, dict) and values:
            yield from (((name, key), value) for key, value in values.items())
        else:
            yield (name,), values


def together(items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The items that `apart` took apart.

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
    return ProtocolError("a state in pieces that do not fit together", code="pieces")
