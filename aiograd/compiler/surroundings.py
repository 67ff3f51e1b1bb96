"""The surroundings of a function, which it finds by name: guards against a Tensor, a function or a number that is replaced.

Note [Values that are looked through]
    A program reads the Tensors that it captured and repeats the calls that were recorded. When a name leads to something else than before (a weight
    that was assigned anew, another model, optimizer or helper function, another entry of a dict), the program must not run. Names are those of the
    function's closure, of the globals that it mentions, and of the object that it is a method of; where one leads to a Python module, a class or an
    object also the attributes of that module or class that the function mentions. From there the search goes into tuples, lists, dicts, functions
    (their closures, and the globals that they mention unless they are of an installed package) and attributes of objects, `DEPTH` deep; of objects
    those attributes that the functions mention which may run. Modules of `aiograd.nn` are looked through as a whole, and objects among the arguments
    as well. Whatever is reached in another way (through a library that keeps it, a closure of a function that no name leads to) is taken to stay.

    Other functions that run while recording count as well, by their frames: the globals that they mention, and the attributes of the class of their
    object; of a module that was called, its lists, dicts and other objects, such as its hooks, and the attributes of its class that its forward
    mentions.

    Numbers, flags and strings count by value: a program runs for those that it was recorded with. Containers count by what they hold, everything
    else by identity. A change that the function itself makes, such as that of a counter, is a side effect of Python and does not count; a Tensor that
    it assigns to such a name makes it run eagerly. An optimizer's options are read at every run, and an array that is changed in place is read as it
    is.
"""

from __future__ import annotations

import dis
import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from aiograd.compiler.contents import CONTAINERS, OPAQUE, PLAIN, contents_of, is_module, mentioned, reader
from aiograd.compiler.lines import INSTALLED, is_installed
from aiograd.tensors.core import TensorCore

#: how many objects deep, and where any of their attributes may be used
DEPTH, DEPTH_OF_ANY = 8, 3
#: mentioned where attributes are used whose names are not
_USES_ANY = {
    "getattr", "hasattr", "vars", "dir", "__dict__", "__getattribute__", "eval", "exec", "attrgetter", "methodcaller", "asdict", "astuple", "replace",
    "copy", "deepcopy",
}  # fmt: skip
#: methods that read nothing of an object that was there before
_OF_LIFE = {"__init__", "__new__", "__post_init__", "__init_subclass__", "__del__", "__repr__", "__str__", "__eq__", "__hash__", "__reduce__"}

#: an object whose attributes have to be what they were, and these
Guard = tuple[Any, dict[str, Any]]
#: by name of a root that is guarded, for each of its guards the names of the attributes that count; new guards are added
Known = dict[str, list[frozenset[str] | None]]


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
        names: of the attributes of objects that count, see `_attributes_used`; None: any.
        stored: those that functions assign.
    """

    def __init__(self, roots: dict[str, Root], names: frozenset[str] | None, stored: frozenset[str]) -> None:
        self.roots = roots
        self.names = names
        self.stored = stored

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = {}
        for name, root in self.roots.items():
            for number, leaf in enumerate(filter(self._counts, _leaves(root(), depth_of(self.names), set(), self.names))):
                found[f"{name} {number}"] = leaf
        return found

    @staticmethod
    def _counts(leaf: Any) -> bool:
        return isinstance(leaf, TensorCore)


class NamedOthers(NamedTensors):
    """Everything else that a function finds by name."""

    def __init__(self, roots: dict[str, Root], names: frozenset[str] | None, stored: frozenset[str]) -> None:
        super().__init__(roots, names, stored)
        #: the same of what no function assigns, as it was at first
        self._first: dict[str, Any] = {}
        if names is not None and not stored.isdisjoint(names):
            self._first = NamedOthers(roots, names - stored, frozenset()).__dict__

    @staticmethod
    def _counts(leaf: Any) -> bool:
        return not isinstance(leaf, TensorCore)

    def rest(self, roots: dict[str, Root]) -> list[Guard]:
        """Guards for roots that have changed, without what functions assign; none for those that have changed otherwise."""
        if self.names is None or not self._first:
            return []
        names = self.names - self.stored
        now = NamedOthers(roots, names, frozenset()).__dict__
        same = {name: root for name, root in roots.items() if _are_same(_of_root(self._first, name), _of_root(now, name))}
        return _pair({f"{name}-": root for name, root in same.items()}, names, frozenset()) if same else []


class Bits:
    """The values of an array that nothing else of a program notices, as an attribute.

    Args:
        array: small, such as a mask.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {"bits": self._array.tobytes()}


