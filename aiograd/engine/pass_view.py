"""PassView: the questions that a pass answers about its graph."""

from __future__ import annotations

from typing import Any

from aiograd.engine.ledger import Ledger
from aiograd.engine.plan import BackwardPlan
from aiograd.engine.staged_commit import StagedCommit
from aiograd.graph.node import Node


class PassView:
    """The part of a `GraphTask` that hooks and rules read."""

    plan: BackwardPlan
    staged: StagedCommit
    #: made by `begin`, or at once where gradients come from other workers; None in a pass that is walked
    ledger: Ledger | None = None
    _shared_hook_state: dict[int, Any] | None = None

    @property
    def roots(self) -> tuple[tuple[Node, int], ...]:
        """The gradient edges that the pass starts from."""
        return self.plan.roots

    @property
    def exec_info(self) -> dict[Node, bool] | None:
        """The nodes that run; None: all of them."""
        return self.plan.exec_info

    @property
    def nodes_in_graph(self) -> frozenset[Node]:
        """Every node reachable from the root, the root excluded unless an edge leads to it."""
        self.plan.ensure_discovered()
        return frozenset(node for node in self.plan.dependencies if node is not self.plan.root)

    @property
    def outstanding(self) -> int:
        """How many nodes are ready or running."""
        return 0 if self.ledger is None else self.ledger.outstanding

    @property
    def committed(self) -> bool:
        """True if the gradients have been written."""
        return self.staged.is_done

    @property
    def can_checkpoint(self) -> bool:
        """True if recomputation in backward (checkpointing) is possible."""
        return self.plan.accumulate

    @property
    def shared_hook_state(self) -> dict[int, Any]:
        """State of hooks that span several nodes, by the hook's identity."""
        if self._shared_hook_state is None:
            self._shared_hook_state = {}
        return self._shared_hook_state

    def will_run(self, node: Node) -> bool:
        """True if this pass runs the node (for a leaf: accumulates into it).

        Args:
            node: a node of the graph.

        Returns:
            True or False; known once the graph was walked.
        """
        return self.plan.will_run(node)

    def gets_gradient(self, node: Node) -> bool:
        """True if a gradient arrives at the node in this pass, be it run or captured.

        Args:
            node: a node of the graph.

        Returns:
            True or False; known once the graph was walked.
        """
        return self.plan.gets_gradient(node)

    def should_compute(self, node: Node, output: int) -> bool:
        """True if anything in this pass wants output `output` of the node.

        Args:
            node: a node of the graph.
            output: number of one of its outputs, which are the edges to its next nodes.

        Returns:
            True or False; known once the graph was walked.
        """
        return self.plan.should_compute(node, output)

    def execution_order(self) -> list[Node]:
        """The nodes that run, in the order of an undisturbed pass.

        Returns:
            The nodes, first to last.
        """
        return self.plan.execution_order()
