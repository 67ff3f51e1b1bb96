"""On which inputs each element of an array may depend.

Note [Sets and elements]
    A `Pattern` is a table of sets (a boolean CSR matrix, one row per set, one column per input) and, for each element of the array, the number of
    its set. Rows that only move elements move these numbers, by their own forward; set 0 is empty, so an element that is filled in with zero depends
    on nothing. All other rows make new sets, each a union of old ones: a product of two boolean matrices. An element that is repeated, such as a sum
    that is broadcast back, keeps one set.

Note [Writing in place]
    Rows marked ``view`` give views of the numbers, too, so that what is written into one shows in all. Other rows give numbers of their own. Tables
    only grow, and a view has the table of its base.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.errors import MissingExtraError
from aiograd.running.types import Array, Shape


def scipy_sparse() -> Any:
    """The module ``scipy.sparse``.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    try:
        import scipy.sparse
    except ModuleNotFoundError:
        raise MissingExtraError("sparse_jacobian: its result is a matrix of SciPy, which is not installed: pip install 'aiograd[scipy]'") from None
    return scipy.sparse


class SetTable:
    """Sets of inputs; sets are added, never changed or removed.

    Args:
        matrix: (sets, inputs), boolean CSR; its first row is empty.
    """

    __slots__ = ("matrix",)

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix

    def add(self, other: SetTable) -> int:
        """Add the sets of another table; returns by how much their numbers grow."""
        if other is self:
            return 0
        count: int = self.matrix.shape[0]
        self.matrix = scipy_sparse().vstack((self.matrix, other.matrix), format="csr")
        return count


class Pattern:
    """The sets of an array's elements; see Note [Sets and elements].

    Args:
        sets: of each element the number of its set, in the array's shape.
        table: the sets.
    """

    __slots__ = ("sets", "table")

    def __init__(self, sets: Array, table: SetTable) -> None:
        self.sets = sets
        self.table = table

    @classmethod
    def of_inputs(cls, shape: Shape) -> Pattern:
        """Each element is an input and depends on itself."""
        count = math.prod(shape)
        starts = np.concatenate(([0], np.arange(count + 1)))
        matrix = scipy_sparse().csr_array((np.ones(count, bool), np.arange(count), starts), shape=(count + 1, count))
        return cls(np.arange(1, count + 1).reshape(shape), SetTable(matrix))

    @classmethod
    def of_constants(cls, shape: Shape, inputs: int) -> Pattern:
        """No element depends on an input."""
        return cls(np.zeros(shape, np.int64), SetTable(scipy_sparse().csr_array((1, inputs), dtype=bool)))

    def write(self, index: Any, given: Pattern | None) -> None:
        """Elements are written in place: views, which share memory with `sets`, change as well. None depends on no input."""
        self.sets[index] = 0 if given is None else given.sets + self.table.add(given.table)

    def moved(self, sets: Array) -> Pattern:
        """An array of other elements of this one."""
        return Pattern(sets, self.table)

    def reshape(self, shape: Sequence[int]) -> Pattern:
        """The elements in another shape."""
        return Pattern(self.sets.reshape(shape), self.table)

    def broadcast(self, shape: Shape) -> Pattern:
        """The array broadcast to `shape`."""
        return self if self.sets.shape == shape else Pattern(np.broadcast_to(self.sets, shape), self.table)

    def united(self, axes: Sequence[int]) -> Pattern:
        """One element for all along `axes`, which keep the length 1."""
        shape = self.sets.shape
        axes = sorted({a % len(shape) for a in axes}) if shape else []
        kept = [a for a in range(len(shape)) if a not in axes]
        thin = tuple(1 if a in axes else n for a, n in enumerate(shape))
        length = math.prod(shape[a] for a in axes)
        if length == 1:
            return Pattern(self.sets.reshape(thin), self.table)
        return self.grouped(thin, np.full(math.prod(thin), length), self.sets.transpose(*kept, *axes).ravel())

    def grouped(self, shape: Shape, lengths: Array, members: Array) -> Pattern:
        """An array of `shape` with elements that depend on what groups of sets depend on.

        Args:
            shape: of the new array.
            lengths: how many sets each of its elements unites.
            members: numbers of these sets, element after element.
        """
        starts = np.concatenate(([0, 0], np.cumsum(lengths)))
        matrix = self.table.matrix
        chosen = scipy_sparse().csr_array((np.ones(members.size, bool), members, starts), shape=(starts.size - 1, matrix.shape[0]))
        return Pattern(np.arange(1, starts.size - 1).reshape(shape), SetTable(chosen @ matrix))

    def scattered(self, shape: Shape, places: Array) -> Pattern:
        """An array of `shape` to which each element of this one is added at a place.

        Args:
            shape: of the new array.
            places: the flat position of each element, counted from 1; 0 for one that is dropped.
        """
        flat = places.ravel()
        order = np.argsort(flat, kind="stable")[np.count_nonzero(flat == 0) :]
        return self.grouped(shape, np.bincount(flat, minlength=math.prod(shape) + 1)[1:], self.sets.ravel()[order])

    def matrix(self) -> Any:
        """(elements, inputs), boolean CSR with sorted columns."""
        matrix = self.table.matrix[self.sets.ravel()]
        matrix.sort_indices()
        return matrix


def with_one_table(patterns: Sequence[Pattern]) -> list[Pattern]:
    """The same patterns with one table."""
    table = SetTable(patterns[0].table.matrix)
    shifts: dict[int, int] = {id(patterns[0].table): 0}
    for pattern in patterns:
        if id(pattern.table) not in shifts:
            shifts[id(pattern.table)] = table.add(pattern.table)
    return [Pattern(pattern.sets + shifts[id(pattern.table)], table) for pattern in patterns] if len(shifts) > 1 else list(patterns)


def union(patterns: Sequence[Pattern | None], shape: Shape) -> Pattern | None:
    """Arrays combined element by element; None where none of them depends on an input."""
    dependent = [p.broadcast(shape) for p in patterns if p is not None]
    return functools.reduce(_union_of_two, dependent) if dependent else None


def _union_of_two(first: Pattern, second: Pattern) -> Pattern:
    first, second = with_one_table((first, second))
    if first.sets is second.sets or np.array_equal(first.sets, second.sets):
        return first
    count = first.table.matrix.shape[0]
    pairs, places = np.unique(first.sets * count + second.sets, return_inverse=True)
    united = first.grouped(pairs.shape, np.full(pairs.size, 2), np.stack(np.divmod(pairs, count), -1).ravel())
    return Pattern(united.sets[places].reshape(first.sets.shape), united.table)
