"""TorchNode: the node of one call of a wrapped module.

Note [Where it runs]
    The cost of a torch module does not follow from its shapes. But its forward has run when the node is made, and backward takes about twice as long.
    Where that is more than the loop should wait, the node runs on the executor, where torch lets go of the interpreter's lock, as one of user code.
    A small one is run as rows are, by the short paths of a pass.

Note [Gradients are given away]
    Gradients that torch has made belong to the node alone, and the engine may take them over instead of copying them. Gradients that are the memory
    of something else (a gradient that passes through, one for two sources, an expanded one) are copied here.

Note [Higher orders]
    With ``create_graph`` torch records the computation of the gradients, from the same sources and the gradients that came. That is the graph of
    another `TorchNode`; its edges are the edges of this one and of the gradients that came.

Note [Recomputed]
    Under saved-tensor hooks, a checkpoint's among them, the node saves the inputs. Torch's graph is dropped, and backward calls the
    module once more: with the same random numbers, and buffers are left as they are. A parameter that has been written to since is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiograd.engine.placement import INLINE_NS
from aiograd.errors import ModifiedError
from aiograd.graph.current import CURRENT
from aiograd.graph.input_metadata import InputMetadata
from aiograd.graph.node import Node, _next_sequence
from aiograd.graph.released import ReleasedVariables
from aiograd.graph.saved import Packed
from aiograd.interop.extras import from_extra
from aiograd.interop.torch.conversion import array_over, over_array, tensor_over
from aiograd.interop.torch.graph import TorchGraph
from aiograd.interop.torch.halves import WeightHalf
from aiograd.running.devices import device_name_of
from aiograd.running.modes import Mode, current_mode
from aiograd.tensors.attach import note

if TYPE_CHECKING:
    import torch
else:
    torch = from_extra("torch", "torch")


class Recomputed:
    """A call that is made again in backward. See Note [Recomputed].

    Args:
        call: takes the unpacked inputs and returns the call's `TorchGraph`.
        parameters: torch parameters.
    """

    __slots__ = ("call", "versions")

    def __init__(self, call: Callable[[Sequence[Any]], TorchGraph], parameters: Sequence[Any]) -> None:
        self.call = call
        self.versions = [(parameter, parameter._version) for parameter in parameters]

    def graph(self, values: Sequence[Any], name: str) -> TorchGraph:
        """Call the module again.

        Raises:
            ModifiedError: a parameter has changed since.
        """
        for parameter, version in self.versions:
            if parameter._version != version:
                raise ModifiedError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: a parameter of shape "
                    f"{list(parameter.shape)}, with which {name} would be computed again, is at version {parameter._version}; expected version "
                    f"{version} instead. Step optimizers after all passes."
                )
        return self.call(values)


class TorchNode(Node):
    """The backward node of one call of a torch module.

    Args:
        edges: where the gradients of the sources go: pairs of node and input number.
        graph: torch's graph of the call.
        metadata: shape, dtype and device of each output that requires grad.
        line: file and line of the call.
        elapsed_ns: nanoseconds that the forward took.
    """

    __slots__ = ("metadata_list", "device", "forward_line", "_graph", "_packed", "_left", "_weight_half", "_cost")

    holds_data = True
    is_async = False
    is_traceable = True
    divides_itself = True
    wants_executor = True
    num_inputs = property(lambda self: len(self.metadata_list))

    def __init__(
        self, edges: Sequence[tuple[Node, int]], graph: TorchGraph, metadata: tuple[InputMetadata, ...], line: str | None, elapsed_ns: int
    ) -> None:
        self.next_nodes, self.next_nrs = zip(*edges, strict=True)
        self._seq = _next_sequence()
        self._extra = None
        self.metadata_list = metadata
        self.forward_line = line
        self.device = metadata[0].device
        self._graph: TorchGraph | Recomputed | ReleasedVariables = graph
        self._packed: Any = ()
        #: numbers of the edges that the next run leaves to a weight half
        self._left: tuple[int, ...] = ()
        #: the gradients that the node was given then, and the work that is left
        self._weight_half: tuple[Sequence[Any], WeightHalf] | None = None
        self._cost = elapsed_ns.bit_length()

    @property
    def name(self) -> str:
        return "TorchBackward"

    @property
    def input_metadata(self) -> tuple[InputMetadata | None, ...]:
        return self.metadata_list

    def metadata_of(self, input_nr: int) -> InputMetadata | None:
        return self.metadata_list[input_nr]

    # ---------------------------------------------------------------- saved values

    @property
    def _saved(self) -> Any:
        """The inputs, where saved-tensor hooks have packed them; set to a `ReleasedVariables` by a pass that is done with the node."""
        return self._packed

    @_saved.setter
    def _saved(self, released: ReleasedVariables) -> None:
        self.release_variables(released)

    def recompute(self, call: Recomputed, packed: tuple[Any, ...]) -> None:
        """Keep the inputs in the place of torch's graph.

        Args:
            call: makes the graph again.
            packed: the inputs, as saved-tensor hooks have packed them.
        """
        self._graph, self._packed = call, Packed(packed)
        _ = self.extra  # a walk unpacks nothing, and passes by nodes that have an extra

    def release_variables(self, released: ReleasedVariables | None = None) -> None:
        if not isinstance(self._graph, ReleasedVariables):
            self._graph = released or ReleasedVariables()
            self._weight_half = None
            self._packed = ()

    # ---------------------------------------------------------------- running

    def leave(self, outputs: tuple[int, ...]) -> None:
        """Leave the gradients of some edges to a weight half when the node runs next; see `aiograd.engine.split_backward`.

        Args:
            outputs: numbers of the edges.
        """
        self._left = outputs

    def apply(self, grads: Sequence[Any], values: tuple[Any, ...] | None = None) -> Any:
        """Gradients of the inputs and parameters.

        Args:
            grads: one for each output that requires grad, None where none arrived.
            values: unpacked inputs, where saved-tensor hooks have packed them.

        Returns:
            Arrays, or Tensors where the pass records a graph.

        Raises:
            GraphFreedError: an earlier pass has released the graph. ModifiedError: something that torch has saved was modified in place.
        """
        current = CURRENT.get()
        task = None if current is None else current.task
        needs = None if task is None else [task.should_compute(self, i) for i in range(len(self.next_nodes))]
        return self._run(grads, needs, values, keep=task is None or task.keep_graph, create_graph=task is not None and task.create_graph)

    def _run(
        self,
        grads: Sequence[Any],
        needs: Sequence[bool] | None = None,
        values: tuple[Any, ...] | None = None,
        *,
        keep: bool,
        create_graph: bool = False,
    ) -> Sequence[Any]:
        """One gradient for each edge, None where there is no need of it (`needs`; None: of all)."""
        graph = self._graph
        if isinstance(graph, ReleasedVariables):
            raise graph.error(self.name)
        count = len(self.next_nodes)
        wanted: Sequence[int] = range(count) if needs is None else [i for i, need in enumerate(needs) if need]
        left, self._left = [i for i in self._left if i not in wanted], ()
        half = self._weight_half
        if half is not None and _are_same(half[0], grads):
            if not keep:
                self._weight_half = None
            return _placed(wanted, given_away(half[1].run(wanted, keep=keep), half[1].tensors if keep else []), count)
        if isinstance(graph, Recomputed):
            graph = graph.graph(values or (), self.name)
        if create_graph:
            return self._recorded(graph, grads, wanted)
        given = [None if grad is None else over_array(grad) for grad in grads]
        if left and wanted:
            results, rest = WeightHalf.divide(graph, given, wanted, left, keep=keep)
            self._weight_half = (tuple(grads), rest)
            given += rest.tensors
        else:
            results = graph.gradients(given, wanted, keep=keep)
        return _placed(wanted, given_away(results, given), count)

    def _recorded(self, graph: TorchGraph, grads: Sequence[Any], wanted: Sequence[int]) -> Sequence[Any]:
        """The gradients as Tensors of a node of their own. See Note [Higher orders]."""
        sources, given = [*graph.sources], []
        edges: list[tuple[Any, int]] = [*zip(self.next_nodes, self.next_nrs, strict=True)]
        for grad in grads:
            each = None if grad is None else over_array(grad._data)
            if each is not None and grad._node is not None:
                each.requires_grad_()
                sources.append(each)
                edges.append((grad._node, grad._nr))
            given.append(each)
        results = graph.gradients(given, wanted, keep=True, create_graph=True)
        again = graph.with_sources(sources)
        return _placed(wanted, recorded(results, again, edges, current_mode(), self.forward_line, 1 << self._cost), len(self.next_nodes))


class SmallTorchNode(TorchNode):
    """The node of a call that took so little time that its backward may run on the loop, as rows do. See Note [Where it runs]."""

    __slots__ = ("keeps_graph",)

    is_builtin = is_program = is_divisible = heeds_keeping = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keeps_graph = True

    def vjp(self, g: Sequence[Any]) -> Sequence[Any]:
        """Gradients of all edges."""
        return self._run(g, keep=self.keeps_graph)

    def vjp_part(self, g: Sequence[Any], needs: tuple[bool, ...]) -> Sequence[Any]:
        """Gradients of the edges with `needs`."""
        return self._run(g, needs, keep=self.keeps_graph)

    def apply(self, grads: Sequence[Any], values: tuple[Any, ...] | None = None) -> Any:
        """As `vjp`."""
        return self._run(grads, None, values, keep=self.keeps_graph)

    def compute(self, grads: Sequence[Any], needs: tuple[bool, ...], values: tuple[Any, ...] | None, create_graph: bool) -> Sequence[Any]:
        """As `vjp_part`, with unpacked inputs; with `create_graph` on Tensors."""
        return self._run(grads, needs, values, keep=self.keeps_graph, create_graph=create_graph)

    def expand(self) -> None:
        """Nothing: it stands for no rows of aiograd."""

    def open_at(self, input_nr: int) -> None:
        """Nothing, likewise."""

    def cost_key(self) -> Any:
        """The key of the estimate: the order of magnitude of the forward's time."""
        return "torch", self._cost

    def estimate(self) -> float:
        """Estimated nanoseconds of one run."""
        return float(backward_ns(1 << self._cost))


