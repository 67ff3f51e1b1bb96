"""Levels: transforms that run a function once on arrays of their own, such as `vmap` and `jvp`.

Note [Levels]
    A level is a device. The function gets Tensors with a `LevelArray` as data, which holds what the level follows (a batch, or a value and its
    tangent) as values of the caller. Since rules of rows are written for any array that implements numpy's protocols, recording, passes and gradients
    of gradients inside the function work on them as they are; every operation on them is a row that the level runs on the values it holds. So levels
    nest: where arrays of several meet, the level of the innermost call answers, and holds those of the others as values.
"""

from __future__ import annotations

import itertools
import weakref
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from aiograd.ops.op import ROWS, UFUNCS, Op
from aiograd.running.devices import device_name_of
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.trees import leaves_of, map_tree
from aiograd.running.types import Shape
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.dispatch import array_function, array_ufunc

_numbers = itertools.count()
_TREES = (tuple, list, dict, slice)
_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def recording(records: bool) -> AbstractContextManager[Any]:
    """A block in which a graph is recorded, or none; entering it costs little where it changes nothing."""
    return _AS_IT_IS if current_mode().grad is records else ModeScope(grad=records)


class Level:
    """One call of a transformed function: the device its arrays live on."""

    launches_ahead = True
    #: names the kind of device
    kind: ClassVar[str]

    def __init__(self) -> None:
        #: of two calls of which one is made within the other, the inner one has the higher number
        self.depth = next(_numbers)
        self.name = f"{self.kind}:{self.depth}"
        #: Tensors of others that are written within the call, each with its own array
        self.borrowed: list[tuple[weakref.ref[TensorCore], Any]] = []

    def give_back(self) -> None:
        """Give Tensors of others that were written their own arrays."""
        for reference, data in reversed(self.borrowed):
            tensor = reference()
            if tensor is not None and getattr(tensor._data, "level", None) is self:
                tensor._data = data

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run at once."""
        future: Future[Any] = Future()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        return future

    def fused(self, row: str) -> None:
        """None: rows run by the level."""
        return None

    def takes_graph(self, tensor: TensorCore) -> bool:
        """True if a Tensor of the caller keeps its place in the graph beside the array that stands for it."""
        return False

    @abstractmethod
    def adopt(self, tensor: Any) -> LevelArray:
        """An array of the level that stands for a Tensor of the caller."""

    @abstractmethod
    def from_host(self, array: np.ndarray[Any, Any]) -> LevelArray:
        """An array of the level with the same values."""

    @abstractmethod
    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """The values of an array of the level."""

    @abstractmethod
    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A row on arrays of which some are of the level; arrays of the level again."""


class LevelArray(NDArrayOperatorsMixin):
    """An array of a level: the interface of a device's arrays (see `aiograd.running.devices`) in terms of rows."""

    __slots__ = ("level",)
    __aiograd_priority__ = 500
    __array_priority__ = 500
    base: Any = None
    #: the number of arrays that an operation on this one computes
    examples: int = 1

    level: Any

    #: the attribute with the value, a Tensor or an array of the caller
    holds: ClassVar[str] = "value"

    @property
    def __aiograd_device__(self) -> str:
        return self.level.name  # type: ignore[no-any-return]

    @property
    def device_beneath(self) -> str:
        """Name of the device that the values live on, beneath all levels."""
        held = getattr(self, self.holds)
        data = held._data if isinstance(held, TensorCore) else held
        return data.device_beneath if isinstance(data, LevelArray) else device_name_of(data)

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Extent of each axis."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""

    @property
    def layout(self) -> Any:
        """A value for the signature of a compiled function: equal for arrays of several calls that one program serves."""
        return self.level.kind

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

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
        with recording(False):
            return (make(self)[index])._data

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        """The elements with another dtype."""
        return ROWS["to_copy"](self, dtype=dtype, copy=copy)

    def reshape(self, *shape: Any) -> Any:
        """The elements in another shape."""
        return ROWS["reshape"](self, shape=tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)

    def __aiograd_is_ready__(self) -> bool:
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.level.to_host(self), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, TensorCore) for x in inputs):
            return NotImplemented
        if method == "__call__" and not kwargs and ufunc in UFUNCS:
            return self.__aiograd_op__(UFUNCS[ufunc], inputs, {})
        out = kwargs.pop("out", None)
        with recording(False):
            result = _bare(array_ufunc(ufunc, method, tuple(map(_tensor, inputs)), kwargs))
        if out is None:
            return result
        out[0][...] = result
        return out[0]

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        if any(issubclass(kind, TensorCore) for kind in types):
            return NotImplemented
        with recording(False):
            return _bare(array_function(function, map_tree(make, args, LevelArray), map_tree(make, kwargs, LevelArray)))

    def __aiograd_op__(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        level = self.level
        for value in (*args, *kwargs.values()):
            if isinstance(value, LevelArray):
                if value.level is not level and value.level.depth > level.depth:
                    level = value.level
            elif value.__class__ in _TREES:
                level = max((level, *[array.level for array in leaves_of(value, LevelArray)]), key=lambda each: each.depth)
        return level.run(op, args, kwargs)


def split_arguments(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The array arguments of a call of a row, and its static ones by name (without defaults)."""
    if op.variadic:
        return list(args), kwargs
    count = len(op.arrays)
    if len(args) > count:
        kwargs = {**dict(zip(op.statics, args[count:], strict=False)), **kwargs}
    return list(args[:count]), kwargs


def _tensor(value: Any) -> Any:
    return make(value) if isinstance(value, LevelArray) else value


def _bare(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)(map(_bare, result)) if not hasattr(result, "_fields") else type(result)(*map(_bare, result))
    return getattr(result, "_data", result)


