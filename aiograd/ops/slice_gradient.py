"""Gradients that are not written out: SliceGradient, of a part of an array; UnsummedGradient, of several uses of one.

Note [Taking an array apart costs as much as its parts]
    The gradient of ``x[i]`` is zero except at ``i``. Written out, taking n rows of a matrix one by one costs n whole matrices of zeros and
    n additions of them: quadratic. So the rule of basic indexing returns the part and where it belongs, and the sum of gradients adds it in
    place into a sum of its own. It is written out where there is nothing to add it to. Where the part is a large one the whole array is cheaper.
    Measured by ``tests/benchmarks/small_graphs.py`` (an LSTM that slices its gates) and ``tests/benchmarks/scale.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.running.types import Array, Shape


class SliceGradient:
    """An array of `shape` that is zero except for `value` at a basic `index`."""

    __slots__ = ("value", "index", "shape")

    def __init__(self, value: np.ndarray[Any, Any], index: Any, shape: Shape) -> None:
        self.value = value
        self.index = index
        self.shape = shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""
        dtype: np.dtype[Any] = self.value.dtype
        return dtype

    @property
    def nbytes(self) -> int:
        """Of the part."""
        return self.value.nbytes

    def dense(self) -> np.ndarray[Any, Any]:
        """The whole array, new and writeable."""
        whole = np.zeros(self.shape, self.value.dtype)
        whole[self.index] = self.value
        return whole

    def add_to(self, total: np.ndarray[Any, Any]) -> None:
        """Add to an array of the same shape, in place."""
        part = total[self.index]
        if part.__class__ is np.ndarray:
            np.add(part, self.value, out=part)
        else:
            total[self.index] = part + self.value

    def __add__(self, other: Any) -> Any:
        return self.dense() + dense(other)

    __radd__ = __add__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.dense(), dtype)


class UnsummedGradient:
    """The gradients of several uses of one array, in the order in which they are to be added to a sum that has begun already.

    A node that stands for several uses returns one where another node's gradient comes first: added up beforehand the sum would be associated
    otherwise than without that node.
    """

    __slots__ = ("parts", "shape", "dtype")

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.shape: Shape = parts[0].shape
        self.dtype: np.dtype[Any] = parts[0].dtype

    @property
    def nbytes(self) -> int:
        """Of one part."""
        return int(self.parts[0].nbytes)

    def dense(self) -> Any:
        """The sum by itself."""
        total = dense(self.parts[0])
        for part in self.parts[1:]:
            total = total + part
        return total


def dense(gradient: Array) -> Array:
    """The gradient itself, written out if it is not."""
    cls = gradient.__class__
    return gradient.dense() if cls is SliceGradient or cls is UnsummedGradient else gradient
