"""Convolution as a matrix product with a left operand that is read through the windows in place.

Rows of the product are windows, columns are output channels, and the sums run over channels and taps. The input gradient of a
convolution with stride 1 is such a convolution too (of the padded gradient with the mirrored weight); the weight gradient has
channels and taps as rows and sums over windows.

An image is copied once into scratch memory with its padding; everything else stays where it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from aiograd.kernels.compiled.gemm_microkernel import ROWS, gemm_microkernel
from aiograd.kernels.compiled.jit import inline, kernel, reads, whole, writes
from aiograd.kernels.compiled.matrix import blocks
from aiograd.kernels.compiled.transpose import transposed_copy

#: windows with results that are turned into NCHW order together; a multiple of ROWS and of the side of what `transposed_copy` copies
_BAND = 24


@inline
def _copy_padded(image: Any, padded: Any, top: int, left: int) -> None:
    """Copy (C, H, W) into the middle of (C, H + 2 * top, W + 2 * left)."""
    channels, height, width = image.shape
    for c in range(channels):
        for y in range(height):
            source, target = image[c, y], padded[c, y + top, left : left + width]
            for x in range(width):
                target[x] = source[x]


@kernel(reads(4), reads(4), reads(1), writes(3), reads(1, types.int64), reads(1, types.int64), whole, whole)
def convolve(x: Any, panels: Any, bias: Any, out: Any, windows: Any, taps: Any, top: int, left: int, block: int, low: int, high: int) -> None:
    """Convolve the images in [low, high).

    Args:
        x: (N, C, H, W).
        panels: (groups, blocks, C / groups * taps, width): the weight's output channels as columns.
        bias: (out,) or empty.
        out: (N, out, windows).
        windows: offset of each window in a padded image, the last repeated to whole blocks of rows.
        taps: offset of each channel and tap of a group from its window.
        top: rows of padding.
        left: columns of padding.
    """
    groups, column_blocks, depth, width = panels.shape
    channels, count = out.shape[1] // groups, out.shape[2]
    padded = np.zeros((x.shape[1], x.shape[2] + 2 * top, x.shape[3] + 2 * left), x.dtype)
    group_size = padded.size // groups
    band = np.empty((_BAND, width), x.dtype)
    for n in range(low, high):
        _copy_padded(x[n], padded, top, left)
        for group in range(groups):
            for row in range(0, count, _BAND):
                rows = min(_BAND, count - row)
                for column_block in range(column_blocks):
                    for r in range(0, rows, ROWS):
                        gemm_microkernel(
                            padded, group * group_size, windows, row + r, taps, depth, panels,
                            (group * column_blocks + column_block) * depth * width, band, r * width, width,
                        )
                    first = group * channels + column_block * width
                    used = min(width, channels - column_block * width)
                    if bias.size:
                        shift = bias[first : first + used]
                        for r in range(rows):
                            line = band[r]
                            for j in range(used):
                                line[j] += shift[j]
                    transposed_copy(band, 0, width, rows, used, out, (n * out.shape[1] + first) * count + row, count)


@kernel(reads(4), reads(3), writes(4), reads(1, types.int64), reads(1, types.int64), whole, whole, whole)
def weight_grad(x: Any, g: Any, partial: Any, taps: Any, windows: Any, top: int, left: int, width: int, block: int, low: int, high: int) -> None:
    """Gradient of the weight, summed over the images in [low, high).

    Args:
        x: (N, C, H, W).
        g: (N, out, windows).
        partial: (blocks, groups, C / groups * taps, columns): columns are the output channels of a group, rounded up to whole panels.
        taps: offset of each channel and tap of a group from its window, the last repeated to whole blocks of rows.
        windows: offset of each window in a padded image.
        top: rows of padding.
        left: columns of padding.
        width: of a panel.
    """
    groups, depth, columns = partial.shape[1], partial.shape[2], partial.shape[3]
    channels, count = g.shape[1] // groups, g.shape[2]
    padded = np.zeros((x.shape[1], x.shape[2] + 2 * top, x.shape[3] + 2 * left), x.dtype)
    group_size = padded.size // groups
    corner = np.empty((ROWS, width), x.dtype)
    panels = np.zeros((columns // width, count, width), x.dtype)
    partial[block] = 0
    for n in range(low, high):
        _copy_padded(x[n], padded, top, left)
        for group in range(groups):
            total = partial[block, group]
            for column_block in range(blocks(channels, width)):
                first = column_block * width
                panel = panels[column_block]
                used = min(width, channels - first)
                transposed_copy(g, (n * g.shape[1] + group * channels + first) * count, count, used, count, panel, 0, width)
                for row in range(0, depth, ROWS):
                    gemm_microkernel(
                        padded, group * group_size, taps, row, windows, count, panels, column_block * count * width, corner, 0, width
                    )
                    for r in range(min(ROWS, depth - row)):
                        line = total[row + r, first : first + width]
                        add = corner[r]
                        for j in range(width):
                            line[j] += add[j]
