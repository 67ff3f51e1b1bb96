"""The statements of a program that a pass runs, and what of the saved values they need."""

from __future__ import annotations

from collections.abc import Sequence, Set

from aiograd.compiler.effects import CalledOp
from aiograd.compiler.forward_code import is_needed, names_of, rule_inputs, sources, uses
from aiograd.compiler.program import Program, Statement, Value, ValueKind


def statements_run(program: Program, present: Sequence[bool], needs: Sequence[bool]) -> frozenset[int]:
    """Numbers of the statements that a pass runs.

    Args:
        program: the program of the forward.
        present: per output, True if a gradient arrives.
        needs: per edge, True if its gradient is wanted.
    """
    places, _ = sources(program)
    wanted_places = {place for place, need in zip(places, needs, strict=True) if need}
    ends = {(number, i) for number, i, place in uses(program) if place in wanted_places}
    leading: set[str] = set()
    leads: set[int] = set()
    for number, statement in enumerate(program.statements):
        for i, value in enumerate(statement.arrays):
            if statement.node is not None and value is not None and is_needed(statement, i):
                if value.name in leading if value.kind is ValueKind.COMPUTED else (number, i) in ends:
                    leads.add(number)
                    leading.update(output.name for output in statement.outputs)
    reached = {value.name for value, is_present in zip(program.outputs, present, strict=True) if is_present}
    found: set[int] = set()
    for number in reversed(range(len(program.statements))):
        statement = program.statements[number]
        if number in leads and not reached.isdisjoint(output.name for output in statement.outputs):
            found.add(number)
            reached.update(value.name for i, value in enumerate(statement.arrays) if value is not None and is_needed(statement, i))
    return frozenset(found)


def drop_nodes(statements: Sequence[Statement], outputs: Sequence[Value]) -> None:
    """Take the node from statements that lead to no output and no call: the eager function drops theirs when it returns.

    Args:
        statements: of a program, in order; modified.
        outputs: the values that it returns.
    """
    wanted = {value.name for value in outputs if value.records}
    for statement in reversed(statements):
        if isinstance(statement.op, CalledOp):
            wanted.update([value.name for value in statement.arrays if value is not None])
        elif statement.node is not None and wanted.isdisjoint([value.name for value in statement.outputs]):
            statement.node = None
        elif statement.node is not None:
            wanted.update([value.name for i, value in enumerate(statement.arrays) if value is not None and is_needed(statement, i)])


def is_left(program: Program, statements: Set[int]) -> bool:
    """True if these statements lead from an output to an input or captured Tensor that needs a gradient."""
    reached = {value.name for value in program.outputs}
    for number in reversed(range(len(program.statements))):
        statement = program.statements[number]
        if number in statements and not reached.isdisjoint(output.name for output in statement.outputs):
            needed = [value for i, value in enumerate(statement.arrays) if value is not None and is_needed(statement, i)]
            if any([value.kind is not ValueKind.COMPUTED for value in needed]):
                return True
            reached.update(value.name for value in needed)
    return False


def needed_names(program: Program, statements: Set[int]) -> set[str]:
    """Names of saved values that the rules of some statements need."""
    return {
        each
        for number in statements
        for name in rule_inputs(program.statements[number])
        for each in names_of(program.statements[number], number, name)
    }
