"""Signatures: what of the arguments a program depends on.

Tensors and arrays count by shape, strides, dtype and whether they require grad; everything else by type and value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.compiler.lines import quoted, user_line
from aiograd.compiler.program import layout_of
from aiograd.errors import ArgumentTypeError
from aiograd.tensors.core import TensorCore, make, refresh
from aiograd.trees import map_tree

_PLAIN = (int, float, str, type(None))


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[TensorCore]) -> tuple[Any, ...]:
    """A hashable description of arguments; their Tensors, and their arrays as Tensors, are appended to `inputs` in order.

    Raises:
        ArgumentTypeError: an argument is neither a Tensor, an array, nested tuples, lists and dicts of them, nor a value that can be hashed.
    """
    key = tuple([_part(arg, inputs) for arg in args])
    return (key, tuple([(name, _part(kwargs[name], inputs)) for name in kwargs])) if kwargs else key


def _part(value: Any, inputs: list[TensorCore]) -> Any:
    if isinstance(value, TensorCore):
        if value._x is not None:
            refresh(value)
        inputs.append(value)
        data = value._data
        return data.shape, data.dtype, value._node is not None, layout_of(data)
    cls = value.__class__
    if cls in _PLAIN:
        return cls, str(value) if value == 0.0 and cls is float else value  # 0.0 is another number than -0.0
    if isinstance(value, np.ndarray):
        tensor = make(value)
        inputs.append(tensor)
        return tensor.shape, tensor.dtype, False, value.strides
    if isinstance(value, (tuple, list)):
        return cls, tuple([_part(item, inputs) for item in value])
    if isinstance(value, dict):
        return cls, tuple([(name, _part(item, inputs)) for name, item in value.items()])
    try:
        hash(value)
    except TypeError:
        raise ArgumentTypeError(
            f"{quoted(*user_line())}: a compiled function was called with a {cls.__name__}; expected Tensors, arrays, nested tuples, "
            "lists and dicts of them, and values that can be hashed"
        ) from None
    return cls, value


def shared_arrays(inputs: list[TensorCore]) -> tuple[int, ...]:
    """Per input the first one with the same array; empty where each has one of its own."""
    if len(inputs) < 2 or len({id(tensor._data) for tensor in inputs}) == len(inputs):
        return ()
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(tensor._data), i) for i, tensor in enumerate(inputs)])


def with_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[TensorCore]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the Tensors of `inputs` in the place of Tensors and arrays."""
    left = iter(inputs)
    replaced: tuple[tuple[Any, ...], dict[str, Any]] = map_tree(lambda value: next(left), (args, kwargs), (TensorCore, np.ndarray))
    return replaced


def describe(key: Any) -> str:
    """A signature for people: ``float32[8, 64] requires grad, 3``."""
    if key and key.__class__ is tuple and len(key) == 2 and key[1].__class__ is tuple and key[1] and _is_named(key[1]):
        return ", ".join([*map(_described, key[0]), *(f"{name}={_described(part)}" for name, part in key[1])])
    return ", ".join(map(_described, key))


def _is_named(parts: tuple[Any, ...]) -> bool:
    return all(part.__class__ is tuple and len(part) == 2 and isinstance(part[0], str) for part in parts)


def _described(part: Any) -> str:
    if part[0].__class__ is tuple:
        return f"{part[1]}{list(part[0])}{' requires grad' if part[2] is True else ''}"
    cls, value = part
    if issubclass(cls, dict):
        return "{" + ", ".join(f"{name!r}: {_described(item)}" for name, item in value) + "}"
    if issubclass(cls, (tuple, list)):
        return f"{cls.__name__}({', '.join(map(_described, value))})"
    return str(value) if cls is float else repr(value)
