"""Guards as generated functions: straight lines of identity comparisons that a call makes before it runs a program.

Note [Two ways to compare]
    What a program depends on is said by `signature_of` and `GuardedCode.compared`, which look through arguments and surroundings anew at every call.
    The functions made here are shorter ways to the same answer: they go along the path that was found then, and compare what they meet with the
    objects that were there. If all are the same ones, the long way would find the same; if any is not, the long way is taken, and its answer counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import numpy as np

from aiograd.compiler.contents import PLAIN, contents_of
from aiograd.compiler.program import layout_of
from aiograd.compiler.signature import shared_arrays
from aiograd.compiler.source import Names, load_checks
from aiograd.compiler.surroundings import Guard, NamedOthers, NamedTensors, depth_of
from aiograd.kernels.selection import selected
from aiograd.modes import Mode
from aiograd.tensors.core import TensorCore, make, refresh

#: from how many items of a list, or captured Tensors, on they are compared in a loop; every line of text takes time to compile
_MANY = 32
_PLAIN_CLASSES = frozenset((*PLAIN, bool))


class _CannotCheck(Exception):
    """The long way is needed every time."""


class _Checks:
    """The text of a function that returns None at the first difference."""

    def __init__(self) -> None:
        self._names = Names()
        self._lines: list[str] = []
        self._locals = 0

    def load(self, parameters: str, result: str) -> Callable[..., Any]:
        """The function."""
        lines = ["    try:", *[f"        {line}" for line in self._lines or ["pass"]]]
        missing = "    except (ValueError, KeyError, RuntimeError):  # not as long, or changed by another thread meanwhile\n        return None"
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
        """Return None if one of these holds."""
        self._lines.append(f"if {' or '.join(conditions)}: return None")

    def unpack(self, expression: str, count: int) -> list[str]:
        """Local names for the items of what an expression gives, which have to be so many."""
        names = [self.new() for _ in range(count)]
        self._lines.append(f"{', '.join(names)}, = {expression}" if names else f"() = {expression}")
        return names

    def differs(self, name: str, value: Any) -> str:
        """The condition that something is not what it was; numbers, flags and strings count by value."""
        known = self.of(value)
        # 0.0 is equal to -0.0: the long way compares them
        is_zero = isinstance(value, (float, complex, np.inexact)) and (value.real == 0 or (value.imag == 0 and isinstance(value, complex)))
        if not isinstance(value, PLAIN) or is_zero:
            return f"{name} is not {known}"
        return f"({name} is not {known} and ({name}.__class__ is not {self.of(value.__class__)} or {name} != {known}))"

    def tensor(self, name: str, expected: Any, records: bool) -> str:
        """Compare a Tensor's array with what it is now; returns the name of the array."""
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
    checks.taken(code)
    return checks.load("args, kwargs, mode", checks.result())


