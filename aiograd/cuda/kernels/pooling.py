"""Pooling over windows of the last two axes.

Each thread computes whole elements of its result, adjoints too, taps in order, so nothing is added by two threads at once.

Arguments named ``x_*``, ``y_*`` are sizes; sources are contiguous planes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda


@functools.lru_cache(maxsize=64)
def largest(number: Any, tap: Any) -> Callable[..., None]:
    """A kernel for maxima and the taps they came from: the first of equals, the first NaN before all.

    Args:
        number: numba type in which to compare.
        tap: numba type of a tap.
    """

    def max_pool(
        out: Any, taps: Any, x: Any, size: int, height: int, width: int, y_height: int, y_width: int, x_height: int, x_width: int,
        stride_y: int, stride_x: int, pad_y: int, pad_x: int, step_y: int, step_x: int,
    ) -> None:  # fmt: skip
        for e in range(cuda.grid(1), size, cuda.gridsize(1)):
            left = e % y_width * stride_x - pad_x
            top = e // y_width % y_height * stride_y - pad_y
            plane = e // (y_width * y_height) * x_height * x_width
            found = -1
            place = 0
            best = number(0)
            for r in range(height):
                yy = top + r * step_y
                if 0 <= yy and yy < x_height:
                    for s in range(width):
                        xx = left + s * step_x
                        if 0 <= xx and xx < x_width:
                            value = number(x[plane + yy * x_width + xx])
                            if found < 0 or (best == best and not value <= best):
                                best = value
                                found = r * width + s
                                place = plane + yy * x_width + xx
            out[e] = x[place]
            taps[e] = tap(found)

    return max_pool


@functools.lru_cache(maxsize=16)
def scattered(number: Any, made: Any) -> Callable[..., None]:
    """A kernel that adds values where the taps name places of the input."""

    def max_unpool(
        out: Any, y: Any, taps: Any, size: int, height: int, width: int, y_height: int, y_width: int, x_height: int, x_width: int,
        stride_y: int, stride_x: int, pad_y: int, pad_x: int, step_y: int, step_x: int,
    ) -> None:  # fmt: skip
        for e in range(cuda.grid(1), size, cuda.gridsize(1)):
            xx = e % x_width
            yy = e // x_width % x_height
            plane = e // (x_width * x_height) * y_height * y_width
            total = number(0)
            for r in range(height):
                i = yy + pad_y - r * step_y
                if i >= 0 and i % stride_y == 0 and i // stride_y < y_height:
                    for s in range(width):
                        j = xx + pad_x - s * step_x
                        if j >= 0 and j % stride_x == 0 and j // stride_x < y_width:
                            place = plane + i // stride_y * y_width + j // stride_x
                            if taps[place] == r * width + s:
                                total += number(y[place])
            out[e] = made(total)

    return max_unpool


@functools.lru_cache(maxsize=2)
def gathered(index: Any) -> Callable[..., None]:
    """A kernel that takes the values at the places that the windows' taps name; `index` is the numba type of a place."""

    def max_gather(
        out: Any, x: Any, taps: Any, size: int, height: int, width: int, y_height: int, y_width: int, x_height: int, x_width: int,
        stride_y: int, stride_x: int, pad_y: int, pad_x: int, step_y: int, step_x: int,
    ) -> None:  # fmt: skip
        for e in range(cuda.grid(1), size, cuda.gridsize(1)):
            tap = index(taps[e])
            xx = e % y_width * stride_x - pad_x + tap % width * step_x
            yy = e // y_width % y_height * stride_y - pad_y + tap // width * step_y
            out[e] = x[(e // (y_width * y_height) * x_height + yy) * x_width + xx]

    return max_gather


@functools.lru_cache(maxsize=16)
def mean(number: Any, made: Any) -> Callable[..., None]:
    """A kernel for means; `whole` says that padding counts."""

    def avg_pool(
        out: Any, x: Any, size: int, whole: bool, height: int, width: int, y_height: int, y_width: int, x_height: int, x_width: int,
        stride_y: int, stride_x: int, pad_y: int, pad_x: int,
    ) -> None:  # fmt: skip
        for e in range(cuda.grid(1), size, cuda.gridsize(1)):
            left = e % y_width * stride_x - pad_x
            top = e // y_width % y_height * stride_y - pad_y
            plane = e // (y_width * y_height) * x_height * x_width
            total = number(0)
            for yy in range(max(top, 0), min(top + height, x_height)):
                for xx in range(max(left, 0), min(left + width, x_width)):
                    total += number(x[plane + yy * x_width + xx])
            count = height * width
            if not whole:
                count = (min(top + height, x_height) - max(top, 0)) * (min(left + width, x_width) - max(left, 0))
            out[e] = made(total / number(count))

    return avg_pool


@functools.lru_cache(maxsize=16)
def spread_evenly(number: Any, made: Any) -> Callable[..., None]:
    """A kernel that spreads values over their windows; `whole` says that padding counts."""

    def avg_unpool(
        out: Any, y: Any, size: int, whole: bool, height: int, width: int, y_height: int, y_width: int, x_height: int, x_width: int,
        stride_y: int, stride_x: int, pad_y: int, pad_x: int,
    ) -> None:  # fmt: skip
        for e in range(cuda.grid(1), size, cuda.gridsize(1)):
            xx = e % x_width
            yy = e // x_width % x_height
            plane = e // (x_width * x_height) * y_height * y_width
            total = number(0)
            for r in range(height):
                i = yy + pad_y - r
                if i >= 0 and i % stride_y == 0 and i // stride_y < y_height:
                    for s in range(width):
                        j = xx + pad_x - s
                        if j >= 0 and j % stride_x == 0 and j // stride_x < y_width:
                            count = height * width
                            if not whole:
                                top = yy - r
                                left = xx - s
                                count = (min(top + height, x_height) - max(top, 0)) * (min(left + width, x_width) - max(left, 0))
                            total += number(y[plane + i // stride_y * y_width + j // stride_x]) / number(count)
            out[e] = made(total)

    return avg_unpool
