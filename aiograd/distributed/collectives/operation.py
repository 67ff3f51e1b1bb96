"""Operation: a collective operation as all ranks of a group must agree on it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np

from aiograd.coordination.message_code import Bound
from aiograd.coordination.message_form import Count, WireMessage, message
from aiograd.coordination.message_json import from_json, to_json
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore


class OperationKind(StrEnum):
    """The kind of a collective."""

    ALL_REDUCE = "all_reduce"
    SUM_IN_TURN = "sum_in_turn"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    BARRIER = "barrier"


#: the function that adds one more contribution to the sum of the ranks before
REDUCTIONS: Mapping[str, Callable[..., Any]] = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}
#: kinds of dtypes that each of them takes
_NUMBERS, _FRACTIONS, _ORDERED = "iufc", "fc", "biuf"
REDUCED_KINDS: Mapping[str, str] = {"sum": _NUMBERS, "mean": _FRACTIONS, "max": _ORDERED, "min": _ORDERED}
#: kinds of dtypes that can be sent
SENDABLE_KINDS = "biufc"

#: shape and dtype of an array
ArraySpec = tuple[tuple[int, ...], str]


class Operation(NamedTuple):
    """A collective operation. Ranks with different operations cannot carry them out together; see `mismatch`."""

    kind: OperationKind
    #: of all_reduce, sum_in_turn and reduce_scatter: a name in `REDUCTIONS`
    reduction: str = ""
    #: of broadcast: the rank that has the values
    root: int = 0
    #: of the arrays, where all ranks have the same; empty where they need not know them
    specs: tuple[ArraySpec, ...] = ()
    #: of the gradients of a model: the number of models of the group that were made before it; 0 of all other operations
    label: int = 0

    def __str__(self) -> str:
        arguments = [f"op={self.reduction!r}"] if self.reduction else []
        if self.kind is OperationKind.BROADCAST:
            arguments.append(f"root={self.root}")
        shapes = ", ".join(f"{np.dtype(dtype)}{list(shape)}" for shape, dtype in self.specs[:4])
        if self.specs:
            arguments.insert(0, shapes + (f" and {len(self.specs) - 4} more" if len(self.specs) > 4 else ""))
        return f"{self.kind}({', '.join(arguments)})"

    def mismatch(self, other: Operation) -> bool:
        """True if a rank that carries out `other` cannot do so together with one that carries out this."""
        if self.kind is OperationKind.ALL_GATHER or (self.kind is OperationKind.BROADCAST and not (self.specs and other.specs)):
            return self[:3] != other[:3] or self.label != other.label  # shapes may differ, or only the root knows them
        return self != other

    @lru_cache(maxsize=256)  # noqa: B019 (an operation is a value, and training carries out the same ones in each step)
    def to_wire(self) -> bytes:
        """The operation as bytes, the same for equal ones: so most that come need not be read, see `RunningOperations`."""
        specs = [ArrayForm([*shape], dtype) for shape, dtype in self.specs]
        return to_json(OperationForm(self.kind.value, self.reduction, self.root, specs, self.label or None))

    @classmethod
    def parse(cls, wire: bytes) -> Operation:
        """The operation of a message.

        Raises:
            ProtocolError: it is none.
        """
        form = from_json(OperationForm, wire)
        specs = tuple((tuple(each.shape), each.dtype) for each in form.specs)
        return cls(OperationKind(form.kind), form.reduction, form.root, specs, form.label or 0)


def _is_dtype(text: str) -> bool:
    try:
        return np.dtype(text).str == text
    except (TypeError, ValueError, SyntaxError):
        return False


@message(code="collective", wire=list)
class ArrayForm(WireMessage):
    """Shape and dtype of an array."""

    shape: list[Count]
    dtype: Annotated[str, Bound("a dtype of numpy", _is_dtype)]


@message(code="collective", wire=list, name="Operation")
class OperationForm(WireMessage):
    """The wire form of an `Operation`, as JSON."""

    kind: Annotated[str, Bound(f"one of {', '.join(OperationKind)}", frozenset(OperationKind).__contains__)]
    reduction: Annotated[str, Bound(f"'' or one of {', '.join(REDUCTIONS)}", {"", *REDUCTIONS}.__contains__)]
    root: Count
    specs: list[ArrayForm]
    #: left out where it is 0, so members of a release that has no labels understand all other operations
    label: Count | None = None


def specs_of(arrays: Sequence[Array]) -> tuple[ArraySpec, ...]:
    """Shapes and dtypes of arrays."""
    return tuple((array.shape, array.dtype.str) for array in arrays)


def check_arrays(what: str, arrays: Sequence[Any], kinds: str = SENDABLE_KINDS) -> list[Any]:
    """The arrays of an argument: arrays of the host C-contiguous, copied only if they are not; arrays of devices unchanged.

    Args:
        what: the operation, for errors.
        kinds: the accepted kinds of dtypes.

    Raises:
        ArgumentTypeError: something is no array of one of these kinds.
    """
    found = []
    for index, array in enumerate(arrays):
        if not isinstance(getattr(array, "dtype", None), np.dtype):
            raise ArgumentTypeError(f"{what}: array {index} is of type {type(array).__name__}; expected a numpy array or a Tensor")
        if array.dtype.kind not in kinds or not array.dtype.isnative:
            raise ArgumentTypeError(f"{what}: array {index} has dtype {array.dtype}, which it does not take; convert it with astype() first")
        is_ready = not isinstance(array, np.ndarray) or (array.__class__ is np.ndarray and array.flags.c_contiguous)
        found.append(array if is_ready else np.ascontiguousarray(array).reshape(array.shape))
    return found


def check_reduction(what: str, reduction: Any) -> str:
    """The name of a reduction.

    Raises:
        ArgumentError: there is none of that name.
    """
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"{what}(op={reduction!r}): expected one of {', '.join(map(repr, REDUCTIONS))}")
    return str(reduction)


def is_single(arrays: Any) -> bool:
    """True for one array, which is not in a list."""
    return not isinstance(arrays, (list, tuple))


def data_of(what: str, arrays: Any, kinds: str) -> list[Any]:
    """The data of arrays and Tensors, checked; arrays of the host are C-contiguous."""
    data: list[Any] = [array._data if isinstance(array, TensorCore) else array for array in ([arrays] if is_single(arrays) else arrays)]
    data = [np.asarray(array) if isinstance(array, (np.generic, int, float, complex)) else array for array in data]
    return check_arrays(what, data, kinds)


def data_of_lists(lists: Sequence[Sequence[Any]], rank: int) -> tuple[list[Any], tuple[ArraySpec, ...]]:
    """The data of the lists of `Group.sum_in_turn`, one after another, and the shapes and dtypes of each.

    Raises:
        ArgumentError: no list, several on rank 0, or lists that differ. ArgumentTypeError: no lists of arrays.
    """
    if not isinstance(lists, (list, tuple)):
        raise ArgumentTypeError(f"sum_in_turn: expected a list of lists of arrays, found {type(lists).__name__}")
    values = [data_of("sum_in_turn", each, REDUCED_KINDS["sum"]) for each in lists]
    specs = [specs_of(each) for each in values]
    if not specs or specs.count(specs[0]) < len(specs) or (len(specs) > 1 and rank == 0):
        raise ArgumentError(
            f"sum_in_turn: got lists of {', '.join(str(len(each)) for each in values) or 'no'} arrays on rank {rank}; expected one list, or on other "
            "ranks than 0 several, of the same shapes and dtypes"
        )
    return [array for each in values for array in each], specs[0]