class _Arguments(_Checks):
    """The text of `arguments_check`."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: list[str] = []
        self._arrays: list[str] = []
        #: names of the Tensors in the graph
        self._recording: list[str] = []

    def taken(self, code: Any) -> None:
        """Compare what `GuardedCode.takes` does."""
        for i, array in code.bound:
            self.refuse(f"{self._arrays[i]} is not {self.of(array)}")
        if code.others:
            for name in self._recording:
                self.refuse(f"id({name}) in {self.of(code.others)}")

    def part(self, name: str, value: Any) -> None:
        """Compare an argument, or a part of one."""
        cls = value.__class__
        if isinstance(value, (tuple, list, dict)):
            self.refuse(f"{name}.__class__ is not {self.of(cls)}")
            if isinstance(value, dict):
                self.mapping(name, value)
                return
            for inner, item in zip(self.unpack(name, len(value)), value, strict=True):
                self.part(inner, item)
        elif isinstance(value, TensorCore):
            self.refuse(f"{name}.__class__ is not {self.of(cls)}")
            self._inputs.append(name)
            if value._node is not None:
                self._recording.append(name)
            self._arrays.append(self.tensor(name, value._data, value._node is not None))
        elif cls is np.ndarray:
            self.refuse(f"{name}.__class__ is not {self.of(cls)}", *self.layout(name, value))
            self._inputs.append(f"{self.of(make)}({name})")
            self._arrays.append(name)
        elif isinstance(value, (np.ndarray, slice)):
            raise _CannotCheck
        else:
            self.refuse(self.differs(name, value))

    def mapping(self, name: str, value: dict[str, Any]) -> None:
        """Compare a dict whose keys have this order."""
        self.refuse(f"tuple({name}) != {self.of(tuple(value))}")
        for inner, item in zip(self.unpack(f"{name}.values()", len(value)), value.values(), strict=True):
            self.part(inner, item)

    def result(self) -> str:
        """The text of the inputs, whose arrays have to be distinct."""
        arrays = self._arrays
        if len(arrays) > 3:
            ids = ", ".join([f"id({name})" for name in arrays])
            self.refuse(f"len({{{ids}}}) != {len(arrays)}")
        elif len(arrays) > 1:
            self.refuse(*[f"{one} is {other}" for i, one in enumerate(arrays) for other in arrays[:i]])
        return f"[{', '.join(self._inputs)}]"


# -------------------------------------------------------------------- surroundings


def surroundings_check(captured: Iterable[tuple[TensorCore, bool]], guards: list[Guard]) -> Callable[[], Any]:
    """A function that returns True if captured Tensors are laid out, and guarded objects have the attributes, as now; None: it cannot tell.

    Args:
        captured: each with whether it has a place in the graph.
        guards: as of `GuardedCode`.
    """
    checks = _Surroundings()
    checks.captured(list(captured))
    numbers = {name for owner, _ in guards if isinstance(owner, NamedOthers) for name in owner.roots}
    for owner, attributes in guards:
        if isinstance(owner, NamedOthers):
            continue
        if isinstance(owner, NamedTensors):
            for name, root in owner.roots.items():
                local = checks.new()
                checks.line(f"{local} = {root.text.format(checks.of(root.holder))}")
                checks.reached(local, root(), depth_of(owner.names), owner.names, counts=name in numbers)
        else:
            checks.attributes(owner, attributes)
    return checks.load("", "True")


class _Surroundings(_Checks):
    """The text of `surroundings_check`."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[int, int, bool, frozenset[str] | None]] = set()

    def captured(self, tensors: list[tuple[TensorCore, bool]]) -> None:
        """Compare the layout of captured Tensors."""
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

    def attributes(self, owner: Any, attributes: dict[str, Any]) -> None:
        """Compare the attributes of a module."""
        now = self.new()
        self.line(f"{now} = {self.of(owner)}.__dict__")
        self.refuse(f"len({now}) != {len(attributes)}")
        for name, value in attributes.items():
            found = self.new() if isinstance(value, PLAIN) else f"{now}[{name!r}]"
            if isinstance(value, PLAIN):
                self.line(f"{found} = {now}[{name!r}]")
            self.refuse(self.differs(found, value))

    def reached(self, name: str, value: Any, depth: int, names: frozenset[str] | None, *, counts: bool, is_known: bool = False) -> None:
        """Compare what a name leads to, and what that holds.

        Args:
            depth: how far to look.
            names: of the attributes of objects that count.
            counts: numbers, flags and strings count.
            is_known: it is certainly the same object.
        """
        if isinstance(value, PLAIN):
            if not is_known:
                self.refuse(self.differs(name, value) if counts else f"{name}.__class__ not in {self.of(_PLAIN_CLASSES)}")
            return
        if not is_known:
            self.refuse(f"{name} is not {self.of(value)}")
        key = (id(value), depth, counts, names)
        found = contents_of(value, names) if depth and key not in self._seen else None
        if found is None:
            return
        self._seen.add(key)
        text, items = found
        inner: list[str | None] = [None] * len(items)
        if text and len(items) > _MANY:
            copied = self.new()
            self.line(f"{copied} = [*{text.format(self.of(value))}]")
            self.refuse(f"len({copied}) != {len(items)}", f"not all(map({self.of(is_)}, {copied}, {self.of(items)}))")
        elif text:
            inner = list(self.unpack(text.format(self.of(value)), len(items)))
        for local, item in zip(inner, items, strict=True):
            if local is not None or not isinstance(item, PLAIN):
                self.reached(local or self.of(item), item, depth - 1, names, counts=counts, is_known=local is None)
