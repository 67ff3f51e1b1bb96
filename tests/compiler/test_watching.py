"""How reads are found: the operands on a frame's stack, the instructions that read, and what is a call's own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import inspect
import sys
import threading
import types
import typing
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.compiler.recording import ProgramRecorder
from aiograd.compiler.watching import kinds, watcher
from aiograd.compiler.watching.instructions import Does, watched_in
from aiograd.compiler.watching.reads import Fit, Reads
from aiograd.compiler.watching.stack import bottom_of
from aiograd.compiler.watching.watcher import Watcher


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def test_the_depth_of_the_stack_is_known_at_every_instruction() -> None:
    count = 0
    for module in (argparse, asyncio.base_events, contextlib, dataclasses, inspect, typing, ag.nn.module, np.lib._npyio_impl):
        for code in _codes(compile(inspect.getsource(module), module.__name__, "exec")):
            for instruction in watched_in(code).values():
                assert all(0 <= place < bottom_of(code) + code.co_stacksize for place in instruction.places), (code, instruction)
                count += 1
    assert count > 10_000


class Named:
    """Notes nothing itself: its attributes are read by name, and each is an object of its own."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, Named())

    def __repr__(self) -> str:
        return "named"


N = Named(*"abcdefghijkl")


async def _nothing(value: Any) -> Any:
    return value


@contextlib.contextmanager
def _entered(value: Any) -> Iterator[Any]:
    yield value


def _generated(value: Any) -> Iterator[Any]:
    found = yield (value, N.a)
    yield (found, [N.b for _ in range(1)], N.c)


async def _crowded(first: Any, *rest: Any, named: Any = None, **options: Any) -> Any:
    """Reads attributes while other things lie on the stack, in all kinds of blocks."""
    kept = [first, (N.a, [N.b, {"k": N.c}]), *rest, f"{1}{N.d}", N.e if first is None else (N.f, N.g)]
    for number, item in enumerate([N.h, N.i]):
        with _entered(item) as entered, contextlib.suppress(KeyError):
            try:
                kept.append((number, entered, await _nothing(N.j), N.k))
                raise ValueError(N.l)
            except ValueError as error:
                kept.append((error, N.a, *(each for each in (N.b, N.c))))
            finally:
                kept.append(N.d)
    generator = _generated(N.e)
    kept.append((next(generator), generator.send(N.f), lambda: N.g, max([1, 2], key=lambda value: (N.h, value)[1])))
    match kept:
        case [_, (_, [_, *_]), *others] if N.i is not None:
            kept.append((others, N.j))
    return kept, named, options, [*map(lambda value: (value, N.k), [1])], N.l


@pytest.mark.one_loop
async def test_the_operands_are_those_of_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    before = Reads.add

    def add(reads: Reads, kind: Any, holder: Any, key: Any, value: Any, where: Any, **options: Any) -> None:
        if kind is kinds.ATTRIBUTE and isinstance(value, Named):
            assert holder is N and value is getattr(N, key)
            seen.append(key)
        before(reads, kind, holder, key, value, where, **options)

    monkeypatch.setattr(Reads, "add", add)
    reads = Reads()
    observer = Watcher(reads)
    coroutine = _crowded(1, 2, 3, named=4, other=5)
    with observer.watching(), pytest.raises(StopIteration):
        coroutine.send(None)
    observer.ends()
    block = [*"jklabcd"]
    assert "".join(seen) == "".join(["abcd", "fg", "hi", *block, *block, "e", "afbc", "h", "h", "ij", "k", "l"])
    _, reason, moved = reads.settle(lambda tensor: False)
    assert moved is None and (reason is None or "attribute" not in reason.text), reason


def _counters(thing: Any, table: dict[str, int], step: int) -> Any:
    thing.a += 1
    thing.b = thing.b + len(table)
    table["k"] += step
    thing.c += thing.d
    thing.e = thing.f + 1
    value = thing.g + 1
    thing.g = value
    thing.h += (yield)
    return value


