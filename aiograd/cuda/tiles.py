"""Tiles: how the threads of a block share rows that are each brought down to few numbers.

Note [Columns and lanes]
    A kernel that reduces is a matrix of `m` results from `n` elements each. A block takes `columns` results, and each of them is shared by `lanes`
    threads, which go through its elements side by side and then add up in a tree. Neighbouring threads should read neighbouring memory: where
    the elements of one result are neighbours, so are its lanes (`along`), else the columns are.

    Few long rows would leave most of a device idle: then the elements are cut into `parts`, each with a block of its own, and a second launch
    combines their results. Nothing depends on values or on timing, so the same shape is always added in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aiograd.cuda.driver.protocol import Properties

#: elements that a lane takes at a time
UNROLLED = 4
#: elements that a lane should have before a row is cut
_WORTHWHILE = 16
#: blocks per multiprocessor that keep it busy
_BUSY = 8
#: results that neighbouring threads should write or read together
_COALESCED = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """How a block is laid over results and their elements; see Note [Columns and lanes]."""

    columns: int
    lanes: int
    #: True if neighbouring threads are lanes of one result
    along: bool
    #: pieces that the elements of a result are cut into
    parts: int
    #: elements in a piece
    chunk: int
    #: blocks along the results
    blocks: int

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of blocks: along the results, and along the parts."""
        return self.blocks, self.parts

    @property
    def block(self) -> int:
        """Numbers of threads of a block."""
        return self.columns * self.lanes


def tile(properties: Properties, m: int, n: int, *, along: bool, cut: bool = True) -> Tile:
    """The tile for `m` results of `n` elements each, both at least 1.

    Args:
        properties: the properties of the device.
        m, n: results, and elements of each.
        along: True if the elements of a result are neighbours in memory, rather than the results.
        cut: True if long rows may be cut.
    """
    threads = properties.threads
    wanted = min(threads, _power_of_two(math.ceil(n / UNROLLED)))
    if along:
        lanes = wanted
    else:
        neighbours = max(2, min(_COALESCED, threads // 4))
        lanes = min(wanted, threads // min(neighbours, _power_of_two(m)))
    columns = threads // lanes
    blocks = math.ceil(m / columns)
    parts = 1
    busy = properties.multiprocessors * _BUSY
    if cut and blocks * 2 <= busy:
        parts = max(1, min(busy // blocks, n // (lanes * _WORTHWHILE)))
    return Tile(columns, lanes, along, parts, math.ceil(n / parts), blocks)


def _power_of_two(value: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()
