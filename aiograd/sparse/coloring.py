"""Greedy coloring of the columns of a matrix, those with the most entries first.

Columns without a row in common may have one color: in the product of the matrix with the sum of their unit vectors each row shows the entry of one
column alone. The number of colors is at least the largest number of entries in a row.

Source: Curtis, Powell, Reid (1974); Coleman and Moré (1983), whose first order this is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.running.types import Array


def color_columns(pattern: Any) -> Array:
    """A color for each column, from 0.

    Args:
        pattern: boolean CSC or CSR.

    Returns:
        (columns,), integers.
    """
    columns = pattern.tocsc()
    rows, starts = columns.indices.tolist(), columns.indptr
    order = np.argsort(-np.diff(starts), kind="stable").tolist()
    starts = starts.tolist()
    colors = np.zeros(len(order), np.int64)
    #: of each row the colors of its columns, one bit for each
    used = [0] * pattern.shape[0]
    for column in order:
        mine = rows[starts[column] : starts[column + 1]]
        taken = 0
        for row in mine:
            taken |= used[row]
        free = ~taken & (taken + 1)  # the lowest bit that is 0
        for row in mine:
            used[row] |= free
        colors[column] = free.bit_length() - 1
    return colors
