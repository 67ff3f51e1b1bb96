"""GradientEdge: a place in the graph, as a root of a pass or an input of `ag.grad`, that does not keep the tensor alive."""

from __future__ import annotations

from typing import NamedTuple

from aiograd.graph.node import Node


class GradientEdge(NamedTuple):
    """Input `output_nr` of `node`: the place where the gradient of output `output_nr` of the node's operation arrives.

    For a leaf it is ``(AccumulateGrad, 0)``. It stays valid when the tensor is modified in place or deleted.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> y = x * x
    >>> edge = ag.graph.get_gradient_edge(y)
    >>> edge.node is y.grad_fn, edge.output_nr
    (True, 0)
    >>> await ag.grad(y.sum(), edge)
    (tensor([1., 1.]),)
    """

    node: Node
    output_nr: int
