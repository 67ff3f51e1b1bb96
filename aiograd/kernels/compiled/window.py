"""Pooling, unfolding and folding of windows, plane by plane. Geometry comes as (kh, kw, sh, sw, ph, pw, dh, dw), with the numbers of
windows (oh, ow) after it where columns are involved."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types  # type: ignore[import-untyped]

from aiograd.kernels.compiled.jit import inline, kernel, reads, wholes, writes


@inline
def inside(offset: int, stride: int, length: int, count: int) -> tuple[int, int]:
    """The range of windows whose position ``window * stride + offset`` lies in [0, length)."""
    first = 0 if offset >= 0 else (-offset + stride - 1) // stride
    last = (length - 1 - offset) // stride + 1 if length > offset else 0
    return min(first, count), max(min(last, count), min(first, count))


@kernel(reads(3), writes(3), writes(3, types.uint8), wholes(8))
def max_pool(x: Any, out: Any, index: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Maximum of each window and the tap it came from: the first of equals, the first NaN before all."""
    kh, kw, sh, sw, ph, pw, dh, dw = geometry
    height, width = x.shape[1], x.shape[2]
    oh, ow = out.shape[1], out.shape[2]
    for p in range(low, high):
        plane = x[p]
        for oy in range(oh):
            best, taps = out[p, oy], index[p, oy]
            best[:] = -np.inf
            taps[:] = 255
            for i in range(kh):
                y = oy * sh - ph + i * dh
                if y < 0 or y >= height:
                    continue
                row = plane[y]
                for j in range(kw):
                    offset = j * dw - pw
                    first, last = inside(offset, sw, width, ow)
                    tap = np.uint8(i * kw + j)
                    line = row[first * sw + offset :]
                    values, names = best[first:last], taps[first:last]
                    for o in range(values.size):
                        v = line[o * sw]
                        top = values[o]
                        # not (v <= top): larger, or either is NaN; a NaN that came first stays
                        better = (not (v <= top) and top == top) or names[o] == 255
                        values[o] = v if better else top
                        names[o] = tap if better else names[o]


@kernel(reads(3), reads(3, types.uint8), writes(3), wholes(8))
def max_unpool(g: Any, index: Any, out: Any, geometry: Any, block: int, low: int, high: int) -> None:
    """Add each of `g` to the position its tap names."""
    kh, kw, sh, sw, ph, pw, dh, dw = geometry
    oh, ow = g.shape[1], g.shape[2]
    for p in range(low, high):
        plane = out[p]
        plane[:] = 0
        for oy in range(oh):
            grad, taps = g[p, oy], index[p, oy]
            for ox in range(ow):
                tap = np.int64(taps[ox])
                i = tap // kw
                plane[oy * sh - ph + i * dh, ox * sw - pw + (tap - i * kw) * dw] += grad[ox]


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
