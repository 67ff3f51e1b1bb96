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

Note [Halves of small graphs are swept]
    What surrounds the rules costs a small stage several times what they do, and halves have more of it than an undivided pass. So where a sweep could
    run the whole graph, it runs the halves: numbers are a topological order there, so one look at each node, from the first recorded on,
    says what it leads to (`_plan`), and rows run by code compiled for the outputs wanted (`OpNode.vjp_part`), and there are no buffers
    and counts. Only where a gradient that undivided work has returned would have to be added between two others, the weight half counts.
    Measured by ``tests/benchmarks/pipelines.py``: both halves of a stage of a few small layers in about twice the time of the undivided pass.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2024), for the idea of two halves; PyTorch ``distributed/pipelining/_backward.py``, which cuts
elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from aiograd.engine.graph_task import DISCOVER_STRIDE, GraphRoot, GraphTask
from aiograd.engine.parameter_group import FIRST, Start, Term
from aiograd.engine.parameter_group import ParameterGroup as ParameterGroup
from aiograd.engine.placement import Placement
from aiograd.engine.validate import fit_outputs
from aiograd.engine.weight_half import WeightHalf as WeightHalf
from aiograd.engine.weight_half import above
from aiograd.engine.weight_half import weight_half as weight_half
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.node import Node
from aiograd.ops.partial import dense
from aiograd.types import Array


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
        #: gradients for the other half; first those that the pass itself starts from, then what undivided work returned
        self._terms = [Term(node, nr, (FIRST, i), seed) for i, ((node, nr), seed) in enumerate(zip(roots, seeds, strict=True))]
        #: upper node -> numbers of its outputs that are left to the other half
        self._left: dict[Node, tuple[int, ...]] = {}
        self._undivided: set[Node] = set()
        self._aside: dict[Node, tuple[Array | None, ...]] = {}
        self._values: dict[Node, tuple[Any, ...]] = {}
        self._asked: set[Node] = set()
        #: node of the other half, or one where it starts -> group, and which groups turned out to be one
        self._labels: dict[Node, int] = {}
        self._same: list[int] = []
        self._placement: Placement | None = None

    # ---------------------------------------------------------------- discovery

    def _sequence_floor(self) -> int:
        return 0

    def _restrict(self, parents: dict[Node, list[Node]]) -> Iterator[None]:
        if self._weights is None:
            self._weights = [node for node in self.dependencies if isinstance(node, AccumulateGrad) and node not in self.captures]
        leads: dict[Node, None] = {}
        yield from above([node for node in self._weights if node in self.dependencies], parents, leads)
        targets = [node for node in self.captures if node in self.dependencies]
        if not targets:
            targets = [node for node in leads if None in node.next_nodes]
        upper: dict[Node, None] = {}
        yield from above(targets, parents, upper)
        for visited, node in enumerate(upper):
            if not visited % DISCOVER_STRIDE:
                yield
            left = tuple([i for i, child in enumerate(node.next_nodes) if child in leads and child not in upper])
            if left and not (node is self.root and isinstance(node, GraphRoot)):
                self._left[node] = left
                self.captures.setdefault(node, [])
        self._terms = [term for term in self._terms if term.node in leads and term.node not in upper]
        yield from super()._restrict(parents)
        yield from self._divide(upper)
        yield from self._group(leads)

    def _divide(self, upper: Collection[Node]) -> Iterator[None]:
        """Find out which rows make gradients for both halves at once."""
        for visited, (node, left) in enumerate(self._left.items()):
            if not visited % DISCOVER_STRIDE:
                yield
            if node.is_builtin and not node.is_divisible:  # type: ignore[attr-defined]
                first = [i for i, child in enumerate(node.next_nodes) if child in upper]
                if first and node.shares_work(first, left):  # type: ignore[attr-defined]
                    self._undivided.add(node)
        self.kept = self._left.keys() - self._undivided

    def _discover(self, placement: Placement) -> Iterator[None]:
        self._placement = placement
        return super()._discover(placement)

    def _plan(self, nodes: list[Node]) -> Iterator[None]:
        if self._weights is None:
            self._weights = [node for node in self.dependencies if isinstance(node, AccumulateGrad) and node not in self.captures]
        leads: set[Node] = {node for node in self._weights if node in self.dependencies}
        targets = [node for node in self.captures if node in self.dependencies]
        upper = set(targets)
        plan: list[Node] = []
        special, captures, left = self.special, self.captures, self._left
        for visited, node in enumerate(nodes, 1):
            if not visited % DISCOVER_STRIDE:
                yield
            children = node.next_nodes
            leads_on = not leads.isdisjoint(children)
            if leads_on:
                leads.add(node)
            runs = not upper.isdisjoint(children)
            if runs:
                if len(children) > 1:
                    needs = tuple([child in upper for child in children])
                    if needs.count(True) + children.count(None) != len(needs):
                        special[node] = needs
                if node in captures:
                    special.setdefault(node, None)
                upper.add(node)
                plan.append(node)
            elif not targets and leads_on and None in children:
                upper.add(node)
            elif node not in upper:
                continue
            if leads_on and (not runs or special.get(node)) and (node is not self.root or not isinstance(node, GraphRoot)):
                others = tuple([i for i, child in enumerate(children) if child in leads and child not in upper])
                if others:
                    left[node] = others
                    if not runs:
                        captures.setdefault(node, [])
        self._finish_plan(plan, [node for node in captures if node in upper])
        self._terms = [term for term in self._terms if term.node in leads and term.node not in upper]
        yield from self._divide(upper)
        yield from self._group(leads)

    def _group(self, leads: Collection[Node]) -> Iterator[None]:
        """Find out which nodes of the other half hang together."""
        labels, same = self._labels, self._same
        stacks: list[list[Node | None]] = []
        for start, left in self._left.items():
            labels[start] = len(stacks)
            stacks.append([start.next_nodes[i] for i in left])
        stacks += [[term.node] for term in self._terms]
        same += range(len(stacks))
        visited = 0
        for label, stack in enumerate(stacks):
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
                    stack += node.next_nodes

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

    def run_part(self, node: Node, grad: Any) -> Sequence[Array | None]:
        """Of a sweep; see `GraphTask.run_part`. What a row that makes gradients for both halves returns for the other one is put aside."""
        left = self._left.get(node, ())
        if node not in self._undivided:
            if left:
                self._aside[node] = (grad,) if node.is_single else tuple(grad)
            return super().run_part(node, grad)
        self.special[node] = tuple([need or i in left for i, need in enumerate(self.special[node] or ())])
        outputs = list(map(dense, fit_outputs(node, super().run_part(node, grad))))
        self._put_aside(node, outputs)
        return [None if i in left else output for i, output in enumerate(outputs)]

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
            self._put_aside(node, outputs)
        super().complete(node, outputs)

    def _put_aside(self, node: Node, outputs: Sequence[Array | None]) -> None:
        """Keep what a node that has done all its work returned for the other half."""
        for i in self._left[node]:
            grad, child = outputs[i], node.next_nodes[i]
            if grad is not None and child is not None:
                self._terms.append(Term(child, node.next_nrs[i], (-node._seq, i), grad))
        self._forget(node)

    def _forget(self, node: Node) -> None:
        """The other half does not run this node."""
        del self._left[node]
        self._aside.pop(node, None)
        self._values.pop(node, None)
        if not self.keep_graph:
            node.release_variables(self.released)

    # ---------------------------------------------------------------- results

    def finish(self) -> None:
        """As of any pass; what was computed again stays for the other half."""
        recomputed = self.recomputed
        super().finish()
        if self.error is None:
            self.recomputed = recomputed

    def groups(self) -> list[ParameterGroup]:
        """What is left for the other half, in the order of the weights. Call it once, when the pass is over."""
        by_label: dict[int, ParameterGroup] = {}
        labels = self._labels
        for weight in self._weights or ():
            if weight in labels:
                label = self._label(labels[weight])
                group = by_label.get(label)
                if group is None:
                    group = by_label[label] = ParameterGroup(self._placement if self.is_plain else None)
                group.nodes.append(weight)
        for node, left in list(self._left.items()):
            for grad in (grads := self._aside.get(node, ())):
                if grad is not None:
                    by_label[self._label(labels[node])].starts.append(Start(node, grads, left, self._values.get(node)))
                    break
            else:
                self._forget(node)
        for term in self._terms:
            by_label[self._label(self._labels[term.node])].terms.append(term)
        for part in (self._terms, self._left, self._aside, self._values, self._labels, self._asked, self._undivided):
            part.clear()
        self.kept = ()
        left_over = [group for group in by_label.values() if not group.is_spent]
        recomputed, self.recomputed = self.recomputed, None
        for group in left_over:
            group.recomputed = recomputed
        return left_over