def test_counters() -> None:
    found = {each.argument: each.counts for each in watched_in(_counters.__code__).values() if each.does is Does.ATTRIBUTE}
    assert found == {"a": True, "b": True, "c": True, "d": False, "f": False, "g": False, "h": True}
    assert [each.counts for each in watched_in(_counters.__code__).values() if each.does is Does.ITEM] == [True]


def test_an_interpreter_whose_frames_are_not_known_runs_functions_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "is_readable", lambda: False)
    compiled, x = ag.compile(lambda x: x * 2), ag.ones(3)
    with pytest.warns(UserWarning, match=r"what a function reads is watched on CPython 3.11 to 3.13 only, this is 3\."):
        for _ in range(3):
            assert compiled(x).tolist() == [2.0] * 3
    assert compiled.statistics().runs == 0


def test_what_only_the_reads_refer_to_is_dropped() -> None:
    reads, kept = Reads(), [1, [2]]
    own = [[3.0], np.arange(3.0)]
    for holder in (kept, own):
        reads.add(kinds.LIST, holder, None, kinds.LIST.now(holder, None), None)
    reads.add(kinds.LIST, own[0], None, kinds.LIST.now(own[0], None), None)
    reads.add(kinds.ARRAY, own[1][1:], None, kinds.ARRAY.now(own[1][1:], None), None)
    reads.refuse(iter(own), "an iterator", None)
    freed = weakref.ref(own[1])
    del own, holder
    found, reason, moved = reads.settle(lambda tensor: False)
    assert [read.holder for read in found] == [kept] and reason is None and moved is None and freed() is None
    array = np.arange(3.0)
    reads.add(kinds.ARRAY, array[1:], None, kinds.ARRAY.now(array[1:], None), None)
    reads.refuse(iterator := iter([1]), "an iterator", None)
    found, reason, _ = reads.settle(lambda tensor: False)
    assert len(found) == 1 and reason is not None and reason.holder is iterator
    array[2] = 7.0
    assert found[0].fit() is not Fit.SAME


def test_how_values_compare() -> None:
    nan = float("nan")
    for same in ((1, 1), (nan, float("nan")), ([1, {"a": (2.0,)}], [1, {"a": (2.0,)}]), ("a", "a"), (np.float32(1), np.float32(1))):
        assert kinds.is_same(*same)
    for other in ((1, 1.0), (0.0, -0.0), ([1], (1,)), ([1, 2], [2, 1]), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (object(), object())):
        assert not kinds.is_same(*other)
    endless: list[list[Any]] = [[], []]
    for each in endless:
        each.append(each)
    assert not kinds.is_same(*endless)


def test_the_expressions_of_kinds_say_what_their_functions_do() -> None:
    class Holder:
        name = 1

        def method(self) -> None: ...

    holder, names, array = Holder(), {"name": 1}, np.arange(2.0)
    keys: dict[str, tuple[Any, Any]] = {
        "GLOBAL": (names, "name"), "CELL": (types.CellType(1), None), "ATTRIBUTE": (holder, "name"), "METHOD": (holder, "method"),
        "MEMBER": (Holder, "method"), "MISSING": (holder, "other"), "NOT_OWN": (holder, "name"), "SUPER": (Holder, (Holder, "__init__")),
        "CLASS": (holder, None), "ITEM": (names, "name"), "CONTAINS": (names, "name"), "CONTENT": ([1, 2], None), "LIST": ([1, 2], None),
        "DICT": (names, None), "NAMES": (Holder, None), "BYTES": (array, None), "BYTEARRAY": (bytearray(b"1"), None), "ARRAY": (array, None),
        "CALLED": (max, ((1, 2), ())), "CONTEXT": (names, ("name",)), "IS_DEAD": (weakref.ref(holder), None),
        "HAS_GRADIENT": (ag.ones(2, requires_grad=True), None), "HAS_HOOKS": (ag.ones(2, requires_grad=True)._node, 0),
    }  # fmt: skip
    known = {name: kind for name, kind in vars(kinds).items() if isinstance(kind, kinds.ReadKind)}
    assert known.keys() == keys.keys()
    for name, kind in known.items():
        thing, key = keys[name]
        named = key if name in ("ATTRIBUTE", "METHOD") else "key"
        expression = kind.text.format(h="thing", k=named, **{each: f"helpers[{each!r}]" for each in kinds.HELPERS})
        found = eval(expression, {"thing": thing, "key": key, "helpers": kinds.HELPERS})  # noqa: S307 - an expression of the package's
        assert kinds.is_same(found, kind.now(thing, key)), name


