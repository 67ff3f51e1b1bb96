"""On which inputs each element of an array may depend.

Note [Sets and elements]
    A `Pattern` is a table of sets (a boolean CSR matrix, one row per set, one column per input) and, for each element of the array, the number of
    its set. Rows that only move elements move these numbers, by their own forward; set 0 is empty, so an element that is filled in with zero depends
    on nothing. All other rows make new sets, each a union of old ones: a product of two boolean matrices. An element that is repeated, such as a sum
    that is broadcast back, keeps one set.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    except ImportError:
        raise MissingExtraError("sparse_jacobian: its result is a matrix of SciPy, which is not installed: pip install 'aiograd[scipy]'") from None
    return scipy.sparse


@dataclass(frozen=True, eq=False)
class Pattern:
    """The sets of an array's elements; see Note [Sets and elements]."""

    #: of each element the number of its set, in the array's shape
    sets: Array
    #: (sets, inputs), boolean CSR; its first row is empty
    table: Any

    @classmethod
    def of_inputs(cls, shape: Shape) -> Pattern:
        """Each element is an input and depends on itself."""
        count = math.prod(shape)
        unit = scipy_sparse().eye_array(count + 1, count, k=-1, dtype=bool, format="csr")
        return cls(np.arange(1, count + 1).reshape(shape), unit)

    def moved(self, sets: Array) -> Pattern:
        """An array of other elements."""
        return Pattern(sets, self.table)

    def united(self, axes: Sequence[int]) -> Pattern:
        """One element for all along `axes`, which keep the length 1."""
        shape = self.sets.shape
        axes = sorted({a % len(shape) for a in axes}) if shape else []
        kept = [a for a in range(len(shape)) if a not in axes]
        thin = tuple(1 if a in axes else n for a, n in enumerate(shape))
        length = math.prod(shape[a] for a in axes)
        if length == 1:
            return self
        return self.grouped(thin, np.full(math.prod(thin), length), self.sets.transpose(*kept, *axes).ravel())

    def grouped(self, shape: Shape, lengths: Array, members: Array) -> Pattern:
        """An array of `shape`; each of its elements unites as many sets as `lengths` says, the next of `members`."""
        starts = np.concatenate(([0, 0], np.cumsum(lengths)))
        chosen = scipy_sparse().csr_array((np.ones(members.size, bool), members, starts), shape=(starts.size - 1, self.table.shape[0]))
        return Pattern(np.arange(1, starts.size - 1).reshape(shape), chosen @ self.table)

    def scattered(self, shape: Shape, places: Array) -> Pattern:
        """An array of `shape` to which each element is added at its place: a flat position from 1, or 0 where it is dropped."""
        flat = places.ravel()
        order = np.argsort(flat, kind="stable")[np.count_nonzero(flat == 0) :]
        members = np.broadcast_to(self.sets, places.shape).ravel()[order]
        return self.grouped(shape, np.bincount(flat, minlength=math.prod(shape) + 1)[1:], members)

    def matrix(self) -> Any:
        """(elements, inputs), boolean CSR with sorted columns."""
        matrix = self.table[self.sets.ravel()]
        matrix.sort_indices()
        return matrix


def with_one_table(patterns: Sequence[Pattern]) -> list[Pattern]:
    """The same patterns with one table."""
    tables = {id(pattern.table): pattern.table for pattern in patterns}
    if len(tables) == 1:
        return list(patterns)
    shifts = dict(zip(tables, np.cumsum([0, *(table.shape[0] for table in tables.values())]).tolist(), strict=False))
    table = scipy_sparse().vstack(list(tables.values()), format="csr")
    return [Pattern(pattern.sets + shifts[id(pattern.table)], table) for pattern in patterns]


def union(patterns: Sequence[Pattern | None], shape: Shape) -> Pattern | None:
    """Arrays combined element by element, with broadcasting to `shape`; None where none of them depends on an input."""
    dependent = [p if p.sets.shape == shape else p.moved(np.broadcast_to(p.sets, shape)) for p in patterns if p is not None]
    return functools.reduce(_union_of_two, dependent) if dependent else None


def _union_of_two(first: Pattern, second: Pattern) -> Pattern:
    first, second = with_one_table((first, second))
    if first.sets is second.sets or np.array_equal(first.sets, second.sets):
        return first
    count = first.table.shape[0]
    pairs, places = np.unique(first.sets * count + second.sets, return_inverse=True)
    united = first.grouped(pairs.shape, np.full(pairs.size, 2), np.stack(np.divmod(pairs, count), -1).ravel())
    return united.moved(united.sets[places].reshape(first.sets.shape))
