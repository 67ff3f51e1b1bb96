"""Rows that make an array in the image of another (constants, copies, casts); rules need the constants wherever a gradient is zero.

They are rows, not bare numpy calls, so that a zero gradient lands on the device of the gradient it replaces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.errors import NoRuleError
from aiograd.ops.op import Op, answer, define, implements
from aiograd.running.types import Array, Shape


def refuse(function: str, **unsupported: Any) -> None:
    """Refuse keyword arguments of a numpy function that have no meaning on Tensors, unless they are at their default.

    Args:
        function: numpy's name for the function.
        unsupported: ``keyword=value``; numpy's defaults are True for ``where``, and None, False or ``np._NoValue`` for the others.

    Raises:
        NoRuleError: one of them was given.
    """
    for keyword, value in unsupported.items():
        if not (value is None or value is np._NoValue or value is (keyword == "where")):
            raise NoRuleError(
                f"np.{function} was called on a Tensor with {keyword}={type(value).__name__}; that keyword is not supported there. "
                f"Leave it out, or call np.{function} on tensor.detach().numpy()."
            )


def _like(x: Array, dtype: Any, shape: Shape | None) -> tuple[Shape, Any]:
    """The shape and dtype of `x`, or those given."""
    return x.shape if shape is None else shape, x.dtype if dtype is None else dtype


zeros_like = define("zeros_like", lambda x, /, dtype=None, *, shape=None: np.zeros(*_like(x, dtype, shape)))
ones_like = define("ones_like", lambda x, /, dtype=None, *, shape=None: np.ones(*_like(x, dtype, shape)))
empty_like = define("empty_like", lambda x, /, dtype=None, *, shape=None: np.empty(*_like(x, dtype, shape)))


def _full_like(x: Array, /, fill_value: Any, dtype: Any = None, *, shape: Shape | None = None) -> Array:
    shape, dtype = _like(x, dtype, shape)
    return np.full(shape, fill_value, dtype)


full_like = define("full_like", _full_like)


def _image(name: str, row: Any) -> Any:
    def image(a: Array, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None) -> Array:
        refuse(name, device=device)
        return row(a, dtype=dtype, shape=_shape(shape))

    return image


def _shape(shape: Any) -> Shape | None:
    return shape if shape is None else tuple(shape) if np.iterable(shape) else (shape,)


implements(np.zeros_like)(_image("zeros_like", zeros_like))
implements(np.ones_like)(_image("ones_like", ones_like))
implements(np.empty_like)(_image("empty_like", empty_like))


@implements(np.full_like)
def np_full_like(
    a: Array, fill_value: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None
) -> Array:
    """numpy's ``full_like``."""
    refuse("full_like", device=device)
    return full_like(a, fill_value=fill_value, dtype=dtype, shape=_shape(shape))


def _astype(x: Array, /, dtype: Any, copy: bool = True) -> Array:
    """`x` converted to `dtype`.

    Args:
        x: any shape, any dtype.
        dtype: the new dtype; from complex to real the imaginary part is dropped.
        copy: True to copy when nothing changes.
    """
    target = np.dtype(dtype)
    if x.dtype.kind == "c" and target.kind not in "cb":
        x = x.real
    return x.astype(target, copy=copy)


def _astype_vjp(g: Array, x_dtype: Any) -> Array:
    if g.dtype == x_dtype:
        return g
    return astype(g, dtype=x_dtype, copy=False)


astype: Op = define("to_copy", _astype, x=_astype_vjp, jvp="forward", complex="explicit", cost=0.5)
clone = define("clone", lambda x, /: np.array(x, copy=True), x=lambda g: g, jvp="forward", complex="explicit", cost=0.1)

@implements(np.astype)
def np_astype(x: Array, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Array:
    """numpy's ``astype`` function."""
    refuse("astype", device=device)
    return astype(x, dtype=dtype, copy=copy)


@implements(np.copy)
def np_copy(a: Array, order: str = "K", subok: bool = False) -> Array:
    """numpy's ``copy``."""
    return clone(a)


@implements(np.size)
def np_size(a: Array, axis: int | tuple[int, ...] | None = None) -> int:
    """numpy's ``size``."""
    axes = range(len(a.shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    size = 1
    for i in axes:
        size *= a.shape[i]
    return size


@implements(np.result_type)
def np_result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """numpy's ``result_type``."""
    return np.result_type(*(a.dtype if isinstance(getattr(a, "dtype", None), np.dtype) else a for a in arrays_and_dtypes))


answer({
    np.shape: lambda a: tuple(a.shape),
    np.ndim: lambda a: len(a.shape),
    np.iscomplexobj: lambda x: bool(x.dtype.kind == "c"),
    np.isrealobj: lambda x: bool(x.dtype.kind != "c"),
})  # fmt: skip
