"""The tangent of a row without a declaration, from its own rule.

Note [Transposed rules]
    A rule is linear in g: it computes Jᵀ g. Run on a recording Tensor d in place of g, its own backward computes J t from a tangent t. So every row
    with a rule of rows has a tangent, at about the cost of two backwards. The pass is a plain loop: it goes over the few nodes that the rule has
    recorded, all of them rows, on arrays of any kind.

Source: Jamie Townsend, "A new trick for calculating Jacobian vector products" (2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.engine.validate import fit
from aiograd.graph.node import Node, _next_sequence
from aiograd.ops.op import nothing
from aiograd.ops.slice_gradient import dense
from aiograd.running.modes import ModeScope
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.op_node import OpNode


def transposed(call: Any, tangents: Sequence[Any]) -> Any:
    """J t of a row.

    Args:
        call: the row's `aiograd.forward.rows.RowCall`.
        tangents: of its array arguments, None for zeros.

    Returns:
        The tangent of the output, a tuple of them for a row with several outputs; None for zeros.
    """
    op = call.op
    records = any(isinstance(x, TensorCore) for x in (*call.arrays, *tangents))
    start = _next_sequence()
    outs = (call.out,) if op.outputs == 1 else call.out
    with ModeScope(grad=True, saved_hooks=None, anomaly=None, profiler=None, trace=None, collect=None):
        carriers = range(len(outs)) if op.differentiable_outputs is None else op.differentiable_outputs
        leaves: list[Any] = [make(np.zeros_like(_data(out))) for out in outs]
        for i in carriers:
            if leaves[i].dtype.kind in "fc":
                leaves[i].requires_grad_()
        conjugates = op.complex == "holomorphic" and any(leaf.dtype.kind == "c" for leaf in leaves)
        g: Any = tuple(map(np.conj, leaves)) if conjugates else tuple(leaves)
        g = g[0] if op.outputs == 1 else g
        has = {name for name, t in zip(op.arrays, tangents, strict=False) if t is not None}
        roots: list[tuple[Any, Any]] = []

        def add(result: Any, tangent: Any) -> None:
            if tangent is not None and getattr(result, "_node", None) is not None:
                roots.append((np.conj(result) if conjugates else result, tangent))

        rules = [entry for entry in op.rule_plan(op.rules, op.joint) if not set(entry[0]) <= op.recorded.keys()]
        for arguments, rule, names in [*rules, *op.rule_plan(op.recorded, {})]:
            if rule is nothing or not (op.variadic or has & set(arguments)):
                continue
            needs = tuple(name in has for name in arguments)
            found = rule(g, *[needs if name == "needs" else _tensors(call.named(name), name, op) for name in names])
            if op.variadic:
                for result, tangent in zip(found, tangents, strict=True):
                    add(result, tangent)
            else:
                for name, result in zip(arguments, found if arguments in op.joint else (found,), strict=True):
                    add(result, tangents[op.arrays.index(name)] if name in has else None)
        sums = pull(start, roots, leaves, records)
    results = [None if t is None else t if records else _data(t) for t in sums]
    return results[0] if op.outputs == 1 else tuple(results)


def _data(value: Any) -> Any:
    return value._data if isinstance(value, TensorCore) else value


def _tensors(value: Any, name: str, op: Any) -> Any:
    """Arrays that a rule names as Tensors; shapes, dtypes and settings as they are."""
    if name != "out" and name != op.variadic and name not in op.arrays:
        return value
    if isinstance(value, tuple):
        return tuple([_tensors(part, "out", op) for part in value])
    return value if value is None or isinstance(value, TensorCore) else make(np.asarray(value) if isinstance(value, (int, float, complex)) else value)


def is_pullable(start: int, roots: Sequence[Any]) -> bool:
    """True if only rows were recorded after `start`, so that `pull` can go over them."""
    stack, seen = [root._node for root in roots], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen or node.is_leaf or node._seq <= start:
            continue
        if not isinstance(node, OpNode):
            return False
        seen.add(node)
        stack.extend(node.next_nodes)
    return True


def pull(start: int, roots: Sequence[tuple[Any, Any]], leaves: Sequence[Any], records: bool) -> list[Any]:
    """Gradients of leaves: a pass over the nodes that were recorded after `start`.

    Args:
        start: number of a node; those with lower ones are left alone.
        roots: Tensors, each with its gradient.
        leaves: Tensors that require grad.
        records: run the rules for Tensors, and record.
    """
    nodes: dict[Node, bool] = {}
    ends = {leaf._node: i for i, leaf in enumerate(leaves) if leaf._node is not None}
    stack = [root._node for root, _ in roots]
    while stack:
        node = stack.pop()
        if node not in nodes and node not in ends and node._seq > start and not node.is_leaf:
            nodes[node] = False
            stack.extend(child for child in node.next_nodes if child is not None)
    order = sorted(nodes, key=lambda node: node._seq)
    for node in order:
        nodes[node] = any(child in ends or nodes.get(child, False) for child in node.next_nodes if child is not None)
    sums: dict[tuple[Any, int], Any] = {}

    def arrive(node: Any, nr: int, grad: Any) -> None:
        have = sums.get((node, nr))
        sums[node, nr] = grad if have is None else have + grad

    with ModeScope(grad=records):
        for root, seed in roots:
            seed = np.broadcast_to(seed, root.shape) if seed.shape != root.shape else seed
            if seed.dtype != root.dtype:
                seed = np.astype(np.real(seed) if root.dtype.kind != "c" else seed, root.dtype)
            if records and not isinstance(seed, TensorCore):
                seed = make(seed)
            arrive(root._node, root._nr, seed if records else _data(seed))
        for node in reversed(order):
            grads = [sums.pop((node, nr), None) for nr in range(node.num_inputs)]
            needs = tuple(child in ends or (child is not None and nodes.get(child, False)) for child in node.next_nodes)
            if not any(needs) or all(grad is None for grad in grads):
                continue
            found = node.compute(grads, needs, None, records)  # type: ignore[attr-defined]
            for index, (child, nr, grad) in enumerate(zip(node.next_nodes, node.next_nrs, found, strict=True)):
                if grad is None or child is None or not needs[index]:
                    continue
                metadata = child.metadata_of(nr)
                grad = dense(grad)
                if metadata is not None and (grad.shape != metadata.shape or grad.dtype != metadata.dtype):
                    grad = fit(grad, metadata.shape, metadata.dtype, node, index)
                arrive(child, nr, grad)
    return [sums.get((leaf._node, 0)) for leaf in leaves]
