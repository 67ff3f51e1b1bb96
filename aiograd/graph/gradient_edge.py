"""GradientEdge: a place in the graph to start from or to ask for, without holding on to the tensor."""

from __future__ import annotations

from typing import NamedTuple

from aiograd.graph.node import Node


class GradientEdge(NamedTuple):
    """Input `output_nr` of `node`: the place where the gradient of output `output_nr` of the node's operation arrives.

    Of a leaf it is ``(AccumulateGrad, 0)``. It stays valid when the tensor is modified in place or gone.
    """

    node: Node
    output_nr: int
