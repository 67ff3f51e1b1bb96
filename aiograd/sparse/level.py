"""Arrays that run a function's rows, follow the sets of its inputs, and note which rows ran.

Note [Two uses of one level]
    `jacobian_plan` runs the function with patterns, and keeps the list of rows. A product with a plan runs it without patterns, compares each row
    with that list, and leaves the derivative to the level or the graph around it: the arrays hold Tensors of the caller, as in `vmap`.

Note [Writing in place]
    A write makes new values for the array and, as in forward mode, for the base of a view; other views take theirs at their next use. So neither the
    caller's Tensors nor their graph are changed. A Tensor of others that is written gets an array of the level until that is closed.

Rejected: reading the pattern off the recorded graph of an ordinary pass. A node keeps what its rules name, which is not all that a pattern needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from aiograd.errors import ArgumentError, InPlaceError, TraceError
from aiograd.functional.function_tangents import LAYERS, Layer
from aiograd.ops.op import ROWS, Op
from aiograd.running.devices import unregister_device
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.trees import map_tree
from aiograd.running.types import Shape
from aiograd.sparse.pattern import Pattern, union
from aiograd.sparse.rules import RowRun, patterns_of, united_all
from aiograd.tensors.core import TensorCore, host_array, make
from aiograd.tensors.levels import Level, LevelArray, split_arguments
from aiograd.tensors.record import call

_SETITEM, _RESHAPE = ROWS["setitem"], ROWS["reshape"]
_WRITEABLE = np.empty(0).flags


class RowsLevel(Level):
    """One run of a function.

    Args:
        expected: the rows that have to run; None: any, and patterns are followed.
    """

    kind = "rows"

    def __init__(self, expected: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.expected = expected
        #: True if the caller's graph gets the operations
        self.records = expected is not None and current_mode().grad
        #: the rows that ran, each as far as a pattern depends on it
        self.rows: list[Any] = []
        #: True once the function has returned; a checkpoint may run parts of it again
        self.ended = False

    def from_host(self, array: np.ndarray[Any, Any]) -> RowsArray:
        """Values that depend on no input."""
        return RowsArray(self, make(np.array(array)), None)

    def adopt(self, tensor: Any) -> RowsArray:
        """A Tensor of the caller that depends on no input."""
        return RowsArray(self, tensor, None)

    def to_host(self, array: RowsArray) -> Any:
        """The values, of an array that depends on no input or has a single element: a function may branch on these."""
        if array.size != 1 and array.pattern is not None:
            raise ArgumentError(
                f"sparse_jacobian: the function reads the values of a tensor of shape {list(array.shape)} that depends on its input. That would drop "
                "a derivative. Compute with operations on tensors, read what was compared, bool((x > 0).any()), or read x.detach()."
            )
        return host_array(array.value)

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The row on Tensors of the caller, noted or compared."""
        given, statics = split_arguments(op, args, kwargs)
        arrays = [self.own(x) for x in given]
        if op.name == "to_device":
            return arrays[0]  # it stays in the level, for every device
        settings = tuple(sorted((name, _frozen(x)) for name, x in statics.items()))
        self.note(op.name, arrays, tuple(None if x is None else _frozen(x) for x in _indices(op, arrays)), settings)
        stops = not (self.ended or current_mode().tangents)
        with ModeScope(grad=self.records and not stops):
            result = call(op, tuple(map_tree(self._value, arrays, RowsArray)), map_tree(self._value, statics, RowsArray))
        results = result if isinstance(result, tuple) else (result,)
        patterns: Sequence[Pattern | None] = [None] * len(results)
        if self.expected is None and not self.ended and not stops:
            patterns = patterns_of(_row_run(op, arrays, statics, results))
        made = tuple(RowsArray(self, part, p if part.dtype.kind in "fc" else None) for part, p in zip(results, patterns, strict=True))
        if op.view:
            for array in made:
                array.base = arrays[0] if arrays[0].base is None else arrays[0].base
        return made if isinstance(result, tuple) else made[0]

    def holds(self, data: Any) -> bool:
        """True for an array of the level."""
        return isinstance(data, RowsArray) and data.level is self

    def own(self, x: Any) -> Any:
        """An array as one of the level; numbers as they are."""
        if self.holds(x):
            return x
        return self.adopt(make(x)) if isinstance(x, (np.ndarray, np.generic)) or hasattr(x, "__aiograd_device__") else x

    def note(self, name: str, arrays: Sequence[Any], indices: tuple[Any, ...], settings: tuple[Any, ...]) -> None:
        """Note that a row runs; raise where another was expected."""
        row = (name, tuple(map(np.shape, arrays)), indices, settings)
        if self.ended:
            return
        if self.expected is not None and self.expected[len(self.rows) : len(self.rows) + 1] != (row,):
            raise self._changed(_described(row))
        self.rows.append(row)

    def end(self) -> None:
        """The function has returned; raise where rows are missing."""
        self.ended = True
        if self.expected is not None and len(self.rows) < len(self.expected):
            raise self._changed("the end")

    def close(self) -> None:
        """Forget the level: its arrays are used no more."""
        unregister_device(self.name)
        self.give_back()

    def _value(self, x: RowsArray) -> Any:
        return x.value if self.holds(x) else x

    def _changed(self, found: str) -> TraceError:
        place, expected = len(self.rows), self.expected or ()
        wanted = _described(expected[place]) if place < len(expected) else "the end"
        return TraceError(
            f"sparse_jacobian: the function runs other rows than when its plan was made. Row {place} is {found}, expected {wanted}. Rows, shapes and "
            "integer indices of a plan are fixed: make another plan at this point with jacobian_plan()."
        )


