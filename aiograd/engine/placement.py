"""Placement: chooses where a node's rule runs; rules themselves know nothing of it.

Note [Three places]
    Cheap rules run inline on the loop; expensive ones go to the executor (numpy and BLAS release the GIL), where independent ones run at
    the same time; a rule with a gradient on a device goes to the device's thread, or stays on the loop where the device says that its
    operations only start work. "Expensive" is an estimate from shapes alone, so the same graph is placed the same way every time.

Source of the limits: an executor round trip costs about 60 µs, and one slice of the loop should stay under 2 ms; see
``tests/benchmarks/loop_lag.py``.
"""

from __future__ import annotations

import math
from typing import Any

from aiograd.graph.node import Node
from aiograd.running.types import Shape

#: a rule estimated above this many nanoseconds leaves the loop
INLINE_NS = 400_000.0

#: a graph whose every node is estimated below this may be swept
SMALL_NS = 100_000.0

#: rows that cost no more than this are "cheap": their shape alone says whether they are small
CHEAP_NS_PER_ELEMENT = 20.0

#: staging reads and writes a leaf's whole gradient; nanoseconds per byte
STAGE_NS_PER_BYTE = 0.15


class RulePlacement:
    """Estimates costs, remembering what it has seen.

    Args:
        inline_ns: rules estimated above this many nanoseconds go to the executor.
    """

    __slots__ = ("inline_ns", "small_shapes", "small_leaves", "_small_ns", "_estimates")

    def __init__(self, inline_ns: float = INLINE_NS) -> None:
        self.inline_ns = inline_ns
        self._small_ns = min(SMALL_NS, inline_ns)
        self._estimates: dict[Any, float] = {}
        #: shapes for which every node marked ``is_cheap`` is small
        self.small_shapes: set[Shape] = set()
        #: shapes of leaves whose staging is cheap
        self.small_leaves: set[Shape] = set()

    def is_small(self, node: Node) -> bool:
        """True if a node is certainly cheap to run on the loop. Depends on its class and shapes only; cached by them."""
        key = node.cost_key() if node.is_builtin else None  # type: ignore[attr-defined]
        if key is None:
            return not node.is_builtin or node.num_inputs == 0
        estimate = self._estimates.get(key)
        return (self._estimate(key, node) if estimate is None else estimate) < self._small_ns

    def runs_inline(self, node: Node) -> bool:
        """True if a row's node on the host is not so expensive that it goes to the executor."""
        key = node.cost_key()  # type: ignore[attr-defined]
        return key is not None and self._estimate(key, node) <= self.inline_ns

    def _estimate(self, key: Any, node: Node) -> float:
        """The node's estimate, cached by `key`."""
        estimate = self._estimates.get(key)
        if estimate is None:
            if len(self._estimates) > 10_000:
                self._estimates.clear()
            estimate = self._estimates[key] = float(node.estimate())  # type: ignore[attr-defined]
        return estimate

    def shape_is_small(self, shape: Shape) -> bool:
        """True if arrays of this shape are small for every cheap row; cached in `small_shapes`."""
        if math.prod(shape) * CHEAP_NS_PER_ELEMENT > self._small_ns:
            return False
        if len(self.small_shapes) > 10_000:
            self.small_shapes.clear()
        self.small_shapes.add(shape)
        return True

    def allows_sweep(self, node: Node) -> bool:
        """True if a node carries no user code and is certainly cheap to run on the loop; for a leaf: to stage."""
        if node._extra is not None:
            return False
        if node.is_leaf:
            shape = node.shape  # type: ignore[attr-defined]
            return not node.post_accumulate_hooks and (shape in self.small_leaves or self.leaf_is_small(shape))  # type: ignore[attr-defined]
        if node.is_cheap and (node.shape in self.small_shapes or self.shape_is_small(node.shape)):  # type: ignore[attr-defined]
            return True
        return node.is_builtin and self.is_small(node)

    def leaves_loop(self, node: Node, grads: list[Any]) -> bool:
        """True if the node's rule goes to the executor."""
        if node.is_leaf:
            grad = grads[0]
            size = getattr(grad, "nbytes", 0)
            return size * STAGE_NS_PER_BYTE > self.inline_ns
        if node.is_builtin and node.num_inputs:
            key = node.cost_key()  # type: ignore[attr-defined]
            return (node.estimate() if key is None else self._estimate(key, node)) > self.inline_ns  # type: ignore[attr-defined]
        return bool(getattr(node, "wants_executor", False))

    def leaf_is_small(self, shape: Shape) -> bool:
        """True if staging a gradient of this shape is cheap; cached in `small_leaves`."""
        if math.prod(shape) * 8 * STAGE_NS_PER_BYTE > self._small_ns:
            return False
        if len(self.small_leaves) > 10_000:
            self.small_leaves.clear()
        self.small_leaves.add(shape)
        return True

    def stages_inline(self, shape: Shape) -> bool:
        """True if staging a gradient of this shape need not go to the executor."""
        return math.prod(shape) * 8 * STAGE_NS_PER_BYTE <= self.inline_ns

    @staticmethod
    def device_of(node: Node) -> str:
        """Name of the device whose thread runs the node: the device of a gradient it takes, else of one it returns."""
        name = getattr(node, "device", "cpu")
        if name == "cpu" and node.spans_devices:
            for child, nr in zip(node.next_nodes, node.next_nrs, strict=True):
                metadata = None if child is None else child.metadata_of(nr)
                if metadata is not None and metadata.device != "cpu":
                    return metadata.device
        return str(name)

    @staticmethod
    def stays_on(node: Node, name: str) -> bool:
        """True if all inputs and outputs of a row or leaf live on this device, so that running it only starts work there."""
        if not (node.is_leaf or node.is_builtin) or getattr(node, "device", "cpu") != name:
            return False
        for child, nr in zip(node.next_nodes, node.next_nrs, strict=True):
            metadata = None if child is None else child.metadata_of(nr)
            if metadata is not None and metadata.device != name:
                return False
        return True
