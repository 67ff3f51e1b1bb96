"""Code: a function of arrays as straight-line calls of numpy, as data. What the passes read and make.

Note [Memory]
    A `Ref` is made once and never changed, with one exception: a call with an `out` writes into the memory of an earlier one, which nobody reads
    afterwards. `Call.fresh` says that the results share no memory with the arguments; of others nothing is known, so they are taken to.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from aiograd.trees import leaves_of, map_tree
from aiograd.types import Shape


@dataclass(slots=True, eq=False)
class Ref:
    """An array, by the name that it has in the text.

    Attributes:
        shape, dtype, strides: of every run; None for something that is no array.
    """

    name: str
    shape: Shape | None = None
    dtype: np.dtype[Any] | None = None
    strides: Shape | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return 0 if self.shape is None or self.dtype is None else int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


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


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One statement.

    Attributes:
        form, function: see `Form`.
        label: what the text calls the function.
        arguments, options: positional and by keyword: Refs, constants, and both nested.
        results: what it makes.
        unpacks: the function returns a tuple of the results.
        nested: so many of them, the first ones, are a tuple of their own in it.
        pure: it may be dropped, or done once for two of the same.
        fresh: see Note [Memory].
        out: the Ref into whose memory it writes.
        errors: floating point errors that are handled otherwise than around it, as for `numpy.errstate`.
        comment: for the reader.
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
    fresh: bool = False
    out: Ref | None = None
    errors: tuple[tuple[str, str], ...] = ()
    comment: str = ""

    @property
    def is_elementwise(self) -> bool:
        """True for a call of a ufunc that could be given an `out`."""
        return self.form is Form.CALL and isinstance(self.function, np.ufunc) and self.function.signature is None and self.function.nout == 1 and not self.options

    def refs(self) -> list[Ref]:
        """What it reads, `out` among it."""
        found = leaves_of((self.arguments, self.options) if self.options else self.arguments, Ref)
        return found if self.out is None else [*found, self.out]

    def replaced(self, names: dict[Ref, Ref]) -> Call:
        """The same of other arguments."""
        if not any(ref in names for ref in self.refs()):
            return self
        other = lambda ref: names.get(ref, ref)  # noqa: E731
        return replace(self, arguments=map_tree(other, self.arguments, Ref), options=map_tree(other, self.options, Ref))


@dataclass(frozen=True, slots=True)
class Code:
    """A function.

    Attributes:
        name: of the function.
        parameters: its arguments: a Ref each, or the name of a tuple and the Refs that it has.
        calls: in order.
        results: what it returns: Refs and None, nested in tuples and lists.
        private: results that only the program itself reads later.
    """

    name: str
    parameters: tuple[Ref | tuple[str, tuple[Ref, ...]], ...]
    calls: tuple[Call, ...]
    results: Any
    private: frozenset[Ref] = frozenset()

    def given(self) -> Iterator[Ref]:
        """The Refs among the parameters."""
        for parameter in self.parameters:
            if isinstance(parameter, Ref):
                yield parameter
            else:
                yield from parameter[1]

    def visible(self) -> set[Ref]:
        """The results that others get to see."""
        return set(leaves_of(self.results, Ref)) - self.private

    def written(self) -> set[Ref]:
        """The Refs whose memory a later call writes into."""
        return {call.out for call in self.calls if call.out is not None}


class Memory:
    """Which Refs of a `Code` may share memory: see Note [Memory]."""

    def __init__(self, code: Code) -> None:
        self._parent: dict[Ref, Ref] = {}
        for call in code.calls:
            shared = call.refs() if not call.fresh and call.out is None else [] if call.out is None else [call.out]
            for ref in (*shared, *call.results[1:]):
                self.join(call.results[0] if call.results else shared[0], ref)

    def of(self, ref: Ref) -> Ref:
        """The one that stands for all that share memory with `ref`."""
        parent = self._parent.setdefault(ref, ref)
        while parent is not ref:
            self._parent[ref] = self._parent[parent]
            ref, parent = parent, self._parent[parent]
        return ref

    def join(self, one: Ref, other: Ref) -> None:
        """The two may share memory."""
        self._parent[self.of(other)] = self.of(one)
