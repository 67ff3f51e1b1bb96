"""Kernels of softmax, its logarithm and their gradients.

Arrays are ``(outer, n, inner)`` in C order; result i is the line at ``i // inner, :, i % inner``. Blocks as in `aiograd.cuda.tiles`.

Note [One pass for the normaliser]
    A lane keeps the largest element so far and the sum of exponentials relative to it; a larger element scales the sum. So a line is read
    twice, once for the two numbers and once to be written, rather than three times. While nothing but −inf was seen there is no number to
    subtract, and nothing is added, except NaN.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.scalar import TYPES, function


@functools.lru_cache(maxsize=256)
def forward(precision: str, stored: str, columns: int, lanes: int, along: bool, mode: str) -> Callable[..., None]:
    """``(out, x, m, n, inner)``: softmax along lines.

    Args:
        precision: to compute in.
        stored: dtype of elements.
        columns, lanes, along: of the tile.
        mode: ``softmax``; ``safe``: zeros for a line of −inf; ``log``: the logarithm.
    """
    T: Any = TYPES[precision]
    S: Any = TYPES[stored]
    exp, log = function("exp", precision), function("log", precision)
    threads = columns * lanes
    apart = 1 if along else columns
    lowest, zero, one = T(float("-inf")), T(0), T(1)
    is_log, is_safe = mode == "log", mode == "safe"

    def softmax_forward(out: Any, x: Any, m: int, n: int, inner: int) -> None:
        tid = cuda.threadIdx.x
        lane = tid % lanes if along else tid // columns
        column = tid // lanes if along else tid % columns
        i = cuda.blockIdx.x * columns + column
        base = i * n if along else (i // inner) * n * inner + i % inner
        top = lowest
        total = zero
        if i < m:
            for j in range(lane, n, lanes):
                v = T(x[base + j * inner])
                if v > top:
                    total = total * exp(top - v) + (v - v + one)  # NaN for an infinity, as it is for numpy
                    top = v
                elif v != lowest:
                    total += exp(v - top)
        if lanes > 1:
            tops = cuda.shared.array(threads, T)
            totals = cuda.shared.array(threads, T)
            tops[tid] = top
            totals[tid] = total
            cuda.syncthreads()
            half = lanes // 2
            while half > 0:
                if lane < half:
                    first, second = tops[tid], tops[tid + half * apart]
                    larger = first if first > second else second
                    if larger == lowest:
                        totals[tid] += totals[tid + half * apart]
                    else:
                        totals[tid] = totals[tid] * exp(first - larger) + totals[tid + half * apart] * exp(second - larger)
                    tops[tid] = larger
                cuda.syncthreads()
                half //= 2
            start = tid - lane * apart
            top = tops[start]
            total = totals[start]
        if i < m:
            if is_safe and total == zero:
                for j in range(lane, n, lanes):
                    out[base + j * inner] = S(zero)
            elif is_log:
                shift = log(total)
                for j in range(lane, n, lanes):
                    out[base + j * inner] = S(T(x[base + j * inner]) - top - shift)
            else:
                scale = one / total
                for j in range(lane, n, lanes):
                    out[base + j * inner] = S(exp(T(x[base + j * inner]) - top) * scale)

    softmax_forward.__name__ = f"{mode}_softmax" if mode != "softmax" else mode
    return softmax_forward


@functools.lru_cache(maxsize=256)
def backward(precision: str, stored: str, columns: int, lanes: int, along: bool, is_log: bool) -> Callable[..., None]:
    """``(dx, g, out, m, n, inner)``: the gradient of softmax, or of its logarithm, from its output."""
    T: Any = TYPES[precision]
    S: Any = TYPES[stored]
    exp = function("exp", precision)
    threads = columns * lanes
    apart = 1 if along else columns
    zero = T(0)

    def softmax_backward(dx: Any, g: Any, out: Any, m: int, n: int, inner: int) -> None:
        tid = cuda.threadIdx.x
        lane = tid % lanes if along else tid // columns
        column = tid // lanes if along else tid % columns
        i = cuda.blockIdx.x * columns + column
        base = i * n if along else (i // inner) * n * inner + i % inner
        total = zero
        if i < m:
            for j in range(lane, n, lanes):
                there = base + j * inner
                if is_log:
                    total += T(g[there])
                else:
                    total += T(g[there]) * T(out[there])
        if lanes > 1:
            totals = cuda.shared.array(threads, T)
            totals[tid] = total
            cuda.syncthreads()
            half = lanes // 2
            while half > 0:
                if lane < half:
                    totals[tid] += totals[tid + half * apart]
                cuda.syncthreads()
                half //= 2
            total = totals[tid - lane * apart]
        if i < m:
            for j in range(lane, n, lanes):
                there = base + j * inner
                if is_log:
                    dx[there] = S(T(g[there]) - exp(T(out[there])) * total)
                else:
                    dx[there] = S(T(out[there]) * (T(g[there]) - total))

    softmax_backward.__name__ = "log_softmax_backward" if is_log else "softmax_backward"
    return softmax_backward


@functools.lru_cache(maxsize=256)
def log_sum_exp(precision: str, stored: str, columns: int, lanes: int, along: bool) -> Callable[..., None]:
    """``(out, x, m, n, inner)``: one number for each line; ±inf where the largest element is."""
    T: Any = TYPES[precision]
    S: Any = TYPES[stored]
    exp, log = function("exp", precision), function("log", precision)
    threads = columns * lanes
    apart = 1 if along else columns
    lowest, zero, one = T(float("-inf")), T(0), T(1)

    def logsumexp(out: Any, x: Any, m: int, n: int, inner: int) -> None:
        tid = cuda.threadIdx.x
        lane = tid % lanes if along else tid // columns
        i = cuda.blockIdx.x * columns + (tid // lanes if along else tid % columns)
        base = i * n if along else (i // inner) * n * inner + i % inner
        top = lowest
        total = zero
        if i < m:
            for j in range(lane, n, lanes):
                v = T(x[base + j * inner])
                if v > top:
                    total = total * exp(top - v) + one
                    top = v
                elif v != lowest:
                    total += one if v == top else exp(v - top)
        tops = cuda.shared.array(threads, T)
        totals = cuda.shared.array(threads, T)
        tops[tid] = top
        totals[tid] = total
        cuda.syncthreads()
        half = lanes // 2
        while half > 0:
            if lane < half:
                first, second = tops[tid], tops[tid + half * apart]
                if first == second:
                    totals[tid] += totals[tid + half * apart]
                elif first > second:
                    totals[tid] += totals[tid + half * apart] * exp(second - first)
                else:
                    totals[tid] = totals[tid] * exp(first - second) + totals[tid + half * apart]
                    tops[tid] = second
            cuda.syncthreads()
            half //= 2
        if i < m and lane == 0:
            out[i] = S(tops[tid] + log(totals[tid]))

    return logsumexp
