"""Kernels that standardise lines of contiguous elements, and the gradient of that.

Line i has `n` elements from ``i * n`` on; blocks as in `aiograd.cuda.tiles`, with neighbouring lanes on neighbouring elements. Weights belong to
places in the line, or, where the line is a group of channels, to channels: element j of line i is of channel
``i % groups * channels + j // spatial``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from aiograd.cuda.kernels.block import lane_sum, lane_sums
from aiograd.cuda.kernels.scalar import TYPES, function


@functools.lru_cache(maxsize=256)
def forward(
    precision: str, stored: str, columns: int, lanes: int, centred: bool, weighted: bool, biased: bool, channelled: bool
) -> Callable[..., None]:
    """``(out, mean, rstd, x, weight, bias, m, n, count, eps, groups, channels, spatial)``; where a line is not centred, `mean` is not written.

    The deviations are squared in a second pass over the line: the sum of squares less the square of the sum loses all digits where the mean is large.

    Args:
        precision: the precision to compute in, and of `mean` and `rstd`.
        stored: dtype of elements.
        columns, lanes: of the tile.
        centred: subtract the mean.
        weighted, biased: True if there is a weight, and a bias; else anything may be given for it.
        channelled: True if weights belong to channels.
    """
    T: Any = TYPES[precision]
    S: Any = TYPES[stored]
    sqrt = function("sqrt", precision)
    U: Any = TYPES["u4"]
    sum_lanes = lane_sum(T, columns, lanes, True)
    zero, one = T(0), T(1)

    def standardize(
        out: Any, mean: Any, rstd: Any, x: Any, weight: Any, bias: Any, m: int, n: int, count: Any, eps: Any, groups: int, channels: int, spatial: int
    ) -> None:
        tid = cuda.threadIdx.x
        lane = tid % lanes
        i = cuda.blockIdx.x * columns + tid // lanes
        base = i * n
        centre = zero
        if centred:
            total = zero
            if i < m:
                for j in range(lane, n, lanes):
                    total += T(x[base + j])
            centre = sum_lanes(tid, lane, total) / count
        total = zero
        if i < m:
            for j in range(lane, n, lanes):
                v = T(x[base + j]) - centre
                total += v * v
        scale = one / sqrt(sum_lanes(tid, lane, total) / count + eps)
        if i < m:
            if lane == 0:
                rstd[i] = scale
                if centred:
                    mean[i] = centre
            first = (i % groups) * channels
            for j in range(lane, n, lanes):
                v = (T(x[base + j]) - centre) * scale
                place = j
                if channelled:
                    place = first + int(U(j) // U(spatial))  # divisions of 64 bits cost as much as reading
                if weighted:
                    v = v * T(weight[place])
                if biased:
                    v = v + T(bias[place])
                out[base + j] = S(v)

    return standardize


@functools.lru_cache(maxsize=256)
def backward(precision: str, stored: str, columns: int, lanes: int, centred: bool, weighted: bool, channelled: bool) -> Callable[..., None]:
    """``(dx, g, x, weight, mean, rstd, m, n, count, groups, channels, spatial)``: the gradient of the elements; arguments as in `forward`."""
    T: Any = TYPES[precision]
    S: Any = TYPES[stored]
    U: Any = TYPES["u4"]
    sum_lanes = lane_sums(T, columns, lanes, True)
    zero = T(0)

    def standardize_backward(
        dx: Any, g: Any, x: Any, weight: Any, mean: Any, rstd: Any, m: int, n: int, count: Any, groups: int, channels: int, spatial: int
    ) -> None:
        tid = cuda.threadIdx.x
        lane = tid % lanes
        i = cuda.blockIdx.x * columns + tid // lanes
        base = i * n
        first = (i % groups) * channels
        centre, scale, level, slope = zero, zero, zero, zero
        if i < m:
            scale = rstd[i]
            if centred:
                centre = mean[i]
            for j in range(lane, n, lanes):
                v = T(g[base + j])
                place = j
                if channelled:
                    place = first + int(U(j) // U(spatial))  # divisions of 64 bits cost as much as reading
                if weighted:
                    v = v * T(weight[place])
                level += v
                slope += v * ((T(x[base + j]) - centre) * scale)
        level, slope = sum_lanes(tid, lane, level, slope)
        if i < m:
            level = level / count if centred else zero
            slope = slope / count
            for j in range(lane, n, lanes):
                v = T(g[base + j])
                place = j
                if channelled:
                    place = first + int(U(j) // U(spatial))  # divisions of 64 bits cost as much as reading
                if weighted:
                    v = v * T(weight[place])
                dx[base + j] = S((v - level - (T(x[base + j]) - centre) * scale * slope) * scale)

    return standardize_backward


@functools.lru_cache(maxsize=256)
def weight_gradients(precision: str, columns: int, lanes: int, centred: bool) -> Callable[..., None]:
    """``(dweight, dbias, g, x, mean, rstd, m, n, chunk)``: for each of `n` places, sums over `chunk` of the `m` lines; (parts, n) each.

    Neighbouring threads take neighbouring places; lines are shared by the lanes of a place, and by the blocks along the second axis of the grid.
    """
    T: Any = TYPES[precision]
    sum_lanes = lane_sums(T, columns, lanes, False)
    zero = T(0)

    def standardize_weights(dweight: Any, dbias: Any, g: Any, x: Any, mean: Any, rstd: Any, m: int, n: int, chunk: int) -> None:
        tid = cuda.threadIdx.x
        lane = tid // columns
        j = cuda.blockIdx.x * columns + tid % columns
        part = cuda.blockIdx.y
        slope, level = zero, zero
        if j < n:
            for i in range(part * chunk + lane, min(m, (part + 1) * chunk), lanes):
                v = T(g[i * n + j])
                unit = T(x[i * n + j])
                if centred:
                    unit = unit - mean[i]
                slope += v * (unit * rstd[i])
                level += v
        slope, level = sum_lanes(tid, lane, slope, level)
        if j < n and lane == 0:
            dweight[part * n + j] = slope
            dbias[part * n + j] = level

    return standardize_weights