class HasGradient:
    """The presence of a leaf's gradient when a call begins, as an attribute.

    Args:
        leaf: node of the leaf.
    """

    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {"has": self._leaf.grad is not None}


def unchanged(guards: list[Guard]) -> bool:
    """True if a call has left the Tensors around it as they were; anything else that it has changed is not guarded from here on."""
    for owner, attributes in list(guards):
        if isinstance(owner, NamedOthers):
            now = owner.__dict__
            changed: dict[str, Root] = {}
            for name in [*owner.roots]:
                before, after = _of_root(attributes, name), _of_root(now, name)
                if not _are_same(before, after):
                    changed[name] = owner.roots.pop(name)
            for key in attributes.keys() - owner.__dict__.keys():
                del attributes[key]
            guards += owner.rest(changed)
        elif not isinstance(owner, HasGradient) and fit_of(owner, attributes) is not Fit.SAME:
            return False
    return True


def named_inputs(guards: list[Guard], inputs: list[TensorCore]) -> tuple[tuple[int, Any], ...]:
    """The inputs whose arrays the function finds by name as well: for each its place, and the array.

    A program of such a call cannot tell how the function came by them, so it runs for these only.
    """
    found = [value for _, attributes in guards for value in attributes.values()]
    arrays = {id(value._data) for value in found if isinstance(value, TensorCore)} | {id(value) for value in found if isinstance(value, np.ndarray)}
    return tuple([(i, tensor._data) for i, tensor in enumerate(inputs) if id(tensor._data) in arrays])


def _are_same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(is_same_value(after[key], value) for key, value in before.items())


def _of_root(attributes: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if key.rpartition(" ")[0] == name}


def guards_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known) -> list[Guard]:
    """Guards for what a function reaches by name, as it is now.

    Args:
        function: that is compiled.
        args, kwargs: of the call; the first may be the object that `function` is a method of.
        known: see `Known`.
    """
    roots: dict[str, Root] = {}
    layers = _layers(getattr(function, "__func__", function))
    plain = layers[-1]
    for number, layer in enumerate(layers):
        if isinstance(layer, FunctionType):
            for name, cell in zip(layer.__code__.co_freevars, layer.__closure__ or (), strict=True):
                _add_root(roots, f"{name}{number or ''}", Root("{}.cell_contents", cell, reader(cell)), mentioned(layer.__code__))
            for name in ("__defaults__", "__kwdefaults__"):
                if getattr(layer, name):
                    roots[f"{name}{number or ''}"] = Root(f"{{}}.{name}", layer, functools.partial(getattr, layer, name))
            _add_globals(roots, layer.__code__, layer.__globals__)
    names = mentioned(plain.__code__) if isinstance(plain, FunctionType) else ()
    owner = getattr(function, "__self__", args[0] if args else None)
    if _is_object(owner):
        _add_root(roots, "self", Root("{}", owner, lambda: owner), names)
    for number, other in enumerate(_objects([*args, *kwargs.values()])):
        if other is not owner:
            _add_root(roots, f"argument {number}", Root("{}", other, functools.partial(_same, other)), names)
    if not isinstance(plain, FunctionType) and not isinstance(function, OPAQUE):
        roots["the callable"] = Root("{}", function, lambda: function)
    modules = {id(module): module for root in roots.values() for module in _modules(root())}
    guards = _named(roots, layers, known)
    for module in modules.values():
        guards += [*guards_of_module(module, known), (module, dict(module.__dict__))]
    return guards