class RowsLayer(Layer):
    """A custom function on arrays of a `RowsLevel`: each of its outputs may depend on all of its arguments; its derivative is its own."""

    __slots__ = ()

    def __init__(self, level: RowsLevel, args: Sequence[Any], records: bool) -> None:
        self.level, self.args, self.records, self.tangents, self.inputs = level, args, records, [None] * len(args), 0
        self.values = [arg._data.value if isinstance(arg, TensorCore) and level.holds(arg._data) else arg for arg in args]

    def outputs(self, function: Any, context: Any, made: Sequence[Any], nesting: Any) -> list[Any]:
        """The outputs as Tensors of the level; the custom function is noted as a row."""
        level: RowsLevel = self.level
        arrays = [arg._data for arg in self.args if isinstance(arg, TensorCore) and level.holds(arg._data)]
        level.note(function.__name__, arrays, (), ())
        fixed = {id(t) for t in context._non_differentiable}
        stops = not current_mode().tangents
        found = united_all([array.pattern for array in arrays])

        def output(out: Any) -> Any:
            if not isinstance(out, TensorCore):
                return out
            follows = not stops and id(out) not in fixed and out.dtype.kind in "fc"
            return make(RowsArray(level, out.detach() if stops else out, union([found], out.shape) if follows else None))

        return [output(out) for out in made]


LAYERS[RowsLevel] = RowsLayer


class RowsArray(LevelArray):
    """An array of a `RowsLevel`: a Tensor of the caller and its pattern, None where it depends on no input or none is followed."""

    __slots__ = ("value", "pattern", "base")
    is_fixed = False

    def __init__(self, level: RowsLevel, value: Any, pattern: Pattern | None) -> None:
        self.level = level
        self.value = value
        self.pattern = pattern
        #: the array that it is a view of
        self.base = None

    @property
    def shape(self) -> Shape:
        return self.value.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.value.dtype  # type: ignore[no-any-return]

    @property
    def flags(self) -> Any:
        """Flags of the value's memory."""
        return getattr(self.value._data, "flags", None) or _WRITEABLE

    @property
    def is_followed(self) -> bool:
        """True if a derivative may come from it; see `aiograd.tensors.followed`."""
        return self.dtype.kind in "fc"

    @property
    def plain(self) -> Any:
        """The values alone."""
        return host_array(self.value)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, LevelArray) and value.level.depth > self.level.depth:
            raise InPlaceError("sparse_jacobian: a value that an inner call of jvp() or vmap() made is written into an array. Write out of place.")
        given = self.level.own(value if hasattr(value, "__aiograd_device__") else np.asarray(value))
        self._become(_SETITEM, (self, given if current_mode().tangents else given.without_tangent()), {"index": index})

    def _become(self, op: Op, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
        with ModeScope(tangents=True):  # under no_grad the elements that are not written keep their derivative
            changed = self.level.run(op, args, settings)
        self.value, self.pattern = changed.value, changed.pattern

    def lifted(self, data: Any) -> Any:
        """Another array as one of the level."""
        return self.level.own(data)

    def take_part(self, part: RowsArray, index: Any, shape: Shape | None) -> None:
        """Take over a view that was written: its elements are those at `index`, or all of them, in another shape."""
        self._become(*((_SETITEM, (self, part), {"index": index}) if shape is None else (_RESHAPE, (part,), {"shape": shape})))

    async def __aiograd_wait__(self) -> None:
        await self.value

    def __copy__(self) -> Self:
        return type(self)(self.level, self.value, self.pattern)

    def without_tangent(self, tensor: Any = None) -> Self:
        """The same values, which depend on no input."""
        return type(self)(self.level, self.value.detach(), None)


def _row_run(op: Op, arrays: list[Any], statics: dict[str, Any], results: Sequence[Any]) -> RowRun:
    patterns = [x.pattern if isinstance(x, RowsArray) else None for x in arrays]
    settings = map_tree(_host, statics, (LevelArray, TensorCore))
    return RowRun(op, patterns, _indices(op, arrays), [*map(np.shape, arrays)], settings, [part.shape for part in results])


def _indices(op: Op, arrays: list[Any]) -> list[Any]:
    """Of each array argument the values where they are indices."""
    return [_host(x) if name == "indices" else None for name, x in zip(op.arrays or ("",) * len(arrays), arrays, strict=False)]


def _host(x: Any) -> Any:
    tensor = make(x) if isinstance(x, LevelArray) else x
    return host_array(tensor) if isinstance(tensor, TensorCore) else np.asarray(tensor)


def _frozen(x: Any) -> Any:
    """A setting as far as a pattern may depend on it, so that it can be compared."""
    if isinstance(x, (LevelArray, TensorCore, np.ndarray)):
        return (x.shape, _host(x).tobytes()) if x.dtype.kind in "biu" else x.shape
    if isinstance(x, (tuple, list)):
        return tuple(map(_frozen, x))
    if isinstance(x, slice):
        return ("slice", _frozen((x.start, x.stop, x.step)))
    return x if isinstance(x, (int, str, np.integer, type(None), type(Ellipsis))) else type(x).__name__


def _described(row: Any) -> str:
    return f"{row[0]} of shapes {', '.join(str(list(shape)) for shape in row[1])}"
