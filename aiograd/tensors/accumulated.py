"""The accumulated gradient of a Tensor: a leaf has it in its node, any other in its `TensorExtra`."""

from __future__ import annotations

import weakref
from typing import Any

from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.node import Node


class TensorExtra:
    """State that few Tensors have."""

    __slots__ = ("_grad", "leaf", "retains", "view")

    def __init__(self) -> None:
        self._grad: Any = None
        #: the node of a leaf that `requires_grad_` has switched off: graphs and hooks that it had find it again
        self.leaf: AccumulateGrad | None = None
        #: the node with the hook that retains the gradient, None where it is not retained
        self.retains: Node | None = None
        #: the `aiograd.tensors.core.View` of a Tensor that is one, else None
        self.view: Any = None

    @property
    def grad(self) -> Any:
        """Gradient of a non-leaf that retains it, of a leaf that is switched off, or one set by hand on a tensor that requires none."""
        return self._grad if self.leaf is None else self.leaf.seen_grad()

    @grad.setter
    def grad(self, value: Any) -> None:
        if self.leaf is None:
            self._grad = value
        else:
            self.leaf.grad = value

    def taken_leaf(self) -> tuple[AccumulateGrad | None, Any]:
        """The leaf that is switched off and the gradient, which are here no more."""
        leaf, grad = self.leaf, self.grad
        self.leaf = self._grad = None
        return leaf, grad


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


def new_leaf(tensor: Any) -> AccumulateGrad:
    """The node of a Tensor that becomes a leaf: the one that it had before it was switched off, where that fits."""
    data, extra = tensor._data, tensor._x
    leaf, grad = (None, None) if extra is None else extra.taken_leaf()
    if leaf is None or (leaf.shape, leaf.dtype, leaf.device) != (data.shape, data.dtype, tensor.device):
        leaf = AccumulateGrad(data.shape, data.dtype, tensor.device, tensor)
        leaf.grad = grad
    return leaf


def switched_off(tensor: Any) -> AccumulateGrad | None:
    """Take the node from a Tensor that is a leaf. Returns it if it is still needed: for its gradient or hooks, or since graphs have it."""
    leaf = tensor._node
    tensor._node = None
    if leaf.grad is None and leaf._extra is None and leaf.post_accumulate_hooks is None:
        reference = weakref.ref(leaf)
        del leaf
        return reference()
    return leaf  # type: ignore[no-any-return]
