"""The seam between the engine, which carries arrays, and user code, which sees Tensors.

Hooks and custom rules get Tensors; the engine does not know the class. The tensor layer binds the two conversions here when it is
imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiograd.running.types import Array


class Boundary:
    """The conversions between arrays and Tensors."""

    __slots__ = ("wrap", "unwrap", "is_tensor")

    wrap: Callable[[Array], Any]
    unwrap: Callable[[Any], Array]
    is_tensor: Callable[[Any], bool]


BOUNDARY = Boundary()


def to_tensor(value: Array | None) -> Any:
    """A Tensor of the value; None and Tensors pass through."""
    return value if value is None or BOUNDARY.is_tensor(value) else BOUNDARY.wrap(value)


def to_array(value: Any, create_graph: bool) -> Any:
    """The engine's form of a Tensor: the Tensor itself where the pass records a graph, else its array."""
    return value if create_graph or value is None or not BOUNDARY.is_tensor(value) else BOUNDARY.unwrap(value)
