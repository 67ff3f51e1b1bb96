"""What a compiled function reads: after a change of any of it the result is the eager one, however the function came by it."""

from __future__ import annotations

import array
import asyncio
import collections
import contextvars
import dataclasses
import datetime
import functools
import io
import itertools
import logging
import operator
import os
import random
import sys
import time
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from tests.compiler.test_compile import bits, leaf

#: makes a function of a tensor, and the changes to make one after the other
Case = Callable[[], tuple[Callable[[Any], Any], list[Callable[[], Any]]]]
CASES: dict[str, Case] = {}


def case(made: Case) -> Case:
    CASES[made.__name__] = made
    return made


def setter(thing: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(thing, name, value)


def entry(thing: Any, key: Any, value: Any) -> Callable[[], None]:
    return lambda: operator.setitem(thing, key, value)


# ---------------------------------------------------------------- attributes


@case
def module_in_a_module() -> Any:
    pkg = types.ModuleType("pkg")
    pkg.conf = types.ModuleType("pkg.conf")  # type: ignore[attr-defined]
    pkg.conf.rate = 2.0  # type: ignore[attr-defined]
    return lambda a: a * pkg.conf.rate, [setter(pkg.conf, "rate", 3.0)]  # type: ignore[attr-defined]


class _Base:
    rate = 2.0
    table: Any = {"k": 2.0}

    @classmethod
    def of_class(cls) -> float:
        return cls.table["k"]

    @staticmethod
    def of_global() -> float:
        return GLOBAL["rate"]

    def method(self) -> float:
        return self.rate


GLOBAL = {"rate": 2.0}


@case
def class_attribute_that_a_subclass_shadows() -> Any:
    class Sub(_Base):
        pass

    sub = Sub()
    return lambda a: a * sub.rate * sub.method(), [setter(Sub, "rate", 3.0), setter(sub, "rate", 4.0), lambda: delattr(sub, "rate")]


@case
def entry_that_a_classmethod_reads() -> Any:
    class Sub(_Base):
        table = {"k": 2.0}

    return lambda a: a * Sub.of_class() * Sub().of_class(), [entry(Sub.table, "k", 3.0), setter(Sub, "table", {"k": 4.0})]


@case
def global_that_a_staticmethod_reads() -> Any:
    GLOBAL["rate"] = 2.0
    return lambda a: a * _Base.of_global(), [entry(GLOBAL, "rate", 3.0)]


@case
def slots_and_properties() -> Any:
    class Slots:
        __slots__ = ("own",)

        @property
        def twice(self) -> float:
            return self.own * 2

    slots = Slots()
    slots.own = 2.0
    return lambda a: a * slots.twice, [setter(slots, "own", 3.0), setter(Slots, "twice", property(lambda self: self.own * 3))]


@case
def methods_that_are_replaced() -> Any:
    class Called(_Base):
        def __call__(self, a: Any) -> Any:
            return a * super().method()

        def __getitem__(self, key: Any) -> float:
            return 2.0

        def __enter__(self) -> float:
            return 2.0

        def __exit__(self, *_: object) -> None:
            return None

    called = Called()

    def f(a: Any) -> Any:
        with called as factor:
            return called(a) * called[0] * factor

    return f, [
        setter(Called, "__call__", lambda self, a: a * 3.0),
        setter(Called, "__getitem__", lambda self, key: 3.0),
        setter(Called, "__enter__", lambda self: 3.0),
    ]


@case
def base_method_that_is_replaced() -> Any:
    class Base:
        def factor(self) -> float:
            return 2.0

    class Sub(Base):
        def factor(self) -> float:
            return super().factor()

    sub = Sub()
    return lambda a: a * sub.factor(), [setter(Base, "factor", lambda self: 3.0), setter(Sub, "factor", lambda self: 4.0)]


@case
def class_of_an_object() -> Any:
    class One:
        rate = 2.0

    class Other:
        rate = 3.0

    one, plain = One(), One()
    return lambda a: a * one.rate * (2.0 if type(plain) is One else 3.0) * (2.0 if isinstance(plain, One) else 5.0), [
        setter(one, "__class__", Other), setter(plain, "__class__", Other),
    ]  # fmt: skip


class _Meta(type):
    rates = {"rate": 2.0}

    def __getattr__(cls, name: str) -> Any:
        return cls.rates[name]


@case
def attribute_that_a_metaclass_makes_up() -> Any:
    class Made(metaclass=_Meta):
        pass

    _Meta.rates["rate"] = 2.0
    return lambda a: a * Made.rate, [entry(_Meta.rates, "rate", 3.0), setter(Made, "rate", 4.0)]


@case
def attributes_that_an_object_makes_up() -> Any:
    class Made:
        def __init__(self) -> None:
            self.known = {"rate": 2.0}

        def __getattr__(self, name: str) -> Any:
            return self.__dict__["known"][name]

    made = Made()
    return lambda a: a * made.rate, [entry(made.known, "rate", 3.0), setter(made, "rate", 4.0)]


@case
def names_that_are_computed() -> Any:
    holder, getter = types.SimpleNamespace(rate=2.0, deep=types.SimpleNamespace(rate=2.0)), operator.attrgetter("rate", "deep.rate")

    def f(a: Any) -> Any:
        one, two = getter(holder)
        return a * one * two * getattr(holder, "ra" + "te") * vars(holder)["rate"] * (3.0 if hasattr(holder, "other") else 1.0)

    return f, [setter(holder, "rate", 3.0), setter(holder.deep, "rate", 5.0), setter(holder, "other", 1.0)]


@case
def methodcaller_and_itemgetter() -> Any:
    holder, caller, getter = _Base(), operator.methodcaller("method"), operator.itemgetter("a")
    named = {"a": 2.0}
    holder.rate = 2.0
    return lambda a: a * caller(holder) * getter(named), [setter(holder, "rate", 3.0), entry(named, "a", 4.0)]


@case
def globals_and_their_dict() -> Any:
    GLOBAL["rate"] = 2.0
    names = {"G": 2.0}
    source = "def f(a):\n    return a * globals()['G'] * G * eval('G') * globals().get('G')"
    exec(source, names)  # noqa: S102 - a function with globals of its own
    return names["f"], [entry(names, "G", 3.0)]


# ---------------------------------------------------------------- containers


@case
def names_in_a_pattern() -> Any:
    conf = types.SimpleNamespace(kind=1, table={"a": 2.0})

    def f(a: Any) -> Any:
        match 1:
            case conf.kind:
                factor = 2.0
            case _:
                factor = 3.0
        match conf.table:
            case {"a": rate}:
                return a * factor * rate
        match conf:
            case types.SimpleNamespace(kind=2):
                return a * factor * 7.0
        return a * factor

    return f, [setter(conf, "kind", 2), entry(conf.table, "a", 3.0), conf.table.clear]


@case
def containers_of_the_standard_library() -> Any:
    user, chain = collections.UserDict(rate=2.0), collections.ChainMap({}, {"rate": 2.0})
    inner = {"rate": 2.0}
    proxy, queue, counter = types.MappingProxyType(inner), collections.deque([2.0]), collections.Counter("ab")

    def f(a: Any) -> Any:
        return a * user["rate"] * chain["rate"] * proxy["rate"] * queue[0] * counter["a"] * proxy.get("rate", 1.0)

    return f, [
        entry(user, "rate", 3.0), entry(chain, "rate", 4.0), entry(inner, "rate", 5.0), lambda: queue.appendleft(6.0), lambda: counter.update("a"),
    ]  # fmt: skip


@case
def buffers() -> Any:
    numbers, text, floats = bytearray(b"\x02\x03"), array.array("d", [2.0, 3.0]), memoryview(bytearray(b"\x02"))
    return lambda a: a * numbers[0] * text[0] * sum(text) * floats[0], [
        entry(numbers, 0, 5), entry(text, 0, 7.0), entry(text, 1, 9.0), entry(floats, 0, 3)
    ]  # fmt: skip


@case
def lists_that_are_compared_counted_or_tested() -> Any:
    items, other, named, kept = [1.0, 2.0], [1.0, 2.0], {"a": 1}, {1, 2}

    def f(a: Any) -> Any:
        a = a * (2.0 if items == other else 3.0) * len(items) * (2.0 if named else 5.0) * (2.0 if "a" in named else 7.0)
        first, *rest = items
        return a * first * len(rest) * max(*other) * (2.0 if 1 in kept else 3.0) * sum([*items, *other])

    return f, [
        entry(other, 1, 5.0), lambda: items.append(1.0), lambda: named.update(b=2), named.clear, lambda: kept.discard(1), lambda: items.extend(other),
    ]  # fmt: skip


@case
def containers_that_are_passed_on() -> Any:
    shape, named, parts, weights = [3, 2], {"alpha": 2.0}, [leaf(3), leaf(3)], [leaf(3), leaf(3)]

    def scaled(a: Any, alpha: float) -> Any:
        return a * alpha

    def f(a: Any) -> Any:
        return scaled(a, **named) + ag.stack(parts).sum() + ag.reshape(a, shape).sum() + sum(a * w for w in weights) + np.sum(np.array(shape))

    return f, [
        entry(named, "alpha", 3.0), entry(parts, 0, leaf(3)), lambda: shape.reverse(), entry(weights, 1, leaf(3)), lambda: shape.append(1),
    ]  # fmt: skip


@case
def arrays_that_numpy_computes_from() -> Any:
    table, large = np.arange(3.0), np.arange(3000.0)
    return lambda a: a * float(np.sqrt(table)[2]) * table[1] * large[:5].sum() * table[1:].max(), [
        entry(table, 1, 5.0), entry(table, 2, 7.0), entry(large, 3, 70.0)
    ]  # fmt: skip


# ---------------------------------------------------------------- calls


@case
def partials() -> Any:
    options = functools.partial(lambda a, *, scale: a * scale, scale=2.0)
    return lambda a: options(a), [entry(options.keywords, "scale", 3.0)]


@case
def caches() -> Any:
    rates = {"rate": 2.0}

    @functools.lru_cache
    def cached(name: str) -> float:
        return rates[name]

    def change() -> None:
        rates["rate"] = 3.0
        cached.cache_clear()

    return lambda a: a * cached("rate"), [change]


@case
def caches_of_objects() -> Any:
    class Cached:
        rate = 2.0

        @functools.cached_property
        def twice(self) -> float:
            return self.rate * 2

    cached = Cached()

    def change() -> None:
        cached.rate = 3.0
        del cached.twice

    return lambda a: a * cached.twice, [setter(cached, "twice", 7.0), change]


@case
def weak_references() -> Any:
    class Held:
        rate = 2.0

    held: Any = Held()
    reference, proxied = weakref.ref(held), Held()
    proxy = weakref.proxy(proxied)

    def f(a: Any) -> Any:
        found = reference()
        return a * (7.0 if found is None else found.rate) * proxy.rate

    def drop() -> None:
        nonlocal held
        held = None

    return f, [setter(held, "rate", 3.0), setter(proxied, "rate", 4.0), drop]


@case
def context_variables() -> Any:
    variable: Any = contextvars.ContextVar("variable", default=2.0)
    return lambda a: a * variable.get(), [lambda: variable.set(3.0), lambda: variable.set(4.0)]


@case
def defaults_and_code_of_functions() -> Any:
    def helper(a: Any, scale: float = 2.0, *, other: float = 2.0) -> Any:
        return a * scale * other

    def change() -> None:
        helper.__defaults__ = (3.0,)

    other = (lambda a, s=1.0, *, other=1.0: a * 7.0).__code__
    return lambda a: helper(a), [change, entry(helper.__kwdefaults__, "other", 3.0), setter(helper, "__code__", other)]


@case
def functions_that_are_called_by_builtins() -> Any:
    rates = [2.0, 3.0]

    def key(value: float) -> float:
        return GLOBAL["sign"] * value

    GLOBAL["sign"] = 1.0
    return lambda a: a * sorted(rates, key=key)[0] * sum(map(key, rates)), [entry(GLOBAL, "sign", -1.0), entry(rates, 0, 5.0)]


@case
def dataclasses_and_their_copies() -> Any:
    @dataclasses.dataclass
    class Options:
        rate: float = 2.0
        others: Any = dataclasses.field(default_factory=lambda: [1.0])

    options = Options()

    def f(a: Any) -> Any:
        replaced = dataclasses.replace(options, others=None)
        return a * replaced.rate * sum(dataclasses.asdict(options)["others"])

    return f, [setter(options, "rate", 3.0), entry(options.others, 0, 4.0)]


class _Own(Mapping[str, float]):
    def __init__(self) -> None:
        self.rates = {"rate": 2.0}

    def __getitem__(self, name: str) -> float:
        return self.rates[name]

    def __iter__(self) -> Any:
        return iter(self.rates)

    def __len__(self) -> int:
        return len(self.rates)


@case
def mappings_of_the_user() -> Any:
    own = _Own()
    return lambda a: a * sum(own.values()) * dict(own)["rate"] * len(own), [entry(own.rates, "rate", 3.0), entry(own.rates, "other", 4.0)]


@case
def modules_of_a_network() -> Any:
    class Net(nn.Module):
        scale = 2.0

        def __init__(self) -> None:
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.LayerNorm(3)])
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x * self.scale if self.training else -x

    net = Net()
    return lambda a: net(a), [
        lambda: net.layers.append(nn.Tanh()), lambda: net.eval(), setter(net, "scale", 3.0), lambda: net.train(), setter(net.layers[1], "eps", 0.1),
        lambda: net.layers.register_forward_hook(lambda *_: None), setter(net.layers[0], "forward", lambda x: x * 2),
        lambda: net.register_forward_hook(lambda m, a, y: y + 1), setter(net.layers[1], "bias", None),
    ]  # fmt: skip


