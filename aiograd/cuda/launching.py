"""Launching: how operations ask for a kernel.

``launch(kernel, grid, block, *args, writes=(out,))``: arrays among the arguments become flat pointers at their first element, whatever is
pending in them is launched first, and the call returns at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.driver.protocol import Driver, Pointer
from aiograd.errors import ArgumentError, DeviceMismatchError

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
    for array in arrays:
        if array.device is not device:
            raise DeviceMismatchError(f"{kernel.__name__}: arrays live on {device.name} and {array.device.name}. Move them with .to().")
    with device.lock:
        for array in arrays:
            array.flush()
        targets = tuple({id(array.buffer): array.buffer for array in writes}.values())
        for buffer in targets:
            device.before_write(buffer)
        reads = tuple({id(array.buffer): array.buffer for array in arrays if all(array.buffer is not buffer for buffer in targets)}.values())
        places = tuple([_Place(value) if value.__class__ is CudaArray else value for value in args])

        def run(driver: Driver, stream: Any) -> None:
            driver.launch(kernel, blocks, threads, tuple([value.pointer() if value.__class__ is _Place else value for value in places]), stream)

        device.enqueue(kernel.__name__, run, reads, targets)


class _Place:
    """Where an array lies, of which the buffer may not have memory yet."""

    __slots__ = ("buffer", "offset", "dtype", "extent")

    def __init__(self, array: CudaArray) -> None:
        self.buffer = array.buffer
        self.offset = array.offset
        self.dtype = array.dtype
        self.extent = (array.buffer.nbytes - array.offset) // array.dtype.itemsize

    def pointer(self) -> Pointer:
        return Pointer(self.buffer.memory, self.offset, self.dtype, self.extent)


def spread(device: CudaDevice, n: int) -> tuple[int, int]:
    """Grid and block for a kernel that goes through `n` elements in strides of the whole grid."""
    properties = device.properties
    return max(1, min(properties.blocks, math.ceil(n / properties.threads))), properties.threads


def _three(size: _Size) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, (int, np.integer)) else size
    a, b, c = (*[int(value) for value in sizes], 1, 1, 1)[:3]
    return a, b, c
