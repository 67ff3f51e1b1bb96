"""Rows added into the rows of a matrix: the gradient of a look-up."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.arrays import as_rows
from aiograd.kernels.pool import run
from aiograd.kernels.selection import compiled

NDArray = npt.NDArray[Any]


def scatter_rows(rows: NDArray, index: NDArray, count: int) -> NDArray:
    """Add each row into the row of the result that its index names, in order.

    Args:
        rows: (m, n).
        index: (m,), integers in [0, count).
        count: rows of the result.

    Returns:
        (count, n).
    """
    n = rows.shape[1]
    kernels = compiled(rows.size + count * n, rows)
    if kernels is not None:
        out = np.empty((count, n), rows.dtype)
        run(kernels.layout.scatter_rows, count, rows.size + count * n, as_rows(rows, n), np.ascontiguousarray(index, np.int64), out)
        return out
    out = np.zeros((count, n), rows.dtype)
    np.add.at(out, index, rows)
    return out
