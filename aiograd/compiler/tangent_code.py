"""The tangents of a program: its forward with the tangents of its outputs, as `ArrayCode`, and the code that runs it on dual arrays.

The first run of a program on dual arrays goes through the statements one by one, on recording arrays that have the real ones behind them, and writes
down their work: the numpy calls of each row, as the forward of any program has them, and behind them the calls that make the row's tangents.
Later runs run the code, with the passes, arenas and native functions of other programs. Values that only the tangents need are dropped as soon as
these have been made, so memory does not grow with the number of statements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.compiler.arena import ArenaPool
from aiograd.compiler.calls import ArrayCode, Form
from aiograd.compiler.forward_code import ForwardWriter, arranged, residual
from aiograd.compiler.linear_code import Halves, Linearization, halves_of
from aiograd.compiler.native.tiers import HOT, NativeTier, native_problem
from aiograd.compiler.node import explain
from aiograd.compiler.program import Program, Statement, Value
from aiograd.compiler.program_code import GuardedCode, finished, next_use, raise_refusal
from aiograd.compiler.source import load
from aiograd.compiler.tangent_recording import Followed
from aiograd.compiler.tracing import Recorded, Untraceable
from aiograd.forward.dual import DualArray, Pending
from aiograd.forward.rows import RowCall, defer, tangents_of
from aiograd.ops.op import Fused, Op
from aiograd.running.modes import current_mode
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.core import make


class TangentWriter(ForwardWriter):
    """Runs one call of a program on values and tangents, and writes its code.

    Args:
        program: the program.
        followed: which values have tangents.
        arrays: of the inputs and captured Tensors.
        tangents: of the same; None where there is none.
    """

    def __init__(self, program: Program, followed: Followed, arrays: Sequence[Any], tangents: Sequence[Any]) -> None:
        super().__init__(program)
        self._program = program
        self._followed = followed
        given = (*program.inputs, *program.captured)
        self._arrays = {value.name: array for value, array in zip(given, arrays, strict=True)}
        #: by name of a value; None for zeros, as of a rounded one
        self._tangents: dict[str, Any] = {
            value.name: self.tracer.recorded(f"d_{value.name}", tangent)
            for value, tangent in zip(given, tangents, strict=True)
            if tangent is not None
        }
        self.given = (*self.given, *[each.ref for each in self._tangents.values()])
        self._results: tuple[Recorded, ...] = ()

    def run(self) -> tuple[Any, ...]:
        """The arrays of the outputs, and behind them their tangents, without the missing ones."""
        with self.tracer.watching(np.geterr()):
            for number, statement in enumerate(self._program.statements):
                self.write(number, statement)
                if number in self._followed.statements:
                    self._push(number, statement, *self._followed.statements[number])
            outputs = zip(self._program.outputs, self.has_tangent, strict=True)
            tangents = [self.tracer.as_array(self._tangents[value.name]) for value, has_tangent in outputs if has_tangent]
        self._results = (*map(self._like, self._program.outputs), *tangents)
        return tuple([each.value for each in self._results])

    @property
    def has_tangent(self) -> tuple[bool, ...]:
        """Per output, True if a tangent has been made that is not zeros."""
        outputs = zip(self._program.outputs, self._followed.outputs, strict=True)
        return tuple([has_tangent and self._tangents[value.name] is not None for value, has_tangent in outputs])

    def code(self) -> ArrayCode:
        """The code, before any pass."""
        return ArrayCode("forward", self.given, tuple(self.tracer.calls), (tuple([each.ref for each in self._results]), ()))

    # ---------------------------------------------------------------- values

    def _array(self, value: Value) -> Any:
        return self._arrays[value.name]

    def _call(self, number: int, statement: Statement, function: Any, is_ufunc: bool) -> None:
        super()._call(number, statement, function, is_ufunc)
        arrays = [None if value is None else self._like(value).value for value in statement.arrays]
        result = function(*arrays, **map_tree(_value_of, self._statics(statement), Recorded))
        names = [value.name for value in statement.outputs]
        results = () if not names else (result,) if statement.op.outputs == 1 else result
        if statement.fused is not None:
            names += [residual(number, name) for name in statement.fused.residuals]
            results = (*((result[0],) if statement.op.outputs == 1 else result[0]), *result[1:])
        for i, (name, each) in enumerate(zip(names, results, strict=True)):
            array = np.asarray(each) if i < len(statement.outputs) else each
            self._recorded[name] = Recorded(self.tracer, self.refs[name], array, False)

    def _statics(self, statement: Statement) -> dict[str, Any]:
        """The settings of a statement, with recording arrays in place of arrays of the program."""
        return map_tree(self._like, statement.statics, Value) if statement.statics else {}

    # ---------------------------------------------------------------- tangents

    def _push(self, number: int, statement: Statement, given: frozenset[int], made: frozenset[int]) -> None:
        """Make the tangents of a statement's outputs; see `aiograd.forward.rows.tangents_of`."""
        op, fused = statement.op, statement.fused
        arrays = [None if value is None else self._like(value) for value in statement.arrays]
        tangents = [None if value is None or i not in given else self._tangents[value.name] for i, value in enumerate(statement.arrays)]
        if all([tangent is None for tangent in tangents]):
            self._tangents.update(dict.fromkeys([statement.outputs[i].name for i in made]))
            return
        outputs = tuple(map(self._like, statement.outputs))
        residuals = {} if fused is None else {name: self._recorded[residual(number, name)] for name in fused.residuals}
        arguments = arrays, self._statics(statement), outputs[0] if op.outputs == 1 else outputs, residuals, tangents
        function = functools.partial(_tangents_of, op, fused, tuple(sorted(made)))
        found = self._traced(f"{op.name}_tangent", function, arguments, is_opaque=op.jvp is None)
        for i in made:
            self._tangents[statement.outputs[i].name] = found[i]

    def _traced(self, label: str, function: Callable[..., Any], arguments: tuple[Any, ...], *, is_opaque: bool) -> Any:
        """Note the calls that a function makes; the function itself as one call where it is `is_opaque` or cannot be traced."""
        tracer = self.tracer
        if not is_opaque and all([isinstance(each.value, (np.ndarray, np.generic)) for each in leaves_of(arguments, Recorded)]):
            try:
                found = tracer.trace(function, arguments)
                if all([each is None or type(each) is Recorded for each in found]):
                    return found
            except Untraceable:
                pass
        return tracer.add(Form.CALL, function, label, arguments, {}, function(*map_tree(_value_of, arguments, Recorded)), opaque=True)


