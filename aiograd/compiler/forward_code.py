"""The forward of a program as `ArrayCode`.

Each statement becomes the numpy calls that its row's forward, or the kernels that it ran with, make on recording arrays; where they cannot be
traced it is one call of that function. The calls keep the order of the recording, and the results equal the eager call's to the bit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Form, Memory, Ref
from aiograd.compiler.passes import BUDGET_PASSES, NATIVE_PASSES, optimized
from aiograd.compiler.passes.arenas import with_arena
from aiograd.compiler.passes.dead import without_dead_code
from aiograd.compiler.program import Program, Statement, Value, ValueKind, strided, values_in
from aiograd.compiler.tracing import Recorded, Tracer, Untraceable
from aiograd.running.trees import leaves_of, map_tree

#: elements up to which arrays are made to trace a forward with
TRACED_SIZE = 1 << 15
#: rows that raise an error for some values
_REFUSES = frozenset(
    "gather take scatter scatter_extreme embedding cross_entropy nll_loss binary_cross_entropy repeat_interleave inv pinv solve cholesky eig eigh "
    "eigvals eigvalsh svd svdvals qr expm bessel_iv bessel_ive bessel_jv bessel_yn".split()
)


def rule_inputs(statement: Statement) -> tuple[str, ...]:
    """The names that the rules of a statement ask for, of arrays, output and residuals; in a fixed order, each once."""
    node: Any = statement.node
    if node is None:
        return ()
    computed = [name for name, value in statement.statics.items() if values_in(value)] if statement.statics else []
    return _asked_for(node, tuple(computed))


@functools.lru_cache(maxsize=4096)
def _asked_for(node: Any, computed: tuple[str, ...]) -> tuple[str, ...]:
    row = node.row
    names = {name for _, _, wanted in row.fast for name in wanted}
    return tuple(name for name in (*row.values, "out", *row.offered, *computed) if name in names)


def saved_names(program: Program) -> list[str]:
    """Names in the program's text that the backward needs."""
    if program.saved is None:
        program.saved = _saved_names(program)
    return program.saved


def _saved_names(program: Program) -> list[str]:
    found: dict[str, None] = {}
    if not any(statement.node is not None for statement in program.statements):
        return []
    for number, statement in enumerate(program.statements):
        for name in rule_inputs(statement):
            found.update(dict.fromkeys(names_of(statement, number, name)))
        if not statement.is_row:  # a pass that records a graph runs the rows again, with the numbers drawn before
            found.update(dict.fromkeys(value.name for value in statement.outputs))
    return list(found)


def names_of(statement: Statement, number: int, name: str) -> list[str]:
    """Names in the program's text for a rule's `name`: several for a variadic argument or output."""
    op = statement.op
    if name == "out":
        return [value.name for value in statement.outputs]
    if name == op.variadic:
        return [value.name for value in statement.arrays if value is not None]
    if name in op.arrays:
        value = statement.arrays[op.arrays.index(name)]
        return [] if value is None else [value.name]
    if name in statement.statics:
        return [value.name for value in values_in(statement.statics[name])]
    return [residual(number, name)]


def residual(number: int, name: str) -> str:
    """The name of a residual of a statement."""
    return f"r{number}_{name}"


def arranged(program: Program, code: ArrayCode) -> tuple[ArrayCode, frozenset[str]]:
    """The code of a forward after all passes, and the names of the saved values that may lie in an arena."""
    if program.recomputation is not None:
        code = replace(optimized(code, BUDGET_PASSES), frees=True)
    else:
        code = with_arena(optimized(code)) if program.device == "cpu" else without_dead_code(code)
    return code, names_inside(program, code)


def arranged_natively(program: Program, code: ArrayCode) -> tuple[ArrayCode, frozenset[str]]:
    """As `arranged`, for a native function."""
    code = with_arena(optimized(code, NATIVE_PASSES), only_saved=True)
    return code, names_inside(program, code)