def backward_ns(elapsed_ns: int) -> int:
    """Estimated nanoseconds of the backward of a call that took so many."""
    return 20_000 + 2 * elapsed_ns


def recorded(results: Sequence[Any], graph: TorchGraph, edges: Sequence[tuple[Any, int]], mode: Mode, line: str | None, elapsed_ns: int) -> list[Any]:
    """Tensors over torch tensors (None stays None), with a node for each that requires grad.

    Args:
        results: torch tensors.
        graph: gets the ones that require grad as its outputs.
        edges: where the gradients of the graph's sources go.
        mode: the caller's.
        line: file and line of the call.
        elapsed_ns: nanoseconds that the forward took.
    """
    tensors: list[Any] = [None if result is None else tensor_over(result.detach()) for result in results]
    carriers = [i for i, result in enumerate(results) if result is not None and result.requires_grad]
    if carriers:
        graph.outputs = [results[i] for i in carriers]
        arrays = [tensors[i]._data for i in carriers]
        metadata = tuple([InputMetadata(array.shape, array.dtype, device_name_of(array)) for array in arrays])
        is_small = backward_ns(elapsed_ns) < INLINE_NS and metadata[0].device == "cpu"
        node = (SmallTorchNode if is_small else TorchNode)(edges, graph, metadata, line, elapsed_ns)
        for nr, i in enumerate(carriers):
            tensors[i]._node, tensors[i]._nr = node, nr
        if not mode.plain:
            note(node, mode)
    return tensors


def given_away(results: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Arrays of gradients (None stays None), each the only one over its memory. See Note [Gradients are given away]."""
    taken = {each.untyped_storage().data_ptr() for each in given if each is not None}
    return [None if result is None else _given_away(result, taken) for result in results]


def _given_away(result: Any, taken: set[int]) -> Any:
    if result.layout is not torch.strided:
        result = result.to_dense()
    storage = result.untyped_storage()
    if storage.data_ptr() in taken or storage.nbytes() != result.nbytes:
        result = result.clone(memory_format=torch.contiguous_format)
        storage = result.untyped_storage()
    taken.add(storage.data_ptr())
    array = array_over(result)
    is_shared = getattr(array, "base", None) is result
    if is_shared:
        result.__aiograd_gives__ = True
    return array


def _placed(wanted: Sequence[int], results: Sequence[Any], count: int) -> Sequence[Any]:
    """One entry for each edge, None where nothing is wanted."""
    if len(results) == count:
        return results
    outputs: list[Any] = [None] * count
    for i, result in zip(wanted, results, strict=True):
        outputs[i] = result
    return outputs


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(some, others, strict=True))
