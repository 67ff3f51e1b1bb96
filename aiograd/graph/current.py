"""Queries of user code about the running pass that it is part of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiograd.errors import GraphError
from aiograd.graph.node import Node
from aiograd.graph.running import CURRENT as CURRENT
from aiograd.graph.running import Current as Current


def current_node() -> Node | None:
    """The node of the rule or hook that is running; None outside of a pass.

    Returns:
        The node.
    """
    current = CURRENT.get()
    return None if current is None else current.node


def current_graph_task_id() -> int:
    """Number of the pass that is running; -1 outside of one.

    Returns:
        An int.
    """
    current = CURRENT.get()
    return -1 if current is None else int(current.task.id)


def _task(what: str) -> Any:
    current = CURRENT.get()
    if current is None:
        raise GraphError(f"{what} should only be called during a backward pass: call it from a rule, hook or callback")
    return current.task


def execution_order() -> list[Node]:
    """The nodes of the running pass in the order in which they run if none of them suspends.

    Returns:
        The nodes, first to last.

    Raises:
        GraphError: outside of a pass.
    """
    order: list[Node] = _task("execution_order()").execution_order()
    return order


def will_run(node: Node) -> bool:
    """True if the running pass runs the node (for a leaf: accumulates into it).

    Args:
        node: a node of the graph.

    Returns:
        True or False.

    Raises:
        GraphError: outside of a pass.
    """
    return bool(_task("will_run()").will_run(node))


def queue_callback(callback: Callable[[], Any]) -> None:
    """Call (and await) `callback` once the running pass has committed its gradients, in order of queueing; it may queue more.

    An exception it raises is raised by the pass with ``committed`` True.

    Args:
        callback: called without arguments; may be ``async def``.

    Raises:
        GraphError: outside of a pass.
    """
    current = CURRENT.get()
    if current is None:
        raise GraphError("Final callbacks can only be installed during backward pass.")
    current.task.queue_callback(callback)
