"""Slices: gradients of the parts of an array, written out with zeros and added up, put together in one array.

Where the parts are all of the array, each once, every element of that sum is an element of a part plus zeros. One addition of zero has the same bits:
it makes +0 of -0, and a second one changes nothing.

A part that stays by itself is written out as zeros and a store, which a native function can make.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Form, Ref
from aiograd.ops.indexing import getitem_adjoint
from aiograd.running.trees import leaves_of

#: a part: its gradient, and where it belongs
Part = tuple[Ref, Any]


def with_slices_joined(code: ArrayCode) -> ArrayCode:
    """The code with the sums of the parts of arrays put together; the calls that made the parts are left to the removal of dead code."""
    code = _joined(code)
    if not any([_is_part(call) for call in code.calls]):
        return code
    calls: list[Call] = []
    for call in code.calls:
        (result,) = call.results if _is_part(call) else (None,)
        if result is None or result.dtype is None or result.dtype.kind not in "fiub" or not result.shape:
            calls.append(call)
            continue
        zeros, index = Ref(result.name, result.shape, result.dtype, result.strides), call.options["index"]
        calls.append(Call(Form.CALL, np.zeros, "zeros", (result.shape, result.dtype), (zeros,), fresh=True, comment=call.comment))
        calls.append(Call(Form.STORE, None, "", (call.arguments[0], index), (result,), out=zeros, comment=call.comment))
    return replace(code, calls=tuple(calls))


def _is_part(call: Call) -> bool:
    return call.function is getitem_adjoint.forward and isinstance(call.arguments[0], Ref)


def _joined(code: ArrayCode) -> ArrayCode:
    uses: dict[Ref, int] = {}
    for call in code.calls:
        for ref in {*call.refs()}:
            uses[ref] = uses.get(ref, 0) + 1
    for ref in leaves_of(code.results, Ref):
        uses[ref] = uses.get(ref, 0) + 1
    #: by result, the parts of a sum so far
    sums: dict[Ref, list[Part]] = {}
    joined: dict[Ref, list[Part]] = {}
    for call in code.calls:
        parts = _parts(call, sums, uses)
        if parts is not None:
            (result,) = call.results
            sums[result] = parts
            if len(parts) > 1 and _are_whole(parts, result):
                joined[result] = parts
    if not joined:
        return code
    calls: list[Call] = []
    for call in code.calls:
        if len(call.results) == 1 and call.results[0] in joined:
            (result,) = call.results
            whole = _like(result)
            calls.append(Call(Form.CALL, np.empty, "empty", (result.shape, result.dtype), (whole,), fresh=True, comment=call.comment))
            for ref, index in joined[result]:
                part, whole = whole, _like(result)
                calls.append(Call(Form.STORE, None, "", (ref, index), (whole,), out=part, comment=call.comment))
            calls.append(Call(Form.CALL, np.add, "add", (whole, np.zeros((), result.dtype)), (result,), out=whole, comment=call.comment))
        else:
            calls.append(call)
    return replace(code, calls=tuple(calls))


def _parts(call: Call, sums: dict[Ref, list[Part]], uses: dict[Ref, int]) -> list[Part] | None:
    """The parts that the result of a call is the sum of."""
    if _is_part(call):
        return [(call.arguments[0], call.options["index"])]
    if call.function is not np.add or call.options or len(call.arguments) != 2 or call.out not in (None, call.arguments[0]):
        return None
    one, other = call.arguments
    if not (isinstance(one, Ref) and isinstance(other, Ref)) or one is other or uses[one] > 1 or uses[other] > 1:
        return None
    found = sums.get(one), sums.get(other)
    return None if found[0] is None or found[1] is None else [*found[0], *found[1]]


def _like(result: Ref) -> Ref:
    return Ref(f"{result.name}_parts", result.shape, result.dtype, result.strides)


def _are_whole(parts: list[Part], result: Ref) -> bool:
    """True if the parts are all of an array, each element once."""
    shape: Any = result.shape
    axes, places = set(), []
    for ref, index in parts:
        index = index if isinstance(index, tuple) else (index,)
        cut = [axis for axis, each in enumerate(index) if each != slice(None)]
        if len(cut) != 1 or not isinstance(index[cut[0]], slice) or not all(isinstance(each, slice) for each in index):
            return False
        (axis,) = cut
        start, stop, step = index[axis].indices(shape[axis])
        if step != 1 or stop <= start or ref.dtype != result.dtype or not ref.is_in_order:
            return False
        axes.add(axis)
        places.append((start, stop))
    places.sort()
    ends = [0, *[stop for _, stop in places]]
    return len(axes) == 1 and ends[-1] == shape[axis] and [start for start, _ in places] == ends[:-1]
