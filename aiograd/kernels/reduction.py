"""Sums of columns, rows and channels: the sums in gradients of biases."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.arrays import as_rows
from aiograd.kernels.pool import partition, run
from aiograd.kernels.selection import compiled

NDArray = npt.NDArray[Any]


def _sum(x: NDArray, axis: int | tuple[int, ...] | None) -> NDArray:
    total: NDArray = np.add.reduce(x, axis=axis)
    return total


def column_sum(x: NDArray) -> NDArray:
    """Sum over the first axis.

    Args:
        x: (rows, n).

    Returns:
        (n,).
    """
    rows, n = x.shape
    kernels = compiled(x.size, x)
    if kernels is None:
        return _sum(x, 0)
    partial = np.empty((partition(rows, x.size)[0], n), x.dtype)
    run(kernels.reduction.column_sum, rows, x.size, as_rows(x, n), partial)
    return _sum(partial, 0)


def row_sum(x: NDArray) -> NDArray:
    """Sum over the last axis.

    Args:
        x: (rows, n).

    Returns:
        (rows,).
    """
    kernels = compiled(x.size, x)
    if kernels is None:
        return _sum(x, 1)
    out = np.empty(len(x), x.dtype)
    run(kernels.reduction.row_sum, len(x), x.size, as_rows(x, x.shape[1]), out)
    return out


def channel_sum(x: NDArray) -> NDArray:
    """Sum over all axes but the second.

    Args:
        x: (N, C, ...).

    Returns:
        (C,).
    """
    n, c = x.shape[:2]
    if x.size == 0 or compiled(x.size, x) is None:
        return _sum(x, (0, *range(2, x.ndim)))
    return _sum(row_sum(as_rows(x, x.size // (n * c))).reshape(n, c), 0)


def total(x: NDArray) -> NDArray:
    """Sum of all elements, 0-d; compiled: of rows of 4096 first."""
    kernels = compiled(x.size, x)
    if kernels is None or not x.flags.c_contiguous:
        return _sum(x, None)
    line = x.reshape(-1)
    whole = line.size // 4096 * 4096
    return _sum(np.append(row_sum(line[:whole].reshape(-1, 4096)), _sum(line[whole:], None)), None)
