"""Where the arrays of a native function are, and which rows share a loop."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Ref
from aiograd.compiler.native.items import FusedRows, Item, Location, NativeCode, Root, RootKind, Row
from aiograd.running.trees import leaves_of, map_tree

_NUMBERS = (bool, int, float, np.generic)


class Unsupported(Exception):
    """Raised for a call that a native function cannot make; says why."""


class Placing:
    """Makes a `NativeCode`: gives arrays their memory, and adds items.

    Args:
        code: the calls of the function.
        written: arguments that it writes all of.
    """

    def __init__(self, code: ArrayCode, written: frozenset[Ref]) -> None:
        self._code = code
        self._written = written
        self._native = NativeCode(code, {}, [])
        self._known = self._native.locations
        self._where: dict[Root, int] = {}
        self._constants: dict[int, Ref] = {}
        #: results of expanded kernels: the Ref with its shape, or None for a residual that there is none of
        self._named: dict[Ref, Ref | None] = {}
        for number, parameter in enumerate(code.parameters):
            for place, ref in [(-1, parameter)] if isinstance(parameter, Ref) else enumerate(parameter[1]):
                self._known.setdefault(ref, Location(Root(ref, RootKind.ARGUMENT, (number, place)), 0))

    def finish(self) -> NativeCode:
        """The result, with memory that is returned told apart from the function's own."""
        if self._named:
            self._native.code = replace(self._code, results=map_tree(lambda ref: self._named.get(ref, ref), self._code.results, Ref))
        for ref in leaves_of(self._native.code.results, Ref):
            location = self._known.get(ref)
            if location is None:
                raise Unsupported(f"{ref.name} is no array")
            if location.root.kind is RootKind.SCRATCH:
                location.root.kind = RootKind.RESULT
        return self._native

    # ---------------------------------------------------------------- where arrays are

    def _make(self, ref: Ref, out: Ref | None = None) -> None:
        """Give a result its memory: the memory of `out` where an arena has it, or memory of its own."""
        if out in self._written:
            self._known[ref] = self._known[out]
        else:
            self._known[ref] = Location(Root(ref, RootKind.SCRATCH), 0)

    def name(self, ref: Ref, made: Ref | None) -> None:
        """Give a result of an expanded kernel the memory of `made`, or let it be None."""
        if made is not None:
            self._known[ref] = self._known[made]
        if ref.shape is None:
            self._named[ref] = made

    def _given(self, ref: Ref) -> Location:
        location = self._known.get(ref)
        if location is None:
            raise Unsupported(f"{ref.name} is no argument")
        return location

    def _array(self, value: Any, *, whole: bool = False) -> Any:
        """An operand: a Ref or a number; with `whole` a Ref."""
        if value.__class__ is Ref or isinstance(value, _NUMBERS):
            return value
        if isinstance(value, np.ndarray) and type(value) is np.ndarray and not value.dtype.hasobject:
            if value.size == 1 and value.dtype.kind in "fiub" and not whole:
                return value.reshape(())[()]
            ref = self._constants.get(id(value))
            if ref is None:
                ref = self._constants[id(value)] = Ref(f"constant_{len(self._constants)}", value.shape, value.dtype, value.strides)
                self._known[ref] = Location(Root(ref, RootKind.CONSTANT, (len(self._native.constants), -1)), 0)
                self._native.constants.append(value)
            return ref
        raise Unsupported(f"an argument that is a {type(value).__name__}")

    # ---------------------------------------------------------------- items

    def _row(self, call: Call, row: Row) -> None:
        """Add an element-wise row to the last loop that it may share."""
        if not math.prod(row.result.shape or ()):
            return
        items = self._native.items
        reads = [(ref, self._given(ref).root) for ref in row.refs()]
        target = self._owner(row.result)
        pinned = target.is_pinned or any([root.is_pinned for _, root in reads])
        earliest = max([self._where.get(root, -1) for _, root in reads], default=-1)
        place = len(items)
        for number in range(len(items) - 1, max(earliest, 0) - 1, -1):
            item = items[number]
            if item.__class__ is FusedRows and self._may_join(item, reads, row.result, call.errors):
                place = number
                break
            if pinned or item.errors != call.errors:
                break
        if place == len(items):
            items.append(FusedRows(row.result.shape or (), [], call.errors))
        group: Any = items[place]
        group.rows.append(row)
        group.made[target] = row.result
        for ref, root in reads:
            if root.is_pinned or root.kind is RootKind.ARGUMENT:
                group.read.setdefault(root, []).append(ref)
        self._where[target] = place

    def _owner(self, ref: Ref) -> Root:
        return self._given(ref).root

    def _may_join(self, group: FusedRows, reads: list[tuple[Ref, Root]], result: Ref, errors: Any) -> bool:
        """True if a row may be part of a loop: it reads and writes no element that another turn of the loop writes or reads."""
        if group.shape != result.shape or group.errors != errors:
            return False
        for ref, root in reads:
            made = group.made.get(root)
            if made is not None and not self._is_same_place(ref, made):
                return False
        target = self._owner(result)
        others = [*group.read.get(target, ()), *([group.made[target]] if target in group.made else ())]
        return all([self._is_same_place(ref, result) for ref in others])

    def _is_same_place(self, one: Ref, other: Ref) -> bool:
        first, second = self._known[one], self._known[other]
        is_same = first.root is second.root and first.offset == second.offset
        return one is other or (is_same and one.shape == other.shape and one.strides == other.strides)

    def _item(self, item: Item) -> None:
        for ref in item.writes():
            self._where[self._owner(ref)] = len(self._native.items)
        self._native.items.append(item)
