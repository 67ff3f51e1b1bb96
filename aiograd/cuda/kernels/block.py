"""Operations that the threads of a block do together where each line of elements is shared by lanes; see `aiograd.cuda.tiles`.

Lines lie in arrays of ``(outer, n, inner)`` in C order: line i has its elements at ``i // inner, :, i % inner``. All threads of a block call these
functions, once between two barriers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.device_function import device_function


@functools.cache
def line_of_thread(columns: int, lanes: int, along: bool) -> Callable[..., Any]:
    """A device function ``(n, inner)``: the thread's number, its lane, its line and where that begins."""

    @device_function
    def line(n: int, inner: int) -> Any:
        tid = cuda.threadIdx.x
        lane = tid % lanes if along else tid // columns
        i = cuda.blockIdx.x * columns + (tid // lanes if along else tid % columns)
        base = i * n if along else (i // inner) * n * inner + i % inner
        return tid, lane, i, base

    return line


@functools.cache
def lane_sum(T: Any, columns: int, lanes: int, along: bool) -> Callable[..., Any]:
    """A device function ``(tid, lane, value)``: the sum, in the numba type `T`, over the lanes of a line, for each of them."""
    threads = columns * lanes
    apart = 1 if along else columns

    @device_function
    def sum_lanes(tid: int, lane: int, value: Any) -> Any:
        total = value
        if lanes > 1:
            sums = cuda.shared.array(threads, T)
            sums[tid] = value
            cuda.syncthreads()
            half = lanes // 2
            while half > 0:
                if lane < half:
                    sums[tid] += sums[tid + half * apart]
                cuda.syncthreads()
                half //= 2
            total = sums[tid - lane * apart]
        return total

    return sum_lanes


@functools.cache
def lane_sums(T: Any, columns: int, lanes: int, along: bool) -> Callable[..., Any]:
    """A device function ``(tid, lane, first, second)``: two sums, as of `lane_sum`, with the barriers of one."""
    threads = columns * lanes
    apart = 1 if along else columns

    @device_function
    def sum_lanes(tid: int, lane: int, first: Any, second: Any) -> Any:
        total, other = first, second
        if lanes > 1:
            sums = cuda.shared.array(threads, T)
            others = cuda.shared.array(threads, T)
            sums[tid] = first
            others[tid] = second
            cuda.syncthreads()
            half = lanes // 2
            while half > 0:
                if lane < half:
                    sums[tid] += sums[tid + half * apart]
                    others[tid] += others[tid + half * apart]
                cuda.syncthreads()
                half //= 2
            total, other = sums[tid - lane * apart], others[tid - lane * apart]
        return total, other

    return sum_lanes
