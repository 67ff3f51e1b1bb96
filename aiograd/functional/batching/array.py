"""Arrays with a hidden batch axis, and the device they live on.

Note [Levels]
    `vmap` runs a function once, on Tensors with `BatchedArray`s as data. They have the shape of one example; they hold a Tensor of the caller, with
    the batch in front. Since rules of rows are written for any array that implements numpy's protocols, recording, passes and gradients of gradients
    inside the function work on them as they are; and since every operation on them is a row run on Tensors of the caller, the caller's graph records
    it. So `vmap` composes with gradients inside and outside, and with itself.

Rejected: interpreting a recorded program (a function that awaits a pass is no program); a second set of rules for derivatives of batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from aiograd.errors import ArgumentError
from aiograd.ops.op import ROWS, UFUNCS, Op
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.trees import leaves_of, map_tree
from aiograd.running.types import Shape
from aiograd.tensors.core import make
from aiograd.tensors.dispatch import array_function, array_ufunc

_numbers = itertools.count()
_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def recording(records: bool) -> AbstractContextManager[Any]:
    """A block in which a graph is recorded, or none; entering it costs little where it changes nothing."""
    return _AS_IT_IS if current_mode().grad is records else ModeScope(grad=records)


class BatchLevel:
    """One call of a function that `vmap` made: the device its arrays live on."""

    launches_ahead = True

    def __init__(self, size: int) -> None:
        self.size = size
        #: of two calls of which one is made within the other, the inner one has the higher number
        self.depth = next(_numbers)
        self.name = f"vmap:{self.depth}"
        #: True if the caller records a graph
        self.records = current_mode().grad

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run at once."""
        future: Future[Any] = Future()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        return future

    def from_host(self, array: np.ndarray[Any, Any]) -> BatchedArray:
        """The same values for every example."""
        return BatchedArray(self, make(np.array(array)), False)

    def adopt(self, tensor: Any) -> BatchedArray:
        """A Tensor of the caller, the same for every example, which keeps its place in the caller's graph."""
        return BatchedArray(self, tensor, False)

    def to_host(self, array: BatchedArray) -> Any:
        """Refuse: there is a value for every example."""
        raise ArgumentError("vmap: the function reads the value of a tensor, which differs from example to example; use where() in place of if")

    def fused(self, row: str) -> None:
        """None: rows run by the batching rules."""
        return None


class BatchedArray(NDArrayOperatorsMixin):
    """An array of one example, and its values for all; see Note [Levels].

    Args:
        level: the call it belongs to.
        value: a Tensor of the caller: (B, *shape) where `batched`, else of the shape itself.
        batched: True if examples differ.
    """

    __slots__ = ("level", "value", "batched")
    __aiograd_priority__ = 500
    __array_priority__ = 500
    base = None

    def __init__(self, level: BatchLevel, value: Any, batched: bool) -> None:
        self.level = level
        self.value = value
        self.batched = batched

    @property
    def __aiograd_device__(self) -> str:
        return self.level.name

    @property
    def shape(self) -> Shape:
        """Extents of one example."""
        return self.value.shape[1:] if self.batched else self.value.shape  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        """Axes of one example."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of one example."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of one example."""
        return self.size * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self.value.dtype  # type: ignore[no-any-return]

    @property
    def T(self) -> Any:
        """Axes in reverse order."""
        return ROWS["permute"](self)

    @property
    def real(self) -> Any:
        """Real parts."""
        return ROWS["real"](self)

    @property
    def imag(self) -> Any:
        """Imaginary parts."""
        return ROWS["imag"](self)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return (make(self)[index])._data

    def __setitem__(self, index: Any, value: Any) -> None:
        given = value if isinstance(value, BatchedArray) else self.level.from_host(np.asarray(value))
        changed = ROWS["setitem"](self, given, index=index)
        if changed.level is not self.level:
            raise ArgumentError(
                "vmap: a function within another writes its values into a tensor of the outer one, which has one value for all of them. Make a new "
                "tensor of both with an operation out of place."
            )
        self.value, self.batched = changed.value, changed.batched

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        """The elements with another dtype."""
        return ROWS["to_copy"](self, dtype=dtype, copy=copy)

    def reshape(self, *shape: Any) -> Any:
        """The elements in another shape."""
        return ROWS["reshape"](self, shape=tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)

    async def __aiograd_wait__(self) -> None:
        await self.value

    def __aiograd_is_ready__(self) -> bool:
        return True

    def __copy__(self) -> Self:
        return type(self)(self.level, self.value, self.batched)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.level.to_host(self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs and ufunc in UFUNCS:
            return self.__aiograd_op__(UFUNCS[ufunc], inputs, kwargs)
        with recording(False):
            return _bare(array_ufunc(ufunc, method, tuple(map(_tensor, inputs)), kwargs))

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        with recording(False):
            return _bare(array_function(function, map_tree(make, args, BatchedArray), map_tree(make, kwargs, BatchedArray)))

    def __aiograd_op__(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        level = self.level
        for x in leaves_of((args, kwargs) if kwargs else args, BatchedArray):
            if x.level.depth > level.depth:
                level = x.level
        return RUN[0](level, op, args, kwargs)


def _tensor(value: Any) -> Any:
    return make(value) if isinstance(value, BatchedArray) else value


def _bare(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)(map(_bare, result)) if not hasattr(result, "_fields") else type(result)(*map(_bare, result))
    return getattr(result, "_data", result)


#: runs a row on batched arrays; set by `aiograd.functional.batching.rules`, which is built on this module
RUN: list[Callable[[BatchLevel, Op, tuple[Any, ...], dict[str, Any]], Any]] = []
