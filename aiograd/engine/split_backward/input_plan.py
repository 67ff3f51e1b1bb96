"""InputPlan: the first half of a backward pass, to the gradients of some inputs. See `aiograd.engine.split_backward`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from aiograd.engine.graph_root import GraphRoot
from aiograd.engine.pass_hooks import PassHooks
from aiograd.engine.placement import RulePlacement
from aiograd.engine.plan import DISCOVER_STRIDE
from aiograd.engine.selection import Selection
from aiograd.engine.split_backward.parameter_group import FIRST, ParameterGroup, Start, Term
from aiograd.engine.split_backward.walk import above
from aiograd.engine.staged_commit import StagedCommit
from aiograd.engine.validate import fit_outputs
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.node import Node
from aiograd.ops.slice_gradient import dense
from aiograd.running.types import Array


class InputPlan(Selection):
    """A plan that computes gradients of inputs and keeps the values that the weight half needs.

    Args:
        roots, seeds: roots and seeds of both halves.
        inputs: gradient edges, the wanted gradients; they come as the result of the pass.
        weights: leaves that get their gradients in the other half; None: all that are not among the inputs.
    """

    may_cross = False

    def __init__(
        self,
        roots: Sequence[tuple[Node, int]],
        seeds: Sequence[Array],
        inputs: Sequence[tuple[Node, int]],
        weights: Iterable[AccumulateGrad] | None = None,
    ) -> None:
        super().__init__(roots, seeds, inputs)
        self._weights = None if weights is None else list(dict.fromkeys(weights))
        #: gradients for the other half; first the seeds of the pass, then the gradients that undivided work returned
        self._terms = [Term(node, nr, (FIRST, i), seed) for i, ((node, nr), seed) in enumerate(zip(roots, seeds, strict=True))]
        #: upper node -> numbers of its outputs that are left to the other half
        self.divided: dict[Node, tuple[int, ...]] = {}
        self._undivided: set[Node] = set()
        self._aside: dict[Node, tuple[Array | None, ...]] = {}
        self._values: dict[Node, tuple[Any, ...]] = {}
        self._asked: set[Node] = set()
        #: node of the other half, or a node where it starts -> its group; groups that turned out to be one are joined
        self._labels: dict[Node, int] = {}
        self._same: list[int] = []
        self._placement: RulePlacement | None = None

    # ---------------------------------------------------------------- discovery

    def _sequence_floor(self, hooks: PassHooks | None) -> int:
        return 0

    def _select(self, placement: RulePlacement, hooks: PassHooks | None, floor: int) -> Iterator[None]:
        self._placement = placement
        return super()._select(placement, hooks, floor)

    def _reached_weights(self) -> list[AccumulateGrad]:
        """The weights of the other half that are in the graph."""
        if self._weights is None:
            self._weights = [node for node in self.dependencies if isinstance(node, AccumulateGrad) and node not in self.captures.at]
        return [node for node in self._weights if node in self.dependencies]

    def _restrict(self, parents: dict[Node, list[Node]]) -> Iterator[None]:
        captured = self.captures.at
        leads: dict[Node, None] = {}
        yield from above(self._reached_weights(), parents, leads)
        targets = [node for node in captured if node in self.dependencies]
        if not targets:
            targets = [node for node in leads if None in node.next_nodes]
        upper: dict[Node, None] = {}
        yield from above(targets, parents, upper)
        for visited, node in enumerate(upper):
            if not visited % DISCOVER_STRIDE:
                yield
            left = tuple([i for i, child in enumerate(node.next_nodes) if child in leads and child not in upper])
            if left and not (node is self.root and isinstance(node, GraphRoot)):
                self.divided[node] = left
                captured.setdefault(node, [])
        self._terms = [term for term in self._terms if term.node in leads and term.node not in upper]
        yield from super()._restrict(parents)
        yield from self._divide(upper)
        yield from self._group(leads)

    def _divide(self, upper: Collection[Node]) -> Iterator[None]:
        """Find the rows that compute gradients for both halves at once."""
        for visited, (node, left) in enumerate(self.divided.items()):
            if not visited % DISCOVER_STRIDE:
                yield
            if node.is_builtin and not node.is_divisible:  # type: ignore[attr-defined]
                first = [i for i, child in enumerate(node.next_nodes) if child in upper]
                if first and node.shares_work(first, left):  # type: ignore[attr-defined]
                    self._undivided.add(node)
            elif node.divides_itself:
                node.leave(left)  # type: ignore[attr-defined]
        self.kept = self.divided.keys() - self._undivided

    def _put_in_order(self, nodes: list[Node]) -> Iterator[None]:
        leads: set[Node] = set(self._reached_weights())
        special, captured, left = self.special, self.captures.at, self.divided
        targets = [node for node in captured if node in self.dependencies]
        upper = set(targets)
        order: list[Node] = []
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
                if node in captured:
                    special.setdefault(node, None)
                upper.add(node)
                order.append(node)
            elif not targets and leads_on and None in children:
                upper.add(node)
            elif node not in upper:
                continue
            if leads_on and (not runs or special.get(node)) and (node is not self.root or not isinstance(node, GraphRoot)):
                others = tuple([i for i, child in enumerate(children) if child in leads and child not in upper])
                if others:
                    left[node] = others
                    if not runs:
                        captured.setdefault(node, [])
        self._set_order(order, [node for node in captured if node in upper])
        self._terms = [term for term in self._terms if term.node in leads and term.node not in upper]
        yield from self._divide(upper)
        yield from self._group(leads)

    def _group(self, leads: Collection[Node]) -> Iterator[None]:
        """Find the connected groups among the nodes of the other half."""
        labels, same = self._labels, self._same
        stacks: list[list[Node | None]] = []
        for start, left in self.divided.items():
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
        """True if this half wants output `output` of the node, or gets it anyway; also records that the node has asked."""
        self._asked.add(node)
        return super().should_compute(node, output) or (node in self._undivided and output in self.divided[node])

    def run_part(self, node: Node, grad: Any, staged: StagedCommit) -> Sequence[Array | None]:
        """Run a node of a walk; gradients that a row computes for the other half as well are kept for it."""
        left = self.divided.get(node, ())
        if node not in self._undivided:
            if left:
                self._aside[node] = (grad,) if node.is_single else tuple(grad)
            return super().run_part(node, grad, staged)
        self.special[node] = tuple([need or i in left for i, need in enumerate(self.special[node] or ())])
        outputs = list(map(dense, fit_outputs(node, super().run_part(node, grad, staged))))
        self._put_aside(node, outputs)
        return [None if i in left else output for i, output in enumerate(outputs)]

    def capture(self, node: Node, grads: Sequence[Array | None], staged: StagedCommit) -> None:
        """Capture gradients as any pass does, and keep the gradients that the other half needs."""
        if node in self.divided:
            self._aside[node] = tuple(grads)
        super().capture(node, grads, staged)

    def keep_unpacked(self, node: Node, values: tuple[Any, ...]) -> None:
        """Keep the unpacked values of a node for the other half."""
        if node in self.kept:
            self._values[node] = values

    def has_run(self, node: Node, outputs: Sequence[Array | None]) -> None:
        """If the node has done the work of both halves, keep its outputs for the other half."""
        if self.runs(node) and (node in self._undivided or (not node.is_builtin and node not in self._asked)):
            self._put_aside(node, outputs)

    def _put_aside(self, node: Node, outputs: Sequence[Array | None]) -> None:
        """Keep the outputs for the other half of a node that has done the work of both."""
        for i in self.divided[node]:
            grad, child = outputs[i], node.next_nodes[i]
            if grad is not None and child is not None:
                self._terms.append(Term(child, node.next_nrs[i], (-node._seq, i), grad))
        self._forget(node)

    def _forget(self, node: Node) -> None:
        """Take the node out of the other half."""
        del self.divided[node]
        self._aside.pop(node, None)
        self._values.pop(node, None)
        if self.released is not None:
            node.release_variables(self.released)

    # ---------------------------------------------------------------- results

    def finish(self, is_done: bool) -> None:
        """End the pass as usual; recomputed values of checkpointed regions stay for the other half."""
        recomputed = self._recomputed
        super().finish(is_done)
        if is_done:
            self._recomputed = recomputed

    def groups(self) -> list[ParameterGroup]:
        """The groups of weights left to the other half, in the order of the weights. Call it once, when the pass is over."""
        by_label: dict[int, ParameterGroup] = {}
        labels = self._labels
        for weight in self._weights or ():
            if weight in labels:
                label = self._label(labels[weight])
                group = by_label.get(label)
                if group is None:
                    group = by_label[label] = ParameterGroup(self._placement if self.is_plain else None)
                group.nodes.append(weight)
        for node, left in list(self.divided.items()):
            for grad in (grads := self._aside.get(node, ())):
                if grad is not None:
                    by_label[self._label(labels[node])].starts.append(Start(node, grads, left, self._values.get(node)))
                    break
            else:
                self._forget(node)
        for term in self._terms:
            by_label[self._label(self._labels[term.node])].terms.append(term)
        for each in (self._terms, self.divided, self._aside, self._values, self._labels, self._asked, self._undivided):
            each.clear()
        self.kept = ()
        left_over = [group for group in by_label.values() if not group.is_spent]
        recomputed, self._recomputed = self._recomputed, None
        for group in left_over:
            group.recomputed = recomputed
        return left_over
