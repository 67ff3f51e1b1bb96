"""Dual arrays: a value and its tangent, and the level they live on. See Note [Levels] in `aiograd.tensors.levels`.

Note [Values of the caller]
    A dual array holds its value (`primal`) and `tangent` as the caller's own: arrays where nothing is recorded, so that a row costs its forward
    and its tangent; Tensors where the level ``records`` (``create_graph``), so that the caller's graph has both. The caller may itself be within a
    level: then these are arrays of that. ``tangent`` None stands for zeros.

Note [Tangents are never written]
    A tangent may be shared by several arrays (``x + 1`` has the tangent of x). A write in place gives the array, and its base if it is a view,
    new tangents, as a recorded write gives them new nodes; other views take theirs when they are used next
    (`aiograd.tensors.core.refresh`).
    A Tensor of the caller that is written has a dual array for the rest of the call, and afterwards its own again, with the values that were written.

Note [Pending tangents]
    On a level that is ``deferred``, and behind a custom function with a rule that has to be awaited, tangents are `Pending`: rows append their
    tangents' computation to the level's ``steps``, which run in this order when the function has returned, once or for many tangents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, NamedTuple, Self

import numpy as np

from aiograd.errors import GraphError, InPlaceError
from aiograd.ops.op import ROWS, Op
from aiograd.running.devices import register_device, register_device_kind, unregister_device
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.types import Shape
from aiograd.tensors.core import TensorCore, host_array, make, refresh
from aiograd.tensors.followed import has_tangent, without_tangent
from aiograd.tensors.levels import Level, LevelArray


class Pending:
    """The place of a tangent that is computed later: a number in the level's environment."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Step(NamedTuple):
    """The computation of tangents that are pending."""

    #: takes the tangents in order, None for zeros; returns a tangent or a tuple of them, or an awaitable of it
    push: Callable[[list[Any]], Any]
    #: numbers of the tangents that it takes, None for zeros
    takes: tuple[int | None, ...]
    #: numbers of its results, None for one of no use
    makes: tuple[int | None, ...]


