"""Where the elements of arrays lie: offsets, extents, and the axes of a loop over several arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.compiler.calls import Ref


def offsets(ref: Ref) -> list[int]:
    """Bytes from the first element to each, in the order of the elements."""
    total = np.zeros(ref.shape or (), np.int64)
    for axis, (length, stride) in enumerate(zip(ref.shape or (), ref.strides or (), strict=True)):
        total += (np.arange(length) * stride).reshape((-1,) + (1,) * (len(ref.shape or ()) - axis - 1))
    return list(map(int, total.ravel()))


def places_in(ref: Ref, offset: int, whole: Ref) -> list[int]:
    """The places in `whole` of the elements of a view of it."""
    by_offset = {each: place for place, each in enumerate(offsets(whole))}
    return [by_offset[offset + each] for each in offsets(ref)]


def span(ref: Ref) -> tuple[int, int]:
    """The bytes, from the first element, that an array lies in."""
    dtype: Any = ref.dtype
    if not math.prod(ref.shape or ()):
        return 0, 0
    extents = [stride * (length - 1) for length, stride in zip(ref.shape or (), ref.strides or (), strict=True)]
    return sum(min(each, 0) for each in extents), sum(max(each, 0) for each in extents) + dtype.itemsize


def broadcast_strides(ref: Ref, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides with which an array takes part in a loop over `shape`."""
    own, strides = ref.shape or (), ref.strides or ()
    missing = len(shape) - len(own)
    return (0,) * missing + tuple([0 if length == 1 else stride for length, stride in zip(own, strides, strict=True)])


def walk(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """Axes, the slowest first, with neighbours that lie in a row put together; for each operand its stride along them."""
    axes = [axis for axis in range(len(shape)) if shape[axis] != 1]
    by = strides[-1] if strides else ()
    axes.sort(key=lambda axis: -abs(by[axis]))
    lengths: list[int] = []
    found: list[list[int]] = [[] for _ in strides]
    for axis in axes:
        if lengths and all([own[-1] == each[axis] * shape[axis] for own, each in zip(found, strides, strict=True)]):
            lengths[-1] *= shape[axis]
            for own, each in zip(found, strides, strict=True):
                own[-1] = each[axis]
            continue
        lengths.append(shape[axis])
        for own, each in zip(found, strides, strict=True):
            own.append(each[axis])
    return lengths, found
