"""A walk up a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aiograd.engine.plan import DISCOVER_STRIDE
from aiograd.graph.node import Node


def above(nodes: Iterable[Node], parents: dict[Node, list[Node]], found: dict[Node, None]) -> Iterator[None]:
    """Fill `found` with `nodes` and everything that leads to them; yields now and then."""
    found.update(dict.fromkeys(nodes))
    stack = list(found)
    visited = 0
    while stack:
        visited += 1
        if not visited % DISCOVER_STRIDE:
            yield
        for parent in parents.get(stack.pop(), ()):
            if parent not in found:
                found[parent] = None
                stack.append(parent)
