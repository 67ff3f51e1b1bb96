"""ParameterGroup: what the first half of a backward pass leaves to the second. See `aiograd.engine.halves`."""

from __future__ import annotations

from typing import Any, NamedTuple

from aiograd.engine.input_buffer import Key
from aiograd.engine.placement import Placement
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.node import Node
from aiograd.types import Array

#: in the place of the producer, for what a pass starts from: before everything it computes
FIRST = -(1 << 64)


class Start(NamedTuple):
    """A node that runs in both halves."""

    node: Node
    #: what has arrived at its inputs
    grads: tuple[Array | None, ...]
    #: numbers of the outputs that are left to the weight half
    outputs: tuple[int, ...]
    #: what it saved, where saved-tensor hooks had packed that
    values: tuple[Any, ...] | None


class Term(NamedTuple):
    """A gradient that goes to input `nr` of a node of the weight half."""

    node: Node
    nr: int
    #: its place in the sum that is made there
    key: Key
    grad: Array


class ParameterGroup:
    """Weights whose gradients are computed together, and all that this takes.

    Two weights are in one group where a node of the weight half leads to both. Made by the input half; the weight half empties it.
    """

    __slots__ = ("nodes", "starts", "terms", "watched", "placement", "recomputed")

    def __init__(self, placement: Placement | None = None) -> None:
        #: of the weights
        self.nodes: list[AccumulateGrad] = []
        self.starts: list[Start] = []
        self.terms: list[Term] = []
        #: Tensors whose memory the gradients above share, each with its version
        self.watched: list[tuple[Any, int]] = []
        #: what has found every node of the graph small, None: nothing has
        self.placement = placement
        #: what checkpointed regions computed in the input half and the weight half needs, too
        self.recomputed: dict[int, Any] | None = None

    def __repr__(self) -> str:
        state = "spent" if self.is_spent else f"{len(self.starts)} nodes to run again, {len(self.terms)} gradients"
        return f"<ParameterGroup of {len(self.nodes)} weights: {state}>"

    @property
    def is_spent(self) -> bool:
        """Whether the weight half has used it."""
        return not self.starts and not self.terms

    @property
    def params(self) -> set[Any]:
        """The weights that still exist."""
        return {tensor for node in self.nodes if (tensor := node.leaf()) is not None}

    @property
    def intermediates(self) -> set[Node]:
        """The nodes from which the weight half starts."""
        return {start.node for start in self.starts} | {term.node for term in self.terms}