def guards_of_code(code: CodeType, names: dict[str, Any], owner: Any, known: Known) -> list[Guard]:
    """Guards for what another function mentions, which has run while a program was recorded.

    Args:
        code: of the function.
        names: its globals.
        owner: its first argument; the attributes of its class count that the function mentions.
        known: see `Known`.
    """
    roots: dict[str, Root] = {}
    _add_globals(roots, code, names)
    if _is_object(owner):
        _add_class(roots, type(owner), mentioned(code))
    return _named(roots, [code], known)


def guards_of_module(module: Any, known: Known) -> list[Guard]:
    """Guards for what a module of a network that was called holds, and for attributes of its class that its forward mentions."""
    roots: dict[str, Root] = {}
    _add_module(roots, module)
    forward = getattr(type(module), "forward", None)
    if isinstance(forward, FunctionType):
        _add_class(roots, type(module), mentioned(forward.__code__))
    return _named(roots, [forward], known, type(module))


def _named(roots: dict[str, Root], functions: Iterable[Any], known: Known, cls: type[Any] = object) -> list[Guard]:
    """The guards for what roots lead to, of functions or their code (methods of a class), but for those that are known."""
    names, stored = _attributes_used(roots, functions, cls)
    new: dict[str, Root] = {}
    for name, root in roots.items():
        before = known.setdefault(name, [])
        if not any([other is None or (names is not None and names <= other) for other in before]):
            new[f"{name}/{len(before)}"] = root
            before.append(names)
    return _pair(new, names, stored) if new else []


def _pair(roots: dict[str, Root], names: frozenset[str] | None, stored: frozenset[str]) -> list[Guard]:
    return [(each, each.__dict__) for each in (NamedTensors(roots, names, stored), NamedOthers(dict(roots), names, stored))]


def _attributes_used(roots: dict[str, Root], functions: Iterable[Any], cls: type[Any]) -> tuple[frozenset[str] | None, frozenset[str]]:
    """The names that functions mention, those that they reach, and the methods of the objects that they reach: no other attribute is used.

    So an object's counters and records, which its other methods keep, do not count.

    Returns:
        The names, None where a function may use any attribute; and those that are assigned.
    """
    waiting, classes = [*functions], {*cls.__mro__}
    names: set[str] = set()
    known: set[Any] = set()
    while waiting:
        _mention(waiting, [each for each in classes if not is_installed(each)], names, known)
        if names & _USES_ANY:
            return None, frozenset()
        for leaf in [leaf for root in roots.values() for leaf in _leaves(root(), DEPTH, set(), frozenset(names))]:
            if isinstance(leaf, FunctionType):
                waiting.append(leaf)
            elif _is_object(leaf):
                classes.update(leaf.__mro__ if isinstance(leaf, type) else type(leaf).__mro__)
        waiting = [each for each in [*waiting, *_methods(classes, names)] if each.__code__ not in known]
    kept = [name for each in classes for name, member in vars(each).items() if isinstance(member, functools.cached_property)]
    return frozenset(names), frozenset([*kept, *(name for code in known for name in _assigned(code))])


