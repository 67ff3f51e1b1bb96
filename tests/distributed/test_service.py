"""Services: what is exposed and what is not, and schemas: what exposed functions accept."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Dict, List, Literal, NamedTuple, Optional, Tuple, TypeVar, Union  # noqa: UP035 - users write these too

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.rpc.codec import WireReference
from aiograd.distributed.schema import Schema, matches
from aiograd.distributed.service import Exposed, Service
from aiograd.errors import ArgumentError, ArgumentTypeError, NotExposedError, RemoteError
from tests.distributed.workers import workers

if TYPE_CHECKING:
    from decimal import Decimal

T = TypeVar("T")


def reference() -> RemoteRef:
    def unused(*_: Any) -> Any:
        raise NotImplementedError

    return RemoteRef(WireReference("b", b"i" * 16, b"e" * 16, "Thing"), unused, unused, unused)


class Point(NamedTuple):
    x: float


# -------------------------------------------------------------------- exposing


def test_functions_are_exposed_under_their_name_or_another() -> None:
    service = Service()

    @service.function
    def square(x: ag.Tensor) -> ag.Tensor:
        return x * x

    @service.function("root.v2")
    def root(x: ag.Tensor) -> ag.Tensor:
        return x

    @service.reference
    class Thing:
        pass

    assert callable(square) and root.__name__ == "root", "the decorators return what they were given"
    assert service.find_function("square").function is square and service.find_function("root.v2").function is root
    assert service.find_class("Thing").cls is Thing
    assert list(service.names) == ["Thing", "root.v2", "square"] and repr(service) == "<Service: Thing, root.v2, square>"
    assert repr(Service()) == "<Service: nothing exposed>"
    for find in (service.find_function, service.find_class):
        with pytest.raises(NotExposedError, match=r"no (function|class) 'root' is exposed; expose it with @service"):
            find("root")
    with pytest.raises(NotExposedError) as caught:
        service.find_function("x" * 1000)
    assert len(str(caught.value)) < 300


def test_what_cannot_be_exposed() -> None:
    service = Service()
    service.function("taken")(lambda x: x)
    for expose, error, text in (
        (lambda: service.function(3), ArgumentTypeError, "expected a function, found int"),
        (lambda: service.function(Point), ArgumentTypeError, "expected a function, found the class Point; expose a class with service.reference"),
        (lambda: service.reference(len), ArgumentTypeError, "expected a class, found builtin_function_or_method"),
        (lambda: service.function(lambda x: x), ArgumentError, "needs a name"),
        (lambda: service.function(functools.partial(max, 1)), ArgumentError, "needs a name"),
        (lambda: service.function("")(lambda x: x), ArgumentError, "needs a name"),
        (lambda: service.function("aiograd.call")(lambda x: x), ArgumentError, "reserved"),
        (lambda: service.function("taken")(lambda x: x), ArgumentError, "'taken' is exposed already"),
        (lambda: service.function("min")(min), ArgumentError, "exposing min: Python knows no signature of it"),
    ):
        with pytest.raises(error, match=text):
            expose()
    assert list(service.names) == ["taken"]
    service.reference(Point)
    with pytest.raises(ArgumentError, match="'Point' is exposed already"):
        service.reference(Point)


def test_functions_know_where_they_run() -> None:
    async def on_loop() -> None: ...

    class Both:
        async def __call__(self) -> None: ...

        async def method(self) -> None: ...

    def exposed(function: Callable[..., Any]) -> Exposed:
        return Exposed("f", function, Schema("f", function))

    assert exposed(on_loop).is_async and exposed(Both()).is_async and exposed(Both().method).is_async
    assert not exposed(len).is_async and not exposed(Both).is_async, "a constructor is no coroutine function, whatever its instances are"


class Base:
    def inherited(self) -> str:
        return "inherited"


class Thing(Base):
    attribute = len
    nested = Point

    def __init__(self, start: int) -> None:
        self.start = start
        self.callback = lambda: "no"

    def add(self, n: int = 1) -> int:
        return self.start + n

    @staticmethod
    def shared(n: int) -> int:
        return n

    @classmethod
    def named(cls, n: int) -> str:
        return cls.__name__ * n

    @property
    def looks(self) -> str:
        raise AssertionError("a property was run")

    def __call__(self, x: int) -> int:
        return x

    def _private(self) -> None: ...

    def __secret(self) -> None: ...

    def _unfit(self, x: Decimal) -> None: ...

    def unfit(self, x: np.ndarray) -> None: ...


def test_methods_are_public_functions_of_the_class() -> None:
    service = Service()
    service.reference(Thing)
    exposed, thing = service.find_class("Thing"), Thing(3)
    exposed.schema.check([1], {})
    works = [("add", [4], 7), ("shared", [4], 4), ("named", [2], "ThingThing"), ("inherited", [], "inherited"), ("__call__", [1], 1)]
    for name, args, result in works:
        method = exposed.method(thing, name)
        method.schema.check(args, {})
        assert method.name == f"Thing.{name}" and method.function(*args) == result
        if args:
            with pytest.raises(ArgumentTypeError, match=f"calling Thing.{name}: argument .* is str; expected int"):
                method.schema.check(["x"], {})
    for name in ("_private", "_Thing__secret", "__init__", "__class__", "looks", "start", "callback", "attribute", "nested", "nothing", ""):
        with pytest.raises(NotExposedError, match="Thing has no public method"):
            exposed.method(thing, name)
    with pytest.raises(ArgumentError, match=r"exposing Thing.unfit: parameter 'x' is annotated ndarray"):
        exposed.method(thing, "unfit")
    assert service.class_of(thing) is exposed and service.class_of(Base()) is None and service.class_of(3) is None
    other = type("Thing", (), {})()
    assert service.class_of(other) is None, "another class of that name"


# -------------------------------------------------------------------- schemas


X = ag.tensor([1.0])


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [1, -5], [True, 1.0, None, "1"]),
        (bool, [True], [1, 0.0, None]),
        (float, [1.0, 1], [True, 1j, "1"]),
        (complex, [1j, 1.0, 1], [True, "1"]),
        (str, ["", "x"], [b"x", None]),
        (bytes, [b""], ["x"]),
        (None, [None], [0, False]),
        (list, [[], [1, "x"]], [(), None]),
        (tuple, [(), (1,)], [[]]),
        (dict, [{}, {"a": 1}], [[]]),
        (ag.Tensor, [X, ag.nn.Parameter([1.0])], [1.0, [X], None]),
        (RemoteRef, [reference()], [X, None]),
        (list[int], [[], [1, 2]], [[1.0], [True], (1,), 1]),
        (list[ag.Tensor], [[X]], [[X, None]]),
        (dict[str, ag.Tensor], [{}, {"a": X}], [{"a": 1}]),
        (dict[str, Any], [{"a": 1}], [[]]),
        (tuple[int, str], [(1, "x")], [(1,), (1, "x", 2), ("x", 1), [1, "x"]]),
        (tuple[int, ...], [(), (1, 2)], [(1, "x")]),
        (tuple[()], [()], [[]]),
        (int | None, [1, None], ["x"]),
        (Optional[int], [1, None], ["x"]),  # noqa: UP045
        (Union[int, list[str]], [1, ["x"]], [[1], "x"]),  # noqa: UP007
        (Literal["a", 1, None], ["a", 1, None], ["b", True, 1.0]),
        (Annotated[int, "seconds"], [1], ["x"]),
        (List, [[], [1]], [()]),  # noqa: UP006
        (Dict, [{}, {"a": 1}], [[]]),  # noqa: UP006
        (Tuple, [(), (1, 2)], [[]]),  # noqa: UP006
        (List[int], [[1]], [["x"]]),  # noqa: UP006
        (list[dict[str, tuple[ag.Tensor, int] | None]], [[{"a": (X, 1), "b": None}]], [[{"a": (1, X)}], [None]]),
        (Any, [1, None, X, [object()]], []),
        (object, [1, None, X], []),
    ],
)
def test_annotations_say_what_is_accepted(hint: Any, good: list[Any], bad: list[Any]) -> None:
    def function(x): ...  # type: ignore[no-untyped-def]

    function.__annotations__ = {"x": hint}
    schema = Schema("function", function)
    for value in good:
        schema.check([value], {})
        schema.check([], {"x": value})
    for value in bad:
        with pytest.raises(ArgumentTypeError, match=r"calling function: argument 'x' is .*; expected "):
            schema.check([value], {})


@pytest.mark.parametrize(
    "hint",
    [
        np.ndarray, np.float32, ag.nn.Parameter, ag.nn.Module, Point, OrderedDict, Sequence[int], Mapping[str, int], Callable[[], int], set, set[int],
        type[int], bytearray, list[np.ndarray], int | set[int], dict[str, Point], tuple[ag.Tensor, object | np.ndarray], list[T],
    ],
)  # fmt: skip
def test_annotations_of_what_cannot_be_sent_are_refused_when_a_function_is_exposed(hint: Any) -> None:
    def function(x): ...  # type: ignore[no-untyped-def]

    function.__annotations__ = {"x": hint}
    with pytest.raises(ArgumentError, match=r"exposing function: parameter 'x' is annotated .*; only None, bool, int, .* can be sent"):
        Schema("function", function)


def test_a_dict_has_str_keys() -> None:
    def function(x: dict[int, ag.Tensor]) -> None: ...

    with pytest.raises(ArgumentError, match=r"parameter 'x' is annotated dict\[int, .*\]; the keys of a dict that is sent are str"):
        Schema("function", function)


def test_one_annotation_that_python_cannot_resolve_leaves_the_others_in_force() -> None:
    def function(x: Decimal, y: int, z: T, n: NotDefinedAnywhere) -> None:  # type: ignore[name-defined] # noqa: F821
        ...

    schema = Schema("function", function)
    assert set(schema.annotations) == {"y"}
    schema.check([object(), 1, object(), object()], {})
    with pytest.raises(ArgumentTypeError, match="argument 'y' is str"):
        schema.check([1, "x", 1, 1], {})


def test_all_kinds_of_parameters() -> None:
    def function(a: int, /, b: int = 2, *more: float, c: str, d: ag.Tensor | None = None, **rest: bool) -> None: ...

    schema = Schema("function", function)
    for args, kwargs in (([1], {"c": "x"}), ([1, 2, 3.0, 4], {"c": "x", "d": X, "e": True, "a": False}), ([1], {"b": 3, "c": "x", "d": None})):
        schema.check(args, kwargs)
    for args, kwargs, text in (
        ([], {"c": "x"}, "missing a required argument: 'a'"),
        ([1], {}, "missing a required argument: 'c'"),
        ([1], {"c": "x", "e": 1}, "argument 'rest' is int; expected bool"),
        ([1, 2, "x"], {"c": "x"}, "argument 'more' is str; expected float"),
        ([1, None], {"c": "x"}, "argument 'b' is NoneType; expected int"),
        ([1], {"c": "x", "d": [X]}, r"argument 'd' is list; expected .*Tensor \| None"),
        ([X], {"c": "x"}, r"argument 'a' is a Tensor of shape \[1\]; expected int"),
    ):
        with pytest.raises(ArgumentTypeError, match=text):
            schema.check(args, kwargs)


def test_what_is_shown_of_a_signature_holds_no_values() -> None:
    def function(a: ag.Tensor, b=5, *, token: str = "hunter2", size: list[int] | None = None):  # type: ignore[no-untyped-def] # noqa: S107
        ...

    with pytest.raises(ArgumentTypeError) as caught:
        Schema("function", function).check([], {})
    text = str(caught.value)
    assert text.startswith("calling function(a: Tensor, b=..., *, token: str = ..., size: list[int] | None = ...): missing")


def test_callable_objects_and_partial_functions() -> None:
    class Scale:
        def __call__(self, x: ag.Tensor, by: int) -> ag.Tensor:
            return x * by

    schema = Schema("scale", Scale())
    schema.check([X, 2], {})
    with pytest.raises(ArgumentTypeError, match="argument 'by' is str"):
        schema.check([X, "2"], {})
    partial = Schema("partial", functools.partial(Scale().__call__, by=2))
    partial.check([X], {})


def test_a_class_is_called_as_its_constructor_says() -> None:
    schema = Schema("Thing", Thing)
    schema.check([3], {})
    schema.check([], {"start": 3})
    for args in (["3"], [], [1, 2]):
        with pytest.raises(ArgumentTypeError, match="calling Thing"):
            schema.check(args, {})
    Schema("Base", Base).check([], {})

    class Made:
        def __new__(cls, n: int) -> Made:
            return super().__new__(cls)

    with pytest.raises(ArgumentTypeError, match="calling Made: argument 'n' is str; expected int"):
        Schema("Made", Made).check(["3"], {})


def test_matching_looks_at_classes_not_at_looks() -> None:
    class MyInt(int):
        pass

    assert not matches(MyInt(3), int) and not matches(Point(1.0), tuple) and not matches(OrderedDict(), dict)
    assert matches(ag.nn.Parameter([1.0]), ag.Tensor)


def test_a_parameter_that_cannot_be_sent_is_one_to_leave_out() -> None:
    service = dist.Service()

    def draw(
        n: int, generator: ag.Generator | None = None, how: Callable[[], int] = int, table: dict[int, str] | None = None, *, seed: int | set[int] = 0
    ) -> int:
        return n

    service.function(draw)
    service.reference(ag.nn.Linear)
    schema = service.find_function("draw").schema
    for kwargs in ({}, {"generator": None}, {"seed": 3}, {"table": {}}, {"table": None}):
        schema.check([1], kwargs)
    for kwargs in ({"generator": 3}, {"generator": "x"}, {"how": 3}, {"table": {"a": "b"}}, {"seed": [1]}):
        (name,) = kwargs
        with pytest.raises(ArgumentTypeError, match=rf"argument '{name}' is \w+; expected .*; not every value of that can be sent, so leave it out"):
            schema.check([1], kwargs)
    with pytest.raises(ArgumentError, match="only None, bool"):

        @service.function
        def needs(generator: ag.Generator | None) -> None: ...


async def test_a_module_of_the_library_can_be_exposed_as_it_is() -> None:
    service = dist.Service()
    service.reference(ag.nn.Linear)
    async with workers("a", "b", service=service) as (a, _):
        layer = await a.remote_module("b", ag.nn.Linear, 3, 2, bias=False)
        assert repr(layer) == "RemoteModule(Linear on b)"
        assert (await layer(ag.tensor([[1.0, 2.0, 3.0]]))).shape == (1, 2)
        with pytest.raises(RemoteError, match="^Error on Node b: Linear: ArgumentTypeError: calling Linear: argument 'generator' is int"):
            await a.remote_module("b", "Linear", 3, 2, generator=3)
