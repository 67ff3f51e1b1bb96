"""Making Tensors: constants, ranges, grids and triangles, with the standard's signatures.

Floating results have the default dtype unless one is given. Every function that makes a Tensor from nothing also takes ``requires_grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, row, tensors_of
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.ops.joining import np_meshgrid
from aiograd.ops.shape import np_diag
from aiograd.running import devices
from aiograd.running.modes import current_mode, get_default_dtype
from aiograd.tensors.constants import check_numbers, checked_dtype, number_dtype, refuse_graph
from aiograd.tensors.core import make
from aiograd.tensors.plain import plain_array
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

__all__ = [
    "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "arange", "linspace", "eye", "meshgrid", "tril",
    "triu", "diag", "logspace",
]  # fmt: skip


def _finished(array: np.ndarray[Any, Any], device: str | None, requires_grad: bool) -> Tensor:
    result: Tensor = make(check_numbers(array))
    if device is not None:
        result = result.to(device)
    trace = current_mode().trace
    if trace is not None:
        trace.made(result)
    return result.requires_grad_() if requires_grad else result


def number_of(value: Any) -> Any:
    """A number that a Tensor is made of, as numpy takes it; a Tensor of one element counts as its number."""
    if not isinstance(value, Tensor):
        return plain_array(value)
    refuse_graph(value, "a number that a new tensor is made of")
    return value.dtype.type(value.item())


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    extents = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in extents):
        raise ArgumentError(f"{name}({shape!r}): expected a shape, one int of at least 0 or a tuple of them")
    return tuple(map(int, extents))


def _filled(name: str, shape: Any, value: Any, dtype: Any, device: str | None, requires_grad: bool) -> Tensor:
    """A Tensor of one number, without memory of the host where the device fills arrays itself; a program that is recorded copies it there."""
    extents = _shape(name, shape)
    there = None if device is None or current_mode().trace is not None else devices.device(device)
    if isinstance(there, devices.FillsArrays) and np.ndim(value) == 0:
        one = check_numbers(np.full((), value, dtype))
        result: Tensor = make(there.filled(extents, one[()], one.dtype))
        return result.requires_grad_() if requires_grad else result
    try:
        array = np.zeros(extents, dtype) if value.__class__ is int and value == 0 else np.full(extents, value, dtype)
    except (TypeError, OverflowError) as error:
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
        raise kind(f"{name}(dtype={dtype!r}): {error}. Use a dtype of numbers that the value fits.") from None
    return _finished(array, device, requires_grad)


def zeros(shape: int | Sequence[int], dtype: Any = None, *, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A Tensor of zeros."""
    return _filled("zeros", shape, 0, get_default_dtype() if dtype is None else dtype, device, requires_grad)


