"""Nodes that stand for many rows, and their replacement by the nodes of these rows."""

from __future__ import annotations

from collections.abc import Iterable

from aiograd.graph.node import Node

#: classes of nodes that stand for many rows, once there is one; see `expand_programs`
PROGRAM_NODES: list[type[Node]] = []


def expand_programs(roots: Iterable[Node]) -> None:
    """Replace every node of a graph that stands for many rows by the nodes of these rows.

    For a pass that records a graph, and for one that is to name the operation of an error (anomaly mode).

    Args:
        roots: where the graph begins.
    """
    if not PROGRAM_NODES:
        return
    stack: list[Node] = list(roots)
    seen: set[Node] = set(stack)
    while stack:
        node = stack.pop()
        if node.is_program:
            node.expand()  # type: ignore[attr-defined]
        for child in node.next_nodes:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def opened_at(node: Node, input_nr: int) -> tuple[Node, int]:
    """The node and input at which all gradients of an input arrive, those of rows that the node stands for among them; nodes of these are made.

    Args:
        node: the node.
        input_nr: number of its input.

    Returns:
        The node and the number of its input, for a hook or a capture.
    """
    if node.is_program:
        node.open_at(input_nr)  # type: ignore[attr-defined]
    return node.place_of(input_nr)  # type: ignore[return-value]