@case
def objects_with_a_class_of_the_package() -> Any:
    normal = ag.distributions.Normal(ag.zeros(3), ag.ones(3))
    return lambda a: normal.log_prob(a), [setter(normal, "loc", ag.ones(3))]


@case
def names_imported_within() -> Any:
    def f(a: Any) -> Any:
        import math

        from tests.compiler.test_reads import GLOBAL as within

        return a * math.pi * within["imported"]

    GLOBAL["imported"] = 2.0
    return f, [entry(GLOBAL, "imported", 3.0)]


# ---------------------------------------------------------------- what cannot be watched


def _drawn(x: Any) -> Any:
    return x * DRAWS.random()


DRAWS, GENERATOR, NUMBERS = random.Random(1), np.random.default_rng(1), itertools.count(1)
WEIGHTS = np.ones(10_000)
FOUND: list[Any] = []


def _reads_a_file(x: Any) -> Any:
    with open(os.devnull) as file:
        return x * len(file.read())


class _Keeps:
    def __init__(self) -> None:
        self.steps = 0
        self.last: Any = None
        self.seen: list[int] = []

    def counts_and_uses(self, x: Any) -> Any:
        self.steps += 1
        return x * self.steps

    def keeps(self, x: Any) -> Any:
        self.last = x * 2
        return self.last + 1

    def collects(self, x: Any) -> Any:
        y = x * 2
        FOUND.append(y)
        return y * 1

    def grows(self, x: Any) -> Any:
        self.seen.append(1)
        return x * len(self.seen)


