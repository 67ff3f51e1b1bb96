"""The loop over the nodes of a pass that needs no counting: of a whole graph, or of a plain part of one.

Note [One walk]
    Descending sequence number is a topological order (Note [Sequence numbers order the graph]), so nothing has to be counted beforehand: of the
    nodes that have got a gradient the one with the highest number runs next, and every producer of it has run before, in the order in which
    gradients are to be summed. A dict of running sums replaces input buffers and dependencies. The nodes of a whole graph are found while it is
    walked; nodes that wait are in a heap, and the best node that the last node reached stays out of it, so that a chain needs no heap. The nodes
    of a part of a graph have been found by discovery and sorted (`BackwardPlan.order`). No hook can observe when leaves accumulate, so they are
    staged at the end. Measured by ``tests/benchmarks/small_graphs.py``.

Note [A gradient arrives]
    `arrive` is the rule: fit the gradient to its target, and add it to the sum there, in place where the sum is the walk's own. The loop itself adds
    an array that fits, the case that is nearly always met, and calls `arrive` for every other: a call per edge would cost small graphs 10 %. The
    shortest pass (`aiograd.engine.short_pass`) does the same, for 3 %.

Note [Handed over]
    The walk of a whole graph ends at the first node that it must not run: one with user code, of a device, or so expensive that it goes to the
    executor. Then the graph is discovered, and `Ledger.resume` takes the sums over: all nodes down to the last one that ran have run, and their
    gradients come first in every sum. So the rest of the pass is as if it had taken the general path from the beginning, hooks in the same order.
    Discovery allows no walk of a part with such a node.

The plan gives the gradients to start from (`first_sums`), and runs the nodes with some wanted outputs only or with captured gradients
(`run_part`), or all nodes where the pass is recorded (`run_recorded`). The walk yields whenever the time slice is over; everything else is
synchronous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any

from aiograd.engine.evaluate import annotate
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.input_buffer import added
from aiograd.engine.placement import RulePlacement
from aiograd.engine.plan import BackwardPlan
from aiograd.engine.renumbering import RecordedNodes
from aiograd.engine.validate import fit
from aiograd.errors import GraphError
from aiograd.graph.accumulate_grad import stage_all
from aiograd.graph.node import Node
from aiograd.ops.slice_gradient import SliceGradient

#: leaves that are staged between two looks at the time slice
STAGE_STRIDE = 128


class GraphWalk:
    """The walk of one pass.

    Args:
        task: a pass for which `can_walk`, or a discovered one with a plain plan.
        placement: decides which nodes may run on the loop.
        slice_over: returns True if it is time to yield to the loop.
    """

    __slots__ = ("task", "placement", "slice_over", "sums", "last", "slow", "is_complete")

    def __init__(self, task: GraphTask, placement: RulePlacement, slice_over: Callable[[], bool]) -> None:
        self.task: GraphTask = task
        self.placement: RulePlacement = placement
        self.slice_over: Callable[[], bool] = slice_over
        #: the gradients of nodes that have not run: per node one, or a list where the node has several inputs
        self.sums: dict[Node, Any] = task.plan.first_sums()
        #: sequence number of the last node that has run
        self.last: float = math.inf
        #: True if nothing but the commit is left to do, so that nothing is handed over
        self.is_complete: bool = False
        #: nodes and leaves after which the slice may be over
        self.slow: set[Node] = set()

    @property
    def has_begun(self) -> bool:
        """True if a node has run."""
        return self.last != math.inf

    def run(self) -> Iterator[None]:
        """Run the pass up to the commit, or until it has to be handed over."""
        task, sums, slow, slice_over = self.task, self.sums, self.slow, self.slice_over
        plan, recorded = task.plan, task.recorded
        get, take = sums.get, sums.pop
        small_shapes, is_small = self.placement.small_shapes, self.placement.is_small
        release, released = not task.keep_graph, task.released
        #: nodes with a sum that the walk has made itself; of nodes with several inputs, pairs with the number of the input
        owned: set[Any] = set()
        heap: list[tuple[int, Node]] = []
        is_part = plan.is_plain
        order, kept, special = iter(plan.order or ()), plan.kept, plan.special
        #: a shape known to be small
        small: Any = None
        done = 0
        number = self.last
        following: Node | None = None
        best = 0
        grad: Any = None
        node = plan.root
        goes_on = is_part or (not node.is_leaf and self._admits(node))
        while goes_on:
            try:
                if not is_part:
                    number = node._seq
                    following, best = None, 0
                    outputs = node.vjp(take(node))  # type: ignore[attr-defined]
                else:
                    for node in order:
                        grad = take(node, None)
                        if grad is not None:
                            break
                        if release and node.holds_data and node not in kept:
                            node._saved = released  # type: ignore[attr-defined]
                    else:
                        break
                    if node.heeds_keeping:
                        node.keeps_graph = not release or node in kept  # type: ignore[attr-defined]
                    if recorded is not None:
                        recorded.running = node
                        outputs = plan.run_recorded(node, grad, task.staged)
                    elif node in special:
                        outputs = plan.run_part(node, grad, task.staged)
                    else:
                        outputs = node.vjp(grad)  # type: ignore[attr-defined]
                index = -1
                for child in node.next_nodes:
                    index += 1
                    if child is None:
                        continue
                    out = outputs[index]
                    if out is None:
                        if not is_part:
                            goes_on = False
                        continue
                    have = get(child)
                    shape = child.shape if child.is_single else None  # type: ignore[attr-defined]
                    if out.shape != shape or out.dtype is not child.dtype or out.__class__ is SliceGradient:  # type: ignore[attr-defined]
                        arrive(sums, owned, node, index, out, recorded)
                    elif have is None:
                        sums[child] = out
                    elif recorded is None:
                        sums[child] = have + out
                        continue
                    else:
                        sums[child] = recorded.sum_at(child, have, out)
                    if is_part or have is not None:
                        continue
                    other = child._seq
                    if other < number:
                        if not child.is_cheap or child._extra is not None or (shape != small and shape not in small_shapes):
                            if not self._admits(child):
                                goes_on = False
                        else:
                            small = shape
                        if following is None:
                            following, best = child, other
                        elif other > best:
                            heappush(heap, (-best, following))
                            following, best = child, other
                        else:
                            heappush(heap, (-other, child))
                    elif not child.is_leaf:
                        raise GraphError(f"{child.name} comes before {node.name} in backward: the nodes are not numbered in the order of recording")
                    elif not is_small(child) and not self._admits(child):
                        goes_on = False
            except BaseException as error:
                annotate(error, task, node)
                raise
            done += 1
            if is_part:
                if release and node.holds_data and node not in kept:
                    node._saved = released  # type: ignore[attr-defined]
                if not done & 15 and slice_over():
                    yield
                continue
            if release and node.holds_data:
                node._saved = released  # type: ignore[attr-defined]
            if heap and (following is None or -heap[0][0] > best):
                if following is not None:
                    heappush(heap, (-best, following))
                following = heappop(heap)[1]
            if following is None:
                break
            if (not done & 15 or (slow and node in slow)) and slice_over():
                yield
            node = following
        self.last = number
        outputs = out = have = grad = None  # the leaves' arrays have one owner now, see `own`
        if goes_on:
            nodes: list[Any] = list(sums)
            stride = 1 if slow else STAGE_STRIDE
            for start in range(0, len(nodes), stride):
                batch = nodes[start : start + stride]
                leaves = self._capture(batch) if is_part else batch
                if leaves:
                    self._stage(leaves)
                if sums and slice_over():
                    yield
            self.is_complete = True

    def _stage(self, leaves: list[Any]) -> None:
        """Stage the gradients of leaves."""
        task = self.task
        if task.hooks is None:
            stage_all(leaves, self.sums, task.staged.firsts, task.staged.gradients)
        else:
            for leaf in leaves:
                task.stage(leaf, [self.sums.pop(leaf)])

    def _capture(self, nodes: list[Any]) -> list[Any]:
        """Capture the gradients that have arrived at nodes and are wanted; returns the other nodes, which are leaves."""
        plan, sums = self.task.plan, self.sums
        captured = plan.captures.at
        leaves: list[Any] = []
        for node in nodes:
            if node in captured:
                grad = sums.pop(node)
                plan.capture(node, [grad] if node.is_single else grad, self.task.staged)
            elif node.is_leaf:
                leaves.append(node)
            else:
                raise GraphError(f"gradients for {node.name} came after it had run: the nodes are not numbered in the order of recording")
        return leaves

    def _admits(self, node: Node) -> bool:
        """True if the walk may run a node or stage the gradient of a leaf: no user code, and cheap enough for the loop."""
        if node._extra is not None:
            return False
        if node.heeds_keeping:
            node.keeps_graph = self.task.keep_graph  # type: ignore[attr-defined]
        if self.placement.is_small(node):
            return True
        self.slow.add(node)
        return self.placement.runs_inline(node)


def arrive(sums: dict[Node, Any], owned: set[Any], node: Node, index: int, out: Any, recorded: RecordedNodes | None = None) -> None:
    """Add output `index` of a node to the sum at the input that its edge leads to; see Note [A gradient arrives].

    Args:
        sums: the sums by node, or lists of them where the node has several inputs.
        owned: nodes, or pairs of node and input, with sums that may be added to in place.
        node: the node that has run.
        index: number of the output.
        out: the gradient, which is not None.
        recorded: the nodes that the pass records, if it does: additions belong to the target.
    """
    child: Any = node.next_nodes[index]
    slots: Any = sums
    if child.is_single:
        key = place = child
        have = sums.get(child)
        shape, dtype = child.shape, child.dtype
    else:
        place = node.next_nrs[index]
        key = (child, place)
        slots = sums.get(child)
        if slots is None:
            slots = sums[child] = [None] * child.num_inputs
        have = slots[place]
        metadata = child.metadata_of(place)
        shape, dtype = (out.shape, out.dtype) if metadata is None else (metadata.shape, metadata.dtype)
    if out.shape != shape or out.dtype is not dtype:
        out = fit(out, shape, dtype, node, index)
    if have is None and out.__class__ is not SliceGradient:
        slots[place] = out
        return
    slots[place] = added(have, out, key in owned) if recorded is None else recorded.sum_at(child, have, out)
    owned.add(key)


def can_walk(task: GraphTask) -> bool:
    """True if a pass runs a whole graph, its options allow a walk, and no node of the process has edges against the order of sequence numbers."""
    return (
        task.may_walk
        and task.plan.__class__ is BackwardPlan
        and not Node.any_reordered
        and (task.hooks is None or not task.hooks.sources)
    )
