"""Program: the rows of one recorded call in static single assignment form, as data.

Note [Values]
    A value is an array of known shape and dtype, made once. Where it comes from is in its kind:

    =========  =========================================================================================
    INPUT      a Tensor or array among the arguments
    CAPTURED   a Tensor from elsewhere, found by identity and read at every run
    COMPUTED   an output of a statement
    =========  =========================================================================================

    Numbers and arrays that were made while recording are captured too: no other code can change them.

Note [Programs on a device]
    A program with values on a device makes the calls of the operations, one for each statement and rule, and leaves the rest to the device: it puts
    element-wise calls together, queues its work and manages its memory. So the passes over numpy calls and the arenas are for programs of the host.
    Arrays of the host take part as numbers, without axes, or are moved to the device. A call uses the device and the stream of its node; the engine
    runs the node's rules in the same place as the rules of rows.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiograd.compiler.source import SourceFile
from aiograd.errors import TraceError
from aiograd.ops.op import ROWS, Fused, Op
from aiograd.running.devices import device_name_of
from aiograd.running.trees import leaves_of
from aiograd.running.types import Shape
from aiograd.tensors.constants import is_number
from aiograd.tensors.levels import LevelArray

#: gives the part of the package that draws, which lies above this one; appended by the top of the package
DRAWING: list[Callable[[], Any]] = []


class ValueKind(enum.Enum):
    """See Note [Values]."""

    INPUT = "i"
    CAPTURED = "c"
    COMPUTED = "v"


class Value:
    """An array of the program.

    Attributes:
        kind, index: its origin, see Note [Values]; the index counts within its kind.
        shape, dtype, strides: the array's, the same in every run; arrays of a device are taken to have no strides.
        records: True if it had a place in the graph while recording.
        device: name of its device.
        name: as the program's source calls it: ``i0``, ``c0``, ``v0``.
    """

    __slots__ = ("kind", "index", "shape", "dtype", "records", "strides", "device", "name")

    def __init__(self, kind: ValueKind, index: int, shape: Shape, dtype: np.dtype[Any], records: bool, strides: Shape, device: str = "cpu") -> None:
        self.kind = kind
        self.index = index
        self.shape = shape
        self.dtype = dtype
        self.records = records
        self.strides = strides
        self.device = device
        self.name = f"{kind._value_}{index}"

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def layout(self) -> Any:
        """Where its elements are; see `layout_of`."""
        return self.strides if self.device == "cpu" else self.device


@dataclass(slots=True, eq=False)
class Statement:
    """One row of the program.

    Attributes:
        op: the row.
        arrays: its array arguments, None where one is absent.
        statics: its static arguments; Values among them, also in tuples, lists and slices, stand for their arrays.
        fused: the kernels that the forward runs with; None: the row's own forward.
        outputs: the values that it makes.
        node: class of the node that was recorded for it; None: nothing of it is differentiated.
        place: file and line of the user's code, ``model.py:12``.
        line: the text of that line.
        residuals: bytes of the residuals of `fused`.
    """

    op: Op
    arrays: tuple[Value | None, ...]
    statics: dict[str, Any]
    fused: Fused | None
    outputs: tuple[Value, ...]
    node: type[Any] | None
    place: str
    line: str
    residuals: tuple[int, ...] = ()

    @property
    def cost(self) -> float:
        """Estimated nanoseconds of its backward."""
        shapes = tuple([() if value is None else value.shape for value in self.arrays])
        return _cost(self.op.cost, tuple([value.shape for value in self.outputs]), shapes)

    @property
    def is_on_device(self) -> bool:
        """True if it makes values on a device."""
        return any([value.device != "cpu" for value in self.outputs])

    @property
    def forward(self) -> Callable[..., Any]:
        """The function of arrays that computes it; its result has the residuals behind the outputs where there are `fused` kernels."""
        if self.fused is not None:
            return self.fused.forward
        return self.op if self.is_on_device and self.is_row else self.op.forward

    @property
    def is_row(self) -> bool:
        """True for a row of the op tables, which can run again; False for a random draw and for an effect, which has no outputs."""
        return ROWS.get(self.op.name) is self.op


@dataclass(eq=False)
class Program:
    """The statements that one signature of a compiled function runs.

    Attributes:
        signature: the signature of the arguments, for people.
        inputs, captured: values that come from elsewhere; `tensors` has the captured Tensors themselves.
        statements: the statements, in the order of recording.
        outputs: values that the function returns, in the order of its result's leaves, and the views between such a view and the argument that it
        shows.
        views: outputs that are views of other Tensors: the place of each, the place of its base among outputs, inputs and captured Tensors, and how
            the view is made.
        returns: for each leaf of the result its place among outputs, inputs and captured Tensors, and True if it is detached; None: the outputs.
        shared: by name of a value, the names of all that share its version counter; it alone where there is no entry.
        owners: by name of a value, the number of the array that owned its memory while recording, and the bytes of that.
        file: the text that `source` gives.
        arena_bytes: of the memory that one run computes in and gives back, see `aiograd.compiler.arena`.
        parts: the programs of the rows between its calls, where it makes calls.
        report: of its native functions, a `aiograd.compiler.native.tiers.NativeReport`; None: there are none.
        updates: by the id of a statement that is an optimizer's step, its `aiograd.compiler.updates.NativeUpdate` objects.
    """

    signature: str
    inputs: tuple[Value, ...]
    captured: tuple[Value, ...]
    tensors: tuple[Any, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[Value, ...]
    views: tuple[tuple[int, int, Any], ...] = ()
    returns: tuple[tuple[int, bool], ...] | None = None
    shared: dict[str, frozenset[str]] = field(default_factory=dict)
    owners: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    file: SourceFile = field(default_factory=SourceFile, repr=False)
    arena_bytes: int = field(default=0, compare=False)
    parts: tuple[Program, ...] = field(default=(), repr=False)
    report: Any = field(default=None, repr=False)
    updates: dict[int, list[Any]] = field(default_factory=dict, repr=False)
    #: inputs that passes among its rows differentiate by: they have no hooks
    differentiated: tuple[int, ...] = field(default=(), repr=False)
    #: see `aiograd.compiler.forward_code.saved_names`
    saved: list[str] | None = field(default=None, repr=False)
    #: with a memory budget, a `aiograd.compiler.memory_plan.Recomputation`
    recomputation: Any = field(default=None, repr=False)
    #: name of the device of the values, see Note [Programs on a device]
    device: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self.device = next((value.device for value in self.values() if value.device != "cpu"), "cpu")

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """By name of a captured value, the array of a Python number."""
        return {value.name: tensor._data for value, tensor in zip(self.captured, self.tensors, strict=True) if is_number(tensor)}

    @property
    def source(self) -> str:
        """The text of the forward, and of each backward that a pass has asked for, with a comment per statement that names the user's line."""
        return self.file.text

    @property
    def native(self) -> Any:
        """Its native functions, a `aiograd.compiler.native.tiers.NativeReport`; None: there are none."""
        reports = [part.report for part in (self, *self.parts) if part.report is not None]
        reports += [update.report for updates in self.updates.values() for update in updates if update.is_native]
        return reports[0].joined(reports[1:]) if reports else None

    @property
    def tier(self) -> str:
        """Either "numpy", or "native" once it runs native functions."""
        return "numpy" if self.native is None else "native"

    def dot(self, *, max_nodes: int = 10_000) -> str:
        """The program as DOT text; see `aiograd.viz.program_dot`."""
        return str(DRAWING[0]().program_dot(self, max_nodes=max_nodes))

    def svg(self, *, max_nodes: int = 1000) -> str:
        """The program as an SVG picture; see `aiograd.viz.program_svg`."""
        return str(DRAWING[0]().program_svg(self, max_nodes=max_nodes))

    @property
    def memory_plan(self) -> Any:
        """The values kept for the backward and those computed again, a `aiograd.compiler.memory_plan.MemoryPlan`; None without a memory budget."""
        plans = [part.recomputation.memory_plan for part in (self, *self.parts) if part.recomputation is not None]
        return plans[0].joined(plans[1:]) if plans else None

    def memory_svg(self) -> str:
        """Live bytes over the backward with and without the memory budget, as an SVG picture; see `aiograd.viz.memory_svg`."""
        return str(DRAWING[0]().memory_svg(self))

    def values(self) -> Iterator[Value]:
        """All values."""
        yield from (*self.inputs, *self.captured, *self.computed())

    def computed(self) -> Iterator[Value]:
        """Every value that a statement makes."""
        for statement in self.statements:
            yield from statement.outputs

    def marks(self) -> dict[str, str]:
        """By name of a value, how the statement that makes it runs; see `aiograd.compiler.native.marks`. Empty where nothing is native."""
        if self.tier == "numpy":
            return {}
        found = {value.name: "Python" for value in self.computed()}
        for part in (self, *self.parts):
            if part.report is not None:
                found.update(dict.fromkeys([value.name for value in part.computed()], ""))
                found.update(part.report.marks([value.name for value in part.values()]))
        return found

    def __str__(self) -> str:
        marks = self.marks()
        head = f"{'runs as':<10}" if marks else ""
        lines = [
            f"program for {self.signature}: {len(self.statements)} statements",
            f"{'value':<8}{'row':<20}{head}{'shape':<18}{'dtype':<10}{'live bytes':>12}{'ns':>12}  line",
        ]
        live, last = 0, self.last_uses()
        for number, statement in enumerate(self.statements):
            live += sum(value.nbytes for value in statement.outputs)
            value = statement.outputs[0] if statement.outputs else None
            made = f"{'':<8}" if value is None else f"{value.name:<8}"
            kind = f"{'':<28}" if value is None else f"{list(value.shape)!s:<18}{value.dtype!s:<10}"
            updates = self.updates.get(id(statement), ())
            called = "fused" if updates and all([update.is_native for update in updates]) else "Python"
            mark = f"{marks.get(value.name, '') if value else called:<10}" if marks else ""
            lines.append(f"{made}{statement.op.name:<20}{mark}{kind}{live:>12,}{statement.cost:>12,.0f}  {statement.place}: {statement.line}")
            live -= sum(value.nbytes for value in last.get(number, ()))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Program for {self.signature}: {len(self.statements)} statements>"

    def last_uses(self) -> dict[int, list[Value]]:
        """By number of a statement: computed values that the forward needs no more after it."""
        at: dict[Value, int] = {}
        for number, statement in enumerate(self.statements):
            for value in statement.outputs:
                at[value] = number
            for value in values_in((statement.arrays, statement.statics)):
                if value in at:
                    at[value] = number
        for value in self.outputs:
            at.pop(value, None)
        found: dict[int, list[Value]] = {}
        for value, number in at.items():
            found.setdefault(number, []).append(value)
        return found


