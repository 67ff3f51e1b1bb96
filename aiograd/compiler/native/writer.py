"""Writes lines of LLVM: instructions with names for their results, places of the table, loops.

Note [Texts without sizes]
    With ``ag.compile(dynamic=True)`` lengths, strides, offsets and numbers are no part of the text. They lie in `sizes`, which is filled when the
    function is loaded, so programs that differ in their sizes alone have one text, which becomes machine code once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Loop:
    """A loop that is being written.

    Attributes:
        i: the counter.
        label: of its begin.
        end: the counter ends before it.
        step: that the counter takes.
    """

    i: str
    label: str
    end: str
    step: int


class Writer:
    """The lines of one function.

    Args:
        is_dynamic: True for a text without sizes.

    Attributes:
        table: place of each content, by a key that means the same in every process.
        sizes: lengths, strides, offsets and numbers of a text without them, see Note [Texts without sizes].
    """

    def __init__(self, *, is_dynamic: bool = False) -> None:
        self.table: dict[Any, int] = {}
        self.sizes: list[int] = []
        self._is_dynamic = is_dynamic
        self._lines: list[str] = []
        #: lines at the begin of the function
        self._head: list[str] = []
        self._globals: list[str] = []
        self._intrinsics: set[str] = set()
        self._shapes: dict[tuple[int, ...], str] = {}
        self._count = itertools.count()
        self._label = "entry"

    def _line(self, text: str) -> None:
        self._lines.append(f"  {text}")

    def _new(self, text: str) -> str:
        name = f"%x{next(self._count)}"
        self._lines.append(f"  {name} = {text}")
        if " @llvm." in text:
            self._note_intrinsic(text)
        return name

    def _note_intrinsic(self, text: str) -> None:
        """Declare a function of LLVM, of one argument."""
        kind, _, rest = text.removeprefix("call ").partition(" @")
        self._intrinsics.add(f"declare {kind} @{rest.partition('(')[0]}({kind})")

    def _begin(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self._label = label

    def _entry(self, key: Any, kind: str = "ptr") -> str:
        """The content of a place of the table."""
        place = self.table.setdefault(key, len(self.table))
        return self._new(f"load {kind}, ptr getelementptr (i64, ptr @table, i64 {place})")

    def _size(self, value: int) -> str:
        """A length, stride or offset that may be another one for other sizes."""
        if not self._is_dynamic:
            return str(value)
        return self._new(f"load i64, ptr {self._numbers((value,))}")

    def _at(self, address: str, offset: int) -> str:
        return address if not offset else self._new(f"getelementptr i8, ptr {address}, i64 {offset}")

    def _call(self, kind: str, key: str, *arguments: str) -> str:
        """A call of a function of the table."""
        function = self._entry(("function", key))
        text = f"call {kind} {function}({', '.join(arguments)})"
        if kind == "void":
            self._line(text)
            return ""
        return self._new(text)

    def _numbers(self, values: tuple[int, ...]) -> str:
        """The address of 64-bit integers that are constant."""
        if not values:
            return "null"
        if self._is_dynamic:
            self.sizes += values
            return f"getelementptr (i64, ptr @sizes, i64 {len(self.sizes) - len(values)})"
        name = self._shapes.get(values)
        if name is None:
            name = self._shapes[values] = f"@n{len(self._shapes)}"
            self._globals.append(f"{name} = private constant [{len(values)} x i64] [{', '.join(f'i64 {each}' for each in values)}]")
        return name

    def _fresh(self, prefix: str) -> str:
        """A name for a block."""
        return f"{prefix}{next(self._count)}"

    def _loop_begin(self, length: int, step: int = 1, begin: int | None = None) -> Loop:
        first, end = "0" if begin is None else self._size(begin), self._size(length)
        label, before = self._fresh("loop"), self._label
        self._line(f"br label %{label}")
        self._begin(label)
        i = f"%i{next(self._count)}"
        self._lines.append(f"  {i} = phi i64 [{first}, %{before}], [{i}.next, %{label}.latch]")
        return Loop(i, label, end, step)

    def _loop_end(self, loop: Loop) -> None:
        i, label = loop.i, loop.label
        self._line(f"br label %{label}.latch")
        self._begin(f"{label}.latch")
        self._lines.append(f"  {i}.next = add nuw nsw i64 {i}, {loop.step}")
        more = self._new(f"icmp ult i64 {i}.next, {loop.end}")
        self._line(f"br i1 {more}, label %{label}, label %{label}.end")
        self._begin(f"{label}.end")
