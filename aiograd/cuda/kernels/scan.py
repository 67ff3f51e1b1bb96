"""Kernels of cumulative sums, products and linear recurrences.

Arrays are ``(outer, n, inner)`` in C order; line i is ``i // inner, :, i % inner``. A thread goes through one chunk of one line; neighbouring
threads take neighbouring lines. The initial state of a chunk, i.e. the state after the one before it, comes from a scan over the ends of chunks.

``sum``: ``h + x``; ``prod``: ``h * x``; ``linear``: ``x + f * h``, where `f` of the first element is not looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.scalar import TYPES


@functools.lru_cache(maxsize=256)
def ends(kind: str, precision: str, reverse: bool) -> Callable[..., None]:
    """``(end, through, x, f, m, n, inner, length)``: the state after each chunk of `length`, starting from nothing; (chunks, m).

    For ``linear`` also the product of the chunk's factors, by which what enters would have been multiplied.
    """
    T: Any = TYPES[precision]
    is_sum, is_linear = kind == "sum", kind == "linear"
    start = T(0) if is_sum or is_linear else T(1)
    one = T(1)

    def scan_ends(end: Any, through: Any, x: Any, f: Any, m: int, n: int, inner: int, length: int) -> None:
        chunks = (n + length - 1) // length
        for t in range(cuda.grid(1), m * chunks, cuda.gridsize(1)):
            i = t % m
            chunk = t // m
            base = (i // inner) * n * inner + i % inner
            h = start
            product = one
            for p in range(chunk * length, min(n, (chunk + 1) * length)):
                there = base + ((n - 1 - p) if reverse else p) * inner
                v = T(x[there])
                if is_linear:
                    factor = T(f[there])
                    h = v if p == chunk * length else v + factor * h
                    product = product * factor
                elif is_sum:
                    h = h + v
                else:
                    h = h * v
            end[t] = h
            if is_linear:
                through[t] = product

    scan_ends.__name__ = f"{kind}_scan_ends"
    return scan_ends


@functools.lru_cache(maxsize=256)
def apply(kind: str, precision: str, stored: str, reverse: bool, exclusive: bool, carried: bool, guarded: bool) -> Callable[..., None]:
    """``(out, x, f, carry, m, n, inner, length)``: the scan, where ``carry[chunk - 1, i]`` enters each chunk but the first.

    Args:
        exclusive: leave out each element itself: the state before it is written.
        carried: True if there is a carry; else there is one chunk.
        guarded: a state of zero stays zero for every factor: factors that are products of others may have overflowed.
    """
    T: Any = TYPES[precision]
    S: Any = TYPES[stored]
    is_sum, is_linear = kind == "sum", kind == "linear"
    start = T(0) if is_sum or is_linear else T(1)
    zero = T(0)

    def scan_apply(out: Any, x: Any, f: Any, carry: Any, m: int, n: int, inner: int, length: int) -> None:
        chunks = (n + length - 1) // length
        for t in range(cuda.grid(1), m * chunks, cuda.gridsize(1)):
            i = t % m
            chunk = t // m
            base = (i // inner) * n * inner + i % inner
            h = start
            if carried:
                if chunk > 0:
                    h = T(carry[t - m])
            for p in range(chunk * length, min(n, (chunk + 1) * length)):
                there = base + ((n - 1 - p) if reverse else p) * inner
                if exclusive:
                    out[there] = S(h)
                v = T(x[there])
                if is_linear:
                    if p > 0 and not (guarded and h == zero):
                        h = v + T(f[there]) * h
                    else:
                        h = v
                elif is_sum:
                    h = h + v
                else:
                    h = h * v
                if not exclusive:
                    out[there] = S(h)

    scan_apply.__name__ = f"{kind}_scan"
    return scan_apply
