"""The Tensors that a function finds by name: guards against one that is replaced.

Note [What is looked through]
    A program reads the Tensors that it captured. When a name leads to another Tensor than before (a weight that was assigned anew, another entry of a
    dict), the program must not run. Names are those of the function's closure, of the globals that it mentions, and of the object that it is a
    method of. From there the search goes into functions, tuples, lists, dicts and attributes of objects, `DEPTH` deep; modules of `aiograd.nn` are
    looked through as a whole. A Tensor that is reached in another way (through a call into a library that keeps it) is taken to stay.

    Numbers, flags and strings count as well, since the function may compute with them: a program runs for the values that it was recorded with. Those
    that the function itself changes, such as a counter, are side effects of Python and do not count. An optimizer's options are read at every run.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from aiograd.tensors.core import TensorCore

#: how many objects deep
DEPTH = 3
#: numbers, flags and strings
PLAIN: tuple[type[Any], ...] = (int, float, str)
_OPAQUE: tuple[type[Any], ...] = (ModuleType, type, bytes, complex, type(None), *PLAIN)
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
        if not isinstance(value, (int, float, str)) or not isinstance(found, (int, float, str)):
            return Fit.STALE
        if not is_same_value(found, value):
            fit = Fit.OTHER
    return fit


def is_same_value(a: Any, b: Any) -> bool:
    """True if two numbers, flags or strings are of one type and equal; 0.0 is another number than -0.0."""
    return a.__class__ is b.__class__ and a == b and (a != 0.0 or a.__class__ is not float or str(a) == str(b))


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

    #: the leaves that count
    kind: type[Any] | tuple[type[Any], ...] = TensorCore

    def __init__(self, roots: dict[str, Root]) -> None:
        self.roots = roots

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = {}
        for name, root in self.roots.items():
            for number, leaf in enumerate(_leaves(root(), self.kind, DEPTH)):
                found[f"{name} {number}"] = leaf
        return found


class NamedNumbers(NamedTensors):
    """The numbers, flags and strings that a function finds by name."""

    kind = PLAIN


def unchanged(guards: list[Guard]) -> bool:
    """True if a call has left its surroundings as they were; numbers that it has changed are not guarded from here on."""
    for owner, attributes in guards:
        if isinstance(owner, NamedNumbers):
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
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            roots[name] = Root("{}.cell_contents", cell, _reader(cell))
        names = plain.__globals__
        for name in plain.__code__.co_names:
            if name in names and not isinstance(names[name], _OPAQUE):
                roots[f"global {name}"] = Root(f"{{}}.get({name!r})", names, functools.partial(names.get, name))
    owner = getattr(function, "__self__", args[0] if args else None)
    if owner is not None and not isinstance(owner, TensorCore):
        roots["self"] = Root("{}", owner, lambda: owner)
    if not isinstance(plain, FunctionType) and not isinstance(function, _OPAQUE):
        roots["the callable"] = Root("{}", function, lambda: function)
    named = [NamedTensors(roots), NamedNumbers(dict(roots))]
    modules = {id(module): module for root in roots.values() for module in _modules(root())}
    return [*((each, each.__dict__) for each in named), *((module, dict(module.__dict__)) for module in modules.values())]


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


def _leaves(value: Any, kind: type[Any] | tuple[type[Any], ...], depth: int) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif depth and (found := contents_of(value)) is not None:
        items = found[1] if kind is TensorCore or not isinstance(value, (tuple, list)) else found[1][:FIRST]
        for item in items:
            yield from _leaves(item, kind, depth - 1)


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
        cells = value.__closure__ or ()
        return ("[cell.cell_contents for cell in {}.__closure__]" if cells else ""), [_reader(cell)() for cell in cells]
    if getattr(type(value), "is_compiled_function", False):
        return "[{}.function]", [value.function]  # what else it has counts calls
    if hasattr(value, "__dict__"):
        return "{}.__dict__.values()", list(vars(value).values())
    return None
