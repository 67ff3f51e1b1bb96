"""Sorting keys with the positions they came from, and searching in sorted keys.

Note [A network on pairs]
    Bitonic networks do not keep the order of equal keys, but no two pairs (key, position) are equal, so here they do. Keys are 64-bit unsigned
    integers in the order of the values (`sortable`). A row is padded to a power of two with the largest key and positions past the end; rows up to a
    tile are sorted by one block in shared memory, longer ones tile by tile, then merged through global memory.

Source: Batcher, Sorting networks and their applications (1968).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda

from aiograd.cuda.kernels.device_function import device_function
from aiograd.cuda.kernels.scalar import TYPES

_u4 = TYPES["u4"]
_u8 = TYPES["u8"]
_i4 = TYPES["i4"]
_i8 = TYPES["i8"]

_LAST = np.uint64(2**64 - 1)


@functools.cache
def sortable(kind: str, descending: bool) -> Any:
    """A kernel that makes keys of the bits of values of a kind: ``f4, f8, i4, i8, u4, u8``. NaNs are one largest value, as are both zeros one."""
    size = int(kind[1]) * 8
    top = np.uint64(1 << (size - 1))
    ones = np.uint64((1 << size) - 1)
    infinity = np.uint64(0x7F800000 if size == 32 else 0x7FF0000000000000)
    zero = np.uint64(0)
    floating = kind[0] == "f"
    signed = kind[0] == "i"
    turned = ones if descending else zero

    def keys_of_values(keys: Any, bits: Any, n: int) -> None:
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            b = _u8(bits[i])
            if floating:
                if (b & (ones ^ top)) > infinity:
                    b = ones
                elif b == top or b == zero:
                    b = top
                elif b & top:
                    b = b ^ ones
                else:
                    b = b ^ top
            elif signed:
                b = b ^ top
            keys[i] = b ^ turned

    return keys_of_values


@functools.cache
def _run_merger(tile: int) -> Any:
    """A device function ``(k, v, start, size, stride)``: the steps from a stride on, within a tile, of the merge of runs of `size`."""

    @device_function
    def merge_runs(k: Any, v: Any, start: int, size: int, stride: int) -> None:
        while stride > 0:
            for p in range(cuda.threadIdx.x, tile // 2, cuda.blockDim.x):
                low = 2 * p - (p & (stride - 1))
                high = low + stride
                later = k[low] > k[high] or (k[low] == k[high] and v[low] > v[high])
                if later == (((start + low) & size) == 0):
                    key = k[low]
                    k[low] = k[high]
                    k[high] = key
                    position = v[low]
                    v[low] = v[high]
                    v[high] = position
            cuda.syncthreads()
            stride = stride // 2

    return merge_runs


@functools.cache
def block_sort(tile: int) -> Any:
    """A kernel that sorts tiles of rows, each in the direction that the merges after it want."""
    merge_runs = _run_merger(tile)

    def sort_tiles(keys: Any, order: Any, source: Any, length: int, padded: int, stored: int) -> None:
        k = cuda.shared.array(tile, _u8)
        v = cuda.shared.array(tile, _i4)
        tiles = padded // tile
        row = cuda.blockIdx.x // tiles
        start = (cuda.blockIdx.x - row * tiles) * tile
        for i in range(cuda.threadIdx.x, tile, cuda.blockDim.x):
            if start + i < length:
                k[i] = source[_i8(row) * length + start + i]
            else:
                k[i] = _LAST
            v[i] = start + i
        cuda.syncthreads()
        size = 2
        while size <= tile:
            merge_runs(k, v, start, size, size // 2)
            size = size * 2
        for i in range(cuda.threadIdx.x, tile, cuda.blockDim.x):
            if start + i < stored:
                keys[_i8(row) * stored + start + i] = k[i]
                order[_i8(row) * stored + start + i] = v[i]

    return sort_tiles


@functools.cache
def block_merge(tile: int) -> Any:
    """A kernel that finishes, within tiles, the merge of runs of `size`."""
    merge_runs = _run_merger(tile)

    def merge_tiles(keys: Any, order: Any, padded: int, size: int) -> None:
        k = cuda.shared.array(tile, _u8)
        v = cuda.shared.array(tile, _i4)
        tiles = padded // tile
        row = cuda.blockIdx.x // tiles
        start = (cuda.blockIdx.x - row * tiles) * tile
        base = _i8(row) * padded + start
        for i in range(cuda.threadIdx.x, tile, cuda.blockDim.x):
            k[i] = keys[base + i]
            v[i] = order[base + i]
        cuda.syncthreads()
        merge_runs(k, v, start, size, tile // 2)
        for i in range(cuda.threadIdx.x, tile, cuda.blockDim.x):
            keys[base + i] = k[i]
            order[base + i] = v[i]

    return merge_tiles


def merge_step(keys: Any, order: Any, pairs: int, padded: int, size: int, stride: int) -> None:
    """One step, of a stride beyond a tile, of the merge of runs of `size`."""
    for i in range(cuda.grid(1), pairs, cuda.gridsize(1)):
        row = i // (padded // 2)
        p = i - row * (padded // 2)
        place = 2 * p - (p & (stride - 1))
        low = row * padded + place
        high = low + stride
        first = keys[low]
        second = keys[high]
        later = first > second or (first == second and order[low] > order[high])
        if later == ((place & size) == 0):
            keys[low] = second
            keys[high] = first
            position = order[low]
            order[low] = order[high]
            order[high] = position


def _search(right: bool) -> Any:
    def search(out: Any, x: Any, values: Any, n: int, length: int) -> None:
        """Where each value would go into sorted `x`; NaNs are at its end."""
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            value = values[i]
            low = _i8(0)
            high = _i8(length)
            while low < high:
                middle = (low + high) // 2
                here = x[middle]
                if right:  # go on while here <= value
                    further = here <= value or value != value
                else:  # go on while here < value
                    further = here < value or (value != value and here == here)
                if further:
                    low = middle + 1
                else:
                    high = middle
            out[i] = low

    return search


SEARCH = {side: _search(side == "right") for side in ("left", "right")}
