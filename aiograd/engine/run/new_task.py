"""New GraphTasks, with the nesting depth and the modes of the code that asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.engine.graph_task import GraphTask
from aiograd.graph.current import CURRENT
from aiograd.graph.node import Node
from aiograd.running.modes import current_mode
from aiograd.running.types import Array


def new_graph_task(roots: Sequence[tuple[Node, int]] = (), grads: Sequence[Array] = (), **options: Any) -> GraphTask:
    """A new GraphTask with the caller's nesting depth, anomaly mode and profiler."""
    current = CURRENT.get()
    mode = current_mode()
    if mode.trace is not None:
        mode.trace.breaks("it runs a pass that is neither backward() nor grad()")
    depth = 0 if current is None else current.task.reentrant_depth + 1
    return GraphTask(roots, grads, reentrant_depth=depth, anomaly=mode.anomaly, profiler=mode.profiler, **options)
