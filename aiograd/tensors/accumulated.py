"""The accumulated gradient of a Tensor: a leaf has it in its node, any other in its `aiograd.tensors.core.TensorExtra`."""

from __future__ import annotations

from typing import Any


def gradient_of(tensor: Any) -> Any:
    """The gradient: None, a Tensor, or an array while the user has not read it yet."""
    node = tensor._node
    if node is not None and node.is_leaf:
        return node.grad
    return None if tensor._x is None else tensor._x.grad


def seen_gradient(tensor: Any) -> Any:
    """The gradient for the user: None or a Tensor, from now on the same one every time."""
    node = tensor._node
    if node is not None and node.is_leaf:
        return node.seen_grad()
    return None if tensor._x is None else tensor._x.grad
