"""The second half of a backward pass: from what the first half has left to the gradients of the weights. See `aiograd.engine.halves`.

It starts from nodes that have run before, each for some of its edges only, and from gradients that go into nodes of its own. Nodes are run again
as they are: a usual pass would need copies of them, and hooks and errors would name the copies.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from aiograd.engine.graph_task import DISCOVER_STRIDE, SORT_NODES, GraphRoot, GraphTask, sequence
from aiograd.engine.input_buffer import Key
from aiograd.engine.parameter_group import FIRST, ParameterGroup, Start
from aiograd.engine.placement import Placement
from aiograd.errors import ArgumentError, GraphFreedError
from aiograd.graph.node import Node
from aiograd.types import Array


def above(nodes: Iterable[Node], parents: dict[Node, list[Node]], found: dict[Node, None]) -> Iterator[None]:
    """Fill `found` with `nodes` and everything that leads to them; yields now and then."""
    found.update(dict.fromkeys(nodes))
    stack = list(found)
    visited = 0
    while stack:
        visited += 1
        if not visited % DISCOVER_STRIDE:
            yield
        for parent in parents.get(stack.pop(), ()):
            if parent not in found:
                found[parent] = None
                stack.append(parent)


class HalfRoot(GraphRoot):
    """Gives its seeds away instead of holding on to them."""

    __slots__ = ()

    def compute(self, grads: Any, needs: tuple[bool, ...], values: Any, create_graph: bool) -> tuple[Array, ...]:
        """The seeds; once."""
        seeds, self.seeds = self.seeds, ()
        return seeds


class WeightHalf(GraphTask):
    """The pass that computes gradients of weights from what an `InputHalf` has left. See the module.

    Args:
        roots, seeds, keys, starts, placement, recomputed: what `weight_half` makes of parameter groups.
        options: of `GraphTask`.
    """

    def __init__(
        self,
        roots: Sequence[tuple[Node, int]],
        seeds: Sequence[Array],
        *,
        keys: Sequence[Key],
        starts: Sequence[Start],
        placement: Placement | None = None,
        recomputed: dict[int, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(roots, seeds, accumulate=True, **options)
        self._keys = tuple(keys)
        self._placement = placement
        self.recomputed = recomputed
        self._left = {start.node: start.outputs for start in starts}
        self._values = {start.node: start.values for start in starts if start.values is not None}
        self.resumed = self._left.keys()
        self._has_terms = max(self._keys)[0] != FIRST

    def _start(self, roots: Sequence[tuple[Node, int]], seeds: Sequence[Array]) -> tuple[Node, list[Any]]:
        self._seeds = seeds
        return roots[0][0], []

    def edges_of(self, node: Node) -> Iterable[tuple[int, Node | None]]:
        """Of a node that runs again only those that were left."""
        left = self._left.get(node)
        return enumerate(node.next_nodes) if left is None else [(i, node.next_nodes[i]) for i in left]

    def _discover(self, placement: Placement) -> Iterator[None]:
        if self.is_plain:
            self.is_plain = not self._values and (yield from self._plan_sweep(placement))
            if self.is_plain:
                return
        seeds, self._seeds = self._seeds, ()
        self.root = HalfRoot(self.roots, seeds)
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
        yield from above([node for node in self._accumulate_into if node in found], parents, runs)
        self.exec_info = dict.fromkeys(runs, True)
        self.dependencies = {node: 0 for node in found if node in runs or node is self.root}
        for visited, node in enumerate(runs):
            if not visited % DISCOVER_STRIDE:
                yield
            for _, child in self.edges_of(node):
                if child in runs:
                    self.dependencies[child] += 1
        yield from self._expect()

    def _plan_sweep(self, placement: Placement) -> Generator[None, None, bool]:
        """Find out what a sweep would run, and whether it can; see `GraphTask._plan`."""
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
            if visited > SORT_NODES or node._extra is not None:
                return False
            if node.is_leaf and node.post_accumulate_hooks:  # type: ignore[attr-defined]
                return False
            if not is_small and not placement.allows_sweep(node):
                return False
            if not node.is_leaf:
                nodes.append(node)
                left = self._left.get(node)
                for child in node.next_nodes if left is None else [node.next_nodes[i] for i in left]:
                    if child is not None and child not in found:
                        found.add(child)
                        stack.append(child)
        nodes.sort(key=sequence)
        ends = [node for node in self._accumulate_into if node in found]
        wanted = set(ends)
        #: where something arrives from a node that runs
        fed: set[Node | None] = set()
        plan: list[Node] = []
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
                plan.append(node)
                if needs.count(True) + children.count(None) != len(needs):
                    self.special[node] = tuple(needs)
                if self._has_terms:
                    fed.update([child for child, need in zip(children, needs, strict=True) if need])
        if self._has_terms and any(node in fed and key[0] != FIRST for (node, _), key in zip(self.roots, self._keys, strict=True)):
            return False  # it would have to be added between what two nodes return
        self._finish_plan(plan, ends)
        return True

    def first_sums(self) -> dict[Node, Any]:
        """What the sweep starts from."""
        order = sorted(range(len(self.roots)), key=self._keys.__getitem__)
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

    def _expect(self) -> Iterator[None]:
        for visited, node in enumerate(self.exec_info or ()):
            if not visited % DISCOVER_STRIDE:
                yield
            for index, child in self.edges_of(node):
                if child is not None and self.dependencies.get(child, 0) > 1:
                    self._expected.setdefault(child, []).append(self._key_of(node, index))
        for keys in self._expected.values():
            keys.sort()

    def _key_of(self, node: Node, index: int) -> Key:
        return self._keys[index] if node is self.root else (-node._seq, index)

    def should_compute(self, node: Node, output: int) -> bool:
        """Whether this half wants output `output` of the node."""
        left = self._left.get(node)
        return node.next_nodes[output] in (self.exec_info or ()) and (left is None or output in left)

    def gets_gradient(self, node: Node) -> bool:
        """Whether a gradient arrives at the node in this half."""
        return node in self.dependencies and node not in self._left

    def unpacked(self, node: Node) -> tuple[Any, ...] | None:
        """What the other half has unpacked."""
        return self._values.pop(node, None)

    def complete(self, node: Node, outputs: Sequence[Array | None]) -> None:
        """Take what a node returned, one fitted gradient per edge, and make ready what was waiting for it only."""
        self.completed_nodes += 1
        for index, child in self.edges_of(node):
            left = self.dependencies.get(child) if child is not None else None
            if left is not None:
                self._deliver(child, node.next_nrs[index], outputs[index], self._key_of(node, index), left)  # type: ignore[arg-type]
        self.outstanding -= 1


def weight_half(groups: Sequence[ParameterGroup], keep: bool) -> tuple[list[tuple[Node, int]], list[Array], dict[str, Any]]:
    """Edges to start from, their gradients, and options of the `WeightHalf` of these groups.

    Args:
        keep: leave the groups as they are, for another pass; else they are empty afterwards.

    Raises:
        GraphFreedError: one of them has been used before. ArgumentError: there are none.
    """
    roots: list[tuple[Node, int]] = []
    seeds: list[Array] = []
    keys: list[Key] = []
    starts: list[Start] = []
    inputs: list[tuple[Node, int]] = []
    if not groups:
        raise ArgumentError("the weight half of a pass: there are no parameter groups to run")
    for group in groups:
        if group.is_spent:
            raise GraphFreedError(
                "Trying to compute the gradients of weights a second time: the parameter group has been used. Specify retain_graph=True the first "
                "time if you need it again."
            )
    for group in groups:
        inputs += [(node, 0) for node in group.nodes]
        for start in group.starts:
            starts.append(Start(start.node, (), start.outputs, start.values))
            for nr, grad in enumerate(start.grads):
                if grad is not None:
                    roots.append((start.node, nr))
                    keys.append((FIRST, nr))
                    seeds.append(grad)
        for term in group.terms:
            roots.append((term.node, term.nr))
            keys.append(term.key)
            seeds.append(term.grad)
        if not keep:
            group.starts.clear()
            group.terms.clear()
            group.watched.clear()
    recomputed = {region: values for group in groups if group.recomputed for region, values in group.recomputed.items()}
    if not keep:
        for group in groups:
            group.recomputed = None
    placement = groups[0].placement
    if any(group.placement is not placement for group in groups):
        placement = None
    return roots, seeds, {"keys": keys, "starts": starts, "placement": placement, "recomputed": recomputed, "inputs": inputs, "keep_graph": keep}
