"""Containers in which libraries hand tensors over: the containers of `aiograd.running.trees`, and dict subclasses, deques, sets and dataclasses."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

_ATOMS = (int, float, complex, str, bytes, type, type(None))


def map_nested(
    function: Callable[[Any], Any], tree: Any, kind: type[Any] | tuple[type[Any], ...], refuse: Callable[[Any], None] | None = None
) -> Any:
    """A tree like `tree`, of the same classes, with each leaf of type `kind` replaced by ``function(leaf)``.

    Args:
        function: called with each leaf, in order.
        tree: leaves nested in tuples, lists, dicts, deques, sets, dataclasses and slices. One that only is in itself is not entered again.
        kind: class, or classes, of the leaves.
        refuse: called with each object that is none of these, which stays as it is.

    Returns:
        The tree. Dataclasses, and containers of other classes than Python's own, are copied where something in them is replaced.
    """
    if isinstance(tree, kind):
        return function(tree)
    if tree.__class__ is tuple and all([isinstance(item, kind) for item in tree]):  # as most arguments are
        return tuple([function(item) for item in tree])
    return _Mapping(function, kind, refuse).of(tree)


def nested_leaves(tree: Any, kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
    """The leaves of type `kind`, in the order in which `map_nested` calls its function.

    Args:
        tree: as of `map_nested`.
        kind: class, or classes, of the leaves.

    Returns:
        A list.
    """
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_nested(note, tree, kind)
    return found


def leaves_of_object(other: Any, kind: type[Any]) -> list[Any]:
    """The leaves of type `kind` among the attributes of an object that `map_nested` does not enter.

    Args:
        other: the object.
        kind: class of the leaves.

    Returns:
        A list.
    """
    slots = [name for cls in type(other).__mro__ for name in getattr(cls, "__slots__", ())]
    return nested_leaves([getattr(other, name, None) for name in (*getattr(other, "__dict__", ()), *slots)], kind)


class _Mapping:
    """One call of `map_nested`."""

    def __init__(self, function: Callable[[Any], Any], kind: type[Any] | tuple[type[Any], ...], refuse: Callable[[Any], None] | None) -> None:
        self.function = function
        self.kind = kind
        self.refuse = refuse
        #: numbers of the dataclasses and containers that are being entered
        self.entered: set[int] = set()

    def of(self, tree: Any) -> Any:
        """The tree in the place of `tree`."""
        if isinstance(tree, self.kind):
            return self.function(tree)
        if isinstance(tree, _ATOMS):
            return tree
        cls = tree.__class__
        if cls is dict:
            return {key: self.of(item) for key, item in tree.items()}
        if isinstance(tree, (tuple, list)):
            items = [self.of(item) for item in tree]
            return cls(*items) if hasattr(tree, "_fields") else cls(items)
        if isinstance(tree, slice):
            return slice(self.of(tree.start), self.of(tree.stop), self.of(tree.step))
        if id(tree) in self.entered:
            return tree
        self.entered.add(id(tree))
        try:
            return self._of_other(tree)
        finally:
            self.entered.discard(id(tree))

    def _of_other(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            changed = [(key, new) for key, item in tree.items() if (new := self.of(item)) is not item]
            if not changed:
                return tree
            copied = copy.copy(tree)
            for key, item in changed:
                copied[key] = item
            return copied
        if isinstance(tree, (deque, set, frozenset)):
            items = [self.of(item) for item in tree]
            if all(new is old for new, old in zip(items, tree, strict=True)):
                return tree
            return deque(items, tree.maxlen) if isinstance(tree, deque) else tree.__class__(items)
        fields = getattr(tree, "__dataclass_fields__", None)
        if fields is None:
            if self.refuse is not None:
                self.refuse(tree)
            return tree
        held = [(name, getattr(tree, name)) for name in fields if hasattr(tree, name)]
        replaced = [(name, new) for name, item in held if (new := self.of(item)) is not item]
        if not replaced:
            return tree
        copied = copy.copy(tree)
        for name, item in replaced:
            object.__setattr__(copied, name, item)  # it may be frozen
        return copied
