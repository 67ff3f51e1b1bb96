"""Constants: Python numbers, arrays and nested lists as Tensors that need no gradient, and static arguments without Tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from aiograd.errors import AiogradError, ArgumentError, ArgumentTypeError, GraphError, ShapeError
from aiograd.running.caller import type_found
from aiograd.running.modes import current_mode
from aiograd.tensors.core import TensorCore, host_array, make
from aiograd.tensors.followed import has_tangent
from aiograd.tensors.op_error import NONE_ADVICE
from aiograd.tensors.plain import plain_array
from aiograd.tensors.size import TensorSize

_ndarray = np.ndarray
_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)

_constants32: dict[float, TensorCore] = {}
_constants64: dict[float, TensorCore] = {}


def constant(value: Any, like: np.dtype[Any] | None) -> TensorCore:
    """A Tensor of a Python number or array-like that needs no gradient.

    A number takes the dtype numpy's promotion gives it next to an array of dtype `like` (None: the default dtype for floats), and the floats of a
    list take at least that. Small caches save making the same 0-d array for every ``x * 2``.
    """
    cls = value.__class__
    if (cls is float or cls is int) and value:  # 0.0 and -0.0 are equal as keys
        cache = _constants32 if like is _FLOAT32 else _constants64 if like is _FLOAT64 else None
        if cache is not None:
            found = cache.get(value)
            if found is not None:
                return found
            tensor = make(_array_of_number(value, like))
            if len(cache) >= 1024:
                cache.clear()
            cache[value] = tensor
            return tensor  # type: ignore[no-any-return]
    if isinstance(value, (bool, complex, float, int)):
        return make(_array_of_number(value, like))  # type: ignore[no-any-return]
    if isinstance(value, (_ndarray, np.generic)) or hasattr(value, "__aiograd_device__"):
        return make(check_numbers(value))  # type: ignore[no-any-return]
    if isinstance(value, (list, tuple)):
        return make(array_of(value, like=like))  # type: ignore[no-any-return]
    if value is None:
        raise ArgumentTypeError(f"an argument {NONE_ADVICE}")
    raise ArgumentTypeError(f"expected a Tensor, array or number, found {type_found(value)}")


def _array_of_number(value: Any, like: np.dtype[Any] | None) -> np.ndarray[Any, Any]:
    dtype = number_dtype(value, like)
    try:
        return np.array(value, dtype=dtype)
    except OverflowError:
        raise ArgumentError(  # no ArgumentTypeError: operators take that for an operand of another kind
            f"an int of {value.bit_length()} bits does not fit dtype {dtype}. Use a float, or a tensor of a wider dtype beside it."
        ) from None


def is_number(tensor: TensorCore) -> bool:
    """True for a Tensor that `constant` keeps for a Python number: no other number is ever written into it."""
    data = tensor._data
    if data.__class__ is not _ndarray or data.ndim or data.dtype.kind != "f":
        return False
    cache = _constants32 if data.dtype is _FLOAT32 else _constants64
    return cache.get(data.item()) is tensor


def check_numbers(array: Any) -> Any:
    """`array` as a Tensor can hold it (see `plain_array`), if its elements are numbers or booleans; copied where its byte order is not native.

    Raises:
        ArgumentTypeError
    """
    array = plain_array(array)
    dtype = array.dtype
    if dtype.kind in "OSUmM" or dtype.names is not None:
        raise ArgumentTypeError(
            f"making a tensor: expected numbers, found elements of dtype {dtype}. Convert them first, with .astype() for example."
        )
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def number_dtype(value: Any, like: np.dtype[Any] | None) -> np.dtype[Any]:
    """The dtype of a Python number next to an array of dtype `like`, or alone."""
    if isinstance(value, int) and value.__class__ is not bool:
        value = int(value)  # numpy takes a subclass, such as an IntEnum, for an array of int64
    if like is not None:
        return np.result_type(like, value)
    if isinstance(value, (np.generic, _ndarray)):
        return value.dtype
    if isinstance(value, bool):
        return np.dtype(np.bool_)
    if isinstance(value, int):
        return np.dtype(np.int64)
    real = current_mode().dtype
    return np.result_type(real, np.complex64) if isinstance(value, complex) else real


def array_of(value: Any, dtype: np.dtype[Any] | None = None, like: np.dtype[Any] | None = None) -> np.ndarray[Any, Any]:
    """An ndarray of a number or nested lists.

    Args:
        value: the numbers.
        dtype: dtype of the array; None: Python floats become the default dtype, or the dtype that the default dtype and `like` are promoted to.
        like: dtype of an array that the numbers are computed with; rounding them to the default dtype first would lose digits.
    """
    value = _plain_items(value)
    try:
        array = foreign_array(value, np.array)
    except ValueError as error:
        if isinstance(error, AiogradError):
            raise
        raise ShapeError(f"making a tensor of a nested list: {error}. Give every row the same length.") from None
    if array.dtype == object or array.dtype.kind not in "biufc":
        odd = next((f", such as a {type_found(item)}" for item in array.flat if not isinstance(item, (int, float, complex, np.generic))), "")
        raise ArgumentTypeError(f"making a tensor: expected numbers, found {array.dtype} elements{odd}")
    if dtype is not None:
        if array.dtype.kind == "c" and dtype.kind != "c":
            raise ArgumentTypeError(f"making a tensor: complex numbers do not fit dtype {dtype}. Take their real parts.")
        return array.astype(dtype)
    if array.dtype.kind in "fc" and not _holds_arrays(value):
        wanted = number_dtype(0.0 if array.dtype.kind == "f" else 0j, None)
        array = array.astype(wanted if like is None else np.result_type(wanted, like))
    return array


def foreign_array(value: Any, convert: Callable[[Any], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """``convert(value)`` for a value that may hold arrays of other libraries, each of which refuses numpy with an error of its own.

    Raises:
        GraphError: one needs a gradient, as a torch tensor may. ArgumentTypeError: one is on a device, sparse, or of a dtype that numpy
            does not have.
    """
    try:
        return convert(value)
    except (RuntimeError, TypeError) as error:
        foreign = [item for item in _leaves(value) if hasattr(item, "__array__") and not isinstance(item, (np.ndarray, np.generic))] or [value]
        odd = next((item for item in foreign if getattr(item, "requires_grad", False) is True), None)
        cls = type(foreign[0] if odd is None else odd)
        what = f"making a tensor of a {cls.__module__.partition('.')[0]}.{cls.__qualname__}"
        if odd is not None:
            raise GraphError(f"{what}: it requires grad, and aiograd does not see its graph. Pass its detach() for the numbers.") from error
        raise ArgumentTypeError(f"{what}: expected an array of numbers that numpy can read, found one that refuses: {error}") from error


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _plain_items(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain_items(item) for item in value]
    return plain_array(value)


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_arrays, value))
    return isinstance(value, (np.ndarray, np.generic))


#: classes of static arguments that hold no Tensors
PLAIN: frozenset[type] = frozenset((int, bool, float, str, type(None)))


def refuse_graph(tensor: TensorCore, what: str) -> None:
    """Raise where taking only the values of a tensor would drop its gradient.

    Args:
        tensor: the tensor.
        what: the part that it plays, for the message.

    Raises:
        GraphError: it requires grad while operations are recorded, or has a tangent.
    """
    if (tensor._node is not None and current_mode().grad) or has_tangent(tensor):
        raise GraphError(
            f"{what} is a tensor that requires grad or has a tangent, and only its values would be used: its gradient would be lost. Use detach() "
            "of it where that is meant, or write the operation as arithmetic on tensors."
        )


def static(value: Any) -> Any:
    """A static argument with Tensors (such as indices) replaced by their arrays, and arrays of subclasses by plain ones.

    Raises:
        GraphError: see `refuse_graph`.
    """
    if isinstance(value, TensorCore):
        refuse_graph(value, "a setting of an operation (an argument that takes a number, not an array)")
        data = value._data
        return data if data.__class__ is _ndarray else host_array(value)
    if isinstance(value, _ndarray):
        return plain_array(value)
    if value.__class__ is tuple:
        return tuple(map(static, value))
    if value.__class__ is list:
        return list(map(static, value))
    if value.__class__ is slice:
        return slice(static(value.start), static(value.stop), static(value.step))
    return int(value) if value.__class__ is TensorSize else value


def checked_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype of numbers or booleans, in native byte order.

    Raises:
        ArgumentTypeError
    """
    try:
        wanted: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentTypeError(f"dtype={dtype!r}: {error}. Expected a dtype of numbers such as numpy.float32.") from None
    if wanted.kind in "OSUmM" or wanted.names is not None:
        raise ArgumentTypeError(f"dtype={wanted}: expected a dtype of numbers such as float32")
    return wanted if wanted.isnative else wanted.newbyteorder("=")
