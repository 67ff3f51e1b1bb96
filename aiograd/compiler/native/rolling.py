"""Repeated bodies in a list of items, which become loops: so code does not grow with the number of repetitions.

Note [Rolls]
    Items that repeat with a period are one loop over the items of the first repetition, the body. Addresses and numbers that differ between
    repetitions come from a table of constants, or from a multiplication where they move on evenly. The items run in the order that they have in
    the list, so only registers need care: an array that a repetition makes and a later one reads lies in memory, as does one that is used behind
    the loop. Repetitions agree in everything else: functions, shapes, strides, dtypes, and which operands are the same array.
    A first or last repetition that does not (it reads the same array twice, it writes a result of another tuple) stays outside of the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from aiograd.compiler.calls import Ref
from aiograd.compiler.native.items import FusedRows, Item, LoopCall, NativeCode, Root, RootKind, dtype_of
from aiograd.compiler.native.turns import in_turns

#: items that a loop has to save
FEWEST_SAVED = 24
#: periods that are tried, the most frequent distances between items that are alike; an item is compared with so many of the ones behind it
MOST_PERIODS, MOST_BEHIND = 24, 6
#: repetitions that are compared have at most so many times the items of the function
MOST_LOOKED_AT = 4

#: by root of a result that is returned as a whole: the way to the tuple or list, and the place there
Returned = dict[Root, tuple[tuple[int, ...], int]]


@dataclass(eq=False)
class Roll:
    """Items that are a loop; see Note [Rolls].

    Attributes:
        begin, period, count: the first item, the items of one repetition, the repetitions.
        roots: by root in the first repetition, the roots in all of them, where they differ and are not `own`.
        offsets: by Ref in the first repetition, the offsets in all of them, where they differ.
        numbers: by row of the first repetition and place of the operand, the numbers in all of them, where they differ.
        own: roots that one repetition makes and no other item uses; they share the memory of those of the first repetition.
        made: roots that repetitions make and later ones, or items behind the loop, use.
    """

    begin: int
    period: int
    count: int
    roots: dict[Root, tuple[Root, ...]] = field(default_factory=dict)
    offsets: dict[Ref, tuple[int, ...]] = field(default_factory=dict)
    numbers: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)
    own: set[Root] = field(default_factory=set)
    made: set[Root] = field(default_factory=set)

    @property
    def end(self) -> int:
        """The item behind it."""
        return self.begin + self.period * self.count


class _Parts:
    """An item taken apart: its form, which every repetition has, and its Refs and numbers, which may differ."""

    def __init__(self, item: Item, locations: dict[Ref, Any]) -> None:
        self.refs: list[Ref] = []
        self.numbers: list[tuple[tuple[int, int], Any, np.dtype[Any]]] = []
        known: dict[Ref, int] = {}
        shapes: list[Any] = []

        def place(ref: Ref) -> int:
            found = known.get(ref)
            if found is None:
                found = known[ref] = len(known)
                self.refs.append(ref)
                shapes.append((ref.shape, ref.strides, ref.dtype, locations[ref].root.is_pinned))
            return found

        if isinstance(item, FusedRows):
            rows: list[Any] = [item.shape]
            for row in item.rows:
                operands = []
                for number, each in enumerate(row.operands):
                    if each.__class__ is Ref:
                        operands.append(place(each))
                    else:
                        operands.append(-1)
                        dtype = np.dtype(bool) if row.function is np.where and not number else row.dtype
                        self.numbers.append(((id(row), number), each, dtype))
                rows.append((row.function, row.dtype, tuple(operands), place(row.result)))
            form: Any = tuple(rows)
        elif isinstance(item, LoopCall):
            form = item.ufunc, item.types, tuple(map(place, item.operands)), item.outer, item.dimensions, item.steps, item.first
        else:
            form = tuple(map(place, (*item.reads(), *item.writes())))
        self.form = item.__class__, item.errors, form, tuple(shapes)


def rolls_of(native: NativeCode, last: dict[Root, int], returned: Returned) -> list[Roll]:
    """The loops in the items of a function, in order.

    Args:
        native: the function.
        last: by root, the last item that uses it.
        returned: see `Returned`.
    """
    items = native.items
    if len(items) <= FEWEST_SAVED:
        return []
    parts = [_Parts(item, native.locations) for item in in_turns(items)]
    forms: dict[Any, int] = {}
    ids = np.array([forms.setdefault(each.form, len(forms)) for each in parts])
    taken = np.zeros(len(items), bool)
    found: list[Roll] = []
    left = MOST_LOOKED_AT * len(items)
    for begin, period, count in _repeats(ids):
        free = [number for number in range(begin, begin + period * count, period) if not taken[number : number + period].any()]
        if (len(free) - 1) * period < FEWEST_SAVED or len(free) * period > left:
            continue
        left -= len(free) * period
        bodies = [_Body(native, parts, number, period, returned) for number in in_turns(free)]
        runs = [(body.begin - place * period, body.key) for place, body in enumerate(bodies)]
        for _, group in groupby(range(len(bodies)), runs.__getitem__):
            same = [bodies[place] for place in group]
            roll = Roll(same[0].begin, period, len(same))
            if (len(same) - 1) * period >= FEWEST_SAVED and _fill(roll, same, native, last):
                taken[roll.begin : roll.end] = True
                found.append(roll)
    return sorted(found, key=lambda roll: roll.begin)


def _repeats(ids: Any) -> Iterator[tuple[int, int, int]]:
    """Where numbers repeat: begin, period and count, the ones that save most first."""
    order = np.argsort(ids, kind="stable")
    distances: Counter[int] = Counter()
    for behind in range(1, MOST_BEHIND + 1):
        one, other = order[:-behind], order[behind:]
        distances.update((other - one)[ids[one] == ids[other]].tolist())
    repeats = []
    for period, _ in distances.most_common(MOST_PERIODS):
        ends = np.flatnonzero(np.diff(np.concatenate(([False], ids[:-period] == ids[period:], [False])).astype(np.int8)))
        for begin, end in ends.reshape(-1, 2).tolist():
            count = (end - begin) // period + 1
            if (count - 1) * period >= FEWEST_SAVED:
                repeats.append((begin, period, count))
    yield from sorted(repeats, key=lambda each: (-(each[2] - 1) * each[1], each[1], each[0]))


class _Body:
    """One repetition.

    Attributes:
        begin: its first item.
        refs, roots: without repetition, in the order in which they come.
        numbers: in order.
        written: roots that it writes.
        key: the same for repetitions of one loop.
    """

    def __init__(self, native: NativeCode, parts: list[_Parts], begin: int, period: int, returned: Returned) -> None:
        self.begin = begin
        known = native.locations
        span = range(begin, begin + period)
        self.numbers = [each for number in span for each in parts[number].numbers]
        self.written = {known[ref].root for number in span for ref in native.items[number].writes()}
        refs: dict[Ref, int] = {}
        roots: dict[Root, int] = {}
        key: list[Any] = [refs.setdefault(ref, len(refs)) for number in span for ref in parts[number].refs]
        for ref in refs:
            location = known[ref]
            root = location.root
            is_fixed = root in self.written and not root.is_pinned
            key.append((roots.setdefault(root, len(roots)), location.offset if is_fixed else 0))
        key += [home_of(root, returned) for root in roots]
        self.refs, self.roots, self.key = list(refs), list(roots), tuple(key)


def home_of(root: Root, returned: Returned) -> tuple[Any, ...]:
    """Where the address of a root is found; within a loop that is the same for all of its repetitions."""
    if root.kind is RootKind.ARGUMENT:
        return root.kind, root.path[0] if root.path[1] >= 0 else -1
    if root.kind is RootKind.RESULT:
        return root.kind, returned[root][0] if root in returned else id(root)
    if root.kind is RootKind.SCRATCH:
        return root.kind, root.ref.shape, root.ref.strides, root.ref.dtype
    return (root.kind,)


def _fill(roll: Roll, bodies: list[_Body], native: NativeCode, last: dict[Root, int]) -> bool:
    """Note what differs between repetitions; False if they are no loop."""
    for number, root in enumerate(bodies[0].roots):
        roots = tuple([body.roots[number] for body in bodies])
        if all([each is root for each in roots]):
            if root in bodies[0].written and not root.is_pinned:
                return False
            continue
        if root.kind is RootKind.SCRATCH and root in bodies[0].written:
            ends = [body.begin + roll.period for body in bodies]
            if all([last[each] < end for each, end in zip(roots, ends, strict=True)]) and len(set(roots)) == len(roots):
                roll.own.update(roots)
                continue
            roll.made.update(roots)
        roll.roots[root] = roots
    for number, ref in enumerate(bodies[0].refs):
        offsets = tuple([native.locations[body.refs[number]].offset for body in bodies])
        if len(set(offsets)) > 1:
            roll.offsets[ref] = offsets
    for number, (place, value, dtype) in enumerate(bodies[0].numbers):
        values = [body.numbers[number][1] for body in bodies]
        if not all([each is value for each in values]):
            numbers = tuple([np.asarray(each).astype(dtype) for each in values])
            if len({each.tobytes() for each in numbers}) > 1:
                roll.numbers[place] = numbers
    return True


def returned_whole(native: NativeCode) -> Returned:
    """See `Returned`."""
    found: Returned = {}

    def look(tree: Any, path: tuple[int, ...], place: int) -> None:
        if tree.__class__ in (tuple, list):
            inside = (*path, place) if place >= 0 else path
            for number, each in enumerate(tree):
                look(each, inside, number)
        elif tree is not None:
            location = native.locations[tree]
            if location.root.kind is RootKind.RESULT and place >= 0 and not location.offset and is_same_layout(tree, location.root.ref):
                found.setdefault(location.root, (path, place))

    look(native.code.results, (), -1)
    return found


def is_same_layout(one: Ref, other: Ref) -> bool:
    """True for arrays of one shape, strides and dtype."""
    return one.shape == other.shape and one.strides == other.strides and dtype_of(one) == dtype_of(other)
