"""Reads: values that a recorded call took from objects around it, each of which can be read again and compared.

Note [The same reads, the same program]
    The result of a function follows from its arguments and from its other reads. So a program stands for a call as long as every read gives the same
    value as while recording. A read is repeated as it was made: ``holder.name`` for an attribute, wherever in the chain of classes it is found.

Note [What only the recording refers to]
    A recorded call makes objects of its own and reads them too. Objects that nothing else refers to when it has ended can no longer change, and
    the next call makes new ones. They are known by their reference counts: each reference to them is one that the reads hold. A read of such an
    object is dropped, and so is the reason that an iterator or a generator of random numbers gives against a program.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple

import numpy as np

from aiograd.compiler.watching import kinds
from aiograd.compiler.watching.kinds import ABSENT, CONTAINERS, HELPERS, PLAIN, ReadKind, is_a, is_same, items_of
from aiograd.tensors.core import TensorCore


class Fit(enum.Enum):
    """Comparison of a value with its value at the recording."""

    #: the same
    SAME = enum.auto()
    #: a number, flag or string is another, such as ``training``: it may come back
    OTHER = enum.auto()
    #: another object, such as a Parameter that was replaced: the program is of no use any more
    STALE = enum.auto()


def _may_return(now: Any, value: Any) -> bool:
    """True if two values differ in numbers, flags and strings only."""
    if type(now) is type(value) and is_a(value, CONTAINERS) and len(now) == len(value):
        return all(is_same(*pair) or _may_return(*pair) for pair in zip(items_of(now), items_of(value), strict=True))
    return is_a(now, (*PLAIN, NoneType)) and is_a(value, (*PLAIN, NoneType))


def _tensors_in(value: Any) -> Iterator[TensorCore]:
    """The Tensors in nested tuples, lists and dicts, which may contain themselves."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if is_a(each, TensorCore):
            yield each
        elif is_a(each, (tuple, list, dict)) and id(each) not in seen:
            seen.add(id(each))
            waiting += each.values() if is_a(each, dict) else each


class Read:
    """A value that was read.

    Args:
        kind: how.
        holder: the object that the value was read from; None after it is dropped.
        key: under what.
        value: the value that was read.
        where: the line of the user's code.
        counts: True if it went only into the place that it came from.

    Attributes:
        is_weak: True if `holder` is a weak reference to the object.
    """

    __slots__ = ("kind", "holder", "key", "value", "where", "counts", "is_weak")

    def __init__(self, kind: ReadKind, holder: Any, key: Any, value: Any, where: Any, counts: bool = False) -> None:
        self.is_weak = False
        self.kind = kind
        self.holder = holder
        self.key = key
        self.value = value
        self.where = where
        self.counts = counts

    def now(self) -> Any:
        """The value that a read gives now; `ABSENT` where it fails."""
        try:
            return self.kind.now(self.holder() if self.is_weak else self.holder, self.key)
        except Exception:
            return ABSENT

    def fit(self) -> Fit:
        """Compare the value that a read gives now with the recorded one."""
        now = self.now()
        if is_same(now, self.value):
            return Fit.SAME
        try:
            return Fit.OTHER if self.kind.may_return or _may_return(now, self.value) else Fit.STALE
        except RecursionError:  # it holds itself
            return Fit.STALE

    def __str__(self) -> str:
        """The expression, for people."""
        holder = getattr(self.holder, "__name__", None) if is_a(self.holder, (FunctionType, ModuleType, type)) else None
        holder = holder or f"<{type(self.holder).__name__}>"
        key = self.key if self.kind in (kinds.ATTRIBUTE, kinds.METHOD) else repr(self.key)
        return self.kind.text.format(h=holder, k=key, **dict.fromkeys(HELPERS, ""))


def read_inputs(reads: list[Read], inputs: list[TensorCore]) -> tuple[tuple[int, Any], ...]:
    """The inputs with arrays that the function also reads from another object: for each its place, and the array.

    A program of such a call cannot tell how the function came by them, so it runs for these only.
    """
    values = [each for read in reads for each in (read.value if read.kind in kinds.CONTENTS else (read.value,))]
    arrays = {id(value._data) for value in values if is_a(value, TensorCore)} | {id(value) for value in values if is_a(value, np.ndarray)}
    return tuple([(i, tensor._data) for i, tensor in enumerate(inputs) if id(tensor._data) in arrays])


class Reason(NamedTuple):
    """Why no program can be made, unless the object in question is the call's own.

    Attributes:
        holder: the object that it is about; None: it holds in any case.
        text: the reason, for people.
        where: the line of the user's code.
    """

    holder: Any
    text: str
    where: Any


