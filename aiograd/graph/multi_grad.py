"""Hooks on several tensors at once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

from aiograd.errors import ArgumentError, ArgumentTypeError, NoGraphError
from aiograd.graph.boundary import BOUNDARY
from aiograd.graph.current import CURRENT
from aiograd.graph.gradient_edge import GradientEdge
from aiograd.graph.hooks import HandleGroup, Hook
from aiograd.graph.node import Node, as_edge


def register_multi_grad_hook(tensors: Sequence[Any], hook: Hook, *, mode: Literal["all", "any"] = "all") -> HandleGroup:
    """Call a hook when gradients of several tensors have been computed.

    Args:
        tensors: Tensors that require grad.
        hook: with mode ``all`` called as ``hook(grads)`` once per pass, when all of the tensors that take part in it have their gradient (None
            for the others; not at all where none takes part); with mode ``any`` called as ``hook(grad)`` with the first. Its result is
            ignored; it may be ``async def``.
        mode: "all" or "any".

    Returns:
        A handle that removes it.

    Raises:
        ArgumentError: another mode.
        ArgumentTypeError: the hook is not callable, or one of the tensors is none.
        NoGraphError: a tensor does not require grad.
    """
    if mode not in ("all", "any"):
        raise ArgumentError(f"register_multi_grad_hook: Expects mode to be one of ('all', 'any') but got {mode}")
    if not callable(hook):
        raise ArgumentTypeError(f"register_multi_grad_hook: expected a callable, found {type(hook).__name__}")
    edges = [get_gradient_edge(tensor) for tensor in tensors]
    nodes = [weakref.ref(edge.node) for edge in edges]  # weak: the nodes hold the hooks
    key = object()

    def arrived(index: int, grad: Any) -> Any:
        current = CURRENT.get()
        if current is None:
            return None
        states = current.task.shared_hook_state
        if mode == "any":
            if grad is None or id(key) in states:
                return None
            states[id(key)] = True
            return hook(grad)
        state = states.get(id(key))
        if state is None:
            waiting = sum(current.task.gets_gradient(node()) for node in nodes)
            state = states[id(key)] = [waiting, [None] * len(nodes)]
        state[0] -= 1
        state[1][index] = grad
        return hook(state[1]) if state[0] == 0 else None

    return HandleGroup([edge.node.tensor_hooks(edge.output_nr).add(_At(arrived, i)) for i, edge in enumerate(edges)])


class _At:
    """The hook on one of the tensors: calls ``arrived`` with its index."""

    __slots__ = ("_arrived", "_index")

    #: called even if the gradient is None, because it counts arrivals
    takes_none = True
    #: its result is awaited and then dropped
    ignores_result = True

    def __init__(self, arrived: Any, index: int) -> None:
        self._arrived = arrived
        self._index = index

    def __call__(self, grad: Any) -> Any:
        return self._arrived(self._index, grad)


def get_gradient_edge(tensor: Any) -> GradientEdge:
    """The gradient edge of a tensor: its node and output number, ``(AccumulateGrad, 0)`` for a leaf.

    Args:
        tensor: a Tensor that requires grad.

    Returns:
        The edge, which keeps the node alive.

    Raises:
        NoGraphError: the tensor does not require grad.
        ArgumentTypeError: it is no Tensor.
    """
    if not BOUNDARY.is_tensor(tensor):
        raise ArgumentTypeError(f"get_gradient_edge: expected a Tensor, found {type(tensor).__name__}")
    node: Node | None = tensor.grad_fn or tensor._node
    if node is None:
        raise NoGraphError("It is not possible to get the gradient edge for a Tensor that does not require gradients: call requires_grad_() first")
    return GradientEdge(node, tensor._nr)


def create_gradient_edge(tensor: Any, edge: GradientEdge) -> None:
    """Make `tensor` the output of a node: gradients of the tensor arrive at this edge from now on.

    Args:
        tensor: the Tensor.
        edge: the node and the number of its input.

    Raises:
        ArgumentTypeError, ArgumentError: not a Tensor, or not an input of a node.
    """
    if not BOUNDARY.is_tensor(tensor):
        raise ArgumentTypeError(f"create_gradient_edge: expected a Tensor, found {type(tensor).__name__}")
    tensor._node, tensor._nr = as_edge(edge)


def any_requires_grad(*values: Any) -> bool:
    """True if any of the values is a Tensor that requires grad.

    Args:
        *values: anything.

    Returns:
        True or False.
    """
    return any(BOUNDARY.is_tensor(value) and value.requires_grad for value in values)


def collect_next_edges(*values: Any) -> list[Any]:
    """The gradient edge of each Tensor that requires grad, None for everything else: `next_edges` for a node of your own.

    Args:
        *values: anything.

    Returns:
        One entry for each value.
    """
    return [get_gradient_edge(value) if BOUNDARY.is_tensor(value) and value.requires_grad else None for value in values]
