"""The forward of a program as Python text.

Each statement is one call of its row's forward, or of the kernels that it ran with, in the order of recording: the results are those of the eager
call to the bit. Large arrays are dropped after their last use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.compiler.program import Program, Statement, Value, ValueKind, values_in
from aiograd.compiler.source import Names, load

#: bytes from which on a value that is not needed any more is dropped
DROPPED_BYTES = 1 << 14


def rule_inputs(statement: Statement) -> tuple[str, ...]:
    """The names that the rules of a statement ask for, of arrays, output and residuals; in a fixed order, each once."""
    if statement.node is None:
        return ()
    row = statement.node.row
    names = {name for _, _, wanted in row.fast for name in wanted}
    computed = [name for name, value in statement.statics.items() if values_in(value)]
    return tuple(name for name in (*row.values, "out", *row.offered, *computed) if name in names)


def saved_names(program: Program) -> list[str]:
    """Names in the program's text that the backward needs."""
    found: dict[str, None] = {}
    for number, statement in enumerate(program.statements):
        for name in rule_inputs(statement):
            found.update(dict.fromkeys(names_of(statement, number, name)))
        if not statement.is_row:  # a pass that records a graph runs the rows again, and takes what was drawn
            found.update(dict.fromkeys(value.name for value in statement.outputs))
    return list(found)


def names_of(statement: Statement, number: int, name: str) -> list[str]:
    """Names in the program's text of what a rule calls `name`: several for a variadic argument or output."""
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


def compile_forward(program: Program) -> tuple[Callable[..., Any], str]:
    """A function of the arrays of inputs and captured Tensors that returns outputs and what the backward needs, each a tuple; and its text."""
    names = Names()
    asarray = names.of("asarray", np.asarray)
    saved = saved_names(program)
    kept = {*saved, *(value.name for value in program.outputs)}
    drops = _drops(program, kept)
    lines = [f"def forward({', '.join(value.name for value in (*program.inputs, *program.captured))}):"]
    for number, statement in enumerate(program.statements):
        arguments = ["None" if value is None else value.name for value in statement.arrays]
        arguments += [f"{name}={static_text(value, names)}" for name, value in statement.statics.items()]
        if statement.fused is None:
            call = f"{names.of(statement.op.name, statement.op.forward)}({', '.join(arguments)})"
            targets = [value.name for value in statement.outputs]
        else:
            call = f"{names.of(f'{statement.op.name}_fused', statement.fused.forward)}({', '.join(arguments)})"
            first = statement.outputs[0].name if statement.op.outputs == 1 else f"({', '.join(value.name for value in statement.outputs)},)"
            targets = [first, *(residual(number, name) for name in statement.fused.residuals)]
        is_tuple = statement.fused is not None or statement.op.outputs != 1
        where = f"  # {statement.place}: {statement.line}"
        if not statement.outputs:
            lines.append(f"{call}{where}")
        elif not is_tuple and not statement.outputs[0].shape:
            lines.append(f"{targets[0]} = {asarray}({call}){where}")
        else:
            lines.append(f"{', '.join(targets)}{',' if is_tuple else ''} = {call}{where}")
            lines += [f"{value.name} = {asarray}({value.name})" for value in statement.outputs if is_tuple and not value.shape]
        if number in drops:
            lines.append(f"del {', '.join(drops[number])}")
    lines.append(f"return ({', '.join(value.name for value in program.outputs)},), ({', '.join(saved)}{',' if saved else ''})")
    text = "\n    ".join(lines) + "\n"
    return load(text, "forward", names.namespace), text


def _drops(program: Program, kept: set[str]) -> dict[int, list[str]]:
    return {
        number: names
        for number, values in program.last_uses().items()
        if (names := [value.name for value in values if value.nbytes >= DROPPED_BYTES and value.name not in kept])
    }


def static_text(value: Any, names: Names) -> str:
    """Text of a static argument."""
    if isinstance(value, Value):
        return value.name
    if value is None or value.__class__ in (bool, int, str):
        return repr(value)
    if value.__class__ is tuple:
        return f"({', '.join(static_text(item, names) for item in value)}{',' if value else ''})"
    if value.__class__ is list:
        return f"[{', '.join(static_text(item, names) for item in value)}]"
    if value.__class__ is slice:
        return f"slice({static_text(value.start, names)}, {static_text(value.stop, names)}, {static_text(value.step, names)})"
    return names.of("k", value)


def sources(program: Program) -> tuple[list[int], list[int]]:
    """The edges of the program's node: for each the place of its target among inputs and then captured Tensors, and how often that is used."""
    counts: dict[int, int] = {}
    for _, _, place in uses(program):
        counts[place] = counts.get(place, 0) + 1
    return list(counts), list(counts.values())


def uses(program: Program) -> list[tuple[int, int, int]]:
    """Each use of an input or captured Tensor that needs a gradient: statement, argument, and the Tensor's place among inputs and captured Tensors.

    In the order in which the eager pass would add up their gradients.
    """
    found: list[tuple[int, int, int]] = []
    inputs = len(program.inputs)
    for number in reversed(range(len(program.statements))):
        statement = program.statements[number]
        if statement.node is None:
            continue
        for i, value in enumerate(statement.arrays):
            if value is not None and value.kind is not ValueKind.COMPUTED and is_needed(statement, i):
                found.append((number, i, value.index if value.kind is ValueKind.INPUT else inputs + value.index))
    return found


def is_needed(statement: Statement, i: int) -> bool:
    """True if the graph that was recorded has an edge for array argument `i`."""
    value = statement.arrays[i]
    node: Any = statement.node
    return value is not None and value.records and bool(node.row.needs[0 if statement.op.variadic else i])
