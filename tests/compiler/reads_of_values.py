"""Functions that read containers, or what calls keep, each with changes of these, for `test_reads`."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import decimal
import functools
import importlib
import operator
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import nn
from tests.compiler.reads_of_attributes import CASES as CASES
from tests.compiler.reads_of_attributes import GLOBAL, case, entry, setter
from tests.compiler.test_compile import leaf

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


# ---------------------------------------------------------------- code that is not watched, and settings


@case
def text_that_is_run() -> Any:
    table, names = {"a": 2.0}, {"inner": {"b": 2.0}}
    code = compile("inner['b']", "text", "eval")

    def f(a: Any) -> Any:
        found: dict[str, float] = {}
        exec("rate = table['a'] * 2; CALLS = 1", {"table": table}, found)  # noqa: S102 - what is tested
        return a * found["rate"] * eval("table['a']") * eval(code, names)  # noqa: S307 - what is tested

    return f, [entry(table, "a", 3.0), entry(names["inner"], "b", 4.0)]


@case
def functions_written_in_c_that_call_others_over_containers() -> Any:
    table, rows, pairs = {"a": 1.0, "b": 2.0}, [[2.0], [3.0, 1.0]], [["k", 2.0]]

    def f(a: Any) -> Any:
        first = sorted(table, key=table.get)[0]  # type: ignore[arg-type]
        a = a * (2.0 if first == "a" else 3.0) * sum(map(table.get, ["a"])) * sum(map(table.__getitem__, "b"))  # type: ignore[arg-type]
        a = a * sum(map(len, rows)) * sum(map(operator.itemgetter(0), rows)) * rows.count([2.0]) * dict(pairs)["k"]  # type: ignore[arg-type]
        return a * next(map(list, table.items()))[1] * len([*filter(None, rows)])  # type: ignore[arg-type]

    return f, [
        entry(table, "a", 9.0), entry(table, "b", 4.0), lambda: rows[1].append(1.0), entry(rows[1], 0, 5.0), entry(pairs[0], 1, 3.0),
        lambda: rows[1].clear() or rows[1].append(2.0), entry(rows[1], 0, 7.0),
    ]  # fmt: skip


@case
def names_of_a_class() -> Any:
    class Named:
        rate = 2.0

    return lambda a: a * Named.__dict__["rate"] * vars(Named)["rate"], [setter(Named, "rate", 3.0)]


@case
def settings_of_numbers() -> Any:
    def f(a: Any) -> Any:
        third = float(decimal.Decimal(1) / decimal.Decimal(3))
        return a * third * decimal.getcontext().prec * np.get_printoptions()["precision"] * len(np.geterr()["under"])

    context, under = decimal.getcontext(), np.geterr()["under"]
    return f, [
        setter(context, "prec", 4), lambda: decimal.setcontext(decimal.Context(prec=2)), lambda: decimal.setcontext(context),
        setter(context, "prec", 28), lambda: np.set_printoptions(precision=3), lambda: np.set_printoptions(precision=8),
        lambda: np.seterr(under="raise"), lambda: np.seterr(under=under),
    ]  # fmt: skip


@case
def modules_in_the_place_of_others() -> Any:
    def put(rate: float) -> None:
        for name in ("aiograd_test_rates", "aiograd_test_others"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].rate = rate  # type: ignore[attr-defined]

    def f(a: Any) -> Any:
        import aiograd_test_rates  # type: ignore[import-not-found]

        return a * aiograd_test_rates.rate * importlib.import_module("aiograd_test_others").rate

    put(2.0)
    return f, [lambda: put(3.0), setter(sys.modules["aiograd_test_rates"], "rate", 5.0), lambda: put(2.0)]


# ---------------------------------------------------------------- gradients and places in the graph


@case
def gradients_of_tensors_that_require_none() -> Any:
    v, w = ag.tensor([2.0]), ag.tensor([1.0])
    v.grad = ag.tensor([2.0])
    return lambda a: a * v.grad * (2.0 if w.grad is None else 3.0), [
        setter(v, "grad", ag.tensor([5.0])), lambda: v.grad.mul_(2.0), setter(w, "grad", ag.tensor([1.0])), w.requires_grad_, setter(w, "grad", None),
    ]  # fmt: skip


@case
def gradient_of_a_leaf_that_is_switched_off_and_on() -> Any:
    w = leaf(1)
    w.grad = ag.tensor([2.0])
    return lambda a: a * w.grad, [
        lambda: w.requires_grad_(False), setter(w, "grad", ag.tensor([5.0])), w.requires_grad_, setter(w, "grad", ag.tensor([7.0])),
    ]  # fmt: skip


@case
def tensors_that_are_only_asked_if_they_require_gradients() -> Any:
    v, layer = ag.ones(1), nn.Linear(1, 1)
    return lambda a: a * (2.0 if v.requires_grad else 3.0) * sum(1.0 for p in layer.parameters() if p.requires_grad), [
        v.requires_grad_, lambda: layer.bias.requires_grad_(False),
    ]  # fmt: skip


# ---------------------------------------------------------------- modules


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

        from tests.compiler.reads_of_attributes import GLOBAL as within

        return a * math.pi * within["imported"]

    GLOBAL["imported"] = 2.0
    return f, [entry(GLOBAL, "imported", 3.0)]
