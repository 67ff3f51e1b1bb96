"""Arrays with a hidden batch axis, and the level they live on; see Note [Levels] in `aiograd.tensors.levels`.

Rejected: interpreting a recorded program (a function that awaits a pass is no program); a second set of rules for derivatives of batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.ops.op import ROWS, Op
from aiograd.running.modes import current_mode
from aiograd.running.types import Shape
from aiograd.tensors.core import make
from aiograd.tensors.followed import without_tangent
from aiograd.tensors.levels import Level, LevelArray


class BatchLevel(Level):
    """One call of a function that `vmap` made: the device its arrays live on."""

    kind = "vmap"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        #: True if the caller records a graph
        self.records = current_mode().grad

    def from_host(self, array: np.ndarray[Any, Any]) -> BatchedArray:
        """The same values for every example."""
        return BatchedArray(self, make(np.array(array)), False)

    def adopt(self, tensor: Any) -> BatchedArray:
        """A Tensor of the caller, the same for every example, which keeps its place in the caller's graph."""
        return BatchedArray(self, tensor, False)

    def to_host(self, array: BatchedArray) -> Any:
        """Refuse: there is a value for every example."""
        raise ArgumentError("vmap: the function reads the value of a tensor, which differs from example to example; use where() in place of if")

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The row by its batching rule, or in a loop over the examples."""
        return RUN[0](self, op, args, kwargs)


class BatchedArray(LevelArray):
    """An array of one example, and its values for all.

    Args:
        level: the call it belongs to.
        value: a Tensor of the caller: (B, *shape) where `batched`, else of the shape itself.
        batched: True if examples differ.
    """

    __slots__ = ("value", "batched")

    def __init__(self, level: BatchLevel, value: Any, batched: bool) -> None:
        self.level = level
        self.value = value
        self.batched = batched

    @property
    def shape(self) -> Shape:
        """Extents of one example."""
        return self.value.shape[1:] if self.batched else self.value.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self.value.dtype  # type: ignore[no-any-return]

    def __setitem__(self, index: Any, value: Any) -> None:
        given = value if isinstance(value, BatchedArray) else self.level.from_host(np.asarray(value))
        changed = ROWS["setitem"](self, given, index=index)
        if changed.level is not self.level:
            raise ArgumentError(
                "vmap: a function within another writes its values into a tensor of the outer one, which has one value for all of them. Make a new "
                "tensor of both with an operation out of place."
            )
        self.value, self.batched = changed.value, changed.batched

    async def __aiograd_wait__(self) -> None:
        await self.value

    def __copy__(self) -> Self:
        return type(self)(self.level, self.value, self.batched)

    def without_tangent(self) -> Self:
        """The same array without tangents of calls around it."""
        value = make(without_tangent(self.value._data))
        value._node, value._nr = self.value._node, self.value._nr
        return type(self)(self.level, value, self.batched)


#: runs a row on batched arrays; set by `aiograd.functional.batching.rules`, which is built on this module
RUN: list[Callable[[BatchLevel, Op, tuple[Any, ...], dict[str, Any]], Any]] = []
