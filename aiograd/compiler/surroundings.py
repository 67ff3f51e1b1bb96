"""The surroundings of a function, which it finds by name: guards against a Tensor, a function or a number that is replaced.

Note [Values that are looked through]
    A program reads the Tensors that it captured and repeats the calls that were recorded. When a name leads to something else than before (a weight
    that was assigned anew, another model, optimizer or helper function, another entry of a dict), the program must not run. Names are those of the
    function's closure, of the globals that it mentions, and of the object that it is a method of; where one leads to a Python module, a class or an
    object also the attributes of that module or class that the function mentions. From there the search goes into tuples, lists, dicts, functions
    (their closures, and the globals that they mention unless they are of an installed package) and attributes of objects, `DEPTH` deep; modules of
    `aiograd.nn` are looked through as a whole. Whatever is reached in another way (through a library that keeps it, a default of an argument, the
    class of an object that another function uses) is taken to stay.

    Numbers, flags and strings count by value: a program runs for those that it was recorded with. Containers count by what they hold, everything
    else by identity. A change that the function itself makes, such as that of a counter, is a side effect of Python and does not count; a Tensor that
    it assigns to such a name makes it run eagerly. An optimizer's options are read at every run, and an array that is changed in place is read as it
    is.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from aiograd.compiler.lines import is_installed
from aiograd.tensors.core import TensorCore

#: how many objects deep
DEPTH = 3
#: numbers, flags and strings
PLAIN: tuple[type[Any], ...] = (int, float, complex, str, bytes, np.generic)
_OPAQUE: tuple[type[Any], ...] = (ModuleType, type, type(None), *PLAIN)
_CONTAINERS = (tuple, list, dict)
#: of a list or tuple, the numbers that are looked at
FIRST = 16

#: an object whose attributes have to be what they were, and these
Guard = tuple[Any, dict[str, Any]]


class Fit(enum.Enum):
    """How an object compares with what it was when a program was recorded."""

    #: the same
    SAME = enum.auto()
    #: plain attributes have other values, such as ``training``: they may come back
    OTHER = enum.auto()
    #: other objects, such as a Parameter that was replaced: the program is of no use any more
    STALE = enum.auto()


def fit_of(owner: Any, attributes: dict[str, Any]) -> Fit:
    """Compare the attributes of an object with those that it had."""
    now = owner.__dict__
    if now.keys() != attributes.keys():
        return Fit.STALE
    fit = Fit.SAME
    for name, value in attributes.items():
        found = now[name]
        if found is value:
            continue
        if not isinstance(value, PLAIN) or not isinstance(found, PLAIN):
            return Fit.STALE
        if not is_same_value(found, value):
            fit = Fit.OTHER
    return fit


def is_same_value(a: Any, b: Any) -> bool:
    """True if two numbers, flags or strings are of one type and equal, or two objects are the same; 0.0 is another number than -0.0."""
    if a is b or not isinstance(a, PLAIN):
        return a is b
    return bool(a.__class__ is b.__class__ and a == b and (a != 0 or str(a) == str(b)))


class Root:
    """An object that a search begins with, called to get it.

    Args:
        text: of the expression that gives it, with ``{}`` for `holder`.
        holder: a cell, a function's globals, or the object itself.
        read: returns it; None: there is none at the moment.
    """

    __slots__ = ("text", "holder", "_read")

    def __init__(self, text: str, holder: Any, read: Callable[[], Any]) -> None:
        self.text = text
        self.holder = holder
        self._read = read

    def __call__(self) -> Any:
        return self._read()


class NamedTensors:
    """The Tensors that a function finds by name, as attributes, so that they are compared as those of other objects are.

    Args:
        roots: where to begin, by name.
    """

    def __init__(self, roots: dict[str, Root]) -> None:
        self.roots = roots

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = {}
        for name, root in self.roots.items():
            for number, leaf in enumerate(filter(self._counts, _leaves(root(), DEPTH, set()))):
                found[f"{name} {number}"] = leaf
        return found

    @staticmethod
    def _counts(leaf: Any) -> bool:
        return isinstance(leaf, TensorCore)


class NamedOthers(NamedTensors):
    """Everything else that a function finds by name."""

    @staticmethod
    def _counts(leaf: Any) -> bool:
        return not isinstance(leaf, TensorCore)


def unchanged(guards: list[Guard]) -> bool:
    """True if a call has left the Tensors around it as they were; anything else that it has changed is not guarded from here on."""
    for owner, attributes in guards:
        if isinstance(owner, NamedOthers):
            now = owner.__dict__
            for name in [*owner.roots]:
                before, after = _of_root(attributes, name), _of_root(now, name)
                if before.keys() != after.keys() or not all(is_same_value(after[key], value) for key, value in before.items()):
                    del owner.roots[name]
            for key in attributes.keys() - owner.__dict__.keys():
                del attributes[key]
        elif fit_of(owner, attributes) is not Fit.SAME:
            return False
    return True


def _of_root(attributes: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if key.rpartition(" ")[0] == name}


def guards_of(function: Any, args: tuple[Any, ...]) -> list[Guard]:
    """Guards for what a function reaches by name, as it is now.

    Args:
        function: that is compiled.
        args: of the call; the first may be the object that `function` is a method of.
    """
    roots: dict[str, Root] = {}
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if isinstance(plain, FunctionType):
        names = plain.__globals__
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            _add_root(roots, name, Root("{}.cell_contents", cell, _reader(cell)), plain)
        for name in plain.__code__.co_names:
            if name in names:
                _add_root(roots, f"global {name}", Root(f"{{}}.get({name!r})", names, functools.partial(names.get, name)), plain)
    owner = getattr(function, "__self__", args[0] if args else None)
    if not isinstance(owner, (TensorCore, type(None), np.ndarray, *_CONTAINERS, *PLAIN)):
        _add_root(roots, "self", Root("{}", owner, lambda: owner), plain)
    if not isinstance(plain, FunctionType) and not isinstance(function, _OPAQUE):
        roots["the callable"] = Root("{}", function, lambda: function)
    named = [NamedTensors(roots), NamedOthers(dict(roots))]
    modules = {id(module): module for root in roots.values() for module in _modules(root())}
    return [*((each, each.__dict__) for each in named), *((module, dict(module.__dict__)) for module in modules.values())]


def _add_root(roots: dict[str, Root], name: str, root: Root, function: Any) -> None:
    """Begin with what a name of a function leads to, and with the attributes of a Python module or class that the function mentions."""
    value = root()
    if not isinstance(value, ModuleType):
        roots[name] = root
    holders = (value,) if isinstance(value, ModuleType) else (value if isinstance(value, type) else type(value)).__mro__
    if is_installed(holders[0]) or not isinstance(function, FunctionType):
        return
    for attribute in function.__code__.co_names:
        holder = next((each for each in holders if attribute in vars(each)), None)
        if holder is not None:
            read = functools.partial(vars(holder).get, attribute)
            roots[f"{name}.{attribute}"] = Root(f"{{}}.__dict__.get({attribute!r})", holder, read)


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


def _leaves(value: Any, depth: int, seen: set[tuple[int, int, bool]], counts: bool = True) -> Iterator[Any]:
    """The part of a value that is compared.

    Args:
        depth: how far to look.
        seen: objects that have been looked into.
        counts: numbers, flags and strings are among it.
    """
    is_container = isinstance(value, _CONTAINERS)
    if not is_container and (counts or not isinstance(value, PLAIN)):
        yield value
    key = (id(value), depth, counts)
    if not depth or (key in seen and not is_container) or (found := contents_of(value)) is None:
        return
    seen.add(key)
    first = FIRST if isinstance(value, (tuple, list)) else len(found[1])
    for i, item in enumerate(found[1]):
        yield from _leaves(item, depth - 1, seen, counts and i < first)


def contents_of(value: Any) -> tuple[str, list[Any]] | None:
    """The objects that a search looks through next.

    Returns:
        The text of an expression that gives them again, with ``{}`` for `value`, empty where they stay the same; and the objects. None for a value
        that is not looked into.
    """
    if isinstance(value, (TensorCore, *_OPAQUE)) or _is_module(value) or hasattr(value, "param_groups"):
        return None
    if isinstance(value, tuple):
        return "", list(value)
    if isinstance(value, list):
        return "{}", list(value)
    if isinstance(value, dict):
        return "{}.values()", list(value.values())
    if isinstance(value, FunctionType):
        cells, names = value.__closure__ or (), () if is_installed(value) else _mentioned(value)
        items = [*[_reader(cell)() for cell in cells], *map(value.__globals__.get, names)]
        return f"[*[cell.cell_contents for cell in {{0}}.__closure__ or ()], *map({{0}}.__globals__.get, {names!r})]" if items else "", items
    if isinstance(value, MethodType):
        return "", [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return "", [value.func, *value.args, *value.keywords.values()]
    if getattr(type(value), "is_compiled_function", False):
        return "[{}.function]", [value.function]  # what else it has counts calls
    if hasattr(value, "__dict__"):
        return "{}.__dict__.values()", list(vars(value).values())
    slots = getattr(type(value), "__slots__", ())
    if slots and not is_installed(type(value)):
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        return f"[getattr({{}}, name, None) for name in {names!r}]", [getattr(value, name, None) for name in names]
    return None


def _mentioned(function: FunctionType) -> tuple[str, ...]:
    """The globals that a function mentions; Python modules do not count."""
    known = function.__globals__
    return tuple([name for name in function.__code__.co_names if name in known and not isinstance(known[name], ModuleType)])
