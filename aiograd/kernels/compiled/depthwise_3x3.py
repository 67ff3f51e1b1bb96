"""Depthwise convolution by a window of 3 × 3 and stride 1, in registers.

Note [A strip of a plane]
    A strip is as many columns as two vectors hold. Its rows are loaded one after the other, each three times, shifted by a column, with zeros
    for padding; a row adds to the sums of the three rows of outputs that see it, which stay in registers until the last of the three.
    So a number is loaded three times and not nine, and nothing is copied to scratch memory (see ``depthwise``, for all other windows).

Measured by ``tests/benchmarks/layers.py``.
"""

from __future__ import annotations

from typing import Any

from aiograd.kernels.compiled.jit import inline, kernel, reads, wholes, writes
from aiograd.kernels.compiled.vectors import filled, lanes, load, multiply_add, store, total


@inline
def _row(a: Any, b: Any, c: Any, w: Any, first: int, sums: Any) -> Any:
    """Add a row of three taps times a row of inputs to the sums."""
    return multiply_add(filled(w[first + 2]), c, multiply_add(filled(w[first + 1]), b, multiply_add(filled(w[first]), a, sums)))


@kernel(reads(1), reads(2), reads(1), writes(1), wholes(7))
def convolve(x: Any, weight: Any, bias: Any, out: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Convolve to the planes of outputs in [low, high).

    Args:
        x: planes of inputs, flat.
        weight: (channels, 9).
        bias: (channels,) or empty.
        out: planes of outputs, flat.
        geometry: planes of outputs per plane of inputs; height and width of these and of those; rows and columns of padding.
    """
    several, height, width, oh, ow, ph, pw = geometry
    step = lanes(x)
    zero = filled(x.dtype.type(0))
    for p in range(low, high):
        channel = p % len(weight)
        w = weight[channel]
        shift = filled(bias[channel]) if bias.size else zero
        plane, target = p // several * height * width, p * oh * ow
        for column in range(0, ow, 2 * step):
            other = column + step
            upper = middle = upper_2 = middle_2 = shift
            for y in range(oh + 2):
                a = b = c = a_2 = b_2 = c_2 = zero
                if 0 <= y - ph < height:
                    row = plane + (y - ph) * width
                    a = load(x, row, column - pw, width, step)
                    b = load(x, row, column - pw + 1, width, step)
                    c = load(x, row, column - pw + 2, width, step)
                    a_2 = load(x, row, other - pw, width, step)
                    b_2 = load(x, row, other - pw + 1, width, step)
                    c_2 = load(x, row, other - pw + 2, width, step)
                upper, upper_2 = _row(a, b, c, w, 6, upper), _row(a_2, b_2, c_2, w, 6, upper_2)
                if y >= 2:
                    place = target + (y - 2) * ow + column
                    store(upper, out, place, ow - column)
                    store(upper_2, out, place + step, max(ow - other, 0))
                upper, upper_2 = _row(a, b, c, w, 3, middle), _row(a_2, b_2, c_2, w, 3, middle_2)
                middle, middle_2 = _row(a, b, c, w, 0, shift), _row(a_2, b_2, c_2, w, 0, shift)


@kernel(reads(1), reads(1), writes(2), wholes(7))
def weight_grad(x: Any, g: Any, partial: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Gradient of the weight of each plane of outputs in [low, high), (planes, 9); other shapes as in `convolve`, `g` is the gradient of its out."""
    several, height, width, oh, ow, ph, pw = geometry
    step = lanes(x)
    zero = filled(x.dtype.type(0))
    for p in range(low, high):
        plane, source = p // several * height * width, p * oh * ow
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = s8 = zero
        for column in range(0, ow, step):
            count = min(ow - column, step)
            upper = middle = zero
            for y in range(oh + 2):
                lower = load(g, source + y * ow, column, ow, step) if y < oh else zero
                a = b = c = zero
                if 0 <= y - ph < height:
                    row = plane + (y - ph) * width
                    a = load(x, row, column - pw, width, count)
                    b = load(x, row, column - pw + 1, width, count)
                    c = load(x, row, column - pw + 2, width, count)
                if y < oh:  # each row of outputs that exists, for a number that is not finite must not meet any other
                    s0, s1, s2 = multiply_add(a, lower, s0), multiply_add(b, lower, s1), multiply_add(c, lower, s2)
                if 1 <= y <= oh:
                    s3, s4, s5 = multiply_add(a, middle, s3), multiply_add(b, middle, s4), multiply_add(c, middle, s5)
                if y >= 2:
                    s6, s7, s8 = multiply_add(a, upper, s6), multiply_add(b, upper, s7), multiply_add(c, upper, s8)
                upper, middle = middle, lower
        sums = partial[p]
        sums[0], sums[1], sums[2] = total(s0), total(s1), total(s2)
        sums[3], sums[4], sums[5] = total(s3), total(s4), total(s5)
        sums[6], sums[7], sums[8] = total(s6), total(s7), total(s8)
