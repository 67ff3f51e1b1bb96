"""Arrays that run a function's rows, follow the sets of its inputs, and note which rows ran.

Note [Two uses of one level]
    `jacobian_plan` runs the function with patterns, and keeps the list of rows. A product with a plan runs it without patterns, compares each row
    with that list, and leaves the derivative to the level or the graph around it: the arrays hold Tensors of the caller, as those of `vmap` do.

Rejected: reading the pattern off the recorded graph of an ordinary pass. A node keeps what its rules name, which is not all that a pattern needs, and
a function whose rows are checked as they run fails before its derivative is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from aiograd.errors import ArgumentError, InPlaceError, TraceError
from aiograd.ops.op import ROWS, Op
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.trees import map_tree
from aiograd.running.types import Shape
from aiograd.sparse.pattern import Pattern
from aiograd.sparse.rules import Run, patterns_of
from aiograd.tensors.core import TensorCore, host_array, make
from aiograd.tensors.levels import Level, LevelArray, split_arguments
from aiograd.tensors.record import call


class RowsLevel(Level):
    """One run of a function.

    Args:
        inputs: elements of the function's input.
        expected: the rows that have to run; None: any, and patterns are followed.
    """

    kind = "rows"

    def __init__(self, inputs: int, expected: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.inputs = inputs
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
        """The values, of an array that depends on no input or has a single element: what a function may branch on."""
        if array.size != 1 and array.pattern is not None and array.pattern.sets.any():
            raise ArgumentError(
                f"sparse_jacobian: the function reads the values of a tensor of shape {list(array.shape)} that depends on its input, which would drop "
                "a derivative. Compute with operations on tensors, or read what was compared: bool((x > 0).any())."
            )
        return host_array(array.value)

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The row on Tensors of the caller, noted or compared."""
        given, statics = split_arguments(op, args, kwargs)
        arrays = [self._of_level(x) for x in given]
        self.note(op, arrays, statics)
        with ModeScope(grad=self.records and current_mode().tangents):
            result = call(op, tuple(map_tree(self._mine, arrays, RowsArray)), map_tree(self._mine, statics, RowsArray))
        results = result if isinstance(result, tuple) else (result,)
        patterns = self._patterns(op, arrays, statics, results)
        made = tuple(RowsArray(self, part, pattern) for part, pattern in zip(results, patterns, strict=True))
        return made if isinstance(result, tuple) else made[0]

    @property
    def follows(self) -> bool:
        """True while patterns are followed."""
        return self.expected is None and not self.ended

    def holds(self, data: Any) -> bool:
        """True for an array of the level."""
        return isinstance(data, RowsArray) and data.level is self

    def end(self) -> None:
        """The function has returned; raise where rows are missing."""
        self.ended = True
        if self.expected is not None and len(self.rows) < len(self.expected):
            raise self._changed(len(self.rows), "the end")

    def _of_level(self, x: Any) -> Any:
        """An array argument as an array of the level; numbers as they are."""
        if self.holds(x):
            return x
        return self.adopt(make(x)) if isinstance(x, (np.ndarray, np.generic)) or hasattr(x, "__aiograd_device__") else x

    def _mine(self, x: RowsArray) -> Any:
        return x.value if self.holds(x) else x

    def _patterns(self, op: Op, arrays: list[Any], statics: dict[str, Any], results: Sequence[Any]) -> Sequence[Pattern | None]:
        if not self.follows or not current_mode().tangents:
            return [None] * len(results)
        if op.view:
            arrays[0].own_pattern()
        patterns = patterns_of(_run_of(op, arrays, statics, results))
        return [_beside(part, pattern, op.view) for part, pattern in zip(results, patterns, strict=True)]

    def note(self, op: Op, arrays: list[Any], statics: dict[str, Any]) -> None:
        """Note a row that runs, or compare it with the one expected."""
        if self.ended:
            return
        shapes = tuple(np.shape(x) for x in arrays)
        row = (op.name, shapes, tuple(map(_indices, _named(op, arrays))), tuple(sorted((name, _frozen(x)) for name, x in statics.items())))
        place = len(self.rows)
        if self.expected is not None and (place >= len(self.expected) or self.expected[place] != row):
            raise self._changed(place, _described(row))
        self.rows.append(row)

    def _changed(self, place: int, found: str) -> TraceError:
        known = self.expected or ()
        planned = _described(known[place]) if place < len(known) else "the end"
        return TraceError(
            f"sparse_jacobian: the function runs other rows than those that its plan was made from. Row {place} is {found}, expected {planned}. "
            "Rows, shapes and integer indices of a plan are fixed: make a new one at this point with jacobian_plan()."
        )


