"""Products of tiles in shared memory, each thread's part of the result in registers; and what brings tiles there.

Note [Tiles]
    A tile lies by `k` first, with `step` elements from one `k` to the next: neighbours then are read from shared memory at once. A thread keeps
    a small rectangle of the result, made of pieces of up to four neighbours, so that neighbouring threads read neighbouring pieces.
    `at` makes an index unsigned, so that it is not asked whether it counts from the end, which would hide the alignment of a piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.device_function import device_function
from aiograd.cuda.kernels.scalar import SIMULATED, TYPES

#: bytes to which tiles are aligned; the simulator knows no alignment
ALIGNED = None if SIMULATED else 16
#: elements between the end of one `k` and the start of the next, which keep threads off each other's banks
PADDING = 4


@functools.cache
def place_in_tile(run: int, threads: int, piece: int) -> Callable[..., Any]:
    """A device function ``(i, thread)``: where the i-th of the `run` rows or columns of a thread is in its tile."""

    @device_function
    def place(i: int, thread: int) -> Any:
        return (i // piece) * (piece * threads) + thread * piece + i % piece

    return place


@functools.cache
def gemm_microkernel(
    number: Any, run_m: int, run_n: int, down: int, across: int, step_a: int, step_b: int, piece_m: int | None = None, piece_n: int | None = None
) -> Callable[..., Any]:
    """A device function ``(total, left, right, depth, y, x)`` that adds the product of two tiles to a thread's part of the result.

    Args:
        number: numba type of all elements.
        run_m, run_n: rows and columns of a thread.
        down, across: threads along rows and columns.
        step_a, step_b: see Note [Tiles].
        piece_m, piece_n: neighbours in a piece; by default four or all.
    """
    place_m = place_in_tile(run_m, down, piece_m or min(4, run_m))
    place_n = place_in_tile(run_n, across, piece_n or min(4, run_n))
    at = TYPES["u8"]

    @device_function
    def multiply(total: Any, left: Any, right: Any, depth: int, y: int, x: int) -> None:
        column = cuda.local.array(run_m, number)
        row = cuda.local.array(run_n, number)
        for k in range(depth):
            for i in range(run_m):
                column[i] = left[at(k * step_a + place_m(i, y))]
            for j in range(run_n):
                row[j] = right[at(k * step_b + place_n(j, x))]
            for i in range(run_m):
                for j in range(run_n):
                    total[i, j] += column[i] * row[j]

    return multiply


@functools.cache
def cleared(number: Any, run_m: int, run_n: int) -> Callable[..., Any]:
    """A device function ``(total)`` that sets a thread's part of a result to zeros."""

    @device_function
    def clear(total: Any) -> None:
        for i in range(run_m):
            for j in range(run_n):
                total[i, j] = number(0)

    return clear


@functools.cache
def tile_writer(tile: int, tile_k: int, threads: int, by_k: bool) -> Callable[..., Any]:
    """A device function ``(target, loaded, t)`` that writes the elements loaded by the threads, ``t + r * threads`` each, into a tile.

    Args:
        tile, tile_k: extents, powers of two.
        threads: of the block.
        by_k: True if neighbouring threads loaded neighbours along `k`.
    """
    loads, step = tile * tile_k // threads, tile + PADDING
    bits, last = (tile_k if by_k else tile).bit_length() - 1, (tile_k if by_k else tile) - 1
    at = TYPES["u8"]

    @device_function
    def write(target: Any, loaded: Any, t: int) -> None:
        for r in range(loads):
            e = t + r * threads
            if by_k:
                target[at((e & last) * step + (e >> bits))] = loaded[r]
            else:
                target[at((e >> bits) * step + (e & last))] = loaded[r]

    return write


@functools.cache
def tile_loader(number: Any, rows: int, width: int, step: int, threads: int, by_row: bool) -> Callable[..., Any]:
    """A device function ``(tile, source, base, first, count, features, stride_row, stride_feature, t)`` that brings rows into shared memory.

    Rows from `first` on and features from 0 on; there are zeros from row `count` and feature `features` on.

    Args:
        number: numba type of the tile.
        rows, width: of the tile; the width is a power of two.
        step: elements from one feature to the next or, `by_row`, from one row to the next.
        threads: of the block.
        by_row: True if the tile lies by row first, rather than by feature.
    """
    bits, last = width.bit_length() - 1, width - 1

    @device_function
    def load(tile: Any, source: Any, base: int, first: int, count: int, features: int, stride_row: int, stride_feature: int, t: int) -> None:
        for e in range(t, rows * width, threads):
            r = e >> bits
            f = e & last
            value = number(0)
            if first + r < count and f < features:
                value = number(source[base + (first + r) * stride_row + f * stride_feature])
            if by_row:
                tile[r * step + f] = value
            else:
                tile[f * step + r] = value

    return load