def test_versions_that_are_known() -> None:
    assert watcher.is_readable() is ((3, 11) <= sys.version_info[:2] <= (3, 13))


def _kept_generator(scale: float) -> Iterator[float]:
    while True:
        yield scale * TABLE["scale"]


TABLE = {"scale": 2.0}


@pytest.mark.proc
def test_recordings_on_several_threads_at_once_and_frames_that_outlive_them() -> None:
    """A frame that was watched goes on where nothing is watched, while another thread records: CPython 3.12 has a defect there."""
    interval, failures = sys.getswitchinterval(), []

    def record() -> None:
        kept = []
        for number in range(30):

            def function(x: Any, number: int = number) -> Any:
                generator = _kept_generator(float(number))
                kept.append(generator)
                return x * next(generator)

            compiled, x = ag.compile(function), ag.ones(2)
            found = [compiled(x).tolist() for _ in range(3)] + [[next(kept[-1])] * 2]
            if found != [[2.0 * number] * 2] * 4:
                failures.append(found)

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=record) for _ in range(4)]
        with warnings.catch_warnings():  # all threads share the filters
            warnings.simplefilter("ignore")
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures


# -------------------------------------------------------------------- rows


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="to change the trace function costs more than it saves")
def test_rows_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    before = ProgramRecorder.ran

    def noted(self: Any, op: Any, *args: Any) -> None:
        seen.append((op.name, sys.gettrace() is None))
        before(self, op, *args)

    monkeypatch.setattr(ProgramRecorder, "ran", noted)
    usual, conf = sys.gettrace(), types.SimpleNamespace(scale=2.0)
    f = ag.compile(lambda x: (x * 3.0 + x[0]).sum() * conf.scale)
    assert f(ag.ones(2)).item() == 16.0 and sys.gettrace() is usual
    assert [name for name, _ in seen] == ["mul", "getitem", "add", "sum", "mul"]
    assert all(is_off for _, is_off in seen) is (usual is None)  # beside another trace function, such as a debugger's, nothing is switched off
    conf.scale = 3.0  # read between rows
    assert f(ag.ones(2)).item() == 24.0


def test_a_row_that_fails_is_watched_on() -> None:
    conf = types.SimpleNamespace(scale=2.0)

    def plain(x: Any) -> Any:
        with contextlib.suppress(ag.errors.ShapeError):
            x @ ag.ones(7)
        return x * conf.scale

    f = ag.compile(plain, on_break="eager")
    assert f(ag.ones(2)).tolist() == [2.0, 2.0]
    conf.scale = 3.0
    assert f(ag.ones(2)).tolist() == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore:the compiled function:UserWarning")
def test_an_argument_of_a_row_that_has_code_is_watched() -> None:
    seen: list[bool] = []

    class Axis:
        def __index__(self) -> int:
            seen.append(sys.gettrace() is not None)
            return 0

    f = ag.compile(lambda x: x.sum(axis=Axis()), on_break="eager")  # type: ignore[arg-type]
    assert f(ag.ones(2, 2)).tolist() == [2.0, 2.0]
    assert seen and all(seen)
