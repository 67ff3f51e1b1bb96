"""Calls of functions that are not written in Python: the reads that they make.

Note [Functions written in C]
    Such a function is of one of four kinds. Most compute from their arguments and nothing else: functions of the modules in `_PURE`, the methods of
    built-in types, and the functions of numpy except `numpy.random`. A few read or change something in a way of their own (`getattr`,
    `functools.partial`, ``ContextVar.get``), each with a rule here. `print` has no result that counts. The result of any other, such as the clock,
    may be another at every call, so no program is made.
"""

from __future__ import annotations

import decimal
import functools
import importlib.util
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, MethodWrapperType, ModuleType, WrapperDescriptorType
from typing import Any

import numpy as np

from aiograd.compiler.watching import kinds
from aiograd.compiler.watching.kinds import ABSENT, is_a, member
from aiograd.compiler.watching.objects import DISPATCHER, VIEWS_OF_ARRAYS, attribute, c_class_of, is_simple, item, items, operand, plain_attribute
from aiograd.compiler.watching.reads import Reads
from aiograd.compiler.watching.scope import is_watched
from aiograd.running.modes import ModeScope
from aiograd.running.trees import leaves_of
from aiograd.tensors.core import TensorCore

#: modules with functions and classes that compute from their arguments alone
_PURE = frozenset(
    "builtins math cmath operator _operator itertools functools _functools collections _collections _collections_abc bisect _bisect heapq _heapq "
    "struct _struct json _json binascii zlib unicodedata re _sre abc _abc types typing _typing copyreg string _string decimal _decimal datetime "
    "fractions numbers enum dataclasses array weakref _weakref contextvars _contextvars _stat numpy ml_dtypes scipy aiograd".split()
)
#: functions of other modules that do as well; functions and methods of the modules above that do not
_ALSO_PURE = frozenset(
    "sys.intern sys._getframe sys._getframemodulename sys.exc_info sys.getsizeof posix.fspath nt.fspath _io.StringIO _io.BytesIO "
    "_thread.allocate_lock _thread.RLock _thread.lock _warnings.warn".split()
)
_IMPURE = frozenset(
    "builtins.input builtins.open builtins.breakpoint builtins.dir _contextvars.copy_context datetime.now datetime.today datetime.utcnow date.today "
    "type.__subclasses__".split()
)
#: by type, methods that change an object and tell nothing of it
_CHANGES: dict[type[Any], frozenset[str]] = {
    list: frozenset(("append", "extend", "insert", "clear", "reverse")),
    deque: frozenset(("append", "appendleft", "extend", "extendleft", "clear", "rotate", "reverse")),
    dict: frozenset(("update", "clear")),
    set: frozenset(("add", "update", "clear", "discard")),
    bytearray: frozenset(("append", "extend", "insert", "clear", "reverse")),
}
#: methods that change an object and tell something of it
_TAKES = frozenset("pop popleft popitem setdefault remove sort fill put resize move_to_end __delitem__ __iadd__ __ior__ partition itemset".split())
#: methods and classes that read no more than the items themselves
_SHALLOW = frozenset("keys values items copy __iter__ __len__ __reversed__".split())
_OF_ITEMS = (list, tuple, set, frozenset, dict, deque, zip, enumerate, map, filter, reversed)
#: functions of numpy that say what results depend on
_SETTINGS = frozenset((np.geterr, np.geterrcall, np.getbufsize, np.get_printoptions))
_METHODS = (MethodDescriptorType, WrapperDescriptorType)
_LRU_CACHE = type(functools.lru_cache(lambda: None))


