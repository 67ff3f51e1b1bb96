"""Schema: what an exposed function accepts, read from its signature and annotations once, when it is exposed.

Source: the annotations are the schema, as in FastAPI and msgspec; here only the closed set of types that can be sent.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiograd.distributed.references import RemoteRef
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.tensors.core import TensorCore

SENDABLE = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, TensorCore, RemoteRef)
ALLOWED = "None, bool, int, float, complex, str, bytes, list, tuple, dict, Tensor, RemoteRef and unions of them"


class Schema:
    """The parameters of one function.

    Args:
        name: under which the function is exposed, for messages.
        function: whose signature counts; the first parameter of a method is left out by `is_method`.

    Raises:
        ArgumentError: an annotation names a type that cannot be sent.
    """

    __slots__ = ("name", "signature", "annotations")

    def __init__(self, name: str, function: Callable[..., Any], *, is_method: bool = False) -> None:
        self.name = name
        signature = inspect.signature(function)
        if is_method:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        self.signature = signature
        hints = _hints(function)
        self.annotations: dict[str, Any] = {}
        for parameter in signature.parameters.values():
            hint = hints.get(parameter.name, parameter.annotation)
            if hint is inspect.Parameter.empty or hint is Any or isinstance(hint, (str, typing.TypeVar)):
                continue
            _check_annotation(name, parameter.name, hint)
            self.annotations[parameter.name] = hint

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise unless the function can be called with these arguments.

        Raises:
            ArgumentTypeError: it cannot.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentTypeError(f"calling {self.name}{self.signature}: {error}") from None
        if not self.annotations:
            return
        for name, value in bound.arguments.items():
            hint = self.annotations.get(name)
            if hint is None:
                continue
            kind = self.signature.parameters[name].kind
            values = value if kind is kind.VAR_POSITIONAL else value.values() if kind is kind.VAR_KEYWORD else (value,)
            for each in values:
                if not matches(each, hint):
                    raise ArgumentTypeError(f"calling {self.name}: argument {name!r} is {_describe(each)}; expected {_name(hint)}")


def matches(value: Any, hint: Any) -> bool:
    """Whether a value that was sent fits an annotation."""
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin is None:
        if hint is None or hint is types.NoneType:
            return value is None
        if hint is float:
            return value.__class__ in (float, int)
        if hint is complex:
            return value.__class__ in (complex, float, int)
        if hint in (int, str, bytes, list, tuple, dict, bool):
            return value.__class__ is hint
        return isinstance(value, hint)
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, option) for option in inner)
    if origin is typing.Literal:
        return any(value.__class__ is option.__class__ and value == option for option in inner)
    if origin is typing.Annotated:
        return matches(value, inner[0])
    if origin is dict:
        return value.__class__ is dict and all(matches(item, inner[1]) for item in value.values())
    if origin is tuple and not (len(inner) == 2 and inner[1] is Ellipsis):
        return value.__class__ is tuple and len(value) == len(inner) and all(map(matches, value, inner))
    return value.__class__ is origin and all(matches(item, inner[0]) for item in value)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(target)
    except Exception:  # names that exist for type checkers only: these parameters take whatever can be sent
        return {}


def _check_annotation(function: str, parameter: str, hint: Any) -> None:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return
    if origin is not None:
        if origin not in (typing.Union, types.UnionType, typing.Annotated, list, tuple, dict):
            raise ArgumentError(f"exposing {function}: parameter {parameter!r} is annotated {_name(hint)}; only {ALLOWED} can be sent")
        inner = typing.get_args(hint)
        for option in inner[:1] if origin is typing.Annotated else inner:
            if option is not Ellipsis:
                _check_annotation(function, parameter, option)
        return
    if hint is Any or hint is None:
        return
    if not (inspect.isclass(hint) and issubclass(hint, SENDABLE)) or (issubclass(hint, (int, str)) and hint not in (int, str, bool)):
        raise ArgumentError(f"exposing {function}: parameter {parameter!r} is annotated {_name(hint)}; only {ALLOWED} can be sent")


def _name(hint: Any) -> str:
    return hint.__name__ if inspect.isclass(hint) and typing.get_origin(hint) is None else str(hint).replace("typing.", "")


def _describe(value: Any) -> str:
    return f"a Tensor of shape {list(value.shape)}" if isinstance(value, TensorCore) else f"{type(value).__name__}"
