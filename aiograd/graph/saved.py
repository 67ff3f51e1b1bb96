"""Saved-tensor hooks: functions that replace a value when it is saved and restore it when it is needed.

Note [Packed values]
    While hooks are active, a node stores the results of ``pack`` in a `Packed` instead of the values. The engine unpacks them before it
    runs the node, on the loop, and awaits what ``unpack`` returned if that is awaitable; this is what `checkpoint` builds on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from aiograd.errors import ArgumentTypeError, GraphError
from aiograd.running.modes import ModeScope, current_mode


class SavedTensorHooks:
    """A pair of hooks; `pack` maps a Tensor to anything, `unpack` maps that back to a Tensor (or an awaitable of one)."""

    __slots__ = ("pack", "unpack")

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.pack = pack
        self.unpack = unpack


class Packed:
    """The values that a node saved while hooks were active, in the order of its saved names; entries of type `PackedValue` are packed."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


class PackedValue:
    """One packed tensor.

    Args:
        packed: the result of ``pack``.
        hooks: the pair of hooks that packed it.
        is_output: True if the tensor is an output of the node's own operation.
        place: the tensor's gradient edge, ``(node, input number)``; the node is None for an output of the node itself, and for a
            tensor outside of the graph. Given by nodes if their edges do not tell it.
    """

    __slots__ = ("packed", "hooks", "is_output", "place")

    def __init__(self, packed: Any, hooks: SavedTensorHooks, is_output: bool, place: tuple[Any, int] = (None, 0)) -> None:
        self.packed = packed
        self.hooks = hooks
        self.is_output = is_output
        self.place = place


class saved_tensors_hooks(ModeScope):
    """Pack every tensor saved for backward with `pack`, and `unpack` it when its node runs.

    Args:
        pack: ``pack(tensor) -> anything``; must not modify the tensor in place.
        unpack: ``unpack(packed) -> Tensor``, or an awaitable of one; called once each time the node runs.

    The innermost pair wins. Belongs to the asyncio task.

    Raises:
        GraphError: on entering, where hooks have been disabled.
        ArgumentTypeError: one of the hooks is not callable.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> with ag.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), lambda a: ag.tensor(a)):
    ...     y = x * x
    >>> await y.sum().backward()
    >>> x.grad
    tensor([2., 4.])
    """

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        for name, hook in (("pack", pack), ("unpack", unpack)):
            if not callable(hook):
                raise ArgumentTypeError(f"saved_tensors_hooks({name}=...): expected a callable, found {type(hook).__name__}")
        super().__init__(saved_hooks=SavedTensorHooks(pack, unpack))

    def _check_entry(self) -> None:
        message = current_mode().saved_hooks_disabled
        if message is not None:
            raise GraphError(message)


def disable_saved_tensors_hooks(message: str) -> AbstractContextManager[Any]:
    """Refuse saved-tensor hooks within the block, with this message.

    Args:
        message: the text of the error that entering `saved_tensors_hooks` then raises.

    Returns:
        A context manager.

    Raises:
        GraphError: hooks are on already.
    """
    current = current_mode()
    if current.saved_hooks is not None:
        raise GraphError(message)
    return ModeScope(saved_hooks_disabled=message)
