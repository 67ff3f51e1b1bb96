"""Node and Edge: the backward graph.

A Node has inputs (the gradients of what its operation returned) and outputs (the gradients of the operation's arguments). Edge ``(node, input_nr)``
leads from an output to an input of another node; several edges into one input are summed. Edges point from the result of a forward operation
towards the leaves, so a graph stays alive exactly as long as its results do.

Note [Sequence numbers order the graph]
    Every node takes the next number of one process-wide counter when it is made. A forward operation is recorded after the ones that made its
    arguments, so descending sequence numbers are a topological order of the graph; the engine's fast path relies on it. Where edges are added to a
    node later (`add_next_edge`) that order may no longer hold: such a node is marked (`NodeExtra.reordered`) and the engine counts dependencies
    instead. A priority set by hand (`set_sequence_nr`) changes when a node runs, never the order in which gradients are summed.

Note [Why so few slots]
    A node is made for every recorded operation, so its slots hold only what every node needs, and the rest (hooks, metadata dict, anomaly
    record, priority) is in `NodeExtra`, made on first use. ``_extra is None`` also tells the engine that no user code is attached.

Source: PyTorch ``function.h`` (Node, Note [Sequence Number], Note [Topological Number]).
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.graph.edge_edits import EDGE_EDITS
from aiograd.graph.hooks import Hook, HookDict, RemovableHandle
from aiograd.graph.input_metadata import InputMetadata
from aiograd.graph.reducing import LeafReducer
from aiograd.graph.released import ReleasedVariables
from aiograd.graph.running import CURRENT
from aiograd.running.types import Array, Shape

_next_sequence = count(1).__next__

#: sequence number of AccumulateGrad: leaves accumulate as soon as their gradient is complete
LEAF_SEQUENCE = 2**64 - 1


class Edge(NamedTuple):
    """Input `input_nr` of `node`; ``Edge(None, 0)`` leads nowhere.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> edge = (x * 2).grad_fn.next_edge(0)
    >>> type(edge).__name__, edge.node.name, edge.input_nr
    ('Edge', 'AccumulateGrad', 0)
    """

    node: Node | None
    input_nr: int

    def __bool__(self) -> bool:
        return self.node is not None


class NodeExtra:
    """State that few nodes have: hooks, metadata dict, a priority set by hand, a record for anomaly mode, a reducer."""

    __slots__ = ("tensor_hooks", "retain_hooks", "prehooks", "posthooks", "metadata", "priority", "reordered", "anomaly", "recorder", "reducer")

    def __init__(self) -> None:
        #: input number -> hooks on the tensor
        self.tensor_hooks: dict[int, HookDict] = {}
        #: input number -> callable that keeps a copy of the gradient (retain_grad)
        self.retain_hooks: dict[int, Hook] = {}
        self.prehooks: HookDict | None = None
        self.posthooks: HookDict | None = None
        self.metadata: dict[str, Any] | None = None
        self.priority: int | None = None
        self.reordered: bool = False
        #: the forward stack as text, and the node that recorded this one in its backward (double backward)
        self.anomaly: tuple[str, Node | None] | None = None
        #: (thread id, task name) that recorded the node, known in anomaly and profiler mode
        self.recorder: tuple[int, str | None] | None = None
        #: of a leaf: combines its gradients with the gradients of other processes; see `aiograd.graph.reducing`
        self.reducer: LeafReducer | None = None


class Node:
    """A node of the backward graph.

    Subclass it for sinks, sources and functions of your own: define `apply`, which gets one gradient per input (None where none
    arrived) and returns one per edge, or an awaitable of them. Gradients are arrays, and Tensors where the pass records a graph itself
    (``create_graph=True``).

    Args:
        next_edges: one edge per output; ``Edge(None, 0)`` or None where it leads nowhere.
        num_inputs: the number of inputs, i.e. of gradients that arrive.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> node = (x * 2).grad_fn
    >>> node.name, node.num_inputs, len(node.next_edges)
    ('MulBackward', 1, 2)
    """

    __slots__ = ("next_nodes", "next_nrs", "_seq", "_extra", "_topological_nr", "_own_metadata", "__weakref__")

    _topological_nr: int
    next_nodes: tuple[Node | None, ...]
    next_nrs: tuple[int, ...]
    #: of a node that is made later, behind another one, a fraction between two numbers of the counter
    _seq: int
    _extra: NodeExtra | None

    #: True if made from a row: the node has ``vjp(g)`` (``vjp(list)`` with several inputs), ``_saved``, a cost, and runs no user code
    is_builtin = False
    #: True if the node has one input with the metadata in the attributes ``shape`` and ``dtype``
    is_single = False
    #: True for a row with a low cost per element: its shape alone decides if it is small (see `aiograd.engine.placement`)
    is_cheap = False
    is_leaf = False
    #: True for a node of the host that stands for many rows, so that it may well be a whole graph
    is_program = False
    #: True if gradients of some inputs reach some of the edges only: ``edges_from(inputs)`` tells which
    has_paths = False
    #: the node stands for several uses of some of its targets: its gradients depend on the order of the terms in their sums (`run_repeats`)
    has_repeats = False
    #: True if the node sends gradients to another worker (outlet) or receives them from one (inlet)
    is_outlet = False
    is_inlet = False
    #: True if its gradients may live on devices
    spans_devices = False
    #: True if its saved values include array data, which a pass frees unless it keeps the graph
    holds_data = False
    num_inputs: int = 1
    #: True if the engine can compute only the outputs that a pass wants
    is_traceable = False
    #: True if the node is to be told, by ``leave(outputs)``, that its next run is one half of a split backward, to keep what serves the other
    divides_itself = False
    #: True if ``keeps_graph`` is to be set before each run: True if the pass keeps the graph for another
    heeds_keeping = False
    #: True once any node of the process has got edges against the order of sequence numbers (which turns pruning by number off)
    any_reordered: bool = False

    def __init__(self, next_edges: Iterable[Edge | tuple[Node | None, int] | None] = (), *, num_inputs: int = 0) -> None:
        edges = [as_edge(edge) for edge in next_edges]
        self.next_nodes = tuple(edge.node for edge in edges)
        self.next_nrs = tuple(edge.input_nr for edge in edges)
        self._seq = _next_sequence()
        self._extra = None
        self._own_metadata: list[InputMetadata | None] = [None] * num_inputs

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "num_inputs" not in cls.__dict__ and not cls.is_builtin and not cls.is_leaf:
            cls.num_inputs = property(lambda self: len(self._own_metadata))  # type: ignore[assignment]

    def apply(self, grads: Sequence[Array | None]) -> Sequence[Array | None] | Awaitable[Sequence[Array | None]]:
        """Gradients of the outputs from gradients of the inputs; see the class.

        Args:
            grads: one for each input, None where no gradient arrived.

        Returns:
            One for each edge, None where there is none; or an awaitable of them. A cancellation of the pass cancels that.
        """
        raise NotImplementedError(f"{self.name} defines no apply(grads)")

    async def __call__(self, *grads: Array | None) -> Sequence[Array | None]:
        """Run the node alone, without hooks: ``await node(g)``. Cancelling cancels the rule."""
        result = self.apply(grads)
        if isinstance(result, Awaitable):
            result = await result
        return result

    def __repr__(self) -> str:
        return f"<{self.name} #{self._seq}>"

    # ---------------------------------------------------------------- identity and order

    @property
    def name(self) -> str:
        """Name of the operation's backward, such as ``MulBackward``."""
        return type(self).__name__

    @property
    def sequence_nr(self) -> int:
        """Priority among ready nodes: the higher runs first."""
        extra = self._extra
        if extra is not None and extra.priority is not None:
            return extra.priority
        return int(self._seq)

    def set_sequence_nr(self, number: int) -> None:
        """Give the node another priority. The order in which gradients are summed does not change.

        Args:
            number: at least 0; higher numbers run first.

        Raises:
            ArgumentError: no such number.
        """
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ArgumentError(f"set_sequence_nr({number!r}): expected an int of at least 0")
        self.extra.priority = number

    @property
    def topological_nr(self) -> int:
        """0 for a node without edges, else one more than the largest number among the nodes it leads to. Computed on first access."""
        stack: list[Node] = [self]
        while stack:
            node = stack[-1]
            if hasattr(node, "_topological_nr"):
                stack.pop()
                continue
            children = [child for child in node.next_nodes if child is not None]
            waiting = [child for child in children if not hasattr(child, "_topological_nr")]
            if waiting:
                stack.extend(waiting)
            else:
                node._topological_nr = 1 + max((child._topological_nr for child in children), default=-1)
                stack.pop()
        return self._topological_nr

    @property
    def thread_id(self) -> int | None:
        """Identifier of the thread that recorded the node; known where anomaly mode or a profiler was on."""
        return None if self._extra is None or self._extra.recorder is None else self._extra.recorder[0]

    @property
    def task_name(self) -> str | None:
        """Name of the asyncio task that recorded the node; known where anomaly mode or a profiler was on."""
        return None if self._extra is None or self._extra.recorder is None else self._extra.recorder[1]

    @property
    def extra(self) -> NodeExtra:
        """The `NodeExtra` of the node, made on first use."""
        if self._extra is None:
            self._extra = NodeExtra()
        return self._extra

    @property
    def metadata(self) -> dict[str, Any]:
        """A dict for the user's own notes on the node."""
        extra = self.extra
        if extra.metadata is None:
            extra.metadata = {}
        return extra.metadata

    # ---------------------------------------------------------------- edges

    @property
    def num_outputs(self) -> int:
        """The number of edges that leave the node."""
        return len(self.next_nodes)

    @property
    def next_edges(self) -> tuple[Edge, ...]:
        """The edges of all outputs."""
        return tuple(map(Edge, self.next_nodes, self.next_nrs))

    def next_edge(self, i: int) -> Edge:
        """The edge of output `i`.

        Args:
            i: number of the output.

        Returns:
            The edge; its node is None where no gradient is wanted.
        """
        return Edge(self.next_nodes[i], self.next_nrs[i])

    def set_next_edges(self, edges: Iterable[Edge | tuple[Node | None, int] | None]) -> None:
        """Replace all edges.

        Args:
            edges: edges, or pairs of node and input number; None for no edge.
        """
        new = [as_edge(edge) for edge in edges]
        self.next_nodes = tuple(edge.node for edge in new)
        self.next_nrs = tuple(edge.input_nr for edge in new)
        self._edges_changed()

    def set_next_edge(self, i: int, edge: Edge | tuple[Node | None, int] | None) -> None:
        """Replace edge `i`.

        Args:
            i: number of the output.
            edge: the edge, or a pair of node and input number; None for no edge.
        """
        edges: list[Edge | tuple[Node | None, int] | None] = list(self.next_edges)
        edges[i] = edge
        self.set_next_edges(edges)

    def add_next_edge(self, edge: Edge | tuple[Node | None, int] | None) -> None:
        """Append an edge.

        Args:
            edge: the edge, or a pair of node and input number; None for no edge.
        """
        self.set_next_edges((*self.next_edges, edge))

    def _edges_changed(self) -> None:
        EDGE_EDITS.count += 1
        if hasattr(self, "_topological_nr"):
            del self._topological_nr
        number = self._seq
        for child in self.next_nodes:
            if child is not None and child._seq >= number and not child.is_leaf:
                self.extra.reordered = True
                Node.any_reordered = True

    def should_compute_output(self, i: int) -> bool:
        """True if output `i` has an edge to a node.

        Args:
            i: number of the output.

        Returns:
            True or False.
        """
        return self.next_nodes[i] is not None

    def task_should_compute_output(self, i: int) -> bool:
        """True if the running pass wants output `i`; outside of a pass as `should_compute_output`.

        Args:
            i: number of the output.

        Returns:
            True or False.
        """
        current = CURRENT.get()
        return self.should_compute_output(i) if current is None else bool(current.task.should_compute(self, i))

    # ---------------------------------------------------------------- inputs

    @property
    def input_metadata(self) -> tuple[InputMetadata | None, ...]:
        """Shape, dtype and device of each input, None where unknown."""
        return tuple(self._own_metadata)

    def add_input_metadata(self, shape: Shape, dtype: Any, device: str = "cpu") -> int:
        """Add an input that takes gradients of this shape and dtype; returns its number.

        Args:
            shape: shape of the gradient.
            dtype: its dtype.
            device: the device it is on.

        Returns:
            The number of the input.
        """
        self._own_metadata.append(InputMetadata(tuple(shape), np.dtype(dtype), device))
        return len(self._own_metadata) - 1

    def metadata_of(self, input_nr: int) -> InputMetadata | None:
        """`input_metadata` of one input.

        Args:
            input_nr: number of the input.

        Returns:
            An `InputMetadata`, or None where nothing is known of the input.
        """
        return self._own_metadata[input_nr]

    # ---------------------------------------------------------------- hooks and saved values

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(grad_inputs, grad_outputs)`` after the node ran; it returns None or replacements for `grad_inputs` (a tuple).

        `grad_inputs` are the gradients that the node returned, one per edge; `grad_outputs` those it was given. The hook may be ``async def``.

        Args:
            hook: the function.

        Returns:
            A handle that removes it.
        """
        _check_callable(hook, "Node.register_hook")
        if self.extra.posthooks is None:
            self.extra.posthooks = HookDict()
        return self.extra.posthooks.add(hook)

    def register_prehook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(grad_outputs)`` before the node runs; it returns None or a tuple of replacements. May be ``async def``.

        Args:
            hook: the function.

        Returns:
            A handle that removes it.
        """
        _check_callable(hook, "Node.register_prehook")
        if self.extra.prehooks is None:
            self.extra.prehooks = HookDict()
        return self.extra.prehooks.add(hook)

    def place_of(self, input_nr: int) -> tuple[Node | None, int]:
        """The node and input at which all gradients of an input arrive: this one, but for a node that only hands them on.

        Args:
            input_nr: number of the input.

        Returns:
            The node and the number of its input.
        """
        return self, input_nr

    def tensor_hooks(self, input_nr: int) -> HookDict:
        """Hooks on the tensor that has its gradient at this input.

        Args:
            input_nr: number of the input.

        Returns:
            The hooks, in the order in which they run.
        """
        return self.extra.tensor_hooks.setdefault(input_nr, HookDict())

    def release_variables(self, released: ReleasedVariables | None = None) -> None:
        """Drop the values saved for backward; `released` gives the reason in the error of a later use.

        Args:
            released: the reason; None: the graph was used up.
        """


def as_edge(edge: Edge | tuple[Node | None, int] | None) -> Edge:
    """An edge in any of its forms, checked.

    Raises:
        ArgumentTypeError, ArgumentError: the edge does not lead to an input of a node.
    """
    if edge is None:
        return Edge(None, 0)
    node, number = edge
    if node is not None and not isinstance(node, Node):
        raise ArgumentTypeError(f"an edge leads to {type(node).__name__}; expected (Node, input number) or None")
    if node is not None and not node.is_leaf and not 0 <= number < node.num_inputs:
        raise ArgumentError(f"an edge leads to input {number} of {node.name}, which has {node.num_inputs} input(s)")
    return Edge(node, number)


def _check_callable(hook: object, what: str) -> None:
    if not callable(hook):
        raise ArgumentTypeError(f"{what}: expected a callable, found {type(hook).__name__}")