class ForwardLevel(Level):
    """One call of `aiograd.jvp` or `aiograd.linearize`.

    Args:
        records: the caller's graph gets values and tangents.
        follows: dual arrays know from which inputs their tangents come.
        deferred: every tangent is pending.
    """

    kind = "jvp"

    def __init__(self, *, records: bool = False, follows: bool = False, deferred: bool = False) -> None:
        super().__init__()
        self.records = records
        self.follows = follows
        self.deferred = deferred
        self.steps: list[Step] = []
        self.pending = 0
        self.is_open = False
        #: True while the short way of rows may be taken
        self.is_lean = False
        #: the caller's profile, which gets the call as a scope
        self.profiler: Any = None
        self.began = 0

    def __enter__(self) -> Self:
        register_device(self)
        self.is_open = True
        self.is_lean = not (self.records or self.follows or self.deferred)
        self.profiler, self.began = current_mode().profiler, perf_counter_ns()
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_open = self.is_lean = False
        unregister_device(self.name)
        if self.profiler is not None:
            self.profiler.add("jvp", "scope", "jvp", self.began, perf_counter_ns())
        self.give_back()

    def input(self, primal: Any, tangent: Any, number: int) -> Any:
        """An input of the function as a Tensor of the level."""
        tensor = self.dual(primal, tangent, 1 << number)
        tensor._data.is_fixed = True
        return tensor

    def dual(self, primal: Any, tangent: Any = None, inputs: int = 0) -> Any:
        """A Tensor of the level.

        Args:
            primal: a Tensor of the caller.
            tangent: one of its shape and dtype; None: zeros; or `Pending`.
            inputs: a bit for every input of the function that the tangent comes from, where the level ``follows`` them.
        """
        return make(DualArray(self, self.own(primal), None if tangent is None else self.own(tangent), inputs))

    def own(self, tensor: Any) -> Any:
        """A Tensor of the caller as the level holds it."""
        return tensor if self.records or not isinstance(tensor, TensorCore) else tensor._data

    def later(self) -> Pending:
        """The place of a tangent that is computed later."""
        self.pending += 1
        return Pending(self.pending - 1)

    async def settle(self, given: dict[int, Any] | None = None) -> dict[int, Any]:
        """Run the steps; returns the pending tangents by number, None for zeros.

        Args:
            given: tangents that no step makes.
        """
        known: dict[int, Any] = dict(given or {})
        for step in self.steps:
            made = step.push([None if number is None else known[number] for number in step.takes])
            if inspect.isawaitable(made):
                made = await made
            for number, tangent in zip(step.makes, made, strict=True):
                if number is not None:
                    known[number] = tangent
        return known

    def parts(self, tensor: Any) -> tuple[Any, Any, int]:
        """Of a Tensor: the value as a Tensor of the caller; its tangent as the level holds it, None for zeros; the inputs that it comes from."""
        refresh(tensor)
        data = tensor._data
        if data.__class__ is not DualArray or data.level is not self:
            return tensor, None, 0
        return make(data.primal) if not isinstance(data.primal, TensorCore) else data.primal, data.tangent, data.inputs

    def adopt(self, tensor: Any) -> DualArray:
        """A Tensor of the caller, which does not depend on the inputs."""
        return DualArray(self, self.own(tensor), None)

    def takes_graph(self, tensor: TensorCore) -> bool:
        """True: passes within the function go to the caller's leaves."""
        return True

    def from_host(self, array: np.ndarray[Any, Any]) -> DualArray:
        """A constant."""
        return DualArray(self, np.array(array), None)

    def to_host(self, array: DualArray) -> np.ndarray[Any, Any]:
        """The values."""
        self.check()
        return host_array(array.primal if isinstance(array.primal, TensorCore) else make(array.primal))

    def check(self) -> None:
        """Raise where the call has ended."""
        if not self.is_open:
            raise ended(self.depth)

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The row on values, and the tangents of its outputs."""
        return RUN[0](self, op, args, kwargs)


def ended(number: int) -> GraphError:
    """The error for an array that is used after the call it belongs to."""
    return GraphError(
        f"a tensor with a tangent is used after the call of jvp() or linearize() that made it has ended (level jvp:{number}). Tangents live for "
        "one call: return the tensor from the function, or keep its detach().numpy() taken inside."
    )


def lost(what: str) -> GraphError:
    """The error where values are taken and their tangent would be lost."""
    return GraphError(f"{what} would drop the tangent. Use an operation on tensors, or detach() where a constant is meant.")


def _no_level(number: int) -> Any:
    raise ended(number)


register_device_kind("jvp", _no_level)


class DualArray(LevelArray):
    """A value and its tangent.

    Args:
        level: the call it belongs to.
        primal: the value.
        tangent: its tangent, of the same shape and dtype; None: zeros; or `Pending`.
        inputs: see `ForwardLevel.dual`.
    """

    __slots__ = ("primal", "tangent", "inputs", "is_fixed")
    holds = "primal"

    def __init__(self, level: ForwardLevel, primal: Any, tangent: Any, inputs: int = 0) -> None:
        self.level = level
        self.primal = primal
        self.tangent = tangent
        self.inputs = inputs
        #: True of an input of the function, which may not be modified in place
        self.is_fixed = False

    @property
    def shape(self) -> Shape:
        return self.primal.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.primal.dtype  # type: ignore[no-any-return]

    @property
    def base(self) -> Any:
        """The array with the memory of the value; the value itself where it has its own."""
        data = self.primal._data if isinstance(self.primal, TensorCore) else self.primal
        found = getattr(data, "base", None)
        return data if found is None else found

    @property
    def flags(self) -> Any:
        """Flags of the value's memory."""
        data = self.primal._data if isinstance(self.primal, TensorCore) else self.primal
        return getattr(data, "flags", None)

    @property
    def is_plain(self) -> bool:
        """True for values of the host, with tangents of the host or pending ones, of which nothing else is noted or recorded."""
        if type(self.primal) is not np.ndarray or not isinstance(self.tangent, (np.ndarray, np.generic, type(None), Pending)):
            return False
        return not (self.level.records or self.level.follows)

    @property
    def layout(self) -> Any:
        """The strides of value and tangent where both are plain."""
        if not self.is_plain:
            return self.level.kind
        tangent: Any = self.tangent
        return self.level.kind, self.primal.strides, "pending" if tangent.__class__ is Pending else None if tangent is None else tangent.strides

    def __setitem__(self, index: Any, value: Any) -> None:
        level = self.level
        level.check()
        if isinstance(value, LevelArray) and value.level.depth > level.depth:
            raise InPlaceError("a value that an inner call of jvp() or vmap() made is written into an array of the outer one. Write out of place.")
        given = value if isinstance(value, DualArray) and value.level is level else DualArray(level, value, None)
        if (self.tangent is not None or given.tangent is not None) and current_mode().tangents:  # else as a write that no graph records
            changed = level.run(ROWS["setitem"], (self, given), {"index": index})
            self.tangent, self.inputs = changed.tangent, changed.inputs
        if level.steps:
            KEEP[0](level, self.primal)
        with ModeScope(grad=level.records):
            self.primal[index] = given.primal

    @property
    def is_followed(self) -> bool:
        """True if it has a tangent, in this call or one around it."""
        return self.tangent is not None or has_tangent(self.primal if isinstance(self.primal, TensorCore) else make(self.primal))

    @property
    def plain(self) -> Any:
        """The value, without levels that follow it."""
        data = self.primal._data if isinstance(self.primal, TensorCore) else self.primal
        return data.plain if isinstance(data, DualArray) else data

    def lifted(self, data: Any) -> DualArray:
        """Another array as one of the level."""
        return data if isinstance(data, DualArray) and data.level is self.level else DualArray(self.level, self.level.own(make(data)), None)

    def take_part(self, part: DualArray, index: Any, shape: Shape | None) -> None:
        """Take over the tangent of a view that was written: its elements are those at `index`, or all of them, in another shape."""
        level = self.level
        if isinstance(self.primal, LevelArray):
            self.primal.take_part(part.primal, index, shape)  # type: ignore[attr-defined]
        if not current_mode().tangents:
            return  # the part kept its tangent
        if shape is not None:
            changed = level.run(ROWS["reshape"], (part,), {"shape": shape})
        else:
            changed = level.run(ROWS["setitem"], (self, part), {"index": index})
        self.tangent, self.inputs = changed.tangent, changed.inputs

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if self.is_followed:
            raise lost("converting a tensor with a tangent to a numpy array")
        return np.array(self.level.to_host(self), dtype=dtype, copy=copy)

    async def __aiograd_wait__(self) -> None:
        for value in (self.primal, self.tangent):
            wait = getattr(value, "__aiograd_wait__", None)
            if wait is not None:
                await wait()

    def __copy__(self) -> Self:
        return type(self)(self.level, self.primal, self.tangent, self.inputs)

    def without_tangent(self, tensor: Any = None) -> Self:
        """The same value, a constant of this call and of all calls around it."""
        primal = self.primal
        return type(self)(self.level, primal.detach() if isinstance(primal, TensorCore) else without_tangent(primal, tensor), None)


#: runs a row on dual arrays; set by `aiograd.forward.rows`, which is built on this module
RUN: list[Callable[[ForwardLevel, Op, tuple[Any, ...], dict[str, Any]], Any]] = []
#: likewise: gives steps that are kept copies of what they have saved of arrays that may be written
KEEP: list[Callable[..., None]] = []
