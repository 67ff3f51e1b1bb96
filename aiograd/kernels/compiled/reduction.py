"""Sums over columns and over rows."""

from __future__ import annotations

from typing import Any

from aiograd.kernels.compiled.jit import kernel, reads, writes


@kernel(reads(2), writes(2))
def column_sum(x: Any, partial: Any, block: int, low: int, high: int) -> None:
    """The sum of each column over the block's rows."""
    n = x.shape[1]
    line = partial[block]
    line[:] = 0
    i = low
    while i + 4 <= high:
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        for j in range(n):
            line[j] += (a[j] + b[j]) + (c[j] + d[j])
        i += 4
    while i < high:
        a = x[i]
        for j in range(n):
            line[j] += a[j]
        i += 1


@kernel(reads(2), writes(1), sums=True)
def row_sum(x: Any, out: Any, block: int, low: int, high: int) -> None:
    """The sum of each row."""
    n = x.shape[1]
    for i in range(low, high):
        row = x[i]
        total = x.dtype.type(0)
        for j in range(n):
            total += row[j]
        out[i] = total
