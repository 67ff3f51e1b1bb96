"""Softmax, its logarithm and cross entropy by rows."""

from __future__ import annotations

import math
from typing import Any

from numba import types

from aiograd.kernels.compiled.jit import inline, kernel, reads, real, writes
from aiograd.kernels.compiled.scalar import exp, row_max


@inline(flags={"contract", "reassoc", "nsz"})
def sum_exp(row: Any, shift: Any) -> Any:
    """Sum of ``exp(row - shift)``."""
    total = type(shift)(0)
    for j in range(row.size):
        total += exp(row[j] - shift)
    return total


@kernel(reads(2), writes(2), sums=True)
def softmax(x: Any, out: Any, block: int, low: int, high: int) -> None:
    """Softmax of each row."""
    n = x.shape[1]
    for i in range(low, high):
        row, line = x[i], out[i]
        top = row_max(row)
        total = x.dtype.type(0)
        for j in range(n):
            e = exp(row[j] - top)
            line[j] = e
            total += e
        inverse = x.dtype.type(1) / total
        for j in range(n):
            line[j] *= inverse


@kernel(reads(2), reads(2), writes(2), sums=True)
def softmax_grad(g: Any, out: Any, dx: Any, block: int, low: int, high: int) -> None:
    """Gradient of `softmax` from its output."""
    n = out.shape[1]
    for i in range(low, high):
        grad, row, line = g[i], out[i], dx[i]
        total = out.dtype.type(0)
        for j in range(n):
            total += grad[j] * row[j]
        for j in range(n):
            line[j] = row[j] * (grad[j] - total)


@kernel(reads(2), writes(2))
def log_softmax(x: Any, out: Any, block: int, low: int, high: int) -> None:
    """Logarithm of the softmax of each row."""
    n = x.shape[1]
    for i in range(low, high):
        row, line = x[i], out[i]
        top = row_max(row)
        shift = x.dtype.type(math.log(sum_exp(row, top)))
        for j in range(n):
            line[j] = (row[j] - top) - shift


@kernel(reads(2), reads(2), writes(2), sums=True)
def log_softmax_grad(g: Any, out: Any, dx: Any, block: int, low: int, high: int) -> None:
    """Gradient of `log_softmax` from its output."""
    n = out.shape[1]
    for i in range(low, high):
        grad, row, line = g[i], out[i], dx[i]
        total = out.dtype.type(0)
        for j in range(n):
            total += grad[j]
        for j in range(n):
            line[j] = grad[j] - exp(row[j]) * total


@kernel(reads(2), writes(1))
def log_sum_exp(x: Any, out: Any, block: int, low: int, high: int) -> None:
    """``log(sum(exp(row)))`` of each row."""
    for i in range(low, high):
        top = row_max(x[i])
        out[i] = top + x.dtype.type(math.log(sum_exp(x[i], top)))


@kernel(reads(2), reads(1, types.int64), reads(1), reads(1), reads(1), real, writes(2))
def cross_entropy_grad(x: Any, target: Any, shift: Any, scale: Any, weight: Any, smoothing: float, dx: Any, block: int, low: int, high: int) -> None:
    """Gradient of the cross entropy of each row.

    Per row, with p the softmax: ``scale * ((1 - smoothing) * w[target] * (p - onehot) + smoothing / n * (sum(w) * p - w))``.

    Args:
        x: logits.
        target: class of each row; any where `scale` is 0.
        shift: log-sum-exp of each row.
        scale: gradient of each row's loss.
        weight: of each class, or empty: all 1.
        smoothing: label smoothing.
        dx: gradient of the logits.
    """
    n = x.shape[1]
    each = x.dtype.type(smoothing / n)
    spread = x.dtype.type(smoothing)
    if weight.size:
        spread = x.dtype.type(0)
        for j in range(n):
            spread += weight[j]
        spread *= each
    for i in range(low, high):
        row, line = x[i], dx[i]
        factor, top = scale[i], shift[i]
        if factor == 0:
            line[:] = 0
            continue
        hard = x.dtype.type(1.0 - smoothing) * (weight[target[i]] if weight.size else x.dtype.type(1))
        level = factor * (hard + spread)
        for j in range(n):
            line[j] = level * exp(row[j] - top)
        if smoothing != 0.0:
            if weight.size:
                for j in range(n):
                    line[j] -= factor * each * weight[j]
            else:
                for j in range(n):
                    line[j] -= factor * each
        line[target[i]] -= factor * hard
