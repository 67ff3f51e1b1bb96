"""The results of a call as a generated function: straight lines that make its Tensors, and the node of its backward where it records one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiograd.compiler.budgeted_node import BudgetedProgramNode
from aiograd.compiler.node import DeviceProgramNode, ProgramNode
from aiograd.compiler.program import Program
from aiograd.compiler.source import Names, load_checks
from aiograd.tensors.core import TENSOR_CLASS

#: from how many Tensors on they are gone through in a loop; every line of text takes time to compile
_MANY = 64


def results_maker(program: Program, sources: Sequence[int], saved_outputs: Sequence[int]) -> Callable[..., tuple[list[Any], Any]]:
    """A function of a call: its code, Tensors, arrays of the outputs, saved arrays and arena.

    It returns the Tensors of the outputs, and the node, None if the program records none.

    Args:
        program: the program.
        sources: of each edge of the node, the place of its target among the inputs and captured Tensors.
        saved_outputs: the places of the outputs that the backward needs, which get a version counter.
    """
    names = Names()
    lines: list[str] = []
    if sources:
        lines += _node(program, sources, names)
    cls = names.of("Tensor", TENSOR_CLASS[0])
    records = [bool(sources) and value.records for value in program.outputs]
    if len(records) > _MANY:
        lines += [f"outputs = [{cls}() for array in arrays]", "for number, (t, array) in enumerate(zip(outputs, arrays)):"]
        lines += ["    t._data = array", "    t._node = t._vc = t._x = None", "    t._nr = 0"]
        lines += [f"    if {names.of('records', records)}[number]: t._node, t._nr = node, number"]
        counted = [f"outputs[{place}]" for place in saved_outputs] if sources else []
    else:
        results = [f"o{number}" for number in range(len(records))]
        if results:
            lines.append(f"{', '.join([f'a{number}' for number in range(len(results))])}, = arrays")
        for number, (result, is_recorded) in enumerate(zip(results, records, strict=True)):
            lines += [f"{result} = {cls}()", f"{result}._data = a{number}", f"{result}._vc = {result}._x = None"]
            lines += [f"{result}._node = {'node' if is_recorded else None}", f"{result}._nr = {number if is_recorded else 0}"]
        lines.append(f"outputs = [{', '.join(results)}]")
        counted = [results[place] for place in saved_outputs] if sources else []
    lines += [f"{each}._vc = [0]" for each in counted]
    if counted:
        lines.append(f"node.counters = ({', '.join([f'{each}._vc' for each in counted])},)")
    text = "\n".join(["def made(code, tensors, arrays, saved, arena):", *[f"    {line}" for line in lines]])
    return load_checks("made", f"{text}\n    return outputs, {'node' if sources else None}\n", names)


def _node(program: Program, sources: Sequence[int], names: Names) -> list[str]:
    """The lines that make the node."""
    count = len(program.inputs) + len(program.captured)
    if count <= _MANY:
        lines = [f"{', '.join([f't{number}' for number in range(count)])}, = tensors"]
        nodes, nrs = (f"({', '.join([f't{number}.{name}' for number in sources])},)" for name in ("_node", "_nr"))
        counters = ", ".join([f"0 if (c := t{number}._vc) is None else c[0]" for number in range(count)])
        versions = f"({counters},)"
    else:
        lines = []
        places = names.of("places", tuple(sources))
        nodes, nrs = (f"tuple([tensors[place].{name} for place in {places}])" for name in ("_node", "_nr"))
        versions = "tuple([0 if (c := t._vc) is None else c[0] for t in tensors])"
    is_on_device = program.device != "cpu"
    of_host = ProgramNode if program.recomputation is None else BudgetedProgramNode
    node = names.of("ProgramNode", DeviceProgramNode if is_on_device else of_host)
    stream = "getattr(arrays[0], '__aiograd_stream__', None), " if is_on_device else ""
    return [*lines, f"node = {node}({stream}code, tensors, saved, arena, {nodes}, {nrs}, {versions})"]
