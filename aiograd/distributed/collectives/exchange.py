"""MeshExchange: one collective operation on one rank of a small group: its messages, sums and waits. Pure: it decides, and `group` sends.

Note [Two rounds]
    Every rank owns one part of the buffers. In the first round each rank sends every other rank its contribution to that rank's part; the owner
    adds up the contributions in the order of the ranks, for any order of arrival, and in the second round sends the sum to all
    others. So each rank sends and receives ``2 (size - 1) / size`` times the bytes of the arrays, as in a ring, which is the least that is
    possible, in two messages of latency instead of ``2 (size - 1)``. A ring adds up each part beginning at another rank; here an element is
    ``((rank 0 + rank 1) + rank 2) + ...`` wherever it lies, so results depend neither on sizes nor on timing. Parts travel in pieces, so sending,
    adding and receiving overlap. Many members exchange otherwise: see `ring`.

    Small arrays take one round: every rank sends everything to every other one, and adds up. So do larger ones between two members, where that is
    no more to send, and one message where there would be two; but not those beyond the caches, as each element is then read and written more often.

    Reduce-scatter is the first round alone, all-gather the second; of a broadcast the root sends each rank one part in the first, which that
    rank sends to the others in the second.

Note [Heard from all]
    An operation ends on a rank when every rank is known to have begun the same one: in sums and gathers each contributes, and a rank's message is
    taken where the same operation has begun. Of a broadcast most ranks have nothing to send, and the root's values alone say nothing of the others.
    So they tell each other that they have begun it; in a large group rank 0 is told, and tells all. The shapes and dtypes that come with that are
    compared too, also by ranks that have given none of their own.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), for the bounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aiograd.distributed.collectives.layout import PIECE, BufferLayout, Piece, layout_of
from aiograd.distributed.collectives.operation import REDUCTIONS, Operation, OperationKind
from aiograd.errors import ProtocolError
from aiograd.running.types import Array

#: operations on at most so many bytes take one round
DIRECT = 1 << 15
#: operations of two members on at most so many pieces take one round
PAIR = 8
#: a contribution to a part, for its owner; the values of a part, for all ranks; a broadcast that has begun, see Note [Heard from all]
CONTRIBUTION, VALUES, BEGUN = 1, 2, 3
#: stands for a part in a message with all that its receiver adds up
WHOLE = -1


class Message(NamedTuple):
    """Pieces on their way from this rank to another."""

    to: int
    #: CONTRIBUTION, VALUES or BEGUN
    round: int
    #: the rank that owns the part, and the index of the message in it
    part: int
    piece: int
    arrays: list[Array]


class OrderedSum:
    """The sum of one piece: contributions are added in the order of the ranks, each as soon as all before it are there.

    Args:
        target: where the sum is written.
        size: the number of ranks.
    """

    __slots__ = ("reduction", "size", "next", "_target", "_first", "_waiting")

    def __init__(self, reduction: str, size: int, target: Array) -> None:
        self.reduction = reduction
        self.size = size
        #: the rank of the contribution that is added next
        self.next = 0
        self._target = target
        self._first: Array | None = None
        self._waiting: dict[int, Array] = {}

    @property
    def is_complete(self) -> bool:
        """True if every rank has contributed."""
        return self.next == self.size

    def add(self, rank: int, values: Array) -> None:
        """Take a contribution; it is not modified."""
        self._waiting[rank] = values
        function, target = REDUCTIONS[self.reduction], self._target
        while (contribution := self._waiting.pop(self.next, None)) is not None:
            if self.next == 0:
                self._first = contribution
            elif self._first is not None:
                function(self._first, contribution, out=target)
                self._first = None
            else:
                function(target, contribution, out=target)
            self.next += 1
        if not self.is_complete:
            return
        if self._first is not None:
            np.copyto(target, self._first)
            self._first = None
        finish_sum(target, self.reduction, self.size)


class CollectiveExchange(ABC):
    """One operation on one rank; the subclasses differ in the ways of messages between ranks.

    Args:
        operation: as this rank carries it out.
        rank, size: of this rank, and of the group.
        arrays: C-contiguous; empty for a rank that only receives. They must not change until the operation is over.
        piece: bytes of a piece: at most, or at least where there are that many; the same on all ranks.
        direct: the most bytes of an operation with arrays that are not cut into pieces; the same on all ranks.
    """

    def __init__(self, operation: Operation, rank: int, size: int, arrays: Sequence[Array], piece: int, direct: int) -> None:
        self.operation = operation
        self.rank = rank
        self.size = size
        self._arrays = arrays
        self._piece = piece
        self._direct = direct
        #: ranks that have yet to say that they have begun a broadcast
        self._unheard: set[int] = set()

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """True if everything that this rank needs has arrived."""

    @property
    @abstractmethod
    def awaited(self) -> list[int]:
        """Ranks from which something is still to come."""

    @property
    def is_symmetric(self) -> bool:
        """True if each rank that this one begins with sends it exactly one message, so that one of the two can be the answer to the other."""
        return False

    def _heard(self, sender: int, operation: Operation, part: int, piece: int, arrays: list[Array]) -> None:
        """A rank has begun this broadcast; see Note [Heard from all]."""
        if sender not in self._unheard or (part, piece, arrays) != (WHOLE, 0, []):
            raise wrong_piece(sender, self.operation, BEGUN, part, piece)
        self._unheard.remove(sender)
        if not self.operation.specs:
            self.operation = operation

    @abstractmethod
    def result(self) -> list[Array]:
        """The new arrays: of an all-gather one for each rank.

        They share no memory with arrays of other ranks or of the caller.
        """

    @abstractmethod
    def begin(self) -> list[Message]:
        """The messages that this rank sends of its own accord."""

    @abstractmethod
    def receive(self, sender: int, operation: Operation, round: int, part: int, piece: int, arrays: list[Array]) -> list[Message]:
        """A message has come from another rank, for an operation that agrees with this one (see `Operation.mismatch`).

        Args:
            arrays: they belong to the exchange from now on.

        Returns:
            The messages to be sent now.

        Raises:
            ProtocolError: it is not what that rank should send; nothing has changed.
        """


class MeshExchange(CollectiveExchange):
    """One operation on one rank of a group in which every rank sends to every other one; see Note [Two rounds].

    It takes the arguments of `CollectiveExchange`.
    """

    def __init__(self, operation: Operation, rank: int, size: int, arrays: Sequence[Array], piece: int = PIECE, direct: int = DIRECT) -> None:
        super().__init__(operation, rank, size, arrays, piece, direct)
        #: of an all-gather: the layout of each rank's array; else one for all, under this rank
        self._layouts: dict[int, BufferLayout] = {}
        self._results: dict[int, list[Array]] = {}
        #: by part and index of a message the sums of its pieces
        self._folds: dict[tuple[int, int], list[OrderedSum]] = {}
        #: (sender, round, part, index) of the messages that have arrived, and how many are still to come from each rank; None: not known yet
        self._seen: set[tuple[int, int, int, int]] = set()
        self._missing: dict[int, int | None] = {other: None for other in range(size) if other != rank}
        self.is_direct = False

    # ---------------------------------------------------------------- what users of an exchange ask

    @property
    def is_done(self) -> bool:
        counts = self._missing.values()
        return not (any(counts) or None in counts or self._unheard) and all(map(_is_complete, self._folds.values()))

    @property
    def awaited(self) -> list[int]:
        return [rank for rank, count in self._missing.items() if count is None or count or rank in self._unheard]

    @property
    def is_symmetric(self) -> bool:
        if self.operation.kind is OperationKind.BROADCAST:
            return self.is_direct or self.rank != self.operation.root
        return self.is_direct and self.operation.kind in (OperationKind.ALL_REDUCE, OperationKind.REDUCE_SCATTER, OperationKind.BARRIER)

    def result(self) -> list[Array]:
        kind, layouts = self.operation.kind, self._layouts
        if kind is OperationKind.BARRIER:
            return []
        if kind is OperationKind.ALL_GATHER:
            return [layouts[rank].unflatten(self._results[rank])[0] for rank in range(self.size)]
        layout, buffers = layouts[0], self._results[0]
        return layout.part(buffers, self.rank) if kind is OperationKind.REDUCE_SCATTER else layout.unflatten(buffers)

    # ---------------------------------------------------------------- begin

    def begin(self) -> list[Message]:
        kind = self.operation.kind
        if kind is OperationKind.BARRIER:
            self.is_direct = True
            self._missing = dict.fromkeys(self._missing, 1)
            return [Message(other, VALUES, self.rank, 0, []) for other in self._others()]
        if kind is OperationKind.ALL_GATHER:
            return self._begin_gather()
        if kind is OperationKind.BROADCAST:
            return self._begin_broadcast()
        return self._begin_reduction()

    def _others(self) -> list[int]:
        """The other ranks, the next one first, so that not all send to the same rank."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def _begin_gather(self) -> list[Message]:
        layout = self._layout_for(self.rank, Operation(OperationKind.ALL_GATHER, specs=self.operation.specs))
        self._results[self.rank] = layout.flatten(self._arrays, copy=True)
        source = self._results[self.rank]
        messages = []
        for index, pieces in enumerate(layout.messages[0]):
            messages += [Message(other, VALUES, self.rank, index, views_of(source, pieces)) for other in self._others()]
        return messages or [Message(other, VALUES, self.rank, 0, []) for other in self._others()]

    def _begin_broadcast(self) -> list[Message]:
        root = self.operation.root
        self._unheard = {other for other in self._missing if other != root}
        if self.rank != root:
            return [Message(other, BEGUN, WHOLE, 0, []) for other in self._others()]
        layout = self._layout_for(0, self.operation)
        self._missing = dict.fromkeys(self._missing, 0)
        self._results[0] = layout.flatten(self._arrays, copy=True)
        messages = []
        for part, joined in enumerate(layout.messages):
            for index, pieces in enumerate(joined):
                values = views_of(self._results[0], pieces)
                if self.is_direct or part == root:
                    messages += [Message(other, VALUES, part, index, values) for other in self._others()]
                else:
                    messages.append(Message(part, CONTRIBUTION, part, index, values))
        if self.is_direct and not layout.nbytes:
            return [Message(other, VALUES, root, 0, []) for other in self._others()]
        return sorted(messages, key=lambda message: message.piece)  # every rank gets something to hand on at once

    def _begin_reduction(self) -> list[Message]:
        layout = self._layout_for(0, self.operation)
        source = layout.flatten(self._arrays, copy=self.is_direct)
        self._results[0] = layout.empty()
        is_scatter = self.operation.kind is OperationKind.REDUCE_SCATTER
        own = self._own_part(layout)
        for index, pieces in enumerate(layout.messages[own]):
            targets = views_of(self._results[0], pieces)
            self._folds[own, index] = [OrderedSum(self.operation.reduction, self.size, target) for target in targets]
            self._contribute(own, index, self.rank, views_of(source, pieces))
        if self.is_direct:
            self._missing = dict.fromkeys(self._missing, 1)
            pieces_of = layout.pieces
            return [Message(other, CONTRIBUTION, WHOLE, 0, views_of(source, pieces_of[other if layout.size > 1 else 0])) for other in self._others()]
        is_one_round = is_scatter or layout.size == 1
        for other in self._missing:
            self._missing[other] = len(layout.messages[own]) + (0 if is_one_round else len(layout.messages[other]))
        messages = []
        for index in range(max(map(len, layout.messages))):
            for other in self._others():
                part = other if layout.size > 1 else 0
                if index < len(layout.messages[part]):
                    messages.append(Message(other, CONTRIBUTION, part, index, views_of(source, layout.messages[part][index])))
        return messages

    def _own_part(self, layout: BufferLayout) -> int:
        """The part of the layout that this rank adds up."""
        return self.rank if layout.size > 1 else 0

    def _layout_for(self, key: int, operation: Operation) -> BufferLayout:
        by_rows = operation.kind is OperationKind.REDUCE_SCATTER
        is_gather, is_pair = operation.kind is OperationKind.ALL_GATHER, operation.kind is OperationKind.ALL_REDUCE and self.size == 2
        layout = layout_of(operation.specs, 1 if is_gather else self.size, by_rows, self._piece)
        self.is_direct = not is_gather and layout.nbytes <= self._direct
        if (self.is_direct and not by_rows) or (is_pair and layout.nbytes <= PAIR * self._piece):
            layout = layout_of(operation.specs, 1, by_rows, self._piece)  # every rank adds up all of it
        self._layouts[key] = layout
        return layout

    # ---------------------------------------------------------------- receive

    def receive(self, sender: int, operation: Operation, round: int, part: int, piece: int, arrays: list[Array]) -> list[Message]:
        if (sender, round, part, piece) in self._seen:
            raise wrong_message(sender, self.operation, "a piece that has come before")
        kind = self.operation.kind
        if kind is OperationKind.BARRIER:
            self._note(sender, round, part, piece, arrays == [])
            return []
        if kind is OperationKind.ALL_GATHER:
            layout = self._layouts.get(sender)
            if layout is None:
                layout = self._layout_for(sender, operation)
                self._results[sender] = layout.empty()
                self._missing[sender] = max(1, len(layout.messages[0]))
            elif list(layout.specs) != [(shape, np.dtype(dtype)) for shape, dtype in operation.specs]:
                raise wrong_message(sender, self.operation, "pieces of arrays of different shapes")
            self._store(sender, round, part, piece, arrays, sender, 0, part == sender and round == VALUES)
            return []
        if kind is OperationKind.BROADCAST:
            return self._receive_broadcast(sender, operation, round, part, piece, arrays)
        layout = self._layouts[0]
        if self.is_direct:
            return self._receive_direct(sender, round, part, piece, arrays, layout)
        if round == VALUES:
            is_expected = kind is OperationKind.ALL_REDUCE and part == sender and layout.size > 1
            self._store(sender, round, part, piece, arrays, 0, part, is_expected)
            return []
        self._note(sender, round, part, piece, round == CONTRIBUTION and part == self._own_part(layout) and _fits(arrays, layout, part, piece))
        return self._contribute(part, piece, sender, arrays)

    def _receive_direct(self, sender: int, round: int, part: int, piece: int, arrays: list[Array], layout: BufferLayout) -> list[Message]:
        own = self._own_part(layout)
        expected = layout.pieces[own]
        self._note(sender, round, part, piece, (round, part, piece) == (CONTRIBUTION, WHOLE, 0) and _fit(arrays, layout, expected))
        for place, pieces in zip(self._folds, layout.messages[own], strict=True):
            self._contribute(*place, sender, arrays[: len(pieces)])
            arrays = arrays[len(pieces) :]
        return []

    def _receive_broadcast(self, sender: int, operation: Operation, round: int, part: int, piece: int, arrays: list[Array]) -> list[Message]:
        root = self.operation.root
        if round == BEGUN:
            self._heard(sender, operation, part, piece, arrays)
            return []
        layout = self._layouts.get(0)
        if layout is None:
            self.operation = operation  # the root's
            layout = self._layout_for(0, operation)
            self._results[0] = layout.empty()
            for other in self._missing:
                self._missing[other] = 0 if self.is_direct else len(layout.messages[other])
            counts = [len(each) for each in layout.messages]
            self._missing[root] = max(1, sum(counts)) if self.is_direct else counts[root] + counts[self.rank]
        if self.is_direct and not layout.nbytes:
            self._note(sender, round, part, piece, sender == root and arrays == [])
            return []
        if round == CONTRIBUTION:
            is_expected = sender == root and part == self.rank and not self.is_direct
        else:
            is_expected = sender == (root if self.is_direct else part)
        self._store(sender, round, part, piece, arrays, 0, part, is_expected)
        if round == VALUES:
            return []
        values = views_of(self._results[0], layout.messages[part][piece])
        return [Message(other, VALUES, part, piece, values) for other in self._others() if other != root]

    def _contribute(self, part: int, piece: int, rank: int, values: Sequence[Array]) -> list[Message]:
        """Add a contribution; returns the sum for all other ranks, once it is complete and they want it."""
        folds = self._folds[part, piece]
        for fold, array in zip(folds, values, strict=True):
            fold.add(rank, array)
        layout = self._layouts[0]
        if not _is_complete(folds) or self.operation.kind is OperationKind.REDUCE_SCATTER or layout.size == 1:
            return []
        values = views_of(self._results[0], layout.messages[part][piece])
        return [Message(other, VALUES, part, piece, values) for other in self._others()]

    def _store(self, sender: int, round: int, part: int, piece: int, arrays: list[Array], key: int, owner: int, is_expected: bool) -> None:
        """Values of a piece, of the part of `owner` in the layout under `key`."""
        layout = self._layouts[key]
        if not layout.nbytes and not arrays and is_expected:
            self._note(sender, round, part, piece, True)
            return
        self._note(sender, round, part, piece, is_expected and _fits(arrays, layout, owner, piece))
        for target, array in zip(views_of(self._results[key], layout.messages[owner][piece]), arrays, strict=True):
            np.copyto(target, array)

    def _note(self, sender: int, round: int, part: int, piece: int, is_right: bool) -> None:
        missing = self._missing.get(sender)
        if not is_right or not missing:
            raise wrong_piece(sender, self.operation, round, part, piece)
        self._seen.add((sender, round, part, piece))
        self._missing[sender] = missing - 1


