"""Recorder: its methods are called by the core while a profile is on.

The seam is a handful of methods that come in pairs around the timed work; the core knows the recorder as the mode's ``profiler`` and
asks for nothing else. They are called from any thread, so they only ever append.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from time import perf_counter_ns
from typing import Any

from aiograd.engine.evaluate import suspends
from aiograd.engine.run import running_task
from aiograd.graph.node import LEAF_SEQUENCE, Node
from aiograd.profiler.event import Category, Event
from aiograd.running.caller import user_line


class Recorder:
    """Collects events.

    Args:
        shapes: note the shapes of outputs.
        memory: note the bytes of outputs.
        lines: note the user's line that ran an operation.
    """

    def __init__(self, *, shapes: bool, memory: bool, lines: bool = False) -> None:
        self.events: MutableSequence[Event] = []
        self._shapes = shapes
        self._memory = memory
        self._lines = lines
        self._threads: dict[int, str] = {}
        self._tasks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._serials = itertools.count(1)

    # ---------------------------------------------------------------- operations

    def begin_forward(self) -> int:
        """An operation is about to run."""
        return perf_counter_ns()

    def end_forward(self, began: int, name: str, node: Node | None, outputs: Sequence[Any]) -> None:
        """An operation has run.

        Args:
            began: the result of `begin_forward`.
            name: of the row or function.
            node: the recorded node, if there is one.
            outputs: Tensors.
        """
        ended = perf_counter_ns()
        shapes = tuple(output.shape for output in outputs) if self._shapes else None
        nbytes = sum(output.size * output.dtype.itemsize for output in outputs) if self._memory else None
        line = user_line() if self._lines else None
        self.add(name, "forward", name, began, ended, None if node is None else node._seq, None, shapes, nbytes, None, line)

    # ---------------------------------------------------------------- backward

    def run_backward(self, task: Any, node: Node, function: Callable[[], Any]) -> Any:
        """Run a node's rule; called where it runs."""
        began = perf_counter_ns()
        result = None
        try:
            result = function()
        finally:
            if not suspends(result):  # else `end_wait` tells
                self._ran(began, task, node)
        return result

    def begin_wait(self) -> int:
        """A node's rule has returned a coroutine or future that is about to be awaited."""
        return perf_counter_ns()

    def end_wait(self, began: int, task: Any, node: Node) -> None:
        """It is done. See Note [Tracks]."""
        self._ran(began, task, node, next(self._serials))

    def _ran(self, began: int, task: Any, node: Node, track: int | None = None) -> None:
        number = None if node._seq == LEAF_SEQUENCE else node._seq
        row = getattr(node, "row", None)
        operation = node.name.removesuffix("Backward") if row is None else row.op.name
        self.add(node.name, "backward", operation, began, perf_counter_ns(), number, task.id, None, None, track)

    def begin_pass(self) -> int:
        """A backward pass is about to begin."""
        return perf_counter_ns()

    def end_pass(self, began: int, task: Any) -> None:
        """It is over, one way or another."""
        self.add(f"backward pass {task.id}", "pass", "(backward pass)", began, perf_counter_ns(), None, task.id)

    # ---------------------------------------------------------------- other workers

    def end_exchange(self, began: int, category: Category, name: str, peer: str, nbytes: int | None) -> None:
        """A message to or from another worker has been handled, one way or another.

        Args:
            began: ``perf_counter_ns``.
            name: of the function, or of the kind of message.
            nbytes: of the tensors in it, where known.
        """
        self.add(name, category, name, began, perf_counter_ns(), None, None, None, nbytes, peer=peer)

    def end_pipeline_action(self, began: int, step: Sequence[int], rank: int, action: Any) -> None:
        """A rank of a pipeline has carried out an action.

        Args:
            began: ``perf_counter_ns``.
            step: two ints, the same on all workers of the pipeline and of no other step.
        """
        self.add(f"PP:{action}", "scope", f"PP:{action.kind.value}", began, perf_counter_ns())

    def end_pipeline_step(self, began: int, pipeline: Any, step: Sequence[int], computations: Sequence[Mapping[int, int]]) -> None:
        """A step of a pipeline has ended.

        Args:
            began: ``perf_counter_ns``.
            step: as for `end_pipeline_action`.
            computations: for each replica the number of computations by rank.
        """
        self.add(f"PP:step {pipeline.schedule.name}", "scope", "PP:step", began, perf_counter_ns())

    # ---------------------------------------------------------------- anything

    def add(
        self,
        name: str,
        category: Category,
        operation: str,
        began: int,
        ended: int,
        sequence_nr: int | None = None,
        graph_task: int | None = None,
        shapes: Any = None,
        nbytes: int | None = None,
        track: int | None = None,
        line: str | None = None,
        peer: str | None = None,
    ) -> None:
        """Append an event of the running thread and task.

        Args:
            began, ended: ``perf_counter_ns``.
            track: in place of the running task's serial number.
            line: the user's line. peer: the other worker.
        """
        thread = threading.get_ident()
        thread_name = self._threads.get(thread)
        if thread_name is None:
            thread_name = self._threads[thread] = threading.current_thread().name
        serial, task_name = self.task() if track is None else (track, name)
        self.events.append(
            Event(
                name, category, operation, began, ended - began, thread, thread_name, serial, task_name, sequence_nr, graph_task, shapes, nbytes,
                line, peer,
            )
        )

    def task(self) -> tuple[int, str | None]:
        """Serial number and name of the running asyncio task."""
        task = running_task()
        if task is None:
            return 0, None
        serial = self._tasks.get(task)
        if serial is None:
            serial = self._tasks[task] = next(self._serials)
        return serial, task.get_name()
