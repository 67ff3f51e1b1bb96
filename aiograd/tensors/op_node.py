"""OpNode: the backward node of a row.

One class per row and combination of arguments that need a gradient, made on first use from `aiograd.tensors.codegen`. `OpNode` itself is
the lean case, one real host array out; `GeneralOpNode` covers several outputs, devices and complex numbers.

Note [The saved tuple]
    ``_saved`` is a tuple in the layout of `CompiledRow` (Tensors, output array and its version counter, facts, residuals), a `Packed` while
    saved-tensor hooks were active, or a `ReleasedVariables` once the values are gone. Nodes that save nothing keep the empty tuple and can run again.

Note [Versions]
    Tensors share a list ``[n]`` with their views that counts in-place modifications, made on the first modification or view.
    ``_version`` is 0 if every saved Tensor was unmodified when it was saved (nearly always), else the tuple of their versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from aiograd.engine.placement import CHEAP_NS_PER_ELEMENT
from aiograd.errors import ArgumentTypeError, GraphError
from aiograd.graph.boundary import BOUNDARY
from aiograd.graph.input_metadata import InputMetadata
from aiograd.graph.node import Node
from aiograd.graph.released import ReleasedVariables
from aiograd.kernels.selection import THRESHOLD, selected
from aiograd.ops.op import Fused, Op
from aiograd.running.types import Array, Shape
from aiograd.tensors.codegen import CompiledRow, compile_make, compile_part, compile_recorded, compile_row
from aiograd.tensors.modified import belongs_to_leaf, modified_error, versions_of


class OpNode(Node):
    """A row's backward for one real output on the host."""

    __slots__ = ("_saved", "_version", "shape", "dtype")

    is_builtin = True
    is_single = True
    is_traceable = True
    num_inputs = 1
    row: ClassVar[CompiledRow]
    #: makes a node for one call of the row; see `compile_make`
    make: ClassVar[Callable[..., Any]]
    #: compiled code for some of the outputs only, by the tuple of wanted outputs; made on first use
    parts: ClassVar[dict[tuple[bool, ...], Callable[[Any, Any], tuple[Any, ...]]]]
    #: compiled code of the plain rules on Tensors, by the tuple of wanted outputs; made on first use
    recorded: ClassVar[dict[tuple[bool, ...], Callable[[Any, Any], tuple[Any, ...]]]]
    #: True if every rule computes one output, so that two outputs can be computed one after the other without double work
    is_divisible: ClassVar[bool]
    #: the kernels that the forward ran with; None: the row's plain rules
    fused: ClassVar[Fused | None] = None
    #: True if the cost depends on more than the largest shape
    costly: ClassVar[bool] = False
    #: True if the output is the largest of the arrays and the cost depends on its size alone
    is_elementwise: ClassVar[bool] = False
    device = "cpu"

    _saved: Any
    _version: Any
    shape: Shape
    dtype: np.dtype[Any]

    __init__ = object.__init__  # the compiled `make` sets everything

    def vjp(self, g: Any) -> tuple[Any, ...]:
        """Gradients of the array arguments from the gradient of the output (replaced by compiled code in every subclass)."""
        raise NotImplementedError

    def apply(self, grads: Sequence[Array | None]) -> Sequence[Array | None]:
        return self.vjp(grads[0])

    def vjp_part(self, g: Any, needs: tuple[bool, ...]) -> Sequence[Any]:
        """Run `vjp` for only the arguments with True in `needs`; None for the others."""
        part = self.parts.get(needs)
        if part is None:
            part = self.parts[needs] = compile_part(self.row, needs)
        return part(self, g)

    # ---------------------------------------------------------------- the general way

    def compute(self, grads: Sequence[Any], needs: tuple[bool, ...], values: tuple[Any, ...] | None, create_graph: bool) -> Sequence[Any]:
        """Run the rules for only the edges in `needs`, on unpacked `values` or recording a graph.

        Args:
            grads: gradient per input; Tensors with `create_graph`.
            needs: per edge, True if its gradient is wanted.
            values: unpacked values in the layout of the saved tuple; None: use the saved tuple.
            create_graph: run the rules for Tensors.
        """
        if values is None:
            return self._recorded_part(grads, needs) if create_graph else self.vjp_part(grads[0], needs)
        row = self.row
        names = self._environment(values, create_graph)
        plan = row.plain if create_graph else row.fast
        arrays = (row.op.variadic,) if row.op.variadic else row.op.arrays
        wanted = {arrays[0]} if row.op.variadic and any(needs) else {name for name, need in zip(arrays, needs, strict=False) if need}
        g = self._output_gradient(grads)
        results: dict[str, Any] = {}
        for arguments, rule, rule_names in plan:
            if not wanted & set(arguments):
                continue
            names["needs"] = tuple(argument in wanted for argument in arguments)
            result = rule(g, *[names[name] for name in rule_names])
            if len(arguments) == 1:
                results[arguments[0]] = result
            else:
                results.update(zip(arguments, result, strict=True))
        if row.op.variadic:
            every = results.get(row.op.variadic, (None,) * len(needs))
            return [grad if need else None for grad, need in zip(every, needs, strict=True)]
        return [results.get(name) if need else None for name, need in zip(arrays, needs, strict=True)]

    def _recorded_part(self, grads: Sequence[Any], needs: tuple[bool, ...]) -> Sequence[Any]:
        """Run the rules for Tensors on the saved ones, so that they are recorded."""
        recorded = self.recorded.get(needs)
        if recorded is None:
            recorded = self.recorded[needs] = compile_recorded(self.row, needs)
        return recorded(self, grads[0] if self.row.op.outputs == 1 else grads)

    def _output_gradient(self, grads: Sequence[Any]) -> Any:
        return grads[0]

    def _environment(self, values: tuple[Any, ...], create_graph: bool) -> dict[str, Any]:
        """Saved names with their values: Tensors with `create_graph`, else arrays."""
        row = self.row
        names = dict(zip(row.layout, values, strict=True))
        for name in row.values:
            value = names[name]
            if not create_graph:
                names[name] = tuple(map(_data_of, value)) if row.op.variadic else _data_of(value)
            elif value is not None:
                if row.op.variadic:
                    names[name] = tuple([self._as_argument(part, i) for i, part in enumerate(value)])
                else:
                    names[name] = self._as_argument(value, row.op.arrays.index(name))
        if row.saves_output:
            out = names["out"]
            if create_graph:
                names["out"] = tuple(self._as_output(o, i) for i, o in enumerate(out)) if isinstance(out, tuple) else self._as_output(out, 0)
            else:
                names["out"] = tuple(map(_data_of, out)) if isinstance(out, tuple) else _data_of(out)
        for name in row.residuals:
            value = names[name]
            names[name] = tuple(map(_data_of, value)) if isinstance(value, tuple) else _data_of(value)
        return names

    def _as_argument(self, value: Any, i: int) -> Any:
        """An unpacked value as a Tensor with the gradient edge of argument `i`: hooks return values outside of the graph."""
        tensor = BOUNDARY.wrap(_data_of(value))
        tensor._node = self.next_nodes[i]
        tensor._nr = self.next_nrs[i]
        return tensor

    def _as_output(self, value: Any, nr: int) -> Any:
        """The saved output as a Tensor with this node as its `grad_fn`."""
        tensor = BOUNDARY.wrap(_data_of(value))
        tensor._node = self
        tensor._nr = nr
        return tensor

    def shares_work(self, some: Sequence[int], others: Sequence[int]) -> bool:
        """True if one rule computes outputs of both groups at once, so that two runs would do part of the work twice."""
        if self.is_divisible:
            return False
        op = self.row.op
        if op.variadic:
            return True
        firsts = {op.arrays[i] for i in some}
        seconds = {op.arrays[i] for i in others}
        return any(firsts.intersection(arguments) and seconds.intersection(arguments) for arguments, _, _ in self.row.fast)

    # ---------------------------------------------------------------- saved values

    def cannot_run(self) -> Exception:
        """The error for a node with saved values that are packed or released."""
        if isinstance(self._saved, ReleasedVariables):
            return self._saved.error(self.name)
        return GraphError(f"{self.name} saved packed values; only the engine can run it: use backward() or grad()")

    def check_versions(self) -> None:
        """Raise if a saved value has been modified in place since it was saved.

        Raises:
            ModifiedError
        """
        row, saved = self.row, self._saved
        position = len(row.values)
        found = versions_of(saved[:position])
        if found == self._version and not row.saves_output:
            return
        expected = self._version or (0,) * position
        found = found or (0,) * position
        named = list(zip(row.values, found, expected, strict=True))
        if row.saves_output:
            counters = saved[position + 1]
            named.append(("out", counters[0] if row.op.outputs == 1 else max(counter[0] for counter in counters), 0))
        for name, have, want in named:
            if have != want:
                value = saved[row.layout.index(name)]
                what = f"{name} of {row.op.name} (saved for {self.name})"
                raise modified_error(what, getattr(value, "shape", ()), have, want, belongs_to_leaf(value))

    def release_variables(self, released: ReleasedVariables | None = None) -> None:
        """Drop the saved values. A node that has saved only shapes and the like keeps them and can run again, unless a pass has failed."""
        if self._saved and (self.holds_data or (released is not None and released.reason)):
            self._saved = released or ReleasedVariables()

    # ---------------------------------------------------------------- metadata and cost

    @property
    def input_metadata(self) -> tuple[InputMetadata, ...]:
        return (InputMetadata(self.shape, self.dtype, self.device),)

    def metadata_of(self, input_nr: int) -> InputMetadata:
        return InputMetadata(self.shape, self.dtype, self.device)

    def cost_key(self) -> Any:
        """The key by which the cost estimate is cached: everything that it depends on."""
        if self.is_elementwise:
            return (self.__class__, self.shape)
        key: list[Any] = [self.__class__, self.shape]
        number = 0
        for node in self.next_nodes:
            if node is None:
                key.append(None)
            else:
                key.append(node.shape if node.is_single else node.metadata_of(self.next_nrs[number]))  # type: ignore[attr-defined]
            number += 1
        if self.costly and None in key and self._saved.__class__ is tuple:
            values = self._saved[: len(self.row.values)]
            key.extend([None if value is None else value._data.shape for value in values if value.__class__ is not tuple])
        return tuple(key)

    def estimate(self) -> float:
        """Estimated nanoseconds of one run."""
        shapes = self._input_shapes()
        size = max(map(_size, (self._main_shape(), *shapes)))
        cost, fused = self.row.op.cost, self.fused
        if fused is not None and fused.cost is not None and selected() == "numba" and (callable(fused.cost) or size >= THRESHOLD):
            cost = fused.cost  # a function knows from what work on its kernels are compiled
        if not callable(cost):
            return cost * size
        try:
            return float(cost(self._main_shape(), shapes))
        except (IndexError, ValueError):  # it wants the shape of an argument that is not known
            return float(size)

    def _main_shape(self) -> Shape:
        return self.shape

    def _input_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the array arguments; of an argument without gradient only if its value was saved."""
        shapes: list[Shape] = []
        saved = self._saved if isinstance(self._saved, tuple) else ()
        values = dict(zip(self.row.values, saved, strict=False))
        arrays = self.row.op.arrays
        for i, (node, nr) in enumerate(zip(self.next_nodes, self.next_nrs, strict=True)):
            metadata = None if node is None else node.metadata_of(nr)
            if metadata is not None:
                shapes.append(metadata.shape)
            else:
                shapes.append(getattr(values.get(arrays[i] if i < len(arrays) else ""), "shape", ()))
        return tuple(shapes)


class GeneralOpNode(OpNode):
    """A row's backward for several outputs, device arrays or complex numbers."""

    __slots__ = ("metadata_list", "stream")

    is_single = False
    #: True if the conjugate convention has to be applied around the rules
    conjugates: ClassVar[bool] = False
    spans_devices = True
    compiled: ClassVar[Any]
    metadata_list: tuple[InputMetadata, ...]
    #: the queue (stream) of its device on which it was recorded, where the device has several
    stream: Any

    num_inputs = property(lambda self: len(self.metadata_list))

    def vjp(self, g: Any) -> tuple[Any, ...]:
        """Gradients of the array arguments from the list of gradients of the outputs."""
        if not self.conjugates:
            return self.compiled(g[0] if self.row.op.outputs == 1 else g)  # type: ignore[no-any-return]
        grads = self.compiled(np.conj(g[0]) if self.row.op.outputs == 1 else [None if x is None else np.conj(x) for x in g])
        return tuple(None if grad is None else np.conj(grad) for grad in grads)

    def apply(self, grads: Sequence[Array | None]) -> Sequence[Array | None]:
        return self.vjp(grads)

    def vjp_part(self, g: Any, needs: tuple[bool, ...]) -> Sequence[Any]:
        if not self.conjugates:
            return super().vjp_part(g[0] if self.row.op.outputs == 1 else g, needs)
        grads = super().vjp_part(np.conj(g[0]) if self.row.op.outputs == 1 else [None if x is None else np.conj(x) for x in g], needs)
        return [None if grad is None else np.conj(grad) for grad in grads]

    def compute(self, grads: Sequence[Any], needs: tuple[bool, ...], values: tuple[Any, ...] | None, create_graph: bool) -> Sequence[Any]:
        if values is None and not create_graph:
            return self.vjp_part(grads, needs)
        if not self.conjugates:
            return super().compute(grads, needs, values, create_graph)
        conjugated = [None if grad is None else np.conj(grad) for grad in grads]
        return [None if grad is None else np.conj(grad) for grad in super().compute(conjugated, needs, values, create_graph)]

    def materialize(self, grads: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients with zeros for the outputs that got none."""
        present = next(grad for grad in grads if grad is not None)
        make = np.zeros if present.__class__ is np.ndarray else functools.partial(np.zeros_like, present)  # the first takes a tenth of the time
        return tuple([
            make(shape=metadata.shape, dtype=metadata.dtype) if grad is None else grad
            for grad, metadata in zip(grads, self.metadata_list, strict=True)
        ])

    def _output_gradient(self, grads: Sequence[Any]) -> Any:
        return grads[0] if self.row.op.outputs == 1 else self.materialize(grads)

    @property
    def device(self) -> str:  # type: ignore[override]
        """Name of the device of the first output."""
        return self.metadata_list[0].device

    @property
    def input_metadata(self) -> tuple[InputMetadata, ...]:
        return self.metadata_list

    def metadata_of(self, input_nr: int) -> InputMetadata:
        return self.metadata_list[input_nr]

    def _main_shape(self) -> Shape:
        return max((metadata.shape for metadata in self.metadata_list), key=_size)

    def cost_key(self) -> Any:
        """The key by which the cost estimate is cached; None: the node is not known to be small."""
        if any(metadata.device != "cpu" for metadata in self.metadata_list):
            return None
        edges = zip(self.next_nodes, self.next_nrs, strict=True)
        return (type(self), self.metadata_list, *[None if node is None else node.metadata_of(nr) for node, nr in edges])


def node_class(op: Op, needs: tuple[bool, ...], *, general: bool = False, conjugates: bool = False, fused: Fused | None = None) -> type[OpNode]:
    """The class of `op`'s nodes for gradients of the arguments with True in `needs`; made once.

    Args:
        general: make a `GeneralOpNode`, for several outputs, devices or complex numbers.
        conjugates: apply the conjugate convention around the rules.
        fused: the kernels that the forward ran with; None: the row's plain rules.
    """
    classes = op.recorder
    if classes is None:
        classes = op.recorder = {}
    if op.variadic:
        needs = (True,)
    key = (needs, general, conjugates, id(fused))
    cls: type[OpNode] | None = classes.get(key)
    if cls is None:
        if fused is not None and fused is not op.fused:
            op.check_fused(fused)
        row = compile_row(op, needs, fused)
        namespace: dict[str, Any] = {"__slots__": (), "__module__": __name__, "row": row, "costly": callable(op.cost), "holds_data": row.holds_data}
        namespace["parts"] = {}
        namespace["recorded"] = {}
        namespace["is_divisible"] = not op.variadic and all(len(arguments) == 1 for arguments, _, _ in row.fast)
        namespace["fused"] = fused  # kept alive: its id is in the key
        namespace["is_cheap"] = not general and not callable(op.cost) and op.cost <= CHEAP_NS_PER_ELEMENT
        namespace["is_elementwise"] = namespace["is_cheap"] and isinstance(op.forward, np.ufunc) and op.forward.signature is None
        if general:
            namespace.update(compiled=row.vjp, conjugates=conjugates)
            cls = cast(type[OpNode], type(op.node_name, (GeneralOpNode,), namespace))
        else:
            namespace["vjp"] = row.vjp
            cls = cast(type[OpNode], type(op.node_name, (OpNode,), namespace))
        cls.make = staticmethod(compile_make(row, cls))
        classes[key] = cls
    return cls


def check_complex(op: Op) -> None:
    """Raise for a row with rules for real numbers only.

    Raises:
        ArgumentTypeError
    """
    if op.complex == "real":
        raise ArgumentTypeError(f"{op.name}: its gradient is defined for real numbers only, and an argument that requires grad is complex")


def _data_of(value: Any) -> Any:
    return value if value is None or not BOUNDARY.is_tensor(value) else BOUNDARY.unwrap(value)


def _size(shape: Shape) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
