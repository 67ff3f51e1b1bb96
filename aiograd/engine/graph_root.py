"""GraphRoot: the node at which a pass over several roots starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.graph.input_metadata import InputMetadata
from aiograd.graph.node import Node
from aiograd.running.types import Array


class GraphRoot(Node):
    """The starting node of a pass over several roots: it has no inputs, and returns the seed gradients as outputs."""

    __slots__ = ("seeds", "_saved")

    num_inputs = 0
    is_builtin = True

    def __init__(self, roots: Sequence[tuple[Node, int]], seeds: Sequence[Array]) -> None:
        super().__init__()
        self.next_nodes = tuple([node for node, _ in roots])
        self.next_nrs = tuple([nr for _, nr in roots])
        self.seeds = tuple(seeds)
        self._saved = ()

    @property
    def input_metadata(self) -> tuple[InputMetadata, ...]:
        """Empty."""
        return ()

    def vjp(self, grads: Any) -> tuple[Array, ...]:
        """The seeds."""
        return self.seeds

    def apply(self, grads: Sequence[Array | None]) -> tuple[Array, ...]:
        """The seeds."""
        return self.seeds

    def vjp_part(self, grads: Any, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        """The seeds that are needed."""
        return tuple([seed if need else None for seed, need in zip(self.seeds, needs, strict=True)])

    def compute(self, grads: Any, needs: tuple[bool, ...], values: Any, create_graph: bool) -> tuple[Array, ...]:
        """The seeds."""
        return self.seeds

    def cost_key(self) -> None:
        """None: the node costs nothing."""
