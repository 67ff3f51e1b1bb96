"""Arrays in the image of others: constants and copies.

A constant is a pending expression too, so one that is only added to something is never in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, device_of, zeros
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.expression import pending
from aiograd.running.types import Shape


def constant(device: DeviceCore, shape: Shape, value: Any, dtype: Any) -> CudaArray:
    """An array of one value.

    Args:
        shape: of the result.
        value: a number, or an array that broadcasts to `shape`.
        dtype: of the result.
    """
    target = np.dtype(dtype)
    if target.kind not in "fiub":
        host: CudaArray = CudaArray.from_host(device, np.full(shape, value, target))
        return host
    source = value.dtype if isinstance(value, CudaArray) else target
    if isinstance(value, np.ndarray) and value.ndim:
        value = np.broadcast_to(value, shape).astype(target)
    return pending(device, "cast", (value,), (source, target), shape)


def _shape_of(x: Any, shape: Any) -> Shape:
    if shape is None:
        return tuple(x.shape)
    return tuple(shape) if np.iterable(shape) else (int(shape),)


@tables.function(np.zeros_like)
def np_zeros_like(a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None) -> Any:
    """Zeros of the shape and dtype of `a`, or of those given."""
    return zeros_like(a, dtype, shape=shape)


@tables.function(np.ones_like)
def np_ones_like(a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None) -> Any:
    """Ones of the shape and dtype of `a`, or of those given."""
    return ones_like(a, dtype, shape=shape)


@tables.function(np.empty_like)
def np_empty_like(prototype: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None) -> Any:
    """An array with the shape and dtype of `prototype`, or the given ones, and arbitrary elements."""
    return empty_like(prototype, dtype, shape=shape)


@tables.function(np.full_like)
def np_full_like(a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None) -> Any:
    """`fill_value` in the shape and dtype of `a`, or of those given."""
    return full_like(a, fill_value, dtype, shape=shape)


@tables.row("zeros_like")
def zeros_like(x: Any, dtype: Any = None, *, shape: Any = None) -> Any:
    """As `np_zeros_like`."""
    return full_like(x, 0, dtype, shape=shape)


@tables.row("ones_like")
def ones_like(x: Any, dtype: Any = None, *, shape: Any = None) -> Any:
    """As `np_ones_like`."""
    return full_like(x, 1, dtype, shape=shape)


@tables.row("empty_like")
def empty_like(x: Any, dtype: Any = None, *, shape: Any = None) -> Any:
    """As `np_empty_like`; zeros, so that reading them is no error."""
    return zeros(x.device, _shape_of(x, shape), x.dtype if dtype is None else dtype)


@tables.row("full_like")
def full_like(x: Any, fill_value: Any, dtype: Any = None, *, shape: Any = None) -> Any:
    """As `np_full_like`."""
    return constant(device_of(x, fill_value), _shape_of(x, shape), fill_value, x.dtype if dtype is None else dtype)


@tables.row("clone")
def clone(x: CudaArray, /) -> CudaArray:
    """A copy."""
    return x.copy()  # type: ignore[no-any-return]


@tables.function(np.copy)
def np_copy(a: CudaArray, order: str = "K", subok: bool = False) -> CudaArray:
    """A copy, in C order."""
    return a.copy()  # type: ignore[no-any-return]


@tables.function(np.astype)
def np_astype(x: CudaArray, dtype: Any, /, *, copy: bool = True, device: Any = None) -> CudaArray:
    """The elements with another dtype."""
    return x.astype(dtype, copy=copy)  # type: ignore[no-any-return]


