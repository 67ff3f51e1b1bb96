"""The node of a custom function, and the context of its rules.

Note [One context per run]
    The context of a backward shares the attributes that forward set, and has its own ``needs_input_grad`` and unpacked values: two passes
    over one graph at the same time do not see each other's.

Note [Where a rule runs]
    ``async def backward`` runs on the event loop. ``def backward`` may take any time, so it runs on the executor, with the caller's context,
    unless the class says ``inline = True``.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentTypeError, GraphError
from aiograd.graph.current import CURRENT
from aiograd.graph.input_metadata import InputMetadata
from aiograd.graph.node import Node
from aiograd.graph.released import ReleasedVariables
from aiograd.graph.saved import Packed, PackedValue
from aiograd.running import devices
from aiograd.running.modes import current_mode
from aiograd.tensors.core import TensorCore, counter_of, make, outside
from aiograd.tensors.modified import belongs_to_leaf, modified_error
from aiograd.tensors.saved_hooks import pack_value


class FunctionCtx:
    """Carries values from ``forward`` to ``backward``. Besides the methods below it takes attributes of your own."""

    __slots__ = ("__dict__", "_needs", "_to_save", "_non_differentiable", "_dirty", "_materialize", "_node", "_values", "_task", "_nesting")

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self._needs = needs_input_grad
        self._to_save: tuple[Any, ...] = ()
        self._non_differentiable: tuple[Any, ...] = ()
        self._dirty: tuple[Any, ...] = ()
        self._materialize = True
        self._node: FunctionNode | None = None
        self._values: tuple[Any, ...] | None = None
        #: in backward: the pass, until `needs_input_grad` has been computed; weak, since the pass's error may refer to this context
        self._task: weakref.ref[Any] | None = None
        #: the nesting of the outputs in the result of forward; None: one output, or a plain tuple of outputs
        self._nesting: Any = None

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """Per argument of forward, True if its gradient is wanted; in backward: by the running pass."""
        if self._task is not None:
            task, self._task = self._task(), None
            if task is not None:
                self._needs = tuple([need and task.should_compute(self._node, i) for i, need in enumerate(self._needs)])
        return self._needs

    def save_for_backward(self, *tensors: Any) -> None:
        """Save tensors (or None) for backward; call once, in forward. Inputs, outputs and intermediates alike.

        Saved here rather than as attributes they are checked for modification, freed after backward and seen by saved-tensor hooks.
        """
        for i, tensor in enumerate(tensors):
            if tensor is not None and not isinstance(tensor, TensorCore):
                raise ArgumentTypeError(
                    f"save_for_backward: argument {i} is a {type(tensor).__name__}; expected a Tensor or None. Keep it as an attribute of ctx."
                )
        self._to_save = tensors

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tensors given to `save_for_backward`.

        Raises:
            GraphFreedError: an earlier pass released them. ModifiedError: one was modified in place meanwhile.
        """
        if self._values is not None:
            return self._values
        if self._node is None:
            raise GraphError("saved_tensors is available in backward only")
        return self._node.unpack_saved()

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Declare that these outputs carry no gradient; in backward their gradients are zeros."""
        _check_tensors("mark_non_differentiable", tensors)
        self._non_differentiable = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        """Declare that forward modified these inputs in place; they must be returned."""
        _check_tensors("mark_dirty", tensors)
        self._dirty = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Choose if backward gets zeros (True, the default) or None for outputs without gradient."""
        self._materialize = value

    def for_run(self, node: FunctionNode, values: tuple[Any, ...] | None) -> FunctionCtx:
        """The context for one run of backward."""
        run = object.__new__(type(self))
        run.__dict__ = self.__dict__
        current = CURRENT.get()
        run._needs = self._needs
        run._task = None if current is None else weakref.ref(current.task)
        run._materialize = self._materialize
        run._node = node
        run._values = values
        return run


def _check_tensors(what: str, tensors: tuple[Any, ...]) -> None:
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, TensorCore):
            raise ArgumentTypeError(f"{what}: argument {i} is a {type(tensor).__name__}; expected Tensors, each an argument of its own")


