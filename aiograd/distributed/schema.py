"""Schema: the parameters of an exposed function and their types, read from its signature and annotations once, when it is exposed.

Source: the annotations are the schema, as in FastAPI and msgspec; here only the closed set of types that can be sent.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiograd.distributed.objects.references import RemoteRef
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.tensors.core import TensorCore
from aiograd.tensors.tensor import Tensor

#: the exact types that arrive: an annotation that names a subclass would accept nothing
SENDABLE = frozenset((type(None), bool, int, float, complex, str, bytes, list, tuple, dict, Tensor, TensorCore, RemoteRef))
#: annotations that accept everything
_ANYTHING = (Any, object)
ALLOWED = "None, bool, int, float, complex, str, bytes, list, tuple, dict, Tensor, RemoteRef and unions of them"


class Schema:
    """The parameters of one function.

    Args:
        name: under which the function is exposed, for messages.
        function: the function with the signature; `is_method` leaves out the first parameter.

    Raises:
        ArgumentError: an annotation of a parameter without a default names a type that cannot be sent, or the function has no signature.
    """

    __slots__ = ("name", "signature", "annotations", "_plain", "_required")

    def __init__(self, name: str, function: Callable[..., Any], *, is_method: bool = False) -> None:
        self.name: str = name
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            raise ArgumentError(f"exposing {name}: Python knows no signature of it; wrap it in a function of your own") from None
        if is_method:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        self.signature: inspect.Signature = signature
        hints = _hints(function)
        self.annotations: dict[str, Any] = {}
        for parameter in signature.parameters.values():
            hint = hints.get(parameter.name, parameter.annotation)
            if hint is inspect.Parameter.empty or hint in _ANYTHING or isinstance(hint, (str, typing.ForwardRef, typing.TypeVar)):
                continue
            if parameter.default is parameter.empty:
                _check_annotation(name, parameter.name, hint)  # with a default it can be left out, and a value of that type cannot come
            self.annotations[parameter.name] = hint
        parameters = signature.parameters.values()
        is_plain = all(parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters)
        #: the names, if every parameter may be given by position; then most calls need no ``Signature.bind``
        self._plain = tuple(signature.parameters) if is_plain else None
        self._required = sum(parameter.default is parameter.empty for parameter in parameters)

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise unless the function can be called with these arguments.

        Raises:
            ArgumentTypeError: the arguments do not fit the parameters or their annotations.
        """
        if self._plain is not None and not kwargs and self._required <= len(args) <= len(self._plain):
            for name, value in zip(self._plain, args, strict=False):
                hint = self.annotations.get(name)
                if hint is not None and not matches(value, hint):
                    raise self._mismatch(name, value, hint)
            return
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentTypeError(f"calling {self.name}{self._shown()}: {error}") from None
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
                    raise self._mismatch(name, each, hint)

    def _mismatch(self, name: str, value: Any, hint: Any) -> ArgumentTypeError:
        text = f"calling {self.name}: argument {name!r} is {_describe(value)}; expected {_name(hint)}"
        try:
            _check_annotation(self.name, name, hint)
        except ArgumentError:
            text += "; not every value of that can be sent, so leave it out"
        return ArgumentTypeError(text)

    def _shown(self) -> inspect.Signature:
        """The signature as peers may see it: types by their names, and no values of defaults."""
        empty = inspect.Parameter.empty
        parameters = [
            parameter.replace(
                annotation=empty if parameter.annotation is empty else _Shown(_name(self.annotations.get(parameter.name, parameter.annotation))),
                default=empty if parameter.default is empty else _Shown("..."),
            )
            for parameter in self.signature.parameters.values()
        ]
        return inspect.Signature(parameters)


class _Shown:
    """Placeholder for a default value in a signature that is shown to peers."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def matches(value: Any, hint: Any) -> bool:
    """True if a received value fits an annotation."""
    if hint in _ANYTHING:
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
        return inspect.isclass(hint) and hint in SENDABLE and isinstance(value, hint)
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, option) for option in inner)
    if origin is typing.Literal:
        return any(value.__class__ is option.__class__ and value == option for option in inner)
    if origin is typing.Annotated:
        return matches(value, inner[0])
    if not inner:  # typing.List and the like
        return value.__class__ is origin
    if origin is dict:
        return value.__class__ is dict and all(matches(key, inner[0]) and matches(item, inner[1]) for key, item in value.items())
    if origin is tuple and not (len(inner) == 2 and inner[1] is Ellipsis):
        return value.__class__ is tuple and len(value) == len(inner) and all(map(matches, value, inner))
    return value.__class__ is origin and all(matches(item, inner[0]) for item in value)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target: Any = function
    if inspect.isclass(function):
        target = function.__new__ if function.__init__ is object.__init__ else function.__init__
    elif not inspect.isroutine(function):
        target = getattr(type(function), "__call__", function)  # noqa: B004 - not a test: an object that is called like a function
    names = getattr(inspect.unwrap(target), "__globals__", {})
    hints: dict[str, Any] = {}
    for name, hint in getattr(target, "__annotations__", {}).items():
        with contextlib.suppress(Exception):  # a name that exists for type checkers only: this parameter takes every value that can be sent
            hints.update(typing.get_type_hints(types.SimpleNamespace(__annotations__={name: hint}), names))
    return hints


def _check_annotation(function: str, parameter: str, hint: Any) -> None:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return
    if origin is not None:
        if origin not in (typing.Union, types.UnionType, typing.Annotated, list, tuple, dict):
            raise ArgumentError(f"exposing {function}: parameter {parameter!r} is annotated {_name(hint)}; only {ALLOWED} can be sent")
        inner = typing.get_args(hint)
        if origin is dict and inner and inner[0] is not str and inner[0] not in _ANYTHING:
            raise ArgumentError(f"exposing {function}: parameter {parameter!r} is annotated {_name(hint)}; the keys of a dict that is sent are str")
        for option in inner[:1] if origin is typing.Annotated else inner:
            if option is not Ellipsis:
                _check_annotation(function, parameter, option)
        return
    if hint is None or hint in _ANYTHING:
        return
    if not inspect.isclass(hint) or hint not in SENDABLE:
        raise ArgumentError(f"exposing {function}: parameter {parameter!r} is annotated {_name(hint)}; only {ALLOWED} can be sent")


def _name(hint: Any) -> str:
    if isinstance(hint, str):
        return hint
    return hint.__name__ if inspect.isclass(hint) and typing.get_origin(hint) is None else str(hint).replace("typing.", "")


def _describe(value: Any) -> str:
    return f"a Tensor of shape {list(value.shape)}" if isinstance(value, TensorCore) else f"{type(value).__name__}"
