"""How objects are read: their attributes, their items, and all that they hold.

Note [Code that runs by itself]
    Reading an attribute or an item may run a method written in Python (a property, ``__getattr__``, ``__getitem__``). Such a method is watched
    itself, so all that is noted here is that the same method would run. Everything else is answered by C code of the interpreter or of numpy, and is
    read a second time to know its value, which runs no code of the user.
"""

from __future__ import annotations

import array
import functools
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar, Token
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal, getcontext
from enum import Enum
from operator import attrgetter, itemgetter, methodcaller
from re import Match, Pattern
from typing import Any, TypeVar

import numpy as np

from aiograd.compiler.watching import kinds
from aiograd.compiler.watching.kinds import ABSENT, PLAIN, ReadKind, is_a, is_same, items_of, member
from aiograd.compiler.watching.reads import Reads
from aiograd.tensors.core import TensorCore

#: bytes of the largest array that is compared at every call
MOST_BYTES = 1 << 14
#: how deep containers are looked through
_DEPTH = 16
_VIEWS = tuple([type(getattr(cls(), name)()) for cls in (dict, OrderedDict) for name in ("keys", "values", "items")])
_LISTS: tuple[Any, ...] = (list, set, deque, *_VIEWS)
_DICTS: tuple[Any, ...] = (dict, OrderedDict, types.MappingProxyType)
_BUFFERS: dict[Any, ReadKind] = {bytearray: kinds.BYTEARRAY, array.array: kinds.BYTES, memoryview: kinds.BYTES}
#: class of the functions of numpy that ask the classes of their arguments first
DISPATCHER = type(np.sum)
_LOCK, _RECURSIVE_LOCK = type(threading.Lock()), type(threading.RLock())
#: classes of values that do not change, or only by their attributes
_STEADY: tuple[type[Any], ...] = (
    *PLAIN, types.NoneType, types.EllipsisType, types.NotImplementedType, range, slice, type, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, types.MethodWrapperType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType,
    types.GetSetDescriptorType, types.ModuleType, types.CodeType, types.CellType, types.GenericAlias, TypeVar, property, classmethod,
    staticmethod, super, functools.partial, weakref.ReferenceType, ContextVar, Token, types.CoroutineType, _LOCK, _RECURSIVE_LOCK, np.dtype,
    np.ufunc, DISPATCHER, itemgetter, date, time, timedelta, tzinfo, Pattern, Match, BaseException, types.TracebackType, TensorCore,
)  # fmt: skip
#: functions that read attributes of their arguments
_GETTERS = (attrgetter, methodcaller)
#: attributes of Tensors that are neither their own data nor a part of the signature
OF_THE_GRAPH = ("is_leaf", "requires_grad", "grad_fn", "version", "_version", "retains_grad")
#: methods of an array that make views
VIEWS_OF_ARRAYS = frozenset("view reshape ravel transpose squeeze swapaxes diagonal".split())
_BOUND_OF_C = (types.BuiltinFunctionType, types.MethodWrapperType)
_C_METHODS = (types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType, types.WrapperDescriptorType)
#: members of classes that are written in C
_OF_C = (types.WrapperDescriptorType, types.MethodDescriptorType)
_BOUND_TO_CLASSES = (types.FunctionType, *_C_METHODS, property, type)


def _c_class_of(cls: Any) -> Any:
    """The class written in C that the objects of a class are of; `object` if that has no state of its own."""
    for each in cls.__mro__:
        if any([is_a(found, _OF_C) and found.__objclass__ is each for found in vars(each).values()]):
            return each
    return object


c_class_of: Callable[[Any], Any] = functools.lru_cache(4096)(_c_class_of)


def is_simple(key: Any) -> bool:
    """True for a key that is compared without code of the user."""
    return is_a(key, (*PLAIN, types.NoneType, Enum, type)) or (type(key) is tuple and all(map(is_simple, key)))


# -------------------------------------------------------------------- attributes


