"""numpy's protocols on Tensors: ``np.exp(t)``, ``1 + t``, ``np.concatenate([t, u])`` and ``np.add.reduce(t)`` record.

Because the rules of the op tables call numpy functions, this also makes the rules themselves differentiable (double backward). A numpy function
outside of the table, or an argument that has no rule, goes to `unrecorded`: it runs on the bare arrays where no tensor requires grad, and
raises where one does, since its graph would silently be dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.errors import NoRuleError
from aiograd.ops import FUNCTIONS, ROWS, UFUNCS
from aiograd.ops.reduction import in_dtype
from aiograd.running.modes import current_mode
from aiograd.tensors.conversions import TensorConversions
from aiograd.tensors.core import TensorCore, base_of, refresh
from aiograd.tensors.followed import follows_writes
from aiograd.tensors.inplace import check_in_place, replace
from aiograd.tensors.op_error import REFUSALS, raise_op_error
from aiograd.tensors.record import call
from aiograd.tensors.scipy_names import scipy_function
from aiograd.tensors.unrecorded import name_of, no_rule, run_on_arrays

_REDUCTIONS: dict[np.ufunc, str] = {
    np.add: "sum",
    np.multiply: "prod",
    np.maximum: "max",
    np.minimum: "min",
    np.logical_and: "all",
    np.logical_or: "any",
}
#: keywords of a ufunc's methods that the rows accept
_TAKEN = frozenset(("axis", "dtype", "keepdims"))
_ACCUMULATIONS: dict[np.ufunc, str] = {np.add: "cumsum", np.multiply: "cumprod"}


def array_ufunc(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``ufunc.method(*inputs, **kwargs)`` by a row where there is one."""
    try:
        target = kwargs.get("out")
        if target is not None and method == "__call__" and len(target) == 1 and _is_recorded(target[0], inputs):
            return _write_result(ufunc, inputs, target[0], **kwargs)
        return _row_of_ufunc(ufunc, method, inputs, kwargs)
    except NoRuleError as refusal:
        return run_on_arrays(name_of(ufunc, method), getattr(ufunc, method), inputs, kwargs, refusal)


def _row_of_ufunc(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    takes = {"dtype", *UFUNCS[ufunc].statics} if method == "__call__" and ufunc in UFUNCS else _TAKEN if method != "__call__" else ()
    unsupported = [name for name, value in kwargs.items() if name not in takes and value is not None]
    if unsupported:
        raise NoRuleError(
            f"{name_of(ufunc, method)} on Tensors that require grad does not support {', '.join(unsupported)}=. Leave it out, or use detach()."
        )
    if method == "__call__":
        op = UFUNCS.get(ufunc)
        if op is None:
            foreign = scipy_function(ufunc)
            if foreign is None:
                raise no_rule(name_of(ufunc))
            return foreign(*map(_as_array, inputs))
        dtype = kwargs.get("dtype")
        if dtype is not None:
            inputs = _cast_inputs(ufunc, inputs, dtype)
        if ufunc is np.ldexp and isinstance(inputs[1], int):
            inputs = (inputs[0], np.asarray(inputs[1]))  # an exponent stays an integer
        return call(op, inputs, {name: value for name, value in kwargs.items() if name != "dtype" and value is not None})
    if method == "reduce" and ufunc in _REDUCTIONS:
        return _reduce(ufunc, *inputs, **kwargs)
    if method == "accumulate" and ufunc in _ACCUMULATIONS:
        return _accumulate(ufunc, *inputs, **kwargs)
    if method == "outer" and ufunc in UFUNCS:
        first, second = inputs
        return call(UFUNCS[ufunc], (np.reshape(first, (*np.shape(first), *(1,) * np.ndim(second))), second), {})
    raise no_rule(name_of(ufunc, method))


def _is_recorded(target: Any, inputs: tuple[Any, ...]) -> bool:
    """True if a result written into `target` has to be recorded, or followed. An array that is written has no place in a graph."""
    if isinstance(target, TensorCore) and any(isinstance(x, TensorCore) and follows_writes(x._data) for x in (target, *inputs)):
        return True
    if not isinstance(target, TensorCore) or not current_mode().grad:
        return False
    return any(isinstance(x, TensorCore) and x._node is not None for x in (target, base_of(target), *inputs))


def _write_result(ufunc: np.ufunc, inputs: tuple[Any, ...], target: TensorCore, out: Any, where: Any = True, **rest: Any) -> Any:
    """``ufunc(*inputs, out=target, where=where)``, recorded as a modification in place; elements that `where` leaves out keep their values."""
    what = f"{name_of(ufunc)}(out=)"
    check_in_place(target, what)
    trace = current_mode().trace
    if trace is not None:
        trace.breaks(f"{what} modifies a tensor in place")
    refresh(target)

    def compute(old: Any) -> Any:
        given = tuple(old if x is target else x for x in inputs)
        if where is not True:
            # elements that are left out are not computed and have no part in gradients, not even by 0 times infinity
            given = tuple(np.where(where, x, np.ones((), x.dtype)) if isinstance(x, (TensorConversions, np.ndarray)) else x for x in given)
        value = _row_of_ufunc(ufunc, "__call__", given, rest)
        if where is not True:
            value = np.where(where, value, old)
        return value if value.shape == old.shape else np.broadcast_to(value, np.broadcast_shapes(value.shape, old.shape))

    return replace(target, what, compute)


def _as_array(value: Any) -> Any:
    """`value` as compositions of rows take it: nested lists and numbers as arrays."""
    return value if hasattr(value, "dtype") else np.asarray(value)


def _reduce(ufunc: np.ufunc, x: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
    return in_dtype(ROWS[_REDUCTIONS[ufunc]], x, dtype, axis=axis, keepdims=keepdims)


def _accumulate(ufunc: np.ufunc, x: Any, axis: Any = 0, dtype: Any = None, out: Any = None) -> Any:
    return in_dtype(ROWS[_ACCUMULATIONS[ufunc]], x, dtype, axis=axis)


def _cast_inputs(ufunc: np.ufunc, inputs: tuple[Any, ...], dtype: Any) -> tuple[Any, ...]:
    """The inputs in the dtypes that numpy computes with when the results are to have `dtype`."""
    given = [x.dtype if hasattr(x, "dtype") else type(x) if type(x) in (int, float, complex) else np.asarray(x).dtype for x in inputs]
    try:
        found = ufunc.resolve_dtypes((*given, *[None] * ufunc.nout), signature=(*[None] * ufunc.nin, *[dtype] * ufunc.nout))
    except REFUSALS as error:
        raise_op_error(f"np.{ufunc.__name__}", inputs, {"dtype": dtype}, error)
    return tuple([np.astype(x if hasattr(x, "dtype") else np.asarray(x), wanted, copy=False) for x, wanted in zip(inputs, found, strict=False)])


def array_function(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a numpy function by its row or implementation in the tables."""
    implementation = FUNCTIONS.get(function)
    if implementation is None:
        name = name_of(function)
        return run_on_arrays(name, function, args, kwargs, no_rule(name))
    try:
        return implementation(*args, **kwargs)
    except NoRuleError as refusal:
        return run_on_arrays(name_of(function), function, args, kwargs, refusal)
    except REFUSALS as error:
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:  # it takes no such arguments
            no_such = NoRuleError(f"{name_of(function)} on Tensors that require grad: {error}. Leave it out, or use detach().")
            return run_on_arrays(name_of(function), function, args, kwargs, no_such)
        raise_op_error(name_of(function), args, kwargs, error)
