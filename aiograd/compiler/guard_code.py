"""Guards as generated functions: straight lines of comparisons that a call makes before it runs a program.

Note [Two ways to compare]
    `signature_of` and `GuardedCode.compared` find the dependences of a program: they look through arguments and reads anew at every call. The
    functions made here are shorter ways to the same answer: they compare each object with the recorded one. If all are the same ones,
    the long way would find the same; if any is not, the long way is taken, and its answer counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from keyword import iskeyword
from operator import is_
from typing import Any

import numpy as np

from aiograd.compiler.memory_guards import MOST_DISTINCT, MOST_OBJECTS, Comparisons, compare_function
from aiograd.compiler.program import layout_of
from aiograd.compiler.signature import shared_arrays
from aiograd.compiler.source import Names, load_checks
from aiograd.compiler.watching.kinds import ATTRIBUTE, HELPERS, METHOD, PLAIN, has_hooks, is_a, is_same
from aiograd.compiler.watching.reads import Read
from aiograd.kernels.selection import selected
from aiograd.running.modes import Mode
from aiograd.tensors.core import TensorCore, make, refresh
from aiograd.tensors.levels import LevelArray

#: from how many items of a list, or captured Tensors, on they are compared in a loop; every line of text takes time to compile
_MANY = 32
#: a method is told apart from others by its function
_NAMES = (ATTRIBUTE, METHOD)


class _CannotCheck(Exception):
    """Raised if an object cannot be compared by a straight line; the long way is needed every time."""


class _Checks:
    """The text of a function that returns None at the first difference."""

    def __init__(self) -> None:
        self._names = Names()
        self._lines: list[str] = []
        self._locals = 0
        #: compared in memory, where there is a function for it
        self._compare = compare_function()
        self._comparisons = Comparisons()
        #: names of the objects that the function gets beside the table
        self._objects: list[str] = []

    def load(self, parameters: str, result: str) -> Callable[..., Any]:
        """The function."""
        lines = ["    try:", *[f"        {line}" for line in self._lines or ["pass"]]]
        missing = "    except Exception:  # no such name any more, or changed by another thread meanwhile\n        return None"
        text = "\n".join([f"def check({parameters}):", *lines, missing, f"    return {result}"]) + "\n"
        return load_checks("check", text, self._names)

    def of(self, thing: Any) -> str:
        """The name of an object."""
        return self._names.of("k", thing)

    def new(self) -> str:
        """A local name."""
        self._locals += 1
        return f"x{self._locals}"

    def line(self, text: str) -> None:
        """Add a line."""
        self._lines.append(text)

    def refuse(self, *conditions: str) -> None:
        """Add a line that returns None if one of these conditions holds."""
        self._lines.append(f"if {' or '.join(conditions)}: return None")

    def compare(self, place: int | None = None) -> None:
        """Add the line that compares memory."""
        if len(self._comparisons):
            given = ", ".join([self.of(self._comparisons.table()), *self._objects])
            self.of(self._comparisons.kept)
            self._lines.insert(len(self._lines) if place is None else place, f"if not {self.of(self._compare)}({given}): return None")

    def register(self, name: str) -> int | None:
        """The number of an object among the objects that are compared in memory; None if it cannot be one of them."""
        if self._compare is None or len(self._objects) == MOST_OBJECTS:
            return None
        self._objects.append(name)
        return len(self._objects)

    def unpack(self, expression: str, count: int) -> list[str]:
        """Add the unpacking of an expression into so many items; returns their local names."""
        names = [self.new() for _ in range(count)]
        self._lines.append(f"{', '.join(names)}, = {expression}" if names else f"() = {expression}")
        return names

    def differs(self, name: str, value: Any) -> str:
        """The condition that a value has changed; numbers, flags and strings count by value."""
        known = self.of(value)
        # 0.0 is equal to -0.0: the long way compares them
        is_zero = is_a(value, (float, complex, np.inexact)) and (value.real == 0 or (value.imag == 0 and is_a(value, complex)))
        if not is_a(value, PLAIN) or is_zero:
            return f"{name} is not {known}"
        return f"({name} is not {known} and ({name}.__class__ is not {self.of(value.__class__)} or {name} != {known}))"

    def tensor(self, name: str, expected: Any, records: bool) -> str:
        """Write the comparison of a Tensor's array with its present state; returns the name of the array."""
        data = self.new()
        self.line(f"if {name}._x is not None: {self.of(refresh)}({name})")
        self.line(f"{data} = {name}._data")
        node = f"({name}._node is None) is {records}"
        self.refuse(f"{data}.__class__ is not {self.of(expected.__class__)}", *self.layout(data, expected), node)
        return data

    def layout(self, data: str, expected: Any) -> tuple[str, ...]:
        """Conditions that an array is laid out otherwise."""
        dtype = f"{data}.dtype is not {self.of(expected.dtype)}"
        if expected.__class__ is not np.ndarray:
            return f"{data}.shape != {tuple(expected.shape)}", f"{data}.__aiograd_device__ != {layout_of(expected)!r}", dtype
        return f"{data}.shape != {tuple(expected.shape)}", f"{data}.strides != {tuple(expected.strides)}", dtype


