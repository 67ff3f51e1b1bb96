"""Arguments of the array functions: what becomes a Tensor, and how rows of one or two arrays are called.

Note [Always Tensors]
    The functions of this package take Tensors, arrays, numbers and nested lists, and always return Tensors, so code written with them
    never falls out of the graph by accident. A number alone becomes the default dtype; next to an array it takes the
    dtype that numpy's promotion gives it, so ``maximum(x, 0.0)`` of a float32 `x` stays float32. Neither a number nor the numbers of a list are
    rounded to the default dtype on their way to a wider one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from aiograd.errors import ArgumentTypeError
from aiograd.ops import ROWS
from aiograd.tensors.constants import constant, refuse_graph, static
from aiograd.tensors.core import TensorCore, host_array
from aiograd.tensors.creation import tensor_of
from aiograd.tensors.op_error import NONE_ADVICE
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor
from aiograd.tensors.unrolled import binary, unary

ArrayLike: TypeAlias = Tensor | npt.ArrayLike
Axis: TypeAlias = int | Sequence[int] | None
Unary: TypeAlias = Callable[[ArrayLike], Tensor]
Binary: TypeAlias = Callable[[ArrayLike, ArrayLike], Tensor]

Function = TypeVar("Function", bound=Callable[..., Any])

row = ROWS.__getitem__


def as_tensor(x: Any, like: np.dtype[Any] | None = None) -> Tensor:
    """`x` itself if it is a Tensor, else a Tensor of it that requires no gradient; shares memory with an array.

    Args:
        x: a Tensor, an array, a number or nested lists of numbers.
        like: dtype of the arrays that `x` is computed with; None: of none.

    Raises:
        ArgumentTypeError: not an array, number or nested list of numbers.
    """
    if isinstance(x, TensorCore):
        return x  # type: ignore[return-value]
    if isinstance(x, (list, tuple)):
        return tensor_of(x, like=like)
    return constant(x, like)  # type: ignore[return-value]


def as_tensors(*given: Any) -> list[Tensor]:
    """Arguments that are computed with each other as Tensors: numbers and lists take their dtypes from the arrays among them."""
    dtypes = {x.dtype for x in given if isinstance(x, (TensorCore, np.ndarray, np.generic))}
    like = np.result_type(*dtypes) if dtypes else None
    return [as_tensor(x, like) for x in given]


def tensors_of(arrays: Any, name: str) -> list[Tensor]:
    """A sequence of arrays as Tensors.

    Raises:
        ArgumentTypeError: not a sequence.
    """
    if not isinstance(arrays, (list, tuple)):
        if not isinstance(arrays, (TensorCore, np.ndarray)):
            raise ArgumentTypeError(f"{name}(): expected a sequence of arrays, found {type(arrays).__name__}")
        arrays = list(as_tensor(arrays))
    return as_tensors(*arrays)


def one(name: str, text: str, apply: Callable[[Any], Any] | None = None) -> Unary:
    """The public function of one array, of which a module declares many.

    Args:
        name: its name.
        text: its docstring.
        apply: computes the result of a Tensor; None: the row `name`.
    """
    compute = unary(row(name)) if apply is None else apply

    def function(x: ArrayLike, /) -> Tensor:
        return compute(as_tensor(x))  # type: ignore[no-any-return]

    return _declared(function, name, text)


def calling(name: str) -> Callable[[Any], Any]:
    """The row `name` as a function of one Tensor, for rows that `unary` does not take."""
    op = row(name)
    return lambda x: call(op, (x,), {})


def two(name: str, text: str = "", *, row_name: str | None = None) -> Binary:
    """As `one`, of two Tensors, arrays or numbers; it runs the row `row_name`, or `name`."""
    apply = binary(row(row_name or name))

    def function(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
        if not isinstance(x1, TensorCore):
            x1 = constant(x1, getattr(x2, "dtype", None))  # type: ignore[assignment]
        result = apply(x1, x2)
        if result is NotImplemented:
            raise ArgumentTypeError(f"{name}(): expected Tensors, arrays or numbers, found {type(x1).__name__} and {type(x2).__name__}")
        return result  # type: ignore[no-any-return]

    return _declared(function, name, text)


def two_plain(name: str, text: str = "", *, row_name: str | None = None) -> Binary:
    """As `two`, for a row without derivatives."""
    op = row(row_name or name)

    def function(x1: ArrayLike, x2: ArrayLike, /) -> Tensor:
        if x1 is None or x2 is None:
            raise ArgumentTypeError(f"{name}(): an argument {NONE_ADVICE}")
        return call(op, (x1, x2), {})  # type: ignore[no-any-return]

    return _declared(function, name, text)


def _declared(function: Function, name: str, text: str) -> Function:
    """`function` with the name, module and docstring of the public function that the caller of `one` or `two` declares."""
    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = sys._getframe(2).f_globals["__name__"], text
    return function


_times = two("mul")


def scaled(x: Any, factor: Any) -> Any:
    """``factor * x``, or `x` itself where the factor is the number 1."""
    return x if not isinstance(factor, TensorCore) and factor == 1 else _times(x, factor)


def axes_of(axis: Any) -> Any:
    """`axis` as rows take it: None, an int or a tuple."""
    return tuple(axis) if isinstance(axis, list) else axis


def values_of(x: Any) -> Any:
    """The values of an argument for which there is no gradient, as an array; a function that is being compiled notices that they are read."""
    if not isinstance(x, TensorCore):
        return np.asarray(static(x))
    refuse_graph(x, "an argument without a gradient")
    return host_array(x)
