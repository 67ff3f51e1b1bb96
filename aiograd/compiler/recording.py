"""ProgramRecorder: an eager call as the statements of a program.

While a compiled function runs for the first time, the mode has a `ProgramRecorder` as its ``trace``: it is told of every row that runs, and of
everything that a program could not repeat.

Note [What ends a recording]
    A value that the user's code reads (`bool`, `item`, `numpy`) is control flow that a program cannot follow: a `TraceError` at that line.
    Anything else that a program cannot repeat (`breaks`) does not disturb the call: it goes on eagerly to its end, its result is right, and no
    program is made of it.

Note [Tensors by identity]
    A Tensor is known by itself or by its array: `detach` makes another Tensor of the same array, and arguments that share one are one value, which
    is a part of the signature. One that is not known was there before or is a
    constant, and is captured; unless its node was made during the recording by something that is no row.
"""

from __future__ import annotations

import enum
import linecache
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.compiler.program import Program, Statement, Value, ValueKind
from aiograd.errors import TraceError
from aiograd.graph.node import _next_sequence
from aiograd.ops.op import Fused, Op
from aiograd.tensors.core import TensorCore, base_of
from aiograd.trees import map_tree

_PACKAGE = "aiograd"
#: of an Op for a statement that is no row
_NO_ROW: dict[str, Any] = {"outputs": 1, "differentiable_outputs": (), "view": False, "complex": "real", "cost": 1.0, "fused": None}


