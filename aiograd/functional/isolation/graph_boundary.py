"""GraphBoundary: where the graph that a function recorded is separated from everything around it.

While the function runs, all nodes that it records are collected. Afterwards each edge that leaves these nodes, to an argument, a parameter
that the function uses or another Tensor that it closes over, is redirected to one `GraphBoundary`, with an input per target. A pass over the
isolated graph then ends at the boundary, where its gradients are captured; no hooks of the targets run and nothing is accumulated. The caller
passes the captured gradients on to the targets.

A graph that goes through other workers cannot be run apart from the pass around it: their leaves would not be reached. Where it may become a
part of the caller's graph instead, the boundary forwards the gradients (`GraphBoundary.open`), one sum per Tensor that the function used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.errors import ContextError
from aiograd.graph.node import Node
from aiograd.running.types import Array


class GraphBoundary(Node):
    """The end of an isolated graph.

    Args:
        nodes: the nodes of the isolated graph; their edges to other nodes are redirected to the boundary.
    """

    __slots__ = ("is_crossed", "targets", "_numbers")

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__()
        self._seq = 0  # below every node that leads here: the graph keeps its order
        #: True if the graph goes through other workers; an isolated pass does not accumulate into their leaves
        self.is_crossed: bool = any(node.is_inlet for node in nodes)
        #: the gradient edge that each input stands for
        self.targets: list[tuple[Node, int]] = []
        self._numbers: dict[tuple[Node, int], int] = {}
        inside = set(nodes)
        for node in nodes:
            for i, (child, nr) in enumerate(node.next_edges):
                if child is not None and child not in inside:
                    node.set_next_edge(i, (self, self.number_of(child, nr)))

    def number_of(self, node: Node, nr: int) -> int:
        """The input of the boundary that stands for input `nr` of a node outside."""
        number = self._numbers.get((node, nr))
        if number is None:
            metadata = node.metadata_of(nr)
            if metadata is None:
                number = len(self._own_metadata)
                self._own_metadata.append(None)
            else:
                number = self.add_input_metadata(*metadata)
            self._numbers[node, nr] = number
            self.targets.append((node, nr))
        return number

    def check_local(self) -> None:
        """Raise if the graph goes through other workers."""
        if self.is_crossed:
            raise ContextError(
                "an isolated pass (such as that of an expert in a mixture) has called another worker with values that require grad: what that "
                "worker's parameters are due would be lost. Call workers directly or in ag.parallel.map_with_parallel_backward(), and differentiate "
                "with `await ctx.backward(loss)`; as experts, serve them with dist.moe.serve_experts() and use dist.moe.RemoteExpert."
            )

    def open(self, targets: Sequence[tuple[Node, int]], sequence: int) -> None:
        """Make the boundary forward its gradients, to one target per input.

        Args:
            sequence: sequence number of the boundary, taken before the graph was recorded.
        """
        self._seq = sequence
        self.set_next_edges(targets)

    def apply(self, grads: Sequence[Array | None]) -> tuple[Array | None, ...]:
        """The gradients, if the boundary is open; else they are captured before the node runs."""
        return tuple(grads)


def edge_of(tensor: Any) -> tuple[Node, int] | None:
    """The gradient edge of a Tensor; None where it carries no gradient."""
    return None if tensor._node is None else (tensor._node, tensor._nr)