def call(reads: Reads, function: Any, args: tuple[Any, ...], named: dict[str, Any], where: Any) -> bool:
    """Note the reads of a call that runs no watched function.

    Args:
        reads: the reads of the recorded call.
        function: the called function.
        args, named: its arguments, as far as they are known by name.
        where: the line of the user's code.

    Returns:
        True if the functions that the call runs are not to be watched.
    """
    cls = type(function)
    if cls is MethodType:
        if _is_cython(function.__func__):
            return _method(reads, function.__self__, function.__name__, args, named, where)
        return call(reads, function.__func__, (function.__self__, *args), named, where)
    if cls is FunctionType:
        if function in _SETTINGS:
            reads.add(kinds.CALLED, settings_of, ((function,), ()), settings_of(function), where)
        elif function is importlib.import_module:
            imported(reads, args[0] if args else "", args[1] if len(args) > 1 else None, where)
        elif not is_watched(function.__code__, function.__globals__):
            _given(reads, args, named, where)
        return False
    if cls in _RULES:
        return bool(_RULES[cls](reads, function, args, named, where))
    if cls is BuiltinFunctionType or cls is MethodWrapperType:
        owner = function.__self__
        if owner is None or is_a(owner, ModuleType):
            return _function(reads, function, args, named, where)
        return _method(reads, owner, function.__name__, args, named, where)
    if cls in _METHODS:
        return _method(reads, args[0], function.__name__, args[1:], named, where) if args else False
    if is_a(function, type):
        return _class(reads, function, args, named, where)
    if is_a(function, np.ufunc) or cls is DISPATCHER:
        _given(reads, args, named, where, arrays=not leaves_of((args, named), TensorCore))
        return False
    if _is_cython(function):
        if "." in function.__qualname__ and args:
            return _method(reads, args[0], function.__name__, args[1:], named, where)
        return _function(reads, function, args, named, where)
    if c_class_of(cls) is not object and not is_a(member(cls, "__call__"), FunctionType):
        reads.refuse(function, f"it calls a {cls.__module__}.{cls.__name__}, whose result may be another each time", where)
    return False


def _is_cython(function: Any) -> bool:
    return type(function).__name__ == "cython_function_or_method"


def _given(reads: Reads, args: tuple[Any, ...], named: dict[str, Any], where: Any, *, arrays: bool = False) -> None:
    """Note that all is read that a function is given; without `arrays` those are left to the rows, which take them as captured Tensors."""
    for each in (*args, *named.values()):
        operand(reads, each, where, arrays=arrays)


def _refuse(reads: Reads, name: str, where: Any) -> bool:
    reads.refuse(None, f"it calls {name}, whose result may be another each time", where)
    return False


# -------------------------------------------------------------------- built-in functions, methods and classes


def _function(reads: Reads, function: Any, args: tuple[Any, ...], named: dict[str, Any], where: Any) -> bool:
    rule = _FUNCTIONS.get(function)  # a function of C code is compared by identity
    if rule is not None:
        return bool(rule(reads, args, where))
    module, name = str(function.__module__ or "builtins"), function.__name__
    full = f"{module}.{name}"
    if _is_seeded(module, args):
        return False
    if full in _IMPURE or module.startswith("numpy.random") or (module.partition(".")[0] not in _PURE and full not in _ALSO_PURE):
        return _refuse(reads, f"{full.removeprefix('builtins.')}()", where)
    _given(reads, args, named, where, arrays=True)
    return False


def _is_seeded(module: str, args: tuple[Any, ...]) -> bool:
    """True for a generator of random numbers that is made of a seed."""
    return (module == "_random" or module.startswith("numpy.random")) and bool(args) and args[0] is not None


def _method(reads: Reads, owner: Any, name: str, args: tuple[Any, ...], named: dict[str, Any], where: Any) -> bool:
    """A method that is written in C."""
    c_class = owner if is_a(owner, type) else c_class_of(type(owner))
    if name in _OF_OBJECTS and not is_a(owner, TensorCore):
        _OF_OBJECTS[name](reads, owner, args, where)
        return False
    if is_a(owner, type):
        if f"{owner.__name__}.{name}" in _IMPURE or f"type.{name}" in _IMPURE or str(owner.__module__).partition(".")[0] not in _PURE:
            return _refuse(reads, f"{owner.__name__}.{name}()", where)
    elif c_class is ContextVar:
        return _context(reads, owner, name, args, where)
    elif name in ("get", "__getitem__") and args:
        item(reads, owner, args[0], where)
    elif any(name in names for base, names in _CHANGES.items() if issubclass(c_class, base)):
        if leaves_of((args, named), TensorCore):
            reads.refuse(owner, f"it keeps a tensor in a {type(owner).__name__}", where)
        _given(reads, args, named, where)
        reads.changes(owner)
        return False
    elif name in ("__setitem__", "__delitem__") and args:
        reads.sets(kinds.ITEM, owner, args[0] if is_simple(args[0]) else None, where)
    elif name in _SHALLOW:
        items(reads, owner, where)
    elif c_class is np.ndarray and name in VIEWS_OF_ARRAYS:
        pass
    else:
        operand(reads, owner, where)
        if name in _TAKES:
            reads.changes(owner)
    _given(reads, args, named, where, arrays=not leaves_of((args, named), TensorCore))
    return False


