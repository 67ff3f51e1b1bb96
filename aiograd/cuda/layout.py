"""Where elements lie: arithmetic on shapes and strides, which knows no arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from aiograd.running.types import Shape

#: shapes and strides for which an answer is remembered: an operation on small arrays takes a few dozen microseconds in all
_REMEMBERED = 4096


@functools.lru_cache(_REMEMBERED)
def contiguous_strides(shape: Shape, itemsize: int) -> Shape:
    """Bytes between neighbours along each axis of an array in C order."""
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(1, shape[axis + 1])
    return tuple(strides)


@functools.lru_cache(_REMEMBERED)
def is_contiguous(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """True if elements lie in C order without gaps (axes of one element may have any stride)."""
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 0:
            return True
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


@functools.lru_cache(_REMEMBERED)
def lowest(shape: Shape, strides: Shape) -> int:
    """Bytes from the first element to the lowest one of an array: negative if it runs backwards along an axis.

    A pointer to a strided array points there, so that no index is negative.
    """
    return sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True) if stride < 0 and extent)


def merged(extents: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge axes that every array passes through in one go; at least one axis is left.

    Args:
        extents: of the axes, outermost first.
        strides: of each array along them.
    """
    kept: list[int] = []
    steps: list[list[int]] = []
    for axis, extent in enumerate(extents):
        if extent == 1:
            continue
        here = [each[axis] for each in strides]
        if kept and all(last == now * extent for last, now in zip(steps[-1], here, strict=True)):
            kept[-1] *= extent
            steps[-1] = here
        else:
            kept.append(extent)
            steps.append(here)
    if not kept:
        return (1,), [(0,) for _ in strides]
    return tuple(kept), [tuple(step[i] for step in steps) for i in range(len(strides))]
