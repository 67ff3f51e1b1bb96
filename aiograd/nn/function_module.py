"""FunctionModule: a function of `aiograd.nn.functional` as a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, dataclass_transform

from aiograd.errors import ArgumentError
from aiograd.nn.functional.documentation import entries_of, put_behind_first_line, summary_of
from aiograd.nn.module import Module

#: arguments of PyTorch's classes that no function takes
_NOT_TAKEN = {
    "inplace": "    inplace: False; True is refused, since gradients need the values.",
    "return_indices": "    return_indices: False; True is refused, since indices are there for lines and images only.",
}


@dataclass_transform(field_specifiers=(field,))
class FunctionModule(Module):
    """A function of `aiograd.nn.functional` as a module: its fields are settings of the function, passed to it by name.

    A subclass names the function and declares the settings, as a dataclass does. The function's docstring gives the class its Args and completes the
    first line of its docstring.

    Attributes:
        function: the function, of the inputs and the settings.
    """

    function: ClassVar[Callable[..., Any]]
    #: defaults of the settings by name
    _settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init_subclass__(cls, *, function: Callable[..., Any] | None = None) -> None:
        if function is None:  # it only inherits
            return
        dataclass(eq=False, repr=False, match_args=False)(cls)
        defaults = {each.name: each.default for each in fields(cls)}  # type: ignore[arg-type]
        for name in defaults.keys() & vars(cls).keys():  # settings are attributes of instances only
            delattr(cls, name)
        taken = inspect.signature(function).parameters
        cls.function = staticmethod(function)
        cls._settings = MappingProxyType({name: default for name, default in defaults.items() if name in taken})
        refused = (text for name, text in _NOT_TAKEN.items() if name in defaults.keys() - taken)
        entries = [*entries_of(function.__doc__ or "", cls._settings), *refused]
        put_behind_first_line(cls, "\n".join(["Args:", *entries]) if entries else "", summary_of(function))

    def __post_init__(self) -> None:
        refuse_inplace(type(self).__name__, getattr(self, "inplace", False))

    def _call(self, *inputs: Any, **more: Any) -> Any:
        return self.function(*inputs, **{name: getattr(self, name) for name in self._settings}, **more)

    def forward(self, input: Any) -> Any:
        return self._call(input)

    def extra_repr(self) -> str:
        values = ((name, getattr(self, name), default) for name, default in self._settings.items())
        return ", ".join(f"{name}={value!r}" for name, value, default in values if value is not None or default is not None)


def refuse_inplace(name: str, inplace: Any) -> None:
    """Raise if a module is asked to write its result over its input."""
    if inplace is not False:
        raise ArgumentError(f"{name}(inplace={inplace!r}): leave it out; gradients need the values, so overwriting the input would save no memory")