def _class(reads: Reads, cls: type[Any], args: tuple[Any, ...], named: dict[str, Any], where: Any) -> bool:
    """A class that is called to make an object."""
    c_class = c_class_of(cls)
    if cls is type and len(args) == 1:
        _class_of(reads, args, where)
    elif c_class.__module__.partition(".")[0] not in _PURE and f"{c_class.__module__}.{c_class.__name__}" not in _ALSO_PURE:
        return _is_seeded(c_class.__module__, args) or _refuse(reads, f"{cls.__module__}.{cls.__qualname__}()", where)
    elif issubclass(cls, _OF_ITEMS) and not _goes_deeper(cls, args):
        for each in args:
            items(reads, each, where)
    elif c_class is not object:
        _given(reads, args, named, where, arrays=True)
    return False


def _goes_deeper(cls: type[Any], args: tuple[Any, ...]) -> bool:
    """True for a class whose objects read the items of their items, or call a function written in C on these."""
    if issubclass(cls, dict):
        return bool(args) and not hasattr(args[0], "keys")
    return issubclass(cls, (map, filter)) and bool(args) and type(args[0]) not in (FunctionType, MethodType)


def settings_of(function: Any) -> Any:
    """The settings that one of `_SETTINGS` gives."""
    found = function()
    return tuple(found.items()) if type(found) is dict else found


def imported(reads: Reads, name: str, package: str | None, where: Any) -> None:
    """Note that a module is imported, with the packages around it: a run needs the same ones."""
    try:
        parts = importlib.util.resolve_name(name, package).split(".")
    except ImportError:  # raised by the import
        return
    for count in range(1, len(parts) + 1):
        full = ".".join(parts[:count])
        if full in sys.modules:
            reads.add(kinds.ITEM, sys.modules, full, sys.modules[full], where)
        else:
            reads.sets(kinds.ITEM, sys.modules, full, where)


def _import(reads: Reads, args: tuple[Any, ...], where: Any) -> bool:
    if args and is_a(args[0], str):
        imported(reads, args[0], None, where)
    return True


def _context(reads: Reads, variable: Any, name: str, args: tuple[Any, ...], where: Any) -> bool:
    if name != "get":
        reads.refuse(None, f"it sets the ContextVar {variable.name}", where)
    else:
        with suppress(LookupError):  # not set: the call raises it
            reads.add(kinds.CONTEXT, variable, args, variable.get(*args), where)
    return False


def _class_of(reads: Reads, args: tuple[Any, ...], where: Any) -> None:
    if args and c_class_of(type(args[0])) is object and not is_a(args[0], (type, TensorCore)):
        reads.add(kinds.CLASS, args[0], None, args[0].__class__, where)


def _named_attribute(reads: Reads, args: tuple[Any, ...], where: Any) -> None:
    if len(args) > 1 and is_a(args[1], str):
        attribute(reads, args[0], args[1], where)


def _set_attribute(reads: Reads, args: tuple[Any, ...], where: Any) -> None:
    if len(args) > 1 and is_a(args[1], str):
        reads.sets(kinds.ATTRIBUTE, args[0], args[1], where)


def _nothing(reads: Reads, args: tuple[Any, ...], where: Any) -> None:
    return None


def _names_of(reads: Reads, args: tuple[Any, ...], where: Any) -> None:
    if args:
        attribute(reads, args[0], "__dict__", where)


def _decimal_context(reads: Reads, args: tuple[Any, ...], where: Any) -> None:
    key = (), ()
    reads.add(kinds.CALLED, decimal.getcontext, key, decimal.getcontext(), where)


def _left_alone(reads: Reads, args: tuple[Any, ...], where: Any) -> bool:
    return True


def _state(reads: Reads, owner: Any, args: tuple[Any, ...], where: Any) -> None:
    operand(reads, getattr(owner, "__dict__", None), where)


