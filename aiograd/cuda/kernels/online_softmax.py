"""The two numbers that softmax needs of a line, its largest element and the sum of exponentials relative to it, in one pass.

Note [One pass]
    A larger element scales the sum. So a line is read twice, once for the two numbers and once to be written, rather than three times. While
    nothing but −inf was seen there is no number to subtract, and nothing is added, except NaN.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.device_function import device_function
from aiograd.cuda.kernels.scalar import TYPES, function


@functools.cache
def shrinkage(number: Any, exp: Any) -> Callable[..., Any]:
    """A device function ``(before, top)``: the factor for a sum relative to `before` when `top`, not less, takes its place.

    Args:
        number: numba type to compute in.
        exp: the function of that precision.
    """
    one = number(1)

    @device_function
    def shrink(before: Any, top: Any) -> Any:
        factor = one
        if before != top:  # both may be infinite
            factor = exp(before - top)
        return factor

    return shrink


@functools.cache
def normaliser(precision: str, columns: int, lanes: int, along: bool, infinite: bool = False) -> Callable[..., Any]:
    """A device function ``(x, base, n, inner, tid, lane, inside)``: the largest element of a line and its sum, for each of the lanes.

    Args:
        precision: the precision to compute in.
        columns, lanes, along: of the block, see `aiograd.cuda.kernels.block`.
        infinite: True if infinity has a sum (of ones for each); else it is NaN, as it is for numpy.
    """
    T: Any = TYPES[precision]
    exp = function("exp", precision)
    shrink = shrinkage(T, exp)
    threads = columns * lanes
    apart = 1 if along else columns
    lowest, zero, one = T(float("-inf")), T(0), T(1)

    @device_function
    def normalise(x: Any, base: int, n: int, inner: int, tid: int, lane: int, inside: bool) -> Any:
        top = lowest
        total = zero
        if inside:
            for j in range(lane, n, lanes):
                v = T(x[base + j * inner])
                if v > top:
                    total = total * exp(top - v) + (one if infinite else v - v + one)
                    top = v
                elif v != lowest:
                    total += one if infinite and v == top else exp(v - top)
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
                    totals[tid] = totals[tid] * shrink(first, larger) + totals[tid + half * apart] * shrink(second, larger)
                    tops[tid] = larger
                cuda.syncthreads()
                half //= 2
            top, total = tops[tid - lane * apart], totals[tid - lane * apart]
        return top, total

    return normalise
