"""The fast path: a graph without user code, of small arrays, in plain order.

Note [Sort and sweep]
    Descending sequence number is a topological order (Note [Sequence numbers order the graph]), so instead of counting dependencies
    and keeping a heap, the nodes are sorted once and run in that order. Every producer of a node has run before it, in the order in which
    gradients are to be summed, so a dict of running sums replaces input buffers. No hook can observe when leaves accumulate, so
    they are staged at the end. `is_small` (asked in discovery) keeps every node that could hold the loop up out of here.
    Measured by ``tests/benchmarks/small_graphs.py``: about 0.7 of the time of the general path.

    A pass over a part of the graph brings its own order (`GraphTask.plan`) and leaves what is not the rule to the task: nodes of which some
    outputs are wanted or whose gradients are captured (`run_part`), and where to start (`first_sums`).

It yields whenever the driver's time slice is over; everything else is synchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import chain, islice, pairwise
from typing import Any

from aiograd.engine.graph_task import SORT_NODES, GraphTask, sequence
from aiograd.engine.validate import fit
from aiograd.errors import GraphError
from aiograd.graph.node import Node
from aiograd.ops.partial import Partial, dense


def sweep(task: GraphTask, slice_over: Callable[[], bool], failed_at: list[Node]) -> Iterator[None]:
    """Run the whole pass up to the commit.

    Args:
        task: discovered, and plain.
        slice_over: whether it is time to give the loop a turn.
        failed_at: gets the node whose rule raised.
    """
    order: Iterable[Node]
    if task.plan is not None:
        order = task.plan
    elif len(task.dependencies) <= SORT_NODES:
        order = sorted([node for node in task.dependencies if not node.is_leaf], key=sequence, reverse=True)
    else:
        runs: list[list[Node]] = []
        nodes = iter(task.dependencies)
        while batch := list(islice(nodes, SORT_NODES)):
            runs.append(sorted([node for node in batch if not node.is_leaf], key=sequence, reverse=True))
            if slice_over():
                yield
        order = _merged(runs)
    sums = task.first_sums()
    get, take = sums.get, sums.pop
    #: nodes whose sum is an array of our own
    owned: set[Node] = set()
    release = not task.keep_graph
    special, kept = task.special, task.kept
    released = task.released
    done = 0
    for node in order:
        grad = take(node, None)
        if grad is not None:
            try:
                outputs = task.run_part(node, grad) if node in special else node.vjp(grad)  # type: ignore[attr-defined]
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
                        if out.__class__ is Partial:
                            if have is None or child not in owned:
                                owned.add(child)
                                have = sums[child] = out.dense() if have is None else have + out.dense()
                            else:
                                out.add_to(have)
                        else:
                            sums[child] = out if have is None else have + out
                    else:
                        _add_to_slot(sums, child, node.next_nrs[index], out, node, index)
            except BaseException:
                failed_at.append(node)
                raise
        if release and node.holds_data and node not in kept:
            node._saved = released  # type: ignore[attr-defined]
        done += 1
        if not done & 15 and slice_over():
            task.completed_nodes = done
            yield
    task.completed_nodes = done
    grad = outputs = out = have = None  # the leaves' arrays have one owner now, see `own`
    for node in task.dependencies:
        if node in sums:
            if node in task.captures:
                grad = sums.pop(node)
                task.capture(node, [grad] if node.is_single else grad)
            elif node.is_leaf:
                task.stage(node, [sums.pop(node)])  # type: ignore[arg-type]
    if sums:
        raise GraphError(f"gradients for {next(iter(sums)).name} came after it had run: the nodes are not numbered in the order of recording")


def _add_to_slot(sums: dict[Node, Any], child: Node, nr: int, out: Any, node: Node, index: int) -> None:
    metadata = child.metadata_of(nr)
    if metadata is not None and (out.shape != metadata.shape or out.dtype is not metadata.dtype):
        out = fit(out, metadata.shape, metadata.dtype, node, index)
    out = dense(out)
    slots = sums.get(child)
    if slots is None:
        slots = sums[child] = [None] * child.num_inputs
    slots[nr] = out if slots[nr] is None else slots[nr] + out


def _merged(runs: list[list[Node]]) -> Iterable[Node]:
    """The nodes of several sorted runs in order; lazily, so that no step takes long."""
    runs = [run for run in runs if run]
    if all(before[-1]._seq > after[0]._seq for before, after in pairwise(runs)):
        return chain.from_iterable(runs)
    return merge(*runs, key=sequence, reverse=True)