def attribute(reads: Reads, holder: Any, name: str, where: Any, *, counts: bool = False) -> None:
    """Note the reading of an attribute that is there or is not."""
    cls = holder.__class__ if type(holder) in weakref.ProxyTypes else type(holder)
    if is_a(holder, TensorCore):
        if name in OF_THE_GRAPH or name in getattr(holder, "__dict__", ()):
            reads.of_tensors.append((holder, name, getattr(holder, name), where))
        return
    if cls is super:
        key = holder.__thisclass__, name
        reads.add(kinds.SUPER, holder.__self_class__, key, kinds.SUPER.now(holder.__self_class__, key), where)
        return
    if is_a(member(cls, "__getattribute__"), types.FunctionType):
        return
    if is_a(holder, type):
        _attribute_of_class(reads, holder, name, where, counts)
        return
    found = member(cls, name)
    if _is_data(found):
        if _runs_python(found):
            reads.add(kinds.MEMBER, cls, name, found, where)
        else:
            _answered(reads, holder, name, where, counts)
        return
    if found is not ABSENT and _runs_python(found):
        if name in getattr(holder, "__dict__", ()):
            _answered(reads, holder, name, where, counts)
        else:
            reads.add(kinds.NOT_OWN, holder, name, True, where)
            reads.add(kinds.MEMBER, cls, name, found, where)
    elif is_a(found, _C_METHODS) and c_class_of(cls) is cls:
        return  # of a class that cannot change
    else:
        _answered(reads, holder, name, where, counts)


def _attribute_of_class(reads: Reads, cls: type[Any], name: str, where: Any, counts: bool) -> None:
    of_meta, found = member(type(cls), name), member(cls, name)
    if _is_data(of_meta) or found is ABSENT:
        if of_meta is not ABSENT and _runs_python(of_meta):
            reads.add(kinds.MEMBER, type(cls), name, of_meta, where)
            return
    elif not is_a(found, _BOUND_TO_CLASSES) and _runs_python(found):
        reads.add(kinds.MEMBER, cls, name, found, where)
        return
    _answered(reads, cls, name, where, counts)


def _is_data(descriptor: Any) -> bool:
    cls = type(descriptor)
    return hasattr(cls, "__get__") and (hasattr(cls, "__set__") or hasattr(cls, "__delete__"))


def _runs_python(descriptor: Any) -> bool:
    """True for a descriptor that may run Python code to make its value; False for a plain function or method."""
    if is_a(descriptor, property):
        return True
    if is_a(descriptor, (types.FunctionType, classmethod, staticmethod)):
        return False
    return is_a(member(type(descriptor), "__get__"), types.FunctionType)


def _answered(reads: Reads, holder: Any, name: str, where: Any, counts: bool) -> None:
    """Note an attribute that C code answers."""
    try:
        value, again = _get(holder, name), _get(holder, name)
    except AttributeError:
        if not (is_a(holder, types.ModuleType) and holder.__name__.partition(".")[0] == "aiograd"):  # its parts are loaded when asked for
            reads.add(kinds.MISSING, holder, name, True, where)
        return
    if is_same(value, again):
        reads.add(kinds.ATTRIBUTE, holder, name, value, where, counts=counts)
    elif is_a(value, types.MethodType):
        reads.add(kinds.METHOD, holder, name, value.__func__, where)
    elif name == "__dict__" and is_a(holder, type):
        reads.add(kinds.NAMES, holder, None, kinds.NAMES.now(holder, None), where)
    elif not is_a(value, (np.ndarray, *_DICTS, *_VIEWS, *_C_METHODS)):  # objects of these types are made anew at every read
        reads.refuse(holder, f"it reads {name} of a {type(holder).__name__}, which is another object each time", where)


def _get(holder: Any, name: str) -> Any:
    """An attribute as C code gives it, without ``__getattr__``, which is watched when it runs."""
    if is_a(holder, types.ModuleType) and name not in holder.__dict__ and member(type(holder), name) is ABSENT:
        raise AttributeError(name)
    return member(type(holder), "__getattribute__")(holder, name)


def plain_attribute(holder: Any, name: str) -> Any:
    """An attribute that C code answers; `ABSENT` where there is none, or code in Python makes it."""
    found = member(type(holder), name)
    if found is not ABSENT and _runs_python(found) and name not in getattr(holder, "__dict__", ()):
        return ABSENT
    try:
        return ABSENT if is_a(member(type(holder), "__getattribute__"), types.FunctionType) else _get(holder, name)
    except AttributeError:
        return ABSENT


# -------------------------------------------------------------------- items


_SEQUENCES: tuple[Any, ...] = (list, deque, *_BUFFERS)


def item(reads: Reads, holder: Any, key: Any, where: Any, *, counts: bool = False) -> None:
    """Note the reading of an item."""
    cls = type(holder)
    if is_a(holder, TensorCore):
        operand(reads, key, where)
    elif id(holder) in reads.given or is_a(member(cls, "__getitem__"), types.FunctionType) or is_a(holder, type):
        return
    elif is_a(holder, _DICTS):
        if not is_simple(key):
            operand(reads, holder, where)
        elif key in holder:
            reads.add(kinds.ITEM, holder, key, holder[key], where, counts=counts)
        else:
            reads.add(kinds.CONTAINS, holder, key, False, where)
    elif is_a(holder, np.ndarray):
        _item_of_array(reads, holder, key, where)
    elif is_a(holder, _SEQUENCES) and is_a(key, int) and -len(holder) <= key < len(holder):
        reads.add(kinds.ITEM, holder, key, holder[key], where, counts=counts)
    else:
        operand(reads, holder, where)


