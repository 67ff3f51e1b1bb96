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

import functools
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

import numpy as np

from aiograd import devices
from aiograd.compiler.effects import ArgumentPlace, CalledOp, RepeatedCall, caller, statement_op
from aiograd.compiler.lines import INSTALLED, async_block, described_line, is_of_package, quoted, user_line
from aiograd.compiler.program import Program, Statement, Value, ValueKind
from aiograd.compiler.results import others_in, views_among
from aiograd.compiler.surroundings import Bits, Fit, Guard, HasGradient, Known, fit_of, guards_of_code, guards_of_module
from aiograd.errors import TraceError
from aiograd.graph.node import _next_sequence
from aiograd.modes import ModeScope, current_mode
from aiograd.ops.op import ROWS, Fused, Op
from aiograd.tensors.core import TensorCore, base_of, refresh
from aiograd.trees import leaves_of, map_tree

#: rows beside those with masks
_SHAPED_BY_VALUES = ("nonzero", "unique_values")
_AWAITING = "aiograd.compiler.awaiting"
#: modules whose frames are around a function that is recorded
_RECORDING = ("aiograd.compiler.compiled", _AWAITING)

class ProgramRecorder:
    """Collects the statements of one call.

    Args:
        inputs: the Tensors among the arguments.
        arrays: those of them that stand for arrays.
        raises: True if reading a value is an error; else it breaks the recording.

    Attributes:
        broken: why no program can be made of this call; None: one can.
        modules: the modules that were called, with their attributes as they were then.
    """

    def __init__(self, inputs: list[TensorCore], arrays: list[TensorCore], *, raises: bool) -> None:
        self.broken: str | None = None
        self.modules: dict[int, tuple[Any, dict[str, Any]]] = {}
        #: of what the functions and modules mention that have run; which there are; code objects that have been looked at
        self.guards: list[Guard] = []
        self.guarded: Known = {}
        self._seen: set[Any] = set()
        self._raises = raises
        self._of_arrays = arrays
        self._errors = np.geterr()
        mode = current_mode()
        self._mode = mode, mode.grad, mode.dtype
        self._refused: str | None = None
        self._began = _next_sequence()
        self._statements: list[Statement] = []
        self._captured: list[Value] = []
        self._tensors: list[TensorCore] = []
        self._count = 0
        #: True if a `CalledOp` is among the statements
        self.has_called = False
        self._values: dict[int, Value] = {}
        #: nodes of rows; ids of the Tensors that rows have made; by id of an array, the known Tensors of it
        self._nodes: list[Any] = []
        self._made_by_rows: set[int] = set()
        self._sharing: dict[int, list[TensorCore]] = {}
        #: by id of a Tensor that is a leaf's gradient, a function that returns that gradient
        self._gradients: dict[int, Callable[[], Any]] = {}
        #: by id of a leaf that the function finds by name, the leaf and the array of the gradient that it had when the call began
        self._before: dict[int, tuple[Any, Any]] = {}
        #: by id of a gradient that was read, its leaf; ids of the leaves among the arguments
        self._read: dict[int, Any] = {}
        self._leaves = {id(tensor._node) for tensor in inputs if tensor._node is not None}
        #: by id of the array; an array that a tensor without a place in the graph shares with one that has it is found here
        self._arrays: dict[int, Value] = {}
        #: keeps Tensors and arrays alive, so that no other gets their id
        self._alive: list[Any] = []
        self._device = "cpu"
        self._array_types: tuple[type, ...] = (np.ndarray,)
        self._inputs = [self._know(tensor, ValueKind.INPUT, i) for i, tensor in enumerate(inputs)]

    def begin(self, guards: list[Guard]) -> None:
        """The call begins, with these guards."""
        for _, attributes in guards:
            for tensor in attributes.values():
                if isinstance(tensor, TensorCore) and tensor._node is not None and tensor._node.is_leaf:
                    leaf: Any = tensor._node
                    self._before[id(leaf)] = leaf, _array_of(leaf.grad)

    # ---------------------------------------------------------------- told by the mode

    def ran(
        self, op: Op, tensors: list[Any], statics: dict[str, Any], outputs: list[TensorCore], residuals: tuple[Any, ...], fused: Fused | None
    ) -> None:
        """A row has run."""
        if self.broken is not None:
            return
        node: Any = next((output._node for output in outputs if output._node is not None), None)
        if node is not None:
            self._nodes.append(node)
        if node is not None and (node._extra is not None or node._saved.__class__ is not tuple):
            self.breaks("saved-tensor hooks or hooks of nodes are active")
            return
        if np.geterr() != self._errors:
            self.breaks("it handles floating point errors in a way of its own, with numpy.errstate()")
            return
        if op.name in _SHAPED_BY_VALUES or (op.name == "index" and self._is_masked(statics["index"])):
            self.breaks(f"the shape of a result depends on values ({op.name}); where() keeps the shape")
            return
        arrays = tuple([None if tensor is None else self._value_of(tensor) for tensor in tensors])
        values = map_tree(self._static, statics, self._array_types)
        place, line = self._line()
        made = self._made(outputs)
        self._made_by_rows.update(map(id, outputs))
        self._alive.append(residuals)
        self._statements.append(Statement(op, arrays, values, fused, made, None if node is None else type(node), place, line))

    def _add(self, op: Op, tensors: tuple[TensorCore, ...], outputs: tuple[TensorCore, ...], statics: dict[str, Any] | None = None) -> None:
        """A statement that is no row."""
        values = tuple(map(self._value_of, tensors))
        self._statements.append(Statement(op, values, statics or {}, None, self._made(outputs), None, *self._line()))

    def _is_masked(self, index: Any) -> bool:
        """True for an index with a mask that the program computes or is given. Others are guarded by their values."""
        for mask in leaves_of(index, self._array_types):
            if mask.dtype == np.bool_:
                if id(mask) in self._arrays or not isinstance(mask, np.ndarray):
                    return True
                bits = Bits(mask)
                self.guards.append((bits, bits.__dict__))
        return False

    def _line(self) -> tuple[str, str]:
        """The user's line that runs, as `user_line`; what the functions around it mention is guarded from here on."""
        found: Any = None
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") not in _RECORDING:
            if not is_of_package(frame):
                found = found or frame
                code = frame.f_code
                if code not in self._seen:
                    self._seen.add(code)
                    if not code.co_filename.startswith(INSTALLED):
                        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
                        self.guards += guards_of_code(code, frame.f_globals, owner, self.guarded)
            frame = frame.f_back
        if found is None:
            return user_line()
        return described_line(found.f_code.co_filename, found.f_lineno, found.f_globals)

    def _made(self, outputs: Any) -> tuple[Value, ...]:
        """The values of the Tensors that a statement has made."""
        made: list[Value] = []
        for output in outputs:
            made.append(self._know(output, ValueKind.COMPUTED, self._count))
            self._count += 1
        return tuple(made)

    def drew(self, name: str, draw: Callable[[], Any], tensor: TensorCore) -> None:
        """Random numbers were drawn; `draw` draws the next ones, as a Tensor."""
        if self.broken is None:
            self._add(statement_op(name, lambda: draw()._data), (), (tensor,))

    def performs(self, name: str, function: Callable[..., None], tensors: tuple[TensorCore, ...]) -> None:
        """A function of arrays has run for its effect, such as an update of running statistics."""
        if self.broken is None:
            self._add(statement_op(name, lambda *arrays: function(*arrays)), tensors, ())
            self.forget_captured()

    def forgets_grad(self, tensor: TensorCore, forget: Callable[[TensorCore], None]) -> None:
        """The gradient of a tensor is set to None, by `forget`; of a captured leaf that is a statement, which needs no part of its own."""
        known, node = self._find(tensor), tensor._node
        if node is None or not node.is_leaf or (known is not None and known.kind is not ValueKind.CAPTURED):
            self.acts("setting .grad", forget, tensor)
            return
        forget_here = functools.partial(forget, tensor)
        with ModeScope(trace=None):
            forget_here()
        if self.broken is None:
            self.has_called = True
            self._add(statement_op("setting .grad", forget_here), (), ())

    def looks_at_grad(self, leaf: Any, grad: TensorCore | None) -> None:
        """The gradient of a leaf is read, or looked for: what follows may depend on its presence, as far as the call has not made it itself."""
        if id(leaf) in self._leaves:
            self.breaks("it reads the gradient of an argument")
        before = self._before.pop(id(leaf), None)
        if before is not None and _array_of(leaf.grad) is before[1]:
            has = HasGradient(leaf)
            self.guards.append((has, has.__dict__))
        if grad is not None:
            self._read[id(grad)] = leaf
            self._alive.append(grad)

    def forget_captured(self) -> None:
        """Count captured Tensors that are used from here on as new values: their memory may have been written to."""
        self._values = {key: value for key, value in self._values.items() if value.kind is not ValueKind.CAPTURED}
        self._arrays = {key: value for key, value in self._arrays.items() if value.kind is not ValueKind.CAPTURED}

    def acts(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function for its effect on what it knows by itself, such as an optimizer's step; a program calls it at every run.

        Args:
            name: of the effect, for people.
            function: returns None or a Tensor; it is called with the other arguments, in which iterators become lists.
        """
        args, kwargs = _listed(args), _listed(kwargs)
        call = self._call(function, args, kwargs)
        with ModeScope(trace=None):
            result = function(*args, **kwargs)
        self._called(name, call, result, is_awaited=False)
        return result

    def applies(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], *, is_async: bool) -> Any:
        """As `acts` and `awaits`, for a function that makes nodes of its own: a program calls it with its Tensors, in the graph."""
        if is_async:
            return self._awaited(name, function, args, {}, has_graph=True)
        call = self._call(function, args, {})
        with ModeScope(trace=None):
            result = function(*args)
        self._called(name, call, result, is_awaited=False, has_graph=True)
        return result

    def awaits(self, name: str, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """As `acts`, for a function that returns a coroutine: a backward pass, or a step on the executor."""
        _refuse_async_blocks(sys._getframe(2), self)
        return self._awaited(name, function, _listed(args), _listed(kwargs))

    async def _awaited(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, has_graph: bool = False
    ) -> Any:
        call = self._call(function, args, kwargs)
        with ModeScope(trace=None):
            result = await function(*args, **kwargs)
        self._called(name, call, result, is_awaited=True, has_graph=has_graph)
        return result

    def _call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[RepeatedCall, tuple[Value, ...]] | None:
        """The same call of other Tensors, and the values that it takes: all Tensors but leaves that are no argument.

        Returns:
            None if the recording is broken.
        """
        if self.broken is not None:
            return None
        taken: list[Value] = []

        def place(tensor: TensorCore) -> Any:
            node = tensor._node
            known = self._find(tensor)
            if node is not None and node.is_leaf and (known is None or known.kind is ValueKind.CAPTURED):
                return tensor
            taken.append(self._value_of(tensor))
            return ArgumentPlace(len(taken) - 1)

        args, kwargs = map_tree(place, (args, kwargs), TensorCore)
        return RepeatedCall(function, args, kwargs, caller(function, args, kwargs)), tuple(taken)

    def _called(self, name: str, call: Any, result: Any, *, is_awaited: bool, has_graph: bool = False) -> None:
        if call is None or self.broken is not None:
            return
        outputs = leaves_of(result, TensorCore)
        others = [type(other).__name__ for other in others_in(result)]
        if others:
            self.breaks(f"{name} returns a {others[0]}")
        for output in outputs:
            if output._node is not None and not has_graph:
                self.breaks(f"{name} returns a tensor that has a graph")
            if self._find(output) is not None:
                self.breaks(f"{name} returns one of its arguments")
        if self.broken is None:
            self.has_called = True
            made = self._made(outputs)
            repeated, values = call
            self._statements.append(Statement(CalledOp(name, repeated, is_awaited=is_awaited), values, {}, None, made, None, *self._line()))

    def waits(self, place: str, line: str) -> None:
        """The function waits for something that a program cannot repeat.

        Raises:
            TraceError: always, where breaks are errors.
        """
        if self._raises and self.broken is None:
            self.broken = f"{place} waits for something else than a pass"
            self._refuse(
                f"{quoted(place, line)} waits for something else than a pass of its own while a compiled function is recorded: a program repeats "
                "backward(), grad() and astep(), nothing else that is awaited. Move the line out of the function, or compile with on_break='eager'."
            )
        self.breaks(f"{place} waits for something else than a pass")
        return None

    def reads(self, tensor: TensorCore) -> None:
        """The user's code reads the values of a tensor.

        Raises:
            TraceError: always, where breaks are errors.
        """
        place, line = user_line()
        if self._raises:
            self._refuse(
                f"{quoted(place, line)} reads the value of a tensor of shape {list(tensor.shape)} while a compiled function is recorded: what "
                "follows could depend on it, and a program runs the same statements every time. Compute the choice with aiograd.where(), move the "
                "line out of the function, or compile with on_break='eager'."
            )
        self.breaks(f"{place} reads the value of a tensor")

    def _refuse(self, reason: str) -> NoReturn:
        """Raise a `TraceError` here, and again at the end of the call if the function catches it, since eagerly it would have gone on otherwise."""
        self._refused = reason
        raise TraceError(reason)

    def breaks(self, reason: str) -> None:
        """Something happens that a program could not repeat."""
        if self.broken is None:
            within = current_mode().trace is self and "it " in reason[:3]
            self.broken = f"{reason}: {quoted(*user_line())}" if within else reason

    def was_array(self, tensor: TensorCore) -> bool:
        """True if a Tensor stands for an array among the arguments."""
        return any(tensor is each for each in self._of_arrays)

    def called(self, module: Any) -> None:
        """A module is called."""
        if id(module) not in self.modules:
            self.modules[id(module)] = (module, dict(module.__dict__))
            self.guards += guards_of_module(module, self.guarded)

    # ---------------------------------------------------------------- the program

    def program(self, signature: str, outputs: list[TensorCore]) -> Program | None:
        """The program of the call that returned `outputs`; None where it is `broken`.

        Raises:
            TraceError: again, where the function has caught it.
        """
        if self._refused is not None:
            raise TraceError(self._refused)
        found: list[Value] = []
        mode = current_mode()
        if (mode, mode.grad, mode.dtype) != self._mode:
            self.breaks("it sets a mode for whoever calls it, such as the default dtype")
        with ModeScope(trace=self):
            for output in outputs:
                refresh(output)
        for output in outputs:
            value = self._find(output)
            if value is not None and value.records and output._node is None:
                value = self._detached(value, output)
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
        views, shares = views_among(outputs)
        if shares:
            self.breaks("it returns tensors that share memory")
        program = Program(
            signature, tuple(self._inputs), tuple(self._captured), tuple(self._tensors), tuple(self._statements), tuple(found), views,
            self._shared(),
        )
        if program.device != "cpu" and not all(map(_is_for_device, self._statements)):
            self.breaks(f"it computes on {program.device} and on the host")
        return program if self.broken is None else None

    def _shared(self) -> dict[str, frozenset[str]]:
        """By name of a value, the names of all that share its version counter, as the views of one tensor do."""
        groups: dict[int, set[str]] = {}
        for tensor in self._alive:
            value = self._values.get(id(tensor)) if isinstance(tensor, TensorCore) else None
            if value is not None:
                groups.setdefault(id(base_of(tensor)), set()).add(value.name)
        return {name: frozenset(names) for names in groups.values() if len(names) > 1 for name in names}

    # ---------------------------------------------------------------- values

    def _know(self, tensor: TensorCore, kind: ValueKind, index: int) -> Value:
        data = tensor._data
        name = "cpu"
        if data.__class__ is not np.ndarray:
            name = self._on_device(data)
        strides = data.strides if name == "cpu" else ()
        value = Value(kind, index, tuple(tensor.shape), tensor.dtype, tensor._node is not None, strides, name)
        self._values[id(tensor)] = value
        self._arrays.setdefault(id(data), value)
        self._sharing.setdefault(id(data), []).append(tensor)
        self._alive += [tensor, data]
        return value

    def _on_device(self, data: Any) -> str:
        """The name of the device of an array that is none of the host."""
        name = devices.device_name_of(data)
        if name == "cpu" or isinstance(devices.device(name), devices.AdoptsTensors):
            self.breaks(f"an array is a {type(data).__name__}")
        elif self._device not in ("cpu", name):
            self.breaks(f"its tensors live on {self._device} and {name}")
        self._device = name
        if type(data) not in self._array_types:
            self._array_types += (type(data),)
        return name

    def _find(self, tensor: TensorCore) -> Value | None:
        return self._values.get(id(tensor)) or self._arrays.get(id(tensor._data))

    def _value_of(self, tensor: TensorCore) -> Value:
        if tensor._x is not None:
            refresh(tensor)
        value = self._find(tensor) or self._gradient(tensor)
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

    def _gradient(self, tensor: TensorCore) -> Value | None:
        """The value of a Tensor that is the ``.grad`` of a captured leaf, read at this place of every run."""
        node = self._read.get(id(tensor))
        if node is None:
            return None
        if node.grad is not tensor:
            self.breaks("it uses a gradient that has been replaced since it was read")
            return None
        self._gradients[id(tensor)] = node.seen_grad
        self._add(statement_op("grad", functools.partial(_gradient_of, node)), (), (tensor,))
        return self._find(tensor)

    def _detached(self, value: Value, tensor: TensorCore) -> Value:
        """The same array under another Tensor, which has no place in the graph."""
        detached = Value(value.kind, value.index, value.shape, value.dtype, False, value.strides, value.device)
        self._values[id(tensor)] = detached
        self._sharing.setdefault(id(tensor._data), []).append(tensor)
        self._alive.append(tensor)
        return detached

    def _static(self, array: Any) -> Any:
        """An array among the static arguments; the Value of it where it is a known tensor's."""
        known = self._arrays.get(id(array))
        if known is None or not known.records:
            return array if known is None else known
        return Value(known.kind, known.index, known.shape, known.dtype, False, known.strides, known.device)

    def _is_input(self, tensor: TensorCore) -> bool:
        value = self._find(tensor)
        return value is None or value.kind is not ValueKind.COMPUTED


def _is_for_device(statement: Statement) -> bool:
    """True if a statement belongs to a program of a device: it computes from arrays there and numbers, or moves an array there."""
    if not statement.is_row or (statement.op is ROWS["to_device"] and statement.is_on_device):
        return True
    return not any([value.device == "cpu" and value.shape for value in (*statement.arrays, *statement.outputs) if value is not None])


def _listed(arguments: Any) -> Any:
    """Arguments with lists in place of iterators, which can be used only once."""
    return map_tree(list, arguments, Iterator)


def _array_of(grad: Any) -> Any:
    return grad._data if isinstance(grad, TensorCore) else grad


def _gradient_of(leaf: Any) -> Any:
    """The array of a leaf's gradient.

    Raises:
        TraceError: there is none.
    """
    grad = leaf.grad
    if grad is None:
        raise TraceError(f"a compiled function reads the gradient of a leaf of shape {list(leaf.shape)}, which had one while it was recorded")
    return _array_of(grad)


def _refuse_async_blocks(frame: Any, recorder: ProgramRecorder) -> None:
    """Break the recording where the functions that are running have an ``async with`` or ``async for``, whose effect would not be repeated."""
    while frame is not None and frame.f_globals.get("__name__") != _AWAITING:
        if not is_of_package(frame):
            found = async_block(frame.f_code)
            if found is not None:
                recorder.waits(*described_line(frame.f_code.co_filename, found, frame.f_globals))
        frame = frame.f_back


def _bases(array: Any) -> list[Any]:
    found: list[Any] = []
    while (base := getattr(array, "base", None)) is not None:
        found.append(base)
        array = base
    return found
