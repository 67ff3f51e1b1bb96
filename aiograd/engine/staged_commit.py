"""StagedCommit: the gradients that a pass will write, all of them in one step or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from aiograd.engine.input_buffer import FOLD_INLINE_BYTES
from aiograd.graph.accumulate_grad import AccumulateGrad, GradTarget, Staged, commit, own
from aiograd.running.types import Array

#: called with a non-leaf's gradient at the commit; returns a function that writes it, or None if nothing is to be written
Keeper: TypeAlias = Callable[[Any], Callable[[], None] | None]


class StagedCommit:
    """The staged gradients of one pass."""

    __slots__ = ("gradients", "firsts", "retained", "is_done")

    def __init__(self) -> None:
        self.gradients: dict[AccumulateGrad, Staged] = {}
        #: gradients of leaves that had none, from a pass that is walked
        self.firsts: dict[AccumulateGrad, Array] = {}
        #: gradients of non-leaves, each with the function that keeps it
        self.retained: list[tuple[Keeper, Any]] = []
        #: True if everything has been written
        self.is_done: bool = False

    def stage(self, leaf: AccumulateGrad, grads: list[Any], target: GradTarget) -> None:
        """Stage the complete gradient of a leaf, the only entry of `grads`; adds it to an existing gradient, which takes long for large arrays."""
        grad = grads.pop()
        self.gradients[leaf] = Staged(target, own(grad))

    def retain(self, keep: Keeper, grad: Any) -> None:
        """Hand a non-leaf's gradient (a Tensor) to `keep` at the commit."""
        self.retained.append((keep, grad))

    def stale(self) -> list[Staged]:
        """Large sums to be recomputed before the commit, because other passes have changed the gradients of their targets."""
        return [staged for staged in self.gradients.values() if staged.is_stale and getattr(staged.total, "nbytes", 0) > FOLD_INLINE_BYTES]

    def commit(self) -> None:
        """Write everything in one step; if that raises, nothing has been written."""
        writes = [keep(grad) for keep, grad in self.retained]
        if self.gradients or self.firsts:
            commit(self.gradients.values(), self.firsts)
        for write in writes:
            if write is not None:
                write()
        self.is_done = True

    def drop(self) -> None:
        """Drop all staged gradients."""
        self.gradients.clear()
        self.firsts.clear()
        self.retained.clear()
