"""Saved-tensor hooks: packing the saved values of a node by ``hooks.pack``."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.graph.saved import Packed, PackedValue, SavedTensorHooks
from aiograd.running.modes import ModeScope
from aiograd.tensors.codegen import CompiledRow
from aiograd.tensors.core import TensorCore, make


def pack_saved(row: CompiledRow, saved: tuple[Any, ...], hooks: SavedTensorHooks) -> Any:
    """Pack saved values, the output and residuals with the innermost pair of saved-tensor hooks."""
    packs = {*row.values, "out", *row.residuals}
    values: list[Any] = []
    for i, (name, value) in enumerate(zip(row.layout, saved, strict=True)):
        if name not in packs:
            values.append(value)
            continue
        counters = saved[i + 1] if name == "out" else None
        if value.__class__ is tuple:
            values.append(tuple([_pack_part(part, hooks, name, None if counters is None else counters[k]) for k, part in enumerate(value)]))
        else:
            values.append(_pack_part(value, hooks, name, counters))
    return Packed(tuple(values)) if packs.intersection(row.layout) else saved


def _pack_part(value: Any, hooks: SavedTensorHooks, name: str, counter: list[int] | None) -> Any:
    """One value packed; a value that is no array stays as it is."""
    if isinstance(value, TensorCore):
        tensor: Any = value
    elif isinstance(value, np.ndarray) or hasattr(value, "__aiograd_device__"):
        tensor = make(value)
        tensor._vc = counter
    else:
        return value
    packed = pack_value(tensor, hooks)
    packed.is_output = name == "out"
    return packed


def pack_value(tensor: TensorCore, hooks: SavedTensorHooks) -> PackedValue:
    """The result of ``hooks.pack`` for a tensor; operations of the hook are not recorded."""
    version = tensor.version
    with ModeScope(grad=False, saved_hooks=None):
        packed = hooks.pack(tensor)
    if tensor.version != version:
        raise ArgumentError("a saved tensor pack hook modified its input in place: return a new value and leave the tensor as it is")
    return PackedValue(packed, hooks, False)
