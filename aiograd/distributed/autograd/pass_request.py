"""PassRequest: the roots, seeds and options of a backward pass across workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiograd.engine.graph_task import GraphTask
from aiograd.engine.selection import Selection
from aiograd.graph.node import Node
from aiograd.running.types import Array


@dataclass(slots=True)
class PassRequest:
    """The roots, seeds and options of a pass."""

    roots: Sequence[tuple[Node, int]]
    seeds: Sequence[Array]
    retain_graph: bool
    create_graph: bool
    smart: bool
    what: str = "ctx.backward()"
    #: in a selective pass: the local pass that it replaces
    wanted: GraphTask | None = None

    @classmethod
    def of(cls, task: GraphTask, smart: bool) -> PassRequest:
        """The request for a pass over several workers in place of a local pass that has not begun."""
        return cls(task.roots, task.plan.seeds, task.keep_graph, task.create_graph, smart, "grad()", task)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the initiator's GraphTask."""
        if self.wanted is None or not isinstance(plan := self.wanted.plan, Selection):
            return {}
        return {"inputs": plan.inputs, "accumulate": plan.accumulate, "keepers": plan.keepers, "require_inputs": plan.require_inputs}
