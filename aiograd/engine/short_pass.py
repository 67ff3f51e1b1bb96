"""The shortest pass: over one node whose edges all lead to leaves, the program of a compiled function.

Note [No pass to speak of]
    Nothing can happen between the node and its leaves: no other node, no user code, no pause. So there is no plan and no GraphTask; gradients are
    computed, staged and committed as the walk does it (`aiograd.engine.walk`), in one synchronous step, during a turn on the loop. Where anything
    about the graph or the mode asks for more, the pass takes the usual path from its beginning.
"""

from __future__ import annotations

from sys import getrefcount
from typing import Any

from numpy import ndarray

from aiograd.engine.placement import RulePlacement
from aiograd.engine.validate import fit
from aiograd.graph.accumulate_grad import SOLE_OWNER_OF_LOCAL, commit, own
from aiograd.graph.node import Node, ReleasedVariables
from aiograd.ops.slice_gradient import dense
from aiograd.running.types import Array

#: more leaves are staged with pauses
MOST_LEAVES = 64

#: the marker of values that a pass which succeeded has released
_RELEASED = ReleasedVariables()


def is_short(node: Node, placement: RulePlacement) -> bool:
    """True if a pass over everything reachable from a node is one step without user code that is short enough for the loop."""
    leaves = node.next_nodes
    if not node.is_program or not 0 < len(leaves) <= MOST_LEAVES or not placement.allows_sweep(node):
        return False
    small = placement.small_leaves
    for child in leaves:
        if child is not None:
            if not child.is_leaf or child._extra is not None or child.post_accumulate_hooks:  # type: ignore[attr-defined]
                return False
            if child.shape not in small and not placement.leaf_is_small(child.shape):  # type: ignore[attr-defined]
                return False
    return True


def run_short(node: Node, nr: int, seed: Array, keep_graph: bool) -> None:
    """Compute the gradients of a node's leaves and commit them: all, or none if it raises.

    Args:
        node: for which `is_short`.
        nr: number of its input at which the pass begins.
        seed: the gradient of that.
        keep_graph: keep the node's saved values.
    """
    grads: list[Any] = [None] * node.num_inputs
    grads[nr] = seed
    if node.heeds_keeping:
        node.keeps_graph = keep_graph  # type: ignore[attr-defined]
    outputs = node.vjp(grads)  # type: ignore[attr-defined]
    sums: dict[Any, Any] = {}
    for index, leaf in enumerate(node.next_nodes):
        out = outputs[index]
        if leaf is not None and out is not None:
            if out.shape != leaf.shape or out.dtype is not leaf.dtype:  # type: ignore[attr-defined]
                out = fit(out, leaf.shape, leaf.dtype, node, index)  # type: ignore[attr-defined]
            if out.__class__ is not ndarray:
                out = dense(out)
            sums[leaf] = sums[leaf] + out if leaf in sums else out
    if node.holds_data and not keep_graph:
        node._saved = _RELEASED  # type: ignore[attr-defined]
    outputs = out = None  # the arrays have one owner now, see `own`
    for leaf in [*sums]:
        grad = sums.pop(leaf)
        # the first conditions of `own`, here because a call per leaf costs a small pass a tenth
        if grad.__class__ is not ndarray or grad.base is not None or getrefcount(grad) > SOLE_OWNER_OF_LOCAL:
            grad = own(grad)
        sums[leaf] = grad
        grad = None
    commit((), sums)
