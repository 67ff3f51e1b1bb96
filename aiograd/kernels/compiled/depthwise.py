"""Depthwise convolution: one input channel per group, so there is no sum over channels and a matrix product would be mostly empty.

Note [A plane as one line]
    The rows of a plane are short (28 numbers, say), and a loop per row would spend its time on entering loops. So a plane is copied into scratch
    memory in which every tap of every window is found at one distance: the padded plane, split by the remainder of its rows and columns modulo the
    stride. The outputs lie there as a plane of the same pitch, with a few numbers between the rows that belong to none; then a tap is one loop over
    the whole plane. Where a number that is not finite would meet those between the rows, the loop runs row by row.

Measured by ``tests/benchmarks/layers.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.kernels.compiled.jit import SUMS, inline, kernel, reads, wholes, writes


@inline
def _split(shape: tuple[int, int], geometry: Any) -> tuple[int, int, int, int]:
    """The shape of the scratch plane: remainders of rows and columns, then rows and columns of each part."""
    _, _, sh, sw, ph, pw, _, _, _, _ = geometry
    return sh, sw, (shape[0] + 2 * ph + sh - 1) // sh, (shape[1] + 2 * pw + sw - 1) // sw


@inline
def _distances(scratch: Any, geometry: Any) -> Any:
    """Where each tap's first number lies in the flat scratch plane."""
    kh, kw, sh, sw, _, _, dh, dw, _, _ = geometry
    table = np.empty(kh * kw, np.int64)
    for i in range(kh):
        for j in range(kw):
            part = (i * dh % sh) * sw + j * dw % sw
            table[i * kw + j] = (part * scratch.shape[2] + i * dh // sh) * scratch.shape[3] + j * dw // sw
    return table


@inline
def _spread(plane: Any, scratch: Any, geometry: Any) -> None:
    """Copy a plane into the scratch plane; its padding stays as it is."""
    _, _, sh, sw, ph, pw, _, _, _, _ = geometry
    for remainder in range(sw):
        first = (remainder - pw) % sw
        start, count = (first + pw) // sw, (plane.shape[1] - first + sw - 1) // sw
        for top in range(sh):
            part = scratch[(top + ph) % sh, remainder]
            to = (top + ph) // sh
            for y in range(top, plane.shape[0], sh):
                row, line = plane[y, first:], part[to, start:]
                to += 1
                if sw == 1:
                    for k in range(count):
                        line[k] = row[k]
                else:
                    for k in range(count):
                        line[k] = row[k * sw]


@inline
def _gather(scratch: Any, plane: Any, geometry: Any) -> None:
    """The inverse of `_spread`."""
    _, _, sh, sw, ph, pw, _, _, _, _ = geometry
    for remainder in range(sw):
        first = (remainder - pw) % sw
        start, count = (first + pw) // sw, (plane.shape[1] - first + sw - 1) // sw
        for top in range(sh):
            part = scratch[(top + ph) % sh, remainder]
            to = (top + ph) // sh
            for y in range(top, plane.shape[0], sh):
                row, line = plane[y, first:], part[to, start:]
                to += 1
                if sw == 1:
                    for k in range(count):
                        row[k] = line[k]
                else:
                    for k in range(count):
                        row[k * sw] = line[k]


@inline(flags=SUMS)
def _finite(values: Any) -> bool:
    """True if there is no NaN and no infinity among the values."""
    zero = values.dtype.type(0)
    total = zero
    for k in range(values.size):
        total += values[k] * zero
    return total == zero  # type: ignore[no-any-return]


@inline(flags=SUMS)
def _dot(a: Any, b: Any) -> Any:
    total = a.dtype.type(0)
    for k in range(a.size):
        total += a[k] * b[k]
    return total


@kernel(reads(3), reads(2), reads(1), writes(4), wholes(10))
def convolve(x: Any, weight: Any, bias: Any, out: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Convolve the planes in [low, high).

    Args:
        x: (N * groups, H, W).
        weight: (groups * several, taps).
        bias: (groups * several,) or empty.
        out: (N * groups, several, H', W').
        geometry: of the window, and the numbers of windows.
    """
    several, oh, ow = out.shape[1], out.shape[2], out.shape[3]
    groups, taps = weight.shape[0] // several, weight.shape[1]
    scratch = np.zeros(_split((x.shape[1], x.shape[2]), geometry), x.dtype)
    source, pitch, distances = scratch.ravel(), scratch.shape[3], _distances(scratch, geometry)
    length = (oh - 1) * pitch + ow
    sums = np.empty(length, x.dtype)
    for p in range(low, high):
        _spread(x[p], scratch, geometry)
        for several_nr in range(several):
            channel = p % groups * several + several_nr
            w = weight[channel]
            sums[:] = bias[channel] if bias.size else 0
            t = 0
            while t + 3 <= taps:
                a, b, c = source[distances[t] :], source[distances[t + 1] :], source[distances[t + 2] :]
                first, second, third = w[t], w[t + 1], w[t + 2]
                for k in range(length):
                    sums[k] += first * a[k] + second * b[k] + third * c[k]
                t += 3
            while t < taps:
                a, first = source[distances[t] :], w[t]
                for k in range(length):
                    sums[k] += first * a[k]
                t += 1
            for y in range(oh):
                line, values = out[p, several_nr, y], sums[y * pitch :]
                for k in range(ow):
                    line[k] = values[k]


@inline
def _widen(plane: Any, line: Any, pitch: int) -> None:
    """Copy a plane of outputs into a line of the scratch plane's pitch; what lies between the rows stays as it is."""
    for y in range(plane.shape[0]):
        row, part = plane[y], line[y * pitch :]
        for k in range(row.size):
            part[k] = row[k]


@kernel(reads(4), reads(2), writes(3), wholes(10))
def input_grad(g: Any, weight: Any, out: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Gradient of the planes in [low, high); shapes as in `convolve`, `g` and `out` are the gradients of its out and x."""
    several, oh, ow = g.shape[1], g.shape[2], g.shape[3]
    groups, taps = weight.shape[0] // several, weight.shape[1]
    scratch = np.zeros(_split((out.shape[1], out.shape[2]), geometry), g.dtype)
    target, pitch, distances = scratch.ravel(), scratch.shape[3], _distances(scratch, geometry)
    grad = np.zeros((oh - 1) * pitch + ow, g.dtype)
    for p in range(low, high):
        target[:] = 0
        for several_nr in range(several):
            _widen(g[p, several_nr], grad, pitch)
            w = weight[p % groups * several + several_nr]
            rows, length = (1, grad.size) if _finite(w) else (oh, ow)
            for t in range(taps):
                factor = w[t]
                for y in range(rows):
                    line, values = target[distances[t] + y * pitch :], grad[y * pitch :]
                    for k in range(length):
                        line[k] += factor * values[k]
        _gather(scratch, out[p], geometry)


@kernel(reads(3), reads(4), writes(3), wholes(10))
def weight_grad(x: Any, g: Any, partial: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Gradient of the weight of each plane in [low, high), (N * groups, several, taps); other shapes as in `convolve`."""
    several, oh, ow = g.shape[1], g.shape[2], g.shape[3]
    taps = partial.shape[2]
    scratch = np.zeros(_split((x.shape[1], x.shape[2]), geometry), x.dtype)
    source, pitch, distances = scratch.ravel(), scratch.shape[3], _distances(scratch, geometry)
    grad = np.zeros((oh - 1) * pitch + ow, g.dtype)
    for p in range(low, high):
        _spread(x[p], scratch, geometry)
        rows, length = (1, grad.size) if _finite(source) else (oh, ow)
        for several_nr in range(several):
            _widen(g[p, several_nr], grad, pitch)
            for t in range(taps):
                total = x.dtype.type(0)
                for y in range(rows):
                    start = y * pitch
                    total += _dot(grad[start : start + length], source[distances[t] + start : distances[t] + start + length])
                partial[p, several_nr, t] = total