class ProgramRecorder:
    """Collects the statements of one call.

    Args:
        inputs: the Tensors among the arguments.
        raises: True if reading a value is an error; else it breaks the recording.

    Attributes:
        broken: why no program can be made of this call; None: one can.
        modules: the modules that were called, with their attributes as they were then.
    """

    def __init__(self, inputs: list[TensorCore], *, raises: bool) -> None:
        self.broken: str | None = None
        self.modules: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._raises = raises
        self._began = _next_sequence()
        self._statements: list[Statement] = []
        self._captured: list[Value] = []
        self._tensors: list[TensorCore] = []
        self._count = 0
        self._values: dict[int, Value] = {}
        #: by id of the array; an array that a tensor without a place in the graph shares with one that has it is found here
        self._arrays: dict[int, Value] = {}
        #: keeps Tensors and arrays alive, so that no other gets their id
        self._alive: list[Any] = []
        self._inputs = [self._know(tensor, ValueKind.INPUT, i) for i, tensor in enumerate(inputs)]

    # ---------------------------------------------------------------- told by the mode

    def ran(
        self, op: Op, tensors: list[Any], statics: dict[str, Any], outputs: list[TensorCore], residuals: tuple[Any, ...], fused: Fused | None
    ) -> None:
        """A row has run."""
        if self.broken is not None:
            return
        node: Any = next((output._node for output in outputs if output._node is not None), None)
        if node is not None and (node._extra is not None or node._saved.__class__ is not tuple):
            self.breaks("saved-tensor hooks or hooks of nodes are active")
            return
        arrays = tuple([None if tensor is None else self._value_of(tensor) for tensor in tensors])
        values = map_tree(self._static, statics, np.ndarray)
        place, line = _user_line()
        made: list[Value] = []
        for output in outputs:
            made.append(self._know(output, ValueKind.COMPUTED, self._count))
            self._count += 1
        self._alive.append(residuals)
        self._statements.append(Statement(op, arrays, values, fused, tuple(made), None if node is None else type(node), place, line))

    def _add(self, op: Op, tensors: tuple[TensorCore, ...], outputs: tuple[TensorCore, ...]) -> None:
        """A statement that is no row."""
        made = tuple([self._know(output, ValueKind.COMPUTED, self._count + i) for i, output in enumerate(outputs)])
        self._count += len(made)
        self._statements.append(Statement(op, tuple(map(self._value_of, tensors)), {}, None, made, None, *_user_line()))

    def drew(self, name: str, draw: Callable[[], Any], tensor: TensorCore) -> None:
        """Random numbers were drawn; `draw` draws the next ones, as a Tensor."""
        if self.broken is None:
            self._add(Op(name, lambda: draw()._data, {}, {}, **_NO_ROW), (), (tensor,))

    def performs(self, name: str, function: Callable[..., None], tensors: tuple[TensorCore, ...]) -> None:
        """A function of arrays has run for its effect, such as an update of running statistics."""
        if self.broken is None:
            self._add(Op(name, lambda *arrays: function(*arrays), {}, {}, **_NO_ROW), tensors, ())

    def reads(self, tensor: TensorCore) -> None:
        """The user's code reads the values of a tensor.

        Raises:
            TraceError: always, where breaks are errors.
        """
        place, line = _user_line()
        if self._raises:
            raise TraceError(
                f"{place}: `{line}` reads the value of a tensor of shape {list(tensor.shape)} while a compiled function is recorded: what follows "
                "could depend on it, and a program runs the same statements every time. Compute the choice with aiograd.where(), move the line "
                "out of the function, or compile with on_break='eager'."
            )
        self.breaks(f"{place} reads the value of a tensor")

    def breaks(self, reason: str) -> None:
        """Something happens that a program could not repeat."""
        if self.broken is None:
            self.broken = reason

    def called(self, module: Any) -> None:
        """A module is called."""
        if id(module) not in self.modules:
            self.modules[id(module)] = (module, dict(module.__dict__))

    # ---------------------------------------------------------------- the program

    def program(self, signature: str, outputs: list[TensorCore]) -> Program | None:
        """The program of the call that returned `outputs`; None where it is `broken`."""
        found: list[Value] = []
        for output in outputs:
            value = self._find(output)
            if value is None or value.kind is not ValueKind.COMPUTED or (output._node is not None) != value.records:
                self.breaks("it returns a tensor that no row of it made")
            elif output._x is not None and (output._x.retains is not None or self._is_input(base_of(output))):
                self.breaks("it returns a view of an argument, or a tensor that retains its gradient")
            elif value in found:
                self.breaks("it returns one tensor twice")
            else:
                found.append(value)
        for module, attributes in self.modules.values():
            if fit_of(module, attributes) is not Fit.SAME:
                self.breaks(f"{type(module).__name__}.forward changes an attribute of the module")
        for tensor in self._alive:
            if isinstance(tensor, TensorCore) and tensor._node is not None and tensor._node._seq > self._began and tensor._node._extra is not None:
                if not tensor._node.is_leaf:
                    self.breaks("it registers a hook on a tensor that it computes")
        if self.broken is not None:
            return None
        return Program(signature, tuple(self._inputs), tuple(self._captured), tuple(self._tensors), tuple(self._statements), tuple(found))

    # ---------------------------------------------------------------- values

    def _know(self, tensor: TensorCore, kind: ValueKind, index: int) -> Value:
        data = tensor._data
        if data.__class__ is not np.ndarray:
            self.breaks(f"a tensor lives on {tensor.device}")
        value = Value(kind, index, tuple(tensor.shape), tensor.dtype, tensor._node is not None, getattr(data, "strides", ()))
        self._values[id(tensor)] = value
        self._arrays.setdefault(id(data), value)
        self._alive += [tensor, data]
        return value

    def _find(self, tensor: TensorCore) -> Value | None:
        return self._values.get(id(tensor)) or self._arrays.get(id(tensor._data))

    def _value_of(self, tensor: TensorCore) -> Value:
        value = self._find(tensor)
        if value is not None and (value.records or tensor._node is None):
            return value if value.records == (tensor._node is not None) else self._detached(value, tensor)
        if value is not None and value.kind is not ValueKind.CAPTURED:
            self.breaks("a tensor takes another place in the graph")
        node = tensor._node
        if node is not None and not node.is_leaf and node._seq > self._began:
            self.breaks("it uses a tensor that something other than a row has made")
        if any(self._arrays.get(id(base)) is not None for base in _bases(tensor._data)):
            self.breaks("it uses a view of a tensor that no row has made")
        value = self._know(tensor, ValueKind.CAPTURED, len(self._captured))
        self._captured.append(value)
        self._tensors.append(tensor)
        return value

    def _detached(self, value: Value, tensor: TensorCore) -> Value:
        """The same array under another Tensor, which has no place in the graph."""
        detached = Value(value.kind, value.index, value.shape, value.dtype, False, value.strides)
        self._values[id(tensor)] = detached
        self._alive.append(tensor)
        return detached

    def _static(self, array: np.ndarray[Any, Any]) -> Any:
        """An array among the static arguments; the Value of it where it is a known tensor's."""
        known = self._arrays.get(id(array))
        if known is None or not known.records:
            return array if known is None else known
        return Value(known.kind, known.index, known.shape, known.dtype, False, known.strides)

    def _is_input(self, tensor: TensorCore) -> bool:
        value = self._find(tensor)
        return value is None or value.kind is not ValueKind.COMPUTED


class Fit(enum.Enum):
    """How an object compares with what it was when a program was recorded."""

    #: the same
    SAME = enum.auto()
    #: plain attributes have other values, such as ``training``: they may come back
    OTHER = enum.auto()
    #: other objects, such as a Parameter that was replaced: the program is of no use any more
    STALE = enum.auto()


def fit_of(owner: Any, attributes: dict[str, Any]) -> Fit:
    """Compare the attributes of an object with those that it had."""
    now = owner.__dict__
    if now.keys() != attributes.keys():
        return Fit.STALE
    fit = Fit.SAME
    for name, value in attributes.items():
        found = now[name]
        if found is value:
            continue
        if not isinstance(value, (int, float, str)) or not isinstance(found, (int, float, str)):
            return Fit.STALE
        if found.__class__ is not value.__class__ or found != value:
            fit = Fit.OTHER
    return fit


def _bases(array: Any) -> list[Any]:
    found: list[Any] = []
    while (base := getattr(array, "base", None)) is not None:
        found.append(base)
        array = base
    return found


def _user_line() -> tuple[str, str]:
    """File and line of the innermost frame that is not the package's, and the line's text."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"{name.rpartition('/')[2]}:{number}", linecache.getline(name, number, frame.f_globals).strip()
