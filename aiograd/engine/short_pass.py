"""The shortest pass: over one node with edges to leaves only, the program of a compiled function.

Note [No pass to speak of]
    Nothing can happen between the node and its leaves: no other node, no user code, no pause. So there is no plan and no GraphTask; gradients are
    computed, staged and committed as the walk does it (`aiograd.engine.walk`), in one synchronous step, during a turn on the loop. Where anything
    about the graph or the mode asks for more, the pass takes the usual path from its beginning.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from aiograd.engine.placement import RulePlacement
from aiograd.engine.walk import arrive
from aiograd.graph.accumulate_grad import commit, stage_all
from aiograd.graph.node import Node
from aiograd.graph.released import ReleasedVariables
from aiograd.ops.slice_gradient import SliceGradient
from aiograd.running.types import Array

#: more leaves are staged with pauses
MOST_LEAVES = 64

#: the marker of values that a pass which succeeded has released
_RELEASED = ReleasedVariables()


def is_short(node: Node, placement: RulePlacement) -> bool:
    """True if a pass over everything reachable from a node is one step without user code that is short enough for the loop."""
    leaves = node.next_nodes
    if not node.is_program or node._extra is not None or node.spans_devices or not 0 < len(leaves) <= MOST_LEAVES:
        return False
    if node.estimate() > placement.inline_ns:  # type: ignore[attr-defined]
        return False
    is_small = placement.is_small
    for leaf in leaves:
        if leaf is not None and not (leaf.is_leaf and is_small(leaf)):
            return False
    return True


def are_short(leaves: Sequence[Node | None], estimate: float, placement: RulePlacement) -> bool:
    """As `is_short` for a node that is not there yet, which costs so many nanoseconds."""
    if not 0 < len(leaves) <= MOST_LEAVES or estimate > placement.inline_ns:
        return False
    is_small = placement.is_small
    for leaf in leaves:
        if leaf is None or not (leaf.is_leaf and is_small(leaf)):
            return False
    return True


def run_short(
    node: Node, nr: int, seed: Array | None, keep_graph: bool, computed: list[Any] | None = None, wanted: Collection[Node | None] | None = None
) -> None:
    """Compute the gradients of a node's leaves and commit them: all, or none if it raises.

    Args:
        node: for which `is_short`.
        nr: number of its input at which the pass begins.
        seed: the gradient of that.
        keep_graph: keep the node's saved values.
        computed: the gradients, where they are there already; emptied.
        wanted: the leaves that get a gradient, at least one of the node's; None: all.
    """
    if computed is None:
        grads: list[Any] = [None] * node.num_inputs
        grads[nr] = seed
        if node.heeds_keeping:
            node.keeps_graph = keep_graph  # type: ignore[attr-defined]
        if wanted is None:
            outputs = node.vjp(grads)  # type: ignore[attr-defined]
        else:
            outputs = node.vjp_part(grads, tuple([leaf in wanted for leaf in node.next_nodes]))  # type: ignore[attr-defined]
    else:
        outputs = computed.copy()
        computed.clear()
    sums: dict[Any, Any] = {}
    for index, leaf in enumerate(node.next_nodes):
        out = outputs[index]
        if leaf is not None and out is not None:
            if out.shape != leaf.shape or out.dtype is not leaf.dtype or out.__class__ is SliceGradient or leaf in sums:  # type: ignore[attr-defined]
                arrive(sums, set(), node, index, out)
            else:
                sums[leaf] = out
    if node.holds_data and not keep_graph:
        node._saved = _RELEASED  # type: ignore[attr-defined]
    outputs = out = None  # the arrays have one owner now, see `own`
    firsts: dict[Any, Any] = {}
    staged: dict[Any, Any] = {}
    stage_all([*sums], sums, firsts, staged)
    commit(staged.values(), firsts)
