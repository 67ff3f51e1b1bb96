"""Layer and RMS normalisation by rows and batch normalisation by channels, with the statistics kept for backward."""

from __future__ import annotations

import math
from typing import Any

from aiograd.kernels.compiled.jit import kernel, reads, real, writes


@kernel(reads(2), reads(1), reads(1), real, writes(2), writes(1), writes(1), sums=True)
def layer_norm(x: Any, weight: Any, bias: Any, eps: float, out: Any, mean: Any, rstd: Any, block: int, low: int, high: int) -> None:
    """Standardise each row of `x`; an empty weight or bias is absent."""
    n = x.shape[1]
    for i in range(low, high):
        row, line = x[i], out[i]
        total = x.dtype.type(0)
        for j in range(n):
            total += row[j]
        m = x.dtype.type(total / n)
        total = x.dtype.type(0)
        for j in range(n):
            total += (row[j] - m) * (row[j] - m)
        r = x.dtype.type(1.0 / math.sqrt(total / n + eps))
        mean[i] = m
        rstd[i] = r
        if weight.size and bias.size:
            for j in range(n):
                line[j] = (row[j] - m) * r * weight[j] + bias[j]
        elif weight.size:
            for j in range(n):
                line[j] = (row[j] - m) * r * weight[j]
        elif bias.size:
            for j in range(n):
                line[j] = (row[j] - m) * r + bias[j]
        else:
            for j in range(n):
                line[j] = (row[j] - m) * r


@kernel(reads(2), reads(2), reads(1), reads(1), reads(1), writes(2), writes(2), writes(2), sums=True)
def layer_norm_grad(g: Any, x: Any, weight: Any, mean: Any, rstd: Any, dx: Any, dweight: Any, dbias: Any, block: int, low: int, high: int) -> None:
    """Gradients of `x` and, as one partial sum per block, of weight and bias.

    All of them are formed together, in two loops over a row, also where some are not asked for: the loops wait for memory, not for arithmetic
    (two thirds of the time of a loop for each; ``tests/benchmarks/layers.py``).
    """
    n = x.shape[1]
    inverse = x.dtype.type(1.0 / n)
    scales, shifts = dweight[block], dbias[block]
    scales[:] = 0
    shifts[:] = 0
    for i in range(low, high):
        row, grad, line = x[i], g[i], dx[i]
        m, r = mean[i], rstd[i]
        first = second = x.dtype.type(0)
        for j in range(n):
            unit = (row[j] - m) * r
            scales[j] += grad[j] * unit
            shifts[j] += grad[j]
            scaled = grad[j] * weight[j]
            first += scaled
            second += scaled * unit
        first, second = first * inverse, second * inverse
        for j in range(n):
            line[j] = r * (grad[j] * weight[j] - first - (row[j] - m) * r * second)


@kernel(reads(2), reads(1), real, writes(2), writes(1), sums=True)
def rms_norm(x: Any, weight: Any, eps: float, out: Any, scale: Any, block: int, low: int, high: int) -> None:
    """Divide each row of `x` by its root mean square; an empty weight is absent."""
    n = x.shape[1]
    for i in range(low, high):
        row, line = x[i], out[i]
        total = x.dtype.type(0)
        for j in range(n):
            total += row[j] * row[j]
        r = x.dtype.type(1.0 / math.sqrt(total / n + eps))
        scale[i] = r
        if weight.size:
            for j in range(n):
                line[j] = row[j] * r * weight[j]
        else:
            for j in range(n):
                line[j] = row[j] * r


@kernel(reads(2), reads(2), reads(1), reads(1), writes(2), writes(2), sums=True)
def rms_norm_grad(g: Any, x: Any, weight: Any, scale: Any, dx: Any, dweight: Any, block: int, low: int, high: int) -> None:
    """Gradients of `x` and, as one partial sum per block, of weight; an empty result is not asked for."""
    n = x.shape[1]
    inverse = x.dtype.type(1.0 / n)
    if dweight.size:
        dweight[block, :] = 0
    for i in range(low, high):
        row, grad = x[i], g[i]
        r = scale[i]
        if dweight.size:
            partial = dweight[block]
            for j in range(n):
                partial[j] += grad[j] * (row[j] * r)
        if dx.size:
            line = dx[i]
            total = x.dtype.type(0)
            if weight.size:
                for j in range(n):
                    total += grad[j] * weight[j] * row[j]
                total = total * r * inverse
                for j in range(n):
                    line[j] = r * (grad[j] * weight[j] - row[j] * r * total)
            else:
                for j in range(n):
                    total += grad[j] * row[j]
                total = total * r * inverse
                for j in range(n):
                    line[j] = r * (grad[j] - row[j] * r * total)


