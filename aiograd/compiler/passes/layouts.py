"""Layouts: operands of small element-wise calls are laid out as the result is.

numpy needs half a microsecond to set up an iteration over operands that are laid out differently (a part of an array, a bias beside a batch), and a
quarter of that to copy a small one. Only exact functions: their results do not depend on layouts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Form, Ref
from aiograd.running.types import Shape

#: elements up to which a copy costs less than the iteration
SMALL = 2048


def with_equal_layouts(code: ArrayCode) -> ArrayCode:
    """The code with copies in the place of the operands that are laid out otherwise, one copy for all uses."""
    copies: dict[tuple[Ref, Shape], Ref] = {}
    written = code.written()
    calls: list[Call] = []
    for call in code.calls:
        if not call.pure:
            copies.clear()
        if call.is_exact and call.results[0].is_in_order and 1 < math.prod(call.results[0].shape or ()) <= SMALL:
            (result,) = call.results
            if not any([ref.shape != result.shape or ref.strides != result.strides for ref in call.reads]):
                calls.append(call)
                continue
            odd = {ref for ref in call.reads if ref.shape and not (ref.shape == result.shape and ref.is_in_order) and ref not in written}
            if len({ref for ref in odd if (ref, result.shape) not in copies}) < 2:
                for ref in odd:
                    if (ref, result.shape) not in copies:
                        copies[ref, result.shape] = _add_copy(calls, ref, result, call)  # type: ignore[index]
                call = call.replaced({ref: copies[ref, result.shape] for ref in odd})  # type: ignore[index]
        calls.append(call)
    return replace(code, calls=tuple(calls))


def _add_copy(calls: list[Call], ref: Ref, result: Ref, call: Call) -> Ref:
    dtype: Any = ref.dtype
    strides = np.empty(result.shape or (), dtype).strides
    copy = Ref(f"{ref.name}_{result.name}", result.shape, dtype, strides)
    if ref.shape == result.shape:
        calls.append(Call(Form.METHOD, "copy", "copy", (ref,), (copy,), fresh=True, comment=call.comment))
        return copy
    memory = Ref(copy.name, copy.shape, dtype, strides)
    calls.append(Call(Form.CALL, np.empty, "empty", (result.shape, dtype), (memory,), fresh=True, comment=call.comment))
    calls.append(Call(Form.STORE, None, "", (ref, ...), (copy,), out=memory, comment=call.comment))
    return copy
