"""GradientEdge: a place in the graph, as a root of a pass or an input of `ag.grad`, that does not keep the tensor alive."""

from __future__ import annotations

from typing import NamedTuple

from aiograd.graph.node import Node


class GradientEdge(NamedTuple):
    """Input `output_nr` of `node`: the place where the gradient of output `output_nr` of the node's operation arrives.

    For a leaf it is ``(AccumulateGrad, 0)``. It stays valid when the tensor is modified in place or deleted.
    """

    node: Node
    output_nr: int
