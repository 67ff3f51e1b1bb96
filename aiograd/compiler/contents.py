"""Contents of objects: the objects that a search through the surroundings of a function goes on to."""

from __future__ import annotations

import functools
from collections import deque
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from aiograd.compiler.lines import is_installed
from aiograd.tensors.core import TensorCore

#: numbers, flags and strings
PLAIN: tuple[type[Any], ...] = (int, float, complex, str, bytes, np.generic)
OPAQUE: tuple[type[Any], ...] = (ModuleType, type, type(None), *PLAIN)
CONTAINERS = (tuple, list, dict, set, frozenset, deque)


@functools.lru_cache(4096)
def mentioned(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes that a function mentions, in the functions within it too."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(dict.fromkeys(mentioned(constant)))
    return tuple(found)


def reader(cell: Any) -> Any:
    """A function that returns what a cell of a closure holds."""

    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not assigned yet
            return None

    return read


def is_module(value: Any) -> bool:
    """True for a module of `aiograd.nn`, and what passes for one."""
    return hasattr(value, "named_parameters") and hasattr(value, "modules") and not isinstance(value, type)


def contents_of(value: Any, names: frozenset[str] | None = None) -> tuple[str, list[Any]] | None:
    """The objects that a search looks through next.

    Args:
        value: where it is.
        names: of the attributes that count; None: all.

    Returns:
        The text of an expression that gives them again, with ``{}`` for `value`, empty where they stay the same; and the objects. None for a value
        that is not looked into.
    """
    if isinstance(value, (TensorCore, *OPAQUE)) or is_module(value) or hasattr(value, "param_groups"):
        return None
    if isinstance(value, tuple):
        return "", list(value)
    if isinstance(value, frozenset):
        return "", list(value)
    if isinstance(value, (list, set, deque)):
        return "{}", list(value)
    if isinstance(value, dict):
        return "[*{0}, *{0}.values()]", [*value, *value.values()]
    if isinstance(value, FunctionType):
        return _contents_of_function(value)
    if isinstance(value, MethodType):
        return "", [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return "", [value.func, *value.args, *value.keywords.values()]
    if getattr(type(value), "is_compiled_function", False):
        return "[{}.function]", [value.function]  # what else it has counts calls
    if hasattr(value, "__dict__"):
        if names is None:
            return "{}.__dict__.values()", list(vars(value).values())
        used = tuple([name for name in sorted(names) if name in vars(value) or hasattr(type(value), name)])
        return f"map({{}}.__dict__.get, {used!r})", list(map(vars(value).get, used))
    slots = getattr(type(value), "__slots__", ())
    if slots and not is_installed(type(value)):
        used = tuple([name for name in ((slots,) if isinstance(slots, str) else slots) if names is None or name in names])
        return f"[getattr({{}}, name, None) for name in {used!r}]", [getattr(value, name, None) for name in used]
    return None


def _contents_of_function(function: FunctionType) -> tuple[str, list[Any]]:
    parts: list[str] = []
    items: list[Any] = []
    if function.__closure__:
        parts.append("*[cell.cell_contents for cell in {0}.__closure__]")
        items += [reader(cell)() for cell in function.__closure__]
    if not is_installed(function):
        known = function.__globals__
        names = tuple([name for name in mentioned(function.__code__) if name in known and not isinstance(known[name], ModuleType)])
        if names:
            parts.append(f"*map({{0}}.__globals__.get, {names!r})")
            items += map(known.get, names)
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                parts.append(f"{{0}}.{name}")
                items.append(getattr(function, name))
    return f"[{', '.join(parts)}]" if parts else "", items