@functools.lru_cache(4096)
def _assigned(code: CodeType) -> tuple[str, ...]:
    """The names of attributes that a function assigns, those within it too."""
    if code.co_filename.startswith(INSTALLED):
        return ()
    found = [each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_ATTR", "DELETE_ATTR")]
    return (*found, *(name for constant in code.co_consts if isinstance(constant, CodeType) for name in _assigned(constant)))


def _mention(waiting: list[Any], classes: list[type[Any]], names: set[str], known: set[Any]) -> None:
    """Add what functions mention, and the methods of classes that they mention, to names and known code."""
    while waiting:
        function = waiting.pop()
        code = getattr(function, "__code__", function)
        if isinstance(code, CodeType) and code not in known:
            known.add(code)
            if not code.co_filename.startswith(INSTALLED):
                names.update(mentioned(code))
                waiting += _methods(classes, names)


def _methods(classes: Iterable[type[Any]], names: set[str]) -> Iterator[Any]:
    """The functions of classes that have one of the names, or that Python calls by itself."""
    for cls in classes:
        for name, member in () if is_installed(cls) else vars(cls).items():
            if name in names or (name.startswith("__") and name not in _OF_LIFE):
                for found in (member, *(getattr(member, each, None) for each in ("__func__", "fget", "fset", "function", "func"))):
                    if isinstance(found, FunctionType):
                        yield found


def _layers(function: Any) -> list[Any]:
    """A function, and those that it wraps, the innermost last."""
    found = [function]
    while (inner := getattr(found[-1], "__wrapped__", None)) is not None and inner not in found:
        found.append(inner)
    return found


def _same(value: Any) -> Any:
    return value


def _is_object(value: Any) -> bool:
    """True for something that is neither data nor a container of it."""
    return not isinstance(value, (TensorCore, type(None), np.ndarray, *CONTAINERS, *PLAIN))


def _objects(arguments: Any) -> Iterator[Any]:
    """The objects among arguments that have contents of their own."""
    for value in arguments:
        if isinstance(value, CONTAINERS):
            yield from _objects(value.values() if isinstance(value, dict) else value)
        elif _is_object(value) and (is_module(value) or contents_of(value) is not None):
            yield value


def _add_globals(roots: dict[str, Root], code: CodeType, names: dict[str, Any]) -> None:
    used = mentioned(code)
    for name in used:
        if name in names:
            _add_root(roots, f"global {id(names)} {name}", Root(f"{{}}.get({name!r})", names, functools.partial(names.get, name)), used)


def _add_root(roots: dict[str, Root], name: str, root: Root, mentions: tuple[str, ...]) -> None:
    """Begin with what a name of a function leads to, and with the attributes of a Python module or class that the function mentions."""
    value = root()
    if not isinstance(value, ModuleType):
        roots[name] = root
    if isinstance(value, ModuleType):
        if not is_installed(value):
            _add_attributes(roots, name, (value,), mentions)
    else:
        _add_class(roots, value if isinstance(value, type) else type(value), mentions)


def _add_class(roots: dict[str, Root], cls: type[Any], mentions: tuple[str, ...]) -> None:
    if not is_installed(cls):
        _add_attributes(roots, f"class {id(cls)}", cls.__mro__, mentions)


def _add_attributes(roots: dict[str, Root], name: str, holders: tuple[Any, ...], mentions: tuple[str, ...]) -> None:
    for attribute in mentions:
        holder = next((each for each in holders if attribute in vars(each)), None)
        if holder is not None:
            read = functools.partial(vars(holder).get, attribute)
            roots[f"{name}.{attribute}"] = Root(f"{{}}.__dict__.get({attribute!r})", holder, read)


def _add_module(roots: dict[str, Root], module: Any) -> None:
    """Begin with the lists, dicts and objects that a module of a network holds beside Tensors and modules: its hooks, a configuration."""
    for name, value in module.__dict__.items():
        if name != "_buffer_names" and _is_looked_through(value):
            text = f"{{}}.__dict__.get({name!r})"
            roots[f"module {id(module)}.{name}"] = Root(text, module, functools.partial(module.__dict__.get, name))


def _is_looked_through(value: Any) -> bool:
    found = contents_of(value)
    return found is not None and not (isinstance(value, (tuple, frozenset)) and all(isinstance(each, PLAIN) for each in found[1]))


def _modules(value: Any) -> Iterator[Any]:
    if isinstance(value, CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            if is_module(item):
                yield from item.modules()
    elif not isinstance(value, OPAQUE) and is_module(value):
        yield from value.modules()


def depth_of(names: frozenset[str] | None) -> int:
    """How many objects deep to look where attributes of these names count."""
    return DEPTH_OF_ANY if names is None else DEPTH


def _leaves(value: Any, depth: int, seen: set[tuple[int, int]], names: frozenset[str] | None = None) -> Iterator[Any]:
    """The part of a value that is compared.

    Args:
        depth: how far to look.
        seen: objects that have been looked into.
        names: of the attributes that count; None: all.
    """
    is_container = isinstance(value, CONTAINERS)
    if not is_container:
        yield value
    key = (id(value), depth)
    if not depth or (key in seen and not is_container) or (found := contents_of(value, names)) is None:
        return
    seen.add(key)
    for item in found[1]:
        yield from _leaves(item, depth - 1, seen, names)