# -------------------------------------------------------------------- arguments


def arguments_check(args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[TensorCore], mode: Mode, code: Any) -> Callable[..., Any] | None:
    """A function of positional arguments, keyword arguments and mode.

    It returns the list of inputs of a call that has the same signature as this one, which `code` takes, else None; None also where it cannot tell.

    Returns:
        None where no such function can be made.
    """
    if shared_arrays(inputs):
        return None
    checks = _Arguments()
    kernels = f"{checks.of(selected)}() is not {checks.of(selected())}"
    checks.refuse(f"mode.grad is not {mode.grad}", f"mode.dtype is not {checks.of(mode.dtype)}", kernels)
    try:
        for name, value in zip(checks.unpack("args", len(args)), args, strict=True):
            checks.part(name, value)
        if kwargs:
            checks.mapping("kwargs", kwargs)
        else:
            checks.refuse("kwargs")
    except _CannotCheck:
        return None
    checks.distinct()
    checks.taken(code)
    return checks.load("args, kwargs, mode", checks.result())


class _Arguments(_Checks):
    """The text of `arguments_check`."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: list[str] = []
        self._arrays: list[str] = []
        #: of arrays that are compared in memory, the register, and True for one that is no Tensor's
        self._registers: list[tuple[int, bool]] = []
        #: names of the Tensors in the graph
        self._recording: list[str] = []

    def taken(self, code: Any) -> None:
        """Write the comparisons that `GuardedCode.takes` makes."""
        for i, array in code.bound:
            self.refuse(f"{self._arrays[i]} is not {self.of(array)}")
        for i, is_leaf in code.leaves:
            self.refuse(f"{self._inputs[i]}.is_leaf is not {is_leaf}")
        for i in code.program.differentiated:
            self.refuse(f"{self.of(has_hooks)}({self._inputs[i]}._node, {self._inputs[i]}._nr)")
        if code.others:
            for name in self._recording:
                self.refuse(f"id({name}) in {self.of(code.others)}")

    def part(self, name: str, value: Any) -> None:
        """Write the comparison of an argument, or of a part of one."""
        cls = value.__class__
        if isinstance(value, (tuple, list, dict)):
            self.refuse(f"{name}.__class__ is not {self.of(cls)}")
            if isinstance(value, dict):
                self.mapping(name, value)
                return
            for inner, item in zip(self.unpack(name, len(value)), value, strict=True):
                self.part(inner, item)
        elif isinstance(value, TensorCore):
            if isinstance(value._data, LevelArray):  # one of another call is as good
                raise _CannotCheck
            self._inputs.append(name)
            records = value._node is not None
            if records:
                self._recording.append(name)
            register = self.register(name)
            if register is not None and self._comparisons.tensor(value, records, register):
                self._registers.append((register, False))
                self._arrays.append(f"{name}._data")
            else:
                self.refuse(f"type({name}) is not {self.of(type(value))}")
                self._arrays.append(self.tensor(name, value._data, records))
        elif cls is np.ndarray:
            self._inputs.append(f"{self.of(make)}({name})")
            self._arrays.append(name)
            register = self.register(name)
            if register is not None:
                self._comparisons.array(value, register)
                self._registers.append((register, True))
            else:
                self.refuse(f"{name}.__class__ is not {self.of(cls)}", *self.layout(name, value))
        elif isinstance(value, (np.ndarray, slice)):
            raise _CannotCheck
        else:
            self.refuse(self.differs(name, value))

    def mapping(self, name: str, value: dict[str, Any]) -> None:
        """Write the comparison of a dict, the order of its keys included."""
        self.refuse(f"tuple({name}) != {self.of(tuple(value))}")
        for inner, item in zip(self.unpack(f"{name}.values()", len(value)), value.values(), strict=True):
            self.part(inner, item)

    def distinct(self) -> None:
        """Write the comparison of the arrays with each other, which have to be distinct, and of the memory of all of them."""
        arrays = self._arrays
        if 1 < len(arrays) == len(self._registers) <= MOST_DISTINCT:
            for register, is_array in self._registers:
                self._comparisons.distinct(register, is_array=is_array)
            arrays = []
        self.compare()
        if len(arrays) > MOST_DISTINCT:
            ids = ", ".join([f"id({name})" for name in arrays])
            self.refuse(f"len({{{ids}}}) != {len(arrays)}")
        elif len(arrays) > 1:
            self.refuse(*[f"{one} is {other}" for i, one in enumerate(arrays) for other in arrays[:i]])

    def result(self) -> str:
        """The text of the inputs."""
        return f"[{', '.join(self._inputs)}]"


# -------------------------------------------------------------------- surroundings


def surroundings_check(captured: Iterable[tuple[TensorCore, bool]], reads: list[Read]) -> Callable[[], Any]:
    """A function that returns True if captured Tensors and reads are as now; None if no such function can be made.

    Args:
        captured: each with whether it has a place in the graph.
        reads: as of `GuardedCode`.
    """
    checks = _Surroundings()
    for read in reads:
        checks.read(read)
    checks.captured(list(captured))
    checks.compare(0)
    return checks.load("", "True")


class _Surroundings(_Checks):
    """The text of `surroundings_check`."""

    def captured(self, tensors: list[tuple[TensorCore, bool]]) -> None:
        """Write the comparison of the layout of captured Tensors."""
        if self._compare is not None:
            tensors = [entry for entry in tensors if not self._comparisons.tensor(*entry)]
        if len(tensors) <= _MANY or any([tensor._data.__class__ is not np.ndarray for tensor, _ in tensors]):
            for tensor, records in tensors:
                self.tensor(self.of(tensor), tensor._data, records)
            return
        arrays: list[Any] = [(tensor, tensor._data) for tensor, _ in tensors]
        rows = [(tensor, data.__class__, data.shape, data.strides, data.dtype) for tensor, data in arrays]
        expected = [(*row, records) for row, (_, records) in zip(rows, tensors, strict=True)]
        self.line(f"for t, kind, shape, strides, dtype, records in {self.of(expected)}:")
        self.line(f"    if t._x is not None: {self.of(refresh)}(t)")
        self.line("    d = t._data")
        self.line("    if d.__class__ is not kind or d.shape != shape or d.strides != strides or d.dtype is not dtype: return None")
        self.line("    if (t._node is None) is records: return None")

    def read(self, read: Read) -> None:
        """Write the comparison of a read's value."""
        if self._compare is not None and self._comparisons.read(read):
            return
        value = read.now()
        is_name = read.kind in _NAMES and read.key.isidentifier() and not iskeyword(read.key)
        if read.kind in _NAMES and not is_name:
            self.refuse(f"not {self.of(is_same)}({self.of(read.now)}(), {self.of(value)})")
            return
        holder = f"{self.of(read.holder)}()" if read.is_weak else self.of(read.holder)
        helpers = {name: self.of(helper) for name, helper in HELPERS.items() if f"{{{name}}}" in read.kind.text}
        expression = read.kind.text.format(h=holder, k=read.key if is_name else self.of(read.key), **helpers)
        if type(value) is list:
            self._items(expression, value)
        elif is_a(value, PLAIN):
            found = self.new()
            self.line(f"{found} = {expression}")
            self.refuse(self.differs(found, value))
        elif type(value) is tuple:
            found = self.new()
            self.line(f"{found} = {expression}")
            self.refuse(f"{found} is not {self.of(value)} and not {self.of(is_same)}({found}, {self.of(value)})")
        else:
            self.refuse(f"{expression} is not {self.of(value)}")

    def _items(self, expression: str, items: list[Any]) -> None:
        if len(items) > _MANY:
            found = self.new()
            self.line(f"{found} = {expression}")
            self.refuse(f"len({found}) != {len(items)}", f"not all(map({self.of(is_)}, {found}, {self.of(items)}))")
            return
        for found, item in zip(self.unpack(expression, len(items)), items, strict=True):
            self.refuse(self.differs(found, item))
