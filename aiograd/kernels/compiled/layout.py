"""Transposed copies in blocks that stay in cache, and rows added into rows."""

from __future__ import annotations

from typing import Any

from numba import types  # type: ignore[import-untyped]

from aiograd.kernels.compiled.jit import kernel, reads, writes

#: sides of the blocks of a transposed copy: 64 bytes of float32 per line, many lines
_SHORT, _LONG = 16, 64


@kernel(reads(3), writes(3))
def transpose(x: Any, out: Any, block: int, low: int, high: int) -> None:
    """``out[b, c, r] = x[b, r, c]``; the rows are strips of 16 columns of each matrix."""
    rows, columns = x.shape[1], x.shape[2]
    strips = (columns + _SHORT - 1) // _SHORT
    for strip in range(low, high):
        source, target = x[strip // strips], out[strip // strips]
        first = strip % strips * _SHORT
        last = min(first + _SHORT, columns)
        for top in range(0, rows, _LONG):
            bottom = min(top + _LONG, rows)
            for c in range(first, last):
                line = target[c]
                for r in range(top, bottom):
                    line[r] = source[r, c]


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