def _tangents_of(
    op: Op, fused: Fused | None, made: tuple[int, ...], arrays: list[Any], statics: dict[str, Any], out: Any, residuals: dict[str, Any],
    tangents: list[Any],
) -> list[Any]:
    """The tangents of a row's outputs; None for an output that is not in `made`."""
    return tangents_of(RowCall(op, arrays, statics, out, residuals, fused), made, tangents)


def _value_of(recorded: Recorded) -> Any:
    return recorded.value


class TangentCode(GuardedCode):
    """A program with the code that runs it on dual arrays; of one level at a time.

    Args:
        name, program, *guards: as of `GuardedCode`.
        followed: which values have tangents.
        tier: "auto", "numpy" or "native", see `aiograd.compiler.native.tiers`.
        is_dynamic: see `ProgramCode`.
    """

    def __init__(self, name: str, program: Program, *guards: Any, followed: Followed, tier: str = "auto", is_dynamic: bool = False) -> None:
        super().__init__(name, program, *guards)
        self.followed = followed
        #: the function and its arenas; both change at once
        self.forward: tuple[Callable[..., Any] | None, ArenaPool] = None, ArenaPool(())
        self.tier, self._is_dynamic = tier, is_dynamic
        self.hot = 0 if tier == "numpy" else HOT
        #: makes the native function; None where there is none
        self.native: NativeTier | None = None
        #: as of `ProgramCode`, for the native tier; empty, since there is no backward
        self.inside: frozenset[str] = frozenset()
        self.shared: dict[Any, set[str]] = {}
        self.backwards: dict[Any, Any] = {}
        #: for tangents that come later, see `aiograd.compiler.linear_code`
        self._halves: Halves | None = None
        self._has_halves = False

    @property
    def numeric(self) -> tuple[Any, ...]:
        """It alone."""
        return (self,)

    def takes(self, inputs: list[Any]) -> bool:
        """As of `GuardedCode`; all dual arrays belong to one call of `jvp`, and tangents are wanted."""
        mode, levels = current_mode(), {tensor._data.level for tensor in inputs if isinstance(tensor._data, DualArray)}
        return len(levels) == 1 and mode.tangents and mode.profiler is None and super().takes(inputs)

    async def run_async(self, inputs: list[Any]) -> Any:
        """As `run`."""
        return self.run(inputs)

    def run(self, inputs: list[Any]) -> Any:
        """One call."""
        self.used = next_use()
        self.runs += 1
        if self.runs == self.hot and self.native is not None:
            self.native.ask()
        tensors = [*inputs, *self.program.tensors]
        arrays: list[Any] = []
        tangents: list[Any] = []
        level: Any = None
        for tensor in tensors:
            data = tensor._data
            if data.__class__ is DualArray:
                level, tangent = data.level, data.tangent
                arrays.append(data.primal)
                tangents.append(np.asarray(tangent) if isinstance(tangent, np.generic) else tangent)
            else:
                arrays.append(data)
                tangents.append(None)
        level.check()
        forward, arenas = self.forward
        try:
            if any([tangent.__class__ is Pending for tangent in tangents]):
                return self._result(level, tensors, *self._linearize(level, arrays, tangents))
            if forward is None:
                results = self._write(arrays, tangents)
            else:
                arena = arenas.take()
                given = [*arrays, *[tangent for tangent in tangents if tangent is not None]]
                results, _ = forward(*given) if arena is None else forward(*given, arena.arrays)
        except Exception as error:
            explain(error, self.name)
            raise_refusal(self.name, arrays, error)
        left = iter(results[len(self.program.outputs) :])
        made = [next(left) if has_tangent else None for has_tangent in self.followed.outputs]
        return self._result(level, tensors, results[: len(made)], made)

    def _result(self, level: Any, tensors: list[Any], arrays: Sequence[Any], tangents: Sequence[Any]) -> Any:
        duals = [make(DualArray(level, array, tangent)) for array, tangent in zip(arrays, tangents, strict=True)]
        return duals[0] if self.is_plain else finished(self, duals, tensors)

    def _linearize(self, level: Any, arrays: list[Any], tangents: list[Any]) -> tuple[Sequence[Any], list[Any]]:
        """The arrays of the outputs, and the places of their tangents, which come later."""
        if not self._has_halves:
            stand_ins = [None if tangent is None else np.zeros_like(array, order="C") for array, tangent in zip(arrays, tangents, strict=True)]
            writer = TangentWriter(self.program, self.followed, arrays, stand_ins)
            with np.errstate(all="ignore"):
                writer.run()
            given = writer.given[len(arrays) :]
            self._halves, self._has_halves = halves_of(writer.code(), given, writer.has_tangent, self.program.file), True
        linearization = Linearization(self.program, self.followed, self._halves, arrays, [tangent is not None for tangent in tangents])
        carriers = [i for i, has_tangent in enumerate(self.followed.outputs) if has_tangent]
        return linearization.outputs, defer(level, linearization.push, tangents, len(self.followed.outputs), carriers)

    def _write(self, arrays: list[Any], tangents: list[Any]) -> tuple[Any, ...]:
        """The first run, which makes the code."""
        writer = TangentWriter(self.program, self.followed, arrays, tangents)
        results = writer.run()
        plain = writer.code()
        code, _ = arranged(self.program, plain)
        self.forward = load(code, self.program.file), ArenaPool(code.arena)
        self.program.arena_bytes = self.forward[1].arena_bytes
        if self.tier != "numpy":
            self.native = NativeTier(self, plain, is_dynamic=self._is_dynamic)
            if self.tier == "native" and native_problem() is None:
                self.hot = 0
                self.native.begin()
        return results
