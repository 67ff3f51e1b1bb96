"""Signatures: what of the arguments a program depends on.

Tensors and arrays count by shape, strides, dtype and whether they require grad; everything else by type and value.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from aiograd.compiler.lines import quoted, user_line
from aiograd.compiler.program import layout_of
from aiograd.errors import AiogradError, ArgumentTypeError
from aiograd.tensors.core import TensorCore, make, refresh

_PLAIN = (int, float, str, type(None))
#: packages with classes that define equality by value
_OF_VALUES = frozenset((*sys.stdlib_module_names, "numpy", "aiograd"))


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[TensorCore]) -> tuple[Any, ...]:
    """A hashable description of arguments; their Tensors, and their arrays as Tensors, are appended to `inputs` in order.

    Raises:
        ArgumentTypeError: an argument is neither a Tensor, an array, nested tuples, lists and dicts of them, nor a value that can be hashed.
    """
    try:
        key = tuple([_part(arg, inputs) for arg in args])
        return (key, tuple([(name, _part(kwargs[name], inputs)) for name in kwargs])) if kwargs else key
    except RecursionError:
        raise _no_argument("arguments that are nested too deep, or contain themselves") from None
    except AiogradError:
        raise
    except Exception as error:  # of code of the object
        raise _no_argument(f"an object that cannot be looked at, since it raises {type(error).__name__}") from error


def _part(value: Any, inputs: list[TensorCore]) -> Any:
    if isinstance(value, TensorCore):
        if value._x is not None:
            refresh(value)
        inputs.append(value)
        data = value._data
        return data.shape, data.dtype, value._node is not None, layout_of(data)
    cls = value.__class__
    if cls in _PLAIN:
        return cls, str(value) if cls is float and (value == 0.0 or value != value) else value  # 0.0 is another number than -0.0
    if isinstance(value, np.ndarray):
        tensor = make(value)
        inputs.append(tensor)
        return tensor.shape, tensor.dtype, False, value.strides
    if isinstance(value, (tuple, list)):
        return cls, tuple([_part(item, inputs) for item in value])
    if isinstance(value, dict):
        return cls, tuple([(name, _part(item, inputs)) for name, item in value.items()])
    if cls is slice:
        return cls, (_part(value.start, inputs), _part(value.stop, inputs), _part(value.step, inputs))
    if isinstance(value, Iterator):
        raise _no_argument(f"an iterator ({cls.__name__}), which can be used only once; pass a list")
    try:
        hash(value)
    except TypeError:
        raise _no_argument(f"a {cls.__name__}") from None
    return cls, _apart(value)


def _no_argument(found: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{quoted(*user_line())}: a compiled function was called with {found}; expected Tensors, arrays, nested tuples, lists and dicts of them, "
        "and values that can be hashed"
    )


def _apart(value: Any) -> Any:
    """The part of a key for a value: values that are equal but not the same have different ones, such as 1.0 and True, -0.0 and 0.0."""
    if isinstance(value, (float, complex, np.inexact)):
        return str(value)
    if isinstance(value, frozenset):
        return frozenset([(item.__class__, _apart(item)) for item in value])
    if isinstance(value, tuple):
        return tuple([(item.__class__, _apart(item)) for item in value])
    params = getattr(value.__class__, "__dataclass_params__", None)
    if params is not None and params.frozen and params.eq:
        return value, _apart(tuple([getattr(value, each.name) for each in fields(value)]))
    cls = value.__class__
    if cls.__eq__ is object.__eq__ or cls.__module__.partition(".")[0] in _OF_VALUES:
        return value
    return _Identity(value)


class _Identity:
    """Identity of an object with an ``__eq__`` of its own: equal objects may differ in their attributes."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


def shared_arrays(inputs: list[TensorCore]) -> tuple[int, ...]:
    """Per input the first one with the same array; empty where each has one of its own."""
    if len(inputs) < 2 or len({id(tensor._data) for tensor in inputs}) == len(inputs):
        return ()
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(tensor._data), i) for i, tensor in enumerate(inputs)])


def with_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[TensorCore] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the Tensors of `inputs`, or new ones, in the place of arrays; containers without arrays are the caller's own."""
    left = None if inputs is None else iter(inputs)
    return tuple([_with_tensors(arg, left) for arg in args]), {name: _with_tensors(arg, left) for name, arg in kwargs.items()}


def _with_tensors(value: Any, left: Iterator[TensorCore] | None) -> Any:
    if isinstance(value, (TensorCore, np.ndarray)):
        return next(left) if left is not None else make(value) if isinstance(value, np.ndarray) else value
    if isinstance(value, (tuple, list)):
        items = [_with_tensors(item, left) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if isinstance(value, list):
            changed = copy.copy(value)
            changed[:] = items
            return changed
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        named = {name: _with_tensors(item, left) for name, item in value.items()}
        if all([named[name] is item for name, item in value.items()]):
            return value
        renewed = copy.copy(value)
        renewed.update(named)
        return renewed
    if value.__class__ is slice:
        return slice(*[_with_tensors(each, left) for each in (value.start, value.stop, value.step)])
    return value


def are_same_arguments(key: Any, inputs: list[TensorCore], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if arguments have this signature and these Tensors still."""
    now: list[TensorCore] = []
    try:
        return signature_of(args, kwargs, now) == key and all([one._data is other._data for one, other in zip(inputs, now, strict=True)])
    except ArgumentTypeError:
        return False


def describe(key: Any) -> str:
    """A signature for people: ``float32[8, 64] requires grad, 3``."""
    if key and key.__class__ is tuple and len(key) == 2 and key[1].__class__ is tuple and key[1] and _is_named(key[1]):
        return ", ".join([*map(_described, key[0]), *(f"{name}={_described(part)}" for name, part in key[1])])
    return ", ".join(map(_described, key))


def _is_named(parts: tuple[Any, ...]) -> bool:
    return all(part.__class__ is tuple and len(part) == 2 and isinstance(part[0], str) for part in parts)


def _transform_of(layout: Any) -> str:
    """The end of the description of an array of a transform, by its layout, see `aiograd.compiler.program.layout_of`."""
    if layout.__class__ is str:
        return "" if ":" in layout else f" of {layout}"
    if not layout or layout[0].__class__ is not str:
        return ""
    return f" of {layout[0]}, {'no ' if layout[2] is None else 'pending ' if layout[2].__class__ is str else ''}tangent"


def _described(part: Any) -> str:
    if part[0].__class__ is tuple:
        return f"{part[1]}{list(part[0])}{' requires grad' if part[2] is True else ''}{_transform_of(part[3])}"
    cls, value = part
    if issubclass(cls, dict):
        return "{" + ", ".join(f"{name!r}: {_described(item)}" for name, item in value) + "}"
    if issubclass(cls, (tuple, list)):
        return f"{cls.__name__}({', '.join(map(_described, value))})"
    if cls is slice:
        return f"slice({', '.join(map(_described, value))})"
    if hasattr(cls, "__dataclass_params__") and value.__class__ is tuple:
        return repr(value[0])
    return str(value) if issubclass(cls, (float, complex, np.inexact)) else repr(value)
