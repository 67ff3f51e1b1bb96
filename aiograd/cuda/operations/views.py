"""Views: other shapes of the same memory.

numpy runs each function on a stand-in with the same shape and strides; the view lies in the array's memory where the result lies in the stand-in's
(imagined) memory. None of these functions looks at a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray

_VIEWS = (
    np.transpose, np.swapaxes, np.moveaxis, np.rollaxis, np.expand_dims, np.squeeze, np.broadcast_to, np.flip, np.fliplr, np.flipud, np.rot90,
    np.diagonal, np.linalg.diagonal, np.split, np.array_split, np.hsplit, np.vsplit, np.dsplit, np.unstack,
    np.atleast_1d, np.atleast_2d, np.atleast_3d,
    np.matrix_transpose, np.linalg.matrix_transpose,
)  # fmt: skip

_memory = np.zeros(64, np.uint8)


def imagined(array: CudaArray) -> np.ndarray[Any, Any]:
    """A numpy array with the shape and strides of a device array; its elements must not be read."""
    start = np.ndarray((), array.dtype, _memory.data)
    return np.lib.stride_tricks.as_strided(start, array.shape, array.strides)


def view_like(array: CudaArray, stand_in: np.ndarray[Any, Any], view: Any) -> Any:
    """The view of `array` that lies in it as `view` lies in `stand_in`; tuples and lists of them."""
    if isinstance(view, (tuple, list)):
        return type(view)(view_like(array, stand_in, each) for each in view)
    offset = view.__array_interface__["data"][0] - stand_in.__array_interface__["data"][0] if view.size else 0
    return array.view(view.shape, view.strides, offset)


def _view(function: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(array: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(array, CudaArray):
            return NotImplemented
        stand_in = imagined(array)
        return view_like(array, stand_in, function(stand_in, *args, **kwargs))

    return implementation


for _function in _VIEWS:
    tables.FUNCTIONS[_function] = _view(_function)


@tables.function(np.real)
def real(array: CudaArray) -> Any:
    """The real parts: the array itself where it is real."""
    return array if array.dtype.kind != "c" else NotImplemented


@tables.function(np.reshape)
def reshape(array: CudaArray, /, shape: Any, order: str = "C", *, copy: bool | None = None) -> Any:
    """The elements in another shape; a view where there can be one, as numpy decides it."""
    if order != "C":
        return NotImplemented
    if copy:
        array = array.copy()
    stand_in = imagined(array)
    try:
        return view_like(array, stand_in, np.reshape(stand_in, shape, copy=False))
    except ValueError:
        if copy is False:
            raise
        stand_in = imagined(array.copy()) if not array.is_contiguous else stand_in
        view = np.reshape(stand_in, shape, copy=False)  # raises where the sizes differ
        return view_like(array.copy(), stand_in, view)


@tables.function(np.ravel)
def ravel(array: CudaArray, /, order: str = "C") -> Any:
    """The elements in one axis."""
    return reshape(array, -1, order)
