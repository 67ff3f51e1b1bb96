"""TangentRecorder: the program of a call on dual arrays, made while the function runs on them.

Note [Programs of dual arrays]
    Inside of `ag.jvp` a compiled function gets Tensors with values and tangents. The first call with a signature runs the function on them, row by
    row, as it would run uncompiled; the rows are noted with their values, and with the arguments and results that have tangents, since
    `no_grad` and `detach` stop some. From the second call on the program runs, with the code of `aiograd.compiler.tangent_code`.

    Only values and tangents of the host, in no graph, have a program. Within `vmap`, another `jvp` or a backward pass, with
    ``create_graph`` and with ``strict`` the function runs row by row every time. So it does where it modifies a tensor with a tangent in
    place, and where something else than a row takes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiograd.compiler.program import Program, Value, ValueKind
from aiograd.compiler.recorded_results import ResultRecorder
from aiograd.forward.dual import DualArray, Pending
from aiograd.ops.op import ROWS, Fused, Op
from aiograd.running.trees import leaves_of
from aiograd.tensors.core import TensorCore, has_tangent
from aiograd.tensors.levels import LevelArray


@dataclass(frozen=True, slots=True)
class Followed:
    """Which values of a program have tangents.

    Attributes:
        statements: by number of a statement with tangents, the numbers of its arguments that have one, and of its outputs.
        outputs: per output of the program, True if it has one.
    """

    statements: dict[int, tuple[frozenset[int], frozenset[int]]]
    outputs: tuple[bool, ...]


def are_of_levels(inputs: list[TensorCore]) -> bool:
    """True if some of the inputs of a call are arrays of a transform, such as `ag.jvp`."""
    return any([isinstance(tensor._data, LevelArray) for tensor in inputs])


def _is_pending(tensor: TensorCore) -> bool:
    return isinstance(tensor._data, DualArray) and isinstance(tensor._data.tangent, Pending)


class TangentRecorder(ResultRecorder):
    """A recorder of a call on dual arrays. See the module's Note."""

    of_level = True

    def __init__(self, inputs: list[TensorCore], *args: Any, **options: Any) -> None:
        self._level: Any = None
        self._followed: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        self._followed_outputs: tuple[bool, ...] = ()
        super().__init__(inputs, *args, **{**options, "raises": False})
        arrays: list[Any] = [tensor._data for tensor in inputs]
        if len({id(array) for array in arrays}) != len({id(array.primal if isinstance(array, DualArray) else array) for array in arrays}):
            self.breaks("two arguments share a value and differ in their tangents")

    def followed(self) -> Followed:
        """Which values have tangents, after the call of `program`."""
        return Followed(self._followed, self._followed_outputs)

    def _know(self, tensor: TensorCore, kind: ValueKind, index: int) -> Value:
        data: Any = tensor._data
        if not isinstance(data, LevelArray):
            return super()._know(tensor, kind, index)
        self._level = self._level or data.level
        if not isinstance(data, DualArray) or not data.is_plain or data.level is not self._level:
            self.breaks("it is called on arrays of transforms that have no program, such as nested ones")
        elif kind is ValueKind.CAPTURED:
            self.breaks("it uses a tensor with a tangent that is no argument")
        if self.broken is not None:
            return Value(kind, index, tensor.shape, tensor.dtype, tensor._node is not None, ())
        if type(data) not in self._array_types:
            self._array_types += (type(data),)
        host = data.primal
        value = Value(kind, index, host.shape, host.dtype, tensor._node is not None, host.strides)
        self._arrays.setdefault(id(host), value)
        self._values[id(tensor)] = self._arrays[id(data)] = value
        self._sharing.setdefault(id(data), []).append(tensor)
        self._alive += [tensor, data, host]
        return value

    def adopts(self, tensor: TensorCore, other: TensorCore) -> None:
        """Note that a tensor of the level stands for one without a tangent."""
        if self.broken is None:
            self._values[id(other)] = self._value_of(tensor)
            self._alive.append(other)

    def _find(self, tensor: TensorCore) -> Value | None:
        value = super()._find(tensor)
        data = tensor._data
        if value is None and isinstance(data, DualArray):  # a detached tensor has the value of another, and no tangent
            value = self._arrays.get(id(data.primal)) if data.tangent is None else None
        return value

    def ran(
        self, op: Op, tensors: list[Any], statics: dict[str, Any], outputs: list[TensorCore], residuals: tuple[Any, ...], fused: Fused | None
    ) -> None:
        """Note a row that has run, and which of its arguments and outputs have tangents."""
        if any([isinstance(array, DualArray) and array.tangent is not None for array in leaves_of(statics, self._array_types)]):
            self.breaks(f"a setting of {op.name} has a tangent")
        if op.name == "to_device" and self._level is not None:
            if statics["device"] == self._level.name:  # every call has a level of its own, on the host
                op, statics = ROWS["clone"], {}
            elif statics["source"] == self._level.name:
                statics = {**statics, "source": "cpu"}
        number = len(self._statements)
        super().ran(op, tensors, statics, outputs, residuals, fused or op.fused)
        if len(self._statements) == number or self.broken is not None:
            return
        if self._statements[number].node is not None:
            self.breaks("gradients are wanted of tensors with tangents")
        made = frozenset([i for i, tensor in enumerate(outputs) if has_tangent(tensor)])
        if made:
            self._followed[number] = frozenset([i for i, tensor in enumerate(tensors) if tensor is not None and has_tangent(tensor)]), made

    def _add(self, op: Op, tensors: tuple[TensorCore, ...], outputs: tuple[TensorCore, ...], statics: dict[str, Any] | None = None) -> None:
        if any(map(has_tangent, (*tensors, *outputs))):
            self.breaks(f"{op.name} is no row, and acts on a tensor with a tangent")
        super()._add(op, tensors, outputs, statics)

    def modifies(self, tensor: TensorCore, name: str, *args: Any, **options: Any) -> Any:
        """Break the recording where a tensor of `jvp` is modified in place; see `WriteRecorder.modifies`."""
        operands: tuple[TensorCore, ...] = args[3] if len(args) > 3 else options.get("operands", ())
        if any([isinstance(each._data, LevelArray) for each in (tensor, *operands)]):
            self.breaks("it modifies a tensor in place with values of jvp")
        return super().modifies(tensor, name, *args, **options)

    def program(self, signature: str, outputs: list[TensorCore]) -> Program | None:
        """The program; None where there is none, as of `ResultRecorder`."""
        program = super().program(signature, outputs)
        if program is None:
            return None
        if self.has_called:
            self.breaks("it makes a pass or a step")
        elif not all([statement.is_row for statement in self._statements]) and any([_is_pending(tensor) for tensor in self._of_call]):
            self.breaks("it draws random numbers or has effects, and tangents come later")
        made = {self._statements[number].outputs[i] for number, (_, which) in self._followed.items() for i in which}
        found = [value in made for value in program.outputs]
        returns = program.returns or tuple([(place, False) for place in range(len(found))])
        for output, (place, is_detached) in zip(outputs, returns, strict=True):
            if place < len(found):
                found[place] = has_tangent(output)
            if is_detached and has_tangent(output):
                self.breaks("it returns an argument outside of the graph")
        self._followed_outputs = tuple(found)
        return program if self.broken is None else None
