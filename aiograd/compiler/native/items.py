"""A native function as data: its memory, and the items that read and write it, in order."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Ref
from aiograd.running.types import Shape


def dtype_of(ref: Ref) -> np.dtype[Any]:
    """The dtype of a Ref that is an array."""
    dtype: Any = ref.dtype
    return dtype  # type: ignore[no-any-return]


class RootKind(enum.Enum):
    """Where the memory of an array comes from."""

    #: an array among the arguments
    ARGUMENT = enum.auto()
    #: an array that the program was made with
    CONSTANT = enum.auto()
    #: an array that is returned
    RESULT = enum.auto()
    #: memory that the function has for itself
    SCRATCH = enum.auto()


@dataclass(eq=False)
class Root:
    """The memory of one array.

    Attributes:
        ref: the array that has all of it.
        kind: see `RootKind`.
        path: of an argument: the place of the parameter, and in it, or -1 for a parameter that is the array; of a constant: its place among them.
        is_pinned: some of it is written at a time, so its items keep their order.
    """

    ref: Ref
    kind: RootKind
    path: tuple[int, int] = (-1, -1)
    is_pinned: bool = False


@dataclass(frozen=True, eq=False)
class Location:
    """Where the elements of a Ref are: so many bytes behind the begin of a root, with the strides of the Ref."""

    root: Root
    offset: int


@dataclass(eq=False)
class Row:
    """One element-wise row.

    Attributes:
        function: a ufunc of `aiograd.compiler.native.elementwise`, `numpy.where`, or None for a conversion or copy.
        operands: Refs and numbers.
        dtype: that the operands are converted to.
        result: the array that it makes, or the part of one that it writes.
    """

    function: Any
    operands: tuple[Any, ...]
    dtype: np.dtype[Any]
    result: Ref

    def refs(self) -> Iterator[Ref]:
        """The arrays that it reads."""
        for each in self.operands:
            if each.__class__ is Ref:
                yield each


@dataclass(eq=False)
class FusedRows:
    """Rows over the same elements, done in one loop.

    Attributes:
        shape: of the loop, and of every result.
        rows: in order.
        errors: as `Call.errors`.
        made: by root, the Ref that a row has written last.
        read: by root of memory that is not only the function's own, the Refs that rows read.
    """

    shape: Shape
    rows: list[Row]
    errors: tuple[tuple[str, str], ...]
    made: dict[Root, Ref] = field(default_factory=dict)
    read: dict[Root, list[Ref]] = field(default_factory=dict)

    def reads(self) -> Iterator[Ref]:
        """The arrays that it reads."""
        for row in self.rows:
            yield from row.refs()

    def writes(self) -> Iterator[Ref]:
        """The arrays that it writes."""
        for row in self.rows:
            yield row.result


@dataclass(eq=False)
class LoopCall:
    """A call of one of numpy's own loops, or several of the same.

    Attributes:
        ufunc, types: which loop.
        operands: Refs, in the order of the loop's arguments; the result is the last one.
        outer: lengths of the loops around the call, and for each loop the bytes by which every operand moves on.
        dimensions, steps: as the loop takes them.
        label: for people.
        first: "zero" if the result is all zeros before the first call, else "".
        errors: as `Call.errors`.
    """

    ufunc: np.ufunc
    types: str
    operands: tuple[Ref, ...]
    outer: tuple[tuple[int, tuple[int, ...]], ...]
    dimensions: tuple[int, ...]
    steps: tuple[int, ...]
    label: str
    first: str = ""
    errors: tuple[tuple[str, str], ...] = ()

    def reads(self) -> Iterator[Ref]:
        """The arrays that it reads."""
        yield from self.operands[:-1]

    def extent(self, place: int) -> tuple[int, int]:
        """The bytes from its address up to which one call goes through an operand, below and above.

        Args:
            place: of the operand.
        """
        size = dtype_of(self.operands[place]).itemsize
        if self.ufunc is np.matmul:
            _, rows, inner, columns = self.dimensions
            lengths: tuple[int, ...] = ((rows, inner), (inner, columns), (rows, columns))[place]
            strides = self.steps[3 + 2 * place : 5 + 2 * place]
        else:
            lengths, strides = (self.dimensions[0],), (self.steps[place],)
        ends = [(length - 1) * stride for length, stride in zip(lengths, strides, strict=True)]
        return sum([min(end, 0) for end in ends]), sum([max(end, 0) for end in ends]) + size

    def writes(self) -> Iterator[Ref]:
        """The array that it writes."""
        yield self.operands[-1]


@dataclass(eq=False)
class PickedElements:
    """One element of each row of a matrix; a place out of range ends the native function, see `aiograd.compiler.native.expansions`.

    Attributes:
        source: the matrix.
        places: for each row the place of its element, 64-bit integers.
        result: the elements.
        errors: as `Call.errors`.
    """

    source: Ref
    places: Ref
    result: Ref
    errors: tuple[tuple[str, str], ...] = ()

    def reads(self) -> Iterator[Ref]:
        """The arrays that it reads."""
        yield from (self.source, self.places)

    def writes(self) -> Iterator[Ref]:
        """The array that it writes."""
        yield self.result


Item = FusedRows | LoopCall | PickedElements


@dataclass(eq=False)
class NativeCode:
    """A native function, as data.

    Attributes:
        code: the calls that it makes.
        locations: where each Ref is.
        constants: arrays that it reads.
        items: loops and calls of loops, in order.
        updates: arguments that are written at the end, each with the array of its new elements; see `aiograd.compiler.native.update_rules`.
    """

    code: ArrayCode
    locations: dict[Ref, Location]
    constants: list[Any]
    items: list[Item] = field(default_factory=list)
    updates: tuple[tuple[Ref, Ref], ...] = ()
