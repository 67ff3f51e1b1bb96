"""Element-wise ufuncs on CudaArrays: the dtypes in which numpy would compute, and the pending expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray, bits, device_of
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.expression import NUMBERS, pending
from aiograd.cuda.fallback import on_host
from aiograd.cuda.layout import contiguous_strides
from aiograd.cuda.templates import KINDS, TEMPLATES
from aiograd.errors import ShapeError
from aiograd.running.types import Shape

_resolved: dict[tuple[Any, ...], tuple[np.dtype[Any], ...] | None] = {}


def elementwise(name: str, inputs: tuple[Any, ...], loop: tuple[np.dtype[Any], ...]) -> CudaArray:
    """The pending result of an operation.

    Args:
        name: name of its template.
        inputs: CudaArrays, host arrays and scalars, at least one of them on a device.
        loop: dtypes in which the arguments are taken, then the result's.
    """
    shape: Shape = ()
    for value in inputs:  # broadcast_shapes costs more than all of the rest
        here = value.shape if value.__class__ is CudaArray else () if value.__class__ in NUMBERS else np.shape(value)
        if not shape:
            shape = here
        elif here and here != shape:
            break
    else:
        return pending(_device_of(inputs), name, inputs, loop, shape)
    try:
        shape = np.broadcast_shapes(*[np.shape(value) if not isinstance(value, CudaArray) else value.shape for value in inputs])
    except ValueError as error:
        shapes = " and ".join(str(list(getattr(value, "shape", ()))) for value in inputs)
        raise ShapeError(f"{name}: shapes {shapes} cannot be broadcast together") from error
    return pending(device_of(*inputs), name, inputs, loop, shape)


def _device_of(inputs: tuple[Any, ...]) -> DeviceCore:
    first = inputs[0]
    return first.buffer.device if first.__class__ is CudaArray else device_of(*inputs)


def _ufunc(ufunc: np.ufunc, name: str) -> Callable[..., Any]:
    kinds = KINDS.get(name, "fiub")

    def implementation(*inputs: Any, dtype: Any = None, casting: str = "same_kind", **kwargs: Any) -> Any:
        if kwargs:
            return NotImplemented
        key = (ufunc, dtype, *[value.dtype if isinstance(value, (CudaArray, np.ndarray, np.generic)) else value.__class__ for value in inputs])
        loop = _resolved.get(key, ())
        if loop == ():
            loop = _resolved[key] = _resolve(ufunc, inputs, dtype, kinds)
        if loop is None:
            return NotImplemented
        return elementwise(name, inputs, loop)

    return implementation


def _resolve(ufunc: np.ufunc, inputs: tuple[Any, ...], dtype: Any, kinds: str) -> tuple[np.dtype[Any], ...] | None:
    """The dtypes of arguments and result in numpy's loop; None if there is no template for them."""
    given = [_given(value) for value in inputs]
    forced: dict[str, Any] = {} if dtype is None else {"signature": (None,) * ufunc.nin + (np.dtype(dtype),) * ufunc.nout}
    try:
        loop = ufunc.resolve_dtypes((*given, *[None] * ufunc.nout), **forced)
    except TypeError:
        return None  # numpy says why when the host gets to it
    supported = all(each.kind in "fiub" and each.itemsize <= 8 and each.isnative for each in loop)
    if ufunc is np.nextafter and loop[0].itemsize == 2:
        return None  # computed in single precision, its step would be too short
    return tuple(loop) if supported and loop[0].kind in kinds else None


def _given(value: Any) -> Any:
    """An argument as numpy's promotion takes it: its dtype, or the type of a Python number, which adapts to the other arguments."""
    if isinstance(value, (CudaArray, np.ndarray, np.generic)):
        return value.dtype
    return np.dtype(np.bool_) if value.__class__ is bool else value.__class__


def _register() -> None:
    for name in TEMPLATES:
        ufunc = getattr(np, name, None)
        if isinstance(ufunc, np.ufunc):
            tables.FUNCTIONS[ufunc] = _ufunc(ufunc, name)


_register()


def cast(array: CudaArray, dtype: Any) -> CudaArray:
    """The elements with a dtype, in memory of their own and in C order."""
    target = np.dtype(dtype)
    if target == array.dtype and target.kind == "c":
        copied = cast(bits(array), np.uint64)
        return copied.view(array.shape, contiguous_strides(array.shape, target.itemsize), 0, target)
    if target.kind not in "fiub" or array.dtype.kind not in "fiub":
        return on_host("astype", lambda value: value.astype(target), (array,), {})  # type: ignore[no-any-return]
    return elementwise("cast", (array,), (array.dtype, target))


@tables.function(np.divmod)
def divmod_(x1: Any, x2: Any, /, **kwargs: Any) -> Any:
    """Floored quotient and remainder."""
    return NotImplemented if kwargs else (np.floor_divide(x1, x2), np.remainder(x1, x2))


@tables.function(np.modf)
def modf(x: CudaArray, /, **kwargs: Any) -> Any:
    """The fractional part, with the sign of `x`, and the integral part."""
    if kwargs or x.dtype.kind != "f":
        return NotImplemented
    whole = np.trunc(x)
    return np.copysign(np.where(np.isinf(x), 0, x - whole), x), whole


_power = tables.FUNCTIONS[np.power]


@tables.function(np.power)
def power(x1: Any, x2: Any, /, **kwargs: Any) -> Any:
    """`x1` to the power `x2`. Integers to a negative power are refused where `x2` is known, and 0, 1 or -1 where it is on the device."""
    integral = all(np.dtype(_given(value)).kind in "iu" for value in (x1, x2))
    if not isinstance(x2, CudaArray) and integral and np.any(np.less(x2, 0)):
        raise ValueError(f"Integers to negative integer powers are not allowed: the smallest exponent is {np.min(x2)}")
    return _power(x1, x2, **kwargs)
