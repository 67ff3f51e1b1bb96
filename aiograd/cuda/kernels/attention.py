"""Scaled dot-product attention by tiles, forward and backward; the matrix of scores is never in memory.

Note [Forward]
    A block has a tile of queries and goes through the keys by tiles. Each row keeps the largest score so far and the sum of exponentials
    below it; when the largest grows, what was summed is scaled down. What remains for backward is the logarithm of the sum for each query.

Note [Backward]
    The weights are computed again from the scores. One launch has queries of its own and goes through keys (gradient of `q`), one has
    keys of its own and goes through queries (gradients of `k` and `v`): an element is summed by one thread in one order. Both are the same
    kernel, which has a tile of its `own` side and goes through tiles of the `other`.

Note [Tiles]
    Features are padded to a power of two, fixed at compile time. Tiles lie by feature first where sums go over features, and by row first where they
    go over rows; so a tile that serves for both is loaded twice. `down` times `across` threads share a tile; each has runs of neighbours.

Source: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.gemm import ALIGNED
from aiograd.cuda.kernels.scalar import TYPES


@functools.lru_cache(maxsize=64)
def attended(
    number: Any, made: Any, exp: Any, log: Any, rows: int, keys: int, down: int, across: int, depth: int, width: int, masked: str
) -> Callable[..., None]:
    """The kernel forward.

    Args:
        number, made: numba types to compute in, and of the result.
        exp, log: functions of that precision.
        rows, keys: queries and keys in a tile.
        down, across: threads; powers of two, as is all else.
        depth, width: features of queries and of values, padded.
        masked: ``""``, ``"allowed"`` (nonzero takes part) or ``"added"`` (to the scores).
    """
    run_q, run_k, run_v = rows // down, keys // across, width // across
    piece = min(4, run_v)
    threads, shift, mask_x = down * across, across.bit_length() - 1, across - 1
    bits_d, last_d, bits_v, last_v = depth.bit_length() - 1, depth - 1, width.bit_length() - 1, width - 1
    step_q, step_k, step_v = rows + 4, keys + 4, width + 4
    size_q, size_kv, size_p = depth * step_q, max(depth * step_k, keys * step_v), keys * step_q
    allowed, added = masked == "allowed", masked == "added"
    at, infinity, nothing = TYPES["u8"], number(float("inf")), number(0)

    def attention(
        out: Any, sums: Any, q: Any, k: Any, v: Any, mask: Any, scale: Any, queries: int, length: int, features: int, values: int, inner: int,
        tiles: int, causal: bool, q_b: int, q_h: int, q_r: int, q_f: int, k_b: int, k_h: int, k_r: int, k_f: int,
        v_b: int, v_h: int, v_r: int, v_f: int, m_b: int, m_h: int, m_r: int, m_f: int, o_b: int, o_h: int, o_r: int, o_f: int,
    ) -> None:  # fmt: skip
        tile_q = cuda.shared.array(size_q, number, alignment=ALIGNED)
        tile_kv = cuda.shared.array(size_kv, number, alignment=ALIGNED)
        weights = cuda.shared.array(size_p, number, alignment=ALIGNED)
        largest = cuda.shared.array(rows, number)
        total = cuda.shared.array(rows, number)
        shrink = cuda.shared.array(rows, number)
        result = cuda.local.array((run_q, run_v), number)
        score = cuda.local.array((run_q, run_k), number)
        of_q = cuda.local.array(run_q, number)
        of_k = cuda.local.array(run_k, number)
        of_v = cuda.local.array(run_v, number)
        t = cuda.threadIdx.x
        y = t >> shift
        x = t & mask_x
        first = cuda.blockIdx.x % tiles * rows
        head = cuda.blockIdx.x // tiles
        b = head // inner
        h = head % inner
        for e in range(t, rows * depth, threads):
            r = first + (e >> bits_d)
            f = e & last_d
            value = number(0)
            if r < queries and f < features:
                value = number(q[b * q_b + h * q_h + r * q_r + f * q_f])
            tile_q[f * step_q + (e >> bits_d)] = value
        for r in range(t, rows, threads):
            largest[r] = -infinity
            total[r] = number(0)
        for i in range(run_q):
            for j in range(run_v):
                result[i, j] = number(0)
        stop = length
        if causal:
            stop = min(length, first + rows)
        for begin in range(0, stop, keys):
            cuda.syncthreads()
            for e in range(t, keys * depth, threads):
                r = begin + (e >> bits_d)
                f = e & last_d
                value = number(0)
                if r < length and f < features:
                    value = number(k[b * k_b + h * k_h + r * k_r + f * k_f])
                tile_kv[f * step_k + (e >> bits_d)] = value
            cuda.syncthreads()
            for i in range(run_q):
                for j in range(run_k):
                    score[i, j] = number(0)
            for f in range(depth):
                for i in range(run_q):
                    of_q[i] = tile_q[at(f * step_q + y * run_q + i)]
                for j in range(run_k):
                    of_k[j] = tile_kv[at(f * step_k + x * run_k + j)]
                for i in range(run_q):
                    for j in range(run_k):
                        score[i, j] += of_q[i] * of_k[j]
            for i in range(run_q):
                r = first + y * run_q + i
                for j in range(run_k):
                    c = begin + x * run_k + j
                    value = score[i, j] * scale
                    if r >= queries or c >= length or (causal and c > r):
                        value = -infinity
                    else:
                        if allowed:
                            if mask[b * m_b + h * m_h + r * m_r + c * m_f] == 0:
                                value = -infinity
                        if added:
                            value += number(mask[b * m_b + h * m_h + r * m_r + c * m_f])
                    weights[(x * run_k + j) * step_q + y * run_q + i] = value
            cuda.syncthreads()
            for r in range(t, rows, threads):
                before = largest[r]
                top = before
                for c in range(keys):
                    value = weights[c * step_q + r]
                    if value > top:
                        top = value
                base = top
                if top == -infinity:
                    base = nothing
                sum_here = number(0)
                for c in range(keys):
                    value = exp(weights[c * step_q + r] - base)
                    weights[c * step_q + r] = value
                    sum_here += value
                factor = exp(before - base)
                largest[r] = top
                shrink[r] = factor
                total[r] = total[r] * factor + sum_here
            for e in range(t, keys * width, threads):
                r = begin + (e >> bits_v)
                f = e & last_v
                value = number(0)
                if r < length and f < values:
                    value = number(v[b * v_b + h * v_h + r * v_r + f * v_f])
                tile_kv[(e >> bits_v) * step_v + f] = value
            cuda.syncthreads()
            for i in range(run_q):
                factor = shrink[y * run_q + i]
                for j in range(run_v):
                    result[i, j] *= factor
            for c in range(keys):
                for i in range(run_q):
                    of_q[i] = weights[at(c * step_q + y * run_q + i)]
                for j in range(run_v):
                    of_v[j] = tile_kv[at(c * step_v + (j // piece) * (piece * across) + x * piece + j % piece)]
                for i in range(run_q):
                    for j in range(run_v):
                        result[i, j] += of_q[i] * of_v[j]
        cuda.syncthreads()
        for i in range(run_q):
            r = first + y * run_q + i
            divisor = total[y * run_q + i]
            if divisor == nothing:
                divisor = number(1)
            for j in range(run_v):
                f = (j // piece) * (piece * across) + x * piece + j % piece
                if r < queries and f < values:
                    out[b * o_b + h * o_h + r * o_r + f * o_f] = made(result[i, j] / divisor)
        for r in range(t, rows, threads):
            if first + r < queries:
                value = infinity
                if total[r] != nothing:
                    value = log(total[r]) + largest[r]
                sums[head * queries + first + r] = value

    return attention


@functools.lru_cache(maxsize=128)
def derived(
    number: Any, made: Any, exp: Any, rows: int, others: int, down: int, across: int, depth: int, width: int, masked: str, by_key: bool, kept: bool
) -> Callable[..., None]:
    """The kernel backward; see Note [Backward].

    Args:
        number, made, exp, down, across, depth, width, masked: as of `attended`.
        rows, others: in a tile of its own side and of the other.
        by_key: whether keys and values are its own side, queries and gradients the other.
        kept: whether the slopes of the scores are written as well (queries are its own side then).
    """
    run_r, run_c, run_d, run_v = rows // down, others // across, depth // across, width // across
    piece_d, piece_v = min(4, run_d), min(4, run_v)
    threads, shift, mask_x = down * across, across.bit_length() - 1, across - 1
    bits_d, last_d, bits_v, last_v = depth.bit_length() - 1, depth - 1, width.bit_length() - 1, width - 1
    step_r, step_c, step_d, step_v = rows + 4, others + 4, depth + 4, width + 4
    size_1, size_2, size_p = depth * step_r, width * step_r, others * step_r
    size_other = max(depth * step_c, width * step_c, others * step_d, others * step_v)
    size_w = size_p if by_key else 4
    allowed, added = masked == "allowed", masked == "added"
    at = TYPES["u8"]

    def attention_grad(
        first_out: Any, second_out: Any, slopes_out: Any, own_1: Any, own_2: Any, other_1: Any, other_2: Any, mask: Any, sums: Any, deltas: Any,
        scale: Any, count: int, length: int, features: int, values: int, inner: int, tiles: int, causal: bool,
        a_b: int, a_h: int, a_r: int, a_f: int, b_b: int, b_h: int, b_r: int, b_f: int,
        c_b: int, c_h: int, c_r: int, c_f: int, d_b: int, d_h: int, d_r: int, d_f: int, m_b: int, m_h: int, m_r: int, m_c: int,
        o_b: int, o_h: int, o_r: int, o_f: int, p_b: int, p_h: int, p_r: int, p_f: int,
    ) -> None:  # fmt: skip
        tile_1 = cuda.shared.array(size_1, number, alignment=ALIGNED)
        tile_2 = cuda.shared.array(size_2, number, alignment=ALIGNED)
        tile = cuda.shared.array(size_other, number, alignment=ALIGNED)
        slopes = cuda.shared.array(size_p, number, alignment=ALIGNED)
        weights = cuda.shared.array(size_w, number, alignment=ALIGNED)
        first_sum = cuda.local.array((run_r, run_d), number)
        second_sum = cuda.local.array((run_r, run_v), number)
        score = cuda.local.array((run_r, run_c), number)
        slope = cuda.local.array((run_r, run_c), number)
        of_r = cuda.local.array(run_r, number)
        of_c = cuda.local.array(run_c, number)
        of_d = cuda.local.array(run_d, number)
        of_v = cuda.local.array(run_v, number)
        t = cuda.threadIdx.x
        y = t >> shift
        x = t & mask_x
        first = cuda.blockIdx.x % tiles * rows
        head = cuda.blockIdx.x // tiles
        b = head // inner
        h = head % inner
        queries = count
        if by_key:
            queries = length
        for e in range(t, rows * depth, threads):
            r = first + (e >> bits_d)
            f = e & last_d
            value = number(0)
            if r < count and f < features:
                value = number(own_1[b * a_b + h * a_h + r * a_r + f * a_f])
            tile_1[f * step_r + (e >> bits_d)] = value
        for e in range(t, rows * width, threads):
            r = first + (e >> bits_v)
            f = e & last_v
            value = number(0)
            if r < count and f < values:
                value = number(own_2[b * b_b + h * b_h + r * b_r + f * b_f])
            tile_2[f * step_r + (e >> bits_v)] = value
        for i in range(run_r):
            for j in range(run_d):
                first_sum[i, j] = number(0)
            for j in range(run_v):
                second_sum[i, j] = number(0)
        start = 0
        stop = length
        if causal:
            if by_key:
                start = first // others * others
            else:
                stop = min(length, first + rows)
        for begin in range(start, stop, others):
            cuda.syncthreads()
            for e in range(t, others * depth, threads):
                r = begin + (e >> bits_d)
                f = e & last_d
                value = number(0)
                if r < length and f < features:
                    value = number(other_1[b * c_b + h * c_h + r * c_r + f * c_f])
                tile[f * step_c + (e >> bits_d)] = value
            cuda.syncthreads()
            for i in range(run_r):
                for j in range(run_c):
                    score[i, j] = number(0)
                    slope[i, j] = number(0)
            for f in range(depth):
                for i in range(run_r):
                    of_r[i] = tile_1[at(f * step_r + y * run_r + i)]
                for j in range(run_c):
                    of_c[j] = tile[at(f * step_c + x * run_c + j)]
                for i in range(run_r):
                    for j in range(run_c):
                        score[i, j] += of_r[i] * of_c[j]
            cuda.syncthreads()
            for e in range(t, others * width, threads):
                r = begin + (e >> bits_v)
                f = e & last_v
                value = number(0)
                if r < length and f < values:
                    value = number(other_2[b * d_b + h * d_h + r * d_r + f * d_f])
                tile[f * step_c + (e >> bits_v)] = value
            cuda.syncthreads()
            for f in range(width):
                for i in range(run_r):
                    of_r[i] = tile_2[at(f * step_r + y * run_r + i)]
                for j in range(run_c):
                    of_c[j] = tile[at(f * step_c + x * run_c + j)]
                for i in range(run_r):
                    for j in range(run_c):
                        slope[i, j] += of_r[i] * of_c[j]
            for i in range(run_r):
                for j in range(run_c):
                    r = first + y * run_r + i
                    c = begin + x * run_c + j
                    query = r
                    hidden = c > r
                    if by_key:
                        query = c
                        hidden = r > c
                    weight = number(0)
                    found = number(0)
                    if r < count and c < length and not (causal and hidden):
                        value = score[i, j] * scale - sums[head * queries + query]
                        takes_part = True
                        if allowed:
                            takes_part = mask[b * m_b + h * m_h + r * m_r + c * m_c] != 0
                        if added:
                            value += number(mask[b * m_b + h * m_h + r * m_r + c * m_c])
                        if takes_part:
                            weight = exp(value)
                            found = weight * (slope[i, j] - deltas[head * queries + query])
                        if kept:
                            slopes_out[(head * count + r) * length + c] = made(found)
                    slopes[(x * run_c + j) * step_r + y * run_r + i] = found
                    if by_key:
                        weights[(x * run_c + j) * step_r + y * run_r + i] = weight
            cuda.syncthreads()
            if by_key:
                for e in range(t, others * width, threads):
                    r = begin + (e >> bits_v)
                    f = e & last_v
                    value = number(0)
                    if r < length and f < values:
                        value = number(other_2[b * d_b + h * d_h + r * d_r + f * d_f])
                    tile[(e >> bits_v) * step_v + f] = value
                cuda.syncthreads()
                for c in range(others):
                    for i in range(run_r):
                        of_r[i] = weights[at(c * step_r + y * run_r + i)]
                    for j in range(run_v):
                        of_v[j] = tile[at(c * step_v + (j // piece_v) * (piece_v * across) + x * piece_v + j % piece_v)]
                    for i in range(run_r):
                        for j in range(run_v):
                            second_sum[i, j] += of_r[i] * of_v[j]
                cuda.syncthreads()
            for e in range(t, others * depth, threads):
                r = begin + (e >> bits_d)
                f = e & last_d
                value = number(0)
                if r < length and f < features:
                    value = number(other_1[b * c_b + h * c_h + r * c_r + f * c_f])
                tile[(e >> bits_d) * step_d + f] = value
            cuda.syncthreads()
            for c in range(others):
                for i in range(run_r):
                    of_r[i] = slopes[at(c * step_r + y * run_r + i)]
                for j in range(run_d):
                    of_d[j] = tile[at(c * step_d + (j // piece_d) * (piece_d * across) + x * piece_d + j % piece_d)]
                for i in range(run_r):
                    for j in range(run_d):
                        first_sum[i, j] += of_r[i] * of_d[j]
        for i in range(run_r):
            r = first + y * run_r + i
            for j in range(run_d):
                f = (j // piece_d) * (piece_d * across) + x * piece_d + j % piece_d
                if r < count and f < features:
                    first_out[b * o_b + h * o_h + r * o_r + f * o_f] = made(first_sum[i, j] * scale)
            if by_key:
                for j in range(run_v):
                    f = (j // piece_v) * (piece_v * across) + x * piece_v + j % piece_v
                    if r < count and f < values:
                        second_out[b * p_b + h * p_h + r * p_r + f * p_f] = made(second_sum[i, j])

    return attention_grad
