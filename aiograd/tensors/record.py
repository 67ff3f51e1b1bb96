"""Recording: running a row forward on Tensors.

`call` handles every row and argument; `aiograd.tensors.unrolled` has shorter ways for the common ones.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from aiograd.errors import ArgumentTypeError, DeviceMismatchError
from aiograd.ops.op import ROWS, Op
from aiograd.running import devices
from aiograd.running.modes import Mode, current_mode
from aiograd.tensors.attach import attach, attach_result, attach_results
from aiograd.tensors.codegen import compile_binder
from aiograd.tensors.constants import PLAIN, constant, static
from aiograd.tensors.core import TensorCore, make, refresh
from aiograd.tensors.op_error import REFUSALS, raise_op_error
from aiograd.tensors.views import make_view, shares_memory

_ndarray = np.ndarray


def call(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a row on Tensors, arrays and numbers; records the operation where a gradient is wanted.

    Returns:
        A Tensor, or a tuple of Tensors for a row with several outputs.
    """
    mode = current_mode()
    if mode.trace is not None:
        tracer = mode.trace.pauses(args, kwargs)
        if tracer is not None:
            try:
                return call(op, args, kwargs)
            finally:
                sys.settrace(tracer)
    tensors, statics = _bind(op, args, kwargs)
    arrays: list[Any] = []
    needs: list[bool] = []
    lean = op.outputs == 1 and (mode.plain or mode.collects or not (mode.grad or mode.watched))
    for tensor in tensors:
        if tensor is None:
            arrays.append(None)
            needs.append(False)
            continue
        data = tensor._data
        arrays.append(data)
        needs.append(tensor._node is not None)
        if data.__class__ is not _ndarray:
            lean = False
    if not lean:
        return _call_general(op, tensors, arrays, statics, mode, args, kwargs)
    fused = op.fused
    residuals: Any = ()
    try:
        if fused is None:
            result = op.forward(*arrays, **statics)
        else:
            result, *residuals = fused.forward(*arrays, **statics)
    except REFUSALS as error:
        raise_op_error(op.name, arrays, statics, error, op.arrays)
    crosses = False
    if result.__class__ is not _ndarray:
        crosses = hasattr(result, "__aiograd_device__")
        if not crosses:
            result = np.asarray(result)
    output = make(result)
    if mode.grad and True in needs and op.differentiable:
        if crosses:
            attach(op, tensors, statics, [output], tuple(residuals), mode, "cpu", fused)
        else:
            attach_result(op, tensors, needs, statics, output, residuals, fused, mode)
    if op.view and shares_memory(result, arrays[0]):
        make_view(op, tensors[0], (output,), args[1:], kwargs)
    return output


