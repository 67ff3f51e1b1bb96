"""The kinds of code that a recorded call becomes: of rows alone, of rows and calls between them, of rows on dual arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from aiograd.compiler.compiled_statistics import CompileOptions
from aiograd.compiler.program import Program
from aiograd.compiler.program_code import ProgramCode, next_use
from aiograd.compiler.recorded_results import ResultRecorder
from aiograd.compiler.steps import StepCode, segments
from aiograd.compiler.tangent_code import TangentCode
from aiograd.compiler.tangent_recording import TangentRecorder
from aiograd.compiler.watching.reads import Read, read_inputs

Code: TypeAlias = ProgramCode | StepCode | TangentCode


def code_of(
    name: str,
    program: Program,
    recorder: ResultRecorder,
    result: Callable[[list[Any]], Any],
    reads: list[Read],
    inputs: list[Any],
    options: CompileOptions,
    is_async: bool,
) -> Code:
    """The code of a recorded call.

    Args:
        name: of the function.
        program: of the call.
        recorder: that recorded it.
        result: rebuilds the function's result from the program's outputs.
        reads: values that have to be there again.
        inputs: the Tensors among the arguments.
        options: of the compiled function.
        is_async: True for an ``async def``.
    """
    guards = result, reads, read_inputs(reads, inputs), tuple(recorder.leaves.items())
    budget = options.memory_budget
    tiers: Any = {"tier": options.tier, "is_dynamic": options.dynamic}
    code: Code
    if isinstance(recorder, TangentRecorder):
        code = TangentCode(name, program, *guards, followed=recorder.followed(), **tiers)
    elif recorder.has_called or is_async or len(segments(program, cuts=budget is None)) > 1:
        code = StepCode(name, program, *guards, **tiers, memory_budget=budget, is_awaited=is_async)
    else:
        code = ProgramCode(name, program, *guards, **tiers, memory_budget=budget)
    code.used = next_use()
    return code
