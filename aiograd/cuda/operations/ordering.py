"""Rows of keys brought into order on the device: what sorting and adding at indices are made of."""

from __future__ import annotations

import numpy as np

from aiograd.cuda.array import CudaArray, empty
from aiograd.cuda.kernels import sorting as kernels
from aiograd.cuda.launching import launch, spread

#: keys that a block sorts in shared memory, with their positions; in the simulator fewer, so that the steps beyond happen too
_TILE, _SIMULATED_TILE = 2048, 8


def sorted_pairs(keys: CudaArray) -> tuple[CudaArray, CudaArray]:
    """Rows of keys in ascending order, and which they were.

    Args:
        keys: (rows, length), uint64, C-contiguous.

    Returns:
        (rows, length) uint64, and int32 positions in the row.
    """
    device = keys.device
    rows, length = keys.shape
    padded = 1 << max(1, (length - 1).bit_length())
    tile = min(padded, _SIMULATED_TILE if device.properties.is_simulated else _TILE)
    threads = min(device.properties.threads, tile // 2)
    stored = length if padded == tile else padded
    out, order = empty(device, (rows, stored), np.uint64), empty(device, (rows, stored), np.int32)
    blocks = rows * (padded // tile)
    launch(kernels.block_sort(tile), blocks, threads, out, order, keys, length, padded, stored, writes=(out, order))
    size = 2 * tile
    while size <= padded:
        stride = size // 2
        while stride >= tile:
            pairs = rows * padded // 2
            launch(kernels.merge_step, *spread(device, pairs), out, order, pairs, padded, size, stride, writes=(out, order))
            stride //= 2
        launch(kernels.block_merge(tile), blocks, threads, out, order, padded, size, writes=(out, order))
        size *= 2
    return out[:, :length], order[:, :length]
