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
from aiograd.kernels.compiled.lines import copy_every_second, copy_line, merge_lines, whole_vectors, zeros


@inline
def _split(shape: tuple[int, int], geometry: Any) -> tuple[int, int, int, int]:
    """The shape of the scratch plane: remainders of rows and columns, then rows and columns of each part."""
    _, _, sh, sw, ph, pw, _, _, _, _ = geometry
    return sh, sw, (shape[0] + 2 * ph + sh - 1) // sh, (shape[1] + 2 * pw + sw - 1) // sw


@inline
def _distances(split: Any, geometry: Any) -> Any:
    """Where each tap's first number lies in the flat scratch plane."""
    kh, kw, sh, sw, _, _, dh, dw, _, _ = geometry
    table = np.empty(kh * kw, np.int64)
    for i in range(kh):
        for j in range(kw):
            part = (i * dh % sh) * sw + j * dw % sw
            table[i * kw + j] = (part * split[2] + i * dh // sh) * split[3] + j * dw // sw
    return table


@inline
def _line(top: int, remainder: int, split: Any, geometry: Any) -> int:
    """Place of the numbers of row `top` in the scratch plane of the columns with this remainder, padding included; `sh` rows on, the next line."""
    sh, ph = geometry[2], geometry[4]
    return (((top + ph) % sh * split[1] + remainder) * split[2] + (top + ph) // sh) * split[3]  # type: ignore[no-any-return]


@inline
def _spread(planes: Any, start: int, shape: Any, scratch: Any, split: Any, geometry: Any) -> None:
    """Copy the plane that begins at `start` into the scratch plane; its padding stays as it is."""
    sh, sw, pw = geometry[2], geometry[3], geometry[5]
    for remainder in range(sw):
        first = (remainder - pw) % sw
        left, count = (first + pw) // sw, (shape[1] - first + sw - 1) // sw
        for top in range(sh):
            target = _line(top, remainder, split, geometry) + left
            for y in range(top, shape[0], sh):
                source = start + y * shape[1] + first
                if sw == 1:
                    copy_line(planes, source, scratch, target, count)
                elif sw == 2:
                    copy_every_second(planes, source, scratch, target, count)
                else:
                    for k in range(count):
                        scratch[target + k] = planes[source + k * sw]
                target += split[3]


@inline
def _gather(scratch: Any, split: Any, planes: Any, start: int, shape: Any, geometry: Any) -> None:
    """The inverse of `_spread`."""
    sh, sw, pw = geometry[2], geometry[3], geometry[5]
    for top in range(sh):
        even, odd = _line(top, pw % sw, split, geometry) + pw // sw, _line(top, (pw + 1) % sw, split, geometry) + (pw + 1) // sw
        for y in range(top, shape[0], sh):
            target = start + y * shape[1]
            if sw == 1:
                copy_line(scratch, even, planes, target, shape[1])
            elif sw == 2:
                merge_lines(scratch, even, odd, planes, target, shape[1])
            else:
                for j in range(shape[1]):
                    planes[target + j] = scratch[_line(y, (j + pw) % sw, split, geometry) + (j + pw) // sw]
            even += split[3]
            odd += split[3]


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
    shape = (x.shape[1], x.shape[2])
    split = _split(shape, geometry)
    source, pitch, distances = zeros(split[0] * split[1] * split[2] * split[3], x), split[3], _distances(split, geometry)
    length = whole_vectors((oh - 1) * pitch + ow)
    sums = np.empty(length, x.dtype)
    planes, results = x.ravel(), out.ravel()
    for p in range(low, high):
        _spread(planes, p * shape[0] * shape[1], shape, source, split, geometry)
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
                copy_line(sums, y * pitch, results, ((p * several + several_nr) * oh + y) * ow, ow)


@inline
def _widen(planes: Any, start: int, shape: Any, line: Any, pitch: int) -> None:
    """Copy a plane of outputs into a line of the scratch plane's pitch; what lies between the rows stays as it is."""
    for y in range(shape[0]):
        copy_line(planes, start + y * shape[1], line, y * pitch, shape[1])


@kernel(reads(4), reads(2), writes(3), wholes(10))
def input_grad(g: Any, weight: Any, out: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Gradient of the planes in [low, high); shapes as in `convolve`, `g` and `out` are the gradients of its out and x."""
    several, oh, ow = g.shape[1], g.shape[2], g.shape[3]
    groups, taps = weight.shape[0] // several, weight.shape[1]
    shape = (out.shape[1], out.shape[2])
    split = _split(shape, geometry)
    target, pitch, distances = zeros(split[0] * split[1] * split[2] * split[3], g), split[3], _distances(split, geometry)
    grad = np.zeros(whole_vectors((oh - 1) * pitch + ow), g.dtype)
    grads, planes = g.ravel(), out.ravel()
    for p in range(low, high):
        target[:] = 0
        for several_nr in range(several):
            _widen(grads, (p * several + several_nr) * oh * ow, (oh, ow), grad, pitch)
            w = weight[p % groups * several + several_nr]
            rows, length = (1, grad.size) if _finite(w) else (oh, ow)
            for t in range(taps):
                factor = w[t]
                for y in range(rows):
                    line, values = target[distances[t] + y * pitch :], grad[y * pitch :]
                    for k in range(length):
                        line[k] += factor * values[k]
        _gather(target, split, planes, p * shape[0] * shape[1], shape, geometry)


@kernel(reads(3), reads(4), writes(3), wholes(10))
def weight_grad(x: Any, g: Any, partial: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Gradient of the weight of each plane in [low, high), (N * groups, several, taps); other shapes as in `convolve`."""
    several, oh, ow = g.shape[1], g.shape[2], g.shape[3]
    taps = partial.shape[2]
    shape = (x.shape[1], x.shape[2])
    split = _split(shape, geometry)
    source, pitch, distances = zeros(split[0] * split[1] * split[2] * split[3], x), split[3], _distances(split, geometry)
    grad = np.zeros(whole_vectors((oh - 1) * pitch + ow), g.dtype)
    planes, grads = x.ravel(), g.ravel()
    for p in range(low, high):
        _spread(planes, p * shape[0] * shape[1], shape, source, split, geometry)
        rows, length = (1, grad.size) if _finite(source) else (oh, ow)
        for several_nr in range(several):
            _widen(grads, (p * several + several_nr) * oh * ow, (oh, ow), grad, pitch)
            for t in range(taps):
                total = x.dtype.type(0)
                for y in range(rows):
                    start = y * pitch
                    total += _dot(grad[start : start + length], source[distances[t] + start : distances[t] + start + length])
                partial[p, several_nr, t] = total
