"""Matrix products inside kernels, on blocks of `gemm_microkernel`; for matrices that are small, oddly laid out, or one of many at once.

Large plain products stay with BLAS.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.kernels.compiled.gemm_microkernel import ROWS, gemm_microkernel
from aiograd.kernels.compiled.jit import inline


@inline
def blocks(count: int, size: int) -> int:
    """How many blocks of `size` cover `count`."""
    return (count + size - 1) // size


@inline
def round_up(count: int) -> int:
    """`count` rounded up to whole blocks of rows."""
    return (count + ROWS - 1) // ROWS * ROWS


@inline
def pack(matrix: Any, panels: Any) -> None:
    """Copy a matrix of shape (depth, columns) into panels of shape (blocks, depth, width), zeros beyond the last column."""
    depth, columns = matrix.shape
    width = panels.shape[2]
    for block in range(panels.shape[0]):
        first = block * width
        count = min(width, columns - first)
        for k in range(depth):
            line = panels[block, k]
            for j in range(count):
                line[j] = matrix[k, first + j]
            for j in range(count, width):
                line[j] = 0


@inline
def pack_transposed(matrix: Any, panels: Any) -> None:
    """`pack` of the transpose: the matrix has shape (columns, depth)."""
    columns, depth = matrix.shape
    width = panels.shape[2]
    for block in range(panels.shape[0]):
        first = block * width
        count = min(width, columns - first)
        panel = panels[block]
        if count < width:
            panel[:, count:] = 0
        for j in range(count):
            for k in range(depth):
                panel[k, j] = matrix[first + j, k]


@inline
def product(a: Any, a_start: int, row_offsets: Any, count: int, depth_offsets: Any, depth: int, panels: Any, columns: int, out: Any) -> None:
    """Write ``count x columns`` sums to the top left of `out`, whole blocks at a time.

    Args:
        a: array that holds the left operand.
        a_start: where in it the operand begins.
        row_offsets: per row, from `a_start`; as many as `count` rounded up to whole blocks.
        count: rows.
        depth_offsets: per step of the sums.
        depth: length of the sums; 0 gives zeros.
        panels: (blocks, >= depth, width), the right operand.
        columns: of the result.
        out: (>= count rounded up, >= columns rounded up), contiguous.
    """
    width = panels.shape[2]
    stride = out.shape[1]
    if depth == 0:
        out[:count, :columns] = 0
        return
    for block in range(blocks(columns, width)):
        for row in range(0, count, ROWS):
            gemm_microkernel(
                a, a_start, row_offsets, row, depth_offsets, depth, panels, block * panels.shape[1] * width,
                out, row * stride + block * width, stride,
            )


@inline
def steps(count: int, stride: int, length: int) -> Any:
    """The table ``0, stride, 2 * stride, ...`` of `count` entries, then the last one repeated up to `length` entries."""
    table = np.empty(length, np.int64)
    for i in range(length):
        table[i] = min(i, count - 1) * stride
    return table
