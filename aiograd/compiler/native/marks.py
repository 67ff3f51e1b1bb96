"""Marks: how a native program runs each of its statements.

=============  =====================================================================================
`fused n`      in a loop with others, the n-th of that kind
`loop`         in a loop of its own, or one of numpy's
`product`      by numpy's loop for products
`view`         it only looks at memory that is there
`Python`       as a call from Python
(none)         not at all: another statement has the same result, or nothing uses it
=============  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Ref
from aiograd.compiler.native.items import FusedRows, Item, LoopCall, NativeCode

PYTHON = "Python"
#: of a statement of several calls, the first of these that one of them has
_ORDER = (PYTHON, "product", "loop", "fused", "view")


def marks_of(code: ArrayCode, natives: Iterable[NativeCode], names: Sequence[str]) -> dict[str, str]:
    """By name of a value, the mark of the statement that makes it.

    Args:
        code: the forward.
        natives: the native functions of which it consists; calls that are in none of them are made from Python.
        names: of all values of the program.
    """
    makers: dict[Ref, Call] = {ref: call for call in code.calls for ref in call.results}
    by_name = {ref.name: ref for ref in makers}
    marks = _marks_of_calls(natives)
    known = set(names)
    found: dict[str, str] = {}
    for name in names:
        if name not in by_name:
            continue
        kinds: list[str] = []
        waiting, seen = [by_name[name]], set()
        while waiting:  # back to the values of other statements
            ref = waiting.pop()
            call = makers.get(ref)
            if call is None or ref in seen:
                continue
            seen.add(ref)
            kinds.append(marks.get(id(call), PYTHON))
            waiting += [each for each in call.refs() if each.name not in known]
        found[name] = min(kinds, key=lambda kind: _ORDER.index(kind.partition(" ")[0]), default="")
    return found


def _marks_of_calls(natives: Iterable[NativeCode]) -> dict[int, str]:
    """By id of a call that is in a native function, its mark."""
    found: dict[int, str] = {}
    groups = 0
    for native in natives:
        marks: dict[Ref, str] = {}
        for item in native.items:
            is_fused = isinstance(item, FusedRows) and len(item.rows) > 1
            groups += is_fused
            marks.update(dict.fromkeys(item.writes(), f"fused {groups}" if is_fused else _mark_of(item)))
        of_roots = {native.locations[ref].root: mark for ref, mark in marks.items() if ref in native.locations}
        for call in native.code.calls:
            made = [marks[ref] for ref in call.results if ref in marks]
            if not made and (call.fresh or call.unpacks):  # a loop writes it under another name
                roots = [native.locations[ref].root for ref in call.results if ref in native.locations]
                made = [of_roots[root] for root in roots if root in of_roots]
            found[id(call)] = made[0] if made else "view"
    return found


def _mark_of(item: Item) -> str:
    return "product" if isinstance(item, LoopCall) and item.ufunc is np.matmul else "loop"

