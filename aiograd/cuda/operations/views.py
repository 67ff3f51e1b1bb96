"""Views: other shapes of the same memory.

numpy runs each function on a stand-in with the same shape and strides; the view lies in the array's memory where the result lies in the stand-in's
(imagined) memory. None of these functions looks at a value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray
from aiograd.running.types import Shape

_VIEWS = (
    np.transpose, np.swapaxes, np.moveaxis, np.rollaxis, np.expand_dims, np.squeeze, np.broadcast_to, np.flip, np.fliplr, np.flipud, np.rot90,
    np.diagonal, np.linalg.diagonal, np.matrix_transpose, np.linalg.matrix_transpose,
)  # fmt: skip
_SEVERAL_VIEWS = (
    np.split, np.array_split, np.hsplit, np.vsplit, np.dsplit, np.unstack, np.atleast_1d, np.atleast_2d, np.atleast_3d,
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
    return array.view(view.shape, view.strides, _offset(stand_in, view))


def _view(function: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(array: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(array, CudaArray):
            return NotImplemented
        if not kwargs and _are_plain(args):
            return array.view(*_lie(function, array.dtype, array.shape, array.strides, args))
        stand_in = imagined(array)
        return view_like(array, stand_in, function(stand_in, *args, **kwargs))

    return implementation


def _views(function: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(array: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(array, CudaArray):
            return NotImplemented
        stand_in = imagined(array)
        return view_like(array, stand_in, function(stand_in, *args, **kwargs))

    return implementation


def _are_plain(args: tuple[Any, ...]) -> bool:
    """True for integers, tuples of them and None, which mean the same wherever they are equal."""
    for arg in args:
        if arg.__class__ is tuple:
            for each in arg:
                if each.__class__ is not int:
                    return False
        elif arg.__class__ is not int and arg is not None:
            return False
    return True


@functools.lru_cache(4096)
def _lie(function: Callable[..., Any], dtype: np.dtype[Any], shape: Shape, strides: Shape, args: tuple[Any, ...]) -> tuple[Shape, Shape, int]:
    """Shape, strides and offset of the view that a function makes; remembered, since a pass asks for the same ones again and again."""
    stand_in = np.lib.stride_tricks.as_strided(np.ndarray((), dtype, _memory.data), shape, strides)
    view = function(stand_in, *args)
    return view.shape, view.strides, _offset(stand_in, view)


def _offset(stand_in: np.ndarray[Any, Any], view: np.ndarray[Any, Any]) -> int:
    offset: int = view.__array_interface__["data"][0] - stand_in.__array_interface__["data"][0] if view.size else 0
    return offset


for _function in _VIEWS:
    tables.FUNCTIONS[_function] = _view(_function)
for _several in _SEVERAL_VIEWS:
    tables.FUNCTIONS[_several] = _views(_several)


@tables.function(np.real)
def real(array: CudaArray) -> Any:
    """The real parts: the array itself where it is real."""
    return array if array.dtype.kind != "c" else NotImplemented


def _reshaped(array: np.ndarray[Any, Any], shape: Any) -> np.ndarray[Any, Any]:
    return np.reshape(array, shape, copy=False)


@tables.function(np.reshape)
def reshape(array: CudaArray, /, shape: Any, order: str = "C", *, copy: bool | None = None) -> Any:
    """The elements in another shape; a view where there can be one, as numpy decides it."""
    if order != "C":
        return NotImplemented
    if copy:
        array = array.copy()
    try:
        if _are_plain((shape,)):
            return array.view(*_lie(_reshaped, array.dtype, array.shape, array.strides, (shape,)))
        stand_in = imagined(array)
        return view_like(array, stand_in, _reshaped(stand_in, shape))
    except ValueError:
        if copy is False:
            raise
        stand_in = imagined(array.copy() if not array.is_contiguous else array)
        view = _reshaped(stand_in, shape)  # raises where the sizes differ
        return view_like(array.copy(), stand_in, view)


@tables.function(np.ravel)
def ravel(array: CudaArray, /, order: str = "C") -> Any:
    """The elements in one axis."""
    return reshape(array, -1, order)
