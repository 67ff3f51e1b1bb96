"""Kernels of losses with integer targets: cross entropy from logits, and the choice of log-probabilities.

Logits are ``(outer, classes, inner)`` in C order; sample i is the line at ``i // inner, :, i % inner``, and so are its target and its loss.

Targets that came from the host were checked there. Checking a target on the device would mean waiting for it, so a target that is no class makes its
sample's loss and gradient NaN, and no memory is read for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.block import lane_sum, line_of_thread
from aiograd.cuda.kernels.online_softmax import normaliser
from aiograd.cuda.kernels.scalar import TYPES, function


@functools.lru_cache(maxsize=256)
def cross_entropy(precision: str, columns: int, lanes: int, along: bool, weighted: bool, smooth: bool) -> Callable[..., None]:
    """``(loss, count, shift, x, target, weight, m, n, inner, ignored, hard, even)``.

    The loss of each sample, how much it counts in a mean, and the logarithm of the sum of its exponentials. `hard` is the weight of the target,
    `even` the weight of each class.
    """
    T: Any = TYPES[precision]
    log = function("log", precision)
    line, normalise = line_of_thread(columns, lanes, along), normaliser(precision, columns, lanes, along)
    sum_lanes = lane_sum(T, columns, lanes, along)
    zero, one, nan = T(0), T(1), T(float("nan"))

    def cross_entropy_forward(
        loss: Any, count: Any, shift: Any, x: Any, target: Any, weight: Any, m: int, n: int, inner: int, ignored: int, hard: Any, even: Any
    ) -> None:
        tid, lane, i, base = line(n, inner)
        top, total = normalise(x, base, n, inner, tid, lane, i < m)
        level = top + log(total)
        spread = zero
        if smooth:
            if i < m:
                for j in range(lane, n, lanes):
                    share = T(weight[j]) if weighted else one
                    if share != zero:
                        spread += share * (level - T(x[base + j * inner]))
            spread = sum_lanes(tid, lane, spread)
        if i < m and lane == 0:
            shift[i] = level
            chosen = target[i]
            result = zero
            share = zero
            if chosen != ignored:
                if chosen < 0 or chosen >= n:
                    share = nan
                    result = nan
                else:
                    share = T(weight[chosen]) if weighted else one
                    factor = hard * share
                    if factor != zero:
                        result = factor * (level - T(x[base + chosen * inner]))
                    if smooth:
                        result += even * spread
            loss[i] = result
            count[i] = share

    return cross_entropy_forward


@functools.lru_cache(maxsize=256)
def cross_entropy_backward(precision: str, stored: str, columns: int, lanes: int, along: bool, weighted: bool, each: bool) -> Callable[..., None]:
    """``(dx, g, x, shift, target, weight, m, n, inner, ignored, hard, even, total, by)``: the gradient of the logits.

    Args:
        each: True if there is a gradient per sample, rather than one for all; it is divided by `by`. `total` is the sum of all weights.
    """
    T: Any = TYPES[precision]
    S: Any = TYPES[stored]
    exp = function("exp", precision)
    zero, one, nan = T(0), T(1), T(float("nan"))
    line = line_of_thread(columns, lanes, along)

    def cross_entropy_logits(
        dx: Any, g: Any, x: Any, shift: Any, target: Any, weight: Any, m: int, n: int, inner: int, ignored: int, hard: Any, even: Any, total: Any,
        by: Any,
    ) -> None:
        _, lane, i, base = line(n, inner)
        if i < m:
            chosen = target[i]
            kept = chosen != ignored
            scale, peak, level, normaliser = zero, zero, zero, shift[i]
            if kept and (chosen < 0 or chosen >= n):
                scale = nan
            elif kept:
                scale = T(g[i if each else 0]) / by
                peak = hard * (T(weight[chosen]) if weighted else one)
                level = peak + even * total
            for j in range(lane, n, lanes):
                result = zero
                if kept:
                    result = level * exp(T(x[base + j * inner]) - normaliser) - even * (T(weight[j]) if weighted else one)
                    if j == chosen:
                        result -= peak
                    result = result * scale
                dx[base + j * inner] = S(result)

    return cross_entropy_logits


@functools.lru_cache(maxsize=256)
def nll(precision: str, weighted: bool) -> Callable[..., None]:
    """``(loss, count, x, target, weight, m, n, inner, ignored)``: the chosen element of each sample, weighted and negated; and the weight."""
    T: Any = TYPES[precision]
    zero, one, nan = T(0), T(1), T(float("nan"))

    def nll_forward(loss: Any, count: Any, x: Any, target: Any, weight: Any, m: int, n: int, inner: int, ignored: int) -> None:
        for i in range(cuda.grid(1), m, cuda.gridsize(1)):
            chosen = target[i]
            result = zero
            share = zero
            if chosen != ignored:
                if chosen < 0 or chosen >= n:
                    share = nan
                    result = nan
                else:
                    share = T(weight[chosen]) if weighted else one
                    if share != zero:
                        result = -share * T(x[((i // inner) * n + chosen) * inner + i % inner])
            loss[i] = result
            count[i] = share

    return nll_forward


@functools.lru_cache(maxsize=256)
def nll_backward(precision: str, stored: str, columns: int, lanes: int, along: bool, weighted: bool, each: bool) -> Callable[..., None]:
    """``(dx, g, target, weight, m, n, inner, ignored, by)``: zeros, except where a target is."""
    T: Any = TYPES[precision]
    S: Any = TYPES[stored]
    zero, one, nan = T(0), T(1), T(float("nan"))
    line = line_of_thread(columns, lanes, along)

    def nll_log_probabilities(dx: Any, g: Any, target: Any, weight: Any, m: int, n: int, inner: int, ignored: int, by: Any) -> None:
        _, lane, i, base = line(n, inner)
        if i < m:
            chosen = target[i]
            scale = zero
            share = zero
            if chosen != ignored and (chosen < 0 or chosen >= n):
                scale = nan
            elif chosen != ignored:
                scale = -(T(g[i if each else 0]) / by)
                share = T(weight[chosen]) if weighted else one
            for j in range(lane, n, lanes):
                dx[base + j * inner] = S(scale * (share if j == chosen else zero))

    return nll_log_probabilities
