"""The short way of element-wise rows on dual Tensors: what `aiograd.forward.rows` does, for host arrays of one real dtype where nothing is recorded.

Note [Small arrays]
    On four floats numpy's own calls cost a quarter of a microsecond, and the general way of a level some tens. A chain of small operations takes this
    one: `aiograd.tensors.unrolled` hands its Tensors over as they are, and gets a Tensor back, or None where the general way is needed.
    Measured by ``tests/benchmarks/derivatives.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.forward.dual import DualArray
from aiograd.ops.elementwise import identity, times_x1, times_x2, zero
from aiograd.ops.op import Op, Rule, nothing, rule_names
from aiograd.running.modes import Mode
from aiograd.tensors.core import TENSOR_CLASS, refresh
from aiograd.tensors.op_error import REFUSALS
from aiograd.tensors.unrolled import QUICK

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_ndarray = np.ndarray
Quick = Callable[..., Any]


def quick(op: Op, mode: Mode, *tensors: Any) -> Any:
    """The row on Tensors of which some have dual arrays; None where the general way is needed."""
    found: Any = op.pushers.get("quick")
    if found is None:
        found = op.pushers["quick"] = _compiled(op)
    return found(mode, *tensors)


def _general(mode: Mode, *tensors: Any) -> None:
    return None


def _compiled(op: Op) -> Quick:
    """The function for a row."""
    known = (*op.arrays, "out")
    own = callable(op.jvp) and len(op.arrays) == 1
    if not (own or op.jvp == "rule") or op.fused is not None or op.variadic or op.statics or op.view or len(op.arrays) > 2 or op.outputs != 1:
        return _general
    rules: list[Any] = [op.jvp] if own else [op.rules.get(name) for name in op.arrays]
    if any(rule is None or not set(rule_names(rule)) <= set(known) for rule in rules):
        return _general
    pushes = [_push(rule, known) for rule in rules if rule is not None]
    return _unary(op, pushes[0]) if len(pushes) == 1 else _binary(op, *pushes)


def _push(rule: Rule, known: tuple[str, ...]) -> Callable[[Any, tuple[Any, ...]], Any] | None:
    """A function of the tangent and the values (arguments and output) that applies a rule; None: the tangent as it is."""
    if rule is identity:
        return None
    if rule is zero or rule is nothing:
        return lambda t, values: None
    if rule is times_x1:
        return lambda t, values: t * values[0]
    if rule is times_x2:
        return lambda t, values: t * values[1]
    places = [known.index(name) for name in rule_names(rule)]
    if not places:
        return lambda t, values: rule(t)
    if len(places) == 1:
        first = places[0]
        return lambda t, values: rule(t, values[first])
    if len(places) == 2:
        first, second = places
        return lambda t, values: rule(t, values[first], values[second])
    return lambda t, values: rule(t, *[values[i] for i in places])


def _tensor(data: Any) -> Any:
    tensor = TENSOR_CLASS[0]()
    tensor._data = data
    tensor._node = tensor._vc = tensor._x = None
    tensor._nr = 0
    return tensor


def _unary(op: Op, push: Callable[[Any, tuple[Any, ...]], Any] | None) -> Quick:
    forward = op.forward

    def apply(mode: Mode, x: Any) -> Any:
        if x._x is not None:
            refresh(x)
        dual = x._data
        level, value, tangent = dual.level, dual.primal, dual.tangent
        if not level.is_lean or mode.grad or mode.watched or not mode.tangents:
            return None
        if value.__class__ is not _ndarray or value.dtype not in _FLOATS or (tangent is not None and tangent.__class__ is not _ndarray):
            return None
        try:
            out = forward(value)
        except REFUSALS:
            return None
        if out.__class__ is not _ndarray:
            out = np.asarray(out)
        if out.dtype is not value.dtype:
            return None
        if tangent is not None and push is not None:
            tangent = push(tangent, (value, out))
            if tangent is not None and tangent.__class__ is not _ndarray:
                tangent = np.asarray(tangent)
        return _tensor(DualArray(level, out, tangent))

    return apply


def _binary(op: Op, first: Callable[[Any, tuple[Any, ...]], Any] | None, second: Callable[[Any, tuple[Any, ...]], Any] | None) -> Quick:
    forward = op.forward

    def apply(mode: Mode, a: Any, b: Any) -> Any:
        if mode.grad or mode.watched or not mode.tangents:
            return None
        if a._x is not None:
            refresh(a)
        if b._x is not None:
            refresh(b)
        x1, x2 = a._data, b._data
        t1 = t2 = None
        if x1.__class__ is DualArray:
            level, t1 = x1.level, x1.tangent
            x1 = x1.primal
            if x2.__class__ is DualArray:
                if x2.level is not level:
                    return None
                t2 = x2.tangent
                x2 = x2.primal
        else:
            level, t2 = x2.level, x2.tangent
            x2 = x2.primal
        dtype = x1.dtype
        if not level.is_lean or x1.__class__ is not _ndarray or x2.__class__ is not _ndarray or dtype is not x2.dtype or dtype not in _FLOATS:
            return None
        if (t1 is not None and t1.__class__ is not _ndarray) or (t2 is not None and t2.__class__ is not _ndarray):
            return None
        try:
            out = forward(x1, x2)
        except REFUSALS:
            return None
        if out.__class__ is not _ndarray:
            out = np.asarray(out)
        if out.dtype is not dtype:
            return None
        shape = out.shape
        values = (x1, x2, out)
        tangent = None
        if t1 is not None:
            if t1.shape != shape:
                t1 = np.broadcast_to(t1, shape)
            tangent = t1 if first is None else first(t1, values)
        if t2 is not None:
            if t2.shape != shape:
                t2 = np.broadcast_to(t2, shape)
            other = t2 if second is None else second(t2, values)
            tangent = other if tangent is None else tangent if other is None else tangent + other
        if tangent is not None and tangent.__class__ is not _ndarray:
            tangent = np.asarray(tangent)
        return _tensor(DualArray(level, out, tangent))

    return apply


QUICK[DualArray] = quick
