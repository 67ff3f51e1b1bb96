"""Selection: the plan of a pass that wants the gradients of some inputs only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from aiograd.engine.captures import Capture, Captures
from aiograd.engine.pass_hooks import PassHooks
from aiograd.engine.placement import RulePlacement
from aiograd.engine.plan import DISCOVER_STRIDE, SORT_NODES, BackwardPlan, sequence
from aiograd.engine.staged_commit import Keeper
from aiograd.errors import UnusedInputError
from aiograd.graph.node import Node
from aiograd.running.types import Array


def unused_input(index: int) -> UnusedInputError:
    """The error for an input that gets no gradient."""
    return UnusedInputError(
        f"One of the differentiated Tensors, the input at index {index}, appears to not have been used in the graph. Set allow_unused=True if this "
        "is the desired behavior."
    )


class Selection(BackwardPlan):
    """The plan that runs only the nodes that lead to some inputs.

    Note [Inputs behind other machines]
        Nodes that lead to a node which sends gradients to another worker (`PassHooks.outlets`) run too. A pass that is not part of a larger one
        cannot know which of those lead to its inputs: it collects them in `crossings`, and the runner asks them.

    Args:
        roots, seeds: as for `Plan`.
        inputs: gradient edges that are wanted.
        require_inputs: raise if one of them cannot be reached.
        accumulate: accumulate into them instead of returning their gradients (True for `backward`).
        keepers: with `accumulate`: per input that is no leaf, the function that takes its gradient at the commit.
    """

    def __init__(
        self,
        roots: Sequence[tuple[Node, int]],
        seeds: Sequence[Array],
        inputs: Sequence[tuple[Node, int]],
        *,
        require_inputs: bool = False,
        accumulate: bool = False,
        keepers: Sequence[Keeper | None] = (),
    ) -> None:
        super().__init__(roots, seeds)
        self.inputs = inputs
        self.require_inputs = require_inputs
        self.accumulate = accumulate
        self.keepers = keepers
        self.special: dict[Node, tuple[bool, ...] | None] = {}
        self.captures: Captures = Captures(0 if accumulate else len(inputs))
        #: leaves to accumulate into
        self._targets: set[Node] = set()
        #: indices of required inputs that cannot be reached
        self._unused: Sequence[int] = ()
        self._outlets: Collection[Node] = ()
        for index, (node, nr) in enumerate(inputs):
            keep = keepers[index] if keepers else None
            if keep is not None:
                self.captures.add(node, Capture(nr, -1, keep))
            elif accumulate:
                self._targets.add(node)
            else:
                self.captures.add(node, Capture(nr, index))

    def check_used(self) -> None:
        """Raise if a required input is not reachable from the roots."""
        for index in self._unused:
            raise unused_input(index)

    def _sequence_floor(self, hooks: PassHooks | None) -> int:
        if Node.any_reordered or (hooks is not None and not hooks.is_local) or any(node.is_leaf for node, _ in self.inputs):
            return 0
        return min((node._seq for node, _ in self.inputs), default=0)

    def _select(self, placement: RulePlacement, hooks: PassHooks | None, floor: int) -> Iterator[None]:
        dependencies = self.dependencies
        self.is_plain: bool = self.is_plain and len(dependencies) <= SORT_NODES and all(node.is_leaf for node in self._targets)
        self._unused = [index for index, (node, _) in enumerate(self.inputs) if node not in dependencies] if self.require_inputs else []
        if self.is_plain:
            self.check_used()
            yield from self._put_in_order(sorted([node for node in dependencies if not node.is_leaf], key=sequence))
            return
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
        if hooks is None or hooks.is_local:
            self.crossings: Sequence[Node] = outlets
        else:
            self._outlets = outlets if hooks.outlets is None else hooks.outlets
        if not self.crossings:
            self.check_used()
        yield from self._restrict(parents)

    def _restrict(self, parents: dict[Node, list[Node]]) -> Iterator[None]:
        """Find the nodes on a path to an input and count only the gradients along their edges."""
        runs: dict[Node, bool] = {node: True for node in (*self._targets, *self._outlets) if node in self.dependencies}
        stack = [*runs, *[node for node in self.captures.at if node in self.dependencies and node not in runs]]
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
            if node in runs or node in self.captures.at:
                dependencies[node] = 0
        dependencies.setdefault(self.root, 0)
        for visited, node in enumerate(runs):
            if not visited % DISCOVER_STRIDE:
                yield
            for child in node.next_nodes:
                if child in dependencies:
                    dependencies[child] += 1
        for source in self.sources:
            if source in dependencies:
                dependencies[source] += 1
        self.exec_info = runs
        self.dependencies = dependencies

    def _put_in_order(self, nodes: list[Node]) -> Iterator[None]:
        """Find the nodes on a path to an input, as `_restrict` does, for a walk.

        Args:
            nodes: all non-leaf nodes of the graph in the order of recording, so each comes after the nodes it leads to and one visit is enough.
        """
        captured = self.captures.at
        wanted = {node for node in (*self._targets, *captured) if node in self.dependencies}
        ends = [node for node in self.dependencies if node in wanted]  # in an order that does not depend on where nodes lie in memory
        order: list[Node] = []
        for visited, node in enumerate(nodes, 1):
            if not visited % DISCOVER_STRIDE:
                yield
            needs = [child in wanted for child in node.next_nodes]
            if True in needs:
                wanted.add(node)
                order.append(node)
                if needs.count(True) + node.next_nodes.count(None) != len(needs):
                    self.special[node] = tuple(needs)
                elif node in captured:
                    self.special[node] = None
        self._set_order(order, ends)

    def _set_order(self, order: list[Node], ends: Collection[Node]) -> None:
        order.reverse()
        self.order: list[Node] | None = order
        self.exec_info: dict[Node, bool] | None = dict.fromkeys((*order, *[node for node in ends if node in self._targets]), True)
        self.dependencies: dict[Node, int] = dict.fromkeys((self.root, *order, *ends), 0)
