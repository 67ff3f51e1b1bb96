"""The node of a program with a memory budget."""

from __future__ import annotations

from typing import Any

from aiograd.compiler.node import ExpandedNode, ProgramNode


class BudgetedProgramNode(ProgramNode):
    """The backward of one call of a program with a memory budget; see Note [What a pass frees within a budget] in `aiograd.compiler.memory_plan`.

    Args:
        *arguments: of a `ProgramNode`.
    """

    __slots__ = ("keeps_graph",)

    heeds_keeping = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: set before each run by the pass; a list that it does not keep is emptied by the backward
        self.keeps_graph = True
        self._arrays = [*self._arrays]

    def _handed(self, outputs: int) -> Any:
        arrays = self._arrays
        return [*arrays] if arrays.__class__ is list and (self.keeps_graph or outputs > 1) else arrays


class _ExpandedWithinBudget(ExpandedNode, BudgetedProgramNode):
    """An expanded node of a program with a memory budget."""

    __slots__ = ()


BudgetedProgramNode.expanded_class = _ExpandedWithinBudget
