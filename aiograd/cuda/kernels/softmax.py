"""Kernels of softmax, its logarithm and their gradients.

Arrays are ``(outer, n, inner)`` in C order; result i is the line at ``i // inner, :, i % inner``. Blocks as in `aiograd.cuda.tiles`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from aiograd.cuda.kernels.block import lane_sum, line_of_thread
from aiograd.cuda.kernels.online_softmax import normaliser
from aiograd.cuda.kernels.scalar import TYPES, function


@functools.lru_cache(maxsize=256)
def forward(precision: str, stored: str, columns: int, lanes: int, along: bool, mode: str) -> Callable[..., None]:
    """``(out, x, m, n, inner)``: softmax along lines.

    Args:
        precision: the precision to compute in.
        stored: dtype of elements.
        columns, lanes, along: of the tile.
        mode: ``softmax``; ``safe``: zeros for a line of −inf; ``log``: the logarithm.
    """
    T: Any = TYPES[precision]
    S: Any = TYPES[stored]
    exp, log = function("exp", precision), function("log", precision)
    line, normalise = line_of_thread(columns, lanes, along), normaliser(precision, columns, lanes, along)
    zero, one = T(0), T(1)
    is_log, is_safe = mode == "log", mode == "safe"

    def softmax_forward(out: Any, x: Any, m: int, n: int, inner: int) -> None:
        tid, lane, i, base = line(n, inner)
        top, total = normalise(x, base, n, inner, tid, lane, i < m)
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
    line, sum_lanes = line_of_thread(columns, lanes, along), lane_sum(T, columns, lanes, along)
    zero = T(0)

    def softmax_backward(dx: Any, g: Any, out: Any, m: int, n: int, inner: int) -> None:
        tid, lane, i, base = line(n, inner)
        total = zero
        if i < m:
            for j in range(lane, n, lanes):
                there = base + j * inner
                if is_log:
                    total += T(g[there])
                else:
                    total += T(g[there]) * T(out[there])
        total = sum_lanes(tid, lane, total)
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
    S: Any = TYPES[stored]
    log = function("log", precision)
    line, normalise = line_of_thread(columns, lanes, along), normaliser(precision, columns, lanes, along, infinite=True)

    def logsumexp(out: Any, x: Any, m: int, n: int, inner: int) -> None:
        tid, lane, i, base = line(n, inner)
        top, total = normalise(x, base, n, inner, tid, lane, i < m)
        if i < m and lane == 0:
            out[i] = S(top + log(total))

    return logsumexp
