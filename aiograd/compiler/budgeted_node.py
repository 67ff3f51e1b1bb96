"""The node of a program with a memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.compiler.node import ExpandedNode, ProgramNode


class BudgetedProgramNode(ProgramNode):
    """The backward of one call of a program with a memory budget; see Note [Freeing within a budget] in `aiograd.compiler.memory_plan`.

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

    def _handed(self, grads: Sequence[Any], needs: tuple[bool, ...]) -> Any:
        arrays, code = self._arrays, self.code
        if arrays.__class__ is not list or (len(grads) == 1 and needs == code.all_needed and not self.keeps_graph):
            return arrays
        run = code.statements_of(tuple([grad is not None for grad in grads]), needs)
        is_all = run == code.statements_of((True,) * len(grads), code.all_needed)
        return [*arrays] if self.keeps_graph or not is_all else arrays


class _ExpandedWithinBudget(ExpandedNode, BudgetedProgramNode):
    """An expanded node of a program with a memory budget."""

    __slots__ = ()


BudgetedProgramNode.expanded_class = _ExpandedWithinBudget
