"""Reuse: element-wise calls write into arrays that have been read for the last time.

Note [Which memory]
    Only arrays that the run itself has made: no array of an argument, none that is returned or kept for the backward, and none that may share memory
    with these. So a run needs no arena, any number of runs may be in flight, and a result is never written into after its return. The array has the
    shape, dtype and strides that numpy would give the result, so a new array would hold the same bits.
    A function that is not exact may compute otherwise where it writes over its argument: it gets other memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Memory, Ref
from aiograd.running.trees import leaves_of


def with_memory_reused(code: ArrayCode, *, waits: bool = True) -> ArrayCode:
    """The code with an `out` for the element-wise calls and products that find an array to write into.

    Args:
        waits: False: only arrays that the call itself reads, so that none is kept for a later one.
    """
    memory = Memory(code)
    kept = {memory.of(ref) for ref in (*code.given(), *leaves_of(code.results, Ref))}
    #: by Ref, the one that stands for its memory; by that one, the last call that uses it
    roots: dict[Ref, Ref] = {}
    last: dict[Ref, int] = {}
    for number, call in enumerate(code.calls):
        for ref in (*call.refs(), *call.results):
            root = roots.get(ref)
            if root is None:
                root = roots[ref] = memory.of(ref)
            last[root] = number
    ends: dict[int, list[Ref]] = {}
    for root, number in last.items():
        ends.setdefault(number, []).append(root)
    #: by root, the Ref that has all of the memory; by layout, the free Refs
    owner: dict[Ref, Ref] = {}
    free: dict[Any, list[Ref]] = {}
    calls: list[Call] = []
    for number, call in enumerate(code.calls):
        given = None
        if call.out is None and (call.is_elementwise or call.function is np.dot) and call.results[0].shape:
            (result,) = call.results
            if call.is_exact:
                given = _operand(call, number, roots, last, owner, kept)
            waiting = free.get(_layout(result))
            if given is None and waiting:
                given = waiting.pop()
            if given is not None:
                call = call.but(out=given, fresh=False)
        calls.append(call)
        for result in call.results:
            if (call.fresh or call.out is not None) and result.shape:
                owner[roots[result]] = result
        for root in ends.get(number, ()):
            found = owner.get(root)
            if waits and found is not None and root not in kept and (given is None or roots[given] is not root):
                free.setdefault(_layout(found), []).append(found)
    return replace(code, calls=tuple(calls))


def _operand(call: Call, number: int, roots: dict[Ref, Ref], last: dict[Ref, int], owner: dict[Ref, Ref], kept: set[Ref]) -> Ref | None:
    """An operand with the layout of the result, and no other reader."""
    refs = call.refs()
    for ref in refs:
        root = roots[ref]
        if root not in kept and last[root] == number and owner.get(root) is ref and _layout(ref) == _layout(call.results[0]):
            if all(other is ref or roots[other] is not root for other in refs):
                return ref
    return None


def _layout(ref: Ref) -> Any:
    return ref.shape, ref.dtype, ref.strides
