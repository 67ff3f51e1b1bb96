"""Unrolled calls: `aiograd.tensors.record.call` for rows of one or two arrays without static arguments, and for indexing.

Note [Unrolled calls]
    The same steps as in `call`, specialized per row, because for small arrays this code, not numpy, is the cost of
    a forward pass. Uncommon cases (modes other than plain, devices, saved-tensor hooks) are left to `call`, but for one: where a pass records itself
    and is plain otherwise, the function goes the same way (`is_collected`) and reports the node. A result that is
    neither float32 nor float64 gets its node from `attach_result`, which handles every dtype; so does one of a single complex argument, which may
    be real.
    Measured by ``tests/benchmarks/small_graphs.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.errors import ArgumentTypeError
from aiograd.ops.op import Op
from aiograd.running.modes import Mode, current_mode
from aiograd.tensors.attach import attach_result, has_rule
from aiograd.tensors.constants import constant
from aiograd.tensors.core import TENSOR_CLASS, TensorCore, refresh
from aiograd.tensors.op_error import REFUSALS, raise_op_error
from aiograd.tensors.op_node import node_class
from aiograd.tensors.record import call
from aiograd.tensors.views import make_view

_ndarray = np.ndarray
_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)


#: class of arrays of a level -> ``quick(op, mode, *tensors)``: runs a row on Tensors of which some have such arrays, or returns None
QUICK: dict[type, Callable[..., Any]] = {}


def reported(mode: Mode, output: Any) -> Any:
    """An output; the pass that records has been told of its node, if it has one."""
    if output._node is not None:
        mode.collect(output._node)  # type: ignore[misc]
    return output


def unary(op: Op) -> Callable[[Any], Any]:
    """A function of one Tensor for a row of one array without static arguments, which makes real results of real arguments."""
    forward = op.forward
    tensor_class = TENSOR_CLASS
    float32, float64 = _FLOAT32, _FLOAT64

    #: the function that makes the node; compiled on first use
    maker: Callable[..., Any] | None = None

    def look_closer(output: Any, x: Any) -> Any:
        attach_result(op, [x], [True], {}, output, (), None, current_mode())
        return output._node

    def compile_maker(output: Any, x: Any) -> Any:
        nonlocal maker
        maker = node_class(op, (True,)).make
        return maker(output, x)

    if has_rule(op, op.arrays[0]):
        maker = compile_maker

    def apply(x: Any, is_collected: bool = False) -> Any:
        mode = current_mode()
        data = x._data
        if (not mode.plain and (mode.grad or mode.watched) and not is_collected) or data.__class__ is not _ndarray:
            if mode.collects and data.__class__ is _ndarray and (data.dtype is float32 or data.dtype is float64):
                return reported(mode, apply(x, True))
            quick = QUICK.get(data.__class__)
            if quick is not None:
                output = quick(op, mode, x)
                if output is not None:
                    return output
            return call(op, (x,), {})
        if x._x is not None:
            refresh(x)
        make_node = None
        if x._node is not None and mode.grad:
            make_node = maker
            dtype = data.dtype
            if dtype is not float32 and dtype is not float64 and make_node is not None:
                make_node = look_closer
        try:
            out = forward(data)
        except REFUSALS as error:
            raise_op_error(op.name, (data,), {}, error)
        if out.__class__ is not _ndarray:
            out = np.asarray(out)
        tensor = tensor_class[0]()
        tensor._data = out
        tensor._vc = tensor._x = None
        tensor._nr = 0
        tensor._node = None if make_node is None else make_node(tensor, x)
        return tensor

    return apply


def binary(op: Op) -> Callable[[Any, Any], Any]:
    """A function of two Tensors (or a Tensor and a number or array) for such a row of two arrays."""
    forward = op.forward
    tensor_class = TENSOR_CLASS
    rules = [has_rule(op, name) for name in op.arrays]
    #: dtypes of results that `attach_result` need not handle; None if an argument has no rule, so that there may be nothing to record
    float32, float64 = (_FLOAT32, _FLOAT64) if all(rules) else (None, None)

    def look_closer(output: Any, a: Any, b: Any) -> Any:
        attach_result(op, [a, b], [a._node is not None, b._node is not None], {}, output, (), None, current_mode())
        return output._node

    def compile_maker(output: Any, a: Any, b: Any) -> Any:
        needs = (a._node is not None, b._node is not None)
        make = makers[needs[0] + 2 * needs[1]] = node_class(op, needs).make
        return make(output, a, b)

    #: the functions that make the node, indexed by the arguments that need a gradient (bit 0: the first, bit 1: the second)
    makers: list[Callable[..., Any] | None] = [None, *([compile_maker] * 3 if any(rules) else [None] * 3)]

    def apply(a: Any, b: Any, is_collected: bool = False) -> Any:
        mode = current_mode()
        given = b
        if b.__class__ is not tensor_class[0] and not isinstance(b, TensorCore):
            try:
                b = constant(b, a._data.dtype)
            except ArgumentTypeError:
                return NotImplemented
        x1 = a._data
        x2 = b._data
        if (not mode.plain and (mode.grad or mode.watched) and not is_collected) or x1.__class__ is not _ndarray or x2.__class__ is not _ndarray:
            if mode.collects and x1.__class__ is _ndarray is x2.__class__ and x1.dtype is x2.dtype and (x1.dtype is float32 or x1.dtype is float64):
                return reported(mode, apply(a, b, True))
            quick = QUICK.get(x1.__class__) or QUICK.get(x2.__class__)
            if quick is not None:
                output = quick(op, mode, a, b)
                if output is not None:
                    return output
            return call(op, (a, given), {})
        if a._x is not None:
            refresh(a)
        if b._x is not None:
            refresh(b)
        if b._node is None:
            make_node = None if a._node is None else makers[1]
        else:
            make_node = makers[2] if a._node is None else makers[3]
        try:
            out = forward(x1, x2)
        except REFUSALS as error:
            raise_op_error(op.name, (x1, x2), {}, error)
        if out.__class__ is not _ndarray:
            out = np.asarray(out)
        if make_node is not None:
            dtype = out.dtype
            if not mode.grad:
                make_node = None
            elif dtype is not float32 and dtype is not float64:
                make_node = look_closer
        tensor = tensor_class[0]()
        tensor._data = out
        tensor._vc = tensor._x = None
        tensor._nr = 0
        tensor._node = None if make_node is None else make_node(tensor, a, b)
        return tensor

    return apply


def getitem(op: Op, x: Any, index: Any) -> Any:
    """``x[index]`` for a basic index; `op` is the row of it."""
    mode = current_mode()
    data = x._data
    if (not mode.plain and (mode.grad or mode.watched) and not mode.collects) or data.__class__ is not _ndarray:
        return call(op, (x, index), {})
    if x._x is not None:
        refresh(x)
    make_node: Any = None
    if x._node is not None and mode.grad:
        dtype = data.dtype
        make_node = op.lean.get(_NEEDED)
        if make_node is None or (dtype is not _FLOAT32 and dtype is not _FLOAT64):
            return call(op, (x, index), {})
    try:
        out = data[index]
    except REFUSALS as error:
        raise_op_error("indexing", (data,), {"index": index}, error)
    if out.__class__ is not _ndarray:
        return call(op, (x, index), {})
    tensor = TENSOR_CLASS[0]()
    tensor._data = out
    tensor._vc = None
    tensor._nr = 0
    tensor._node = None if make_node is None else make_node(tensor, x, index)
    make_view(op, x, (tensor,), (index,), {})
    return reported(mode, tensor) if mode.collects else tensor


_NEEDED = (True,)
