"""The fast path of a pass over a part of a graph: one without user code, of small arrays, in plain order.

Note [Sort and sweep]
    Descending sequence number is a topological order (Note [Sequence numbers order the graph]), so instead of counting dependencies
    and keeping a heap, the nodes that lead to the inputs are sorted once and run in that order. Every producer of a node has run before it, in the
    order in which gradients are to be summed, so a dict of running sums replaces input buffers. No hook can observe when leaves accumulate, so
    they are staged at the end. Discovery allows no sweep of a graph with a node that could block the loop (`Placement.is_small`).

    The plan gives the order (`Plan.order`), the gradients to start from (`first_sums`), and runs the nodes of which only some outputs are wanted or
    whose gradients are captured (`run_part`), or all of them where the pass is recorded (`run_recorded`). A whole graph is run in one walk
    instead, see `aiograd.engine.walk`.

It yields whenever the driver's time slice is over; everything else is synchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from aiograd.engine.graph_task import GraphTask
from aiograd.engine.plan import SORT_NODES
from aiograd.engine.renumbering import RecordedNodes
from aiograd.engine.validate import fit
from aiograd.errors import GraphError
from aiograd.graph.node import Node
from aiograd.ops.slice_gradient import SliceGradient, dense


def sweep(task: GraphTask, slice_over: Callable[[], bool], failed_at: list[Node]) -> Iterator[None]:
    """Run the whole pass up to the commit.

    Args:
        task: a pass after discovery whose plan is plain (`Plan.is_plain`).
        slice_over: returns True if it is time to yield to the loop.
        failed_at: the node whose rule raised is appended to it.
    """
    plan = task.plan
    sums = plan.first_sums()
    get, take = sums.get, sums.pop
    #: nodes whose sum is an array that the sweep has made itself, so it may be added to in place
    owned: set[Node] = set()
    release = not task.keep_graph
    special, kept = plan.special, plan.kept
    released, staged = task.released, task.staged
    #: the nodes that the pass records, None without create_graph; see Note [Numbers of a recorded pass]
    recorded = task.recorded
    outputs: Any = None
    done = 0
    for node in plan.order or ():
        grad = take(node, None)
        if grad is not None:
            if node.heeds_keeping:
                node.keeps_graph = not release  # type: ignore[attr-defined]
            try:
                if recorded is not None:
                    recorded.running = node
                    outputs = plan.run_recorded(node, grad, staged)
                else:
                    outputs = plan.run_part(node, grad, staged) if node in special else node.vjp(grad)  # type: ignore[attr-defined]
                index = -1
                for child in node.next_nodes:
                    index += 1
                    if child is None:
                        continue
                    out = outputs[index]
                    if out is None:
                        continue
                    if child.is_single:
                        if out.shape != child.shape or out.dtype is not child.dtype:  # type: ignore[attr-defined]
                            out = fit(out, child.shape, child.dtype, node, index)  # type: ignore[attr-defined]
                        have = get(child)
                        if out.__class__ is SliceGradient:
                            if have is None or child not in owned:
                                owned.add(child)
                                have = sums[child] = out.dense() if have is None else have + out.dense()
                            else:
                                out.add_to(have)
                        elif have is None:
                            sums[child] = out
                        elif recorded is None:
                            sums[child] = have + out
                        else:
                            recorded.running = child
                            sums[child] = have + out
                            recorded.running = node
                    else:
                        add_to_slot(sums, child, node.next_nrs[index], out, node, index, recorded)
            except BaseException:
                failed_at.append(node)
                raise
        if release and node.holds_data and node not in kept:
            node._saved = released  # type: ignore[attr-defined]
        done += 1
        if not done & 15 and slice_over():
            yield
    grad = outputs = out = have = None  # the leaves' arrays have one owner now, see `own`
    captured = plan.captures.at
    remaining = iter(plan.dependencies)
    while sums and (batch := list(islice(remaining, SORT_NODES))):
        for node in batch:
            if node in sums:
                if node in captured:
                    grad = sums.pop(node)
                    plan.capture(node, [grad] if node.is_single else grad, staged)
                elif node.is_leaf:
                    task.stage(node, [sums.pop(node)])  # type: ignore[arg-type]
        if len(batch) == SORT_NODES and slice_over():
            yield
    if sums:
        raise GraphError(f"gradients for {next(iter(sums)).name} came after it had run: the nodes are not numbered in the order of recording")


def add_to_slot(sums: dict[Node, Any], child: Node, nr: int, out: Any, node: Node, index: int, recorded: RecordedNodes | None = None) -> None:
    """Add a gradient, output `index` of `node`, to the sum at input `nr` of a node with several inputs."""
    metadata = child.metadata_of(nr)
    if metadata is not None and (out.shape != metadata.shape or out.dtype is not metadata.dtype):
        out = fit(out, metadata.shape, metadata.dtype, node, index)
    out = dense(out)
    slots = sums.get(child)
    if slots is None:
        slots = sums[child] = [None] * child.num_inputs
    if slots[nr] is None:
        slots[nr] = out
    elif recorded is None:
        slots[nr] = slots[nr] + out
    else:
        recorded.running = child
        slots[nr] = slots[nr] + out
        recorded.running = node
