"""Products of matrices, and rows of dot products.

All of them take any strides, in elements, so that transposed and broadcast views are multiplied where they lie. The matrices of a batch are
counted by two axes, of which `inner` is the length of the second.

Note [Tiles]
    A block computes a tile of ``TILE_M`` by ``TILE_N`` elements. It brings ``TILE_K`` columns of the left and rows of the right operand at a
    time into shared memory, where both lie by `k` first; each thread keeps a small rectangle of the result in registers, made of runs of
    four neighbours, so that a run is read from shared memory at once. What is multiplied next is loaded into registers before the multiplication
    starts. Which way threads go along an operand when they load it is fixed at compile time (``*_by_k``): along its contiguous axis.
    `at` makes an index unsigned, so that it is not asked whether it counts from the end, which would hide the alignment of a run.

Note [Order]
    An element is summed by one thread in ascending order. Where the result is small and the sums are long, the sums are cut into
    parts whose number follows from shapes and the device; the parts are added in their order by a second kernel.

Rejected: atomic sums of the parts (another order each time); tensor cores by inline PTX (cuBLAS has them, and the simulator does not).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.scalar import SIMULATED, TYPES

#: bytes to which tiles are aligned; the simulator knows no alignment
ALIGNED = None if SIMULATED else 16


@functools.lru_cache(maxsize=256)
def tiled(
    number: Any, made: Any, tile_m: int, tile_n: int, tile_k: int, run_m: int, run_n: int, a_by_k: bool, b_by_k: bool, biased: bool
) -> Callable[..., None]:
    """A kernel for products of matrices.

    Args:
        number: numba type in which to multiply and add.
        made: that of the result.
        tile_m, tile_n, tile_k: see Note [Tiles]; powers of two.
        run_m, run_n: rows and columns of the tile that a thread keeps.
        a_by_k, b_by_k: whether threads load neighbours along `k`.
        biased: whether a bias is added.
    """
    across, down = tile_n // run_n, tile_m // run_m
    threads = across * down
    loads_a, loads_b = tile_m * tile_k // threads, tile_n * tile_k // threads
    piece_m, piece_n = min(4, run_m), min(4, run_n)
    shift, mask = across.bit_length() - 1, across - 1
    bits_m, bits_n, bits_k = tile_m.bit_length() - 1, tile_n.bit_length() - 1, tile_k.bit_length() - 1
    last_m, last_n, last_k = tile_m - 1, tile_n - 1, tile_k - 1
    wide_a, wide_b = tile_m + 4, tile_n + 4
    at = TYPES["u8"]

    def gemm(
        out: Any, a: Any, b: Any, bias: Any, m: int, n: int, k: int, chunk: int, batch: int, inner: int, tiles: int, tiles_n: int,
        a_outer: int, a_inner: int, a_m: int, a_k: int, b_outer: int, b_inner: int, b_k: int, b_n: int,
        o_part: int, o_outer: int, o_inner: int, o_m: int, o_n: int, bias_m: int, bias_n: int,
    ) -> None:  # fmt: skip
        left = cuda.shared.array((tile_k, wide_a), number, alignment=ALIGNED)
        right = cuda.shared.array((tile_k, wide_b), number, alignment=ALIGNED)
        total = cuda.local.array((run_m, run_n), number)
        column = cuda.local.array(run_m, number)
        row = cuda.local.array(run_n, number)
        next_a = cuda.local.array(loads_a, number)
        next_b = cuda.local.array(loads_b, number)
        t = cuda.threadIdx.x
        y = t >> shift
        x = t & mask
        block = cuda.blockIdx.x
        tile = block % tiles
        place = (block // tiles) % batch
        part = block // (tiles * batch)
        m0 = (tile // tiles_n) * tile_m
        n0 = (tile % tiles_n) * tile_n
        a0 = (place // inner) * a_outer + (place % inner) * a_inner
        b0 = (place // inner) * b_outer + (place % inner) * b_inner
        start = part * chunk
        stop = min(k, start + chunk)
        for i in range(run_m):
            for j in range(run_n):
                total[i, j] = number(0)
        for k0 in range(start - tile_k, stop, tile_k):
            for r in range(loads_a):
                e = t + r * threads
                if a_by_k:
                    im = m0 + (e >> bits_k)
                    ik = k0 + tile_k + (e & last_k)
                else:
                    im = m0 + (e & last_m)
                    ik = k0 + tile_k + (e >> bits_m)
                next_a[r] = number(0)
                if im < m and ik < stop:
                    next_a[r] = number(a[a0 + im * a_m + ik * a_k])
            for r in range(loads_b):
                e = t + r * threads
                if b_by_k:
                    jn = n0 + (e >> bits_k)
                    jk = k0 + tile_k + (e & last_k)
                else:
                    jn = n0 + (e & last_n)
                    jk = k0 + tile_k + (e >> bits_n)
                next_b[r] = number(0)
                if jn < n and jk < stop:
                    next_b[r] = number(b[b0 + jn * b_n + jk * b_k])
            if k0 >= start:
                for kk in range(tile_k):
                    for i in range(run_m):
                        column[i] = left[at(kk), at((i // piece_m) * (piece_m * down) + y * piece_m + i % piece_m)]
                    for j in range(run_n):
                        row[j] = right[at(kk), at((j // piece_n) * (piece_n * across) + x * piece_n + j % piece_n)]
                    for i in range(run_m):
                        for j in range(run_n):
                            total[i, j] += column[i] * row[j]
            cuda.syncthreads()
            for r in range(loads_a):
                e = t + r * threads
                if a_by_k:
                    left[e & last_k, e >> bits_k] = next_a[r]
                else:
                    left[e >> bits_m, e & last_m] = next_a[r]
            for r in range(loads_b):
                e = t + r * threads
                if b_by_k:
                    right[e & last_k, e >> bits_k] = next_b[r]
                else:
                    right[e >> bits_n, e & last_n] = next_b[r]
            cuda.syncthreads()
        o0 = part * o_part + (place // inner) * o_outer + (place % inner) * o_inner
        for i in range(run_m):
            im = m0 + (i // piece_m) * (piece_m * down) + y * piece_m + i % piece_m
            for j in range(run_n):
                jn = n0 + (j // piece_n) * (piece_n * across) + x * piece_n + j % piece_n
                if im < m and jn < n:
                    if biased:
                        out[o0 + im * o_m + jn * o_n] = made(total[i, j] + number(bias[im * bias_m + jn * bias_n]))
                    else:
                        out[o0 + im * o_m + jn * o_n] = made(total[i, j])

    return gemm


@functools.lru_cache(maxsize=64)
def dots(number: Any, made: Any, rows: int, lanes: int, by_k: bool, biased: bool) -> Callable[..., None]:
    """A kernel for matrices times vectors: a block takes `rows` rows at a time and puts `lanes` threads to each.

    Args:
        number: numba type in which to multiply and add.
        made: that of the result.
        rows, lanes: powers of two.
        by_k: whether neighbouring threads go along the row.
        biased: whether a bias is added.
    """

    def gemv(
        out: Any, a: Any, b: Any, bias: Any, m: int, k: int, chunk: int, count: int, inner: int, blocks: int,
        a_outer: int, a_inner: int, a_m: int, a_k: int, b_outer: int, b_inner: int, b_k: int, o_part: int, bias_m: int,
    ) -> None:  # fmt: skip
        sums = cuda.shared.array((rows, lanes), number)
        t = cuda.threadIdx.x
        if by_k:
            row = t // lanes
            lane = t % lanes
        else:
            row = t % rows
            lane = t // rows
        part = cuda.blockIdx.x // blocks
        place = (cuda.blockIdx.x % blocks) * rows + row
        start = part * chunk
        stop = min(k, start + chunk)
        total = number(0)
        im = place % m
        batch = place // m
        if place < count:
            a0 = (batch // inner) * a_outer + (batch % inner) * a_inner + im * a_m
            b0 = (batch // inner) * b_outer + (batch % inner) * b_inner
            for ik in range(start + lane, stop, lanes):
                total += number(a[a0 + ik * a_k]) * number(b[b0 + ik * b_k])
        sums[row, lane] = total
        width = lanes // 2
        while width > 0:
            cuda.syncthreads()
            if lane < width:
                sums[row, lane] += sums[row, lane + width]
            width //= 2
        if lane == 0 and place < count:
            if biased:
                out[part * o_part + place] = made(sums[row, 0] + number(bias[im * bias_m]))
            else:
                out[part * o_part + place] = made(sums[row, 0])

    return gemv


@functools.lru_cache(maxsize=16)
def joined(number: Any, made: Any, biased: bool) -> Callable[..., None]:
    """A kernel that adds parts of sums in their order, and a bias that goes on every `inner` elements and has `n` of them."""

    def join_parts(out: Any, parts: Any, bias: Any, size: int, count: int, inner: int, n: int) -> None:
        for i in range(cuda.grid(1), size, cuda.gridsize(1)):
            total = number(parts[i])
            for part in range(1, count):
                total += parts[part * size + i]
            if biased:
                total += number(bias[i // inner % n])
            out[i] = made(total)

    return join_parts


@functools.lru_cache(maxsize=16)
def whole(made: Any, logical: bool) -> Callable[..., None]:
    """A kernel for products of matrices of integers or, `logical`, of booleans: a thread for each element."""

    def integer_gemm(
        out: Any, a: Any, b: Any, size: int, m: int, n: int, k: int, inner: int,
        a_outer: int, a_inner: int, a_m: int, a_k: int, b_outer: int, b_inner: int, b_k: int, b_n: int,
    ) -> None:  # fmt: skip
        for i in range(cuda.grid(1), size, cuda.gridsize(1)):
            place = i // (m * n)
            a0 = (place // inner) * a_outer + (place % inner) * a_inner + (i // n) % m * a_m
            b0 = (place // inner) * b_outer + (place % inner) * b_inner + i % n * b_n
            total = made(0)
            for ik in range(k):
                if logical:
                    total = made(total | (a[a0 + ik * a_k] & b[b0 + ik * b_k]))
                else:
                    total = made(total + made(a[a0 + ik * a_k] * b[b0 + ik * b_k]))
            out[i] = total

    return integer_gemm
