"""The tangents of a program: its forward with the tangents of its outputs, as `ArrayCode`, and the code that runs it on dual arrays.

The first run of a program on dual arrays goes through the statements one by one, on recording arrays that have the real ones behind them, and writes
down their work: the numpy calls of each row, as the forward of any program has them, and behind them the calls that make the row's tangents.
Later runs run the code, with the passes, arenas and native functions of other programs. Values that only the tangents need are dropped as soon as
these have been made, so memory does not grow with the number of statements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.compiler.arena import ArenaPool
from aiograd.compiler.calls import ArrayCode, Form, Ref
from aiograd.compiler.forward_code import ForwardWriter, arranged
from aiograd.compiler.native.tiers import HOT, NativeTier, native_problem
from aiograd.compiler.node import explain
from aiograd.compiler.program import Program, Statement, Value
from aiograd.compiler.program_code import GuardedCode, finished, next_use, raise_refusal
from aiograd.compiler.source import load
from aiograd.compiler.tangent_recording import DualArray, Followed
from aiograd.compiler.tracing import Recorded, Untraceable
from aiograd.running.trees import map_tree
from aiograd.tensors.core import make


class TangentWriter(ForwardWriter):
    """Runs one call of a program on values and tangents, and writes its code.

    Args:
        program: the program.
        followed: which values have tangents.
        arrays: of the inputs and captured Tensors.
        tangents: of the inputs; None where there is none.
    """

    def __init__(self, program: Program, followed: Followed, arrays: Sequence[Any], tangents: Sequence[Any]) -> None:
        super().__init__(program)
        self._program = program
        self._followed = followed
        given = (*program.inputs, *program.captured)
        self._arrays = {value.name: array for value, array in zip(given, arrays, strict=True)}
        #: by name of a value
        self._tangents = {
            value.name: self.tracer.recorded(f"d_{value.name}", tangent)
            for value, tangent in zip(program.inputs, tangents, strict=True)
            if tangent is not None
        }
        self.given = (*self.given, *[each.ref for each in self._tangents.values()])

    def run(self) -> list[Any]:
        """The arrays of the outputs, and of the tangents of those that have one."""
        with self.tracer.watching(np.geterr()):
            for number, statement in enumerate(self._program.statements):
                self.write(number, statement)
                if number in self._followed.statements:
                    self._push(statement, *self._followed.statements[number])
        return [each.value for each in self._results()]

    def _results(self) -> list[Recorded]:
        outputs = self._program.outputs
        tangents = [self._tangents[value.name] for value, has_tangent in zip(outputs, self._followed.outputs, strict=True) if has_tangent]
        return [*map(self._like, outputs), *tangents]

    def code(self) -> ArrayCode:
        """The code, before any pass."""
        return ArrayCode("forward", self.given, tuple(self.tracer.calls), (tuple([each.ref for each in self._results()]), ()))

    # ---------------------------------------------------------------- values

    def _array(self, value: Value) -> Any:
        return self._arrays[value.name]

    def _call(self, number: int, statement: Statement, function: Any, is_ufunc: bool) -> None:
        super()._call(number, statement, function, is_ufunc)
        arrays = [None if value is None else self._like(value).value for value in statement.arrays]
        result = function(*arrays, **map_tree(lambda value: self._like(value).value, statement.statics, Value))
        if statement.fused is not None:
            result = result[0]
        results = () if not statement.outputs else (result,) if statement.op.outputs == 1 else result
        for value, each in zip(statement.outputs, results, strict=True):
            self._arrays[value.name] = np.asarray(each)


class TangentCode(GuardedCode):
    """A program with the code that runs it on dual arrays; of one level at a time.

    Args:
        name, program: as of `GuardedCode`.
        followed: which values have tangents.
        *guards: as of `GuardedCode`.
        tier: "auto", "numpy" or "native", see `aiograd.compiler.native.tiers`.
    """

    def __init__(self, name: str, program: Program, followed: Followed, *guards: Any, tier: str = "auto") -> None:
        super().__init__(name, program, *guards)
        self.followed = followed
        #: the function and its arenas; both change at once
        self.forward: tuple[Callable[..., Any] | None, ArenaPool] = None, ArenaPool(())
        self.tier = tier
        self.hot = 0 if tier == "numpy" else HOT
        #: makes the native function; None where there is none
        self.native: NativeTier | None = None
        #: what a native function of a backward would need: there is no backward
        self.inside: frozenset[str] = frozenset()
        self.shared: dict[Any, set[str]] = {}
        self.backwards: dict[Any, Any] = {}

    @property
    def numeric(self) -> tuple[Any, ...]:
        """It alone."""
        return (self,)

    def takes(self, inputs: list[Any]) -> bool:
        """As of `GuardedCode`; all dual arrays belong to one call of `jvp`."""
        if len({tensor._data.level for tensor in inputs if isinstance(tensor._data, DualArray)}) != 1:
            return False
        return super().takes(inputs)

    async def run_async(self, inputs: list[Any]) -> Any:
        """As `run`."""
        return self.run(inputs)

    def run(self, inputs: list[Any]) -> Any:
        """One call."""
        self.used = next_use()
        self.runs += 1
        if self.runs == self.hot and self.native is not None:
            self.native.ask()
        ...
