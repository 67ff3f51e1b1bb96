"""The rows of a program once more, with the nodes that the eager call would have recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.compiler.effects import drawn_again
from aiograd.compiler.forward_code import residual
from aiograd.compiler.program import Program, Value
from aiograd.graph.node import Node
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.trees import map_tree
from aiograd.tensors.core import make
from aiograd.tensors.record import call


def rows_again(program: Program, tensors: Sequence[Any], saved: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[int, Node]]]:
    """Run the rows of a program once more, on Tensors.

    Args:
        program: the program.
        tensors: inputs and captured Tensors.
        saved: by name, arrays of the first run, draws of random numbers among them.

    Returns:
        The Tensors by the names of their values, and the nodes that the rows have recorded, each with the number of its statement.
    """
    known: dict[str, Any] = {}
    for value, tensor in zip((*program.inputs, *program.captured), tensors, strict=True):
        known[value.name] = tensor
    nodes: list[Node] = []
    numbers: list[int] = []
    anomaly = current_mode().anomaly is not None
    with ModeScope(grad=True, trace=None, anomaly=None, collect=nodes.append):
        for number, statement in enumerate(program.statements):
            if not statement.is_row:
                for value in statement.outputs:
                    is_there = value.name in saved  # else it is drawn again, within a memory budget
                    known[value.name] = make(saved[value.name] if is_there else drawn_again(statement.op.forward, saved[residual(number, "draws")]))
                continue
            arrays = tuple([None if value is None else _in_place_of(value, known) for value in statement.arrays])
            statics = map_tree(lambda value: known[value.name]._data, statement.statics, Value)
            before = len(nodes)
            with ModeScope(grad=statement.node is not None):
                result = call(statement.op, arrays, statics)
            if anomaly:
                for node in nodes[before:]:
                    node.extra.anomaly = f"  {statement.place}: {statement.line}\n", None
            numbers += [number] * (len(nodes) - before)
            made = (result,) if statement.op.outputs == 1 else result
            known.update({value.name: tensor for value, tensor in zip(statement.outputs, made, strict=True)})
    return known, [*zip(numbers, nodes, strict=True)]


def _in_place_of(value: Value, known: dict[str, Any]) -> Any:
    tensor = known[value.name]
    return tensor if value.records or tensor._node is None else make(tensor._data, shared_with=tensor)
