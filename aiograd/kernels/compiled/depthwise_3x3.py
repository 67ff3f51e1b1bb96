"""Depthwise convolution by a window of 3 × 3 and stride 1 or 2, in registers.

Note [A strip of a plane]
    A strip is as many columns as two vectors hold. Its rows are loaded one after the other, each three times, shifted by a column, with zeros
    for padding; a row adds to the sums of the three rows of outputs that see it, which stay in registers until the last of the three.
    So a number is loaded three times and not nine, and nothing is copied to scratch memory (see ``depthwise``, for all other windows).

Note [Stride 2]
    A strip is as many columns of outputs as a vector holds. Two vectors of neighbouring inputs are taken apart into the even and the odd ones, which
    the first and the second tap meet; the third meets the even ones of two columns on. Rows of padding are loaded as rows of no width: with a
    branch in their place the sums leave their registers, which takes four times as long. A row of the input's gradient is put together likewise:
    of two neighbouring columns one is met by two taps, the other by one.

Measured by ``tests/benchmarks/layers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from aiograd.kernels.compiled.jit import inline, kernel, reads, wholes, writes
from aiograd.kernels.compiled.vectors import filled, lanes, load, multiply_add, store, total


def _picked(numbers: Callable[[int], list[int]]) -> Any:
    """A function of two vectors that gives the vector of some of their lanes.

    Args:
        numbers: gives those lanes, counted through both vectors, from the number of lanes of a vector.
    """

    @intrinsic
    def picked(context: Any, a: Any, b: Any) -> Any:
        def codegen(target: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.shuffle_vector(*args, ir.Constant(ir.VectorType(ir.IntType(32), a.lanes), numbers(a.lanes)))

        return a(a, a), codegen

    return picked


_even = _picked(lambda n: list(range(0, 2 * n, 2)))
_odd = _picked(lambda n: list(range(1, 2 * n, 2)))
_mixed = _picked(lambda n: [i // 2 + i % 2 * n for i in range(n)])
_mixed_rest = _picked(lambda n: [i // 2 + i % 2 * n for i in range(n, 2 * n)])


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


@inline
def _taps(x: Any, row: int, column: int, width: int, count: int, inside: bool) -> Any:
    """The inputs that the three taps of a row of windows of stride 2 meet, for `count` windows; zeros where the row is not `inside` the plane."""
    step = lanes(x)
    span = width if inside else 0
    below, above = min(2 * count, step), max(2 * count - step, 0)
    a, b = load(x, row, column, span, below), load(x, row, column + step, span, above)
    c, d = load(x, row, column + 2, span, below), load(x, row, column + 2 + step, span, above)
    return _even(a, b), _odd(a, b), _even(c, d)


@kernel(reads(1), reads(2), reads(1), writes(1), wholes(7))
def convolve_by_2(x: Any, weight: Any, bias: Any, out: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """`convolve` with stride 2."""
    several, height, width, oh, ow, ph, pw = geometry
    step = lanes(x)
    zero = filled(x.dtype.type(0))
    for p in range(low, high):
        channel = p % len(weight)
        w = weight[channel]
        shift = filled(bias[channel]) if bias.size else zero
        plane, target = p // several * height * width, p * oh * ow
        for column in range(0, ow, step):
            count = min(ow - column, step)
            first = 2 * column - pw
            a, b, c = _taps(x, plane - ph * width, first, width, count, ph == 0)
            for y in range(oh):
                sums = _row(a, b, c, w, 0, shift)
                top = 2 * y + 1 - ph
                a, b, c = _taps(x, plane + top * width, first, width, count, 0 <= top < height)
                sums = _row(a, b, c, w, 3, sums)
                a, b, c = _taps(x, plane + (top + 1) * width, first, width, count, -1 <= top < height - 1)
                store(_row(a, b, c, w, 6, sums), out, target + y * ow + column, count)


@inline
def _pair(left: Any, right: Any, w: Any, first: int, sums: Any) -> Any:
    """Add the terms of the first and the third tap of a row to one column of the input's gradient."""
    return multiply_add(filled(w[first + 2]), left, multiply_add(filled(w[first]), right, sums))


