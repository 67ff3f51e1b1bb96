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
    """Gradients of `x` and, as one partial sum per block, of weight and bias; an empty result is not asked for."""
    n = x.shape[1]
    inverse = x.dtype.type(1.0 / n)
    if dweight.size:
        dweight[block, :] = 0
    if dbias.size:
        dbias[block, :] = 0
    for i in range(low, high):
        row, grad = x[i], g[i]
        m, r = mean[i], rstd[i]
        if dweight.size:
            partial = dweight[block]
            for j in range(n):
                partial[j] += grad[j] * ((row[j] - m) * r)
        if dbias.size:
            partial = dbias[block]
            for j in range(n):
                partial[j] += grad[j]
        if dx.size:
            line = dx[i]
            first = second = x.dtype.type(0)
            if weight.size:
                for j in range(n):
                    scaled = grad[j] * weight[j]
                    first += scaled
                    second += scaled * ((row[j] - m) * r)
                first, second = first * inverse, second * inverse
                for j in range(n):
                    line[j] = r * (grad[j] * weight[j] - first - (row[j] - m) * r * second)
            else:
                for j in range(n):
                    first += grad[j]
                    second += grad[j] * ((row[j] - m) * r)
                first, second = first * inverse, second * inverse
                for j in range(n):
                    line[j] = r * (grad[j] - first - (row[j] - m) * r * second)


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