def finish_sum(target: Array, reduction: str, size: int) -> None:
    """Make the reduction of the sum over all ranks: of "mean" its quotient by their number, in the dtype of the array."""
    if reduction != "mean":
        return
    if target.dtype.kind == "f" and size & (size - 1) == 0:
        np.multiply(target, target.dtype.type(1 / size), out=target)  # the same bits, as the inverse of a power of two is exact
    else:
        np.divide(target, np.asarray(size, target.real.dtype), out=target)


def view_of(buffers: Sequence[Array], piece: Piece) -> Array:
    """The elements of a piece."""
    view: Array = buffers[piece.buffer][piece.start : piece.stop]
    return view


def views_of(buffers: Sequence[Array], pieces: Sequence[Piece]) -> list[Array]:
    """The elements of pieces."""
    return [view_of(buffers, piece) for piece in pieces]


def _is_complete(folds: Sequence[OrderedSum]) -> bool:
    return all(fold.is_complete for fold in folds)


def _fits(arrays: list[Array], layout: BufferLayout, part: int, piece: int) -> bool:
    """True if arrays fit the message of this index."""
    return 0 <= part < layout.size and 0 <= piece < len(layout.messages[part]) and _fit(arrays, layout, layout.messages[part][piece])


def _fit(arrays: list[Array], layout: BufferLayout, pieces: Sequence[Piece]) -> bool:
    """True if arrays have the dtypes and lengths of pieces."""
    return len(arrays) == len(pieces) and all(
        array.dtype == layout.buffers[piece.buffer][0] and array.shape == (piece.stop - piece.start,)
        for array, piece in zip(arrays, pieces, strict=True)
    )


def wrong_piece(sender: int, operation: Operation, round: int, part: int, piece: int) -> ProtocolError:
    """The error for pieces that do not belong to an operation, or were cut otherwise."""
    what = f"a piece it should not send (round {round}, part {part}, piece {piece}; members whose Limits differ cut arrays into other pieces)"
    return wrong_message(sender, operation, what)


def wrong_message(sender: int, operation: Operation, what: str) -> ProtocolError:
    """The error for a message that a rank should not have sent."""
    return ProtocolError(f"rank {sender} sent {what} in {operation}", code="collective")
