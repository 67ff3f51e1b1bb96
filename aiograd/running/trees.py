"""Trees: values nested in tuples, lists, dicts and slices, and their leaves of some type. Anything else in a tree is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_tree(function: Callable[[Any], Any], tree: Any, kind: type[Any] | tuple[type[Any], ...]) -> Any:
    """A tree like `tree`, with each leaf of type `kind` replaced by ``function(leaf)``."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        items = [map_tree(function, item, kind) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: map_tree(function, item, kind) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*[map_tree(function, item, kind) for item in (tree.start, tree.stop, tree.step)])
    return tree


def leaves_of(tree: Any, kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
    """The leaves of type `kind`, in order."""
    found: list[Any] = []
    stack: list[Any] = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, kind):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            stack.extend(reversed(item.values()))
        elif isinstance(item, slice):
            stack.extend((item.step, item.stop, item.start))
    return found
