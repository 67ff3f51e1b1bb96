"""ArrayCode: a function of arrays as straight-line calls of numpy, as data. The passes read and make it.

Note [Memory]
    A `Ref` is made once and never changed, with one exception: a call with an `out` writes into the memory of an earlier one, which no later call
    reads. `Call.fresh` says that the results share no memory with the arguments; of others nothing is known, so they are taken to.
    The text has names only, so Refs with different memory have different names: a second array under the name of a first would be written to in its
    place.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from aiograd.running.trees import leaves_of, map_tree
from aiograd.running.types import Shape

_NESTED = (tuple, list, dict, slice)
#: name of the parameter that has the memory to write into
ARENA = "arena"


@dataclass(slots=True, eq=False)
class Ref:
    """An array, by the name that it has in the text.

    Attributes:
        shape, dtype, strides: the array's, the same in every run; None for something that is no array.
    """

    name: str
    shape: Shape | None = None
    dtype: np.dtype[Any] | None = None
    strides: Shape | None = None

    @property
    def is_in_order(self) -> bool:
        """True for an array in row-major order without gaps."""
        return self.shape is not None and self.dtype is not None and self.strides == _strides_in_order(self.shape, self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return 0 if self.shape is None or self.dtype is None else math.prod(self.shape) * self.dtype.itemsize


@lru_cache(maxsize=4096)
def _strides_in_order(shape: Shape, size: int) -> Shape:
    strides = []
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))


#: ufuncs with correctly rounded results: on real numbers they do not depend on the loop that computes them
EXACT = frozenset({
    np.add, np.subtract, np.multiply, np.divide, np.negative, np.positive, np.absolute, np.square, np.reciprocal, np.sqrt, np.maximum, np.minimum,
    np.sign, np.floor, np.ceil, np.trunc, np.rint, np.greater, np.greater_equal, np.less, np.less_equal, np.equal, np.not_equal, np.logical_and,
    np.logical_or, np.logical_not, np.logical_xor,
})  # fmt: skip


class Form(enum.Enum):
    """How a call is written."""

    #: ``function(*arguments)``
    CALL = enum.auto()
    #: ``first.function(*others)``
    METHOD = enum.auto()
    #: ``first.function``
    ATTRIBUTE = enum.auto()
    #: ``first[second]``
    INDEX = enum.auto()
    #: ``out[second] = first``; the result has the name of `out`
    STORE = enum.auto()


@dataclass(slots=True, eq=False)
class Call:
    """One statement. It is never changed; `but` makes another one. Not frozen, because that makes the making take three times as long.

    Attributes:
        form, function: see `Form`.
        label: name of the function in the text.
        arguments, options: positional and by keyword: Refs, constants, and both nested.
        results: the Refs that it makes.
        unpacks: the function returns a tuple of the results.
        nested: so many of them, the first ones, are a tuple of their own in it.
        pure: it may be dropped, or done once for two of the same.
        refuses: it raises an error for some values, so it is not dropped.
        fresh: see Note [Memory].
        out: the Ref that owns the memory written to.
        errors: floating point errors that are handled otherwise than around it, as for `numpy.errstate`.
        comment: a text for the reader of the source.
        reads: the Refs in arguments and options.
    """

    form: Form
    function: Any
    label: str
    arguments: tuple[Any, ...]
    results: tuple[Ref, ...]
    options: dict[str, Any] = field(default_factory=dict)
    unpacks: bool = False
    nested: int = 0
    pure: bool = True
    refuses: bool = False
    fresh: bool = False
    out: Ref | None = None
    errors: tuple[tuple[str, str], ...] = ()
    comment: str = ""
    reads: tuple[Ref, ...] = ()

    def __post_init__(self) -> None:
        self.reads = refs_in(self.arguments, self.options)

    @property
    def is_elementwise(self) -> bool:
        """True for a call of a ufunc that could be given an `out`."""
        function = self.function
        return isinstance(function, np.ufunc) and function.signature is None and function.nout == 1 and not self.options

    @property
    def computes(self) -> bool:
        """False for a call that only looks at memory or moves it, in which no floating point error can happen."""
        return self.form is Form.CALL and self.function not in (np.empty, np.concatenate)

    @property
    def is_exact(self) -> bool:
        """True for an element-wise call with a result that does not depend on the layout of its arguments."""
        return self.is_elementwise and self.function in EXACT and all([ref.dtype is not None and ref.dtype.kind in "fbiu" for ref in self.reads])

    def refs(self) -> tuple[Ref, ...]:
        """The Refs that it reads, `out` among them."""
        return self.reads if self.out is None else (*self.reads, self.out)

    def replaced(self, names: dict[Ref, Any]) -> Call:
        """The same call with other arguments."""
        if names.keys().isdisjoint(self.reads):
            return self
        arguments, options = map_tree(lambda ref: names.get(ref, ref), (self.arguments, self.options), Ref)
        return self.but(arguments=arguments, options=options, reads=refs_in(arguments, options))

    def but(self, **changes: Any) -> Call:
        """The same call with other attributes."""
        call = object.__new__(Call)
        for name, value in zip(_FIELDS, _attributes(self), strict=True):
            setattr(call, name, value)
        for name, value in changes.items():
            setattr(call, name, value)
        return call


_FIELDS = tuple(each.name for each in fields(Call))
_attributes = attrgetter(*_FIELDS)


def refs_in(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Ref, ...]:
    """The Refs among the arguments of a call."""
    if not options and not any([argument.__class__ in _NESTED for argument in arguments]):
        return tuple([argument for argument in arguments if argument.__class__ is Ref])
    return tuple(leaves_of((arguments, options), Ref))


@dataclass(frozen=True, slots=True)
class ArrayCode:
    """A function.

    Attributes:
        name: of the function.
        parameters: its arguments: a Ref each, or the name of a tuple and the Refs that it has.
        calls: the calls, in order.
        results: Refs and None, nested in tuples and lists, that it returns.
        private: results that only the program itself reads later.
        frees: every array is dropped after its last use, and the parameter `saved`, a list, is emptied for that.
    """

    name: str
    parameters: tuple[Ref | tuple[str, tuple[Ref, ...]], ...]
    calls: tuple[Call, ...]
    results: Any
    private: frozenset[Ref] = frozenset()
    frees: bool = False

    def given(self) -> Iterator[Ref]:
        """The Refs among the parameters."""
        for parameter in self.parameters:
            if isinstance(parameter, Ref):
                yield parameter
            else:
                yield from parameter[1]

    @property
    def arena(self) -> tuple[Ref, ...]:
        """The parameters that are arrays of an arena."""
        return next((parameter[1] for parameter in self.parameters if not isinstance(parameter, Ref) and parameter[0] == ARENA), ())

    def visible(self) -> set[Ref]:
        """The results that code outside of the function sees."""
        return set(leaves_of(self.results, Ref)) - self.private

    def written(self) -> set[Ref]:
        """The Refs with memory that a later call overwrites."""
        return {call.out for call in self.calls if call.out is not None}


class Memory:
    """Groups of Refs of an `ArrayCode` that may share memory: see Note [Memory]."""

    def __init__(self, code: ArrayCode) -> None:
        self._parent: dict[Ref, Ref] = {}
        for call in code.calls:
            shared = (call.out,) if call.out is not None else () if call.fresh else call.reads
            if shared or len(call.results) > 1:
                for ref in (*shared, *call.results[1:]):
                    self.join(call.results[0] if call.results else shared[0], ref)

    def of(self, ref: Ref) -> Ref:
        """The representative of all Refs that share memory with `ref`."""
        parents = self._parent
        parent = parents.get(ref)
        if parent is None:
            return ref
        while (above := parents.get(parent)) is not None:
            parents[ref] = above
            ref, parent = parent, above
        return parent

    def shared(self, some: Iterable[Ref], others: Iterable[Ref]) -> set[Ref]:
        """The Refs among `some` that may share memory with one of `others`."""
        roots = {self.of(ref) for ref in others}
        return {ref for ref in some if self.of(ref) in roots}

    def join(self, one: Ref, other: Ref) -> None:
        """Put two Refs into one group: they may share memory."""
        one, other = self.of(one), self.of(other)
        if one is not other:
            self._parent[other] = one
