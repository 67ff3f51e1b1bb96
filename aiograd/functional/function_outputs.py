"""Outputs of a custom function: the Tensors in the result of its forward, and their nesting.

Note [Outputs and their nesting]
    Forward returns a Tensor, or a tuple whose entries are the outputs. An entry may be nested: then its Tensors are outputs of the node,
    and backward gets its gradients nested in the same way. Arrays among the outputs become Tensors and are recorded like them, just as backward
    accepts arrays as gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.running.trees import map_tree
from aiograd.tensors.core import TensorCore
from aiograd.tensors.creation import asarray


class OutputPlaceholder:
    """Placeholder for an output in the nesting of forward's result."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


_ARRAYS = (np.ndarray, np.inexact)
#: types that do not go into the list of outputs as they are
_NESTED = (tuple, list, dict, *_ARRAYS)


def outputs_of(result: Any, args: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The outputs of forward as a list, and their nesting (None: one output, or a tuple of them). See Note [Outputs and their nesting]."""
    entries = list(result) if isinstance(result, tuple) else [result]
    for entry in entries:
        if not isinstance(entry, TensorCore) and isinstance(entry, _NESTED):
            break
    else:
        return entries, None
    outputs: list[Any] = []

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, TensorCore):
            if leaf.dtype.kind in "OSUmM" or leaf.dtype.names is not None:
                return leaf
            leaf = _tensor_of(leaf, args)
        outputs.append(leaf)
        return OutputPlaceholder(len(outputs) - 1)

    return outputs, map_tree(place, result, (TensorCore, *_ARRAYS))


def _tensor_of(array: Any, args: tuple[Any, ...]) -> Any:
    """A Tensor of an array that forward returned; of a copy where it shares memory with an argument, which has its own version counter."""
    tensor = asarray(array)
    hosts = (arg._data for arg in args if isinstance(arg, TensorCore))
    return tensor.clone() if any(isinstance(host, np.ndarray) and np.may_share_memory(host, tensor._data) for host in hosts) else tensor


def as_result(result: Any, nesting: Any, outputs: list[Any]) -> Any:
    """`outputs` nested like the result of forward."""
    if nesting is not None:
        return map_tree(lambda place: outputs[place.number], nesting, OutputPlaceholder)
    return tuple(outputs) if isinstance(result, tuple) else outputs[0]


def nested(nesting: Any, grads: list[Any]) -> list[Any]:
    """Gradients as backward gets them: one for each entry of forward's result, None for an entry that is no output."""
    return [_grads_at(entry, grads) for entry in nesting] if isinstance(nesting, tuple) else [_grads_at(nesting, grads)]


def _grads_at(nesting: Any, grads: list[Any]) -> Any:
    if isinstance(nesting, OutputPlaceholder):
        return grads[nesting.number]
    if isinstance(nesting, dict):
        return {key: _grads_at(entry, grads) for key, entry in nesting.items()}
    if isinstance(nesting, (tuple, list)):
        items = [_grads_at(entry, grads) for entry in nesting]
        return tuple(items) if isinstance(nesting, tuple) else items
    return None
