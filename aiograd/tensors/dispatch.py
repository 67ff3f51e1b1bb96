"""numpy's protocols on Tensors: ``np.exp(t)``, ``1 + t``, ``np.concatenate([t, u])`` and ``np.add.reduce(t)`` record.

Also what the rules of the op tables rely on to be differentiable again. A numpy function outside of the table is refused with its name: doing
it on the bare array would silently drop the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.errors import ArgumentTypeError
from aiograd.ops import FUNCTIONS, ROWS, UFUNCS
from aiograd.tensors.record import call
from aiograd.tensors.refusal import REFUSALS, raise_refusal

_REDUCTIONS: dict[np.ufunc, str] = {
    np.add: "sum",
    np.multiply: "prod",
    np.maximum: "max",
    np.minimum: "min",
    np.logical_and: "all",
    np.logical_or: "any",
}
_UNSUPPORTED = frozenset(("out", "where", "casting", "order", "subok", "signature", "initial"))
_ACCUMULATIONS: dict[np.ufunc, str] = {np.add: "cumsum", np.multiply: "cumprod"}


def array_ufunc(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer ``ufunc.method(*inputs, **kwargs)`` with a row."""
    unsupported = [name for name, value in kwargs.items() if name in _UNSUPPORTED and value is not None]
    if unsupported:
        raise ArgumentTypeError(f"np.{ufunc.__name__} on Tensors does not support {', '.join(unsupported)}=")
    if method == "__call__":
        op = UFUNCS.get(ufunc)
        if op is None:
            raise ArgumentTypeError(f"np.{ufunc.__name__} has no row in aiograd's tables. Use detach().numpy(), or write an aiograd.Function.")
        dtype = kwargs.get("dtype")
        result = call(op, inputs, {name: value for name, value in kwargs.items() if name != "dtype" and value is not None})
        return result if dtype is None else result.astype(dtype)
    if method == "reduce" and ufunc in _REDUCTIONS:
        return _reduce(ufunc, *inputs, **kwargs)
    if method == "accumulate" and ufunc in _ACCUMULATIONS:
        return call(ROWS[_ACCUMULATIONS[ufunc]], (inputs[0],), {"axis": kwargs.get("axis", inputs[1] if len(inputs) > 1 else 0)})
    if method == "outer" and ufunc in UFUNCS:
        first, second = inputs
        return call(UFUNCS[ufunc], (np.reshape(first, (*np.shape(first), *(1,) * np.ndim(second))), second), {})
    raise ArgumentTypeError(f"np.{ufunc.__name__}.{method} has no row in aiograd's tables")


def _reduce(ufunc: np.ufunc, x: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
    result = call(ROWS[_REDUCTIONS[ufunc]], (x,), {"axis": axis, "keepdims": keepdims})
    return result if dtype is None else result.astype(dtype)


def array_function(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a numpy function with what the tables have for it."""
    implementation = FUNCTIONS.get(function)
    if implementation is None:
        raise ArgumentTypeError(
            f"{getattr(function, '__module__', 'numpy')}.{function.__name__} has no row in aiograd's tables. Use detach().numpy(), or write an "
            "aiograd.Function."
        )
    try:
        return implementation(*args, **kwargs)
    except REFUSALS as error:
        raise_refusal(f"np.{function.__name__}", args, kwargs, error)
