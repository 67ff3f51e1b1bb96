"""Guards that compare memory: one native function compares objects with the state that was noted.

Note [Comparisons]
    A table of comparisons is a `bytes` object: a head, then five words for each comparison: the register with an address, the offset from there,
    a mask, the expected value, and what to do with the word that is found. Registers 1 and up hold the objects that are given beside the table,
    register 0 holds zero, the other ones take words that later comparisons use as addresses. The first comparison that fails ends the function, so
    an address is used only after the object that has it was found to be the right one.

Note [Compared objects]
    *Arrays* by type, dtype, extents and strides, which lie in memory that the array refers to. *Classes* by CPython's version tag: a number that no
    class gets twice, and that a class loses whenever it or a base changes. *Dicts*, also the dict of an object, by their version: a number that is
    never given again, and that every change of a dict replaces. So one comparison stands for all reads of a module's attributes. Where the layout
    of an object is not the known one, which `word` finds out when the comparison is made, or something else decides on a read, such as a property,
    the read is compared by a line of Python.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from types import FunctionType, GetSetDescriptorType, ModuleType
from typing import Any

import numpy as np

from aiograd.compiler.watching import kinds
from aiograd.compiler.watching.kinds import ABSENT, member
from aiograd.compiler.watching.reads import Read
from aiograd.tensors.core import TensorCore

#: registers, the ones for intermediate addresses, and the first one for arrays that have to be distinct
REGISTERS, _ARRAY, _EXTENTS, _DISTINCT = 64, 63, 62, 40
#: objects that a call of the function takes, and arrays that are compared with each other
MOST_OBJECTS, MOST_DISTINCT = 32, 8
_ALL = (1 << 64) - 1
_LOW = (1 << 32) - 1
#: flags of a comparison: it fails if the words are equal; both words are in registers
_DIFFERS, _OF_REGISTERS = 1 << 8, 1 << 9

_TYPE, _MANAGED_DICT, _DICT_VERSION, _TYPE_VERSION, _FLAGS = 8, -24, 24, 384, 168
_NDIM, _SHAPE, _STRIDES, _DTYPE = 24, 32, 40, 56
_HAS_MANAGED_DICT = 1 << 4

#: the name of the function in `TEXT`
NAME = "aiograd_unchanged"
#: text of LLVM; the function takes what built-in functions with `METH_FASTCALL` take, and returns True or False
TEXT = f"""
define i64 @{NAME}(i64 %self, ptr %objects, i64 %count) {{
begin:
  %registers = alloca [{REGISTERS} x i64], align 8
  store i64 0, ptr %registers
  %table = load i64, ptr %objects
  %size_at = add i64 %table, 16
  %size_of = inttoptr i64 %size_at to ptr
  %size = load i64, ptr %size_of
  %head = add i64 %table, 32
  %first = add i64 %head, 24
  %end = add i64 %head, %size
  br label %take
take:
  %i = phi i64 [ 1, %begin ], [ %i_next, %taken ]
  %has = icmp slt i64 %i, %count
  br i1 %has, label %taken, label %next
taken:
  %object_at = getelementptr i64, ptr %objects, i64 %i
  %object = load i64, ptr %object_at
  %register_at = getelementptr i64, ptr %registers, i64 %i
  store i64 %object, ptr %register_at
  %i_next = add i64 %i, 1
  br label %take
next:
  %at = phi i64 [ %first, %take ], [ %at_next, %kept ]
  %is_left = icmp ult i64 %at, %end
  br i1 %is_left, label %look, label %same
look:
  %entry = inttoptr i64 %at to ptr
  %source = load i64, ptr %entry
  %offset_at = getelementptr i64, ptr %entry, i64 1
  %offset = load i64, ptr %offset_at
  %mask_at = getelementptr i64, ptr %entry, i64 2
  %mask = load i64, ptr %mask_at
  %expected_at = getelementptr i64, ptr %entry, i64 3
  %given = load i64, ptr %expected_at
  %use_at = getelementptr i64, ptr %entry, i64 4
  %use = load i64, ptr %use_at
  %source_at = getelementptr i64, ptr %registers, i64 %source
  %base = load i64, ptr %source_at
  %two = and i64 %use, {_OF_REGISTERS}
  %is_two = icmp ne i64 %two, 0
  br i1 %is_two, label %registered, label %loaded
registered:
  %other_at = getelementptr i64, ptr %registers, i64 %offset
  %other = load i64, ptr %other_at
  br label %compare
loaded:
  %word_at = add i64 %base, %offset
  %word_of = inttoptr i64 %word_at to ptr
  %word = load i64, ptr %word_of, align 1
  br label %compare
compare:
  %found = phi i64 [ %base, %registered ], [ %word, %loaded ]
  %expected = phi i64 [ %other, %registered ], [ %given, %loaded ]
  %masked = and i64 %found, %mask
  %is_same = icmp eq i64 %masked, %expected
  %turned = and i64 %use, {_DIFFERS}
  %is_turned = icmp ne i64 %turned, 0
  %is_right = xor i1 %is_same, %is_turned
  br i1 %is_right, label %kept, label %other_one
kept:
  %to = and i64 %use, {REGISTERS - 1}
  %to_at = getelementptr i64, ptr %registers, i64 %to
  store i64 %found, ptr %to_at
  store i64 0, ptr %registers
  %at_next = add i64 %at, 40
  br label %next
same:
  br label %done
other_one:
  br label %done
done:
  %place = phi i64 [ 0, %same ], [ 8, %other_one ]
  %answer_at = add i64 %head, %place
  %answer_of = inttoptr i64 %answer_at to ptr
  %answer = load i64, ptr %answer_of
  %counted_at = add i64 %head, 16
  %counted_of = inttoptr i64 %counted_at to ptr
  %counted = load i64, ptr %counted_of
  %is_counted = icmp ne i64 %counted, 0
  br i1 %is_counted, label %count_it, label %return
count_it:
  %references_of = inttoptr i64 %answer to ptr
  %references = load i64, ptr %references_of
  %more = add i64 %references, 1
  store i64 %more, ptr %references_of
  br label %return
return:
  ret i64 %answer
}}
"""

#: the built-in function made of `TEXT`, once there is one
_compare: Callable[..., bool] | None = None
#: programs with guards that may compare memory
_programs: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def use(compare: Callable[..., bool] | None) -> None:
    """Compare memory from now on with this built-in function, made of `TEXT`; None: with none. Guards that are there are made anew."""
    global _compare
    if compare is not None and layout_problem() is not None:
        return
    with _lock:
        _compare = compare
        for program in list(_programs):
            program.renew_checks()


def add_program(program: Any) -> None:
    """Have ``program.renew_checks()`` called when another function compares memory."""
    with _lock:
        _programs.add(program)


def compare_function() -> Callable[..., bool] | None:
    """The function that compares memory by a table; None if there is none."""
    return _compare


def word(address: int) -> int:
    """The word in memory at an address."""
    return int(ctypes.c_uint64.from_address(address).value)


@functools.cache
def layout_problem() -> str | None:
    """Why memory cannot be compared on this interpreter; None if it can."""
    is_known = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info[:2] <= (3, 14) and not hasattr(sys, "gettotalrefcount")
    if not is_known or struct.calcsize("P") != 8 or sys.byteorder != "little" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "the layout of objects is not known"
    array = np.zeros((2, 3))
    if word(id(array) + _TYPE) != id(np.ndarray) or word(id(array) + _NDIM) & _LOW != 2 or word(id(array) + _DTYPE) != id(array.dtype):
        return "the layout of arrays is not known"
    extents, strides = word(id(array) + _SHAPE), word(id(array) + _STRIDES)
    if [word(extents), word(extents + 8), word(strides), word(strides + 8)] != [2, 3, 24, 8]:
        return "the layout of arrays is not known"
    return None


@functools.cache
def _has_versions() -> bool:
    """True if classes and dicts have versions that change with them."""
    if sys.version_info >= (3, 13):  # dicts have none
        return False
    base = type("Base", (), {})
    derived = type("Derived", (base,), {})
    first = _tag(derived)
    base.more = None  # type: ignore[attr-defined]
    lost = word(id(derived) + _TYPE_VERSION) & _LOW
    names: dict[str, Any] = {"a": 1}
    versions = [word(id(names) + _DICT_VERSION)]
    for change in (lambda: names.update(a=2), lambda: names.update(b=3), lambda: names.pop("b"), lambda: names.update(a=1)):
        change()
        versions.append(word(id(names) + _DICT_VERSION))
    thing = derived()
    kept = thing.__dict__
    managed = word(id(thing) + _MANAGED_DICT) == id(kept)
    return first not in (0, None) and lost == 0 and _tag(derived) not in (0, None, first) and len(set(versions)) == 5 and managed


def _tag(cls: type[Any]) -> int | None:
    """The version tag of a class; None if it has none."""
    with suppress(AttributeError):
        type.__getattribute__(cls, "aiograd_version")  # to look for any name gives it one
    tag = word(id(cls) + _TYPE_VERSION) & _LOW
    return tag or None


@functools.cache
def _slots() -> dict[str, int]:
    """Where a Tensor has its slots."""
    names = ("_data", "_node", "_x")
    tensor: Any = TensorCore()
    things = {name: object() for name in names}
    for name, thing in things.items():
        setattr(tensor, name, thing)
    words = {word(id(tensor) + offset): offset for offset in range(16, TensorCore.__basicsize__, 8)}
    tensor._x = None  # which lives as long as this function
    return {name: words[id(thing)] for name, thing in things.items()}


class Comparisons:
    """A table of comparisons that is being made.

    Attributes:
        kept: the objects with addresses in the table; they have to live as long as it is used.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._entries: list[bytes] = []
        self._known: set[Hashable] = set()
        self._arrays = 0

    def __len__(self) -> int:
        return len(self._entries)

    def table(self) -> bytes:
        """The table."""
        head = struct.pack("<QQQ", id(True), id(False), sys.version_info < (3, 12))  # later ones count no references to these
        return head + b"".join(self._entries)

    def _add(self, source: int, offset: int, expected: int, mask: int = _ALL, *, to: int = 0, differs: bool = False) -> None:
        self._entries.append(struct.pack("<QqQQQ", source, offset, mask, expected, to | (_DIFFERS if differs else 0)))

    # ---------------------------------------------------------------- Tensors and arrays

    def tensor(self, tensor: TensorCore, records: bool, register: int | None = None) -> bool:
        """Compare the layout of a Tensor's array, and that it has, or has no, place in the graph; False if that cannot be done.

        Args:
            tensor: the Tensor; with a `register`, one like the Tensor in that register.
            records: True if it has a place in the graph.
            register: the number of the object among those given; None: the Tensor itself.
        """
        slots = _slots()
        if tensor._x is not None or type(tensor._data) is not np.ndarray:
            return False
        source, base = (0, id(tensor)) if register is None else (register, 0)
        self.kept.append(tensor if register is None else type(tensor))
        if register is not None:
            self._add(source, _TYPE, id(type(tensor)))
        self._add(source, base + slots["_x"], id(None))
        self._add(source, base + slots["_node"], id(None), differs=records)
        self._add(source, base + slots["_data"], 0, to=_ARRAY, differs=True)
        self.array(tensor._data, _ARRAY)
        return True

    def array(self, array: np.ndarray[Any, Any], register: int) -> None:
        """Compare the layout of the array in a register."""
        self._add(register, _TYPE, id(np.ndarray))
        self._add(register, _NDIM, array.ndim, _LOW)
        self._add(register, _DTYPE, id(array.dtype))
        self.kept.append(array.dtype)
        for offset, numbers in ((_SHAPE, array.shape), (_STRIDES, array.strides)):
            if numbers:
                self._add(register, offset, 0, 0, to=_EXTENTS)
            for place, number in enumerate(numbers):
                self._add(_EXTENTS, 8 * place, number % (1 << 64))

    def distinct(self, register: int, *, is_array: bool) -> None:
        """Compare that an array, or the array of a Tensor, in a register is none of those before it."""
        own = _DISTINCT + self._arrays
        self._arrays += 1
        if is_array:
            self._entries.append(struct.pack("<QqQQQ", register, 0, 0, 0, own | _OF_REGISTERS))
        else:
            self._add(register, _slots()["_data"], 0, 0, to=own)
        for other in range(_DISTINCT, own):
            self._entries.append(struct.pack("<QqQQQ", own, other, _ALL, 0, _OF_REGISTERS | _DIFFERS))

    # ---------------------------------------------------------------- reads

    def read(self, read: Read) -> bool:
        """Compare all that decides on a read; False if that cannot be done."""
        holder, key, kind = read.holder, read.key, read.kind
        if read.is_weak or not _has_versions():
            return False
        self.kept.append(holder)
        if type(holder) is dict and (kind in (kinds.DICT, kinds.CONTENT) or (kind in (kinds.ITEM, kinds.CONTAINS) and isinstance(key, str))):
            return self._dict(holder)
        if kind is kinds.CLASS:
            return not isinstance(holder, type) and holder.__class__ is type(holder) and self._class_of(holder)
        if kind not in (kinds.ATTRIBUTE, kinds.METHOD) or isinstance(holder, ModuleType):
            return False
        if isinstance(holder, type):
            return type(holder) is type and not _is_data(member(type, key)) and _is_constant(member(holder, key)) and self._class(holder)
        return self._attribute(holder, key)

    def _attribute(self, holder: Any, key: str) -> bool:
        cls = type(holder)
        if member(cls, "__getattribute__") is not object.__getattribute__:
            return False
        if cls.__flags__ & _HAS_MANAGED_DICT:
            address = word(id(holder) + _MANAGED_DICT)
            if address == 0 or address % 2:  # it has its attributes without a dict, where the interpreter reads them fast
                return False
            names = object.__getattribute__(holder, "__dict__")
            found = member(cls, key)
            if type(names) is not dict or id(names) != address:
                return False
            if key == "__dict__":
                return type(found) is GetSetDescriptorType and self._class_of(holder) and self._dict_of(holder, names, versioned=False)
            if _is_data(found) or not (key in names or _is_constant(found)):
                return False
            return self._class_of(holder) and self._dict_of(holder, names, versioned=True)
        return cls.__dictoffset__ == 0 and _is_constant(member(cls, key)) and self._class_of(holder)

    def _class_of(self, thing: Any) -> bool:
        """Compare the class of an object, and that the class is unchanged."""
        tag = _tag(type(thing))
        if tag is None:
            return False
        if self._is_new(("class of", id(thing))):
            self._add(0, id(thing) + _TYPE, id(type(thing)))
            self.kept.append(type(thing))
        return self._class(type(thing))

    def _class(self, cls: type[Any]) -> bool:
        """Compare that a class is unchanged."""
        tag = _tag(cls)
        if tag is None:
            return False
        if self._is_new(("class", id(cls))):
            self._add(0, id(cls) + _TYPE_VERSION, tag, _LOW)
        return True

    def _dict(self, names: dict[Any, Any]) -> bool:
        """Compare that a dict is unchanged."""
        if self._is_new(("dict", id(names))):
            self._add(0, id(names) + _DICT_VERSION, word(id(names) + _DICT_VERSION))
        return True

    def _dict_of(self, thing: Any, names: dict[str, Any], *, versioned: bool) -> bool:
        """Compare that an object has the same dict, and with `versioned` that this is unchanged."""
        if self._is_new(("dict of", id(thing), versioned)):
            self._add(0, id(thing) + _MANAGED_DICT, id(names), to=_EXTENTS)
            self.kept.append(names)
            if versioned:
                self._add(_EXTENTS, _DICT_VERSION, word(id(names) + _DICT_VERSION))
        return True

    def _is_new(self, key: Hashable) -> bool:
        is_new = key not in self._known
        self._known.add(key)
        return is_new


def _is_data(found: Any) -> bool:
    """True for an attribute of a class that hides an attribute of its objects."""
    return found is not ABSENT and (hasattr(type(found), "__set__") or hasattr(type(found), "__delete__"))


def _is_constant(found: Any) -> bool:
    """True for an attribute of a class that is the same for each access, and no code."""
    return found is not ABSENT and (type(found) in (FunctionType, staticmethod, classmethod) or not hasattr(type(found), "__get__"))
