"""Transposed copies in blocks that stay in cache, and rows added into rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types  # type: ignore[import-untyped]

from aiograd.kernels.compiled.jit import kernel, reads, writes

#: side of the blocks of a transposed copy: 64 bytes of float32
_SIDE = 16


@kernel(reads(3), writes(3))
def transpose(x: Any, out: Any, block: int, low: int, high: int) -> None:
    """``out[b, c, r] = x[b, r, c]``; the rows are strips of 16 columns of each matrix.

    Each block is turned in a small buffer, so that whole cache lines are read and written and none is needed twice: lines of one column
    often fall on the same place in the cache.
    """
    rows, columns = x.shape[1], x.shape[2]
    strips = (columns + _SIDE - 1) // _SIDE
    turned = np.empty((_SIDE, _SIDE), x.dtype)
    for strip in range(low, high):
        source, target = x[strip // strips], out[strip // strips]
        first = strip % strips * _SIDE
        width = min(_SIDE, columns - first)
        for top in range(0, rows, _SIDE):
            height = min(_SIDE, rows - top)
            for r in range(height):
                line = source[top + r, first : first + width]
                for c in range(line.size):
                    turned[c, r] = line[c]
            for c in range(width):
                line = target[first + c, top : top + height]
                from_line = turned[c]
                for r in range(line.size):
                    line[r] = from_line[r]


@kernel(reads(2), reads(1, types.int64), writes(2))
def scatter_rows(rows: Any, index: Any, out: Any, block: int, low: int, high: int) -> None:
    """Add each of `rows` into the row of `out` its index names, as far as that is in [low, high)."""
    n = out.shape[1]
    for k in range(low, high):
        out[k, :] = 0
    for i in range(index.size):
        k = index[i]
        if low <= k < high:
            row, line = rows[i], out[k]
            for j in range(n):
                line[j] += row[j]