class Reads:
    """The reads of one call, with the changes that the call makes itself.

    Attributes:
        of_tensors: attributes of Tensors that were read: the Tensor, the name, the value and the line.
        given: ids of the containers among the arguments, which the signature compares.
        takes_arrays: False while code of this package runs, which works on the arrays of Tensors.
    """

    def __init__(self) -> None:
        #: by id, Tensors that were read
        self.tensors: dict[int, TensorCore] = {}
        self.of_tensors: list[tuple[TensorCore, str, Any, Any]] = []
        self.given: set[int] = set()
        self.takes_arrays = True
        self._reads: dict[Any, Read] = {}
        self._reasons: list[Reason] = []
        #: objects that a weak reference gave, which reads are not to keep alive, and the reference
        self._weak: dict[int, tuple[Any, Any]] = {}
        #: by holder and key: the value that the call has set, with the kind of its read
        self._set: dict[tuple[int, Any], tuple[Any, ReadKind, Any, Any]] = {}
        #: containers with items that the call has set, and True where others may have come, gone or moved
        self._changed: dict[int, tuple[Any, bool]] = {}

    def add(self, kind: ReadKind, holder: Any, key: Any, value: Any, where: Any, *, counts: bool = False) -> None:
        """Note a read; values that the call itself has set need no guard."""
        known = self._reads.get((kind.text, id(holder), key))
        if known is not None:
            known.counts &= counts
            return
        if (id(holder), key) in self._set:
            return
        changed = self._changed.get(id(holder))
        if changed is not None and (changed[1] or kind not in kinds.OF_ONE):
            self.refuse(holder, f"it changes a {type(holder).__name__} that it reads", where)
            return
        self._reads[kind.text, id(holder), key] = Read(kind, holder, key, value, where, counts)
        if is_a(value, (TensorCore, tuple, list)):
            for tensor in _tensors_in(value):
                self.tensors[id(tensor)] = tensor

    def knows(self, kind: ReadKind, holder: Any) -> bool:
        """True if the content of a container was read already."""
        return (kind.text, id(holder), None) in self._reads

    def sets(self, kind: ReadKind, holder: Any, key: Any, where: Any) -> None:
        """Note that the call sets what `kind` reads."""
        self._set.setdefault((id(holder), key), (holder, kind, key, where))
        if kind is kinds.ITEM:
            self._changed.setdefault(id(holder), (holder, False))

    def changes(self, container: Any) -> None:
        """Note that the call changes the items of a container."""
        self._changed[id(container)] = container, True

    def holds_weakly(self, thing: Any, reference: Any) -> None:
        """Note that an object was reached by a weak reference."""
        self._weak[id(thing)] = thing, reference

    def refuse(self, holder: Any, text: str, where: Any) -> None:
        """Note why no program can be made, unless `holder` is the call's own; None: in any case."""
        self._reasons.append(Reason(holder, text, where))

    def settle(self, is_new: Callable[[Any], bool]) -> tuple[list[Read], Reason | None, Read | None]:
        """The reads that a program depends on, after the call.

        Args:
            is_new: True for a Tensor that the call has made.

        Returns:
            The reads; why no program can be made, if there is a reason; and a read that the call itself has changed, if there is one.
        """
        reads, reasons = [*self._reads.values()], self._reasons
        sets = [(holder, kind, key, where) for holder, kind, key, where in self._set.values()]
        changed = [*self._changed.values()]
        self._reads, self._set, self._changed, self._reasons = {}, {}, {}, []
        while True:
            counts = _references(reads, reasons, sets, changed, [thing for thing, _ in self._weak.values()])
            sizes = len(reads), len(reasons), len(sets), len(changed)
            reads = [read for read in reads if not _is_own(read.holder, counts)]
            reasons = [reason for reason in reasons if reason.holder is None or not _is_own(reason.holder, counts)]
            sets = [each for each in sets if not _is_own(each[0], counts)]
            changed = [each for each in changed if not _is_own(each[0], counts)]
            if sizes == (len(reads), len(reasons), len(sets), len(changed)):
                break
        counters = {(id(read.holder), read.key) for read in reads if read.counts}
        known = {(id(read.holder), read.key) for read in reads}
        reads = [read for read in reads if not read.counts]
        for holder, kind, key, where in sets:
            if (id(holder), key) not in known | counters:
                read = Read(kind, holder, key, ABSENT, where)
                read.value = read.now()
                if any(map(is_new, _tensors_in(read.value))):
                    reasons.append(Reason(None, f"it keeps a tensor in a {type(holder).__name__}", where))
                reads.append(read)
        for read in reads:
            if id(read.holder) in self._weak:
                read.holder, read.is_weak = self._weak[id(read.holder)][1], True
        self._weak.clear()
        moved = next((read for read in reads if read.fit() is not Fit.SAME), None)
        return reads, (reasons[0] if reasons else None), moved


def _references(reads: list[Read], reasons: list[Reason], sets: list[Any], changed: list[Any], weak: list[Any]) -> dict[int, int]:
    """By id of an object, the number of references to it in these lists."""
    counts: dict[int, int] = {}
    arrays: dict[int, np.ndarray[Any, Any]] = {}
    for thing in _things(reads, reasons, sets, changed, weak):
        counts[id(thing)] = counts.get(id(thing), 0) + 1
        if is_a(thing, np.ndarray):
            arrays[id(thing)] = thing
    for array in arrays.values():
        if array.base is not None:
            counts[id(array.base)] = counts.get(id(array.base), 0) + 1
    return counts


def _things(reads: list[Read], reasons: list[Reason], sets: list[Any], changed: list[Any], weak: list[Any]) -> Iterator[Any]:
    for read in reads:
        yield read.holder
        yield read.key
        yield read.value
        if read.kind in kinds.CONTENTS:
            yield from read.value
    for each in (*reasons, *sets, *changed):
        yield each[0]
    yield from weak


def _is_own(thing: Any, counts: dict[int, int]) -> bool:
    """True if nothing but reads refers to an object."""
    if sys.getrefcount(thing) - _BY_CALL > counts.get(id(thing), 0):
        return False
    base = thing.base if is_a(thing, np.ndarray) else None
    return base is None or (isinstance(base, np.ndarray) and sys.getrefcount(base) - _BY_CALL <= counts.get(id(base), 0))


def _references_by_call(thing: Any) -> int:
    """The number of references to an object that a call of `sys.getrefcount` and its parameter add."""
    return sys.getrefcount(thing)


_BY_CALL = _references_by_call(object())
