"""Programs under a profiler: one scope each, with an event for every statement inside. They run statement by statement, with the same bits."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import numpy as np

from aiograd.compiler.backward_code import BackwardWriter
from aiograd.compiler.forward_code import residual, saved_names
from aiograd.compiler.program import Program, Statement, Value
from aiograd.running.trees import map_tree
from aiograd.tensors.core import make


def run_profiled(program: Program, arrays: list[Any], profiler: Any, name: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The forward of a program: its outputs, and the arrays that its backward needs.

    Args:
        program: the program to run.
        arrays: the arrays of its inputs and captured Tensors.
        profiler: the profiler of the mode.
        name: the name of the scope.
    """
    began = perf_counter_ns()
    known = {value.name: array for value, array in zip((*program.inputs, *program.captured), arrays, strict=True)}
    for number, statement in enumerate(program.statements):
        _run_statement(number, statement, known, profiler)
    profiler.add(name, "scope", name, began, perf_counter_ns())
    return tuple([known[value.name] for value in program.outputs]), tuple([known[each] for each in saved_names(program)])


def _run_statement(number: int, statement: Statement, known: dict[str, Any], profiler: Any) -> None:
    op, fused = statement.op, statement.fused
    arguments = [None if value is None else known[value.name] for value in statement.arrays]
    options = map_tree(lambda value: known[value.name], statement.statics, Value)
    began = profiler.begin_forward()
    residuals: list[Any] = []
    result = statement.forward(*arguments, **options)
    if fused is not None:
        result, *residuals = result
    results = [] if not statement.outputs else [result] if op.outputs == 1 else result
    made = [result if value.shape or value.device != "cpu" else np.asarray(result) for value, result in zip(statement.outputs, results, strict=True)]
    profiler.end_forward(began, op.name, None, [make(array) for array in made])
    known.update({value.name: array for value, array in zip(statement.outputs, made, strict=True)})
    if fused is not None:
        known.update({residual(number, each): array for each, array in zip(fused.residuals, residuals, strict=True)})


class ProfiledBackward(BackwardWriter):
    """Runs one pass through a program, with an event for every statement."""

    profiler: Any

    def _statement(self, number: int, statement: Statement) -> None:
        began = perf_counter_ns()
        super()._statement(number, statement)
        self.profiler.add(statement.op.node_name, "backward", statement.op.name, began, perf_counter_ns())