class RowsArray(LevelArray):
    """An array of a `RowsLevel`.

    Args:
        level: the run it belongs to.
        value: a Tensor of the caller.
        pattern: None where it depends on no input, or none is followed.
    """

    __slots__ = ("value", "pattern")

    def __init__(self, level: RowsLevel, value: Any, pattern: Pattern | None) -> None:
        self.level = level
        self.value = value
        self.pattern: Any = pattern

    @property
    def shape(self) -> Shape:
        return self.value.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.value.dtype  # type: ignore[no-any-return]

    @property
    def base(self) -> Any:  # type: ignore[override]
        """What the value shares memory with; the value itself where it has its own."""
        data = self.value._data
        return data if getattr(data, "base", None) is None else data.base

    @property
    def flags(self) -> Any:
        """Flags of the value's memory."""
        return getattr(self.value._data, "flags", None)

    def __setitem__(self, index: Any, value: Any) -> None:
        level: RowsLevel = self.level
        if isinstance(value, LevelArray) and value.level.depth > level.depth:
            raise InPlaceError("sparse_jacobian: a value that an inner call of jvp() or vmap() made is written into an array. Write out of place.")
        index = map_tree(_host, index, (LevelArray, TensorCore))
        given = value if level.holds(value) else level.adopt(make(value) if hasattr(value, "__aiograd_device__") else make(np.asarray(value)))
        level.note(ROWS["setitem"], [self, given], {"index": index})
        with ModeScope(grad=level.records and current_mode().tangents):
            self.value[index] = given.value
        if level.follows and current_mode().tangents and self.own_pattern():
            self.pattern.write(index, given.pattern)

    def own_pattern(self) -> bool:
        """Make sure that there is a pattern, which views have in common; False where elements are no floating numbers and have none."""
        if self.pattern is None and self.dtype.kind in "fc":
            self.pattern = Pattern.of_constants(self.shape, self.level.inputs)
        return self.pattern is not None

    async def __aiograd_wait__(self) -> None:
        await self.value

    def __copy__(self) -> Self:
        return type(self)(self.level, self.value, self.pattern)

    def without_tangent(self) -> Self:
        """The same values, which depend on no input."""
        return type(self)(self.level, self.value.detach(), None)


def _beside(result: Any, pattern: Pattern | None, is_view: bool) -> Pattern | None:
    """The pattern of a result, with numbers that share memory as the result does; see Note [Writing in place] in `aiograd.sparse.pattern`."""
    if pattern is None or result.dtype.kind not in "fc":
        return None
    data = result._data
    if is_view and getattr(data, "base", None) is not None:
        return pattern
    sets = np.empty_like(data if isinstance(data, np.ndarray) else pattern.sets, np.int64)
    sets[...] = pattern.sets
    return pattern.moved(sets)


def _run_of(op: Op, arrays: list[Any], statics: dict[str, Any], results: Sequence[Any]) -> Run:
    return Run(
        op,
        [x.pattern if isinstance(x, RowsArray) else None for x in arrays],
        _named(op, arrays),
        [np.shape(x) for x in arrays],
        map_tree(_host, statics, (LevelArray, TensorCore)),
        [part.shape for part in results],
    )


def _named(op: Op, arrays: list[Any]) -> list[Any]:
    """Of each array argument the values where they are indices."""
    names = op.arrays or (op.variadic,) * len(arrays)
    return [_host(x) if name == "indices" else None for name, x in zip(names, arrays, strict=False)]


def _host(x: Any) -> Any:
    if isinstance(x, LevelArray):
        x = make(x)
    return host_array(x) if isinstance(x, TensorCore) else np.asarray(x)


def _indices(x: Any) -> Any:
    return None if x is None else _frozen(x)


def _frozen(x: Any) -> Any:
    """A setting as far as a pattern may depend on it, so that it can be compared."""
    if isinstance(x, (LevelArray, TensorCore, np.ndarray)):
        shape: Shape = x.shape
        return (shape, _host(x).tobytes()) if x.dtype.kind in "biu" else shape
    if isinstance(x, (tuple, list)):
        return tuple(map(_frozen, x))
    if isinstance(x, slice):
        return ("slice", _frozen((x.start, x.stop, x.step)))
    return x if isinstance(x, (int, str, np.integer, type(None), type(Ellipsis))) else type(x).__name__


def _described(row: Any) -> str:
    return f"{row[0]} of shapes {', '.join(str(list(shape)) for shape in row[1])}"
