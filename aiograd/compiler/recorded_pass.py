"""RecordedPass: a pass that records a graph, while it runs in a recorded call, as rows of the program.

Note [Passes that are rows]
    With ``create_graph`` the engine runs rules on Tensors, row by row, and the gradients are Tensors like those of the forward. So such a pass is no
    statement: its rows become rows of the program, which later passes differentiate as any other. The engine runs the pass with all its duties,
    some rules on threads; when it is over, the rows are put in the order of their nodes, which does not depend on time (Note [Numbers of a recorded
    pass] in `aiograd.engine.renumbering`), so that contributions to a sum have the order of the eager pass.

    Hooks, rules that are no rows, and the history of a tensor from before the call could not be repeated by rows, so a pass with one of them ends the
    recording. The tensors that are differentiated by are guarded: one with a hook is not for the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from aiograd.compiler.watching.kinds import has_hooks
from aiograd.engine.graph_root import GraphRoot
from aiograd.engine.graph_task import GraphTask
from aiograd.graph.node import Node
from aiograd.ops.op import Fused, Op
from aiograd.running.trees import leaves_of
from aiograd.tensors.core import TensorCore

#: the arguments of `ProgramRecorder.ran`
Row = tuple[Op, list[Any], dict[str, Any], list[TensorCore], tuple[Any, ...], Fused | None]


class RecordedPass:
    """In the place of the recorder while a pass runs; the rows are given to the recorder afterwards.

    Args:
        recorder: the recorder of the call.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._rows: list[Row] = []
        self._errors = np.geterr()
        #: the first event that rows cannot repeat
        self.obstacle: str | None = None

    def pauses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing: the code of the package is not watched."""

    def ran(
        self, op: Op, tensors: list[Any], statics: dict[str, Any], outputs: list[TensorCore], residuals: tuple[Any, ...], fused: Fused | None
    ) -> None:
        """Keep a row that has run, on any thread."""
        self._rows.append((op, tensors, statics, outputs, residuals, fused))
        if np.geterr() != self._errors:
            self._meets("handles floating point errors in a way of its own")

    def made(self, tensor: TensorCore, source: Any = None) -> None:
        """Note a Tensor that a rule has made of numbers."""
        self._recorder.made(tensor)

    def reads_values(self, tensor: TensorCore) -> None:
        """Note that a rule or hook reads values."""
        self._meets("reads the value of a tensor")

    def __getattr__(self, name: str) -> Any:
        """The recorder's method for any other event; it records no program any more, so that the event runs as without a recording."""
        self._meets("does more than operations on tensors")
        self._recorder.broken = self._recorder.broken or "a pass of it cannot be repeated"
        return getattr(self._recorder, name)

    def _meets(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle

    def rows(self, arrays_of: tuple[type, ...]) -> Iterator[Row]:
        """The rows of the pass, which is over, in the order of their nodes; one without a node follows the last that it depends on.

        Args:
            arrays_of: classes of arrays that settings of rows may contain.
        """
        numbers: dict[int, float] = {}
        keys: list[tuple[float, int, int]] = []
        for index, (_, tensors, statics, outputs, _, _) in enumerate(self._rows):
            node = next((output._node for output in outputs if output._node is not None), None)
            arrays = [*[tensor._data for tensor in tensors if tensor is not None], *leaves_of(statics, arrays_of)]
            number = max([numbers.get(id(array), -1) for array in arrays], default=-1) if node is None else node._seq
            keys.append((number, node is None, index))
            for output in outputs:
                numbers[id(output._data)] = number
        for _, _, index in sorted(keys):
            yield self._rows[index]


def obstacle_in(task: GraphTask, rows: list[Node]) -> str | None:
    """The reason why the rows that a pass has run are not all that it does; None: they are.

    Args:
        task: the pass, which is over.
        rows: the nodes that the call has recorded so far.
    """
    known = set(rows)
    for node in task.plan.exec_info or ():
        if node._extra is not None:
            return "runs hooks"
        if node not in known and not isinstance(node, GraphRoot):
            return f"goes through {node.name}, which is no row of the function"
    if any([has_hooks(node, capture.input_nr) for node, captures in task.plan.captures.at.items() for capture in captures]):
        return "runs hooks of the tensors that it differentiates by"
    return None