#: by function: the rule that takes its arguments; the result True says that the functions called by it are not watched
_FUNCTIONS: dict[Any, Callable[[Reads, tuple[Any, ...], Any], Any]] = {
    getattr: _named_attribute,
    hasattr: _named_attribute,
    setattr: _set_attribute,
    delattr: _set_attribute,
    isinstance: _class_of,
    operator.setitem: lambda reads, args, where: reads.sets(kinds.ITEM, args[0], args[1] if is_simple(args[1]) else None, where),
    operator.delitem: lambda reads, args, where: reads.sets(kinds.ITEM, args[0], args[1] if is_simple(args[1]) else None, where),
    operator.getitem: lambda reads, args, where: item(reads, args[0], args[1], where),
    iter: lambda reads, args, where: items(reads, args[0], where) if args else None,
    len: lambda reads, args, where: items(reads, args[0], where) if args else None,
    print: _left_alone,
    __import__: _import,
    vars: _names_of,
    decimal.getcontext: _decimal_context,
    **dict.fromkeys((globals, locals, id, hash, callable, issubclass, eval, exec, compile, sys.exc_info), _nothing),
}
#: by name of a method of `object`
_OF_OBJECTS: dict[str, Callable[[Reads, Any, tuple[Any, ...], Any], Any]] = {
    "__getattribute__": lambda reads, owner, args, where: _named_attribute(reads, (owner, *args), where),
    "__setattr__": lambda reads, owner, args, where: _set_attribute(reads, (owner, *args), where),
    "__delattr__": lambda reads, owner, args, where: _set_attribute(reads, (owner, *args), where),
    **dict.fromkeys(("__reduce__", "__reduce_ex__", "__getstate__", "__dir__"), _state),
    **dict.fromkeys(("__init__", "__new__", "__init_subclass__", "__subclasshook__", "__hash__"), lambda reads, owner, args, where: None),
}


# -------------------------------------------------------------------- objects that are called


def _partial(reads: Reads, function: Any, args: tuple[Any, ...], named: dict[str, Any], where: Any) -> bool:
    items(reads, function.keywords, where)
    return call(reads, function.func, (*function.args, *args), {**function.keywords, **named}, where)


def _cached(reads: Reads, function: Any, args: tuple[Any, ...], named: dict[str, Any], where: Any) -> bool:
    """A function with `functools.lru_cache`: it gives the same object again as long as its cache has it."""
    if not all([is_simple(each) or member(type(each), "__hash__") is object.__hash__ for each in (*args, *named.values())]):
        return _refuse(reads, f"{function.__name__}(), a cache", where)
    key = args, tuple(named.items())
    try:
        with ModeScope(trace=None):
            value = function(*args, **named)
    except Exception:
        reads.refuse(function, f"{function.__name__}(), a cache, raises an error", where)
        return False
    reads.add(kinds.CALLED, function, key, value, where)
    return True


def _attribute_getter(reads: Reads, function: Any, args: tuple[Any, ...], named: dict[str, Any], where: Any) -> bool:
    for path in function.__reduce__()[1]:
        holder = args[0] if args else None
        for name in path.split("."):
            attribute(reads, holder, name, where)
            holder = plain_attribute(holder, name)
            if holder is ABSENT:
                reads.refuse(None, f"it reads {path} by an attrgetter", where)
                break
    return False


def _method_caller(reads: Reads, function: Any, args: tuple[Any, ...], named: dict[str, Any], where: Any) -> bool:
    made, given = function.__reduce__()
    name = made.args[0] if is_a(made, functools.partial) else given[0]
    attribute(reads, args[0] if args else None, name, where)
    method = plain_attribute(args[0], name) if args else ABSENT
    if method is ABSENT:
        return _refuse(reads, f"{name}() by a methodcaller", where)
    return call(reads, method, given[not is_a(made, functools.partial) :], getattr(made, "keywords", {}), where)


def _item_getter(reads: Reads, function: Any, args: tuple[Any, ...], named: dict[str, Any], where: Any) -> bool:
    for key in function.__reduce__()[1]:
        item(reads, args[0] if args else None, key, where)
    return False


def _reference(reads: Reads, function: Any, args: tuple[Any, ...], named: dict[str, Any], where: Any) -> bool:
    thing = function()
    reads.add(kinds.IS_DEAD, function, None, thing is None, where)
    if thing is not None:
        reads.holds_weakly(thing, function)
    return False


#: by class of the callable
_RULES: dict[type[Any], Callable[[Reads, Any, tuple[Any, ...], dict[str, Any], Any], bool]] = {
    functools.partial: _partial,
    staticmethod: lambda reads, function, args, named, where: call(reads, function.__func__, args, named, where),
    _LRU_CACHE: _cached,
    operator.attrgetter: _attribute_getter,
    operator.methodcaller: _method_caller,
    operator.itemgetter: _item_getter,
    weakref.ReferenceType: _reference,
}
