"""GraphTask: the bookkeeping of one backward pass. Pure: no loop, no clock, no threads.

A driver (`aiograd.engine.run`) asks for ready nodes, runs them where it sees fit and reports what they returned; the GraphTask decides what
is ready next, adds up what arrives, stages what reaches the leaves, and says when everything is done.

Note [Life of a pass]
    ``discover`` (walk the graph, count dependencies) → ``begin`` → ``pop`` / ``complete`` until nothing is outstanding →
    ``commit`` → post-accumulate hooks → final callbacks → ``future`` resolved. ``fail`` at any point before the commit drops everything
    staged. A graph without user code, small enough and in plain order takes the short cut in `aiograd.engine.sweep` instead of
    pop/complete; results, order and promises are the same. Where only a part of it is wanted, `_plan` says which.

Note [Who runs]
    Without `inputs` every node of the graph runs and ``exec_info`` is None. With `inputs` only the nodes on a path to one of them run;
    ``exec_info`` holds those. A captured gradient is taken after the hooks on its tensor.

Note [Numbers of a recorded pass]
    With ``create_graph`` the pass records nodes while it runs, and where rules suspend or run on threads, when each of them is recorded
    depends on timing. Sequence numbers decide the order of sums, so second derivatives would differ in their last bits from run to run.
    Therefore the nodes recorded on behalf of one node form a group, and when all nodes have run the numbers that were taken are dealt out
    again: groups in the order of an undisturbed pass, the nodes of a group in the order in which they were recorded. Gradients flow from
    earlier groups to later ones only, so descending numbers remain a topological order.

Note [Parts of a larger pass]
    A pass over several machines is one GraphTask on each of them. `sources` are nodes whose gradients come from elsewhere while the pass
    runs (`deliver`); they count as outstanding from the start. `slots` says where the gradients of leaves accumulate instead of in the
    leaves. `gate` is awaited when everything is staged and before the commit, which follows it without another suspension. `order` gives
    nodes their place in sums, where the numbers of this process do not say in which order the whole graph was recorded. Without `post_hooks`
    the post-accumulate hooks of leaves are left to whoever moves the gradients from the slots into the leaves.

    With `inputs`, what leads to one of the `outlets`, the nodes where gradients leave for another machine, runs too. A pass of its own (one
    without a `gate`) cannot know which of those lead to its inputs: `crossings` are those it has met, and the driver asks them.

Source: PyTorch ``engine.cpp`` and ``graph_task.h``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from itertools import count
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

from aiograd.caller import warn_caller
from aiograd.engine.input_buffer import FOLD_INLINE_BYTES, InputBuffer, Key
from aiograd.engine.placement import Placement
from aiograd.engine.ready_queue import ReadyQueue
from aiograd.errors import ArgumentError, GraphError, GraphFreedError, UnusedInputError
from aiograd.graph.accumulate_grad import AccumulateGrad, Slot, Staged, commit, own
from aiograd.graph.boundary import to_array, to_tensor
from aiograd.graph.node import InputMetadata, Node, Released
from aiograd.graph.running import CURRENT
from aiograd.types import Array

#: gets a non-leaf's gradient at the commit; returns what writes it (None: nothing is to be written)
Keeper: TypeAlias = Callable[[Any], Callable[[], None] | None]

_next_id = count(0).__next__
_place = itemgetter(0)

#: how many nodes `discover` visits between two chances for the loop
DISCOVER_STRIDE = 512

#: so many nodes are sorted in one go; more would hold the loop up
SORT_NODES = 4096

sequence = attrgetter("_seq")


class Capture(NamedTuple):
    """The gradient of input `input_nr` of a node is wanted, as result number `result` or by `keep` at the commit."""

    input_nr: int
    result: int
    keep: Keeper | None = None


class GraphRoot(Node):
    """Where a pass over several roots starts: no inputs, and the seed gradients as outputs."""

    __slots__ = ("seeds", "_saved")

    num_inputs = 0
    is_builtin = True

    def __init__(self, roots: Sequence[tuple[Node, int]], seeds: Sequence[Array]) -> None:
        super().__init__()
        self.next_nodes = tuple([node for node, _ in roots])
        self.next_nrs = tuple([nr for _, nr in roots])
        self.seeds = tuple(seeds)
        self._saved = ()

    @property
    def input_metadata(self) -> tuple[InputMetadata, ...]:
        """Empty."""
        return ()

    def vjp(self, grads: Any) -> tuple[Array, ...]:
        """The seeds."""
        return self.seeds

    def apply(self, grads: Sequence[Array | None]) -> tuple[Array, ...]:
        """The seeds."""
        return self.seeds

    def vjp_part(self, grads: Any, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        """The seeds that are needed."""
        return tuple([seed if need else None for seed, need in zip(self.seeds, needs, strict=True)])

    def compute(self, grads: Any, needs: tuple[bool, ...], values: Any, create_graph: bool) -> tuple[Array, ...]:
        """The seeds."""
        return self.seeds

    def cost_key(self) -> None:
        """It costs nothing."""


def unused_input(index: int) -> UnusedInputError:
    """The error for an input that gets no gradient."""
    return UnusedInputError(
        f"One of the differentiated Tensors, the input at index {index}, appears to not have been used in the graph. Set allow_unused=True if this "
        "is the desired behavior."
    )


class GraphTask:
    """One backward pass.

    Args:
        roots: gradient edges ``(node, input number)`` to start from.
        seeds: their gradients, fitted to them.
        inputs: what is wanted: None for "accumulate into every leaf", else gradient edges.
        require_inputs: refuse to start where one of `inputs` cannot be reached.
        accumulate: with `inputs`: accumulate into them instead of returning their gradients (True for `backward`).
        keepers: with `accumulate`: per input that is no leaf, what takes its gradient at the commit.
        keep_graph: keep saved values for another pass.
        create_graph: gradients are Tensors and the pass records a graph itself.
        reentrant_depth: how many passes this one is nested in.
        anomaly: None, or whether to look for NaN.
        profiler: what records scopes, or None.
        sources, slots, gate, order, post_hooks, outlets: see Note [Parts of a larger pass]; `outlets` None: all that there are.
    """

    # What a pass begins with and most passes keep; here, because setting it for each pass would cost a small one several percent
    #: nodes that run; None: all of them
    exec_info: dict[Node, bool] | None = None
    #: made by the driver: called when `deliver` has made something ready
    on_delivery: Callable[[], None] | None = None
    #: called when the driver has nothing more to do for now
    on_wait: Callable[[], None] | None = None
    #: gives the nodes whose rules or hooks have begun and not ended; for a pass that is part of a larger one
    busy: Callable[[], list[Node]] | None = None
    #: what checkpointed regions have computed again, by region
    recomputed: dict[int, Any] | None = None
    #: what makes the pass fail from outside
    intruder: BaseException | None = None
    #: the larger pass that this one is part of
    part: Any = None
    #: where gradients leave for other machines, in a pass of its own over a part of the graph; see Note [Parts of a larger pass]
    crossings: Sequence[Node] = ()
    _outlets: Collection[Node] | None = None
    #: of a pass with `inputs`: as it was given them, and which of those cannot be reached although they have to be
    require_inputs: bool = False
    accumulate: bool = False
    keepers: Sequence[Keeper | None] = ()
    _unused: Sequence[int] = ()
    #: of a plain pass over a part of the graph: the nodes that run, in the order of the sweep; None: all of them
    plan: list[Node] | None = None
    outstanding: int = 0
    #: how many nodes have run
    completed_nodes: int = 0
    committed: bool = False
    completed: bool = False
    error: BaseException | None = None
    #: made by the driver: an object with ``create_future``
    loop: Any = None
    #: a future that reports an error nobody has asked for
    _unfetched: Any = None
    #: made by the driver: called with each future that is handed out
    on_future: Callable[[Any], None] | None = None
    #: nobody awaits the pass itself, so an error that nobody fetches from `future` must be reported
    delivered_by_future: bool = False
    #: the node for which the driver itself records something: whose inputs are summed or outputs fitted
    recording_for: Node | None = None
    #: what stands for leaves in the order of what a pass with `create_graph` records
    _leaf_places: dict[Node, int] | None = None
    _cancelled: bool = False

    def __init__(
        self,
        roots: Sequence[tuple[Node, int]],
        seeds: Sequence[Array],
        *,
        inputs: Sequence[tuple[Node, int]] | None = None,
        require_inputs: bool = False,
        accumulate: bool = False,
        keepers: Sequence[Keeper | None] = (),
        keep_graph: bool = False,
        create_graph: bool = False,
        reentrant_depth: int = 0,
        anomaly: bool | None = None,
        profiler: Any = None,
        sources: Sequence[Node] = (),
        slots: Callable[[AccumulateGrad], Slot] | None = None,
        gate: Callable[[], Awaitable[None]] | None = None,
        order: Callable[[Node], tuple[float, ...]] | None = None,
        post_hooks: bool = True,
        outlets: Collection[Node] | None = None,
    ) -> None:
        self.id = _next_id()
        self.roots = tuple(roots)
        self.keep_graph = keep_graph
        self.create_graph = create_graph
        self.reentrant_depth = reentrant_depth
        self.anomaly = anomaly
        self.profiler = profiler
        self.inputs = inputs
        #: node -> captures of its inputs
        self.captures: dict[Node, list[Capture]] = {}
        #: captured gradients by index
        self.captured: list[Array | None] = [None] * (0 if inputs is None or accumulate else len(inputs))
        self._accumulate_into: set[Node] = set()
        if inputs is not None:
            self.require_inputs, self.accumulate, self.keepers = require_inputs, accumulate, keepers
            for index, (node, nr) in enumerate(inputs):
                keep = keepers[index] if keepers else None
                if keep is not None:
                    self.captures.setdefault(node, []).append(Capture(nr, -1, keep))
                elif accumulate:
                    self._accumulate_into.add(node)
                else:
                    self.captures.setdefault(node, []).append(Capture(nr, index))
        #: nodes that keep what they saved for another pass, and nodes whose hooks have run in an earlier one; see `aiograd.engine.halves`
        self.kept: Collection[Node] = ()
        self.resumed: Collection[Node] = ()
        #: every node of the graph with how many gradients are still to come
        self.dependencies: dict[Node, int] = {}
        #: nodes whose gradients are still to come from elsewhere
        self._sources = tuple(sources)
        self.waiting: dict[Node, None] = dict.fromkeys(sources)
        self.slots = slots
        self.gate = gate
        self._order = order
        self.post_hooks = post_hooks
        if outlets is not None:
            self._outlets = outlets
        #: what was delivered before the pass had begun
        self._early: list[tuple[Node, list[Any]]] | None = []
        #: whether the sweep can run this graph
        self.is_plain = anomaly is None and profiler is None and not create_graph and gate is None and order is None and not sources
        #: those of which only some outputs are wanted, and those whose gradients are captured before they run (None: all outputs)
        self.special: dict[Node, tuple[bool, ...] | None] = {}
        self.staged: dict[AccumulateGrad, Staged] = {}
        self.retained: list[tuple[Keeper, Any]] = []
        self.released = Released()
        #: large sums that wait for the executor
        self.folds: deque[tuple[Node, InputBuffer]] = deque()
        self.callbacks: list[Callable[[], Any]] = []
        self.warnings: list[tuple[str, type[Warning]]] = []
        #: whether recomputation in backward (checkpointing) is possible
        self.can_checkpoint = inputs is None or accumulate
        #: state of hooks that span several nodes, by the hook's identity
        self.shared_hook_state: dict[int, Any] = {}
        #: futures that wait for the result
        self._futures: list[Any] = []
        self._ready = ReadyQueue()
        self._buffers: dict[Node, InputBuffer | list[Any]] = {}
        self._expected: dict[Node, list[Key]] = {}
        #: what a pass with `create_graph` has recorded so far, with its place in the order
        self._recorded: list[tuple[tuple[int, Any], Node]] = []
        #: what is left of `discover`
        self._walk: Iterator[None] = iter(())
        self.root, self._root_grads = self._start(roots, seeds)

    def __repr__(self) -> str:
        state = "failed" if self.error else "completed" if self.completed else f"{self.outstanding} outstanding"
        return f"<GraphTask {self.id}: {state}>"

    # ---------------------------------------------------------------- discovery

    def _start(self, roots: Sequence[tuple[Node, int]], seeds: Sequence[Array]) -> tuple[Node, list[Any]]:
        """The node that leads to all others, and the gradients of its inputs."""
        if len(roots) != 1:
            return GraphRoot(roots, seeds), []
        ((root, nr),) = roots
        grads: list[Any] = [None] * max(1, root.num_inputs)
        grads[nr] = seeds[0]
        return root, grads

    @property
    def nodes_in_graph(self) -> frozenset[Node]:
        """Every node reachable from the root, the root excluded unless an edge leads to it."""
        return frozenset(node for node in self.dependencies if node is not self.root)

    def discover(self, placement: Placement) -> Iterator[None]:
        """Walk the graph once; yields now and then so that the driver can give the loop a turn.

        Args:
            placement: knows whether running a node on the loop is certainly cheap; asked while the pass may still be plain.
        """
        self._walk = self._discover(placement)
        return self._walk

    def _discover(self, placement: Placement) -> Iterator[None]:
        small_leaves = placement.small_leaves
        small_shapes, shape_is_small, is_small = placement.small_shapes, placement.shape_is_small, placement.is_small
        root = self.root
        dependencies = self.dependencies
        dependencies[root] = 0
        stack = [root]
        for source in self.waiting:
            dependencies[source] = 1
            stack.append(source)
        visited = 0
        plain = self.is_plain
        floor = self._sequence_floor()
        while stack:
            node = stack.pop()
            visited += 1
            if not visited % DISCOVER_STRIDE:
                yield
            if plain and (
                node._extra is not None
                or not (
                    (node.is_cheap and (node.shape in small_shapes or shape_is_small(node.shape)))  # type: ignore[attr-defined]
                    or (node.is_builtin and is_small(node))
                )
            ):
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
                        shape = child.shape  # type: ignore[attr-defined]
                        is_small_leaf = shape in small_leaves or placement.leaf_is_small(shape)
                        if not is_small_leaf or child._extra is not None or child.post_accumulate_hooks:  # type: ignore[attr-defined]
                            plain = False
                    else:
                        stack.append(child)
                else:
                    dependencies[child] = known + 1
        if self.inputs is None:
            self.is_plain = plain
        else:
            self.is_plain = plain = plain and len(dependencies) <= SORT_NODES and all(node.is_leaf for node in self._accumulate_into)
            self._unused = [index for index, (node, _) in enumerate(self.inputs) if node not in dependencies] if self.require_inputs else []
            if plain:
                self.check_used()
                yield from self._plan(sorted([node for node in dependencies if not node.is_leaf], key=sequence))
            else:
                parents: dict[Node, list[Node]] = {}
                outlets: list[Node] = []
                for visited, node in enumerate(dependencies, 1):
                    if not visited % DISCOVER_STRIDE:
                        yield
                    if node.is_outlet:
                        outlets.append(node)
                    if node._seq >= floor:
                        for child in node.next_nodes:
                            if child is not None:
                                parents.setdefault(child, []).append(node)
                if self.gate is None:
                    self.crossings = outlets
                elif self._outlets is None:
                    self._outlets = outlets
                if not self.crossings:
                    self.check_used()
                yield from self._restrict(parents)
        if not plain:
            yield from self._expect()

    def check_used(self) -> None:
        """Raise if an input that has to be reached is not."""
        for index in self._unused:
            raise unused_input(index)

    def _sequence_floor(self) -> int:
        """Nodes below this number cannot reach any of the inputs, so the walk need not go through them."""
        if self.inputs is None or Node.any_reordered or self.gate is not None or any(node.is_leaf for node, _ in self.inputs):
            return 0
        return min((node._seq for node, _ in self.inputs), default=0)

    def _restrict(self, parents: dict[Node, list[Node]]) -> Iterator[None]:
        """Find the nodes on a path to an input, and count only their edges."""
        outlets = self._outlets or ()
        runs: dict[Node, bool] = {node: True for node in (*self._accumulate_into, *outlets) if node in self.dependencies}
        targets = [*runs, *[node for node in self.captures if node in self.dependencies and node not in runs]]
        stack = list(targets)
        visited = 0
        while stack:
            visited += 1
            if not visited % DISCOVER_STRIDE:
                yield
            for parent in parents.pop(stack.pop(), ()):
                if parent not in runs:
                    runs[parent] = True
                    stack.append(parent)
        dependencies: dict[Node, int] = {}
        for visited, node in enumerate(self.dependencies):
            if not visited % DISCOVER_STRIDE:
                yield
            if node in runs or node in self.captures:
                dependencies[node] = 0
        dependencies.setdefault(self.root, 0)
        for visited, node in enumerate(runs):
            if not visited % DISCOVER_STRIDE:
                yield
            for child in node.next_nodes:
                if child in dependencies:
                    dependencies[child] += 1
        for source in self.waiting:
            if source in dependencies:
                dependencies[source] += 1
        self.exec_info = runs
        self.dependencies = dependencies

    def _plan(self, nodes: list[Node]) -> Iterator[None]:
        """As `_restrict`, for the sweep.

        Args:
            nodes: those of the graph that are no leaves, in the order of recording: each after all that it leads to, so that one look will do.
        """
        wanted = {node for node in (*self._accumulate_into, *self.captures) if node in self.dependencies}
        ends = list(wanted)
        plan: list[Node] = []
        for visited, node in enumerate(nodes, 1):
            if not visited % DISCOVER_STRIDE:
                yield
            needs = [child in wanted for child in node.next_nodes]
            if True in needs:
                wanted.add(node)
                plan.append(node)
                if needs.count(True) + node.next_nodes.count(None) != len(needs):
                    self.special[node] = tuple(needs)
                elif node in self.captures:
                    self.special[node] = None
        self._finish_plan(plan, ends)

    def _finish_plan(self, plan: list[Node], ends: Collection[Node]) -> None:
        plan.reverse()
        self.plan = plan
        self.exec_info = dict.fromkeys((*plan, *[node for node in ends if node in self._accumulate_into]), True)
        self.dependencies = dict.fromkeys((self.root, *plan, *ends), 0)

    @property
    def seeds(self) -> list[Array]:
        """The gradients of the roots."""
        return list(self.root.seeds) if isinstance(self.root, GraphRoot) else [self._root_grads[nr] for _, nr in self.roots]

    def first_sums(self) -> dict[Node, Any]:
        """What the sweep starts from: per node its gradient, or the list of them where it has several inputs."""
        root = self.root
        if not (self._runs(root) or root in self.captures):
            return {}
        return {root: self._root_grads[0] if root.is_single else self._root_grads}

    def run_part(self, node: Node, grad: Any) -> Sequence[Array | None]:
        """Run one of the `special` nodes of a sweep.

        Args:
            grad: the gradient, or the list of them where the node has several inputs.

        Returns:
            One gradient per edge, None where it is not wanted.
        """
        if node in self.captures:
            self.capture(node, [grad] if node.is_single else grad)
        needs = self.special[node]
        return node.vjp(grad) if needs is None else node.vjp_part(grad, needs)  # type: ignore[attr-defined,no-any-return]

    def _expect(self) -> Iterator[None]:
        """Note which contributions each node with several producers will get."""
        dependencies, expected = self.dependencies, self._expected
        for visited, node in enumerate(dependencies):
            if not visited % DISCOVER_STRIDE:
                yield
            if not self._runs(node):
                continue
            key = self._place_of(node)
            for index, child in enumerate(node.next_nodes):
                if child is not None and dependencies.get(child, 0) > 1:
                    expected.setdefault(child, []).append((key, index))
        for keys in expected.values():
            keys.sort()

    def _place_of(self, node: Node) -> Any:
        return -node._seq if self._order is None else self._order(node)

    def _runs(self, node: Node) -> bool:
        return self.exec_info is None or node in self.exec_info

    def accumulates_at(self, node: Node) -> bool:
        """True if gradients that arrive at this node end there and are kept for a non-leaf: to its hooks that is as running it."""
        return any(capture.keep is not None for capture in self.captures.get(node, ()))

    def will_run(self, node: Node) -> bool:
        """Whether this pass runs the node (for a leaf: accumulates into it)."""
        return node in self.dependencies and self._runs(node)

    def edges_of(self, node: Node) -> Iterable[tuple[int, Node | None]]:
        """The edges along which this pass sends gradients of the node: number and target of each."""
        return enumerate(node.next_nodes)

    def unpacked(self, node: Node) -> tuple[Any, ...] | None:
        """What the node saved, where it has been unpacked already."""
        return None

    def keep_unpacked(self, node: Node, values: tuple[Any, ...]) -> None:
        """What the node saved has been unpacked."""

    def gets_gradient(self, node: Node) -> bool:
        """Whether a gradient arrives at the node in this pass, be it run or captured."""
        return node in self.dependencies

    def execution_order(self) -> list[Node]:
        """The nodes that run, in the order of an undisturbed pass."""
        waiting: dict[Node, int] = {}
        for node in self.dependencies:
            if self._runs(node):
                for _, child in self.edges_of(node):
                    if child is not None and child in self.dependencies:
                        waiting[child] = waiting.get(child, 0) + 1
        heap = ReadyQueue()
        heap.push(self.root, [])
        for source in self._sources:
            heap.push(source, [])
        order: list[Node] = []
        while heap:
            node, _ = heap.pop()
            if self._runs(node):
                order.append(node)
                for _, child in self.edges_of(node):
                    if child is not None and child in waiting:
                        waiting[child] -= 1
                        if not waiting[child]:
                            heap.push(child, [])
        return order

    def should_compute(self, node: Node, output: int) -> bool:
        """Whether anything in this pass wants output `output` of the node."""
        child = node.next_nodes[output]
        return child is not None and (self.exec_info is None or child in self.exec_info or child in self.captures)

    # ---------------------------------------------------------------- nodes

    def begin(self) -> None:
        """Make the root ready."""
        if self._runs(self.root) or self.root in self.captures:
            self._push(self.root, self._root_grads)
        early, self._early = self._early, None
        for source, grads in early or ():
            self.deliver(source, grads)

    def _push(self, node: Node, grads: list[Any]) -> None:
        self.outstanding += 1
        self._ready.push(node, grads)

    def deliver(self, source: Node, grads: list[Any]) -> None:
        """The gradients of one of the `sources` have come from elsewhere.

        Raises:
            GraphError: they have come before, or nothing waits for them.
        """
        if source not in self.waiting:
            raise GraphError(f"{source.name} waits for no gradients in graph task {self.id}")
        if self.error is not None:
            return
        if self._early is not None:
            self._early.append((source, grads))
            return
        del self.waiting[source]
        if source in self.dependencies:  # not one that leads to nothing that is wanted
            self.dependencies[source] -= 1
            self._push(source, grads)
        if self.on_delivery is not None:
            self.on_delivery()

    def intrude(self, error: BaseException) -> None:
        """Make the pass fail, for a reason outside of it; the driver sees it when it takes the next step."""
        if self.intruder is None:
            self.intruder = error
            if self.on_delivery is not None:
                self.on_delivery()

    def is_eager(self, leaf: AccumulateGrad) -> bool:
        """Whether the leaf's gradient is accumulated at once instead of at the commit."""
        return self.slots is None and leaf.is_eager

    def has_ready(self) -> bool:
        """Whether `pop` has something."""
        return bool(self._ready) and self.error is None

    def pop(self) -> tuple[Node, list[Any]]:
        """The most urgent ready node and the gradients of its inputs."""
        return self._ready.pop()

    def complete(self, node: Node, outputs: Sequence[Array | None]) -> None:
        """Take what a node returned, one fitted gradient per edge, and make ready what was waiting for it only."""
        self.completed_nodes += 1
        if self._runs(node):
            dependencies = self.dependencies
            key = self._place_of(node)
            for index, child in enumerate(node.next_nodes):
                if child is None:
                    continue
                left = dependencies.get(child)
                if left is None:
                    if self.exec_info is None:
                        raise GraphError(f"dependency not found for {child.name}: an edge of {node.name} was added while the pass was running")
                    continue
                self._deliver(child, node.next_nrs[index], outputs[index], (key, index), left)
        self.outstanding -= 1

    def _deliver(self, child: Node, nr: int, grad: Array | None, key: Key, left: int) -> None:
        buffer = self._buffers.get(child)
        self.recording_for = child
        if buffer is None:
            expected = self._expected.get(child)
            if expected is None:
                slots: list[Any] = [None] * child.num_inputs
                slots[nr] = grad
                self.dependencies[child] = 0
                self._push(child, slots)
                return
            buffer = self._buffers[child] = InputBuffer(child.num_inputs, expected)
        if buffer.add(key, nr, grad):  # type: ignore[union-attr]
            buffer.folding = True  # type: ignore[union-attr]
            self.folds.append((child, buffer))  # type: ignore[arg-type]
            self.outstanding += 1
            left += 1
        self._arrived(child, left - 1, buffer)  # type: ignore[arg-type]

    def _arrived(self, child: Node, left: int, buffer: InputBuffer) -> None:
        self.dependencies[child] = left
        if left == 0:
            del self._buffers[child]
            self._push(child, buffer.take())

    # ---------------------------------------------------------------- numbers of a recorded pass

    def collect(self, recorded: Node) -> None:
        """Note that this pass has recorded a node."""
        if self.completed:
            return
        current = CURRENT.get()
        node = current.node if current is not None and current.task is self and current.node is not None else self.recording_for
        if node is None:
            place: tuple[int, Any] = (-1, 0)
        elif node.is_leaf:
            if self._leaf_places is None:
                self._leaf_places = {leaf: i for i, leaf in enumerate(self.dependencies)}
            place = (1, self._leaf_places.get(node, 0))
        else:
            place = (0, self._place_of(node))
        self._recorded.append((place, recorded))

    def renumber(self, outer: Callable[[Node], None] | None) -> None:
        """Give the nodes this pass has recorded their numbers in an order that does not depend on timing.

        Args:
            outer: what collects the nodes of a pass around this one.
        """
        recorded, self._recorded = self._recorded, []
        numbers = sorted([node._seq for _, node in recorded])
        recorded.sort(key=_place)
        for (_, node), number in zip(recorded, numbers, strict=True):
            node._seq = number
            if outer is not None:
                outer(node)
        for _, node in recorded:
            node._edges_changed()  # it may use what another task recorded meanwhile

    def fold_done(self, child: Node, buffer: InputBuffer) -> None:
        """A large sum that the driver took from `folds` has been made."""
        if buffer.unfolded:
            self.folds.append((child, buffer))
            return
        buffer.folding = False
        self._arrived(child, self.dependencies[child] - 1, buffer)
        self.outstanding -= 1

    def check_complete(self) -> None:
        """Raise if gradients are left over although nothing is outstanding."""
        if self._buffers and self.exec_info is None:
            names = ", ".join(sorted({node.name for node in self._buffers})[:5])
            raise GraphError(f"could not compute gradients for some functions: {names} still wait for gradients that never came")

    # ---------------------------------------------------------------- results

    def capture(self, node: Node, grads: Sequence[Array | None]) -> None:
        """Keep the gradients that were asked for."""
        for input_nr, index, keep in self.captures[node]:
            if keep is None:
                self.captured[index] = grads[input_nr]
            elif grads[input_nr] is not None:
                self.retain(keep, to_tensor(grads[input_nr]))

    def stage(self, leaf: AccumulateGrad, grads: list[Any]) -> None:
        """Stage the complete gradient of a leaf, the only entry of `grads`; long for large arrays where there is a gradient already."""
        grad = grads.pop()
        self.staged[leaf] = Staged(leaf if self.slots is None else self.slots(leaf), own(grad))

    def retain(self, keep: Keeper, grad: Any) -> None:
        """Hand a non-leaf's gradient (a Tensor) to `keep` at the commit."""
        self.retained.append((keep, grad))

    def delivered(self) -> Iterator[tuple[Node, Array]]:
        """What the pass writes or returns, each with the node it arrived at."""
        for leaf, staged in self.staged.items():
            yield leaf, staged.total
        for _, grad in self.retained:
            yield self.root, to_array(grad, False)
        for node, captures in self.captures.items():
            for capture in captures:
                grad = None if capture.keep is not None else self.captured[capture.result]
                if grad is not None:
                    yield node, to_array(grad, False)

    def stale(self) -> list[Staged]:
        """Large sums that have to be made again before the commit, since their leaves have got other gradients meanwhile."""
        return [staged for staged in self.staged.values() if staged.is_stale and getattr(staged.total, "nbytes", 0) > FOLD_INLINE_BYTES]

    def commit(self) -> None:
        """Write every staged gradient, in one step; where that fails, none has been written."""
        writes = [keep(grad) for keep, grad in self.retained]
        if self.staged:
            commit(self.staged.values())
        for write in writes:
            if write is not None:
                write()
        self.committed = True

    def fail(self, error: BaseException) -> None:
        """The pass ends with this error (the first one counts): drop what was staged. The driver then goes through `spend`."""
        if self.error is not None:
            return
        self.error = error
        self._ready.clear()
        self._buffers.clear()
        self.folds.clear()
        if not self.committed:
            self.staged.clear()
            self.retained.clear()

    def spend(self) -> Iterator[None]:
        """Release what the graph of a failed pass saved, unless it is kept; yields now and then. A second pass is told the first error.

        What another pass has released is that one's graph (it may still be running), and a pass that was refused has not used its own.
        """
        error = self.error
        if error is None or self.keep_graph or isinstance(error, GraphFreedError):
            return
        try:
            yield from self._walk  # where it was interrupted
        except UnusedInputError:
            return
        if isinstance(error, UnusedInputError) and not self.outstanding and not self.completed_nodes:
            return
        text = str(error).split("\n", 1)[0][:200]
        self.released.reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        for visited, node in enumerate(self.dependencies):
            if node is not self.root or self._runs(node) or node in self.captures:
                node.release_variables(self.released)
            if not visited % DISCOVER_STRIDE:
                yield

    def finish(self) -> None:
        """The pass is over: drop what refers to the graph."""
        self.completed = True
        self.outstanding = 0
        self._buffers.clear()
        self._expected.clear()
        self.waiting.clear()
        self.part = None
        self.on_delivery = self.on_wait = self.busy = self.gate = self.slots = self._order = None
        self.shared_hook_state.clear()
        self.recomputed = None
        self.callbacks.clear()
        self._walk = iter(())
        futures, self._futures = self._futures, []
        if self.error is not None and self.delivered_by_future and not futures and not self._cancelled:
            futures = [self._unfetched] = [self.loop.create_future()]
        for future in futures:
            self._resolve(future)
        self.staged.clear()
        self.retained.clear()

    def queue_callback(self, callback: Callable[[], Any]) -> None:
        """Call (and await) `callback` after the commit, in order; a callback may queue more."""
        if not callable(callback):
            raise ArgumentError(f"queue_callback: expected a callable, found {type(callback).__name__}")
        if self.completed:
            raise GraphError("queue_callback: the pass is over. Final callbacks can only be installed during backward pass.")
        self.callbacks.append(callback)

    def warn(self, message: str, category: type[Warning] = UserWarning) -> None:
        """Note a warning; each is issued once, in the caller, when the pass is over."""
        if (message, category) not in self.warnings:
            self.warnings.append((message, category))

    def issue_warnings(self) -> None:
        """Issue what `warn` collected; where a filter makes an exception of a warning, the others are dropped."""
        collected, self.warnings = self.warnings, []
        for message, category in collected:
            warn_caller(message, category)

    @property
    def result(self) -> list[Any]:
        """The captured gradients as Tensors, in the order of `inputs`."""
        return [to_tensor(grad) for grad in self.captured]

    @property
    def future(self) -> Any:
        """A future that resolves with `result` (or the error) when the pass is over.

        Each access makes another one, so several may await the pass, and one of them may stop waiting without harm to the rest.
        """
        if self.loop is None:
            raise GraphError(f"GraphTask {self.id} has not been started: it has no future yet")
        future = self.loop.create_future()
        if self._unfetched is not None:
            self._unfetched.exception()
            self._unfetched = None
        if self.completed:
            self._resolve(future)
        else:
            self._futures.append(future)
        if self.on_future is not None:
            self.on_future(future)
        return future

    def _resolve(self, future: Any) -> None:
        if future.done():
            return
        if self.error is None:
            future.set_result(self.result)
        elif self._cancelled:
            future.cancel()
        else:
            future.set_exception(self.error)
            if not self.delivered_by_future:
                future.exception()  # it is raised where the pass is awaited

    def cancelled(self) -> None:
        """Say that `error` is a cancellation, so that `future` is cancelled as well."""
        self._cancelled = True
