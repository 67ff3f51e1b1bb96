"""Nested outputs of a stage and the gradients that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.graph.gradient_edge import GradientEdge
from aiograd.tensors.core import TensorCore


def differentiable_outputs(output: Any, grad: Any) -> tuple[list[Any], list[Any]]:
    """The Tensors and GradientEdges in `output` that lead anywhere, and the gradient of each (a Tensor or None).

    Both are nested tuples, lists and dicts (str keys) of the same shape; a tuple may stand for a list. None in the place of a nested gradient leaves
    out all that it belongs to. Tensors outside of any graph, and other values, are left out.

    Raises:
        ArgumentTypeError, ArgumentError: `grad` does not fit; the message says where.
    """
    outputs: list[Any] = []
    grads: list[Any] = []
    _collect(output, grad, "output", outputs, grads)
    return outputs, grads


def _collect(output: Any, grad: Any, place: str, outputs: list[Any], grads: list[Any]) -> None:
    """A function of its own and not nested in its caller: one that refers to itself is a cycle, which would keep activations until a collection."""
    if isinstance(output, (TensorCore, GradientEdge)):
        if isinstance(output, TensorCore) and not output.requires_grad:
            return
        if grad is not None and not isinstance(grad, TensorCore):
            raise ArgumentTypeError(f"the gradient of {place} is a {type(grad).__name__}; expected a Tensor or None")
        outputs.append(output)
        grads.append(grad)
    elif isinstance(output, (tuple, list)):
        if grad is None:
            return
        if not isinstance(grad, (tuple, list)):
            raise ArgumentTypeError(
                f"the gradient of {place}, a {type(output).__name__}, is a {type(grad).__name__}; expected a tuple or list of gradients, or None"
            )
        if len(grad) != len(output):
            raise ArgumentError(f"{place} has {len(output)} entries and its gradient has {len(grad)}; expected one gradient (or None) for each")
        for i, (item, item_grad) in enumerate(zip(output, grad, strict=True)):
            _collect(item, item_grad, f"{place}[{i}]", outputs, grads)
    elif isinstance(output, Mapping):
        if grad is None:
            return
        if not isinstance(grad, Mapping):
            raise ArgumentTypeError(f"the gradient of {place}, a dict, is a {type(grad).__name__}; expected a dict, or None")
        if output.keys() != grad.keys():
            found, expected = sorted(map(repr, grad)), sorted(map(repr, output))
            raise ArgumentError(f"the gradient of {place} has the keys {found}; expected the keys of the output, {expected}")
        for key, item in output.items():
            _collect(item, grad[key], f"{place}[{key!r}]", outputs, grads)


def describe(tree: Any, depth: int = 8) -> str:
    """A text about the contents of `tree`, for messages: types, shapes and `requires_grad`, no values."""
    if isinstance(tree, TensorCore):
        name = type(tree._node).__name__ if tree._node is None or tree._node.is_leaf else tree._node.name
        where = "" if tree._node is None else " leaf" if tree._node.is_leaf else f" of {name}"
        return f"Tensor(shape={list(tree.shape)}, dtype={tree.dtype}, requires_grad={tree._node is not None}{where})"
    if isinstance(tree, GradientEdge):
        return f"GradientEdge({getattr(tree.node, 'name', type(tree.node).__name__)}, {tree.output_nr})"
    if depth and isinstance(tree, (tuple, list)):
        inner = ", ".join([describe(item, depth - 1) for item in tree[:16]]) + (", ..." if len(tree) > 16 else "")
        return f"({inner})" if isinstance(tree, tuple) else f"[{inner}]"
    if depth and isinstance(tree, Mapping):
        items = list(tree.items())
        return "{" + ", ".join([f"{key!r}: {describe(item, depth - 1)}" for key, item in items[:16]]) + (", ..." if len(items) > 16 else "") + "}"
    return "None" if tree is None else type(tree).__name__
