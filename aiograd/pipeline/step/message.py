"""StageMessage: what one stage hands to the next for one microbatch, cut out of the graph.

Note [Cut]
    The sender keeps the edges where gradients of its outputs arrive and lets go of the output Tensors; the message has their data outside of
    any graph; the receiver makes leaves of the Tensors that require grad. Gradients come back as a list, one entry for each Tensor of the message
    that wants one, in order of first occurrence, None where there is none: a stage with unused outputs gets no gradient rather than zeros, as in a
    model that is not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.graph.node import Node
from aiograd.running.trees import map_tree
from aiograd.tensors.core import TensorCore, make, refresh

#: a gradient edge: node and input number
EdgeOf = tuple[Node, int]


class StageMessage(NamedTuple):
    """Values between stages."""

    #: one value, or a tuple of the next stage's arguments; Tensors in it are outside of any graph
    values: Any
    #: for each distinct Tensor in `values`, in order of first occurrence, whether it wants a gradient
    wants: tuple[bool, ...]

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments that it stands for."""
        return self.values if self.values.__class__ is tuple else (self.values,)


def pack(values: Any) -> tuple[StageMessage, list[EdgeOf]]:
    """Cut the outputs of a stage out of its graph.

    Returns:
        The message, and the edge of each of its Tensors that wants a gradient, in order.
    """
    made: dict[int, Any] = {}
    wants: list[bool] = []
    edges: list[EdgeOf] = []

    def cut(tensor: Any) -> Any:
        known = made.get(id(tensor))
        if known is None:
            refresh(tensor)
            wants.append(tensor._node is not None)
            if tensor._node is not None:
                edges.append((tensor._node, tensor._nr))
            known = made[id(tensor)] = make(tensor._data, shared_with=tensor)
        return known

    return StageMessage(map_tree(cut, values, TensorCore), tuple(wants)), edges


def unpack(message: StageMessage, moved: Sequence[Any] | None = None) -> tuple[tuple[Any, ...], list[Any]]:
    """The arguments with which the receiving stage is called.

    Args:
        message: the message from the previous stage.
        moved: the distinct Tensors of the message on the device of the receiver, in order; None: they are used as they are.

    Returns:
        The arguments, and the leaves that want a gradient, in order.

    Raises:
        ArgumentError, ArgumentTypeError: the message does not fit itself (it may come from another worker).
    """
    made: dict[int, Any] = {}
    leaves: list[Any] = []

    def arrive(tensor: Any) -> Any:
        leaf = made.get(id(tensor))
        if leaf is None:
            index = len(made)
            if index >= len(message.wants):
                raise ArgumentError(f"a message between stages has more Tensors than the {len(message.wants)} that it says something about")
            if moved is None:
                leaf = make(tensor._data, shared_with=tensor)
            else:
                leaf = make(moved[index]._data)
            if message.wants[index]:
                leaves.append(leaf.requires_grad_())
            made[id(tensor)] = leaf
        return leaf

    args = map_tree(arrive, message.args, TensorCore)
    if len(made) != len(message.wants):
        raise ArgumentError(f"a message between stages has {len(made)} Tensors and says something about {len(message.wants)}")
    return args, leaves


def tensors_of(message: StageMessage) -> list[Any]:
    """The distinct Tensors of a message, in order of first occurrence."""
    found: dict[int, Any] = {}
    map_tree(lambda tensor: found.setdefault(id(tensor), tensor), message.values, TensorCore)
    return list(found.values())


def check_gradients(grads: Any, count: int) -> list[Any]:
    """The gradients that came back for `count` Tensors; they may come from another worker.

    Raises:
        ArgumentTypeError, ArgumentError: they are not one Tensor or None for each.
    """
    if not isinstance(grads, (list, tuple)) or any(grad is not None and not isinstance(grad, TensorCore) for grad in grads):
        raise ArgumentTypeError("gradients of a stage's outputs: expected a list of Tensors and None")
    if len(grads) != count:
        raise ArgumentError(f"gradients of a stage's outputs: got {len(grads)} for {count} outputs that want one")
    return list(grads)
