"""Attention head by head, in blocks of queries with scores that stay in cache.

Neither the scores nor the weights of a whole head are ever in memory: the forward pass keeps the log-sum-exp of each query, and the
backward pass computes the weights again from it.

All operands are read with their strides, (batch, heads, positions, features), so that a view of a projection's output need not be
copied.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.kernels.compiled.jit import flag, inline, kernel, real, strided, whole, writes, writes_strided
from aiograd.kernels.compiled.matrix import blocks, pack, pack_transposed, product, round_up, steps
from aiograd.kernels.compiled.scalar import exp, row_max

#: queries per block
QUERIES = 64


@inline
def _start(x: Any, batch: int, head: int, row: int) -> Any:
    """Offset, in elements, of a row."""
    return (batch * x.strides[0] + head * x.strides[1] + row * x.strides[2]) // x.itemsize


@inline
def _scores(
    q: Any, batch: int, head: int, first: int, count: int, rows: Any, features: Any, keys: Any, visible: int, scale: Any, mask: Any,
    causal: bool, out: Any,
) -> None:
    """Scaled and masked scores of `count` queries from `first` on against the `visible` first keys."""
    product(q, _start(q, batch, head, first), rows, count, features, features.size, keys, visible, out)
    for r in range(count):
        line = out[r]
        if mask.size:
            added = mask[batch, head, first + r]
            for s in range(visible):
                line[s] = line[s] * scale + added[s]
        else:
            for s in range(visible):
                line[s] *= scale
        if causal:
            line[min(visible, first + r + 1) : visible] = -np.inf


@kernel(strided(4), strided(4), strided(4), strided(4), flag, real, whole, writes_strided(4), writes(3))
def attention(
    q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float, width: int, out: Any, shift: Any, block: int, low: int, high: int
) -> None:
    """Attention of the heads in [low, high) of ``batch * heads``.

    Args:
        q: (B, H, L, E).
        k: (B, H, S, E).
        v: (B, H, S, V).
        mask: (B, H, L, S), added to the scores, or empty.
        causal: query i sees keys 0 to i.
        scale: of the scores.
        width: of a panel.
        out: (B, H, L, V).
        shift: (B, H, L), log-sum-exp of each query's scores; infinite for a query that sees nothing.
    """
    heads, queries, size = q.shape[1], q.shape[2], q.shape[3]
    length, values = v.shape[2], v.shape[3]
    factor = q.dtype.type(scale)
    keys = np.empty((blocks(length, width), size, width), q.dtype)
    panels = np.empty((blocks(values, width), length, width), q.dtype)
    scores = np.empty((round_up(min(QUERIES, queries)), keys.shape[0] * width), q.dtype)
    result = np.empty((scores.shape[0], panels.shape[0] * width), q.dtype)
    features, positions = steps(size, q.strides[3] // q.itemsize, size), steps(length, 1, length)
    lines = steps(scores.shape[0], scores.shape[1], scores.shape[0])
    for position in range(low, high):
        b, h = position // heads, position % heads
        pack_transposed(k[b, h], keys)
        pack(v[b, h], panels)
        for first in range(0, queries, QUERIES):
            count = min(QUERIES, queries - first)
            visible = min(length, first + count) if causal else length
            rows = steps(count, q.strides[2] // q.itemsize, scores.shape[0])
            _scores(q, b, h, first, count, rows, features, keys, visible, factor, mask, causal, scores)
            for r in range(count):
                line = scores[r, :visible]
                top = row_max(line)
                if top == -np.inf:
                    line[:] = 0
                    shift[b, h, first + r] = np.inf
                    continue
                total = _exponentials(line, top)
                shift[b, h, first + r] = top + q.dtype.type(math.log(total))
                inverse = q.dtype.type(1) / total
                for s in range(visible):
                    line[s] *= inverse
            product(scores, 0, lines, count, positions, visible, panels, values, result)
            for r in range(count):
                target = out[b, h, first + r]
                for e in range(values):
                    target[e] = result[r, e]


@inline(flags={"contract", "reassoc", "nsz"})
def _exponentials(line: Any, top: Any) -> Any:
    """Replace a row by ``exp(row - top)``; returns the sum."""
    total = type(top)(0)
    for s in range(line.size):
        e = exp(line[s] - top)
        line[s] = e
        total += e
    return total


@inline(flags={"contract", "reassoc", "nsz"})
def _dot(a: Any, b: Any) -> Any:
    total = type(a[0])(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@inline
def _add(target: Any, block: Any, factor: Any) -> None:
    for i in range(target.shape[0]):
        line, more = target[i], block[i]
        for j in range(line.size):
            line[j] += factor * more[j]


@kernel(
    strided(4), strided(4), strided(4), strided(4), strided(4), writes(3), flag, real, whole, writes_strided(4), writes_strided(4),
    writes_strided(4), writes(4),
)
def attention_grad(
    g: Any, q: Any, k: Any, v: Any, mask: Any, shift: Any, causal: bool, scale: float, width: int, dq: Any, dk: Any, dv: Any,
    dmask: Any, block: int, low: int, high: int,
) -> None:
    """Gradients of `attention` for the heads in [low, high); an empty `dmask` is not asked for."""
    heads, queries, size = q.shape[1], q.shape[2], q.shape[3]
    length, values = v.shape[2], v.shape[3]
    one, factor = q.dtype.type(1), q.dtype.type(scale)
    keys = np.empty((blocks(length, width), size, width), q.dtype)
    keys_by_position = np.empty((blocks(size, width), length, width), q.dtype)
    panels = np.empty((blocks(length, width), values, width), q.dtype)
    most = round_up(min(QUERIES, queries))
    weights = np.empty((most, keys.shape[0] * width), q.dtype)
    slopes = np.empty_like(weights)
    queries_panel = np.empty((blocks(size, width), most, width), q.dtype)
    grads_panel = np.empty((blocks(values, width), most, width), q.dtype)
    dq_block = np.empty((most, queries_panel.shape[0] * width), q.dtype)
    dk_block = np.empty((round_up(length), queries_panel.shape[0] * width), q.dtype)
    dv_block = np.empty((round_up(length), grads_panel.shape[0] * width), q.dtype)
    features, outputs = steps(size, q.strides[3] // q.itemsize, size), steps(values, g.strides[3] // g.itemsize, values)
    positions = steps(length, 1, round_up(length))
    lines = steps(most, weights.shape[1], most)
    for position in range(low, high):
        b, h = position // heads, position % heads
        pack_transposed(k[b, h], keys)
        pack(k[b, h], keys_by_position)
        pack_transposed(v[b, h], panels)
        dk[b, h] = 0
        dv[b, h] = 0
        for first in range(0, queries, QUERIES):
            count = min(QUERIES, queries - first)
            visible = min(length, first + count) if causal else length
            rows = steps(count, q.strides[2] // q.itemsize, most)
            _scores(q, b, h, first, count, rows, features, keys, visible, factor, mask, causal, weights)
            grad_rows = steps(count, g.strides[2] // g.itemsize, most)
            product(g, _start(g, b, h, first), grad_rows, count, outputs, values, panels, visible, slopes)
            for r in range(count):
                line, slope = weights[r, :visible], slopes[r, :visible]
                top = shift[b, h, first + r]
                for s in range(visible):
                    line[s] = exp(line[s] - top)
                mean = _dot(line, slope)
                for s in range(visible):
                    slope[s] = line[s] * (slope[s] - mean)
                if dmask.size:
                    dmask[b, h, first + r, :visible] = slope
                    dmask[b, h, first + r, visible:] = 0
            product(slopes, 0, lines, count, positions, visible, keys_by_position, size, dq_block)
            for r in range(count):
                target = dq[b, h, first + r]
                for e in range(size):
                    target[e] = factor * dq_block[r, e]
            pack(q[b, h, first : first + count], queries_panel[:, :count])
            pack(g[b, h, first : first + count], grads_panel[:, :count])
            product(slopes, 0, positions, visible, lines, count, queries_panel, size, dk_block)
            _add(dk[b, h, :visible], dk_block, factor)
            product(weights, 0, positions, visible, lines, count, grads_panel, values, dv_block)
            _add(dv[b, h, :visible], dv_block, one)
