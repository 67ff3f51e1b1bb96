"""The Tensors that a function finds by name: guards against one that is replaced.

Note [What is looked through]
    A program reads the Tensors that it captured. When a name leads to another Tensor than before (a weight that was assigned anew, another entry of a
    dict), the program must not run. Names are those of the function's closure, of the globals that it mentions, and of the object that it is a
    method of. From there the search goes into functions, tuples, lists, dicts and attributes of objects, `DEPTH` deep; modules of `aiograd.nn` are
    looked through as a whole. A Tensor that is reached in another way (through a call into a library that keeps it) is taken to stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from aiograd.tensors.core import TensorCore

DEPTH = 3
_OPAQUE = (ModuleType, type, str, bytes, int, float, complex, type(None))

#: an object whose attributes have to be what they were, and these
Guard = tuple[Any, dict[str, Any]]


class NamedTensors:
    """The Tensors that a function finds by name, as attributes, so that they are compared as those of other objects are."""

    def __init__(self, roots: dict[str, Any]) -> None:
        self._roots = roots

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = {}
        for name, root in self._roots.items():
            for number, tensor in enumerate(_tensors(root(), DEPTH)):
                found[f"{name} {number}"] = tensor
        return found


def guards_of(function: Any, args: tuple[Any, ...]) -> list[Guard]:
    """Guards for what a function reaches by name, as it is now.

    Args:
        function: that is compiled.
        args: of the call; the first may be the object that `function` is a method of.
    """
    roots: dict[str, Any] = {}
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if isinstance(plain, FunctionType):
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            roots[name] = _reader(cell)
        names = plain.__globals__
        for name in plain.__code__.co_names:
            if name in names and not isinstance(names[name], _OPAQUE):
                roots[f"global {name}"] = lambda name=name: names.get(name)
    owner = getattr(function, "__self__", args[0] if args else None)
    if owner is not None and not isinstance(owner, TensorCore):
        roots["self"] = lambda: owner
    if not isinstance(plain, FunctionType) and not isinstance(function, _OPAQUE):
        roots["the callable"] = lambda: function
    tensors = NamedTensors(roots)
    modules = {id(module): module for root in roots.values() for module in _modules(root())}
    return [(tensors, tensors.__dict__), *((module, dict(module.__dict__)) for module in modules.values())]


def _reader(cell: Any) -> Any:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not assigned yet
            return None

    return read


def _is_module(value: Any) -> bool:
    return hasattr(value, "named_parameters") and hasattr(value, "modules") and not isinstance(value, type)


def _modules(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            if _is_module(item):
                yield from item.modules()
    elif not isinstance(value, _OPAQUE) and _is_module(value):
        yield from value.modules()


def _tensors(value: Any, depth: int) -> Iterator[TensorCore]:
    if isinstance(value, TensorCore):
        yield value
    elif depth == 0 or isinstance(value, _OPAQUE) or _is_module(value):
        return
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item, depth - 1)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            yield from _tensors(_reader(cell)(), depth - 1)
    elif hasattr(value, "__dict__"):
        for item in list(vars(value).values()):
            yield from _tensors(item, depth - 1)
