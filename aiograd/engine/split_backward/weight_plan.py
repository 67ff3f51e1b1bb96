"""WeightPlan: the second half of a backward pass, from the groups that the first half has left to the gradients of the weights.

See `aiograd.engine.split_backward`.

It starts from nodes that have run in the first half, each for some of its edges only, and from gradients that arrive at nodes of this half. Nodes
are run again as they are: an ordinary pass would need copies of them, and hooks and errors would name the copies.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from aiograd.engine.graph_root import GraphRoot
from aiograd.engine.input_buffer import Key
from aiograd.engine.pass_hooks import PassHooks
from aiograd.engine.placement import RulePlacement
from aiograd.engine.plan import DISCOVER_STRIDE, SORT_NODES, sequence
from aiograd.engine.selection import Selection
from aiograd.engine.split_backward.parameter_group import FIRST, ParameterGroup
from aiograd.engine.split_backward.walk import above
from aiograd.errors import ArgumentError, GraphFreedError
from aiograd.graph.node import Node
from aiograd.running.types import Array


class ReleasingRoot(GraphRoot):
    """A root that drops its seeds when it has run."""

    __slots__ = ()

    def compute(self, grads: Any, needs: tuple[bool, ...], values: Any, create_graph: bool) -> tuple[Array, ...]:
        """The seeds; may be called once."""
        seeds, self.seeds = self.seeds, ()
        return seeds


class WeightPlan(Selection):
    """A plan that computes gradients of weights from the groups of an `InputPlan`.

    Args:
        groups: the groups of the weights.
        keep_graph: leave the groups as they are, for another pass; else they are emptied.

    Raises:
        GraphFreedError: one of the groups has been used before. ArgumentError: there are none.
    """

    may_cross = False

    def __init__(self, groups: Sequence[ParameterGroup], *, keep_graph: bool = False) -> None:
        _check(groups)
        roots: list[tuple[Node, int]] = []
        seeds: list[Array] = []
        keys: list[Key] = []
        self._left: dict[Node, tuple[int, ...]] = {}
        self._values: dict[Node, tuple[Any, ...]] = {}
        for group in groups:
            for start in group.starts:
                self._left[start.node] = start.outputs
                if start.values is not None:
                    self._values[start.node] = start.values
                for nr, grad in enumerate(start.grads):
                    if grad is not None:
                        roots.append((start.node, nr))
                        keys.append((FIRST, nr))
                        seeds.append(grad)
            for term in group.terms:
                roots.append((term.node, term.nr))
                keys.append(term.key)
                seeds.append(term.grad)
        super().__init__(roots, seeds, [(node, 0) for group in groups for node in group.nodes], accumulate=True)
        self.root_keys = keys
        self.resumed = self._left.keys()
        self._has_terms = max(keys)[0] != FIRST
        placement = groups[0].placement
        self._placement = placement if all(group.placement is placement for group in groups) else None
        self._recomputed = {region: values for group in groups if group.recomputed for region, values in group.recomputed.items()}
        if not keep_graph:
            for group in groups:
                group.clear()

    def _start(self, roots: Sequence[tuple[Node, int]], seeds: Sequence[Array]) -> tuple[Node, list[Any]]:
        self._seeds = seeds
        return roots[0][0], []

    def edges_of(self, node: Node) -> Iterable[tuple[int, Node | None]]:
        """The edges of a node; for one that runs again, only those left to this half."""
        left = self._left.get(node)
        return enumerate(node.next_nodes) if left is None else [(i, node.next_nodes[i]) for i in left]

    def discover(self, placement: RulePlacement, hooks: PassHooks | None, may_walk: bool) -> Iterator[None]:
        """See `BackwardPlan.discover`."""
        if may_walk:
            self.is_plain = not self._values and (yield from self._order_for_walk(placement))
            if self.is_plain:
                return
        seeds, self._seeds = self._seeds, ()
        self.root = ReleasingRoot(self.roots, seeds)
        del seeds
        parents: dict[Node, list[Node]] = {}
        found: dict[Node, int] = {self.root: 0}
        stack: list[Node] = [self.root]
        visited = 0
        while stack:
            visited += 1
            if not visited % DISCOVER_STRIDE:
                yield
            node = stack.pop()
            for _, child in self.edges_of(node):
                if child is None:
                    continue
                if child not in found:
                    found[child] = 0
                    stack.append(child)
                parents.setdefault(child, []).append(node)
        runs: dict[Node, None] = {}
        yield from above([node for node in self._targets if node in found], parents, runs)
        self.exec_info = dict.fromkeys(runs, True)
        self.dependencies = {node: 0 for node in found if node in runs or node is self.root}
        for visited, node in enumerate(runs):
            if not visited % DISCOVER_STRIDE:
                yield
            for _, child in self.edges_of(node):
                if child in runs:
                    self.dependencies[child] += 1
        yield from self._expect(hooks)

    def _order_for_walk(self, placement: RulePlacement) -> Generator[None, None, bool]:
        """Find the nodes and order of a walk; returns True if a walk is possible. See `Selection._put_in_order`."""
        is_small = self._placement is placement
        stack = list(dict.fromkeys([node for node, _ in self.roots]))
        found = set(stack)
        nodes: list[Node] = []
        visited = 0
        while stack:
            visited += 1
            if not visited % DISCOVER_STRIDE:
                yield
            node = stack.pop()
            if visited > SORT_NODES or not (placement.is_bare(node) if is_small else placement.is_small(node)):
                return False
            if not node.is_leaf:
                nodes.append(node)
                left = self._left.get(node)
                for child in node.next_nodes if left is None else [node.next_nodes[i] for i in left]:
                    if child is not None and child not in found:
                        found.add(child)
                        stack.append(child)
        nodes.sort(key=sequence)
        ends = [node for node in self._targets if node in found]
        wanted = set(ends)
        #: nodes that get a gradient from a node that runs
        fed: set[Node | None] = set()
        order: list[Node] = []
        for node in nodes:
            children = node.next_nodes
            left = self._left.get(node)
            if left is None:
                needs = [child in wanted for child in children]
            else:
                needs = [False] * len(children)
                for i in left:
                    needs[i] = children[i] in wanted
            if True in needs:
                wanted.add(node)
                order.append(node)
                if needs.count(True) + children.count(None) != len(needs):
                    self.special[node] = tuple(needs)
                if self._has_terms:
                    fed.update([child for child, need in zip(children, needs, strict=True) if need])
        keys = self.root_keys or ()
        if self._has_terms and any(node in fed and key[0] != FIRST for (node, _), key in zip(self.roots, keys, strict=True)):
            return False  # it would have to be added between what two nodes return
        self._set_order(order, ends)
        return True

    def first_sums(self) -> dict[Node, Any]:
        """The gradients that the walk starts from."""
        keys = self.root_keys or ()
        order = sorted(range(len(self.roots)), key=keys.__getitem__)
        seeds, self._seeds = self._seeds, ()
        sums: dict[Node, Any] = {}
        for i in order:
            node, nr = self.roots[i]
            if node.is_single:
                have = sums.get(node)
                sums[node] = seeds[i] if have is None else have + seeds[i]
            else:
                slots = sums.setdefault(node, [None] * node.num_inputs)
                slots[nr] = seeds[i] if slots[nr] is None else slots[nr] + seeds[i]
        return sums

    def _expect(self, hooks: PassHooks | None) -> Iterator[None]:
        keys = self.root_keys or ()
        for visited, node in enumerate(self.exec_info or ()):
            if not visited % DISCOVER_STRIDE:
                yield
            for index, child in self.edges_of(node):
                if child is not None and self.dependencies.get(child, 0) > 1:
                    self.expected.setdefault(child, []).append(keys[index] if node is self.root else (-node._seq, index))
        for expected in self.expected.values():
            expected.sort()

    def should_compute(self, node: Node, output: int) -> bool:
        """True if this half wants output `output` of the node."""
        left = self._left.get(node)
        return node.next_nodes[output] in (self.exec_info or ()) and (left is None or output in left)

    def gets_gradient(self, node: Node) -> bool:
        """True if a gradient arrives at the node in this half."""
        return node in self.dependencies and node not in self._left

    def unpacked(self, node: Node) -> tuple[Any, ...] | None:
        """The node's values if the input half has unpacked them."""
        return self._values.pop(node, None)


def _check(groups: Sequence[ParameterGroup]) -> None:
    if not groups:
        raise ArgumentError("the weight half of a pass: there are no parameter groups to run")
    for group in groups:
        if group.is_spent:
            raise GraphFreedError(
                "Trying to compute the gradients of weights a second time: the parameter group has been used. Specify retain_graph=True the first "
                "time if you need it again."
            )
