"""Launching: how operations ask for a kernel.

``launch(kernel, grid, block, *args, writes=(out,))``: arrays among the arguments become flat pointers at their first element, their pending
expressions are launched first, and the call returns at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.cuda.array import CudaArray, check_same
from aiograd.cuda.command import enqueue
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.driver.protocol import DeviceDriver, Pointer
from aiograd.errors import ArgumentError

_Size = int | tuple[int, ...]


def launch(kernel: Callable[..., None], grid: _Size, block: _Size, *args: Any, writes: Sequence[CudaArray]) -> None:
    """Ask for a kernel; returns at once.

    Args:
        kernel: a plain function in numba's language, which indexes its pointers flat.
        grid, block: blocks, and threads in a block, up to three of each.
        args: CudaArrays, and scalars: numpy scalars keep their dtype, int is int64, float is float64.
        writes: which of the arrays it writes to; it may read them as well.

    Raises:
        DeviceMismatchError: the arrays live on several devices. ArgumentError: no array is written, or an empty grid.
    """
    if not writes:
        raise ArgumentError(f"launching {kernel.__name__}: it writes to none of its arguments; name what it writes")
    device = writes[0].device
    blocks, threads = _three(grid), _three(block)
    if min(*blocks, *threads) < 1:
        raise ArgumentError(f"launching {kernel.__name__} with a grid of {blocks} and blocks of {threads}: an empty array needs no kernel")
    arrays = [value for value in args if value.__class__ is CudaArray]
    check_same(device, kernel.__name__, arrays)
    with device.lock:
        for array in arrays:
            array.flush()
        targets = {id(array.buffer): array.buffer for array in writes}
        for buffer in targets.values():
            buffer.flush_readers()
        reads = {id(array.buffer): array.buffer for array in arrays if id(array.buffer) not in targets}
        places = tuple([_BufferArgument(value) if value.__class__ is CudaArray else value for value in args])

        def run(driver: DeviceDriver, stream: Any) -> None:
            arguments = tuple([value.pointer() if value.__class__ is _BufferArgument else value for value in places])
            driver.launch(kernel, blocks, threads, arguments, stream)

        enqueue(device, kernel.__name__, run, tuple(reads.values()), tuple(targets.values()))


class _BufferArgument:
    """The place of an array in a buffer, which may not have memory yet."""

    __slots__ = ("buffer", "offset", "dtype", "extent")

    def __init__(self, array: CudaArray) -> None:
        self.buffer = array.buffer
        self.offset = array.offset
        self.dtype = array.dtype
        self.extent = (array.buffer.nbytes - array.offset) // array.dtype.itemsize

    def pointer(self) -> Pointer:
        return Pointer(self.buffer.memory, self.offset, self.dtype, self.extent)


def spread(device: DeviceCore, n: int) -> tuple[int, int]:
    """Grid and block for a kernel that goes through `n` elements in strides of the whole grid."""
    properties = device.properties
    return max(1, min(properties.blocks, math.ceil(n / properties.threads))), properties.threads


def _three(size: _Size) -> tuple[int, int, int]:
    if size.__class__ is int:
        return size, 1, 1
    sizes = (size,) if isinstance(size, (int, np.integer)) else size
    a, b, c = (*[int(value) for value in sizes], 1, 1, 1)[:3]
    return a, b, c
