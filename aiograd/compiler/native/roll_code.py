"""Items to lines of LLVM in order, repeated bodies as loops; see Note [Rolls] of `aiograd.compiler.native.rolling`."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.compiler.native.elementwise import memory_type, word_of
from aiograd.compiler.native.flag_code import FlagWriter
from aiograd.compiler.native.item_code import DATA
from aiograd.compiler.native.items import FusedRows, NativeCode, Root, RootKind
from aiograd.compiler.native.rolling import Roll, returned_whole, rolls_of
from aiograd.compiler.native.turns import in_turns


class RollWriter(FlagWriter):
    """Writes all items of one function.

    Args:
        native: the function as data.
        is_dynamic: True for a text without sizes.
    """

    def __init__(self, native: NativeCode, *, is_dynamic: bool = False) -> None:
        super().__init__(native, is_dynamic=is_dynamic)
        self._returned = returned_whole(native)
        #: by way to a tuple or list that is returned, the address of its items
        self._sequences: dict[tuple[int, ...], str] = {}
        #: of the last item: the handling of errors, and whether its flags are still to be noted
        self._errors: tuple[tuple[str, str], ...] = ()
        self._is_open = False
        self._roll: Roll | None = None

    def _address(self, root: Root) -> str:
        if root.kind is RootKind.RESULT and root not in self._addresses:
            self._addresses[root] = self._new(f"load ptr, ptr {self._at(self._object((root,), ''), DATA)}")
        return super()._address(root)

    def _all_items(self) -> None:
        native = self._native
        rolls = rolls_of(native, self._last, self._returned)
        steps: list[int | Roll] = []
        for roll in rolls:
            steps += [*range(_end(steps), roll.begin), roll]
        steps += range(_end(steps), len(native.items))
        for step in in_turns(steps):
            if isinstance(step, Roll):
                self._rolled(step)
            else:
                self._step(step)

    def _step(self, number: int) -> None:
        """Write an item."""
        item = self._native.items[number]
        if item.errors != self._errors or not isinstance(item, FusedRows):
            self._note_flags(number, item.errors)
        self._number, self._is_open = number, True
        self._item(item)
        for root in self._roots[number]:
            if self._last[root] == number and (self._roll is None or root in self._roll.own):
                self._release(root)

    def _note_flags(self, number: int, errors: tuple[tuple[str, str], ...]) -> None:
        """Note the flags of the items before this one, which handles errors so."""
        kept = self._set_down(number) if self._is_open and errors != self._errors else {}
        if self._is_open:
            self._collect_flags(self._errors)
        self._take_up(kept)
        self._errors, self._is_open = errors, False

    def _release(self, root: Root) -> None:
        slot = self._slots.pop(root, None)
        if slot is not None:
            self._free.append(slot)
            self._addresses.pop(root, None)

    # ---------------------------------------------------------------- loops

    def _rolled(self, roll: Roll) -> None:
        items = self._native.items
        self._note_flags(roll.begin, items[roll.begin].errors)
        roots = dict.fromkeys([root for number in range(roll.begin, roll.end) for root in self._roots[number]])
        moving = {root for every in roll.roots.values() for root in every}
        for root in roots:  # an array made before the loop gets its address in front of it
            if root not in roll.own and root not in roll.made and (root not in moving or root.kind is RootKind.SCRATCH):
                self._place(root.ref)
        before, self._free = self._free, []
        offsets = self._offsets(roll)
        self._free, pool = before, self._free
        inside = {*roll.roots, *roll.own}
        self._forget(inside)
        self._roll, self._kept = roll, roll.made & roll.roots.keys()
        loop = self._loop_begin(roll.count)
        i = loop.i
        for root, every in roll.roots.items():
            self._addresses[root] = self._base(every, offsets, i)
            self._bases(root, every, i)
        self._moved = {ref: self._varying(values, i) for ref, values in roll.offsets.items()}
        for place, numbers in roll.numbers.items():
            self._varied[place] = self._number_of(numbers, i)
        for number in range(roll.begin, roll.begin + roll.period):
            self._step(number)
        self._note_flags(roll.end, items[roll.begin].errors)
        self._loop_end(loop)
        self._roll, self._kept, self._moved = None, set(), {}
        self._varied.clear()
        self._forget(inside)
        self._free += pool
        for root in roots:
            if self._last[root] < roll.end:
                self._release(root)

    def _forget(self, roots: set[Root]) -> None:
        """Forget addresses and registers of roots, which belong to one repetition."""
        for root in roots:
            self._addresses.pop(root, None)
        known = self._native.locations
        self._registers = {ref: value for ref, value in self._registers.items() if known[ref].root not in roots}

    def _offsets(self, roll: Roll) -> dict[Root, int]:
        """The offsets of roots in the function's own memory. Roots that repetitions make lie where, in order, none is that is still used."""
        found: dict[Root, int] = {}
        for number in range(roll.begin, roll.end):
            here = [root for root in self._roots[number] if root in roll.made]
            for root in here:
                found[root] = self._slot(root)
            for root in here:
                if self._last[root] == number:
                    self._release(root)
        for every in roll.roots.values():
            for root in every:
                if root.kind is RootKind.SCRATCH and root not in found:
                    found[root] = self._slot(root)
        return found

    def _base(self, roots: tuple[Root, ...], offsets: dict[Root, int], i: str) -> str:
        """The address of the root of this repetition."""
        first = roots[0]
        if first.kind is RootKind.SCRATCH:
            return self._new(f"getelementptr i8, ptr %scratch, i64 {self._varying(tuple([offsets[root] for root in roots]), i)}")
        if first.kind is RootKind.CONSTANT:
            places = [self.table.setdefault(("data", root.path[0]), len(self.table)) for root in roots]
            return self._new(f"load ptr, ptr {self._new(f'getelementptr i64, ptr @table, i64 {self._varying(tuple(places), i)}')}")
        return self._new(f"load ptr, ptr {self._at(self._object(roots, i), DATA)}")

    def _object(self, roots: tuple[Root, ...], i: str) -> str:
        """The array of this repetition, an argument or a result."""
        first = roots[0]
        if first.kind is RootKind.RESULT:
            items, places = self._sequences[self._returned[first][0]], [self._returned[root][1] for root in roots]
        elif first.path[1] < 0:
            items, places = "%args", [root.path[0] for root in roots]
        else:
            items, places = self._arguments[first.path[0], -2], [root.path[1] for root in roots]
        return self._new(f"load ptr, ptr {self._new(f'getelementptr ptr, ptr {items}, i64 {self._varying(tuple(places), i)}')}")

    def _bases(self, root: Root, every: tuple[Root, ...], i: str) -> None:
        """The root of this repetition is known by the one of the first; `CheckedEmitter` notes its bounds."""

    def _varying(self, values: tuple[int, ...], i: str) -> str:
        """The value of repetition `i`."""
        first, step = values[0], values[1] - values[0] if len(values) > 1 else 0
        if all([value == first + place * step for place, value in enumerate(values)]):
            return self._size(first) if not step else self._new(f"add i64 {self._new(f'mul i64 {i}, {self._size(step)}')}, {self._size(first)}")
        return self._new(f"load i64, ptr {self._new(f'getelementptr i64, ptr {self._numbers(values)}, i64 {i}')}")

    def _number_of(self, numbers: tuple[np.ndarray[Any, Any], ...], i: str) -> str:
        """The number of repetition `i`, in a register."""
        dtype = numbers[0].dtype
        place = self._new(f"getelementptr i64, ptr {self._numbers(tuple(map(word_of, numbers)))}, i64 {i}")
        return self._to_register(self._new(f"load {memory_type(dtype)}, ptr {place}"), dtype, 0)


def _end(steps: list[int | Roll]) -> int:
    last = steps[-1] if steps else -1
    return last.end if isinstance(last, Roll) else last + 1
