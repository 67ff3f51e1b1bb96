"""RecordedNodes: the nodes that a pass with ``create_graph`` records, and their numbers.

Note [Numbers of a recorded pass]
    With ``create_graph`` the pass records nodes while it runs, and where rules suspend or run on threads, the order of recording
    depends on timing. Sequence numbers decide the order of sums, so second derivatives would differ in their last bits from run to run.
    Therefore the nodes recorded on behalf of one node form a group, and when all nodes have run, their numbers are assigned
    anew: groups in the order of an undisturbed pass, the nodes of a group in the order in which they were recorded. Gradients flow from
    earlier groups to later ones only, so descending numbers remain a topological order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

from aiograd.graph.node import Node

_place = itemgetter(0)


class RecordedNodes:
    """The nodes that one pass has recorded so far, in groups by the node that they were recorded for.

    Args:
        place_of: sort key of a node in the order of an undisturbed pass; None: descending sequence number.
    """

    __slots__ = ("running", "_place_of", "_leaf_places", "_recorded")

    def __init__(self, place_of: Callable[[Node], Any] | None) -> None:
        #: the node for which the engine itself records: its inputs are being summed or its outputs fitted
        self.running: Node | None = None
        self._place_of = place_of
        self._leaf_places: dict[Node, int] | None = None
        self._recorded: list[tuple[tuple[int, Any], Node]] = []

    def add(self, recorded: Node, node: Node | None, graph: Iterable[Node]) -> None:
        """Register a node that was recorded.

        Args:
            node: the node of the pass for which it was recorded; None: `running`.
            graph: every node of the pass, in an order that does not depend on timing; orders leaves, which all have the same sequence number.
        """
        node = self.running if node is None else node
        if node is None:
            place: tuple[int, Any] = (-1, 0)
        elif node.is_leaf:
            if self._leaf_places is None:
                self._leaf_places = {leaf: i for i, leaf in enumerate(graph)}
            place = (1, self._leaf_places.get(node, 0))
        else:
            place = (0, -node._seq if self._place_of is None else self._place_of(node))
        self._recorded.append((place, recorded))

    def sum_at(self, node: Node, have: Any, grad: Any) -> Any:
        """The sum of two gradients, Tensors, that arrive at a node; recorded on behalf of that node.

        Args:
            node: the node.
            have: the sum so far.
            grad: the gradient to add.

        Returns:
            The sum, a Tensor.
        """
        running, self.running = self.running, node
        total = have + grad
        self.running = running
        return total

    def renumber(self, outer: Callable[[Node], None] | None) -> None:
        """Give the nodes their numbers in an order that does not depend on timing.

        Args:
            outer: registers the nodes with the pass around this one, or None.
        """
        recorded, self._recorded = self._recorded, []
        numbers = sorted([node._seq for _, node in recorded])
        recorded.sort(key=_place)
        moved = [node._seq for _, node in recorded] != numbers
        for (_, node), number in zip(recorded, numbers, strict=True):
            node._seq = number
            if outer is not None:
                outer(node)
        if moved:
            for _, node in recorded:
                node._edges_changed()  # it may use what another task recorded meanwhile
