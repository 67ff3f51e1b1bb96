"""Convolutions as products of matrices: the right operand is read through the windows, without unfolding. Unfolding and folding besides.

Note [One kernel forward and backward]
    An element of the result at place ``(i, j)`` sums, over channels and taps ``(r, s)``, weights times the operand at ``(i · times_y + first_y
    + r · step_y, j · times_x + first_x + s · step_x)``, nothing where that lies outside. Forward, `times` is the stride, `first` the padding
    backwards, `step` the dilation. Backward, places that leave the same rest by the stride see the same taps, at distances that are multiples
    of it: each such set is a convolution with stride 1 and reversed taps, and writes its places of the gradient.

Note [Tiles]
    As in `aiograd.cuda.kernels.gemm`; a thread loads the same column of the right operand each time, so it finds the place once. The number of taps
    is fixed at compile time: an index is taken apart by multiplications then, of unsigned numbers of 32 bits where they suffice.

Rejected: unfolding into memory first (nine times the input for windows of 3×3); transforms after Winograd (they lose digits).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.gemm_microkernel import ALIGNED, PADDING, cleared, gemm_microkernel, place_in_tile, tile_writer
from aiograd.cuda.kernels.scalar import TYPES


@functools.lru_cache(maxsize=256)
def convolved(
    number: Any, made: Any, index: Any, tile_m: int, tile_n: int, tile_k: int, run_m: int, run_n: int, height: int, width: int, biased: bool
) -> Callable[..., None]:
    """A kernel for convolutions; see Note [One kernel forward and backward].

    Args:
        number, made: numba types to compute in, and of the result.
        index: unsigned numba type that counts the places of all images.
        tile_m, tile_n, tile_k, run_m, run_n: powers of two; the threads are a multiple of `tile_n`.
        height, width: the size of the window.
        biased: True if a bias is added.
    """
    across, down = tile_n // run_n, tile_m // run_m
    threads, shift, mask = across * down, across.bit_length() - 1, across - 1
    loads_a, loads_b = tile_m * tile_k // threads, tile_n * tile_k // threads
    size_a, size_b = tile_k * (tile_m + PADDING), tile_k * (tile_n + PADDING)
    place_m, place_n = place_in_tile(run_m, down, min(4, run_m)), place_in_tile(run_n, across, min(4, run_n))
    multiply = gemm_microkernel(number, run_m, run_n, down, across, tile_m + PADDING, tile_n + PADDING)
    clear = cleared(number, run_m, run_n)
    write_a, write_b = tile_writer(tile_m, tile_k, threads, True), tile_writer(tile_n, tile_k, threads, False)
    bits_n, bits_k = tile_n.bit_length() - 1, tile_k.bit_length() - 1
    last_n, last_k = tile_n - 1, tile_k - 1
    skipped = threads // tile_n
    small, whole = TYPES["u4"], TYPES["i8"]
    taps, across_taps = small(height * width), small(width)

    def convolve(
        out: Any, x: Any, weight: Any, bias: Any, m: int, n: int, k: int, chunk: int, groups: int, tiles: int, tiles_n: int, o_part: int,
        rows: int, columns: int, x_height: int, x_width: int,
        times_y: int, times_x: int, first_y: int, first_x: int, step_y: int, step_x: int,
        x_image: int, x_group: int, x_channel: int, x_y: int, x_x: int, w_first: int, w_group: int, w_m: int, w_channel: int, w_y: int, w_x: int,
        o_first: int, o_image: int, o_channel: int, o_y: int, o_x: int,
    ) -> None:  # fmt: skip
        left = cuda.shared.array(size_a, number, alignment=ALIGNED)
        right = cuda.shared.array(size_b, number, alignment=ALIGNED)
        total = cuda.local.array((run_m, run_n), number)
        next_a = cuda.local.array(loads_a, number)
        next_b = cuda.local.array(loads_b, number)
        t = cuda.threadIdx.x
        ty = t >> shift
        tx = t & mask
        tile = cuda.blockIdx.x % tiles
        group = cuda.blockIdx.x // tiles % groups
        part = cuda.blockIdx.x // (tiles * groups)
        start = part * chunk
        stop = min(k, start + chunk)
        m0 = (tile // tiles_n) * tile_m
        n0 = (tile % tiles_n) * tile_n
        mine = n0 + (t & last_n)
        place = index(index(mine) % index(rows * columns))
        y0 = whole(place // index(columns)) * times_y + first_y
        x0 = whole(place % index(columns)) * times_x + first_x
        x_first = whole(index(mine) // index(rows * columns)) * x_image + group * x_group
        weights = w_first + group * w_group
        clear(total)
        for k0 in range(start - tile_k, stop, tile_k):
            for a in range(loads_a):
                e = t + a * threads
                im = m0 + (e >> bits_k)
                ik = k0 + tile_k + (e & last_k)
                next_a[a] = number(0)
                if im < m and ik < stop:
                    tap = small(small(ik) % taps)
                    there = whole(small(ik) // taps) * w_channel + whole(tap // across_taps) * w_y + whole(tap % across_taps) * w_x
                    next_a[a] = number(weight[weights + im * w_m + there])
            for b in range(loads_b):
                jk = k0 + tile_k + (t >> bits_n) + b * skipped
                tap = small(small(jk) % taps)
                yy = y0 + whole(tap // across_taps) * step_y
                xx = x0 + whole(tap % across_taps) * step_x
                next_b[b] = number(0)
                if mine < n and jk < stop and 0 <= yy and yy < x_height and 0 <= xx and xx < x_width:
                    next_b[b] = number(x[x_first + whole(small(jk) // taps) * x_channel + yy * x_y + xx * x_x])
            if k0 >= start:
                multiply(total, left, right, tile_k, ty, tx)
            cuda.syncthreads()
            write_a(left, next_a, t)
            write_b(right, next_b, t)
            cuda.syncthreads()
        for j in range(run_n):
            jn = n0 + place_n(j, tx)
            place = index(index(jn) % index(rows * columns))
            image = whole(index(jn) // index(rows * columns))
            there = part * o_part + o_first + image * o_image + whole(place // index(columns)) * o_y + whole(place % index(columns)) * o_x
            for i in range(run_m):
                im = m0 + place_m(i, ty)
                if im < m and jn < n:
                    if biased:
                        out[there + (group * m + im) * o_channel] = made(total[i, j] + number(bias[group * m + im]))
                    else:
                        out[there + (group * m + im) * o_channel] = made(total[i, j])

    return convolve


@functools.lru_cache(maxsize=256)
def direct(number: Any, made: Any, height: int, width: int, biased: bool) -> Callable[..., None]:
    """A kernel as from `convolved`, with a thread for each element: for groups of so few channels that tiles would be mostly empty."""

    def convolve_each(
        out: Any, x: Any, weight: Any, bias: Any, size: int, channels: int, m: int, depth: int,
        rows: int, columns: int, x_height: int, x_width: int,
        times_y: int, times_x: int, first_y: int, first_x: int, step_y: int, step_x: int,
        x_image: int, x_group: int, x_channel: int, x_y: int, x_x: int, w_first: int, w_group: int, w_m: int, w_channel: int, w_y: int, w_x: int,
        o_first: int, o_image: int, o_channel: int, o_y: int, o_x: int,
    ) -> None:  # fmt: skip
        for e in range(cuda.grid(1), size, cuda.gridsize(1)):
            j = e % columns
            i = e // columns % rows
            channel = e // (columns * rows) % channels
            image = e // (columns * rows * channels)
            group = channel // m
            weights = w_first + group * w_group + channel % m * w_m
            there = image * x_image + group * x_group
            total = number(0)
            for c in range(depth):
                for r in range(height):
                    yy = i * times_y + first_y + r * step_y
                    for s in range(width):
                        xx = j * times_x + first_x + s * step_x
                        if 0 <= yy and yy < x_height and 0 <= xx and xx < x_width:
                            factor = number(weight[weights + c * w_channel + r * w_y + s * w_x])
                            total += factor * number(x[there + c * x_channel + yy * x_y + xx * x_x])
            if biased:
                total += number(bias[channel])
            out[o_first + image * o_image + channel * o_channel + i * o_y + j * o_x] = made(total)

    return convolve_each


@functools.lru_cache(maxsize=256)
def weighed(
    number: Any, made: Any, index: Any, tile_m: int, tile_n: int, tile_k: int, run_m: int, run_n: int, height: int, width: int
) -> Callable[..., None]:
    """A kernel for gradients of weights: rows are output channels, columns are input channels and taps, sums go over the places of all images.

    Args: as of `convolved`; the threads are a multiple of `tile_k`.
    """
    across, down = tile_n // run_n, tile_m // run_m
    threads, shift, mask = across * down, across.bit_length() - 1, across - 1
    loads_a, loads_b = tile_m * tile_k // threads, tile_n * tile_k // threads
    size_a, size_b = tile_k * (tile_m + PADDING), tile_k * (tile_n + PADDING)
    place_m, place_n = place_in_tile(run_m, down, min(4, run_m)), place_in_tile(run_n, across, min(4, run_n))
    multiply = gemm_microkernel(number, run_m, run_n, down, across, tile_m + PADDING, tile_n + PADDING)
    clear = cleared(number, run_m, run_n)
    write_a, write_b = tile_writer(tile_m, tile_k, threads, True), tile_writer(tile_n, tile_k, threads, True)
    bits_k, last_k = tile_k.bit_length() - 1, tile_k - 1
    skipped = threads // tile_k
    small, whole = TYPES["u4"], TYPES["i8"]
    taps, across_taps = small(height * width), small(width)

    def weight_grad(
        out: Any, x: Any, y: Any, m: int, n: int, k: int, chunk: int, groups: int, tiles: int, tiles_n: int,
        rows: int, columns: int, x_height: int, x_width: int,
        times_y: int, times_x: int, first_y: int, first_x: int, step_y: int, step_x: int,
        x_image: int, x_group: int, x_channel: int, x_y: int, x_x: int, y_image: int, y_channel: int, y_y: int, y_x: int,
    ) -> None:  # fmt: skip
        left = cuda.shared.array(size_a, number, alignment=ALIGNED)
        right = cuda.shared.array(size_b, number, alignment=ALIGNED)
        total = cuda.local.array((run_m, run_n), number)
        next_a = cuda.local.array(loads_a, number)
        next_b = cuda.local.array(loads_b, number)
        t = cuda.threadIdx.x
        ty = t >> shift
        tx = t & mask
        tile = cuda.blockIdx.x % tiles
        group = cuda.blockIdx.x // tiles % groups
        part = cuda.blockIdx.x // (tiles * groups)
        m0 = (tile // tiles_n) * tile_m
        n0 = (tile % tiles_n) * tile_n
        start = part * chunk
        stop = min(k, start + chunk)
        clear(total)
        for k0 in range(start - tile_k, stop, tile_k):
            mine = k0 + tile_k + (t & last_k)
            place = index(index(mine) % index(rows * columns))
            image = whole(index(mine) // index(rows * columns))
            i0 = whole(place // index(columns))
            j0 = whole(place % index(columns))
            for a in range(loads_a):
                im = m0 + (t >> bits_k) + a * skipped
                next_a[a] = number(0)
                if im < m and mine < stop:
                    next_a[a] = number(y[image * y_image + (group * m + im) * y_channel + i0 * y_y + j0 * y_x])
            for b in range(loads_b):
                jn = n0 + (t >> bits_k) + b * skipped
                tap = small(small(jn) % taps)
                yy = i0 * times_y + first_y + whole(tap // across_taps) * step_y
                xx = j0 * times_x + first_x + whole(tap % across_taps) * step_x
                next_b[b] = number(0)
                if jn < n and mine < stop and 0 <= yy and yy < x_height and 0 <= xx and xx < x_width:
                    next_b[b] = number(x[image * x_image + group * x_group + whole(small(jn) // taps) * x_channel + yy * x_y + xx * x_x])
            if k0 >= start:
                multiply(total, left, right, tile_k, ty, tx)
            cuda.syncthreads()
            write_a(left, next_a, t)
            write_b(right, next_b, t)
            cuda.syncthreads()
        first = (part * groups + group) * m * n
        for i in range(run_m):
            im = m0 + place_m(i, ty)
            for j in range(run_n):
                jn = n0 + place_n(j, tx)
                if im < m and jn < n:
                    out[first + im * n + jn] = made(total[i, j])

    return weight_grad


def unfold(
    out: Any, x: Any, size: int, channels: int, height: int, width: int, rows: int, columns: int, x_height: int, x_width: int,
    times_y: int, times_x: int, first_y: int, first_x: int, step_y: int, step_x: int, x_image: int, x_channel: int, x_y: int, x_x: int,
) -> None:  # fmt: skip
    """Columns (N, C, taps, windows), contiguous, from images; a thread for each element."""
    for e in range(cuda.grid(1), size, cuda.gridsize(1)):
        j = e % columns
        i = e // columns % rows
        tap = e // (columns * rows) % (height * width)
        plane = e // (columns * rows * height * width)
        yy = i * times_y + first_y + tap // width * step_y
        xx = j * times_x + first_x + tap % width * step_x
        inside = 0 <= yy and yy < x_height and 0 <= xx and xx < x_width
        if inside:
            out[e] = x[plane // channels * x_image + plane % channels * x_channel + yy * x_y + xx * x_x]
        else:
            out[e] = 0


@functools.lru_cache(maxsize=16)
def folded(number: Any, made: Any) -> Callable[..., None]:
    """A kernel that adds columns (N, C, taps, windows), contiguous, where their windows lie; a thread for each element, taps in order."""

    def fold(
        out: Any, x: Any, size: int, height: int, width: int, rows: int, columns: int, o_height: int, o_width: int,
        stride_y: int, stride_x: int, pad_y: int, pad_x: int, step_y: int, step_x: int,
    ) -> None:  # fmt: skip
        for e in range(cuda.grid(1), size, cuda.gridsize(1)):
            xx = e % o_width
            yy = e // o_width % o_height
            first = e // (o_width * o_height) * height * width
            total = number(0)
            for r in range(height):
                i = yy + pad_y - r * step_y
                if i >= 0 and i % stride_y == 0 and i // stride_y < rows:
                    for s in range(width):
                        j = xx + pad_x - s * step_x
                        if j >= 0 and j % stride_x == 0 and j // stride_x < columns:
                            total += number(x[((first + r * width + s) * rows + i // stride_y) * columns + j // stride_x])
            out[e] = made(total)

    return fold
