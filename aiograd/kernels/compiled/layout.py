"""Transposed copies of matrices, and rows added into rows."""

from __future__ import annotations

from typing import Any

from numba import types

from aiograd.kernels.compiled.jit import kernel, reads, writes
from aiograd.kernels.compiled.transpose import transposed_copy

#: rows and columns turned together: whole cache lines on both sides
_LINE = 16


@kernel(reads(3), writes(3))
def transpose(x: Any, out: Any, block: int, low: int, high: int) -> None:
    """``out[b, c, r] = x[b, r, c]``; the rows are strips of 16 columns of each matrix."""
    rows, columns = x.shape[1], x.shape[2]
    strips = (columns + _LINE - 1) // _LINE
    for strip in range(low, high):
        start = strip // strips * rows * columns
        first = strip % strips * _LINE
        for top in range(0, rows, _LINE):
            transposed_copy(
                x, start + top * columns + first, columns, min(_LINE, rows - top), min(_LINE, columns - first), out,
                start + first * rows + top, rows,
            )


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