@inline
def _put(both: Any, one: Any, padding: int, out: Any, place: int, count: int) -> None:
    """Store the columns that two taps meet and the columns that one meets in turns."""
    step = lanes(out)
    if padding % 2:
        both, one = one, both
    store(_mixed(both, one), out, place, count)
    store(_mixed_rest(both, one), out, place + step, max(count - step, 0))


@kernel(reads(1), reads(2), writes(1), wholes(7))
def input_grad_by_2(g: Any, weight: Any, out: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Gradient of the planes in [low, high) of the input of `convolve_by_2` with one plane of outputs each; `g` is the gradient of its out."""
    _, height, width, oh, ow, ph, pw = geometry
    step = lanes(g)
    zero = filled(g.dtype.type(0))
    for p in range(low, high):
        w = weight[p % len(weight)]
        source, plane = p * oh * ow, p * height * width
        for column in range(0, width, 2 * step):
            # of two neighbouring columns of the input, one is met by the first tap at `right` and by the third at `left`, the other by the second tap
            first = (column + pw + 1) // 2 - 1
            left = right = zero
            for r in range(ph // 2 - 1, (height - 1 + ph) // 2 + 1):
                left_above, right_above = left, right
                left = right = zero
                if 0 <= r < oh:
                    left, right = load(g, source + r * ow, first, ow, step), load(g, source + r * ow, first + 1, ow, step)
                middle, middle_above = (left, left_above) if pw % 2 else (right, right_above)
                y = 2 * r - ph
                if y >= 0:
                    both = _pair(left_above, right_above, w, 6, _pair(left, right, w, 0, zero))
                    one = multiply_add(filled(w[7]), middle_above, multiply_add(filled(w[1]), middle, zero))
                    _put(both, one, pw, out, plane + y * width + column, width - column)
                if 0 <= y + 1 < height:
                    one = multiply_add(filled(w[4]), middle, zero)
                    _put(_pair(left, right, w, 3, zero), one, pw, out, plane + (y + 1) * width + column, width - column)


@kernel(reads(1), reads(1), writes(2), wholes(7))
def weight_grad_by_2(x: Any, g: Any, partial: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """`weight_grad` with stride 2."""
    several, height, width, oh, ow, ph, pw = geometry
    step = lanes(x)
    zero = filled(x.dtype.type(0))
    for p in range(low, high):
        plane, source = p // several * height * width, p * oh * ow
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = s8 = zero
        for column in range(0, ow, step):
            count = min(ow - column, step)
            first = 2 * column - pw
            a, b, c = _taps(x, plane - ph * width, first, width, count, ph == 0)
            for y in range(oh):
                grad = load(g, source + y * ow, column, ow, step)
                s0, s1, s2 = multiply_add(a, grad, s0), multiply_add(b, grad, s1), multiply_add(c, grad, s2)
                top = 2 * y + 1 - ph
                a, b, c = _taps(x, plane + top * width, first, width, count, 0 <= top < height)
                s3, s4, s5 = multiply_add(a, grad, s3), multiply_add(b, grad, s4), multiply_add(c, grad, s5)
                a, b, c = _taps(x, plane + (top + 1) * width, first, width, count, -1 <= top < height - 1)
                s6, s7, s8 = multiply_add(a, grad, s6), multiply_add(b, grad, s7), multiply_add(c, grad, s8)
        sums = partial[p]
        sums[0], sums[1], sums[2] = total(s0), total(s1), total(s2)
        sums[3], sums[4], sums[5] = total(s3), total(s4), total(s5)
        sums[6], sums[7], sums[8] = total(s6), total(s7), total(s8)
