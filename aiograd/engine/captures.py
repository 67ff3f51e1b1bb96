"""Captures: the gradients that a pass hands out instead of accumulating them, taken where they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from aiograd.engine.staged_commit import Keeper, StagedCommit
from aiograd.graph.boundary import to_tensor
from aiograd.graph.node import Node
from aiograd.running.types import Array


class Capture(NamedTuple):
    """A request for the gradient of input `input_nr` of a node: as result number `result` of the pass, or for `keep` at the commit."""

    input_nr: int
    result: int
    keep: Keeper | None = None


class Captures:
    """The gradients that are captured, by node, and the results.

    Args:
        num_results: how many gradients the pass returns.
    """

    __slots__ = ("at", "results")

    def __init__(self, num_results: int = 0) -> None:
        #: node -> captures of its inputs
        self.at: dict[Node, list[Capture]] = {}
        #: captured gradients by index
        self.results: list[Array | None] = [None] * num_results

    def add(self, node: Node, capture: Capture) -> None:
        """Add a capture at a node."""
        self.at.setdefault(node, []).append(capture)

    def take(self, node: Node, grads: Sequence[Array | None], staged: StagedCommit) -> None:
        """Store the captured ones of the gradients that have arrived at a node."""
        for input_nr, index, keep in self.at[node]:
            if keep is None:
                self.results[index] = grads[input_nr]
            elif grads[input_nr] is not None:
                staged.retain(keep, to_tensor(grads[input_nr]))

    def ends_at(self, node: Node) -> bool:
        """True if a gradient is kept for a non-leaf at this node and goes no further; the node's prehooks then run as if the node ran."""
        return any(capture.keep is not None for capture in self.at.get(node, ()))

    def taken(self) -> Iterator[tuple[Node, Any]]:
        """The gradients captured so far, each with the node that it arrived at."""
        for node, captures in self.at.items():
            for capture in captures:
                grad = None if capture.keep is not None else self.results[capture.result]
                if grad is not None:
                    yield node, grad