#: by the reason: functions whose result may be another at every call, though nothing that they read has changed
REFUSED: dict[str, list[Callable[[Any], Any]]] = {
    r"calls time.perf_counter\(\)": [lambda x: x * (time.perf_counter() >= 0.0)],
    r"calls datetime.now\(\)": [lambda x: x * datetime.datetime.now(datetime.UTC).year],
    r"calls posix.getpid\(\)": [lambda x: x * os.getpid()],
    r"calls _?io.open\(\)": [_reads_a_file],
    "uses a Random, whose state may change": [_drawn, lambda x: x * max([2.0, DRAWS.random()]), lambda x: x * (random.random() + 1)],
    "uses a Generator, whose state may change": [lambda x: x * GENERATOR.random(), lambda x: x * sum(GENERATOR.random(2))],
    "uses a RandomState, whose state may change": [lambda x: x * np.random.rand()],
    r"calls random.Random\(\)": [lambda x: x * random.Random().random()],
    "uses a count, which can be used only once": [lambda x: x * next(NUMBERS), lambda x: x * next(zip(NUMBERS, [1], strict=False))[0]],
    "changes what it reads, <_Keeps>.steps": [_Keeps().counts_and_uses],
    "keeps a tensor in a _Keeps": [_Keeps().keeps],
    "keeps a tensor in a list": [_Keeps().collects],
    "changes a list that it reads": [_Keeps().grows],
    "array of 80,000 bytes, which is too large": [lambda x: x * np.sqrt(WEIGHTS).sum(), lambda x: x * WEIGHTS.mean()],
    "reads grad_fn of a tensor": [lambda x: x * (2.0 if x.grad_fn is None else 3.0)],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_watched_runs_eagerly(reason: str) -> None:
    for function in REFUSED[reason]:
        compiled, x = ag.compile(function), leaf(3)
        with pytest.warns(UserWarning, match=rf"{reason}.* test_reads.py:\d+" if "changes what" not in reason else reason):
            for _ in range(4):
                compiled(x)
        assert compiled.statistics().runs == 0 and compiled.statistics().breaks == 1


def _logs(x: Any) -> Any:
    logging.getLogger("aiograd.test").debug("a call")
    print("a call", file=io.StringIO())
    return x * 2


class _Counts:
    def __init__(self) -> None:
        self.calls = self.rows = 0
        self.counts = {"calls": 0}

    def __call__(self, x: Any) -> Any:
        global CALLS
        self.calls += 1
        self.rows = self.rows + len(x)
        self.counts["calls"] += 1
        CALLS += 1
        return x * 2


def _own_objects(x: Any) -> Any:
    class Local:
        def __init__(self) -> None:
            self.items = [1, 2]

    local, named, numbers = Local(), {"a": 1}, iter([1, 2])
    local.items.append(next(numbers))
    named["a"] += len(local.items)
    drawn = random.Random(5).random() + np.random.default_rng(5).random()
    return x * len(local.items) * named["a"] * next(numbers) * drawn * float(np.triu(np.ones((300, 300))).sum())


CALLS = 0
#: functions with effects that nothing reads, or that only read what they have made themselves
ALLOWED: list[Callable[[Any], Any]] = [_logs, _Counts(), _own_objects, lambda x: x * len(list(zip([1, 2], [3, 4], strict=True)))]


@pytest.mark.parametrize("function", ALLOWED)
def test_what_a_function_makes_counts_or_prints_is_no_reason_against_a_program(function: Callable[[Any], Any]) -> None:
    compiled, x = ag.compile(function), leaf(3)
    for _ in range(3):
        assert bits(compiled(x)) == bits(function(x))
    assert compiled.statistics().recordings == 1 and compiled.statistics().runs == 2


def test_a_leaf_among_the_arguments() -> None:
    compiled, weight = ag.compile(f := lambda x: x * (2.0 if x.is_leaf else 3.0)), leaf(3)
    for _ in range(2):
        for x in (weight, weight * 1, weight.detach()):
            assert bits(compiled(x)) == bits(f(x))
    assert compiled.statistics().recordings == 3


async def test_tasks_have_values_of_their_own() -> None:
    variable: Any = contextvars.ContextVar("variable")
    compiled, x = ag.compile(lambda x: x * variable.get()), leaf(3)

    async def task(value: float) -> None:
        variable.set(value)
        for _ in range(3):
            assert bits(compiled(x)) == bits(x * value)
            await asyncio.sleep(0)

    await asyncio.gather(*map(task, (2.0, 3.0, 4.0)))
    assert compiled.statistics().recordings == 3


def test_an_object_that_raises_for_names_it_does_not_know() -> None:
    class Strict:
        rate = 2.0

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    strict, x = Strict(), leaf(3)
    compiled = ag.compile(lambda x, s: x * s.rate * strict.rate)
    for _ in range(3):
        assert bits(compiled(x, strict)) == bits(x * 4.0)
    assert compiled.statistics().runs == 2


def test_objects_that_are_equal_are_not_one() -> None:
    class Equal:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        def __hash__(self) -> int:
            return 1

    compiled, x = ag.compile(lambda x, e: x * e.rate), leaf(3)
    for rate in (2.0, 3.0, 2.0):
        assert bits(compiled(x, Equal(rate))) == bits(x * rate)


def test_a_debugger_goes_on() -> None:
    seen = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code is helper.__code__:
            seen.append(event)
        return trace

    def helper(x: Any) -> Any:
        return x * GLOBAL["traced"]

    GLOBAL["traced"] = 2.0
    compiled, x, before = ag.compile(lambda x: helper(x)), leaf(3), sys.gettrace()
    sys.settrace(trace)
    try:
        compiled(x)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert seen == ["call", "line", "return"]
    GLOBAL["traced"] = 3.0
    assert bits(compiled(x)) == bits(x * 3.0)


@pytest.mark.parametrize("name", CASES)
async def test_a_change_is_seen(name: str) -> None:
    function, changes = CASES[name]()
    compiled, x = ag.compile(function, max_signatures=64), leaf(2, 3)
    results = []
    for change in [lambda: None, *changes]:
        change()
        for _ in range(4):
            assert bits(compiled(x)) == bits(function(x))
        results.append(bits(function(x)))
    assert compiled.statistics().runs >= 2 * len(results), compiled.statistics()
    assert len({str(each) for each in results}) > 1
