"""BufferView: which elements of a buffer an array has, and where they lie; what can be known of an array at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.cuda.buffer import Buffer
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.layout import is_contiguous
from aiograd.running.types import Shape


class BufferView:
    """Elements of a buffer.

    Args:
        buffer: the memory they lie in.
        offset: bytes from the start of the buffer to the first element.
        shape, strides: elements per axis, and bytes between neighbours along it.
        dtype: of the elements.
        base: the array that owns the memory; None if this one does.
    """

    __slots__ = ("buffer", "offset", "shape", "strides", "dtype", "base", "__weakref__")

    def __init__(self, buffer: Buffer, offset: int, shape: Shape, strides: Shape, dtype: np.dtype[Any], base: BufferView | None) -> None:
        self.buffer: Buffer = buffer
        self.offset: int = offset
        self.shape: Shape = shape
        self.strides: Shape = strides
        self.dtype: np.dtype[Any] = dtype
        self.base: BufferView | None = base

    @property
    def device(self) -> DeviceCore:
        """The name of the device of the memory."""
        return self.buffer.device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if the elements lie in C order without gaps."""
        return is_contiguous(self.shape, self.strides, self.dtype.itemsize)

    @property
    def is_whole(self) -> bool:
        """True if it is all of its buffer, in C order."""
        return self.offset == 0 and self.is_contiguous and self.nbytes == self.buffer.nbytes

    def flush(self) -> None:
        """Launch the pending expression, so that commands that come later find the values."""
        self.buffer.flush()