def _call_general(
    op: Op, tensors: list[Any], arrays: list[Any], statics: dict[str, Any], mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The second half of `call` for devices, several outputs, or a mode other than plain."""
    device = _device_of(op, arrays)
    if device != "cpu":
        _move_along(op, tensors, arrays, args, device)
    records = False
    if mode.grad and op.differentiable:
        for tensor in tensors:
            if tensor is not None and tensor._node is not None:
                records = True
                break
    fused = op.fused if device == "cpu" else devices.device(device).fused(op.name)  # type: ignore[union-attr]
    profiler = mode.profiler
    started = profiler.begin_forward() if profiler is not None else None
    residuals: tuple[Any, ...] = ()
    try:
        if fused is not None:
            result, *rest = fused.forward(*arrays, **statics)
            residuals = tuple(rest)
        elif device == "cpu":
            result = op.forward(*arrays, **statics)
        else:
            result = op(*arrays, **statics)
    except REFUSALS as error:
        raise_op_error(op.name, arrays, statics, error, op.arrays)
    outputs = [make(result)] if op.outputs == 1 else list(map(make, result))
    if not records:
        node = None
    elif mode.plain and device == "cpu" and op.outputs != 1:
        node = attach_results(op, tensors, statics, outputs, residuals, fused, mode)
    elif device == "cpu" and op.outputs == 1 and outputs[0]._data.__class__ is _ndarray and _only_records(mode):
        needs = [tensor is not None and tensor._node is not None for tensor in tensors]
        attach_result(op, tensors, needs, statics, outputs[0], residuals, fused, mode)
        node = outputs[0]._node
    else:
        node = attach(op, tensors, statics, outputs, residuals, mode, device, fused)
    if op.view and outputs and shares_memory(outputs[0]._data, arrays[0]):
        make_view(op, tensors[0], outputs, args[1:], kwargs)
    if profiler is not None:
        profiler.end_forward(started, op.name, node, outputs)
    if mode.trace is not None:
        mode.trace.ran(op, tensors, statics, outputs, residuals, fused)
    return outputs[0] if op.outputs == 1 else tuple(outputs)


def _only_records(mode: Mode) -> bool:
    """True if the mode is plain but for a recording."""
    return mode.trace is not None and mode.anomaly is None and mode.saved_hooks is None and mode.profiler is None and mode.collect is None


def _bind(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Array arguments as Tensors (None where absent) and static arguments by name."""
    binder = op.binder
    if binder is None:
        binder = op.binder = compile_binder(op, PLAIN, static)
    try:
        arrays, statics = binder(*args, **kwargs)
    except TypeError as error:
        raise ArgumentTypeError(f"{error}; {op.name} takes {op.signature()}") from None
    for i, array in enumerate(arrays):
        if isinstance(array, TensorCore):
            if array._x is not None:
                refresh(array)
        elif array is not None:
            return _with_constants(arrays, i), statics
    return arrays, statics


def _with_constants(arrays: list[Any], first: int) -> list[Any]:
    """The arguments, with those from `first` on converted to Tensors."""
    like = None
    for array in arrays:
        if isinstance(array, (TensorCore, _ndarray, np.generic)):
            like = array.dtype if like is None else np.result_type(like, array.dtype)
    for i in range(first, len(arrays)):
        array = arrays[i]
        if isinstance(array, TensorCore):
            if array._x is not None:
                refresh(array)
        elif array is not None:
            arrays[i] = constant(array, like)
    return arrays


def _device_of(op: Op, arrays: list[Any]) -> str:
    """The device of the arguments that are not on the host; ``"cpu"`` if all are. Of several it is the one that adopts the Tensors of the others."""
    found = "cpu"
    for array in arrays:
        if array is None or array.__class__ is _ndarray:
            continue
        name = devices.device_name_of(array)
        if name == "cpu" or name == found:
            continue
        if found != "cpu":
            depths = [getattr(devices.device(there), "depth", -1) for there in (found, name)]
            if depths == [-1, -1]:
                raise DeviceMismatchError(f"{op.name}: arguments live on {found} and {name}; move them to one device with .to()")
            if depths[0] > depths[1]:
                continue
        found = name
    return found


def taken_over(tensor: Any, other: Any) -> Any:
    """A Tensor that a row takes together with `other` as a setting: on the device of `other`, where that takes Tensors as they are."""
    return _adopted(devices.device(other.device), tensor) if tensor.device == "cpu" and devices.adopts(other.device) else tensor


def _adopted(there: Any, tensor: Any) -> Any:
    adopted = there.adopt(tensor)
    made = adopted
    if not isinstance(adopted, TensorCore):
        made = make(adopted)
        if tensor._node is not None and there.takes_graph(tensor):
            made._node, made._nr = tensor._node, tensor._nr
    trace = current_mode().trace
    if trace is not None:
        trace.adopts(tensor, made)
    return made


def _move_along(op: Op, tensors: list[Any], arrays: list[Any], args: tuple[Any, ...], device: str) -> None:
    """Move the arguments of a row that runs on a device and that are not there, host arrays but for a device that adopts others', to this device.

    Arrays that are no Tensors are constants and are moved, and so are numbers; a number that requires grad is moved by a recorded row, so that
    its gradient is moved back. A function that is being compiled records every move, so that a program repeats it.
    """
    mode = current_mode()
    for i, array in enumerate(arrays):
        if array is None or (array.__class__ is not _ndarray and devices.device_name_of(array) == device):
            continue
        tensor = tensors[i]
        there = devices.device(device)
        if devices.adopts(device):
            tensors[i] = _adopted(there, tensor)
        elif not array.ndim and (tensor._node is None or not mode.grad):
            continue
        elif array.ndim and tensor is args[i] and not (mode.trace is not None and mode.trace.was_array(tensor)):
            raise DeviceMismatchError(f"{op.name}: arguments live on {device} and cpu; move them to one device with .to()")
        elif array.ndim and mode.trace is None:
            tensors[i] = make(there.from_host(array))  # type: ignore[union-attr]
        else:
            tensors[i] = call(ROWS["to_device"], (tensor,), {"device": device, "source": "cpu"})
        arrays[i] = tensors[i]._data
