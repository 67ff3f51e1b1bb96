"""Arrays as compiled kernels need them, in C order and aligned. Others are copied, a transposed matrix by blocks."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aiograd.kernels.pool import run
from aiograd.kernels.selection import compiled

NDArray = npt.NDArray[Any]

#: numpy keeps what `np.errstate` sets in the context
_QUIET = contextvars.Context()
_QUIET.run(np.errstate(all="ignore").__enter__)


def quietly(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` without numpy's warnings, in a context of its own: a fraction of the time that ``with np.errstate`` takes."""
    return _QUIET.copy().run(function, *args)


def transposed(x: NDArray) -> NDArray:
    """A contiguous copy of ``swapaxes(x, -1, -2)``.

    Args:
        x: (..., R, C); fast if contiguous.

    Returns:
        (..., C, R).
    """
    kernels = compiled(x.size, x) if x.ndim >= 2 and x.flags.c_contiguous and x.flags.aligned else None
    if kernels is None or min(x.shape[-2:]) < 8:
        return np.ascontiguousarray(np.swapaxes(x, -1, -2))
    rows, columns = x.shape[-2:]
    batch = math.prod(x.shape[:-2])
    out = np.empty((*x.shape[:-2], columns, rows), x.dtype)
    strips = batch * -(-columns // 16)
    run(kernels.layout.transpose, strips, x.size, x.reshape(batch, rows, columns), out.reshape(batch, columns, rows))
    return out


def contiguous(x: NDArray) -> NDArray:
    """`x` itself if it is a C-contiguous, aligned ndarray, else a copy that is."""
    if type(x) is np.ndarray and x.flags.c_contiguous and x.flags.aligned:
        return x
    x = np.asarray(x)
    if x.ndim >= 2 and not x.flags.c_contiguous:
        other = np.swapaxes(x, -1, -2)
        if other.flags.c_contiguous:
            return transposed(other)
    return np.require(x, requirements=("C", "A"))


def flat(x: NDArray) -> NDArray:
    """`x` as one contiguous axis."""
    return contiguous(x).reshape(-1)


def as_rows(x: NDArray, length: int) -> NDArray:
    """`x` as a contiguous matrix with rows of `length`."""
    return contiguous(x).reshape(x.size // length if length else 0, length)


def nothing(dtype: np.dtype[Any], ndim: int = 1) -> NDArray:
    """The empty array that stands for an absent one in a kernel's arguments."""
    return np.empty((0,) * ndim, dtype)


def row_blocks(count: int, length: int) -> range:
    """Starts of blocks of rows that fit a core's cache, and their size as the step."""
    return range(0, count, max(1, 32_768 // max(1, length)))
