"""Placement: chooses where a node's rule runs; rules themselves know nothing of it.

Note [Three places]
    Cheap rules run inline on the loop; expensive ones go to the executor (numpy and BLAS release the GIL), where independent ones run at
    the same time; a rule with a gradient on a device goes to the device's thread, or stays on the loop where the device says that its
    operations only start work. "Expensive" is an estimate from shapes alone, so the same graph is placed the same way every time.

Note [Cheap enough for the loop]
    `RulePlacement.is_small`, `runs_inline` and `needs_executor` are the only places that decide it, and whether a leaf's gradient may be staged
    on the loop. The loop over nodes (`aiograd.engine.walk`) and discovery look into the caches of `is_small` first, `small_shapes` and
    `small_leaves`, which saves them a call per node.

Source of the limits: an executor round trip costs about 60 µs, and one slice of the loop should stay under 2 ms; see
``tests/benchmarks/loop_lag.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.graph.node import Node
from aiograd.running.types import Shape

#: a rule estimated above this many nanoseconds leaves the loop
INLINE_NS = 400_000.0

#: a part of a graph may be walked if every node is estimated below this
SMALL_NS = 100_000.0

#: rows that cost no more than this are "cheap": their shape alone says whether they are small
CHEAP_NS_PER_ELEMENT = 20.0

#: staging reads and writes a leaf's whole gradient; nanoseconds per byte
STAGE_NS_PER_BYTE = 0.15
#: the same before the gradient has arrived, so for the widest real dtype
STAGE_NS_PER_ELEMENT = 8 * STAGE_NS_PER_BYTE


def examples_of(grads: Sequence[Any]) -> int:
    """The number of examples that gradients stand for: 1 but for Tensors of a level with a batch, see `aiograd.tensors.levels`."""
    return max([getattr(getattr(grad, "_data", None), "examples", 1) for grad in grads], default=1)


class RulePlacement:
    """Estimates costs and remembers the estimates.

    Args:
        inline_ns: rules estimated above this many nanoseconds go to the executor.
    """

    __slots__ = ("inline_ns", "small_shapes", "small_leaves", "_small_ns", "_estimates")

    def __init__(self, inline_ns: float = INLINE_NS) -> None:
        self.inline_ns: float = inline_ns
        self._small_ns = min(SMALL_NS, inline_ns)
        self._estimates: dict[Any, float] = {}
        #: shapes for which every node marked ``is_cheap`` is small
        self.small_shapes: set[Shape] = set()
        #: shapes of leaves that are cheap to stage
        self.small_leaves: set[Shape] = set()

    @staticmethod
    def is_bare(node: Node) -> bool:
        """True if no hook is registered at a node, nor anything else that takes part in its run."""
        return node._extra is None and not (node.is_leaf and node.post_accumulate_hooks)  # type: ignore[attr-defined]

    def is_small(self, node: Node) -> bool:
        """True if a node is bare and certainly cheap to run on the loop; a leaf: to stage its gradient. Cached by shapes and costs."""
        if node._extra is not None:
            return False
        if node.is_cheap:
            shape = node.shape  # type: ignore[attr-defined]
            if shape in self.small_shapes or self._remember(self.small_shapes, shape, CHEAP_NS_PER_ELEMENT):
                return True
        elif node.is_leaf:
            if node.post_accumulate_hooks:  # type: ignore[attr-defined]
                return False
            shape = node.shape  # type: ignore[attr-defined]
            return shape in self.small_leaves or self._remember(self.small_leaves, shape, STAGE_NS_PER_ELEMENT)
        if not node.is_builtin:
            return False
        key = node.cost_key()  # type: ignore[attr-defined]
        return node.num_inputs == 0 if key is None else self._estimate(key, node) < self._small_ns

    def runs_inline(self, node: Node) -> bool:
        """True if a node of the host is bare and not so expensive that it goes to the executor."""
        if not self.is_bare(node):
            return False
        if node.is_leaf:
            return math.prod(node.shape) * STAGE_NS_PER_ELEMENT <= self.inline_ns  # type: ignore[attr-defined]
        if not node.is_builtin or (node.spans_devices and self.device_of(node) != "cpu"):
            return False
        key = node.cost_key()  # type: ignore[attr-defined]
        return key is not None and self._estimate(key, node) <= self.inline_ns

    def needs_executor(self, node: Node, grads: list[Any]) -> bool:
        """True if the rule of a node of the host goes to the executor, given the gradients that have arrived."""
        if node.is_leaf:
            size = getattr(grads[0], "nbytes", 0)
            return size * STAGE_NS_PER_BYTE > self.inline_ns
        if node.is_builtin and node.num_inputs:
            key = node.cost_key()  # type: ignore[attr-defined]
            estimate = node.estimate() if key is None else self._estimate(key, node)  # type: ignore[attr-defined]
            return estimate > self.inline_ns or (grads[0].__class__ is not np.ndarray and estimate * examples_of(grads) > self.inline_ns)
        return bool(getattr(node, "wants_executor", False))

    def _estimate(self, key: Any, node: Node) -> float:
        """The node's estimate, cached by `key`."""
        estimate = self._estimates.get(key)
        if estimate is None:
            if len(self._estimates) > 10_000:
                self._estimates.clear()
            estimate = self._estimates[key] = float(node.estimate())  # type: ignore[attr-defined]
        return estimate

    def _remember(self, shapes: set[Shape], shape: Shape, ns_per_element: float) -> bool:
        """True if arrays of a shape are small at this cost; `shapes` remembers them."""
        if math.prod(shape) * ns_per_element > self._small_ns:
            return False
        if len(shapes) > 10_000:
            shapes.clear()
        shapes.add(shape)
        return True

    @staticmethod
    def device_of(node: Node) -> str:
        """Name of the device on the thread of which the node runs: the device of a gradient it takes, else of one it returns."""
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