def _item_of_array(reads: Reads, holder: np.ndarray[Any, Any], key: Any, where: Any) -> None:
    operand(reads, key, where)
    keys = key if is_a(key, tuple) else (key,)
    if all([is_a(each, (int, np.integer, slice, types.NoneType, types.EllipsisType)) and type(each) is not bool for each in keys]):
        if any([is_a(each, (slice, types.NoneType, types.EllipsisType)) for each in keys]) or len(keys) < holder.ndim:
            return  # a view, which is read when something is computed from it
        try:
            reads.add(kinds.ITEM, holder, key, holder[key], where)
        except IndexError:
            return
    else:
        operand(reads, holder, where)


_HASHED: tuple[Any, ...] = (set, *_DICTS)


def contains(reads: Reads, key: Any, holder: Any, where: Any) -> None:
    """Note that an item is looked for."""
    if is_a(member(type(holder), "__contains__"), types.FunctionType):
        return
    if is_a(holder, _HASHED) and is_simple(key) and id(holder) not in reads.given:
        reads.add(kinds.CONTAINS, holder, key, key in holder, where)
    else:
        operand(reads, holder, where)


# -------------------------------------------------------------------- all that is held


def operand(reads: Reads, thing: Any, where: Any, depth: int = _DEPTH, *, arrays: bool = True) -> None:
    """Note that C code reads all that an object holds; without `arrays`, those in it are not read."""
    cls = type(thing)
    if cls in PLAIN or thing is None or id(thing) in reads.given:
        return
    c_class = c_class_of(cls)
    if issubclass(c_class, (tuple, frozenset, *_LISTS, *_DICTS)) and not depth:
        reads.refuse(thing, f"a built-in function goes over containers that are nested deeper than {_DEPTH}, or contain themselves", where)
    elif issubclass(c_class, (tuple, frozenset)):
        for each in thing:
            operand(reads, each, where, depth - 1, arrays=arrays)
    elif issubclass(c_class, (*_LISTS, *_DICTS)):
        items(reads, thing, where)
        for each in items_of(thing):
            operand(reads, each, where, depth - 1, arrays=arrays)
    elif c_class is np.ndarray:
        if not (arrays and reads.takes_arrays):
            return
        if thing.nbytes <= MOST_BYTES:
            reads.add(kinds.ARRAY, thing, None, kinds.ARRAY.now(thing, None), where)
        else:
            reads.refuse(thing, f"numpy computes from an array of {thing.nbytes:,} bytes, which is too large to be compared at every call", where)
    elif c_class in _BUFFERS:
        kind = _BUFFERS[c_class]
        reads.add(kind, thing, None, kind.now(thing, None), where)
    elif c_class is functools.partial:
        operand(reads, (thing.func, thing.args, thing.keywords), where, depth - 1, arrays=arrays)
    elif is_a(thing, _BOUND_OF_C):
        _bound(reads, thing.__self__, where, depth, arrays)
    elif c_class is Decimal:
        reads.add(kinds.CALLED, decimal_settings, ((), ()), decimal_settings(), where)
    elif c_class in _GETTERS:
        reads.refuse(None, f"a built-in function reads attributes by an {cls.__name__}", where)
    elif not issubclass(c_class, _STEADY) and c_class is not object:
        how = "which can be used only once" if hasattr(c_class, "__next__") else "whose state may change"
        reads.refuse(thing, f"it uses a {cls.__name__}, {how}", where)


def _bound(reads: Reads, owner: Any, where: Any, depth: int, arrays: bool) -> None:
    """Note what a method that is written in C reads of its object, when other code calls it."""
    if is_a(owner, ContextVar):
        reads.refuse(None, f"a built-in function reads the ContextVar {owner.name}", where)
    else:
        operand(reads, owner, where, depth - 1, arrays=arrays)


def decimal_settings() -> tuple[Any, ...]:
    """The settings that the results of decimal numbers depend on."""
    now = getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, *now.traps.values()


def items(reads: Reads, thing: Any, where: Any) -> None:
    """Note a read of an object's items by identity, without their contents."""
    cls = type(thing)
    if not issubclass(c_class_of(cls), (*_LISTS, *_DICTS)):
        operand(reads, thing, where)
    elif id(thing) not in reads.given:
        kind = kinds.LIST if cls in _LISTS else kinds.DICT if cls in _DICTS else kinds.CONTENT
        reads.add(kind, thing, None, kind.now(thing, None), where)
