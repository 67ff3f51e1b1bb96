"""BackwardPlan: the part of a graph that a pass runs, and how; found by discovery, which visits every node once.

`BackwardPlan` itself runs the whole graph. Its subclasses run a part: `aiograd.engine.selection` the nodes that lead to given inputs,
`aiograd.engine.split_backward` one half of a pass and then the other. A GraphTask uses its plan; the plan does not know the GraphTask.

Note [Nodes that run]
    Without `inputs` every node of the graph runs and ``exec_info`` is None. With `inputs` only the nodes on a path to one of them run;
    they are the keys of ``exec_info``. A captured gradient is taken after the hooks on its tensor.

Note [What discovery decides]
    A pass over a whole graph begins with a walk (`aiograd.engine.walk`), which needs no discovery, and is discovered where that has to stop. For a
    part of a graph discovery decides if the pass can be walked (`is_plain`): it has no user code and is small enough; `order` and `special` then
    list the nodes to run and the special ones among them. Else gradients are counted: `dependencies` is the number of gradients that each node
    waits for, and `expected` the order in which gradients of several producers are summed. A walk needs no counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar

from aiograd.engine.captures import Captures
from aiograd.engine.graph_root import GraphRoot
from aiograd.engine.input_buffer import Key
from aiograd.engine.pass_hooks import PassHooks
from aiograd.engine.placement import RulePlacement
from aiograd.engine.reach import unreached
from aiograd.engine.ready_queue import ReadyQueue
from aiograd.engine.staged_commit import StagedCommit
from aiograd.graph.node import Node
from aiograd.graph.programs import PROGRAM_NODES
from aiograd.graph.released import ReleasedVariables
from aiograd.running.types import Array

#: the number of nodes that discovery visits before it yields to the runner
DISCOVER_STRIDE = 512

#: the number of nodes that are sorted in one step; more would block the loop
SORT_NODES = 4096

sequence = attrgetter("_seq")

#: the captures of a plan of the whole graph: none
_NO_CAPTURES = Captures()


class BackwardPlan:
    """The plan that runs every node reachable from the roots.

    Args:
        roots: gradient edges ``(node, input number)`` to start from.
        seeds: their gradients, fitted to them.
    """

    #: True if a pass that reaches values of other workers may go on there
    may_cross: ClassVar[bool] = True

    #: True if gradients accumulate in leaves instead of being returned
    accumulate: bool = True
    #: nodes that run; None: all of them
    exec_info: dict[Node, bool] | None = None
    #: True if a walk can run the pass
    is_plain: bool = False
    #: when a part of the graph is walked: the nodes that run, in the order of the walk; None: all of them
    order: list[Node] | None = None
    #: when a part is walked: nodes with their wanted outputs (None: all), where only some are wanted or gradients are captured before the node runs
    special: Mapping[Node, tuple[bool, ...] | None] = {}
    captures: Captures = _NO_CAPTURES
    #: nodes that keep their saved values although the pass does not keep the graph
    kept: Collection[Node] = ()
    #: nodes that have run in an earlier pass, and their hooks with them
    resumed: Collection[Node] = ()
    #: node -> numbers of the outputs that are left to another pass
    divided: Mapping[Node, tuple[int, ...]] = {}
    #: keys by which the gradients of the root's edges are ordered in sums, where that differs from the order of the edges
    root_keys: Sequence[Key] | None = None
    #: nodes that send gradients to other workers, found by a pass that selects a part of the graph
    crossings: Sequence[Node] = ()
    sources: Collection[Node] = ()
    #: recomputed values of checkpointed regions, by region; see `recomputed`
    _recomputed: dict[int, Any] | None = None
    #: the marker that replaces released values; None: the graph is kept
    released: ReleasedVariables | None = None

    def __init__(self, roots: Sequence[tuple[Node, int]], seeds: Sequence[Array]) -> None:
        self.roots: tuple[tuple[Node, int], ...] = tuple(roots)
        #: node -> number of gradients that it still waits for
        self.dependencies: dict[Node, int] = {}
        #: node with several producers -> keys of all gradients that will arrive at it
        self.expected: dict[Node, list[Key]] = {}
        #: the node that leads to all others, and the gradients of its inputs
        self.root: Node
        self.root_grads: list[Any]
        self.root, self.root_grads = self._start(roots, seeds)

    def _start(self, roots: Sequence[tuple[Node, int]], seeds: Sequence[Array]) -> tuple[Node, list[Any]]:
        """`root` and `root_grads`."""
        if len(roots) != 1:
            return GraphRoot(roots, seeds), []
        ((root, nr),) = roots
        grads: list[Any] = [None] * max(1, root.num_inputs)
        grads[nr] = seeds[0]
        return root, grads

    @property
    def seeds(self) -> list[Array]:
        """The gradients of the roots."""
        return list(self.root.seeds) if isinstance(self.root, GraphRoot) else [self.root_grads[nr] for _, nr in self.roots]

    # ---------------------------------------------------------------- discovery

    def discover(self, placement: RulePlacement, hooks: PassHooks | None, may_walk: bool) -> Iterator[None]:
        """Visit every node once; yields now and then so that the runner can give the loop a turn.

        Args:
            placement: estimates if a node is cheap to run on the loop; asked while the pass may still be walked.
            hooks: hooks of the larger pass that this one is part of.
            may_walk: True if the options of the pass allow a walk.
        """
        is_small, small_shapes, small_leaves = placement.is_small, placement.small_shapes, placement.small_leaves
        root = self.root
        dependencies = self.dependencies
        dependencies[root] = 0
        stack = [root]
        if hooks is not None:
            self.sources = hooks.sources
            for source in hooks.sources:
                dependencies[source] = 1
                stack.append(source)
        visited = 0
        plain = may_walk
        floor = self._sequence_floor(hooks)
        programs, has_paths = bool(PROGRAM_NODES), False
        while stack:
            node = stack.pop()
            if programs and node.has_paths:
                has_paths = True
            visited += 1
            if not visited % DISCOVER_STRIDE:
                yield
            if plain and not (node.is_cheap and node._extra is None and node.shape in small_shapes) and not is_small(node):  # type: ignore[attr-defined]
                plain = False
            if node._seq < floor:
                continue
            for child in node.next_nodes:
                if child is None:
                    continue
                known = dependencies.get(child)
                if known is None:
                    dependencies[child] = 1
                    if child.is_leaf:
                        if child._extra is not None or child.post_accumulate_hooks or child.shape not in small_leaves:  # type: ignore[attr-defined]
                            plain = plain and is_small(child)
                    else:
                        stack.append(child)
                else:
                    dependencies[child] = known + 1
        self.is_plain = plain
        if has_paths:
            yield from self._leave_out(floor)
        yield from self._select(placement, hooks, floor)
        if not self.is_plain:
            yield from self._expect(hooks)

    def _leave_out(self, floor: int) -> Iterator[None]:
        """Leave out the nodes that only rows lead to which this pass does not go through."""
        dependencies = self.dependencies
        gone = yield from unreached(self, floor)
        for node in gone:
            for child in node.next_nodes if node._seq >= floor else ():
                if child in dependencies:
                    dependencies[child] -= 1
        for node in gone:
            del dependencies[node]
        if gone:
            self.exec_info = dict.fromkeys(dependencies, True)

    def ensure_discovered(self) -> None:
        """Discover the graph if that has not been done: a pass that is walked needs no discovery."""
        if not self.dependencies:
            for _ in self.discover(RulePlacement(), None, False):
                pass

    def _sequence_floor(self, hooks: PassHooks | None) -> int:
        """The smallest sequence number that matters; discovery skips nodes below it."""
        return 0

    def _select(self, placement: RulePlacement, hooks: PassHooks | None, floor: int) -> Iterable[None]:
        """Choose the nodes that run among those found. A whole graph that is discovered is not walked."""
        self.is_plain = False
        return ()

    def _expect(self, hooks: PassHooks | None) -> Iterator[None]:
        """Fill `expected` for each node with several producers."""
        dependencies, expected = self.dependencies, self.expected
        place_of = None if hooks is None or hooks.is_local else hooks.place_of
        for visited, node in enumerate(dependencies):
            if not visited % DISCOVER_STRIDE:
                yield
            if not self.runs(node):
                continue
            key = -node._seq if place_of is None else place_of(node)
            for index, child in enumerate(node.next_nodes):
                if child is not None and dependencies.get(child, 0) > 1:
                    expected.setdefault(child, []).append((key, index))
        for keys in expected.values():
            keys.sort()

    def check_used(self) -> None:
        """Raise if a required input is not reachable from the roots."""

    # ---------------------------------------------------------------- nodes that run

    def runs(self, node: Node) -> bool:
        """True if a node of the graph runs."""
        return self.exec_info is None or node in self.exec_info

    def will_run(self, node: Node) -> bool:
        """True if this pass runs the node (for a leaf: accumulates into it)."""
        self.ensure_discovered()
        return node in self.dependencies and self.runs(node)

    def gets_gradient(self, node: Node) -> bool:
        """True if a gradient arrives at the node in this pass, be it run or captured."""
        self.ensure_discovered()
        return node in self.dependencies

    def should_compute(self, node: Node, output: int) -> bool:
        """True if anything in this pass wants output `output` of the node."""
        child = node.next_nodes[output]
        return child is not None and (self.exec_info is None or child in self.exec_info or child in self.captures.at)

    def edges_of(self, node: Node) -> Iterable[tuple[int, Node | None]]:
        """The edges along which this pass sends gradients of the node: number and target of each."""
        return enumerate(node.next_nodes)

    def execution_order(self) -> list[Node]:
        """The nodes that run, in the order of an undisturbed pass."""
        self.ensure_discovered()
        waiting: dict[Node, int] = {}
        for node in self.dependencies:
            if self.runs(node):
                for _, child in self.edges_of(node):
                    if child is not None and child in self.dependencies:
                        waiting[child] = waiting.get(child, 0) + 1
        heap = ReadyQueue()
        heap.push(self.root, [])
        for source in self.sources:
            heap.push(source, [])
        order: list[Node] = []
        while heap:
            node, _ = heap.pop()
            if self.runs(node):
                order.append(node)
                for _, child in self.edges_of(node):
                    if child is not None and child in waiting:
                        waiting[child] -= 1
                        if not waiting[child]:
                            heap.push(child, [])
        return order

    # ---------------------------------------------------------------- while it runs

    def first_sums(self) -> dict[Node, Any]:
        """The gradients that a walk starts from: per node one gradient, or a list where the node has several inputs."""
        root = self.root
        if not (self.runs(root) or root in self.captures.at):
            return {}
        return {root: self.root_grads[0] if root.is_single else self.root_grads}

    def run_part(self, node: Node, grad: Any, staged: StagedCommit) -> Sequence[Array | None]:
        """Run one of the `special` nodes of a walk.

        Args:
            grad: the gradient, or a list of gradients where the node has several inputs.
            staged: receives the gradients that are captured for the commit.

        Returns:
            One gradient per edge, None where it is not wanted.
        """
        if node in self.captures.at:
            self.capture(node, [grad] if node.is_single else grad, staged)
        needs = self.special[node]
        return node.vjp(grad) if needs is None else node.vjp_part(grad, needs)  # type: ignore[attr-defined,no-any-return]

    def run_recorded(self, node: Node, grad: Any, staged: StagedCommit) -> Sequence[Array | None]:
        """Run a node of a walk that records a graph; arguments and result as in `run_part`, the gradients are Tensors."""
        grads = [grad] if node.is_single else grad
        if node in self.captures.at:
            self.capture(node, grads, staged)
        needs = self.special.get(node) or tuple([child is not None for child in node.next_nodes])
        return node.compute(grads, needs, None, True)  # type: ignore[attr-defined,no-any-return]

    def capture(self, node: Node, grads: Sequence[Array | None], staged: StagedCommit) -> None:
        """Store the captured ones of the gradients that have arrived at a node."""
        self.captures.take(node, grads, staged)

    def unpacked(self, node: Node) -> tuple[Any, ...] | None:
        """The node's saved values if they have been unpacked already, else None."""
        return None

    def keep_unpacked(self, node: Node, values: tuple[Any, ...]) -> None:
        """Called with the values of a node when they have been unpacked."""

    def has_run(self, node: Node, outputs: Sequence[Array | None]) -> None:
        """Called when one of the `divided` nodes has run."""

    @property
    def recomputed(self) -> dict[int, Any]:
        """Recomputed values of checkpointed regions, by region; the regions fill and read it."""
        if self._recomputed is None:
            self._recomputed = {}
        return self._recomputed

    def finish(self, is_done: bool) -> None:
        """Called at the end of the pass.

        Args:
            is_done: True if the pass succeeded.
        """
        self._recomputed = None
        self.expected.clear()
