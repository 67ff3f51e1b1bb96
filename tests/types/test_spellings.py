"""The stub of the array functions, and the signatures that it and the stub of Tensor's methods declare."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

from aiograd.array_functions import public
from aiograd.array_functions.names import _translated, parameters_of
from tests.function_stub import ELSEWHERE, FUNCTIONS, NAMESPACES, namespace_stub, stub, stubs
from tests.spellings import spellings

PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def texts(name: str, function: Any) -> list[str]:
    return [str(each) for each in spellings(name, inspect.signature(function))]


def test_the_stub_declares_the_functions_that_are_there() -> None:
    for path, text in stubs().items():
        assert path.read_text(encoding="utf-8") == text, "run: python -m tests.function_stub"


def test_the_stub_has_every_name() -> None:
    found = set[str]()
    for statement in ast.parse(stub()).body:
        if isinstance(statement, ast.ImportFrom):
            found |= {alias.asname for alias in statement.names if alias.asname is not None}
        elif isinstance(statement, ast.FunctionDef):
            found.add(statement.name)
    assert found == {name for name in vars(public) if name.isidentifier() and name[0] != "_"} - ELSEWHERE  # pytest adds other names


@pytest.mark.parametrize("name", NAMESPACES)
def test_the_stub_of_a_namespace_has_every_name(name: str) -> None:
    found = set[str]()
    for statement in ast.parse(namespace_stub(name)).body:
        if isinstance(statement, ast.ImportFrom):
            found |= {alias.asname for alias in statement.names if alias.asname is not None}
        elif isinstance(statement, ast.FunctionDef):
            found.add(statement.name)
    assert found == {*getattr(public, name).__all__}


def test_names_of_pytorch_and_of_numpy_make_signatures_of_their_own() -> None:
    def var(x, /, axis=None, correction=0.0, keepdims=False): ...  # type: ignore[no-untyped-def]

    assert texts("var", var) == [
        "(x, /, axis=None, correction=0.0, keepdims=False)",
        "(x, /, dim=None, unbiased=0.0, keepdim=False)",
        "(x, /, axis=None, ddof=0.0, keepdims=False)",
    ]


def test_what_is_by_position_alone_can_be_given_by_another_name() -> None:
    def index_select(x, axis, indices, /): ...  # type: ignore[no-untyped-def]

    def permute(self, *axes): ...  # type: ignore[no-untyped-def]

    assert texts("index_select", index_select) == ["(x, axis, indices, /)", "(x, /, dim, index)"]
    assert texts("permute", permute) == ["(self, *axes)", "(self, *, dims)"]


def test_some_functions_name_axes_in_the_plural() -> None:
    def function(x, /, axis=None): ...  # type: ignore[no-untyped-def]

    assert texts("flip", function)[1:] == ["(x, /, dims=None)"]
    assert texts("sum", function)[1:] == ["(x, /, dim=None)"]

    def transform(x, /, axes=None): ...  # type: ignore[no-untyped-def]

    assert texts("permute", transform)[1:] == ["(x, /, dims=None)"]
    assert texts("fftn", transform)[1:] == ["(x, /, dim=None)"]


def test_names_of_one_function_come_first() -> None:
    def transpose(x, /, axes=None, axis2=None): ...  # type: ignore[no-untyped-def]

    assert texts("transpose", transpose)[1:] == ["(x, /, dim0=None, dim1=None)"]


def test_a_shape_may_be_several_ints() -> None:
    def zeros(shape, dtype=None, *, device=None): ...  # type: ignore[no-untyped-def]

    assert texts("zeros", zeros)[1:] == ["(size, dtype=None, *, device=None)", "(*shape: 'int', dtype=None, device=None)"]


def test_a_function_without_other_names_has_one_signature() -> None:
    def exp(x, /): ...  # type: ignore[no-untyped-def]

    assert texts("exp", exp) == ["(x, /)"]


def test_each_signature_is_one_by_which_the_function_can_be_called() -> None:
    for name, accepting in FUNCTIONS.items():
        function = inspect.unwrap(accepting)
        own, *others = spellings(function.__name__, inspect.signature(function))
        assert others, name
        for spelled in others:
            plain = [each.kind in PLACED and each.name in own.parameters for each in spelled.parameters.values()]
            leading = [*plain, False].index(False)
            renamed = {each: f"given as {each}" for each in spelled.parameters if each not in own.parameters}
            args, kwargs = _translated(function.__name__, parameters_of(function), tuple(range(leading)), {**renamed})
            bound = own.bind_partial(*args, **kwargs)
            assert {str(value) for value in [*bound.args, *bound.kwargs.values()]} >= {*renamed.values()}, name
