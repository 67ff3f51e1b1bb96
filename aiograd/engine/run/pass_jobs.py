"""PassJobs: jobs of the executor that run several nodes of their pass in a row, while the loop has nothing to do for it.

Note [Nodes in a row]
    A hop from the executor to the loop and back costs 0.3 to 0.4 ms where threads have gone to sleep meanwhile, as much as a rule on a megabyte,
    and in a chain of expensive rules the loop would only hand each result to the next rule. So a job that is all that its runner waits for
    completes its node, takes the most urgent ready one and runs it, as the runner would. It ends when the loop is needed: for a node of user code,
    a captured gradient or a device; for a second expensive node, which runs at the same time; when another pass's job waits for a thread; and after
    a few cheap nodes in a row, because their Python code would keep the interpreter's lock from the loop.
    The ledger has one owner at a time: the runner opens it to the job before it waits, and closes it when it wakes. So after a cancellation no
    further node starts, as everywhere.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from aiograd.engine.evaluate import annotate, is_simple, run_node
from aiograd.engine.executors import ComputeExecutor
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.input_buffer import InputBuffer
from aiograd.engine.ledger import Ledger
from aiograd.engine.placement import RulePlacement
from aiograd.graph.node import Node

#: cheap nodes in a row that a job runs
MOST_CHEAP = 16


class PassJobs:
    """The jobs of one pass. See the module's Note.

    Args:
        task: the pass, which has begun.
        ledger: of the pass.
        placement: says which rules are expensive.
        executor: its threads run the jobs.
    """

    __slots__ = ("_task", "_ledger", "_placement", "_executor", "_lock", "_is_open", "_cheap")

    def __init__(self, task: GraphTask, ledger: Ledger, placement: RulePlacement, executor: ComputeExecutor) -> None:
        self._task = task
        self._ledger = ledger
        self._placement = placement
        self._executor = executor
        #: held while the ledger, which may be open, is used
        self._lock = threading.Lock()
        self._is_open = False
        #: cheap nodes that a job has run in a row
        self._cheap = 0

    def open(self) -> None:
        """Let the job that the runner waits for use the ledger, if the pass is by itself."""
        self._is_open = self._task.hooks is None and self._task.recorded is None

    def close(self) -> None:
        """Let no job use the ledger any more."""
        with self._lock:
            self._is_open = False

    def run(self, node: Node, grads: list[Any]) -> Callable[[], None] | None:
        """Run a node and its successors.

        Args:
            node: the node, for which `is_simple`.
            grads: the gradients of its inputs; emptied, because the runner still refers to the list.

        Returns:
            A function to be called on the loop, which takes the last result; None: the job has done that.
        """
        task, ledger = self._task, self._ledger
        self._cheap = 0
        outputs: Any = None
        buffer: InputBuffer | None = None
        while True:
            try:
                if buffer is None:
                    outputs = run_node(task, node, grads, None)
                    grads.clear()
                else:
                    buffer.fold()
            except BaseException as error:
                annotate(error, task, node)
                raise
            with self._lock:
                rest = functools.partial(task.complete, node, outputs) if buffer is None else functools.partial(ledger.fold_done, node, buffer)
                outputs = buffer = None  # arrays have one owner now, see `own`
                if not self._is_open:
                    return rest
                rest()
                del rest
                if ledger.folds:
                    node, buffer = ledger.folds.popleft()
                elif ledger.has_ready() and not self._executor.has_waiting() and self._may_run(*ledger.first()):
                    node, grads = ledger.pop()
                else:
                    return None

    def _may_run(self, node: Node, grads: list[Any], is_only: bool) -> bool:
        """True if a job may run a node, which is the only one that is ready or not."""
        if not is_simple(self._task, node) or self._placement.device_of(node) != "cpu":
            return False
        if self._placement.needs_executor(node, grads):
            self._cheap = 0
            return is_only or node.is_leaf
        self._cheap += 1
        return self._cheap <= MOST_CHEAP
