"""The tangents of a program apart from its values, for `ag.linearize`: values are computed once, and then tangents as often as they are wanted.

Note [Two halves]
    The calls of `TangentWriter` that a tangent leads to, and those that make memory which these write into, are the second half. The first half
    computes the outputs and the values that the second one reads. Tangents that are no arrays of the host, or not laid out in order, go through the
    rows one by one, as they would in the uncompiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Memory, Ref
from aiograd.compiler.passes import optimized
from aiograd.compiler.program import Program, Value
from aiograd.compiler.source import SourceFile, load
from aiograd.compiler.tangent_recording import Followed
from aiograd.forward.rows import RowCall, tangents_of
from aiograd.running.trees import leaves_of, map_tree

#: the functions of the two halves: of the arrays of inputs and captured Tensors to outputs and saved arrays; of these and tangents to tangents
Halves = tuple[Callable[..., Any], Callable[..., Any]]


def halves_of(code: ArrayCode, tangents: Sequence[Ref], has_tangent: Sequence[bool], file: SourceFile) -> Halves | None:
    """The functions of the two halves; None where the outputs cannot be computed without tangents.

    Args:
        code: of values and tangents, before any pass.
        tangents: the parameters that are tangents.
        has_tangent: per output, True if a tangent of it is among the results.
        file: that the text is added to.
    """
    memory = Memory(code)
    together: set[Ref] = set()
    while True:
        first: list[Call] = []
        second: list[Call] = []
        later = set(tangents)
        for call in code.calls:
            if later.isdisjoint(call.refs()) and together.isdisjoint(map(memory.of, call.results)):
                first.append(call)
            else:
                second.append(call)
                later.update(call.results)
        written = {memory.of(call.out) for call in second if call.out is not None}
        if written <= together:
            break
        together |= written
    results = code.results[0]
    outputs = results[: len(has_tangent)]
    left = iter(results[len(has_tangent) :])
    made = [next(left) if has else None for has in has_tangent]
    if not later.isdisjoint(outputs):
        return None
    read = dict.fromkeys([ref for ref in [*[ref for call in second for ref in call.refs()], *leaves_of(made, Ref)] if ref not in later])
    saved = tuple(read)
    given = tuple([ref for ref in code.given() if ref not in set(tangents)])
    values = ArrayCode("values", given, tuple(first), (outputs, saved), frozenset(saved) - set(outputs))
    push = ArrayCode("push", (("saved", saved), ("tangents", tuple(tangents))), tuple(second), made)
    return load(optimized(values), file), load(optimized(push), file)


class Linearization:
    """A call of a program whose tangents come later.

    Args:
        program, followed: as of `TangentCode`.
        halves: its functions; None: there are none.
        arrays: of the inputs and captured Tensors.
        given: for each of these, True if it gets tangents, which may be None for zeros.

    Attributes:
        outputs: the arrays of the outputs.
    """

    def __init__(self, program: Program, followed: Followed, halves: Halves | None, arrays: list[Any], given: Sequence[bool]) -> None:
        self._program, self._followed, self._halves, self._arrays, self._given = program, followed, halves, arrays, given
        self.outputs: tuple[Any, ...]
        self._saved: tuple[Any, ...] = ()
        if halves is None:
            self.outputs, _ = self._by_rows(None)
        else:
            self.outputs, self._saved = halves[0](*arrays)

    def push(self, tangents: list[Any]) -> list[Any]:
        """The tangents of the outputs, None for an output without one. None in `tangents`, of inputs and captured Tensors, stands for zeros."""
        given = [tangent for tangent, is_given in zip(tangents, self._given, strict=True) if is_given]
        if self._halves is not None and all([type(each) is np.ndarray and each.flags.c_contiguous for each in given]):
            found: list[Any] = self._halves[1](self._saved, given)
            return found
        return self._by_rows(tangents)[1]

    def _by_rows(self, tangents: list[Any] | None) -> tuple[tuple[Any, ...], list[Any]]:
        """The outputs, and their tangents where tangents of the inputs are given."""
        program, followed = self._program, self._followed
        values = (*program.inputs, *program.captured)
        known = {value.name: array for value, array in zip(values, self._arrays, strict=True)}
        moved = {value.name: tangent for value, tangent in zip(values, tangents or (), strict=False) if tangent is not None}
        for number, statement in enumerate(program.statements):
            op, fused = statement.op, statement.fused
            arrays = [None if value is None else known[value.name] for value in statement.arrays]
            statics = map_tree(lambda value: known[value.name], statement.statics, Value)
            result = statement.forward(*arrays, **statics)
            residuals: dict[str, Any] = {}
            if fused is not None:
                result, *rest = result
                residuals = dict(zip(fused.residuals, rest, strict=True))
            results = [np.asarray(each) for each in ((result,) if op.outputs == 1 else result)]
            known.update({value.name: each for value, each in zip(statement.outputs, results, strict=True)})
            if tangents is not None and number in followed.statements:
                given, made = followed.statements[number]
                wanted = [moved.get(value.name) if value is not None and i in given else None for i, value in enumerate(statement.arrays)]
                call = RowCall(op, arrays, statics, results[0] if op.outputs == 1 else tuple(results), residuals, fused)
                if any([tangent is not None for tangent in wanted]):
                    found = tangents_of(call, tuple(made), wanted)
                    moved.update({value.name: each for value, each in zip(statement.outputs, found, strict=True)})
        outputs = zip(program.outputs, followed.outputs, strict=True)
        return tuple([known[value.name] for value in program.outputs]), [moved.get(value.name) if has else None for value, has in outputs]