def names_inside(program: Program, code: ArrayCode) -> frozenset[str]:
    """The names of the saved values that may lie in an arena."""
    saved = code.results[1]
    found = Memory(code).shared(saved, code.arena)
    return frozenset([name for name, ref in zip(saved_names(program), saved, strict=True) if ref in found])


def forward_code(program: Program) -> ArrayCode:
    """A function of the arrays of inputs and captured Tensors; it returns two tuples: the outputs, and the arrays that the backward needs."""
    writer = ForwardWriter(program)
    with writer.tracer.watching():
        for number, statement in enumerate(program.statements):
            writer.write(number, statement)
    refs = writer.refs
    outputs, saved = tuple([refs[value.name] for value in program.outputs]), tuple([refs[name] for name in saved_names(program)])
    return ArrayCode("forward", writer.given, tuple(writer.tracer.calls), (outputs, saved), frozenset(saved) - set(outputs))


class ForwardWriter:
    """Writes the calls of statements, one after the other.

    Args:
        program: the program of the statements.

    Attributes:
        tracer: notes the calls.
        refs: by name in the program's text, the Ref.
        given: the Refs of inputs and captured Tensors.
    """

    def __init__(self, program: Program) -> None:
        self.tracer = Tracer("t", program.numbers)
        self.refs: dict[str, Ref] = {}
        self._recorded: dict[str, Recorded] = {}
        for value in (*program.inputs, *program.captured):
            self.refs[value.name] = _ref(value)
        self.given = tuple(self.refs.values())
        self._bound = set(self.given)
        self._on_device = program.device != "cpu"

    def write(self, number: int, statement: Statement) -> None:
        """Add the calls of a statement."""
        self.tracer.comment = f"{statement.place}: {statement.line}"
        before = len(self.tracer.calls)
        self._write(number, statement)
        if _refuses(statement):
            self.tracer.calls[before:] = [call.but(refuses=True) for call in self.tracer.calls[before:]]

    def _write(self, number: int, statement: Statement) -> None:
        function = statement.forward
        if self._on_device:
            self._call(number, statement, function, False)
            return
        is_ufunc = statement.is_row and isinstance(function, np.ufunc) and function.nout == 1
        if is_ufunc or not (statement.is_row and _is_small(statement) and self._trace(number, statement, function)):
            self._call(number, statement, function, is_ufunc)

    def _call(self, number: int, statement: Statement, function: Any, is_ufunc: bool) -> None:
        """Note a statement as one call."""
        op = statement.op
        arguments = tuple([None if value is None else self.refs[value.name] for value in statement.arrays])
        options = map_tree(lambda value: self.refs[value.name], statement.statics, Value) if statement.statics else {}
        outputs = [_ref(value) for value in statement.outputs]
        # functions may return numbers where the eager call has arrays of no axes
        made = [
            Ref(f"t_{ref.name}", (), ref.dtype, ()) if ref.shape == () and value.device == "cpu" else ref
            for ref, value in zip(outputs, statement.outputs, strict=True)
        ]
        fused = statement.fused
        residuals = [] if fused is None else [Ref(residual(number, name)) for name in fused.residuals]
        label = function.__name__ if is_ufunc else op.name if fused is None else f"{op.name}_fused"
        unpacks = bool(outputs) and (fused is not None or op.outputs != 1)
        nested = len(outputs) if fused is not None and op.outputs != 1 else 0
        calls = self.tracer.calls
        calls.append(
            Call(
                Form.CALL, function, label, arguments, (*made, *residuals), options, unpacks=unpacks, nested=nested, pure=statement.is_row,
                fresh=is_ufunc or self._on_device, comment=self.tracer.comment,
            )
        )
        for ref, part in zip(outputs, made, strict=True):
            if ref is not part:
                calls.append(Call(Form.CALL, np.asarray, "asarray", (part,), (ref,)))
        self._bind(*outputs, *residuals)

    def _bind(self, *refs: Ref) -> None:
        self.refs.update({ref.name: ref for ref in refs})
        self._bound.update(refs)

    def _like(self, value: Value) -> Recorded:
        """A recording array for a value."""
        found = self._recorded.get(value.name)
        if found is None:
            found = self._recorded[value.name] = Recorded(self.tracer, self.refs[value.name], self._array(value), False)
        return found

    def _array(self, value: Value) -> Any:
        """An array that passes for a value."""
        return _stand_in(value)

    def _trace(self, number: int, statement: Statement, function: Any) -> bool:
        """Note a statement as the calls that it makes; False if they cannot be traced."""
        before = len(self.tracer.calls)
        try:
            arrays = tuple([None if value is None else self._like(value) for value in statement.arrays])
            found = self.tracer.trace(function, arrays, map_tree(self._like, statement.statics, Value))
        except Untraceable:
            return False
        names = [value.name for value in statement.outputs]
        if statement.fused is not None:
            names += [residual(number, name) for name in statement.fused.residuals]
            found = (*((found[0],) if statement.op.outputs == 1 else found[0]), *found[1:])
        elif statement.op.outputs == 1:
            found = (found,)
        known = {each.ref for each in found if type(each) is Recorded} - self._bound
        if not len(known) == len(found) == len(names) or not all(map(_is_like, found, statement.outputs)):
            del self.tracer.calls[before:]
            return False
        for name, each in zip(names, map(self.tracer.as_array, found), strict=True):
            each.ref.name, each.made = name, False
            self._recorded[name] = each
            self._bind(each.ref)
        return True


