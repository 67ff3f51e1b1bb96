"""Arrays with a hidden batch axis, and the level they live on; see Note [Levels] in `aiograd.tensors.levels`.

Note [Writes and views]
    A write makes new values for the array and, as in forward mode, for the base of a view; other views take theirs at their next use.

Rejected: interpreting a recorded program (a function that awaits a pass is no program); a second set of rules for derivatives of batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from aiograd.errors import ArgumentError, InPlaceError
from aiograd.ops.op import ROWS, Op
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.types import Shape
from aiograd.tensors.core import TensorCore, host_array, make, refresh
from aiograd.tensors.followed import has_tangent
from aiograd.tensors.inplace import store
from aiograd.tensors.levels import Level, LevelArray, recording

_WRITEABLE = np.empty(0).flags
_OUTSIDE = "vmap: values that differ from example to example are written into a tensor from outside; make the tensor in the function"
_OUTER = (
    "vmap: a function within another writes its values into a tensor of the outer one, which has one value for all of them. Make a new tensor of "
    "both with an operation out of place."
)
_DETACHED = (
    "vmap: values through which a gradient or a tangent of the caller goes are written into a tensor of detach(), and so into the one that it shares "
    "memory with, which would get no part of it. Use clone() of the detached tensor first, or detach() what is written."
)


class ValueOfBatchError(ArgumentError):
    """The value of a batched array was asked for, which differs from example to example."""


class BatchLevel(Level):
    """One call of a function that `vmap` made: the device its arrays live on."""

    kind = "vmap"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        #: True if the caller records a graph
        self.records = current_mode().grad
        self._follows = current_mode().tangents

    @property
    def records_now(self) -> bool:
        """True if the caller's graph gets the row that runs; `no_grad` in the function holds for that graph too."""
        return self.records and (current_mode().tangents or not self._follows)

    def from_host(self, array: np.ndarray[Any, Any]) -> BatchedArray:
        """The same values for every example."""
        return BatchedArray(self, make(np.array(array)), False)

    def adopt(self, tensor: Any) -> BatchedArray:
        """A Tensor of the caller, the same for every example, which keeps its place in the caller's graph."""
        return BatchedArray(self, tensor, False)

    def to_host(self, array: BatchedArray) -> Any:
        """The values of an array that is the same for all examples; refuse others."""
        if not array.batched:
            return host_array(array.value)
        raise ValueOfBatchError("vmap: the function reads the value of a tensor, which differs from example to example; use where() in place of if")

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

    __slots__ = ("value", "batched", "base")
    is_fixed = False
    #: no call of forward mode follows the values, but see `aiograd.tensors.followed.follows_writes`
    is_followed = False

    def __init__(self, level: BatchLevel, value: Any, batched: bool) -> None:
        self.level = level
        self.value = value
        self.batched = batched
        #: the array that it is a view of
        self.base = None

    @property
    def shape(self) -> Shape:
        """Extents of one example."""
        return self.value.shape[1:] if self.batched else self.value.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self.value.dtype  # type: ignore[no-any-return]

    @property
    def examples(self) -> int:  # type: ignore[override]
        """The length of the batch, times the lengths of batches around it."""
        return (self.level.size if self.batched else 1) * getattr(self.value._data, "examples", 1)

    def __setitem__(self, index: Any, value: Any) -> None:
        given = value if isinstance(value, BatchedArray) else self.level.from_host(np.asarray(value))
        self._become("setitem", (self, given), {"index": index})

    def _become(self, row: str, args: tuple[BatchedArray, ...], settings: dict[str, Any]) -> None:
        keeps = not current_mode().tangents
        with ModeScope(tangents=True):  # under no_grad all elements keep their place in the caller's graph, as they do in eager mode
            changed = ROWS[row](*args, **settings)
            if changed.level is not self.level:
                raise ArgumentError(_OUTER)
            if keeps:
                changed = self._with_values(changed)
        self._take_over(changed)

    def _with_values(self, other: BatchedArray) -> BatchedArray:
        """The values of another array of the level with the place that this one has in the caller's graph."""
        with recording(self.level.records):
            value = self.value if self.batched or not other.batched else self.value.broadcast_to((self.level.size, *self.shape))
            value = value.clone()
        with ModeScope(grad=False, tangents=False):
            value[...] = other.value
        return BatchedArray(self.level, value, self.batched or other.batched)

    def _take_over(self, changed: BatchedArray) -> None:
        self.value, self.batched = changed.value, changed.batched

    @property
    def flags(self) -> Any:
        """Flags of memory that may be written: the values of the level are its own."""
        return _WRITEABLE

    @property
    def plain(self) -> Any:
        """The values, to be written into a tensor from outside; refuse those that differ from example to example."""
        if self.batched:
            raise ValueOfBatchError(_OUTSIDE)
        return self.level.to_host(self)

    def lifted(self, data: Any) -> BatchedArray:
        """An array of the level that is about to be written; a tensor of the caller has one value for all examples."""
        if isinstance(data, BatchedArray) and data.level is self.level:
            return data
        if isinstance(data, BatchedArray):
            raise ArgumentError(_OUTER)
        raise ValueOfBatchError(_OUTSIDE)

    def take_part(self, part: BatchedArray, index: Any, shape: Shape | None) -> None:
        """Take over a view that was written: its elements are those at `index`, or all of them, in another shape."""
        self._become(*(("setitem", (self, part), {"index": index}) if shape is None else ("reshape", (part,), {"shape": shape})))

    async def __aiograd_wait__(self) -> None:
        await self.value

    def __copy__(self) -> Self:
        return type(self)(self.level, self.value, self.batched)

    def without_tangent(self, tensor: Any = None) -> DetachedArray:
        """The same array without tangents of calls around it, and apart from the caller's graph."""
        return DetachedArray(self.level, self if tensor is None else tensor)


class DetachedArray(BatchedArray):
    """The values of another array, apart from the caller's graph: writes into one of the two are seen in the other.

    Args:
        level: the call it belongs to.
        source: the other array, or a Tensor that has it, which after a write may have another one.
    """

    __slots__ = ("source",)

    def __init__(self, level: BatchLevel, source: Any) -> None:
        self.level = level
        self.source = source
        self.base = None

    @property
    def _other(self) -> BatchedArray:
        found = self.source
        while not isinstance(found, BatchedArray) or found.level is not self.level:
            if isinstance(found, TensorCore):
                refresh(found)
                found = found._data
            else:
                found = getattr(found, found.holds)
        return found

    @property
    def value(self) -> Any:
        """The values of the other array as they are now."""
        return self._other.value.detach()

    @property
    def batched(self) -> bool:  # type: ignore[override]
        """As of the other array."""
        return self._other.batched

    def _take_over(self, changed: BatchedArray) -> None:
        if changed.value.requires_grad or has_tangent(changed.value):
            raise InPlaceError(_DETACHED)
        with ModeScope(grad=False, tangents=False):
            if isinstance(self.source, TensorCore):
                store(self.source, ..., changed)
            else:
                self.source[...] = changed

    def __copy__(self) -> Self:
        return type(self)(self.level, self.source)


#: runs a row on batched arrays; set by `aiograd.functional.batching.rules`, which is built on this module
RUN: list[Callable[[BatchLevel, Op, tuple[Any, ...], dict[str, Any]], Any]] = []
