"""ProgramRecorder: an eager call as the statements of a program: rows, random draws, and the Tensors that they take and make.

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
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from aiograd.compiler.effects import ArgumentPlace, CalledOp, DrawOp, RepeatedCall, statement_op
from aiograd.compiler.lines import quoted, user_line
from aiograd.compiler.program import Statement, Value, ValueKind, laid_out
from aiograd.compiler.watching.kinds import ARRAY, ATTRIBUTE
from aiograd.compiler.watching.objects import operand
from aiograd.compiler.watching.reads import Read, Reads
from aiograd.compiler.watching.watcher import Watcher, described
from aiograd.errors import TraceError
from aiograd.graph.node import _next_sequence
from aiograd.ops.op import Fused, Op
from aiograd.running import devices
from aiograd.running.modes import current_mode
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.accumulated import gradient_of, seen_gradient
from aiograd.tensors.core import TENSOR_CLASS, TensorCore, make, refresh
from aiograd.tensors.levels import LevelArray

#: rows beside those with masks
_SHAPED_BY_VALUES = ("nonzero", "unique_values")
#: types of arguments of rows that run no code of the user
_PLAIN = frozenset((int, float, complex, bool, str, type(None), type(...)))


class ProgramRecorder:
    """Collects the statements of one call.

    Args:
        inputs: the Tensors among the arguments.
        arrays: the inputs that stand for arrays.
        raises: True if reading a value is an error; else it breaks the recording.

    Attributes:
        broken: why no program can be made of this call; None: one can.
        watcher: the trace function that notes the reads of the running functions.
    """

    #: True if arguments may be arrays of a transform
    of_level = False

    def __init__(self, inputs: list[TensorCore], arrays: list[TensorCore], *, raises: bool) -> None:
        self.broken: str | None = None
        self.reads = Reads()
        self.watcher = Watcher(self.reads)
        #: reads that the recorder makes itself
        self._own_reads: list[Read] = []
        #: by number of an input, True for a leaf, where the function asks for it
        self.leaves: dict[int, bool] = {}
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
        #: by id of a Tensor that is another's gradient, a function that returns that gradient
        self._gradients: dict[int, Callable[[], Any]] = {}
        #: by id of a Tensor, this and the array of its gradient before anything of the call could change it
        self._before: dict[int, tuple[Any, Any]] = {}
        #: by id of the array of a gradient that was read, the gradient and the Tensor that has it; ids of the leaves among the arguments
        self._read: dict[int, tuple[TensorCore, TensorCore]] = {}
        self._leaves = {id(tensor._node) for tensor in inputs if tensor._node is not None}
        #: by id, nodes of the leaves that the function has made of tensors, see `makes_leaf`
        self._new_leaves: dict[int, Any] = {}
        #: by id of the array; an array that a tensor without a place in the graph shares with one that has it is found here
        self._arrays: dict[int, Value] = {}
        #: keeps Tensors and arrays alive, so that no other gets their id
        self._alive: list[Any] = []
        #: by id, Tensors that were made of numbers
        self._created: dict[int, TensorCore] = {}
        #: by name of a value, the array that owns its memory
        self._owners: dict[str, Any] = {}
        self._device = "cpu"
        self._array_types: tuple[type, ...] = (np.ndarray,)
        self._of_call = inputs
        self._returned: set[str] = set()
        self._inputs = [self._know(tensor, ValueKind.INPUT, i) for i, tensor in enumerate(inputs)]

    def _keep_gradient(self, tensor: TensorCore) -> Any:
        """Remember the gradient that a Tensor has before a pass or an optimizer of the call can change it; returns its array, or None."""
        return self._before.setdefault(id(tensor), (tensor, array_of(gradient_of(tensor))))[1]

    # ---------------------------------------------------------------- told by the mode

    def adopts(self, tensor: TensorCore, other: TensorCore) -> None:
        """Note that a tensor of a transform stands for one of the caller; a program without transforms ends where the first of them is used."""

    def pauses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stop to watch while a row runs that reads nothing but its arguments; returns the trace function to go on with, None to watch on.

        Args:
            args, kwargs: the arguments; among others than Tensors, arrays and numbers there may be functions of the user.
        """
        watcher = self.watcher
        return watcher.pauses() if watcher.can_pause and all(map(_is_plain, args)) and (not kwargs or all(map(_is_plain, kwargs.values()))) else None

    def ran(
        self, op: Op, tensors: list[Any], statics: dict[str, Any], outputs: list[TensorCore], residuals: tuple[Any, ...], fused: Fused | None
    ) -> None:
        """Note a row that has run."""
        if self.broken is not None:
            return
        node: Any = None
        for output in outputs:
            self._made_by_rows.add(id(output))
            node = output._node if node is None else node
        if node is not None:
            self._nodes.append(node)
            if node._extra is not None or node._saved.__class__ is not tuple:
                self.breaks("saved-tensor hooks or hooks of nodes are active")
                return
        if np.geterr() != self._errors:
            self.breaks("it handles floating point errors in a way of its own, with numpy.errstate()")
            return
        if op.name in _SHAPED_BY_VALUES or (op.name == "index" and self._is_masked(statics["index"])):
            self.breaks(f"the shape of a result depends on values ({op.name}); where() keeps the shape")
            return
        arrays: list[Value | None] = []
        for tensor in tensors:
            value = None if tensor is None else self._values.get(id(tensor))
            if tensor is not None and (value is None or tensor._x is not None or value.records != (tensor._node is not None)):
                value = self._value_of(tensor)
            arrays.append(value)
        values = map_tree(self._static, statics, self._array_types) if statics else {}
        place, line = self.watcher.line()
        made = self._made(outputs)
        self._alive.append(residuals)
        self._statements.append(Statement(op, tuple(arrays), values, fused, made, None if node is None else type(node), place, line,
                                          tuple([getattr(each, "nbytes", 0) for each in residuals])))

    def _add(self, op: Op, tensors: tuple[TensorCore, ...], outputs: tuple[TensorCore, ...], statics: dict[str, Any] | None = None) -> None:
        """Add a statement that is no row."""
        values = tuple(map(self._value_of, tensors))
        self._statements.append(Statement(op, values, statics or {}, None, self._made(outputs), None, *self.watcher.line()))

    def _is_masked(self, index: Any) -> bool:
        """True for an index with a mask that the program computes or is given. Others are guarded by their values."""
        for mask in leaves_of(index, self._array_types):
            if mask.dtype == np.bool_:
                if id(mask) in self._arrays or not isinstance(mask, np.ndarray):
                    return True
                self.depends_on(mask)
        return False

    def depends_on(self, array: np.ndarray[Any, Any]) -> None:
        """Guard the values of an array that no statement reads: of a mask, or of an array that is copied."""
        self._own_reads.append(Read(ARRAY, array, None, ARRAY.now(array, None), self.watcher.where))

    def _settle_tensors(self) -> None:
        """Guard the attributes of Tensors that the function has read: a leaf among the arguments or captured Tensors has to be a leaf again."""
        known: set[tuple[int, str]] = set()
        for tensor, name, found, where in self.reads.of_tensors:
            value = self._find(tensor)
            if name not in ("is_leaf", "requires_grad"):
                self.breaks(f"it reads {name} of a tensor{_at(where)}")
            elif value is not None and value.kind is ValueKind.INPUT:
                if name == "is_leaf":  # the signature has the other one
                    self.leaves[value.index] = found
            elif (value is None or value.kind is ValueKind.CAPTURED) and (id(tensor), name) not in known:
                known.add((id(tensor), name))
                self._own_reads.append(Read(ATTRIBUTE, tensor, name, found, where))

    def _made(self, outputs: Any) -> tuple[Value, ...]:
        """The values of the Tensors that a statement has made."""
        made: list[Value] = []
        for output in outputs:
            made.append(self._know(output, ValueKind.COMPUTED, self._count))
            self._count += 1
        return tuple(made)

    def drew(self, name: str, draw: Callable[[], Any], tensor: TensorCore) -> None:
        """Note a draw of random numbers; `draw` draws the next ones, as a Tensor."""
        if self.broken is None:
            self._add(DrawOp(name, lambda: draw()._data), (), (tensor,))

    def performs(self, name: str, function: Callable[..., None], tensors: tuple[TensorCore, ...]) -> None:
        """Note a function of arrays that has run for its effect, such as an update of running statistics."""
        if self.broken is None:
            self._add(statement_op(name, lambda *arrays: function(*arrays)), tensors, ())
            self.forget_captured()

    def forget_captured(self) -> None:
        """Count captured Tensors that are used from here on as new values: their memory may have been written to."""
        self._values = {key: value for key, value in self._values.items() if value.kind is not ValueKind.CAPTURED}
        self._arrays = {key: value for key, value in self._arrays.items() if value.kind is not ValueKind.CAPTURED}

    def waits(self, place: str, line: str) -> None:
        """Break the recording: the function waits for something that a program cannot repeat.

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

    def reads_values(self, tensor: TensorCore) -> None:
        """Break the recording: the user's code reads the values of a tensor.

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
        """Break the recording for an event that a program cannot repeat."""
        if self.broken is None:
            within = current_mode().trace is self and "it " in reason[:3]
            self.broken = f"{reason}: {quoted(*user_line())}" if within else reason

    def made(self, tensor: TensorCore, source: Any = None) -> None:
        """Note a Tensor made in memory of its own, from numbers or by copying `source`; every call of the function makes a new one."""
        self._created[id(tensor)] = tensor
        if isinstance(source, np.ndarray):
            operand(self.reads, source, self.watcher.where)

    def make_again(self, base: TensorCore) -> None:
        """A statement that makes a tensor anew which the function has made of numbers and now modifies or returns."""
        numbers = np.copy(base._data)
        known = self._find(base)
        if known is not None:  # earlier statements keep the value that they have used
            self._tensors[known.index] = make(numbers)
        self._made_by_rows.add(id(base))
        self._add(statement_op("copy", lambda: np.copy(numbers)), (), (base,))

    def was_array(self, tensor: TensorCore) -> bool:
        """True if a Tensor stands for an array among the arguments."""
        return any(tensor is each for each in self._of_arrays)

    def settle(self) -> tuple[list[Read], Read | None]:
        """After the call: the reads that its program depends on, and the first of them that the call itself has changed, if any."""
        known = self.reads.tensors
        reads, reason, moved = self.reads.settle(lambda tensor: id(tensor) not in known)
        if reason is not None:
            self.breaks(f"{reason.text}{_at(reason.where)}")
        self._settle_tensors()
        return [*reads, *self._own_reads], moved

    # ---------------------------------------------------------------- values

    def _know(self, tensor: TensorCore, kind: ValueKind, index: int) -> Value:
        data = tensor._data
        name = "cpu"
        if data.__class__ is not np.ndarray:
            name = self._on_device(data)
        strides = data.strides if name == "cpu" else ()
        value = Value(kind, index, tuple(tensor.shape), tensor.dtype, tensor._node is not None, strides, name)
        self._values[id(tensor)] = value
        self._owners[value.name] = _bases(data)[-1] if getattr(data, "base", None) is not None else data
        self._arrays.setdefault(id(data), value)
        self._sharing.setdefault(id(data), []).append(tensor)
        self._alive += [tensor, data]
        return value

    def _on_device(self, data: Any) -> str:
        """The name of the device of an array that is none of the host."""
        name = devices.device_name_of(data)
        if name == "cpu" or devices.adopts(name):
            self.breaks(f"an array is a {type(data).__name__}")
        elif self._device not in ("cpu", name):
            self.breaks(f"its tensors live on {self._device} and {name}")
        self._device = name
        if type(data) not in self._array_types:
            self._array_types += (type(data),)
        return name

    def _find(self, tensor: TensorCore) -> Value | None:
        value = self._values.get(id(tensor))
        return value or (None if id(tensor._node) in self._new_leaves else self._arrays.get(id(tensor._data)))

    def _renew(self, array: Any) -> None:
        """Take the known views that have this array anew, where their base has been modified; a detached one has the array alone."""
        for known in [known for known in self._sharing.get(id(array), ()) if known._x is not None]:
            refresh(known)

    def _value_of(self, tensor: TensorCore) -> Value:
        if tensor._x is not None:
            refresh(tensor)
        self._renew(tensor._data)
        value = self._find(tensor) or self._gradient(tensor)
        if id(tensor._node) in self._new_leaves and (value is None or not value.records):
            value = self._leaf(value or self._arrays.get(id(tensor._data)), tensor)
        if value is not None and (value.records or tensor._node is None):
            return value if value.records == (tensor._node is not None) else self._detached(value, tensor)
        if value is not None and value.kind is not ValueKind.CAPTURED:
            self.breaks("a tensor takes another place in the graph")
        node = tensor._node
        if node is not None and not node.is_leaf and node._seq > self._began:
            self.breaks("it uses a tensor that something other than a row has made")
        if isinstance(tensor._data, LevelArray) and not self.of_level:
            self.breaks("it runs a transform, such as ag.jvp, ag.hvp or ag.vmap")
        if any(self._arrays.get(id(base)) is not None for base in _bases(tensor._data)):
            self.breaks("it uses a view of a tensor that no row has made")
        self._keep_gradient(tensor)
        value = self._know(tensor, ValueKind.CAPTURED, len(self._captured))
        self._captured.append(value)
        self._tensors.append(tensor)
        return value

    def _gradient(self, tensor: TensorCore) -> Value | None:
        """The value of a Tensor that is, detached or not, the ``.grad`` of a captured one, read at this place of every run."""
        grad, owner = self._read.get(id(tensor._data), (tensor, None))
        if owner is None:
            return None
        if gradient_of(owner) is not grad:
            self.breaks("it uses a gradient that has been replaced since it was read")
            return None
        self._gradients[id(grad)] = functools.partial(seen_gradient, owner)
        like = Value(ValueKind.COMPUTED, 0, d.shape, d.dtype, False, d.strides) if isinstance(d := grad._data, np.ndarray) else None
        if like is not None and 0 in like.strides:
            self.breaks("it reads a gradient that repeats its elements in memory")
        self._add(statement_op("grad", functools.partial(_gradient_of, owner, like)), (), (grad,))
        return self._find(tensor)

    def makes_leaf(self, tensor: TensorCore) -> None:
        """Note that the function has made a leaf of a tensor, by `requires_grad_`."""
        known = self._values.get(id(tensor))
        if (known is None or known.kind is ValueKind.COMPUTED) and id(tensor) not in self._created:
            self._new_leaves[id(tensor._node)] = tensor._node
            self._alive.append(tensor)
            self._leaves.add(id(tensor._node))

    def _leaf(self, value: Value | None, tensor: TensorCore) -> Value | None:
        """The value of a leaf that every run makes of the array of another value."""
        if value is None:
            self.breaks("it makes a leaf of a tensor that is no argument and that no row has made")
            return None
        repeated = RepeatedCall(_leaf_of, (ArgumentPlace(0),), {}, _leaf_of)
        self.has_called = True
        (made,) = self._made((tensor,))
        statement = Statement(CalledOp("requires_grad_", repeated, is_awaited=False), (value,), {}, None, (made,), None, *self.watcher.line())
        of_input = [each for each in self._statements if each.op.name == statement.op.name and each.arrays[0] in self._inputs]
        self._statements.insert(len(of_input) if value in self._inputs else len(self._statements), statement)
        return made

    def _detached(self, value: Value, tensor: TensorCore) -> Value:
        """The same array under another Tensor, which has no place in the graph."""
        detached = Value(value.kind, value.index, value.shape, value.dtype, False, value.strides, value.device)
        if not any([known._x is not None for known in self._sharing.get(id(tensor._data), ())]):  # else it is another value when the view is
            self._values[id(tensor)] = detached
        self._sharing.setdefault(id(tensor._data), []).append(tensor)
        self._alive.append(tensor)
        return detached

    def _static(self, array: Any) -> Any:
        """An array among the static arguments; the Value of it where it is a known tensor's."""
        self._renew(array)
        known = self._arrays.get(id(array))
        if known is None or not known.records:
            return array if known is None else known
        return Value(known.kind, known.index, known.shape, known.dtype, False, known.strides, known.device)


