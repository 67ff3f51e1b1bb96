"""Products of matrices, and rows of dot products.

All of them take any strides, in elements, so that transposed and broadcast views are multiplied where they lie. The matrices of a batch are
counted by two axes, of which `inner` is the length of the second.

Note [Tiles]
    A block computes a tile of ``TILE_M`` by ``TILE_N`` elements. It brings ``TILE_K`` columns of the left and rows of the right operand at a
    time into shared memory, where `aiograd.cuda.kernels.gemm_microkernel` multiplies them; the next operands are loaded into registers before it
    starts. Which way threads go along an operand when they load it is fixed at compile time (``*_by_k``): along its contiguous axis.

Note [Order]
    An element is summed by one thread in ascending order. Where the result is small and the sums are long, the sums are cut into parts; their number
    follows from shapes and the device, and a second kernel adds them in order.

Rejected: atomic sums of the parts (another order each time); tensor cores by inline PTX (cuBLAS has them, and the simulator does not).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.block import lane_sum
from aiograd.cuda.kernels.device_function import device_function
from aiograd.cuda.kernels.gemm_microkernel import ALIGNED, PADDING, cleared, gemm_microkernel, place_in_tile, tile_writer


@functools.cache
def _loader(number: Any, tile: int, tile_k: int, threads: int, by_k: bool) -> Callable[..., Any]:
    """A device function that brings a thread's part of a tile into registers.

    Its arguments are ``(loaded, source, base, first, first_k, count, stop, stride, stride_k, t)``: rows or columns from `first` on and `k` from
    `first_k` on, zeros from `count` and `stop` on.
    """
    loads = tile * tile_k // threads
    bits, last = (tile_k if by_k else tile).bit_length() - 1, (tile_k if by_k else tile) - 1

    @device_function
    def load(loaded: Any, source: Any, base: int, first: int, first_k: int, count: int, stop: int, stride: int, stride_k: int, t: int) -> None:
        for r in range(loads):
            e = t + r * threads
            if by_k:
                i = first + (e >> bits)
                k = first_k + (e & last)
            else:
                i = first + (e & last)
                k = first_k + (e >> bits)
            loaded[r] = number(0)
            if i < count and k < stop:
                loaded[r] = number(source[base + i * stride + k * stride_k])

    return load


@functools.lru_cache(maxsize=256)
def tiled(
    number: Any, made: Any, tile_m: int, tile_n: int, tile_k: int, run_m: int, run_n: int, a_by_k: bool, b_by_k: bool, biased: bool
) -> Callable[..., None]:
    """A kernel for products of matrices.

    Args:
        number: numba type in which to multiply and add.
        made: numba type of the result.
        tile_m, tile_n, tile_k: see Note [Tiles]; powers of two.
        run_m, run_n: rows and columns of the tile that a thread keeps.
        a_by_k, b_by_k: True if threads load neighbours along `k`.
        biased: True if a bias is added.
    """
    across, down = tile_n // run_n, tile_m // run_m
    threads, shift, mask = across * down, across.bit_length() - 1, across - 1
    loads_a, loads_b = tile_m * tile_k // threads, tile_n * tile_k // threads
    size_a, size_b = tile_k * (tile_m + PADDING), tile_k * (tile_n + PADDING)
    place_m, place_n = place_in_tile(run_m, down, min(4, run_m)), place_in_tile(run_n, across, min(4, run_n))
    multiply = gemm_microkernel(number, run_m, run_n, down, across, tile_m + PADDING, tile_n + PADDING)
    clear = cleared(number, run_m, run_n)
    load_a, load_b = _loader(number, tile_m, tile_k, threads, a_by_k), _loader(number, tile_n, tile_k, threads, b_by_k)
    write_a, write_b = tile_writer(tile_m, tile_k, threads, a_by_k), tile_writer(tile_n, tile_k, threads, b_by_k)

    def gemm(
        out: Any, a: Any, b: Any, bias: Any, m: int, n: int, k: int, chunk: int, batch: int, inner: int, tiles: int, tiles_n: int,
        a_outer: int, a_inner: int, a_m: int, a_k: int, b_outer: int, b_inner: int, b_k: int, b_n: int,
        o_part: int, o_outer: int, o_inner: int, o_m: int, o_n: int, bias_m: int, bias_n: int,
    ) -> None:  # fmt: skip
        left = cuda.shared.array(size_a, number, alignment=ALIGNED)
        right = cuda.shared.array(size_b, number, alignment=ALIGNED)
        total = cuda.local.array((run_m, run_n), number)
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
        clear(total)
        for k0 in range(start - tile_k, stop, tile_k):
            load_a(next_a, a, a0, m0, k0 + tile_k, m, stop, a_m, a_k, t)
            load_b(next_b, b, b0, n0, k0 + tile_k, n, stop, b_n, b_k, t)
            if k0 >= start:
                multiply(total, left, right, tile_k, y, x)
            cuda.syncthreads()
            write_a(left, next_a, t)
            write_b(right, next_b, t)
            cuda.syncthreads()
        o0 = part * o_part + (place // inner) * o_outer + (place % inner) * o_inner
        for i in range(run_m):
            im = m0 + place_m(i, y)
            for j in range(run_n):
                jn = n0 + place_n(j, x)
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
        made: numba type of the result.
        rows, lanes: powers of two.
        by_k: True if neighbouring threads go along the row.
        biased: True if a bias is added.
    """
    sum_lanes = lane_sum(number, rows, lanes, by_k)

    def gemv(
        out: Any, a: Any, b: Any, bias: Any, m: int, k: int, chunk: int, count: int, inner: int, blocks: int,
        a_outer: int, a_inner: int, a_m: int, a_k: int, b_outer: int, b_inner: int, b_k: int, o_part: int, bias_m: int,
    ) -> None:  # fmt: skip
        t = cuda.threadIdx.x
        row = t // lanes if by_k else t % rows
        lane = t % lanes if by_k else t // rows
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
        total = sum_lanes(t, lane, total)
        if lane == 0 and place < count:
            if biased:
                out[part * o_part + place] = made(total + number(bias[im * bias_m]))
            else:
                out[part * o_part + place] = made(total)

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
