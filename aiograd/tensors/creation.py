"""Tensors of data from outside: `aiograd.tensor`, `asarray` and `from_numpy`."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, GraphError
from aiograd.running.modes import current_mode
from aiograd.tensors.constants import array_of, check_numbers, checked_dtype, foreign_array
from aiograd.tensors.core import TensorCore, host_array, make
from aiograd.tensors.tensor import Tensor


def tensor(data: Any, dtype: Any = None, *, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A new leaf with a copy of the data.

    Args:
        data: nested lists of numbers, an array, or a Tensor. Python floats become the default dtype, arrays keep theirs.
        dtype: dtype of the result.
        device: name of the device to put it on.
        requires_grad: True if gradients are wanted.

    Returns:
        The leaf.

    Raises:
        ArgumentTypeError: `data` is not numbers, or `requires_grad` with a dtype that has no gradient.
        GraphError: a list holds a tensor that requires grad; `aiograd.stack` makes a tensor of it that stays in the graph. Or a torch tensor
            requires grad.
    """
    from_tensor = isinstance(data, TensorCore)
    trace = current_mode().trace
    if from_tensor and trace is not None and dtype is device is None and trace.was_array(data):
        return data.clone().requires_grad_(requires_grad)  # type: ignore[no-any-return]
    if from_tensor and trace is not None:
        trace.breaks("it copies a tensor with aiograd.tensor(); clone() is recorded")
    source: Any = data._data if from_tensor else data
    dtype = None if dtype is None else checked_dtype(dtype)
    if isinstance(source, (np.ndarray, np.generic)):
        if dtype is not None and source.dtype.kind == "c" and dtype.kind != "c":
            raise ArgumentTypeError(f"tensor(): casting {source.dtype} to {dtype} would drop the imaginary part. Take np.real() of it.")
        array = np.array(check_numbers(source), dtype=dtype)
    elif from_tensor:
        array = np.copy(source)
        device = device or data.device
        if dtype is not None:
            array = np.astype(array, dtype)
    else:
        _refuse_graphs(source)
        array = array_of(_materialized(source), dtype)
    result = make(array)
    if device is not None:
        result = result.to(device)
    if trace is not None:
        trace.made(result, source)
    if requires_grad:
        result.requires_grad_()
    return result  # type: ignore[no-any-return]


def _materialized(data: Any) -> Any:
    """Nested lists with Tensors replaced by their values."""
    if isinstance(data, (list, tuple)):
        return [_materialized(item) for item in data]
    return host_array(data) if isinstance(data, TensorCore) else data


def _refuse_graphs(data: Any) -> None:
    """Raise if nested lists hold a Tensor that requires grad: its graph would be dropped."""
    if isinstance(data, (list, tuple)):
        for item in data:
            _refuse_graphs(item)
    elif isinstance(data, TensorCore) and data.requires_grad and current_mode().grad:
        raise GraphError("making a tensor of a list with a tensor that requires grad would drop its graph: use aiograd.stack, or detach() it")


def asarray(data: Any, dtype: Any = None, *, device: str | None = None, copy: bool | None = None) -> Tensor:
    """A Tensor of the data, sharing memory with an array where dtype and `copy` allow; a Tensor stays in its graph.

    Of an instance of an ndarray subclass only the numbers are taken, so an ``np.matrix`` is multiplied elementwise; subclasses with more state, such
    as masked elements, raise. The same applies to arrays in operations with Tensors. Byte order becomes native.

    Args:
        copy: True always copies, False raises where a copy would be needed, None copies where needed.
        data: a Tensor, an array, a number, or nested lists of numbers.
        dtype: the dtype; None: the data's.
        device: the device; None: the data's.

    Returns:
        The Tensor.

    Raises:
        ArgumentError: `copy` is False and a copy would be needed.
        ArgumentTypeError: no numbers. GraphError: a torch tensor that requires grad.
    """
    return tensor_of(data, dtype=dtype, device=device, copy=copy)


def tensor_of(data: Any, *, dtype: Any = None, device: str | None = None, copy: bool | None = None, like: np.dtype[Any] | None = None) -> Tensor:
    """`asarray`, where the numbers of a list may be computed with an array of dtype `like`."""
    dtype = None if dtype is None else checked_dtype(dtype)
    if isinstance(data, TensorCore):
        result: Any = data
        if dtype is not None and result.dtype != dtype:
            if copy is False:
                raise ArgumentError(f"asarray(copy=False): casting {result.dtype} to {dtype} needs a copy")
            result = result.astype(dtype)
        elif copy:
            result = result.clone()
        elif (trace := current_mode().trace) is not None and trace.was_array(result):
            result = result.detach()
    else:
        _refuse_graphs(data)
        given = data
        if copy is False and isinstance(data, (list, tuple, bool, int, float, complex)):
            raise ArgumentError(f"asarray(copy=False) of a {type(data).__name__}: its numbers are in no array, so a copy is needed; leave copy out")
        if not isinstance(data, (np.ndarray, np.generic)):
            is_plain = isinstance(data, (list, tuple, bool, int, float, complex))
            data = array_of(_materialized(data), dtype, like) if is_plain else foreign_array(data, np.asarray)
        if copy is False and not data.dtype.isnative:
            raise ArgumentError(f"asarray(copy=False) of {data.dtype} {list(data.shape)}: making its byte order native needs a copy")
        data = check_numbers(data)
        try:
            result = make(np.asarray(data, dtype=dtype, copy=copy))
        except ValueError as error:
            raise ArgumentError(f"asarray(copy={copy}) of {data.dtype} {list(data.shape)}, dtype={dtype}: {error}") from None
        trace = current_mode().trace
        if trace is not None and (given is not data or not np.may_share_memory(data, result._data)):
            trace.made(result, given)
    return result if device is None else result.to(device)  # type: ignore[no-any-return]


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A Tensor that shares the array's memory. Writing to the array directly does not change the tensor's version.

    Args:
        array: an array of numbers in native byte order.

    Returns:
        A Tensor without gradient.

    Raises:
        ArgumentTypeError: something else.
    """
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(f"from_numpy: expected an ndarray, found {type(array).__name__}; use tensor() or asarray()")
    if not array.dtype.isnative:
        raise ArgumentTypeError(f"from_numpy: the byte order of dtype {array.dtype} is not native, and memory is shared; use tensor() or asarray()")
    return make(check_numbers(array))  # type: ignore[no-any-return]