def _is_plain(value: Any) -> bool:
    """True for an argument of a row that has no code of the user."""
    cls = type(value)
    if cls in _PLAIN or cls is TENSOR_CLASS[0]:
        return True
    if cls is np.ndarray:
        return value.dtype.kind in "fciub"
    if cls is tuple or cls is list:
        return all(map(_is_plain, value))
    if cls is slice:
        return _is_plain(value.start) and _is_plain(value.stop) and _is_plain(value.step)
    return isinstance(value, TensorCore) and cls.__module__.startswith("aiograd.")


def _at(where: Any) -> str:
    line = described(where)
    return "" if line is None else f": {quoted(*line)}"


def array_of(grad: Any) -> Any:
    """The array of a gradient; None if there is none."""
    return grad._data if isinstance(grad, TensorCore) else grad


def _leaf_of(tensor: TensorCore) -> Any:
    return tensor.detach().requires_grad_()


def _gradient_of(tensor: TensorCore, like: Value | None) -> Any:
    """The array of a Tensor's gradient; on the host laid out like a value, see Note [Layouts of gradients] in `aiograd.compiler.steps`.

    Raises:
        TraceError: there is none, or it has another shape or dtype.
    """
    grad = gradient_of(tensor)
    if grad is None:
        raise TraceError(f"a compiled function reads the gradient of a tensor of shape {list(tensor.shape)}, which had one while it was recorded")
    return array_of(grad) if like is None else laid_out(array_of(grad), like)


def _bases(array: Any) -> list[Any]:
    found: list[Any] = []
    while (base := getattr(array, "base", None)) is not None:
        found.append(base)
        array = base
    return found