class FunctionNode(Node):
    """The backward node of a custom `Function`."""

    __slots__ = ("function", "context", "metadata_list", "forward_line", "stream", "_saved", "_versions")

    num_inputs = property(lambda self: len(self.metadata_list))

    def __init__(self, function: Any, context: FunctionCtx, tensors: Sequence[Any], line: str) -> None:
        super().__init__([(t._node, t._nr) if isinstance(t, TensorCore) else None for t in tensors])
        self.function = function
        self.context = context
        self.metadata_list: tuple[InputMetadata | None, ...] = ()
        self.forward_line = line
        #: the stream of its device on which it was recorded, where the device has several
        self.stream: Any = None
        self._saved: Any = ()
        self._versions: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.function.__name__}Backward"

    @property
    def input_metadata(self) -> tuple[InputMetadata | None, ...]:
        """Shape, dtype and device of each output of forward, None for one that is no Tensor."""
        return self.metadata_list

    def metadata_of(self, input_nr: int) -> InputMetadata | None:
        """Shape, dtype and device of one output of forward, None for one that is no Tensor."""
        return self.metadata_list[input_nr]

    @property
    def wants_executor(self) -> bool:
        """True if the rule is synchronous and of unknown cost."""
        return not self.function.inline and not inspect.iscoroutinefunction(self.function.rule())

    @property
    def device(self) -> str:
        """Device of the first Tensor that forward returned: a synchronous rule runs on its thread."""
        first = next(filter(None, self.metadata_list), None)
        return "cpu" if first is None or self.is_async else first.device

    @property
    def is_async(self) -> bool:
        """True if the rule is ``async def``."""
        return inspect.iscoroutinefunction(self.function.rule())

    def apply(self, grads: Sequence[Any], values: tuple[Any, ...] | None = None) -> Any:
        """Call the rule with Tensors; returns its result."""
        if isinstance(self._saved, ReleasedVariables):
            raise self._saved.error(self.name)
        if values is not None:
            values = tuple([self._in_graph(value, entry) for value, entry in zip(values, self._saved.values, strict=True)])
        context = self.context.for_run(self, values)
        tensors = [self._as_tensor(grad, i, context._materialize) for i, grad in enumerate(grads)]
        if self.context._nesting is not None:
            tensors = nested(self.context._nesting, tensors)
        return self.function.rule()(context, *tensors)

    def _as_tensor(self, grad: Any, i: int, materialize: bool) -> Any:
        if grad is None:
            metadata = self.metadata_list[i]
            if not materialize or metadata is None:
                return None
            zeros = np.zeros(metadata.shape, metadata.dtype)
            device = devices.device(metadata.device)
            return make(zeros if device is None else device.from_host(zeros))
        return grad if isinstance(grad, TensorCore) else make(grad)

    def _in_graph(self, value: Any, entry: Any) -> Any:
        """An unpacked value as a Tensor with the gradient edge of the one that was packed: hooks return values outside of the graph."""
        if value is None:
            return None
        tensor = make(value._data, shared_with=value)
        node, tensor._nr = entry.place
        tensor._node = self if entry.is_output else node
        return tensor

    def save(self, tensors: Sequence[Any], outputs: Sequence[Any], carriers: set[int]) -> None:
        """Keep the tensors given to `save_for_backward`; outputs of this function are kept without their node, so that no cycle arises.

        Args:
            carriers: the numbers of the outputs that carry gradients.
        """
        hooks = current_mode().saved_hooks
        entries: list[Any] = []
        for tensor in tensors:
            nr = next((i for i, output in enumerate(outputs) if output is tensor), None)
            if tensor is None:
                entries.append(None)
            elif hooks is not None:
                packed = pack_value(tensor if nr is None else outside(tensor), hooks)
                packed.is_output = nr in carriers
                packed.place = (tensor._node, tensor._nr) if nr is None else (None, nr)
                entries.append(packed)
            else:
                entries.append(tensor if nr is None else (tensor._data, nr if nr in carriers else None, counter_of(tensor)))
        self._versions = tuple(tensor.version if tensor is not None else 0 for tensor in tensors)
        self._saved = Packed(tuple(entries)) if hooks is not None and entries else tuple(entries)

    def unpack_saved(self) -> tuple[Any, ...]:
        """The saved tensors, checked."""
        if isinstance(self._saved, ReleasedVariables):
            raise self._saved.error(self.name)
        entries = self._saved.values if isinstance(self._saved, Packed) else self._saved
        values: list[Any] = []
        for entry, expected in zip(entries, self._versions, strict=True):
            if isinstance(entry, PackedValue):
                values.append(entry.hooks.unpack(entry.packed))
                continue
            if entry is None:
                values.append(None)
                continue
            found = entry[2][0] if isinstance(entry, tuple) else entry.version
            if found != expected:
                value = entry[0] if isinstance(entry, tuple) else entry
                raise modified_error(f"a tensor saved by {self.function.__name__}", value.shape, found, expected, belongs_to_leaf(value))
            if isinstance(entry, tuple):
                tensor = make(entry[0])
                tensor._vc = entry[2]
                if entry[1] is not None:
                    tensor._node, tensor._nr = self, entry[1]
                values.append(tensor)
            else:
                values.append(entry)
        return tuple(values)

    def release_variables(self, released: ReleasedVariables | None = None) -> None:
        if self._saved:
            self._saved = released or ReleasedVariables()


class OutputPlaceholder:
    """Placeholder for an output in the nesting of forward's result."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def nested(nesting: Any, grads: list[Any]) -> list[Any]:
    """Gradients as backward gets them: one for each entry of forward's result, None for an entry that is no output."""
    return [_grads_at(entry, grads) for entry in nesting] if isinstance(nesting, tuple) else [_grads_at(nesting, grads)]


def _grads_at(nesting: Any, grads: list[Any]) -> Any:
    if isinstance(nesting, OutputPlaceholder):
        return grads[nesting.number]
    if isinstance(nesting, dict):
        return {key: _grads_at(entry, grads) for key, entry in nesting.items()}
    if isinstance(nesting, (tuple, list)):
        items = [_grads_at(entry, grads) for entry in nesting]
        return tuple(items) if isinstance(nesting, tuple) else items
    return None
