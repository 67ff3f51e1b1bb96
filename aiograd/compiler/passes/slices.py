"""Slices: gradients of the parts of an array, written out with zeros and added up, as one concatenation.

Where the parts are all of the array, each once, every element of that sum is an element of a part plus zeros. One addition of zero has the same bits:
it makes +0 of -0, and a second one changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aiograd.compiler.calls import Call, Code, Form, Ref
from aiograd.ops.indexing import getitem_adjoint
from aiograd.trees import leaves_of

#: a part: its gradient, and where it belongs
Part = tuple[Ref, Any]


def with_slices_joined(code: Code) -> Code:
    """The code with the sums of the parts of arrays as concatenations; what they were made from is left to the removal of dead code."""
    uses: dict[Ref, int] = {}
    for call in code.calls:
        for ref in {*call.refs()}:
            uses[ref] = uses.get(ref, 0) + 1
    for ref in leaves_of(code.results, Ref):
        uses[ref] = uses.get(ref, 0) + 1
    #: by result, the parts of a sum so far
    sums: dict[Ref, list[Part]] = {}
    joined: dict[Ref, tuple[list[Ref], int]] = {}
    for call in code.calls:
        parts = _parts(call, sums, uses)
        if parts is not None:
            (result,) = call.results
            sums[result] = parts
            found = _whole(parts, result) if len(parts) > 1 else None
            if found is not None:
                joined[result] = found
    if not joined:
        return code
    calls: list[Call] = []
    for call in code.calls:
        if len(call.results) == 1 and call.results[0] in joined:
            (result,) = call.results
            refs, axis = joined[result]
            whole = Ref(f"{result.name}_parts", result.shape, result.dtype, result.strides)
            zero = np.zeros((), result.dtype)
            calls.append(Call(Form.CALL, np.concatenate, "concatenate", (tuple(refs), axis), (whole,), fresh=True, comment=call.comment))
            calls.append(Call(Form.CALL, np.add, "add", (whole, zero), (result,), out=whole, comment=call.comment))
        else:
            calls.append(call)
    return replace(code, calls=tuple(calls))


def _parts(call: Call, sums: dict[Ref, list[Part]], uses: dict[Ref, int]) -> list[Part] | None:
    """The parts that the result of a call is the sum of."""
    if call.function is getitem_adjoint.forward and isinstance(call.arguments[0], Ref):
        return [(call.arguments[0], call.options["index"])]
    if call.function is not np.add or call.options or len(call.arguments) != 2 or call.out not in (None, call.arguments[0]):
        return None
    one, other = call.arguments
    if not (isinstance(one, Ref) and isinstance(other, Ref)) or one is other or uses[one] > 1 or uses[other] > 1:
        return None
    found = sums.get(one), sums.get(other)
    return None if found[0] is None or found[1] is None else [*found[0], *found[1]]


def _whole(parts: list[Part], result: Ref) -> tuple[list[Ref], int] | None:
    """The gradients of the parts in order, and the axis, if they are all of an array."""
    shape: Any = result.shape
    axes, places = set(), []
    for ref, index in parts:
        index = index if isinstance(index, tuple) else (index,)
        cut = [axis for axis, each in enumerate(index) if each != slice(None)]
        if len(cut) != 1 or not isinstance(index[cut[0]], slice) or not all(isinstance(each, slice) for each in index):
            return None
        (axis,) = cut
        start, stop, step = index[axis].indices(shape[axis])
        if step != 1 or stop <= start or ref.dtype != result.dtype or not _is_in_order(ref):
            return None
        axes.add(axis)
        places.append((start, stop, ref))
    places.sort(key=lambda place: place[:2])
    ends = [0, *[stop for _, stop, _ in places]]
    if len(axes) != 1 or ends[-1] != shape[axis] or [start for start, _, _ in places] != ends[:-1]:
        return None
    return [ref for _, _, ref in places], axis


def _is_in_order(ref: Ref) -> bool:
    """True for an array in row-major order."""
    expected, size = [], ref.dtype.itemsize if ref.dtype is not None else 0
    for length in reversed(ref.shape or ()):
        expected.append(size)
        size *= length
    return ref.strides == tuple(reversed(expected))
