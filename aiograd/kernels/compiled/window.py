"""Pooling, unfolding and folding of windows, plane by plane.

Geometry comes as (kh, kw, sh, sw, ph, pw, dh, dw), with the numbers of
windows (oh, ow) after it where columns are involved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from aiograd.kernels.compiled.jit import inline, kernel, reads, wholes, writes


@inline
def inside(offset: int, stride: int, length: int, count: int) -> tuple[int, int]:
    """The range of windows with a position ``window * stride + offset`` in [0, length)."""
    first = 0 if offset >= 0 else (-offset + stride - 1) // stride
    last = (length - 1 - offset) // stride + 1 if length > offset else 0
    return min(first, count), max(min(last, count), min(first, count))


@inline
def _better(value: Any, top: Any) -> bool:
    """True if a value replaces the best so far: it is larger, or NaN; a NaN that came first stays."""
    return not (value <= top) and top == top


@inline
def _max_pool_pairs(upper: Any, lower: Any, best: Any, taps: Any) -> None:
    """Windows of 2 x 2 side by side."""
    zero, one, two, three = np.int32(0), np.int32(1), np.int32(2), np.int32(3)
    for o in range(best.size):
        top, tap = upper[2 * o], zero
        value = upper[2 * o + 1]
        better = _better(value, top)
        top, tap = (value if better else top), (one if better else tap)
        value = lower[2 * o]
        better = _better(value, top)
        top, tap = (value if better else top), (two if better else tap)
        value = lower[2 * o + 1]
        better = _better(value, top)
        best[o] = value if better else top
        taps[o] = three if better else tap


@inline
def _taps_inside(position: int, step: int, count: int, length: int) -> tuple[int, int]:
    """The range of taps of a window at `position` that lie in [0, length)."""
    first = (step - 1 - position) // step if position < 0 else 0
    last = (length - 1 - position) // step + 1 if length > position else 0
    return first, min(last, count)


@inline
def _max_pool_row(plane: Any, y: int, columns: Any, best: Any, taps: Any, geometry: Any) -> None:
    """Windows that begin in row `y` of the plane, which may lie outside of it; `columns` holds the range of each window's columns."""
    kh, kw, _, sw, _, pw, dh, dw = geometry
    top_tap, bottom_tap = _taps_inside(y, dh, kh, plane.shape[0])
    for o in range(best.size):
        x = o * sw - pw
        left_tap, right_tap = columns[o]
        tap = np.int32(top_tap * kw + left_tap)
        top = plane[y + top_tap * dh, x + left_tap * dw]
        for i in range(top_tap, bottom_tap):
            for j in range(left_tap, right_tap):
                value = plane[np.uintp(y + i * dh), np.uintp(x + j * dw)]
                better = _better(value, top)
                top = value if better else top
                tap = np.int32(i * kw + j) if better else tap
        best[o] = top
        taps[o] = tap


@kernel(reads(3), writes(3), writes(3, types.uint8), wholes(8))
def max_pool(x: Any, out: Any, index: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Maximum of each window and the tap it came from: the first of equals, the first NaN before all."""
    kh, kw, sh, sw, ph, pw, dh, dw = geometry
    pairs = kh == kw == sh == sw == 2 and ph == pw == 0 and dh == dw == 1
    taps = np.empty(out.shape[2], np.int32)
    columns = [_taps_inside(o * sw - pw, dw, kw, x.shape[2]) for o in range(taps.size)]
    for p in range(low, high):
        plane = x[p]
        for oy in range(out.shape[1]):
            if pairs:
                _max_pool_pairs(plane[2 * oy], plane[2 * oy + 1], out[p, oy], taps)
            else:
                _max_pool_row(plane, oy * sh - ph, columns, out[p, oy], taps, geometry)
            names = index[p, oy]
            for o in range(names.size):
                names[o] = np.uint8(taps[o])


@kernel(reads(3), reads(3, types.uint8), writes(3), wholes(8))
def max_unpool(g: Any, index: Any, out: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Add each of `g` to the position its tap names."""
    kh, kw, sh, sw, ph, pw, dh, dw = geometry
    width = out.shape[2]
    offsets = np.empty(kh * kw, np.int64)
    for tap in range(kh * kw):
        offsets[tap] = tap // kw * dh * width + tap % kw * dw
    for p in range(low, high):
        out[p] = 0
        plane = out[p].ravel()
        for oy in range(g.shape[1]):
            grad, taps = g[p, oy], index[p, oy]
            start = (oy * sh - ph) * width - pw
            for ox in range(grad.size):
                plane[np.uintp(start + ox * sw + offsets[np.uintp(taps[ox])])] += grad[ox]


@kernel(reads(3), writes(4), wholes(10))
def unfold(x: Any, columns: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Windows of plane p into ``columns[p, tap, oy * ow + ox]``."""
    kh, kw, sh, sw, ph, pw, dh, dw, oh, ow = geometry
    height, width = x.shape[1], x.shape[2]
    for p in range(low, high):
        plane = x[p]
        for i in range(kh):
            for j in range(kw):
                offset = j * dw - pw
                first, last = inside(offset, sw, width, ow)
                for oy in range(oh):
                    y = oy * sh - ph + i * dh
                    line = columns[p, i * kw + j, oy]
                    if y < 0 or y >= height:
                        line[:] = 0
                        continue
                    row = plane[y, first * sw + offset :]
                    line[:first] = 0
                    line[last:] = 0
                    part = line[first:last]
                    if sw == 1:
                        for o in range(part.size):
                            part[o] = row[o]
                    else:
                        for o in range(part.size):
                            part[o] = row[o * sw]


@kernel(reads(4), writes(3), wholes(10))
def fold(columns: Any, out: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """The adjoint of `unfold`."""
    kh, kw, sh, sw, ph, pw, dh, dw, oh, ow = geometry
    height, width = out.shape[1], out.shape[2]
    for p in range(low, high):
        plane = out[p]
        plane[:] = 0
        for i in range(kh):
            for j in range(kw):
                offset = j * dw - pw
                first, last = inside(offset, sw, width, ow)
                for oy in range(oh):
                    y = oy * sh - ph + i * dh
                    if y < 0 or y >= height:
                        continue
                    row = plane[y, first * sw + offset :]
                    part = columns[p, i * kw + j, oy, first:last]
                    if sw == 1:
                        for o in range(part.size):
                            row[o] += part[o]
                    else:
                        for o in range(part.size):
                            row[o * sw] += part[o]
