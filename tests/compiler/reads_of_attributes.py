"""Functions that read attributes and globals, each with changes of these, for `test_reads`."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

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
