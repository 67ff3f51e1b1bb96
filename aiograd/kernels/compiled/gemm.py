"""A large matrix product on blocks of `gemm_microkernel`, with both operands copied into the order in which the blocks read them.

Note [Blocks of a product]
    The sums are cut into depths of at most `_DEPTH`, so that a panel of the right operand (32 kB) stays in a core's first cache while blocks
    of rows of the left operand, at most `_ROWS` at a time, stream past it from the second. Both are copied once per depth: reading them in place
    would take a page per row, or a cache line per number. An element of the result is the sum of its products in the order of the depth, beginning
    with the bias, wherever the result is cut: neither the number of threads nor the other rows and columns change its bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.kernels.compiled.gemm_microkernel import BYTES, ROWS, gemm_microkernel, gemm_microkernel_add
from aiograd.kernels.compiled.jit import inline, kernel, reads, whole, wholes, writes
from aiograd.kernels.compiled.matrix import blocks, round_up
from aiograd.kernels.compiled.transpose import transposed_copy

#: True where blocks of 64-byte vectors outrun the BLAS that comes with numpy, which has 32-byte ones for these CPUs
OUTRUNS_BLAS = BYTES == 64

#: most steps of the sums between two visits to the result
_DEPTH = 256
#: rows of the left operand that are copied at a time, in whole blocks
_ROWS = 128 // ROWS * ROWS
#: columns of the right operand that are copied at a time; a multiple of every width
_COLUMNS = 512


@inline
def _cut(length: int, parts: int, part: int, unit: int) -> tuple[int, int]:
    """Where a part of a length begins and ends, in whole units but for the last."""
    units = blocks(length, unit)
    return min(length, units * part // parts * unit), min(length, units * (part + 1) // parts * unit)


@inline
def _pack(x: Any, lines: int, steps: int, first: int, count: int, start: int, depth: int, size: int, out: Any) -> None:
    """Copy `count` lines from `first` on, `depth` steps from `start` on, into panels of `size` lines, zeros beyond the last.

    Args:
        x: contiguous; the number of line i at step k lies at ``i * lines + k * steps``.
        lines: 1, or with `steps` of 1 any.
        steps: 1, or with `lines` of 1 any.
        out: contiguous; panel p holds at ``(p * depth + k) * size + i`` the number of its line i at step k.
    """
    for panel in range(blocks(count, size)):
        used = min(size, count - panel * size)
        source, target = (first + panel * size) * lines + start * steps, panel * size * depth
        if used < size:
            out[target : target + size * depth] = 0
        if lines == 1:
            for k in range(depth):
                row = x[source + k * steps : source + k * steps + used]
                line = out[target + k * size : target + k * size + used]
                for i in range(used):
                    line[i] = row[i]
        else:
            transposed_copy(x, source, lines, used, depth, out, target, size)


@inline
def _copy(a: Any, a_start: int, a_stride: int, b: Any, b_start: int, b_stride: int, rows: int, columns: int) -> None:
    """Copy a matrix of `rows` x `columns` from one place to another."""
    for r in range(rows):
        for c in range(columns):
            b[b_start + r * b_stride + c] = a[a_start + r * a_stride + c]


@kernel(reads(1), wholes(2), reads(1), wholes(2), reads(1), writes(1), wholes(3), whole, wholes(2))
def gemm(a: Any, a_steps: Any, b: Any, b_steps: Any, bias: Any, out: Any, sizes: Any, width: int, grid: Any, block: int, low: int, high: int) -> None:
    """``out = a @ b + bias`` for the pieces of the result in [low, high). See Note [Blocks of a product].

    Args:
        a: (rows * depth,); its number at (i, k) lies at ``i * a_steps[0] + k * a_steps[1]``, and one of the steps is 1.
        a_steps: see there.
        b: (depth * columns,), likewise at (k, j).
        b_steps: see there.
        bias: (columns,) or empty.
        out: (rows * columns,).
        sizes: rows, depth, columns.
        width: of a panel.
        grid: into how many pieces the rows and the columns are cut.
    """
    rows, depth, columns = sizes
    most = blocks(depth, blocks(depth, _DEPTH))
    row_offsets, depth_offsets = np.arange(ROWS), np.arange(most) * ROWS
    corner = np.empty(ROWS * width, a.dtype)
    packed_rows = np.empty(most * min(_ROWS, round_up(rows)), a.dtype)
    packed_columns = np.empty(most * min(_COLUMNS, blocks(columns, width) * width), a.dtype)
    for piece in range(low, high):
        top, bottom = _cut(rows, grid[0], piece // grid[1], ROWS)
        left, right = _cut(columns, grid[1], piece % grid[1], width)
        for start in range(0, depth, most):
            steps = min(most, depth - start)
            for first_column in range(left, right, _COLUMNS):
                wide = min(_COLUMNS, right - first_column)
                _pack(b, b_steps[1], b_steps[0], first_column, wide, start, steps, width, packed_columns)
                for first_row in range(top, bottom, _ROWS):
                    tall = min(_ROWS, bottom - first_row)
                    _pack(a, a_steps[0], a_steps[1], first_row, tall, start, steps, ROWS, packed_rows)
                    for j in range(0, wide, width):
                        for i in range(0, tall, ROWS):
                            count, used = min(ROWS, tall - i), min(width, wide - j)
                            place = (first_row + i) * columns + first_column + j
                            if start == 0 and bias.size:
                                for r in range(count):
                                    out[place + r * columns : place + r * columns + used] = bias[first_column + j : first_column + j + used]
                            is_whole = count == ROWS and used == width
                            target, offset, stride = (out, place, columns) if is_whole else (corner, 0, width)
                            if start == 0 and not bias.size:
                                gemm_microkernel(
                                    packed_rows, i * steps, row_offsets, 0, depth_offsets, steps, packed_columns, j * steps, target, offset, stride
                                )
                            else:
                                if not is_whole:
                                    _copy(out, place, columns, corner, 0, width, count, used)
                                gemm_microkernel_add(
                                    packed_rows, i * steps, row_offsets, 0, depth_offsets, steps, packed_columns, j * steps, target, offset, stride
                                )
                            if not is_whole:
                                _copy(corner, 0, width, out, place, columns, count, used)
