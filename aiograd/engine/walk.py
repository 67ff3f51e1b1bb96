"""The fast path of a pass over a whole graph: nodes are found and run in one walk.

Note [One walk]
    Descending sequence number is a topological order (Note [Sequence numbers order the graph]), so nothing has to be counted beforehand: of the
    nodes that have got a gradient the one with the highest number runs next, and every producer of it has run before, in the order in which
    gradients are to be summed. A dict of running sums replaces input buffers and dependencies. The nodes that wait are in a heap; the best of
    those that the last node reached stays out of it, so that a chain needs no heap. Leaves are staged at the end.
    Measured by ``tests/benchmarks/small_graphs.py``.

Note [Handed over]
    The walk ends at the first node that it must not run: one with user code, of a device, or so expensive that it goes to the executor. Then
    the graph is discovered, and `Ledger.resume` takes the sums over: all nodes down to the last one that ran have run, and what they contributed
    comes first in every sum. So the rest of the pass is as if it had taken the general path from the beginning, hooks in the same order.

It yields whenever the driver's time slice is over; everything else is synchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from sys import getrefcount
from typing import Any

from numpy import ndarray

from aiograd.engine.graph_task import GraphTask
from aiograd.engine.placement import RulePlacement
from aiograd.engine.plan import BackwardPlan
from aiograd.engine.sweep import add_to_slot
from aiograd.engine.validate import fit
from aiograd.errors import GraphError
from aiograd.graph.accumulate_grad import SOLE_OWNER_OF_LOCAL, Staged, own
from aiograd.graph.node import Node
from aiograd.ops.slice_gradient import SliceGradient


class GraphWalk:
    """The walk of one pass.

    Args:
        task: a pass for which `can_walk`.
        placement: says which nodes may run on the loop.
        slice_over: returns True if it is time to yield to the loop.
    """

    __slots__ = ("task", "placement", "slice_over", "sums", "last", "failed_at", "slow", "is_complete")

    def __init__(self, task: GraphTask, placement: RulePlacement, slice_over: Callable[[], bool]) -> None:
        self.task = task
        self.placement = placement
        self.slice_over = slice_over
        #: the gradients of nodes that have not run: per node one, or a list where the node has several inputs
        self.sums: dict[Node, Any] = task.plan.first_sums()
        #: sequence number of the last node that has run
        self.last: float = float("inf")
        #: True if nothing but the commit is left to do, so that nothing is handed over
        self.is_complete = False
        #: the node whose rule raised
        self.failed_at: Node | None = None
        #: nodes and leaves after which the slice may be over
        self.slow: set[Node] = set()

    @property
    def has_begun(self) -> bool:
        """True if a node has run."""
        return self.last != float("inf")

    def run(self) -> Iterator[None]:
        """Run the pass up to the commit, or until it has to be handed over."""
        task, sums, slow, slice_over = self.task, self.sums, self.slow, self.slice_over
        get, take = sums.get, sums.pop
        small_shapes = self.placement.small_shapes
        release, released = not task.keep_graph, task.released
        #: nodes whose sum is an array that the walk has made itself and a slice may be added to in place
        owned: set[Node] = set()
        heap: list[tuple[int, Node]] = []
        #: a shape known to be small
        small: Any = None
        done = 0
        number = self.last
        node = task.plan.root
        goes_on = not node.is_leaf and self._admits(node)
        while goes_on:
            number = node._seq
            following: Node | None = None
            best = 0
            try:
                outputs = node.vjp(take(node))  # type: ignore[attr-defined]
                index = -1
                for child in node.next_nodes:
                    index += 1
                    if child is None:
                        continue
                    out = outputs[index]
                    if out is None:
                        goes_on = False
                        continue
                    have = get(child)
                    if child.is_single:
                        shape = out.shape
                        if shape != child.shape or out.dtype is not child.dtype:  # type: ignore[attr-defined]
                            out = fit(out, child.shape, child.dtype, node, index)  # type: ignore[attr-defined]
                            shape = out.shape
                        if out.__class__ is SliceGradient:
                            if have is None or child not in owned:
                                owned.add(child)
                                sums[child] = out.dense() if have is None else have + out.dense()
                            else:
                                out.add_to(have)
                        elif have is None:
                            sums[child] = out
                        else:
                            sums[child] = have + out
                            continue
                    else:
                        shape = None
                        add_to_slot(sums, child, node.next_nrs[index], out, node, index)
                    if have is not None:
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
                    elif not self._admits_leaf(child):
                        goes_on = False
            except BaseException:
                self.failed_at = node
                raise
            if release and node.holds_data:
                node._saved = released  # type: ignore[attr-defined]
            if heap and (following is None or -heap[0][0] > best):
                if following is not None:
                    heappush(heap, (-best, following))
                following = heappop(heap)[1]
            if following is None:
                break
            done += 1
            if (not done & 15 or (slow and node in slow)) and slice_over():
                yield
            node = following
        self.last = number
        outputs = out = have = None  # the leaves' arrays have one owner now, see `own`
        if goes_on:
            yield from self._stage()
            self.is_complete = True

    def _stage(self) -> Iterator[None]:
        """Stage the gradients of the leaves."""
        task, sums, slow = self.task, self.sums, self.slow
        gradients, firsts = task.staged.gradients, task.staged.firsts
        is_alone = task.hooks is None
        for done, node in enumerate(list(sums), 1):
            if node.is_leaf:
                if not is_alone:
                    task.stage(node, [sums.pop(node)])  # type: ignore[arg-type]
                else:  # the same without calls per leaf
                    grad = sums.pop(node)
                    if grad.__class__ is not ndarray or grad.base is not None or getrefcount(grad) > SOLE_OWNER_OF_LOCAL:
                        grad = own(grad)
                    if node.grad is None:  # type: ignore[attr-defined]
                        firsts[node] = grad  # type: ignore[index]
                    else:
                        gradients[node] = Staged(node, grad)  # type: ignore[arg-type, index]
            if (not done & 127 or (slow and node in slow)) and self.slice_over():
                yield

    def _admits(self, node: Node) -> bool:
        """True if the walk may run a node: no user code, and cheap enough for the loop."""
        if node._extra is not None or not node.is_builtin or (node.spans_devices and self.placement.device_of(node) != "cpu"):
            return False
        if node.is_cheap and self.placement.shape_is_small(node.shape):  # type: ignore[attr-defined]
            return True
        if node.heeds_keeping:
            node.keeps_graph = self.task.keep_graph  # type: ignore[attr-defined]
        if self.placement.is_small(node):
            return True
        self.slow.add(node)
        return self.placement.runs_inline(node)

    def _admits_leaf(self, leaf: Node) -> bool:
        """True if the walk may stage a leaf's gradient."""
        if leaf._extra is not None or leaf.post_accumulate_hooks:  # type: ignore[attr-defined]
            return False
        shape, placement = leaf.shape, self.placement  # type: ignore[attr-defined]
        if shape in placement.small_leaves or placement.leaf_is_small(shape):
            return True
        self.slow.add(leaf)
        return placement.stages_inline(shape)


def can_walk(task: GraphTask) -> bool:
    """True if a pass runs a whole graph, may be swept, and no node of the process has edges against the order of sequence numbers."""
    return (
        task.may_sweep
        and task.plan.__class__ is BackwardPlan
        and not Node.any_reordered
        and (task.hooks is None or not task.hooks.sources)
    )