def _ref(value: Value) -> Ref:
    return Ref(value.name, value.shape, value.dtype, value.strides)


def _refuses(statement: Statement) -> bool:
    """True for a statement that may raise an error for some values: an index out of range, a singular matrix."""
    name = statement.op.name
    return name in _REFUSES or (name in ("index", "setitem") and bool(leaves_of(statement.statics, (Value, np.ndarray))))


def _is_small(statement: Statement) -> bool:
    values = [*statement.outputs, *[value for value in statement.arrays if value is not None], *values_in(statement.statics)]
    return sum([math.prod(value.shape) for value in values]) <= TRACED_SIZE


def _is_like(found: Recorded, value: Value) -> bool:
    return (found.shape, found.dtype, found.value.strides) == (value.shape, value.dtype, value.strides)


def _stand_in(value: Value) -> np.ndarray[Any, Any]:
    """An array of ones with the shape, dtype and strides of a value."""
    return strided(value.shape, value.dtype, value.strides)


def sources(program: Program) -> tuple[list[int], list[int]]:
    """The edges of the program's node: for each the place of its target among inputs and then captured Tensors, and how often that is used.

    Each Tensor has one edge, also where it is captured as several values, so that the gradients of all its uses are one sum.
    """
    counts: dict[int, int] = {}
    for _, _, place in uses(program):
        counts[place] = counts.get(place, 0) + 1
    return list(counts), list(counts.values())


def uses(program: Program) -> list[tuple[int, int, int]]:
    """Each use of an input or captured Tensor that needs a gradient: statement, argument, and the Tensor's place among inputs and captured Tensors.

    In the order in which the eager pass would add up their gradients. A Tensor that is captured again after a write to memory has its first place.
    """
    found: list[tuple[int, int, int]] = []
    inputs = len(program.inputs)
    first: dict[int, int] = {}
    captured = [first.setdefault(id(tensor), inputs + i) for i, tensor in enumerate(program.tensors)]
    for number in reversed(range(len(program.statements))):
        statement = program.statements[number]
        if statement.node is None:
            continue
        for i, value in enumerate(statement.arrays):
            if value is not None and value.kind is not ValueKind.COMPUTED and is_needed(statement, i):
                found.append((number, i, value.index if value.kind is ValueKind.INPUT else captured[value.index]))
    return found


def is_needed(statement: Statement, i: int) -> bool:
    """True if the graph that was recorded has an edge for array argument `i`."""
    value = statement.arrays[i]
    node: Any = statement.node
    return value is not None and value.records and bool(node.row.needs[0 if statement.op.variadic else i])
