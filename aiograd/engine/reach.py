"""Which nodes of a discovered graph get gradients, where a node stands for many: some of its inputs lead to some of its edges only."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from aiograd.graph.node import Node

#: nodes between two turns of the loop
_STRIDE = 1024


def unreached(plan: Any, floor: int) -> Generator[None, None, list[Node]]:
    """The nodes that no path of the rows leads to; yields now and then.

    Args:
        plan: a `BackwardPlan` with all nodes that edges lead to.
        floor: nodes with smaller sequence numbers have not been followed.

    Returns:
        The nodes.
    """
    waiting = dict(plan.dependencies)
    #: by node, the inputs that get a gradient
    inputs: dict[Node, set[int]] = {}
    for source in plan.sources:
        waiting[source] -= 1
        inputs[source] = {*range(source.num_inputs)}
    inputs[plan.root] = {plan.roots[0][1]} if len(plan.roots) == 1 else {*range(plan.root.num_inputs)} or {0}
    stack = [node for node, count in waiting.items() if not count]
    visited = 0
    while stack:
        node = stack.pop()
        visited += 1
        if not visited % _STRIDE:
            yield
        if node._seq < floor:
            continue
        found: Any = inputs.get(node, ())
        edges = node.edges_from(found) if found and node.has_paths else None
        for index, child in enumerate(node.next_nodes):
            if child is not None:
                if found and (edges is None or edges[index]):
                    inputs.setdefault(child, set()).add(node.next_nrs[index])
                waiting[child] -= 1
                if not waiting[child]:
                    stack.append(child)
    return [node for node in plan.dependencies if node not in inputs]
