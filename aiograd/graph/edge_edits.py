"""The number of changes of edges in the process."""

from __future__ import annotations


class EdgeEdits:
    """Counts the times that edges of any node of the process were replaced.

    An object of its own: an assignment to `Node` would empty Python's caches of the attributes of all node classes (``tests/benchmarks/layers.py``).
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


EDGE_EDITS = EdgeEdits()
