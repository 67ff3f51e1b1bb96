"""Scaled dot-product attention by tiles, forward and backward; the matrix of scores is never in memory.

Note [Forward]
    A block has a tile of queries and goes through the keys by tiles. Each row keeps the largest score so far and the sum of exponentials
    below it; when the largest grows, the sum is scaled down (`aiograd.cuda.kernels.online_softmax`). Saved for backward is the
    logarithm of the sum for each query.

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

from aiograd.cuda.kernels.gemm_microkernel import ALIGNED, PADDING, cleared, gemm_microkernel, place_in_tile, tile_loader
from aiograd.cuda.kernels.online_softmax import shrinkage


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
    threads, shift, mask_x = down * across, across.bit_length() - 1, across - 1
    step_q, step_k, step_v = rows + PADDING, keys + PADDING, width + PADDING
    size_q, size_kv, size_p = depth * step_q, max(depth * step_k, keys * step_v), keys * step_q
    load_q, load_k = tile_loader(number, rows, depth, step_q, threads, False), tile_loader(number, keys, depth, step_k, threads, False)
    load_v = tile_loader(number, keys, width, step_v, threads, True)
    clear_scores, clear_result = cleared(number, run_q, run_k), cleared(number, run_q, run_v)
    multiply_qk = gemm_microkernel(number, run_q, run_k, down, across, step_q, step_k, run_q, run_k)
    multiply_pv = gemm_microkernel(number, run_q, run_v, down, across, step_q, step_v, run_q)
    place_v = place_in_tile(run_v, across, min(4, run_v))
    allowed, added = masked == "allowed", masked == "added"
    infinity, nothing = number(float("inf")), number(0)
    shrink = shrinkage(number, exp)

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
        factors = cuda.shared.array(rows, number)
        result = cuda.local.array((run_q, run_v), number)
        score = cuda.local.array((run_q, run_k), number)
        t = cuda.threadIdx.x
        y = t >> shift
        x = t & mask_x
        first = cuda.blockIdx.x % tiles * rows
        head = cuda.blockIdx.x // tiles
        b = head // inner
        h = head % inner
        load_q(tile_q, q, b * q_b + h * q_h, first, queries, features, q_r, q_f, t)
        for r in range(t, rows, threads):
            largest[r] = -infinity
            total[r] = number(0)
        clear_result(result)
        stop = length
        if causal:
            stop = min(length, first + rows)
        for begin in range(0, stop, keys):
            cuda.syncthreads()
            load_k(tile_kv, k, b * k_b + h * k_h, begin, length, features, k_r, k_f, t)
            cuda.syncthreads()
            clear_scores(score)
            multiply_qk(score, tile_q, tile_kv, depth, y, x)
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
                factor = shrink(before, top)
                largest[r] = top
                factors[r] = factor
                total[r] = total[r] * factor + sum_here
            load_v(tile_kv, v, b * v_b + h * v_h, begin, length, values, v_r, v_f, t)
            cuda.syncthreads()
            for i in range(run_q):
                factor = factors[y * run_q + i]
                for j in range(run_v):
                    result[i, j] *= factor
            multiply_pv(result, weights, tile_kv, keys, y, x)
        cuda.syncthreads()
        for i in range(run_q):
            r = first + y * run_q + i
            divisor = total[y * run_q + i]
            if divisor == nothing:
                divisor = number(1)
            for j in range(run_v):
                f = place_v(j, x)
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
        rows, others: the rows in a tile of its own side, and of the other side.
        by_key: True if keys and values are its own side, queries and gradients the other.
        kept: True if the slopes of the scores are written as well (queries are its own side then).
    """
    run_r, run_c, run_d, run_v = rows // down, others // across, depth // across, width // across
    threads, shift, mask_x = down * across, across.bit_length() - 1, across - 1
    step_r, step_c, step_d, step_v = rows + PADDING, others + PADDING, depth + PADDING, width + PADDING
    size_1, size_2, size_p = depth * step_r, width * step_r, others * step_r
    size_other = max(depth * step_c, width * step_c, others * step_d, others * step_v)
    size_w = size_p if by_key else 4
    load_1, load_2 = tile_loader(number, rows, depth, step_r, threads, False), tile_loader(number, rows, width, step_r, threads, False)
    load_depth, load_width = tile_loader(number, others, depth, step_c, threads, False), tile_loader(number, others, width, step_c, threads, False)
    load_rows_1, load_rows_2 = tile_loader(number, others, depth, step_d, threads, True), tile_loader(number, others, width, step_v, threads, True)
    clear_scores, clear_first, clear_second = cleared(number, run_r, run_c), cleared(number, run_r, run_d), cleared(number, run_r, run_v)
    multiply_scores = gemm_microkernel(number, run_r, run_c, down, across, step_r, step_c, run_r, run_c)
    multiply_first = gemm_microkernel(number, run_r, run_d, down, across, step_r, step_d, run_r)
    multiply_second = gemm_microkernel(number, run_r, run_v, down, across, step_r, step_v, run_r)
    place_d, place_v = place_in_tile(run_d, across, min(4, run_d)), place_in_tile(run_v, across, min(4, run_v))
    allowed, added = masked == "allowed", masked == "added"

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
        base_1, base_2 = b * c_b + h * c_h, b * d_b + h * d_h
        load_1(tile_1, own_1, b * a_b + h * a_h, first, count, features, a_r, a_f, t)
        load_2(tile_2, own_2, b * b_b + h * b_h, first, count, values, b_r, b_f, t)
        clear_first(first_sum)
        clear_second(second_sum)
        start = 0
        stop = length
        if causal:
            if by_key:
                start = first // others * others
            else:
                stop = min(length, first + rows)
        for begin in range(start, stop, others):
            cuda.syncthreads()
            load_depth(tile, other_1, base_1, begin, length, features, c_r, c_f, t)
            cuda.syncthreads()
            clear_scores(score)
            clear_scores(slope)
            multiply_scores(score, tile_1, tile, depth, y, x)
            cuda.syncthreads()
            load_width(tile, other_2, base_2, begin, length, values, d_r, d_f, t)
            cuda.syncthreads()
            multiply_scores(slope, tile_2, tile, width, y, x)
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
                load_rows_2(tile, other_2, base_2, begin, length, values, d_r, d_f, t)
                cuda.syncthreads()
                multiply_second(second_sum, weights, tile, others, y, x)
                cuda.syncthreads()
            load_rows_1(tile, other_1, base_1, begin, length, features, c_r, c_f, t)
            cuda.syncthreads()
            multiply_first(first_sum, slopes, tile, others, y, x)
        for i in range(run_r):
            r = first + y * run_r + i
            for j in range(run_d):
                f = place_d(j, x)
                if r < count and f < features:
                    first_out[b * o_b + h * o_h + r * o_r + f * o_f] = made(first_sum[i, j] * scale)
            if by_key:
                for j in range(run_v):
                    f = place_v(j, x)
                    if r < count and f < values:
                        second_out[b * p_b + h * p_h + r * p_r + f * p_f] = made(second_sum[i, j])

    return attention_grad