@functools.lru_cache(maxsize=4096)
def _cost(cost: Any, outputs: tuple[Shape, ...], shapes: tuple[Shape, ...]) -> float:
    main = max(outputs, key=math.prod, default=())
    return float(cost(main, shapes)) if callable(cost) else cost * max(map(math.prod, (main, *shapes)))


def layout_of(array: Any) -> Any:
    """The layout for a signature: strides on the host, the kind of level for an array of a transform, else the name of the device."""
    if array.__class__ is np.ndarray:
        return array.strides
    return array.layout if isinstance(array, LevelArray) else device_name_of(array)


def strided(shape: Shape, dtype: np.dtype[Any], strides: Shape) -> np.ndarray[Any, Any]:
    """An array of ones in memory of its own with these strides."""
    extents = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)] if math.prod(shape) else [0]
    first, last = (sum(min(extent, 0) for extent in extents), sum(max(extent, 0) for extent in extents))
    memory = np.ones((last - first) // dtype.itemsize + 2, dtype)
    return np.ndarray(shape, dtype, memory, -first, strides)


def laid_out(array: np.ndarray[Any, Any], value: Value) -> np.ndarray[Any, Any]:
    """An array itself if it has the strides of a value, else a copy that has them.

    Raises:
        TraceError: its shape or dtype is another, or elements differ that are one in memory with these strides.
    """
    if (array.shape, array.dtype) != (value.shape, value.dtype):
        expected = f"{value.dtype}{list(value.shape)}"
        raise TraceError(f"a compiled function was given an array of {array.dtype}{list(array.shape)}; while it was recorded that was {expected}")
    if array.strides == value.strides:
        return array
    copy = strided(value.shape, value.dtype, value.strides)
    copy[...] = array
    if 0 in value.strides and not ((copy == array) | (copy != copy)).all():
        raise TraceError(f"an array of shape {list(array.shape)} repeated its elements while the compiled function was recorded, and does not now")
    return copy


def values_in(tree: Any) -> list[Value]:
    """The Values in nested tuples, lists, dicts and slices."""
    return leaves_of(tree, Value)
