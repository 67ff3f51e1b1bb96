"""Arenas: calls that would make new arrays write into memory of the program. See the Notes of `aiograd.compiler.arena`.

Only where it pays: for arrays that are neither so few that the look into a pool costs more, nor so large that memory which is kept between calls, and
until the end of the backward, would matter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from aiograd.compiler.calls import ARENA, ArrayCode, Call, Form, Memory, Ref
from aiograd.running.trees import leaves_of

#: bytes of one array, and of all
LARGEST = 1 << 16
MOST_BYTES = 1 << 22
#: fewer arrays are not worth an arena, unless they have so many bytes
FEWEST = 8
ENOUGH_BYTES = 1 << 15


def with_arena(code: ArrayCode, *, only_saved: bool = False) -> ArrayCode:
    """The code with a further parameter, a tuple of arrays that it writes into.

    Args:
        only_saved: only values that are returned for the backward lie in it; a native function has other memory for the rest.
    """
    saved = set(leaves_of(code.results, Ref)) if only_saved else None
    memory = Memory(code)
    kept = {memory.of(ref) for ref in (*code.given(), *code.visible())}
    slots: list[Ref] = []
    calls: list[Call] = []
    total = 0
    for call in code.calls:
        result = call.results[0] if len(call.results) == 1 else None
        is_kept = result is None or memory.of(result) in kept or (saved is not None and result not in saved)
        if result is None or is_kept or not _makes(call) or not result.shape or not result.is_in_order:
            calls.append(call)
        elif not 0 < result.nbytes <= LARGEST or total + result.nbytes > MOST_BYTES:
            calls.append(call)
        else:
            total += result.nbytes
            if call.function is np.empty:
                slots.append(result)
            else:
                slots.append(Ref(f"m{len(slots)}", result.shape, result.dtype, result.strides))
                calls.append(call.but(out=slots[-1], fresh=False))
    if len(slots) < FEWEST and total < ENOUGH_BYTES:
        return code
    return replace(code, calls=tuple(calls), parameters=(*code.parameters, (ARENA, tuple(slots))))


def _makes(call: Call) -> bool:
    """True for a call that makes one array and could write into a given array instead."""
    if call.form is not Form.CALL or call.out is not None or not call.fresh:
        return False
    return call.is_elementwise or call.function in (np.dot, np.empty) or (call.function is np.matmul and not call.options)
