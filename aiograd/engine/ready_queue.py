"""ReadyQueue: nodes with complete gradients, the most urgent first.

The node with the highest sequence number is the most urgent; leaves come before all others, in the order in which they became ready, so that
gradients accumulate (and their memory goes) as soon as possible. Passes nested in a node are passes of their own and run to their end while that
node waits, so depth needs no place in the key.

Source: PyTorch ``engine.h``, CompareNodeTaskTime.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from aiograd.graph.node import Node


class ReadyQueue:
    """A heap of (node, gradients of its inputs)."""

    __slots__ = ("_heap", "_arrivals")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node, list[Any]]] = []
        self._arrivals = 0

    def push(self, node: Node, grads: list[Any], arrival: int | None = None) -> None:
        """Add a node with complete inputs. Of leaves the one with the lowest `arrival` comes first; None: it is the last so far."""
        if arrival is None:
            self._arrivals = arrival = self._arrivals + 1
        heappush(self._heap, (-node.sequence_nr, arrival, node, grads))

    def pop(self) -> tuple[Node, list[Any]]:
        """Remove and return the most urgent node. Raises IndexError when empty."""
        _, _, node, grads = heappop(self._heap)
        return node, grads

    def first(self) -> tuple[Node, list[Any]]:
        """As `pop`, without removing the node."""
        _, _, node, grads = self._heap[0]
        return node, grads

    def nodes(self) -> list[Node]:
        """The nodes, the most urgent first."""
        return [node for _, _, node, _ in sorted(self._heap)]

    def clear(self) -> None:
        """Drop everything."""
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._heap)
