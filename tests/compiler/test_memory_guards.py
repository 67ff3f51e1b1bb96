"""Guards that compare memory: each thing that is compared, changed in turn, and the suites of guards once more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.compiler import memory_guards
from aiograd.compiler.memory_guards import Comparisons
from aiograd.compiler.program_code import GuardedCode
from aiograd.compiler.watching import kinds
from aiograd.compiler.watching.reads import Read
from aiograd.tensors import core
from tests.compiler import memory
from tests.compiler.test_names import *  # noqa: F403 - once more, with these guards
from tests.compiler.test_reads import *  # noqa: F403
from tests.compiler.test_short_ways import *  # noqa: F403
from tests.compiler.test_stale_results import count_stale_cases
from tests.support import leaf

has_versions = pytest.mark.skipif(sys.version_info >= (3, 13), reason="dicts have no version")


@pytest.fixture(autouse=True)
def compare() -> Iterator[Callable[..., bool]]:
    """Guards compare memory during a test."""
    function = memory.compare_function()
    memory_guards.use(function)
    yield function
    memory_guards.use(None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(4))
def test_no_result_is_stale(chunk: int) -> None:
    cases, programs = count_stale_cases(4, chunk)
    assert cases > 80 and programs > 60, (cases, programs)


# -------------------------------------------------------------------- one comparison each


def _unchanged(compare: Callable[..., bool], comparisons: Comparisons, *objects: Any) -> bool:
    found = compare(comparisons.table(), *objects)
    assert found is True or found is False
    return found


ARRAYS: dict[str, Any] = {
    "itself": (lambda: np.zeros((2, 3), np.float32), True),
    "a scalar": (lambda: np.zeros((), np.float32), False),
    "another extent": (lambda: np.zeros((2, 4), np.float32), False),
    "one more axis": (lambda: np.zeros((1, 2, 3), np.float32), False),
    "fewer axes": (lambda: np.zeros(2, np.float32), False),
    "other strides": (lambda: np.zeros((3, 2), np.float32).T, False),
    "backwards": (lambda: np.zeros((2, 3), np.float32)[::-1], False),
    "a dtype of the same size": (lambda: np.zeros((2, 3), np.int32), False),
    "the other byte order": (lambda: np.zeros((2, 3), ">f4"), False),
    "a subclass": (lambda: np.zeros((2, 3), np.float32).view(np.matrix), False),
    "no array": (lambda: 3.0, False),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_is_compared(compare: Callable[..., bool], name: str) -> None:
    comparisons = Comparisons()
    comparisons.array(np.ones((2, 3), np.float32), 1)
    make, expected = ARRAYS[name]
    assert _unchanged(compare, comparisons, make()) is expected


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
@pytest.mark.parametrize("change", [("shape", (3, 2)), ("strides", (4, 8)), ("dtype", np.int32), ("shape", (6,))])
def test_an_array_that_is_changed_in_place_is_found_out(compare: Callable[..., bool], change: tuple[str, Any]) -> None:
    weight = leaf(np.zeros((2, 3), np.float32))
    comparisons = Comparisons()
    assert comparisons.tensor(weight, True)
    assert _unchanged(compare, comparisons)
    setattr(weight._data, *change)
    assert not _unchanged(compare, comparisons)


TENSORS: dict[str, Any] = {
    "the same": (lambda t: None, True),
    "new values": (lambda t: t.detach().add_(1.0), True),
    "an equal array": (lambda t: setattr(t, "_data", t._data.copy()), True),
    "another array": (lambda t: setattr(t, "_data", np.zeros(3, np.float32)), False),
    "requires_grad": (lambda t: t.requires_grad_(False), False),
    "more of a state": (core.extra_of, False),
}


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_compared(compare: Callable[..., bool], name: str, is_given: bool) -> None:
    tensor = ag.tensor(np.zeros(2, np.float32), requires_grad=True)
    comparisons = Comparisons()
    assert comparisons.tensor(tensor, True, 1 if is_given else None)
    change, expected = TENSORS[name]
    change(tensor)
    assert _unchanged(compare, comparisons, *[tensor] * is_given) is expected
    if is_given:
        assert not _unchanged(compare, comparisons, ag.nn.Parameter(np.zeros(2, np.float32)))
        assert not _unchanged(compare, comparisons, np.zeros(2, np.float32))


def test_arrays_that_are_one_are_found_out(compare: Callable[..., bool]) -> None:
    a, b, c = ag.zeros(2), ag.zeros(2), np.zeros(2, np.float32)
    comparisons = Comparisons()
    for register, is_array in ((1, False), (2, False), (3, True)):
        comparisons.distinct(register, is_array=is_array)
    assert _unchanged(compare, comparisons, a, b, c)
    for given in ((a, a, c), (a, b, a._data), (a, b, b._data), (a, a.detach(), c)):
        assert not _unchanged(compare, comparisons, *given)


def _holder() -> tuple[Any, Any]:
    """An object of a class of its own, with a dict."""
    base = type("Base", (), {"rate": 1.0, "forward": lambda self: None})
    holder = type("Holder", (base,), {})()
    holder.weight = 1.0
    assert holder.__dict__
    return holder, base


CHANGES_OF_OBJECTS: dict[str, Any] = {
    "an attribute": lambda holder, base: setattr(holder, "weight", 2.0),
    "an attribute before the class's": lambda holder, base: setattr(holder, "rate", 1.0),
    "a method before the class's": lambda holder, base: setattr(holder, "forward", None),
    "an attribute of the base": lambda holder, base: setattr(base, "rate", 2.0),
    "a method of the base": lambda holder, base: setattr(base, "forward", lambda self: None),
    "an attribute of the class": lambda holder, base: setattr(type(holder), "rate", 1.0),
    "a property": lambda holder, base: setattr(type(holder), "weight", property(lambda self: 2.0)),
    "another class": lambda holder, base: setattr(holder, "__class__", type("Other", (base,), {})),
    "another dict": lambda holder, base: setattr(holder, "__dict__", dict(holder.__dict__)),
    "the dict itself": lambda holder, base: holder.__dict__.update(weight=2.0),
    "no attribute": lambda holder, base: delattr(holder, "weight"),
}


@has_versions
@pytest.mark.parametrize("name", CHANGES_OF_OBJECTS)
def test_an_object_is_compared(compare: Callable[..., bool], name: str) -> None:
    holder, base = _holder()
    comparisons = Comparisons()
    for kind, key in ((kinds.ATTRIBUTE, "weight"), (kinds.ATTRIBUTE, "rate"), (kinds.METHOD, "forward")):
        assert comparisons.read(Read(kind, holder, key, kind.now(holder, key), None))
    assert _unchanged(compare, comparisons)
    holder.forward(), holder.weight, base.rate  # reading changes nothing
    assert _unchanged(compare, comparisons)
    CHANGES_OF_OBJECTS[name](holder, base)
    assert not _unchanged(compare, comparisons)


class Slotted:
    __slots__ = ("weight",)
    rate = 1.0


class WithProperty:
    @property
    def rate(self) -> float:
        return 1.0


class WithOwnWay:
    rate = 1.0

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


def _slotted() -> Slotted:
    slotted = Slotted()
    slotted.weight = 1.0  # type: ignore[misc]
    return slotted


def _shadowed() -> WithProperty:
    """An object with an attribute that a property comes before."""
    shadowed = WithProperty()
    shadowed.__dict__["rate"] = 2.0
    return shadowed


@pytest.mark.parametrize(
    ("holder", "key"),
    [
        (_slotted(), "weight"), (WithProperty(), "rate"), (_shadowed(), "rate"), (WithOwnWay(), "rate"), (WithProperty(), "__class__"), (sys, "argv"),
        (3, "real"), (int, "__name__"),
    ],
)
def test_what_something_else_decides_on_is_not_compared_in_memory(holder: Any, key: str) -> None:
    assert getattr(holder, "__dict__", {}) is not None  # an object has its dict once it is asked for
    assert not Comparisons().read(Read(kinds.ATTRIBUTE, holder, key, getattr(holder, key), None))


@has_versions
def test_the_dict_of_an_object_is_compared_where_that_is_read(compare: Callable[..., bool]) -> None:
    holder, _ = _holder()
    comparisons = Comparisons()
    assert comparisons.read(Read(kinds.ATTRIBUTE, holder, "__dict__", holder.__dict__, None))
    holder.weight = 2.0  # which is another read
    assert _unchanged(compare, comparisons)
    holder.__dict__ = {"weight": 2.0}
    assert not _unchanged(compare, comparisons)


@has_versions
def test_dicts_and_classes_are_compared(compare: Callable[..., bool]) -> None:
    table = {"a": 1}
    for kind, key in ((kinds.ITEM, "a"), (kinds.CONTAINS, "a"), (kinds.DICT, None)):
        comparisons = Comparisons()
        assert comparisons.read(Read(kind, table, key, kind.now(table, key), None))
        assert _unchanged(compare, comparisons)
        table["a"] += 1
        assert not _unchanged(compare, comparisons)
    _, base = _holder()
    comparisons = Comparisons()
    assert comparisons.read(Read(kinds.ATTRIBUTE, base, "rate", 1.0, None)) and _unchanged(compare, comparisons)
    base.rate = 1.0
    assert not _unchanged(compare, comparisons)


def test_answers_are_counted(compare: Callable[..., bool]) -> None:
    comparisons, given = Comparisons(), np.ones(2)
    comparisons.array(given, 1)
    table, other = comparisons.table(), np.ones(3)
    before = sys.getrefcount(True), sys.getrefcount(False)
    for _ in range(1000):
        assert compare(table, given) and not compare(table, other)
    assert abs(sys.getrefcount(True) - before[0]) < 100 and abs(sys.getrefcount(False) - before[1]) < 100


# -------------------------------------------------------------------- whole calls


def test_a_module_is_looked_through_once(compare: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing changes neither `compared` nor a line of Python looks at the parameters."""
    net = ag.nn.Sequential(ag.nn.Linear(3, 3), ag.nn.ReLU(), ag.nn.Linear(3, 2))
    f, x = ag.compile(net), ag.ones(1, 3)
    expected = net(x).detach().numpy()
    for _ in range(3):
        f(x)
    monkeypatch.setattr(GuardedCode, "compared", None)
    assert f(x).detach().numpy().tobytes() == expected.tobytes() and f.statistics().recordings == 1


