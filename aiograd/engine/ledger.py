"""Ledger: the dependencies, input buffers and ready nodes of a running pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from aiograd.engine.input_buffer import InputBuffer, Key
from aiograd.engine.plan import DISCOVER_STRIDE, BackwardPlan
from aiograd.engine.ready_queue import ReadyQueue
from aiograd.engine.renumbering import RecordedNodes
from aiograd.errors import GraphError
from aiograd.graph.node import Node
from aiograd.running.types import Array

#: more than the edges that a node has
_EDGES = 1 << 32


class Ledger:
    """Dependencies, input buffers and ready nodes of one pass that is not walked.

    Args:
        plan: the plan of the pass.
        place_of: key by which contributions are ordered in sums; None: descending sequence number.
        recorded: with `create_graph`, is told the node at which gradients are being summed; else None.
        sources: nodes that get their gradients from other workers.
    """

    __slots__ = ("outstanding", "completed_nodes", "folds", "waiting", "_plan", "_place_of", "_recorded", "_early", "_ready", "_buffers")

    def __init__(
        self, plan: BackwardPlan, place_of: Callable[[Node], Any] | None = None, recorded: RecordedNodes | None = None, sources: Iterable[Node] = ()
    ) -> None:
        #: nodes that are ready or running
        self.outstanding: int = 0
        #: the number of nodes that have run
        self.completed_nodes: int = 0
        #: large sums to be computed on the executor
        self.folds: deque[tuple[Node, InputBuffer]] = deque()
        #: nodes that still wait for gradients from other workers
        self.waiting: dict[Node, None] = dict.fromkeys(sources)
        self._plan = plan
        self._place_of = place_of
        self._recorded = recorded
        #: gradients that other workers sent before the pass began; None once it has begun
        self._early: list[tuple[Node, list[Any]]] | None = []
        self._ready = ReadyQueue()
        self._buffers: dict[Node, InputBuffer] = {}

    # ---------------------------------------------------------------- ready

    def begin(self) -> None:
        """Make the root ready."""
        plan = self._plan
        if plan.runs(plan.root) or plan.root in plan.captures.at:
            self._push(plan.root, plan.root_grads)
        early, self._early = self._early, None
        for source, grads in early or ():
            self.deliver(source, grads)

    def resume(self, sums: dict[Node, Any], last: float) -> Iterator[None]:
        """Go on where a walk has ended; yields now and then. The plan has been discovered.

        Args:
            sums: the gradients that have arrived at nodes that have not run.
            last: the sequence number of the last node that has run; all above it have.
        """
        dependencies, expected = self._plan.dependencies, self._plan.expected
        arrived: dict[Node, int] = {}
        #: when the last of its gradients arrived: below 0, in the order of edges, as nodes have run in descending order
        latest: dict[Node, int] = {}
        for visited, node in enumerate(dependencies, 1):
            if not visited % DISCOVER_STRIDE:
                yield
            if not node.is_leaf and node._seq >= last:
                self.completed_nodes += 1
                for index, child in enumerate(node.next_nodes):
                    if child in dependencies and (child.is_leaf or child._seq < last):
                        arrived[child] = arrived.get(child, 0) + 1
                        latest[child] = max(latest.get(child, -(1 << 128)), index - int(node._seq * _EDGES))
        for visited, (node, count) in enumerate(arrived.items(), 1):
            if not visited % DISCOVER_STRIDE:
                yield
            found = sums.pop(node, None)
            grads = [found] if node.is_single else [None] * node.num_inputs if found is None else found
            dependencies[node] = left = dependencies[node] - count
            if left:
                buffer = self._buffers[node] = InputBuffer(node.num_inputs, expected[node])
                buffer.sums, buffer.position = grads, count
            else:
                del found
                self._push(node, grads, latest[node])

    def _push(self, node: Node, grads: list[Any], arrival: int | None = None) -> None:
        self.outstanding += 1
        self._ready.push(node, grads, arrival)

    def has_ready(self) -> bool:
        """True if a node is ready for `pop`."""
        return bool(self._ready)

    def pop(self) -> tuple[Node, list[Any]]:
        """The most urgent ready node and the gradients of its inputs."""
        return self._ready.pop()

    def first(self) -> tuple[Node, list[Any], bool]:
        """As `pop`, without removing the node; and True if no other is ready."""
        return *self._ready.first(), len(self._ready) == 1

    def clear(self) -> None:
        """Drop all ready nodes and all gradients that have arrived."""
        self._ready.clear()
        self._buffers.clear()
        self.folds.clear()

    # ---------------------------------------------------------------- arriving gradients

    def deliver(self, source: Node, grads: list[Any]) -> None:
        """Take the gradients of one of the nodes in `waiting`, which have come from another worker."""
        if self._early is not None:
            self._early.append((source, grads))
            return
        del self.waiting[source]
        dependencies = self._plan.dependencies
        if source in dependencies:  # not one that leads to nothing that is wanted
            dependencies[source] -= 1
            self._push(source, grads)

    def complete(self, node: Node, outputs: Sequence[Array | None]) -> None:
        """Take the fitted gradients that a node returned, one per edge, and make the nodes ready that waited for nothing else."""
        self.completed_nodes += 1
        plan = self._plan
        if plan.exec_info is None or node in plan.exec_info:
            dependencies = plan.dependencies
            place = -node._seq if self._place_of is None else self._place_of(node)
            keys = plan.root_keys if node is plan.root else None
            for index, child in plan.edges_of(node):
                if child is None:
                    continue
                left = dependencies.get(child)
                if left is None:
                    if plan.exec_info is None:
                        raise GraphError(f"dependency not found for {child.name}: an edge of {node.name} was added while the pass was running")
                    continue
                self._arrive(child, node.next_nrs[index], outputs[index], (place, index) if keys is None else keys[index], left)
        self.outstanding -= 1

    def _arrive(self, child: Node, nr: int, grad: Array | None, key: Key, left: int) -> None:
        buffer = self._buffers.get(child)
        if self._recorded is not None:
            self._recorded.running = child
        if buffer is None:
            expected = self._plan.expected.get(child)
            if expected is None:
                grads: list[Any] = [None] * child.num_inputs
                grads[nr] = grad
                self._plan.dependencies[child] = 0
                self._push(child, grads)
                return
            buffer = self._buffers[child] = InputBuffer(child.num_inputs, expected)
        if buffer.add(key, nr, grad):
            buffer.folding = True
            self.folds.append((child, buffer))
            self.outstanding += 1
            left += 1
        self._count(child, left - 1, buffer)

    def _count(self, child: Node, left: int, buffer: InputBuffer) -> None:
        self._plan.dependencies[child] = left
        if left == 0:
            del self._buffers[child]
            self._push(child, buffer.take())

    def fold_done(self, child: Node, buffer: InputBuffer) -> None:
        """Report that a large sum, taken from `folds`, has been computed."""
        if buffer.unfolded:
            self.folds.append((child, buffer))
            return
        buffer.folding = False
        self._count(child, self._plan.dependencies[child] - 1, buffer)
        self.outstanding -= 1

    def check_complete(self) -> None:
        """Raise if some nodes still wait for gradients although no node is outstanding."""
        if self._buffers and self._plan.exec_info is None:
            names = ", ".join(sorted({node.name for node in self._buffers})[:5])
            raise GraphError(f"could not compute gradients for some functions: {names} still wait for gradients that never came")
