"""A naive autograd to compare the engine with: synchronous, recursive in nothing, sure of everything, about a hundred lines.

A `Node` is an immutable value with the operations that made it; rules are written in the same operations, so a pass can record itself.
A `Variable` is what a Tensor is to its user: a name whose value may be replaced in place, directly or through a view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeAlias

import numpy as np

Rule: TypeAlias = "Callable[[Node], Node]"

_numbers = count(1)
#: magnitude of the largest number computed so far: below 2**53 integers are exact
largest = 0.0


class Node:
    """A value; `parents` and, for each, the rule that turns the gradient of this value into a contribution to the parent's."""

    def __init__(self, value: Any, parents: Sequence[Node] = (), rules: Sequence[Rule] = (), *, requires_grad: bool = False) -> None:
        global largest
        self.value = np.asarray(value, dtype=np.float64)
        largest = max(largest, float(np.max(np.abs(self.value), initial=0.0)))
        edges = [(parent, rule) for parent, rule in zip(parents, rules, strict=True) if parent.requires_grad] if recording else []
        self.edges = edges
        self.is_leaf = requires_grad
        self.requires_grad = requires_grad or bool(edges)
        self.number = 0 if requires_grad else next(_numbers)
        self.hooks: list[Rule] = []
        #: (counter, its value then) of every variable whose value the rules need
        self.saved: list[tuple[list[int], int]] = []
        #: its rule raises, or runs a pass of its own
        self.fails = self.nests = False
        #: it keeps shapes and the like, which only a failed pass takes
        self.keeps_facts = False
        #: the engine may need several nodes for it, of which some save something
        self.is_vague = False
        #: whether a pass has spent it: "no", "yes" or "perhaps"
        self.freed = "no"


recording = True


def unbroadcast(g: Node, like: Node) -> Node:
    return g if g.value.shape == like.value.shape else total(g)  # scalars are all that is broadcast here


def add(a: Node, b: Node) -> Node:
    return Node(a.value + b.value, (a, b), (lambda g: unbroadcast(g, a), lambda g: unbroadcast(g, b)))


def mul(a: Node, b: Node) -> Node:
    return Node(a.value * b.value, (a, b), (lambda g: unbroadcast(mul(g, b), a), lambda g: unbroadcast(mul(g, a), b)))


def scale(a: Node, factor: float) -> Node:
    return Node(a.value * factor, (a,), (lambda g: scale(g, factor),))


def total(a: Node) -> Node:
    return Node(a.value.sum(), (a,), (lambda g: spread(g, a.value.shape),))


def spread(a: Node, shape: tuple[int, ...]) -> Node:
    return Node(np.broadcast_to(a.value, shape), (a,), (total,))


def take(a: Node, indices: np.ndarray[Any, Any]) -> Node:
    """Elements of `a` by position."""
    made = Node(a.value.reshape(-1)[indices], (a,), (lambda g: put(Node(np.zeros(a.value.shape)), g, indices),))
    made.is_vague = True
    return made


def put(a: Node, b: Node, indices: np.ndarray[Any, Any]) -> Node:
    """`a` with the elements at these positions replaced by `b`."""
    value = a.value.copy().reshape(-1)
    value[indices] = b.value
    made = Node(value.reshape(a.value.shape), (a, b), (lambda g: put(g, Node(np.zeros(indices.shape)), indices), lambda g: take(g, indices)))
    made.is_vague = True
    return made


class Variable:
    """The node and output that a Tensor stands for."""

    def __init__(self, node: Node, base: Variable | None = None, indices: Any = None) -> None:
        self._node = node
        self.base, self.indices = base, indices
        self.counter: list[int] = [0] if base is None else base.counter
        self._of = None if base is None else base.node
        self.grad: np.ndarray[Any, Any] | None = None

    @property
    def node(self) -> Node:
        """The current value."""
        if self.base is not None and self.base.node is not self._of:
            self._of = self.base.node
            self._node = take(self._of, self.indices)
        return self._node

    def replace(self, node: Node) -> None:
        """Modify in place."""
        self.counter[0] += 1
        self._replace(node)

    def _replace(self, node: Node) -> None:
        if self.base is None:
            self._node = node
        else:
            self.base._replace(put(self.base.node, node, self.indices))


class Pass:
    """The results of one pass: `grads` by node, and the nodes it executes, in order."""

    def __init__(self, root: Node, seed: np.ndarray[Any, Any], inputs: Sequence[Node] | None, accumulate: bool, create_graph: bool = False) -> None:
        global recording
        reachable, stack = {root}, [root]
        while stack:
            for parent, _ in stack.pop().edges:
                if parent not in reachable:
                    reachable.add(parent)
                    stack.append(parent)
        order = sorted(reachable, key=lambda node: -node.number)
        executed = set(order) if inputs is None else {node for node in inputs if accumulate and node in reachable}
        if inputs is not None:
            on_path = {node for node in inputs if node in reachable}
            for node in reversed(order):  # parents first
                if any(parent in on_path for parent, _ in node.edges):
                    on_path.add(node)
                    executed.add(node)
        self.executed = [node for node in order if node in executed]
        self.seen = executed | {node for node in inputs or () if node in reachable}
        self.grads: dict[Node, Node] = {root: Node(seed)}
        before, recording = recording, create_graph
        for node in order:
            if node in self.grads and node in self.seen:
                for hook in node.hooks:
                    self.grads[node] = hook(self.grads[node])
                for parent, rule in node.edges if node in executed else ():
                    if parent in self.seen:
                        part = rule(self.grads[node])
                        self.grads[parent] = add(self.grads[parent], part) if parent in self.grads else part
        recording = before
