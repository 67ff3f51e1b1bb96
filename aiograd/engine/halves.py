"""A backward pass in two halves: first the gradients of some inputs, later those of the weights. Pure, as `GraphTask` is.

A pipeline sends the gradient of a stage's inputs on as early as it can and computes the gradients of its weights when it has nothing better to
do. `InputHalf` is the pass for the first, `ParameterGroup` what it leaves behind, `WeightHalf` the pass for the second. Both are the usual
GraphTask over a part of the graph, so that hooks, user code, placement, cancellation and the commit work as ever.

Note [Where the cut goes]
    Call *upper* the nodes from which an input can be reached, inputs included. Every node that leads to an upper node is upper, so the gradients
    of upper nodes need nothing but upper nodes: the input half computes them all. What is left are the edges that lead from an upper node
    out of this region and on to a weight, and what lies below them. The weight half starts from the upper nodes with such edges, with the gradients
    that have arrived there, runs each of them once more for just these edges, and goes on to the weights. So every edge of the graph belongs
    to one half, whatever the graph looks like: weights used twice on one path, nodes with several outputs, heads that no input reaches.
    Each sum is made in one half, of the same terms in the same order as in an undivided pass, so the gradients are the same to the bit.

Note [Where no input needs a gradient]
    As in the first stage of a pipeline. Then a node is upper if it leads to a node that takes in something that needs no gradient (the
    data, most likely): gradients of activations are the first half, those of weights the second.

Note [Work that cannot be divided]
    Some rules make gradients for both halves at once: joint rules of rows, and functions of users that do not ask what is needed. They run
    in the input half, and what they return for the edges of the other half is kept instead of what they saved. Whether a function asks is
    seen while it runs (`InputHalf.should_compute`): one that did not has returned all it has.

Note [What is kept in between]
    Of an upper node that runs again: its gradient and what it saved. Everything else that upper nodes saved is released in the input half. Values
    that saved-tensor hooks had packed are unpacked once and handed on. In the weight half, a gradient goes as soon as its node has run. Nothing
    that is kept refers to a tensor that a stage returned, to a pass, or back to the group.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2024), for the idea of two halves; PyTorch ``distributed/pipelining/_backward.py``, which cuts
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from aiograd.engine.graph_task import DISCOVER_STRIDE, GraphRoot, GraphTask
from aiograd.engine.input_buffer import Key
from aiograd.engine.parameter_group import ParameterGroup as ParameterGroup
from aiograd.engine.parameter_group import Start, Term
from aiograd.engine.placement import Placement
from aiograd.errors import ArgumentError, GraphFreedError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.node import Node
from aiograd.types import Array

#: in the place of the producer, for what a pass starts from: before everything it computes
_FIRST = -(1 << 64)


def _above(nodes: Iterable[Node], parents: dict[Node, list[Node]], found: dict[Node, None]) -> Iterator[None]:
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


class InputHalf(GraphTask):
    """The pass that computes gradients of inputs, and puts aside what the weights need. See the module.

    Args:
        roots, seeds: of both halves.
        inputs: gradient edges whose gradients are wanted; they come as the result of the pass.
        weights: leaves whose gradients are left to the weight half; None: all that are not among the inputs.
        options: of `GraphTask`.
    """

    def __init__(
        self, roots: Sequence[tuple[Node, int]], seeds: Sequence[Array], *, inputs: Sequence[tuple[Node, int]],
        weights: Iterable[AccumulateGrad] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(roots, seeds, inputs=inputs, **options)
        self._weights = None if weights is None else list(dict.fromkeys(weights))
        self._terms = [Term(node, nr, (_FIRST, i), seed) for i, ((node, nr), seed) in enumerate(zip(roots, seeds, strict=True))]
        #: upper node -> numbers of its outputs that are left to the other half
        self._left: dict[Node, tuple[int, ...]] = {}
        self._undivided: set[Node] = set()
        self._aside: dict[Node, tuple[Array | None, ...]] = {}
        self._values: dict[Node, tuple[Any, ...]] = {}
        self._asked: set[Node] = set()
        #: node of the other half, or one where it starts -> group, and which groups turned out to be one
        self._labels: dict[Node, int] = {}
        self._same: list[int] = []

    # ---------------------------------------------------------------- discovery

    def _sequence_floor(self) -> int:
        return 0

    def _restrict(self, parents: dict[Node, list[Node]]) -> Iterator[None]:
        if self._weights is None:
            self._weights = [node for node in self.dependencies if isinstance(node, AccumulateGrad) and node not in self.captures]
        leads: dict[Node, None] = {}
        yield from _above([node for node in self._weights if node in self.dependencies], parents, leads)
        targets = [node for node in self.captures if node in self.dependencies]
        if not targets:
            targets = [node for node in leads if None in node.next_nodes]
        upper: dict[Node, None] = {}
        yield from _above(targets, parents, upper)
        for visited, node in enumerate(upper):
            if not visited % DISCOVER_STRIDE:
                yield
            left = tuple([i for i, child in enumerate(node.next_nodes) if child in leads and child not in upper])
            if left and not (node is self.root and isinstance(node, GraphRoot)):
                self._left[node] = left
                self.captures.setdefault(node, [])
        self._terms = [term for term in self._terms if term.node in leads and term.node not in upper]
        yield from super()._restrict(parents)
        for visited, (node, left) in enumerate(self._left.items()):
            if not visited % DISCOVER_STRIDE:
                yield
            first = [i for i, child in enumerate(node.next_nodes) if child in upper]
            if first and node.is_builtin and node.shares_work(first, left):  # type: ignore[attr-defined]
                self._undivided.add(node)
        self.kept = self._left.keys() - self._undivided
        yield from self._group(leads)

    def _group(self, leads: dict[Node, None]) -> Iterator[None]:
        """Find out which nodes of the other half hang together."""
        labels, same = self._labels, self._same
        begins: list[tuple[Node | None, list[Node | None]]] = [(node, [node.next_nodes[i] for i in left]) for node, left in self._left.items()]
        begins += [(None, [term.node]) for term in self._terms]
        visited = 0
        for start, stack in begins:
            label = len(same)
            same.append(label)
            if start is not None:
                labels[start] = label
            while stack:
                visited += 1
                if not visited % DISCOVER_STRIDE:
                    yield
                node = stack.pop()
                if node is None or node not in leads:
                    continue
                if node in labels:
                    same[self._label(labels[node])] = self._label(label)
                else:
                    labels[node] = label
                    stack.extend(node.next_nodes)

    def _label(self, label: int) -> int:
        same = self._same
        while same[label] != label:
            same[label] = label = same[same[label]]
        return label

    # ---------------------------------------------------------------- nodes

    def should_compute(self, node: Node, output: int) -> bool:
        """Whether this half wants output `output` of the node, or gets it anyway; notes that the node has asked."""
        self._asked.add(node)
        return super().should_compute(node, output) or (node in self._undivided and output in self._left[node])

    def capture(self, node: Node, grads: Sequence[Array | None]) -> None:
        """Put gradients aside."""
        if node in self._left:
            self._aside[node] = tuple(grads)
        super().capture(node, grads)

    def keep_unpacked(self, node: Node, values: tuple[Any, ...]) -> None:
        """What a node saved has been unpacked."""
        if node in self.kept:
            self._values[node] = values

    def complete(self, node: Node, outputs: Sequence[Array | None]) -> None:
        """As of any pass; and where a node has done all its work now, put aside what the other half needs of it."""
        left = self._left.get(node)
        if left is not None and self._runs(node) and (node in self._undivided or (not node.is_builtin and node not in self._asked)):
            for i in left:
                grad, child = outputs[i], node.next_nodes[i]
                if grad is not None and child is not None:
                    self._terms.append(Term(child, node.next_nrs[i], (-node._seq, i), grad))
            self._forget(node)
        super().complete(node, outputs)

    def _forget(self, node: Node) -> None:
        """The other half does not run this node."""
        del self._left[node]
        self._aside.pop(node, None)
        self._values.pop(node, None)
        if not self.keep_graph:
            node.release_variables(self.released)

    # ---------------------------------------------------------------- results

    def groups(self) -> list[ParameterGroup]:
        """What is left for the other half, in the order of the weights. Call it once, when the pass is over."""
        by_label: dict[int, ParameterGroup] = {}
        for weight in self._weights or ():
            if weight in self._labels:
                by_label.setdefault(self._label(self._labels[weight]), ParameterGroup()).nodes.append(weight)
        for node in list(self._left):
            grads = self._aside.get(node, ())
            if all(grad is None for grad in grads):
                self._forget(node)
            else:
                start = Start(node, grads, self._left[node], self._values.get(node))
                by_label[self._label(self._labels[node])].starts.append(start)
        for term in self._terms:
            by_label[self._label(self._labels[term.node])].terms.append(term)
        for part in (self._terms, self._left, self._aside, self._values, self._labels, self._asked, self._undivided):
            part.clear()
        self.kept = ()
        return [group for group in by_label.values() if not group.is_spent]


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
        roots, seeds, groups: see `weight_half`.
        options: of `GraphTask`.
    """

    def __init__(
        self, roots: Sequence[tuple[Node, int]], seeds: Sequence[Array], *, keys: Sequence[Key], starts: Sequence[Start], **options: Any
    ) -> None:
        super().__init__(roots, seeds, accumulate=True, **options)
        self.root = HalfRoot(roots, seeds)
        self._root_grads = []
        self._keys = tuple(keys)
        self._left = {start.node: start.outputs for start in starts}
        self._values = {start.node: start.values for start in starts if start.values is not None}
        self.resumed = self._left.keys()

    def edges_of(self, node: Node) -> Iterable[tuple[int, Node | None]]:
        """Of a node that runs again only those that were left."""
        left = self._left.get(node)
        return enumerate(node.next_nodes) if left is None else [(i, node.next_nodes[i]) for i in left]

    def _discover(self, placement: Placement) -> Iterator[None]:
        self.is_plain = False
        parents: dict[Node, list[Node]] = {}
        found: dict[Node, int] = {self.root: 0}
        stack = [self.root]
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
        yield from _above([node for node in self._accumulate_into if node in found], parents, runs)
        self.exec_info = dict.fromkeys(runs, True)
        self.dependencies = {node: 0 for node in found if node in runs or node is self.root}
        for visited, node in enumerate(runs):
            if not visited % DISCOVER_STRIDE:
                yield
            for _, child in self.edges_of(node):
                if child in runs:
                    self.dependencies[child] += 1
        yield from self._expect()

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
        starts += [start._replace(grads=()) for start in group.starts]
        for start in group.starts:
            for nr, grad in enumerate(start.grads):
                if grad is not None:
                    roots.append((start.node, nr))
                    keys.append((_FIRST, nr))
                    seeds.append(grad)
        for term in group.terms:
            roots.append((term.node, term.nr))
            keys.append(term.key)
            seeds.append(term.grad)
        if not keep:
            group.starts.clear()
            group.terms.clear()
            group.watched.clear()
    return roots, seeds, {"keys": keys, "starts": starts, "inputs": inputs, "keep_graph": keep}
