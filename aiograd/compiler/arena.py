"""Arenas: memory that a program's forward computes in, used again by later calls.

Note [Owners of an arena]
    A call takes an arena from the pool of its program, or a new one where none is free, so any number of calls may be in flight. It belongs to the
    node of the call and to each run of that node: a graph that is retained keeps it, and a thread that goes on after its pass was cancelled never
    reads what another call has written. When the last of them is done, the arena goes back to the pool; if the pool is full, it is freed.

Note [What lies in an arena]
    Values that only the program itself reads: intermediate values and values saved for the backward. Not the results, which the caller keeps, nor
    anything that may share memory with them, with arguments or with captured Tensors. Where a gradient that a pass returns may share memory with a
    saved value, the arena of that call is never used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.compiler.calls import Ref

#: bytes of all arenas that one pool keeps, and how many
MOST_BYTES = 1 << 24
MOST_FREE = 8


class _Memory:
    """The arrays of an arena."""

    __slots__ = ("arrays", "__weakref__")

    def __init__(self, arrays: tuple[Any, ...]) -> None:
        self.arrays = arrays


class ArenaPool:
    """The free arenas of one program.

    Args:
        layout: one array per Ref is needed.
    """

    __slots__ = ("_layout", "_free", "_most", "_all", "arena_bytes")

    def __init__(self, layout: Sequence[Ref]) -> None:
        self._layout = [(ref.shape, ref.dtype) for ref in layout]
        #: bytes of one arena
        self.arena_bytes = sum([ref.nbytes for ref in layout])
        self._most = min(MOST_FREE, MOST_BYTES // max(self.arena_bytes, 1))
        self._free: list[_Memory] = []
        self._all: weakref.WeakSet[_Memory] = weakref.WeakSet()

    def take(self) -> Arena | None:
        """An arena that is not in use; None if the program needs none."""
        if not self._layout:
            return None
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _Memory(tuple([np.empty(shape, dtype) for shape, dtype in self._layout]))
            self._all.add(memory)
        return Arena(memory, self)

    def put_back(self, memory: _Memory) -> None:
        """Keep the memory of an arena for later calls."""
        if len(self._free) < self._most:
            self._free.append(memory)

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas that are free or in use."""
        return len(self._all) * self.arena_bytes


class Arena:
    """The memory of one call. See the module's Notes.

    Args:
        memory: its arrays.
        pool: the pool that the arrays come from.

    Attributes:
        arrays: the arrays to write into.
        is_shared: True if another call or node may use a part of the memory.
    """

    __slots__ = ("arrays", "is_shared", "_memory", "_pool")

    def __init__(self, memory: _Memory, pool: ArenaPool) -> None:
        self.arrays = memory.arrays
        self.is_shared = False
        self._memory = memory
        self._pool = pool

    def __del__(self) -> None:
        if not self.is_shared:
            self._pool.put_back(self._memory)
