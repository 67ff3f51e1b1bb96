"""BufferLayout: arrays as flat buffers, cut into a part for each rank, and each part into pieces, of which a message has a few. Pure.

Every rank computes the same layout from the shapes and dtypes of an operation.

Note [Buffers]
    An array of at least one piece is a buffer of its own, so that it need not be copied. Smaller ones are put together, one buffer for each dtype, so
    that many small arrays cost few messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from aiograd.distributed.collectives.operation import ArraySpec
from aiograd.running.types import Array

#: bytes of a piece at most
PIECE = (1 << 20) - (4 << 10)
#: a message has the bytes of so many pieces at most, the last one half a piece more
PIECES = 4


class Piece(NamedTuple):
    """A range of one flat buffer."""

    buffer: int
    start: int
    stop: int


class ArrayPlace(NamedTuple):
    """Where an array lies: elements ``[start, stop)`` of a buffer."""

    buffer: int
    start: int
    stop: int


class BufferLayout:
    """The buffers of an operation; `layout_of` makes them. Nothing of one changes.

    Args:
        specs: shapes and dtypes of the arrays.
        size: the number of ranks.
        by_rows: arrays are cut between rows (along axis 0), as evenly as possible, the first parts longer; else anywhere.
        piece: bytes of a piece at most.
    """

    def __init__(self, specs: Sequence[ArraySpec], size: int, by_rows: bool = False, piece: int = PIECE) -> None:
        self.specs = [(shape, np.dtype(dtype)) for shape, dtype in specs]
        self.size = size
        self.by_rows = by_rows
        self.piece = piece
        #: dtype and number of elements of each buffer
        self.buffers: list[tuple[np.dtype, int]] = []
        self.places: list[ArrayPlace] = []
        shared: dict[np.dtype, int] = {}
        for shape, dtype in self.specs:
            count = math.prod(shape)
            if by_rows or count * dtype.itemsize >= piece:
                index, start = len(self.buffers), 0
                self.buffers.append((dtype, count))
            else:
                if dtype not in shared:
                    shared[dtype] = len(self.buffers)
                    self.buffers.append((dtype, 0))
                index = shared[dtype]
                start = self.buffers[index][1]
                self.buffers[index] = (dtype, start + count)
            self.places.append(ArrayPlace(index, start, start + count))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(dtype.itemsize * count for dtype, count in self.buffers)

    def bounds(self, buffer: int, part: int) -> tuple[int, int]:
        """The elements of a buffer that belong to the part of a rank."""
        count = self.buffers[buffer][1]
        if not self.by_rows:
            return count * part // self.size, count * (part + 1) // self.size
        row = math.prod(self.specs[buffer][0][1:])
        first, last = self.rows(buffer, part)
        return first * row, last * row

    def rows(self, buffer: int, part: int) -> tuple[int, int]:
        """The rows of an array that belong to the part of a rank, where arrays are cut by rows."""
        even, longer = divmod(self.specs[buffer][0][0], self.size)
        first = even * part + min(part, longer)
        return first, first + even + (part < longer)

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """For each rank the pieces of its part."""
        return [list(self._cut(part)) for part in range(self.size)]

    @cached_property
    def messages(self) -> list[list[list[Piece]]]:
        """For each rank the pieces of its part, by the messages in which they travel. See Note [Pieces and messages]."""
        return [self._joined(pieces) for pieces in self.pieces]

    def _joined(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        messages: list[list[Piece]] = []
        left = 0
        for piece in pieces:
            nbytes = (piece.stop - piece.start) * self.buffers[piece.buffer][0].itemsize
            if nbytes > left:
                messages.append([])
                left = PIECES * self.piece
            messages[-1].append(piece)
            left -= nbytes
        if len(messages) > 1 and left >= (PIECES - 0.5) * self.piece:  # the rest goes with the message before
            rest = messages.pop()
            messages[-1] += rest
        return messages

    def _cut(self, part: int) -> Iterator[Piece]:
        for index, (dtype, _) in enumerate(self.buffers):
            start, stop = self.bounds(index, part)
            step = max(1, self.piece // dtype.itemsize)
            for first in range(start, stop, step):
                yield Piece(index, first, min(stop, first + step))

    def flatten(self, arrays: Sequence[Array], copy: bool = False) -> list[Array]:
        """Arrays as buffers.

        Args:
            arrays: C-contiguous arrays of the layout's shapes and dtypes.
            copy: also copy arrays that are a buffer by themselves.
        """
        grouped: list[list[Array]] = [[] for _ in self.buffers]
        for array, place in zip(arrays, self.places, strict=True):
            grouped[place.buffer].append(array.reshape(-1))
        return [group[0] if len(group) == 1 and not copy else np.concatenate(group) for group in grouped]

    def empty(self) -> list[Array]:
        """Buffers for results."""
        return [np.empty(count, dtype) for dtype, count in self.buffers]

    def unflatten(self, buffers: Sequence[Array]) -> list[Array]:
        """The arrays in buffers, as views."""
        return [buffers[place.buffer][place.start : place.stop].reshape(shape) for (shape, _), place in zip(self.specs, self.places, strict=True)]

    def part(self, buffers: Sequence[Array], part: int) -> list[Array]:
        """A rank's part of each array, as views, where arrays are cut by rows."""
        arrays = self.unflatten(buffers)
        return [array[slice(*self.rows(index, part))] for index, array in enumerate(arrays)]


@lru_cache(maxsize=256)
def layout_of(specs: tuple[ArraySpec, ...], size: int, by_rows: bool = False, piece: int = PIECE) -> BufferLayout:
    """A layout: one of the latest, as training carries out the same operations in each step."""
    return BufferLayout(specs, size, by_rows, piece)
