"""ParameterGroup: the work that the first half of a backward pass leaves to the second. See `aiograd.engine.split_backward`."""

from __future__ import annotations

from typing import Any, NamedTuple

from aiograd.engine.input_buffer import Key
from aiograd.engine.placement import RulePlacement
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.node import Node
from aiograd.running.types import Array

#: the producer's number in the keys of seeds, smaller than the key of every node: seeds come first in sums
FIRST = -(1 << 64)


class Start(NamedTuple):
    """A node that runs in both halves."""

    node: Node
    #: the gradients that have arrived at its inputs
    grads: tuple[Array | None, ...]
    #: numbers of the outputs that are left to the weight half
    outputs: tuple[int, ...]
    #: its saved values, if saved-tensor hooks had packed them
    values: tuple[Any, ...] | None


class Term(NamedTuple):
    """A gradient that goes to input `nr` of a node of the weight half."""

    node: Node
    nr: int
    #: its sort key in the sum at that input
    key: Key
    grad: Array


class ParameterGroup:
    """Weights with gradients that are computed together, and the values needed for it.

    Two weights are in one group where a node of the weight half leads to both. Made by the input half; the weight half empties it.

    Args:
        placement: the placement that has found every node of the graph small; None: not all are.

    >>> layer = ag.nn.Linear(2, 1)
    >>> x = ag.ones(3, 2).requires_grad_()
    >>> _, groups = await ag.pipeline.stage_backward_input([layer(x)], [ag.ones(3, 1)], [x], layer.parameters())
    >>> type(groups[0]).__name__
    'ParameterGroup'
    """

    __slots__ = ("nodes", "starts", "terms", "watched", "placement", "recomputed")

    def __init__(self, placement: RulePlacement | None = None) -> None:
        #: nodes of the weights
        self.nodes: list[AccumulateGrad] = []
        self.starts: list[Start] = []
        self.terms: list[Term] = []
        #: Tensors that share memory with the gradients above, each with its version
        self.watched: list[tuple[Any, int]] = []
        #: the placement that has found every node of the graph small; None: not all are
        self.placement: RulePlacement | None = placement
        #: recomputed values of checkpointed regions that the weight half needs too
        self.recomputed: dict[int, Any] | None = None

    def __repr__(self) -> str:
        state = "spent" if self.is_spent else f"{len(self.starts)} nodes to run again, {len(self.terms)} gradients"
        return f"<ParameterGroup of {len(self.nodes)} weights: {state}>"

    def clear(self) -> None:
        """Drop everything; called when the weight half has run."""
        self.starts.clear()
        self.terms.clear()
        self.watched.clear()
        self.recomputed = None

    @property
    def is_spent(self) -> bool:
        """True if the weight half has used it."""
        return not self.starts and not self.terms

    @property
    def params(self) -> set[Any]:
        """The weights that still exist."""
        return {tensor for node in self.nodes if (tensor := node.leaf()) is not None}

    @property
    def intermediates(self) -> set[Node]:
        """The nodes from which the weight half starts."""
        return {start.node for start in self.starts} | {term.node for term in self.terms}