CHANGES_OF_MODULES: dict[str, Any] = {
    "a weight": lambda net: setattr(net[0], "weight", ag.nn.Parameter(np.ones((3, 3), np.float32))),
    "no bias": lambda net: setattr(net[2], "bias", None),
    "a module": lambda net: net.append(ag.nn.ReLU()),
    "a hook": lambda net: net[2].register_forward_hook(lambda module, args, output: output * 2),
    "a forward": lambda net: object.__setattr__(net[1], "forward", lambda x: x * 3),
    "a frozen weight": lambda net: net[0].weight.requires_grad_(False),
    "a dtype": lambda net: net.to(np.float64),
}


@pytest.mark.parametrize("name", CHANGES_OF_MODULES)
def test_a_change_of_a_module_is_seen(name: str) -> None:
    net = ag.nn.Sequential(ag.nn.Linear(3, 3), ag.nn.ReLU(), ag.nn.Linear(3, 3))
    f, x = ag.compile(net), ag.tensor([[1.0, -2.0, 3.0]])
    for _ in range(4):
        f(x)
    CHANGES_OF_MODULES[name](net)
    for _ in range(3):
        found, expected = f(x.astype(net[0].weight.dtype)), net(x.astype(net[0].weight.dtype))
        assert found.detach().numpy().tobytes() == expected.detach().numpy().tobytes() and found.dtype == expected.dtype


def test_one_array_for_two_arguments_is_another_signature() -> None:
    f, x, y, z = ag.compile(lambda a, b, c: a * b + c), leaf([1.0, 2.0]), leaf([3.0, 4.0]), np.ones(2)
    for _ in range(4):
        f(x, y, z)
    assert f.statistics().recordings == 1
    assert f(x, x, z).tolist() == [2.0, 5.0] and f(x, y, y.detach().numpy()).tolist() == [6.0, 12.0]
    assert f.statistics().recordings == 3


def test_guards_that_are_there_are_made_anew(compare: Callable[..., bool]) -> None:
    calls: list[int] = []

    def counted(*args: Any) -> bool:
        calls.append(1)
        return compare(*args)

    memory_guards.use(None)
    weight = leaf([1.0, 2.0])
    f, x = ag.compile(lambda x: x * weight), leaf([3.0, 4.0])
    for _ in range(4):
        f(x)
    memory_guards.use(counted)
    for _ in range(4):
        assert f(x).tolist() == [3.0, 8.0]
    before = len(calls)
    f(x)
    assert len(calls) == before + 2 and f.statistics().recordings == 1  # the arguments, and what the function captures
