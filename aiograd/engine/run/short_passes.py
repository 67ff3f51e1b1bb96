"""ShortPasses: the part of an Engine that runs passes without a task of their own, see `aiograd.engine.short_pass`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from aiograd.engine.evaluate import annotate
from aiograd.engine.loop_budget import LoopBudget
from aiograd.engine.placement import RulePlacement
from aiograd.engine.run.failures import clear_frames
from aiograd.engine.run.loop import not_none, running_loop
from aiograd.engine.run.new_task import new_graph_task
from aiograd.engine.short_pass import are_short, is_short, run_short
from aiograd.graph.current import CURRENT
from aiograd.graph.node import Node
from aiograd.running import tracing
from aiograd.running.modes import current_mode
from aiograd.running.types import Array


class ShortPasses:
    """Runs short passes at once, in a turn on the loop."""

    placement: RulePlacement
    _loop_budget: LoopBudget | None
    _committed: int
    _failed: int

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        raise NotImplementedError

    def run_at_once(self, root: tuple[Node, int], seed: Array, keep_graph: bool, wanted: Collection[Node | None] | None = None) -> bool:
        """Run a pass that accumulates into leaves, if it is so short that it needs no task of its own; see `aiograd.engine.short_pass`.

        Args:
            root: the gradient edge to start from.
            seed: its gradient.
            keep_graph: keep saved values, so that another pass can run over the graph.
            wanted: the leaves to accumulate into; None: all.

        Returns:
            True if it has been run; False: nothing has been done, and `run` is to be called.
        """
        node = root[0]
        if not is_short(node, self.placement) or (wanted is not None and not any([leaf in wanted for leaf in node.next_nodes if leaf is not None])):
            return False
        if not self._takes_turn():
            return False
        self._run_at_once(root, seed, keep_graph, wanted=wanted)
        return True

    def run_computed(self, leaves: Sequence[Node | None], estimate: float, compute: Callable[[], Any]) -> Any:
        """As `run_at_once` for a pass over a node that `compute` makes together with the gradients of its leaves.

        Args:
            leaves: the targets of the node's edges.
            estimate: of the node, in nanoseconds.
            compute: returns the node, the gradients, and a result; None: it has done nothing.

        Returns:
            That result; None: nothing has been done.
        """
        if not are_short(leaves, estimate, self.placement) or not self._takes_turn():
            return None
        found = None
        try:
            found = compute()
        finally:
            if found is None:
                not_none(self._loop_budget).release()
        if found is None:
            return None
        node, grads, result = found
        del found
        self._run_at_once((node, 0), None, False, grads)
        return result

    def _takes_turn(self) -> bool:
        """True if a pass without a task may run now; it has its turn then."""
        if CURRENT.get() is not None or tracing.is_traced():
            return False
        mode = current_mode()
        self._bind(not_none(running_loop()))
        return mode.anomaly is None and not mode.watched and not_none(self._loop_budget).take()

    def _run_at_once(
        self, root: tuple[Node, int], seed: Array | None, keep_graph: bool, grads: list[Any] | None = None,
        wanted: Collection[Node | None] | None = None,
    ) -> None:
        """Run a pass during its turn, which it ends."""
        node, nr = root
        try:
            run_short(node, nr, seed, keep_graph, grads, wanted)
        except BaseException as error:
            task = new_graph_task([root], [seed], keep_graph=keep_graph)
            annotate(error, task, node)
            task.fail(error)
            for _ in task.release_graph():
                pass
            task.finish()
            clear_frames(error)
            self._failed += 1
            raise
        finally:
            not_none(self._loop_budget).release()
        self._committed += 1