def ones(shape: int | Sequence[int], dtype: Any = None, *, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A Tensor of ones."""
    return _filled("ones", shape, 1, get_default_dtype() if dtype is None else dtype, device, requires_grad)


def full(shape: int | Sequence[int], fill_value: complex, dtype: Any = None, *, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A Tensor of one number; the kind of the number decides the dtype."""
    value: Any = number_of(fill_value)
    return _filled("full", shape, value, number_dtype(value, None) if dtype is None else dtype, device, requires_grad)


def empty(shape: int | Sequence[int], dtype: Any = None, *, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A Tensor of arbitrary elements."""
    if device is not None:
        return _filled("empty", shape, 0, get_default_dtype() if dtype is None else dtype, device, requires_grad)
    return _finished(np.empty(_shape("empty", shape), get_default_dtype() if dtype is None else checked_dtype(dtype)), device, requires_grad)


def _image(name: str, x: Any, device: str | None, requires_grad: bool, **statics: Any) -> Tensor:
    result: Tensor = call(row(name), (as_tensor(x),), statics)
    if device is not None:
        result = result.to(device)
    return result.requires_grad_() if requires_grad else result


def zeros_like(x: ArrayLike, /, dtype: Any = None, *, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """Zeros of the shape, dtype and device of `x`."""
    return _image("zeros_like", x, device, requires_grad, dtype=dtype)


def ones_like(x: ArrayLike, /, dtype: Any = None, *, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """Ones of the shape, dtype and device of `x`."""
    return _image("ones_like", x, device, requires_grad, dtype=dtype)


def full_like(x: ArrayLike, /, fill_value: complex, dtype: Any = None, *, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """One number in the shape, dtype and device of `x`."""
    return _image("full_like", x, device, requires_grad, fill_value=fill_value, dtype=dtype)


def empty_like(x: ArrayLike, /, dtype: Any = None, *, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """Arbitrary elements in the shape, dtype and device of `x`."""
    return _image("empty_like", x, device, requires_grad, dtype=dtype)


def arange(
    start: float, /, stop: float | None = None, step: float = 1, *, dtype: Any = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """Numbers from `start` to before `stop`; from 0 to before `start` when no `stop` is given. Integers where all arguments are."""
    first, last = (0, number_of(start)) if stop is None else (number_of(start), number_of(stop))
    step = number_of(step)
    if step == 0:
        raise ArgumentError(f"arange({first}, {last}, {step}): expected a step other than 0")
    if dtype is None:
        integral = all(isinstance(n, (int, np.integer)) for n in (first, last, step))
        dtype = np.dtype(np.int64) if integral else get_default_dtype()
    try:
        array = np.arange(first, last, step, dtype=checked_dtype(dtype))
    except (ValueError, OverflowError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"arange({first}, {last}, {step}): {error}. Expected finite numbers that fit the dtype {dtype}.") from None
    return _finished(array, device, requires_grad)


def linspace(
    start: complex, stop: complex, /, num: int, *, dtype: Any = None, device: str | None = None, endpoint: bool = True, requires_grad: bool = False
) -> Tensor:
    """`num` evenly spaced numbers from `start` to `stop`, the latter included where `endpoint`."""
    start, stop = number_of(start), number_of(stop)
    if isinstance(num, bool) or not isinstance(num, (int, np.integer)) or num < 0:
        raise ArgumentError(f"linspace(num={num!r}): expected an int of at least 0")
    if dtype is None:
        dtype = number_dtype(1j if isinstance(start, complex) or isinstance(stop, complex) else 1.0, None)
    return _finished(np.linspace(start, stop, num, dtype=checked_dtype(dtype), endpoint=endpoint), device, requires_grad)


def logspace(
    start: float, stop: float, /, num: int, *, base: float = 10.0, dtype: Any = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """`num` numbers from ``base ** start`` to ``base ** stop``, evenly spaced by their logarithms."""
    exponents = linspace(start, stop, num, dtype=np.float64).numpy()
    return _finished(np.power(base, exponents).astype(get_default_dtype() if dtype is None else checked_dtype(dtype)), device, requires_grad)


def eye(
    n_rows: int, n_cols: int | None = None, /, k: int = 0, *, dtype: Any = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """A matrix with ones on diagonal `k` and zeros elsewhere."""
    rows, columns = _shape("eye", (n_rows, n_rows if n_cols is None else n_cols))
    return _finished(np.eye(rows, columns, k=k, dtype=get_default_dtype() if dtype is None else checked_dtype(dtype)), device, requires_grad)


def meshgrid(*arrays: ArrayLike, indexing: str = "xy") -> tuple[Tensor, ...]:
    """Grids of coordinates from vectors, one Tensor per vector."""
    return tuple(np_meshgrid(*tensors_of(arrays, "meshgrid"), indexing=indexing))


def tril(x: ArrayLike, /, k: int = 0) -> Tensor:
    """The lower triangles of matrices: zeros above diagonal `k`."""
    return call(row("tril"), (as_tensor(x),), {"k": k})  # type: ignore[no-any-return]


def triu(x: ArrayLike, /, k: int = 0) -> Tensor:
    """The upper triangles of matrices: zeros below diagonal `k`."""
    return call(row("triu"), (as_tensor(x),), {"k": k})  # type: ignore[no-any-return]


def diag(x: ArrayLike, /, k: int = 0) -> Tensor:
    """A matrix with the vector `x` on diagonal `k`, or diagonal `k` of the matrix `x`."""
    return np_diag(as_tensor(x), k)  # type: ignore[no-any-return]
