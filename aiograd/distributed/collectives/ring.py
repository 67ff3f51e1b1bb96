"""RingExchange: one collective operation on one rank of a group with many members. Pure: it decides, and `group` sends.

Note [Few connections]
    Where every rank sends to every other one, a group of n members has n (n - 1) / 2 connections and as many messages in each round: nothing for a
    few members, and most of the time for many. So in groups of more than `MESH` members a rank sends to the next one and exchanges small arrays with
    rank 0, and that is all: two connections for a member, n - 1 more for rank 0.

Note [A ring in the order of ranks]
    Sums on a ring usually begin at another rank for each part, so that all are busy from the start; then elements are associated differently
    depending on where they lie. Here every sum begins at rank 0 and gains one contribution at each rank, ``((rank 0 + rank 1) + rank 2) + ...``; the
    last rank has the result, which goes on around the ring, from rank 0 to the last but one. Pieces follow each other, so all ranks are busy as
    soon as there are as many pieces as ranks. A rank sends each element at most twice, and so n / (n - 1) times as much as is possible at least.

    A rank may have several contributions (`SUM_IN_TURN`). It adds them to the sum of the ranks before, one after another, so no more travels than
    with one, and the sum is the same however contributions are divided among the ranks. Where every rank sends to every other one, or to rank
    0, each contribution would travel by itself: so small groups and small arrays, too, go along the ring then.

    A piece of a reduce-scatter goes around only until it has reached the rank that owns its rows. An all-gather is the second round alone, begun
    at every rank with its own array; of a broadcast the root sends pieces around.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009), for the ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aiograd.distributed.collectives.exchange import (
    BEGUN,
    CONTRIBUTION,
    DIRECT,
    VALUES,
    WHOLE,
    CollectiveExchange,
    MeshExchange,
    Message,
    OrderedSum,
    finish_sum,
    view_of,
    wrong_piece,
)
from aiograd.distributed.collectives.layout import PIECE, PIECES, BufferLayout, Piece, layout_of
from aiograd.distributed.collectives.operation import REDUCTIONS, Operation, OperationKind
from aiograd.running.types import Array

#: groups of more members exchange along a ring, or by way of rank 0
MESH = 16
#: bytes of a piece, at least, where there are that many
SMALLEST = 1 << 16


def is_large(size: int) -> bool:
    """True if the members of a group of this size exchange along a ring, and by way of rank 0."""
    return size > MESH


def new_exchange(operation: Operation, rank: int, size: int, arrays: Sequence[Array], most: int) -> CollectiveExchange:
    """An operation on one rank, as fits the size of the group.

    Args:
        most: bytes that the members take in one message; the same on all of them, unless it is above some megabytes.
    """
    if is_large(size) or (operation.kind is OperationKind.SUM_IN_TURN and size > 1):
        return RingExchange(operation, rank, size, arrays)
    return MeshExchange(operation, rank, size, arrays, min(PIECE, max(1, most // (PIECES + 1))))


class RingExchange(CollectiveExchange):
    """One operation on one rank of a group of at least two; see Note [A ring in the order of ranks].

    It takes the arguments of `CollectiveExchange`. The arrays of a SUM_IN_TURN are several lists of them, one after another. Pieces have at least
    `piece` bytes where there are that many, and operations on at most `direct` bytes go by way of rank 0.
    """

    def __init__(self, operation: Operation, rank: int, size: int, arrays: Sequence[Array], piece: int = SMALLEST, direct: int = DIRECT) -> None:
        super().__init__(operation, rank, size, arrays, piece, direct)
        self._next, self._before = (rank + 1) % size, (rank - 1) % size
        self._layout: BufferLayout | None = None
        #: contributions of this rank, and results
        self._sources: list[list[Array]] = []
        self._results: list[Array] = []
        #: the arrays of an all-gather, by rank
        self._gathered: dict[int, Array] = {}
        #: on rank 0, of an operation by way of it: the sum of each buffer
        self._sums: list[OrderedSum] = []
        #: (sender, round, part, piece) that are still to come; None: that is not known yet
        self._missing: set[tuple[int, int, int, int]] | None = None

    # ---------------------------------------------------------------- what users of an exchange ask

    @property
    def is_done(self) -> bool:
        return self._missing is not None and not self._missing and not self._unheard

    @property
    def awaited(self) -> list[int]:
        """The neighbours that send to this rank, even if the delay is further away."""
        return sorted({self._before} if self._missing is None else {sender for sender, *_ in self._missing} | self._unheard)

    def result(self) -> list[Array]:
        if self.operation.kind is OperationKind.ALL_GATHER:
            return [self._gathered[rank] for rank in range(self.size)]
        if self._layout is None:
            return []
        if self.operation.kind is OperationKind.REDUCE_SCATTER:
            return self._layout.part(self._results, self.rank)
        return self._layout.unflatten(self._results)

    # ---------------------------------------------------------------- begin

    def begin(self) -> list[Message]:
        kind = self.operation.kind
        if kind is OperationKind.ALL_GATHER:
            self._gathered[self.rank] = own = self._arrays[0].copy()
            self._missing = {(self._before, VALUES, part, 0) for part in range(self.size) if part != self.rank}
            return [Message(self._next, VALUES, self.rank, 0, [own])]
        if kind is OperationKind.BROADCAST:
            self._unheard = {0} if self.rank else set(range(1, self.size))
            return [*([Message(0, BEGUN, WHOLE, 0, [])] if self.rank else []), *self._begin_broadcast()]
        if kind is OperationKind.BARRIER:
            return self._begin_at_root([])
        layout = self._layout = self._layout_of(self.operation)
        self._results = layout.empty()
        arrays, count = self._arrays, len(self.operation.specs)
        if layout.nbytes <= (0 if kind is OperationKind.SUM_IN_TURN else self._direct):
            return self._begin_at_root(layout.flatten(arrays[:count], copy=True))
        self._sources = [layout.flatten(arrays[first : first + count]) for first in range(0, len(arrays), count or 1)]
        missing = {(self._before, CONTRIBUTION, *place) for place in self._places(layout)} if self.rank else set()
        self._missing = missing | {(self._before, VALUES, *place) for place in self._places(layout) if self._passes(place[0], self.rank)}
        if self.rank:
            return []
        return [Message(1, CONTRIBUTION, *place, [view_of(self._sources[0], _piece(layout, place))]) for place in self._places(layout)]

    def _begin_at_root(self, source: list[Array]) -> list[Message]:
        if self.rank:
            self._missing = {(0, VALUES, WHOLE, 0)}
            return [Message(0, CONTRIBUTION, WHOLE, 0, source)]
        self._missing = {(other, CONTRIBUTION, WHOLE, 0) for other in range(1, self.size)}
        self._sums = [OrderedSum(self.operation.reduction, self.size, target) for target in self._results]
        return self._add(0, source)

    def _begin_broadcast(self) -> list[Message]:
        if self.rank != self.operation.root:
            return []
        layout = self._layout = self._layout_of(self.operation)
        self._results = layout.flatten(self._arrays, copy=True)
        self._missing = set()
        if layout.nbytes <= self._direct and not self.rank:
            return [Message(other, VALUES, WHOLE, 0, self._results) for other in range(1, self.size)]
        return self._send_around(layout)

    def _send_around(self, layout: BufferLayout) -> list[Message]:
        places = self._places(layout)
        if not places:  # the others are to know that nothing comes
            return [Message(self._next, VALUES, WHOLE, 0, self._results)]
        return [Message(self._next, VALUES, *place, [view_of(self._results, _piece(layout, place))]) for place in places]

    def _layout_of(self, operation: Operation) -> BufferLayout:
        scattered = operation.kind is OperationKind.REDUCE_SCATTER
        whole = layout_of(operation.specs, 1, scattered)
        piece = min(PIECE, max(self._piece, whole.nbytes // (2 * self.size)))
        return layout_of(operation.specs, self.size if scattered else 1, scattered, piece)

    @staticmethod
    def _places(layout: BufferLayout) -> list[tuple[int, int]]:
        """Part and index of each piece, in the order in which they go around."""
        return [(part, index) for part, pieces in enumerate(layout.pieces) for index in range(len(pieces))]

    def _passes(self, part: int, rank: int) -> bool:
        """True if the result for the rows of `part` comes to a rank on its way around from the last rank, which has it."""
        if rank == self.size - 1:
            return False
        return self.operation.kind is not OperationKind.REDUCE_SCATTER or rank <= part < self.size - 1

    # ---------------------------------------------------------------- receive

    def receive(self, sender: int, operation: Operation, round: int, part: int, piece: int, arrays: list[Array]) -> list[Message]:
        kind, where = self.operation.kind, (sender, round, part, piece)
        if kind is OperationKind.BROADCAST and round == BEGUN:
            self._heard(sender, operation, part, piece, arrays)
            return [] if self.rank or self._unheard else [Message(other, BEGUN, WHOLE, 0, []) for other in range(1, self.size)]
        if kind is OperationKind.BROADCAST and self._missing is None:
            self._expect_broadcast(operation, sender, part)
        if self._missing is None or where not in self._missing or not self._fits(part, piece, arrays):
            raise wrong_piece(sender, self.operation, round, part, piece)
        self._missing.remove(where)
        if kind is OperationKind.ALL_GATHER:
            self._gathered[part] = arrays[0]
            return [] if part == self._next else [Message(self._next, VALUES, part, 0, arrays)]
        if part == WHOLE:
            return self._received_whole(sender, round, arrays)
        values = arrays[0]
        if round == CONTRIBUTION:
            return self._contributed(part, piece, values)
        return self._came_around(part, piece, values)

    def _expect_broadcast(self, operation: Operation, sender: int, part: int) -> None:
        self.operation = operation  # the root's
        layout = self._layout = self._layout_of(operation)
        self._results = layout.empty()
        places = self._places(layout)
        around = {(self._before, VALUES, *place) for place in places} or {(self._before, VALUES, WHOLE, 0)}
        is_direct = layout.nbytes <= self._direct and not operation.root
        self._missing = {(0, VALUES, WHOLE, 0)} if is_direct else around

    def _received_whole(self, sender: int, round: int, arrays: list[Array]) -> list[Message]:
        if round == CONTRIBUTION:
            return self._add(sender, arrays)
        if self.operation.kind is OperationKind.REDUCE_SCATTER and self._layout is not None:
            for piece, values in zip(self._layout.pieces[self.rank], arrays, strict=True):
                np.copyto(view_of(self._results, piece), values)
        else:
            for target, values in zip(self._results, arrays, strict=True):
                np.copyto(target, values)
        is_around = self.operation.kind is OperationKind.BROADCAST and self.operation.root != 0
        return [Message(self._next, VALUES, WHOLE, 0, arrays)] if is_around and self._next != self.operation.root else []

    def _add(self, rank: int, arrays: list[Array]) -> list[Message]:
        """On rank 0: add a contribution; returns the results for all other ranks, once all are there."""
        for total, values in zip(self._sums, arrays, strict=True):
            total.add(rank, values)
        if self._missing:
            return []
        return [Message(other, VALUES, WHOLE, 0, self._results_for(other)) for other in range(1, self.size)]

    def _results_for(self, rank: int) -> list[Array]:
        if self.operation.kind is OperationKind.REDUCE_SCATTER and self._layout is not None:
            return [view_of(self._results, piece) for piece in self._layout.pieces[rank]]
        return self._results

    def _contributed(self, part: int, piece: int, values: Array) -> list[Message]:
        """The sum of all ranks before this one."""
        if self._layout is None:
            return []
        place = _piece(self._layout, (part, piece))
        target = view_of(self._results, place)
        for source in self._sources:
            REDUCTIONS[self.operation.reduction](values, view_of(source, place), out=target)
            values = target
        if self._next:
            return [Message(self._next, CONTRIBUTION, part, piece, [target])]
        finish_sum(target, self.operation.reduction, self.size)
        return [Message(0, VALUES, part, piece, [target])] if self._passes(part, 0) else []

    def _came_around(self, part: int, piece: int, values: Array) -> list[Message]:
        """Take a result, or a part of a broadcast, that has come around the ring."""
        kind = self.operation.kind
        if self._layout is not None and (kind is not OperationKind.REDUCE_SCATTER or part == self.rank):
            np.copyto(view_of(self._results, _piece(self._layout, (part, piece))), values)
        goes_on = self._next != self.operation.root if kind is OperationKind.BROADCAST else self._passes(part, self._next)
        return [Message(self._next, VALUES, part, piece, [values])] if goes_on else []

    def _fits(self, part: int, piece: int, arrays: list[Array]) -> bool:
        """True if arrays fit a message with this piece."""
        layout = self._layout
        if self.operation.kind is OperationKind.ALL_GATHER:
            return len(arrays) == 1
        if layout is None:
            return not arrays
        if part != WHOLE:
            expected = [_piece(layout, (part, piece))] if 0 <= part < layout.size and 0 <= piece < len(layout.pieces[part]) else []
        elif self.operation.kind is OperationKind.REDUCE_SCATTER and self.rank:
            expected = layout.pieces[self.rank]
        else:
            expected = [Piece(index, 0, count) for index, (_, count) in enumerate(layout.buffers)]
        return len(arrays) == len(expected) and all(
            array.dtype == layout.buffers[place.buffer][0] and array.shape == (place.stop - place.start,)
            for array, place in zip(arrays, expected, strict=True)
        )


def _piece(layout: BufferLayout, place: tuple[int, int]) -> Piece:
    return layout.pieces[place[0]][place[1]]
