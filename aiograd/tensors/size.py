"""TensorSize: the number of elements of a tensor, an int that can be called for the shape.

Note [The size is an int]
    ``x.size`` is an attribute in numpy and a method in PyTorch; an int that can be called is both. Everything else is done as with a plain int:
    arithmetic gives plain ints, copies and pickles are plain ints, and so is what goes into a row or a message. numpy takes plain ints for
    numbers without a dtype only, a subclass for an array of int64, which would make float64 of ``array32 / x.size``; so numpy's functions
    are called again with plain ints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, overload

from aiograd.errors import IndexRangeError
from aiograd.running.types import Shape


class TensorSize(int):
    """The number of elements of a tensor. Called, it is the shape, ``x.size()``, or the extent of one axis, ``x.size(0)``."""

    _shape: Shape

    @overload
    def __call__(self) -> Shape: ...
    @overload
    def __call__(self, dim: int) -> int: ...
    def __call__(self, dim: int | None = None) -> Shape | int:
        if dim is None:
            return self._shape
        ndim = len(self._shape)
        if not -ndim <= dim < ndim:
            raise IndexRangeError(f"size({dim}) of a tensor of shape {list(self._shape)}: expected an axis that it has")
        return self._shape[dim]

    def __reduce_ex__(self, protocol: Any) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return getattr(ufunc, method)(*map(_plain, inputs), **kwargs)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return function(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})


def _plain(value: Any) -> Any:
    """`value` with plain ints for the sizes in it."""
    if isinstance(value, TensorSize):
        return int(value)
    if value.__class__ in (tuple, list):
        return value.__class__([_plain(item) for item in value])
    return value


@functools.lru_cache(4096)
def size_of(shape: Shape) -> TensorSize:
    """The number of elements of a shape."""
    size = TensorSize(math.prod(shape))
    size._shape = shape
    return size
