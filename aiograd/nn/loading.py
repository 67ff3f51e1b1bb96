"""Loading the state of a module.

Note [Loading is all or nothing]
    `load_state` checks every entry before it writes the first. Values are written into the memory of the parameters, so
    optimizers and views stay valid, and version counters notice graphs that had saved the old values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.nn.parameter import Parameter
from aiograd.tensors import inplace
from aiograd.tensors.core import TensorCore
from aiograd.tensors.creation import asarray
from aiograd.tensors.tensor import Tensor


class IncompatibleKeys(NamedTuple):
    """The keys that `Module.load_state_dict` with ``strict=False`` ignored.

    >>> ag.nn.Linear(2, 1).load_state_dict({"weight": ag.ones(1, 2), "scale": ag.ones(1)}, strict=False)
    IncompatibleKeys(missing_keys=('bias',), unexpected_keys=('scale',))
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]


def load_state(module: Any, state: Mapping[str, Any], strict: bool, assign: bool) -> IncompatibleKeys:
    """`Module.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"load_state_dict: expected a mapping of paths to Tensors, found {type(state).__name__}")
    own = module._state()
    missing = tuple(path for path in own if path not in state)
    unexpected = tuple(path for path in state if path not in own)
    wrong = [f"missing: {', '.join(missing)}"] if strict and missing else []
    wrong += [f"unexpected: {', '.join(map(str, unexpected))}"] if strict and unexpected else []
    if assign:
        wrong += [f"{path or type(each).__name__}: assign=True of {why}" for path, each in module.named_modules() if (why := each._keeps_tensors())]
    values = {path: state[path] for path in own if path in state}
    for path, value in values.items():
        complaint = _misfit(own[path], value, assign)
        if complaint:
            wrong.append(f"{path}: {complaint}")
    if wrong:
        raise ArgumentError(f"load_state_dict of {type(module).__name__}: the state does not fit, nothing was loaded.\n  " + "\n  ".join(wrong))
    if assign:
        _assign(module, own, {path: asarray(value) for path, value in values.items()})
    else:
        for path, value in values.items():
            target = own[path]
            inplace.write(target, asarray(value).detach().to(target.device)._data)
    return IncompatibleKeys(missing, unexpected)


def _assign(module: Any, own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Put Tensors in the place of parameters and buffers; what several names share they share afterwards."""
    new: dict[int, Tensor] = {}
    for path, value in values.items():
        target = own[path]
        new[id(target)] = Parameter(value.detach(), requires_grad=target.requires_grad) if isinstance(target, Parameter) else value.detach()
    for each in module.modules():
        parts = (*each._own_parameters(), *each._own_buffers(only_state=True))
        each._hold({name: new[id(tensor)] for name, tensor in parts if id(tensor) in new})


def _misfit(target: Tensor, value: Any, assign: bool) -> str | None:
    """The reason why `value` cannot be the new value of `target`, or with `assign` cannot take its place; None if it can."""
    if not isinstance(value, (TensorCore, np.ndarray, np.generic)):
        return f"found {type(value).__name__}, expected a Tensor or an array"
    if tuple(value.shape) != target.shape:
        return f"found shape {list(value.shape)}, expected {list(target.shape)}"
    if assign:
        return f"found dtype {value.dtype}, expected a floating one" if target.requires_grad and value.dtype.kind not in "fc" else None
    if not np.can_cast(value.dtype, target.dtype, "same_kind") and not (value.dtype.kind in "iub" and target.dtype.kind in "iub"):
        return f"found dtype {value.dtype}, expected {target.dtype}"
    return None