@kernel(reads(3), reads(1), reads(1), real, writes(3), writes(1), writes(1), writes(1), sums=True)
def batch_norm(x: Any, weight: Any, bias: Any, eps: float, out: Any, mean: Any, var: Any, rstd: Any, block: int, low: int, high: int) -> None:
    """Standardise each channel in [low, high) of `x`, (N, C, L); an empty weight or bias is absent."""
    batch, length = x.shape[0], x.shape[2]
    count = batch * length
    for c in range(low, high):
        whole = 0.0
        for n in range(batch):
            row = x[n, c]
            total = x.dtype.type(0)
            for j in range(length):
                total += row[j]
            whole += total
        m = x.dtype.type(whole / count)
        whole = 0.0
        for n in range(batch):
            row = x[n, c]
            total = x.dtype.type(0)
            for j in range(length):
                total += (row[j] - m) * (row[j] - m)
            whole += total
        r = x.dtype.type(1.0 / math.sqrt(whole / count + eps))
        mean[c] = m
        var[c] = x.dtype.type(whole / count)
        rstd[c] = r
        factor = r * weight[c] if weight.size else r
        shift = bias[c] if bias.size else x.dtype.type(0)
        for n in range(batch):
            row, line = x[n, c], out[n, c]
            for j in range(length):
                line[j] = (row[j] - m) * factor + shift


@kernel(reads(3), reads(3), reads(1), reads(1), reads(1), writes(3), writes(1), writes(1), sums=True)
def batch_norm_grad(g: Any, x: Any, weight: Any, mean: Any, rstd: Any, dx: Any, dweight: Any, dbias: Any, block: int, low: int, high: int) -> None:
    """Gradients of the channels in [low, high) of `x`, of weight and bias; an empty `dx` is not asked for."""
    batch, length = x.shape[0], x.shape[2]
    count = batch * length
    for c in range(low, high):
        m, r = mean[c], rstd[c]
        first = second = 0.0
        for n in range(batch):
            row, grad = x[n, c], g[n, c]
            total = product = x.dtype.type(0)
            for j in range(length):
                total += grad[j]
                product += grad[j] * (row[j] - m)
            first += total
            second += product
        dbias[c] = x.dtype.type(first)
        dweight[c] = x.dtype.type(second * r)
        if dx.size:
            factor = r * weight[c] if weight.size else r
            slope, shift = x.dtype.type(second / count * r * r), x.dtype.type(first / count)
            for n in range(batch):
                row, grad, line = x[n, c], g[n, c], dx[n, c]
                for j in range(length):
                    line[j] = factor * (grad[j] - shift - (row[j] - m) * slope)


@kernel(reads(2), reads(1), reads(1), real, writes(2), writes(1), writes(1), writes(1))
def batch_norm_columns(x: Any, weight: Any, bias: Any, eps: float, out: Any, mean: Any, var: Any, rstd: Any, block: int, low: int, high: int) -> None:
    """`batch_norm` of one value per channel and sample, (N, C): channels lie side by side, so that lanes hold channels. Weight and bias are given."""
    count = x.shape[0]
    m, v, factor = mean[low:high], var[low:high], rstd[low:high]
    m[:] = 0
    v[:] = 0
    inverse = x.dtype.type(1.0 / count)
    for n in range(count):
        row = x[n, low:high]
        for j in range(m.size):
            m[j] += row[j]
    for j in range(m.size):
        m[j] *= inverse
    for n in range(count):
        row = x[n, low:high]
        for j in range(m.size):
            v[j] += (row[j] - m[j]) * (row[j] - m[j])
    for j in range(m.size):
        v[j] *= inverse
        factor[j] = x.dtype.type(1.0 / math.sqrt(v[j] + eps))
    w, b = weight[low:high], bias[low:high]
    for n in range(count):
        row, line = x[n, low:high], out[n, low:high]
        for j in range(m.size):
            line[j] = (row[j] - m[j]) * (factor[j] * w[j]) + b[j]


@kernel(reads(2), reads(2), reads(1), reads(1), reads(1), writes(2), writes(1), writes(1))
def batch_norm_columns_grad(
    g: Any, x: Any, weight: Any, mean: Any, rstd: Any, dx: Any, dweight: Any, dbias: Any, block: int, low: int, high: int
) -> None:
    """`batch_norm_grad` of one value per channel and sample, (N, C). The weight is given; an empty `dx` is not asked for."""
    count = x.shape[0]
    m, r, w, first, second = mean[low:high], rstd[low:high], weight[low:high], dbias[low:high], dweight[low:high]
    first[:] = 0
    second[:] = 0
    for n in range(count):
        row, grad = x[n, low:high], g[n, low:high]
        for j in range(m.size):
            first[j] += grad[j]
            second[j] += grad[j] * ((row[j] - m[j]) * r[j])
    if dx.size:
        inverse = x.dtype.type(1.0 / count)
        for n in range(count):
            row, grad, line = x[n, low:high], g[n, low:high], dx[n, low:high]
            for j in range(m.size):
                line[j] = r[j] * w[j] * (grad[j] - first[j] * inverse - (row[j] - m[j]) * r[j] * (second[j] * inverse))
