"""numpy functions without a rule: they run on the arrays if no graph can be lost by that, and raise if one could.

Note [Arrays that are written]
    A function gets the arrays read-only, except its known outputs: ``out=``, the first argument of ``ufunc.at`` and of a few
    functions. Writing to those is an in-place modification like any other: it raises where it would lose a gradient, and it is counted. So a graph
    always notices writes. A result that shares memory with an argument shares its version counter and is read-only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.errors import DeviceMismatchError, NoRuleError
from aiograd.running.modes import current_mode
from aiograd.tensors.core import TensorCore, base_of, counter_of, make, refresh
from aiograd.tensors.followed import has_tangent
from aiograd.tensors.inplace import before_write, check_in_place
from aiograd.tensors.op_error import REFUSALS, raise_op_error
from aiograd.tensors.outside import advice, counterpart

#: numpy functions that write into their first argument
_WRITES_FIRST = frozenset((np.copyto, np.fill_diagonal, np.place, np.put, np.put_along_axis, np.putmask))


def no_rule(name: str) -> NoRuleError:
    """The error for a function that the tables do not have."""
    found = counterpart(*name.split(".")[1:]) if name.startswith("scipy.") else None
    return NoRuleError(
        f"{name} has no row in aiograd's tables, and a tensor that requires grad would lose its graph in it. {advice(found)}"
    )


def name_of(function: Any, method: str = "__call__") -> str:
    """The qualified name of a function or ufunc method, such as ``np.fft.fft``, ``np.add.at`` or ``scipy.special.erf``."""
    name: str = function.__name__
    suffix = "" if method == "__call__" else f".{method}"
    if not isinstance(function, np.ufunc):
        module = getattr(function, "__module__", None) or "numpy"
    elif getattr(np, name, None) is function:
        module = "numpy"
    else:  # a ufunc does not say where it comes from: from a public module beside a private one that has it, if there is such
        homes = [home for home, module in tuple(sys.modules.items()) if getattr(module, "__dict__", {}).get(name) is function]
        public = [home for home in homes if not any(part.startswith("_") for part in home.split("."))]
        if not public:
            return name + suffix
        module = min(public, key=lambda home: (not any(other.startswith(f"{home}._") for other in homes), len(home)))
    return f"np{module[5:]}.{name}{suffix}" if module.split(".")[0] == "numpy" else f"{module}.{name}{suffix}"


def run_on_arrays(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], refusal: NoRuleError) -> Any:
    """The result of ``function(*args, **kwargs)`` for the arrays of the Tensors among the arguments, arrays as Tensors again.

    Args:
        name: name of the function, for messages.
        function: a function of numpy or of a library of ufuncs.
        refusal: the error to raise if a tensor requires grad while operations are recorded.

    Raises:
        NoRuleError: `refusal`. DeviceMismatchError: a tensor lives on a device. InPlaceError: a tensor that would be written cannot be.
        ArgumentError: the function refuses its arguments.
    """
    trace = current_mode().trace
    if trace is not None:
        trace.breaks(f"{name} is recorded by no row")
    written = _written(function, args, kwargs)
    arrays = _Arrays(name, refusal, written)
    plain_args, plain_kwargs = arrays.plain(args), {key: arrays.plain(value) for key, value in kwargs.items()}
    for tensor in written:
        check_in_place(tensor, f"{name}, which writes into it")
        before_write(tensor)
    try:
        result = function(*plain_args, **plain_kwargs)
    except REFUSALS as error:
        raise_op_error(name, plain_args, plain_kwargs, error)
    finally:  # also where it failed: np.put, for one, writes until it meets an index that is out of range
        for tensor in written:
            counter_of(tensor)[0] += 1
    return arrays.wrapped(result)


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[TensorCore]:
    found = kwargs.get("out")
    candidates = list(found) if isinstance(found, tuple) else [found]
    if args and (function in _WRITES_FIRST or getattr(function, "__name__", "") == "at"):
        candidates.append(args[0])
    return [candidate for candidate in candidates if isinstance(candidate, TensorCore)]


class _Arrays:
    """Converts the Tensors among arguments to arrays, and arrays among results to Tensors."""

    def __init__(self, name: str, refusal: NoRuleError, written: Sequence[TensorCore]) -> None:
        self.name = name
        self.refusal = refusal
        self.written = written
        self.records = current_mode().grad
        self.tensors: list[TensorCore] = []
        #: id of an array that is written into -> the object that the caller passed for it, so that the same object is returned
        self.known: dict[int, Any] = {}

    def plain(self, value: Any) -> Any:
        """`value` with the Tensors in it replaced by their arrays."""
        if isinstance(value, TensorCore):
            return self._array(value)
        if isinstance(value, np.ndarray):
            self.known[id(value)] = value
        elif isinstance(value, tuple):
            return tuple([self.plain(item) for item in value])
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview, range)):
            return [self.plain(item) for item in value]
        elif isinstance(value, Mapping):
            return {key: self.plain(item) for key, item in value.items()}
        elif isinstance(value, slice):
            return slice(self.plain(value.start), self.plain(value.stop), self.plain(value.step))
        return value

    def _array(self, tensor: TensorCore) -> np.ndarray[Any, Any]:
        refresh(tensor)
        is_written = any(tensor is other for other in self.written)
        data = tensor._data
        if has_tangent(tensor) or (self.records and (tensor._node is not None or (is_written and base_of(tensor)._node is not None))):
            raise self.refusal
        if not isinstance(data, np.ndarray):
            raise DeviceMismatchError(f"{self.name}: a tensor lives on {tensor.device}, which has no kernel for it. Move it to the host with .cpu().")
        if is_written:
            self.known[id(data)] = tensor
            return data
        self.tensors.append(tensor)
        data = data.view()
        data.flags.writeable = False
        return data

    def wrapped(self, value: Any) -> Any:
        """`value` with arrays of numbers in it as Tensors, except the caller's own arrays."""
        if id(value) in self.known:
            return self.known[id(value)]
        if type(value) is np.ndarray or isinstance(value, np.generic):
            if value.dtype.kind not in "biufc":
                return value
            owner = next((tensor for tensor in self.tensors if np.may_share_memory(value, tensor._data)), None)
            return make(value, shared_with=owner)
        if isinstance(value, tuple):
            items = [self.wrapped(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return [self.wrapped(item) for item in value] if isinstance(value, list) else value
