"""Parameters in lists and dicts that are modules, registered under their positions and names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aiograd.errors import ArgumentTypeError
from aiograd.nn.containers import NamedValues
from aiograd.nn.module import Module
from aiograd.nn.parameter import Parameter
from aiograd.tensors.core import TensorCore


def _as_parameter(what: str, value: Any) -> Parameter:
    if isinstance(value, Parameter):
        return value
    if isinstance(value, TensorCore):
        return Parameter(value, requires_grad=value.dtype.kind in "fc")
    raise ArgumentTypeError(f"{what}: expected Parameters or Tensors, found {type(value).__name__}")


def _described(named: Iterable[tuple[str, Parameter]]) -> str:
    return ", ".join(f"({name}): {p.dtype} {list(p.shape)}" for name, p in named)


class _ParameterContainer(Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentTypeError(f"{type(self).__name__} holds parameters and computes nothing: call a module that uses them")


class ParameterList(_ParameterContainer):
    """A list of parameters. Tensors that are put in become Parameters.

    Args:
        values: the first ones.

    >>> scales = ag.nn.ParameterList([ag.ones(2), ag.zeros(3)])
    >>> [p.shape for p in scales]
    [(2,), (3,)]
    """

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.extend(values)

    def _items(self) -> list[Parameter]:
        return [value for name, value in self.__dict__.items() if name.isdecimal()]

    def __len__(self) -> int:
        return len(self._items())

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._items())

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return ParameterList(self._items()[index])
        return self._items()[self._checked(index)]

    def __setitem__(self, index: int, value: Any) -> None:
        object.__setattr__(self, str(self._checked(index)), _as_parameter("ParameterList", value))

    def _checked(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"ParameterList: index {index} of {len(self)} parameters")
        return index % len(self)

    def append(self, value: Any) -> ParameterList:
        """Add one at the end; returns the list.

        Args:
            value: a Parameter or a Tensor.

        Returns:
            The list itself.
        """
        return self.extend([value])

    def extend(self, values: Iterable[Any]) -> ParameterList:
        """Add several at the end; returns the list.

        Args:
            values: Parameters or Tensors.

        Returns:
            The list itself.
        """
        found = [_as_parameter("ParameterList", value) for value in values]
        self.__dict__.update({str(i): value for i, value in enumerate(found, len(self))})
        return self

    def extra_repr(self) -> str:
        return _described((str(i), p) for i, p in enumerate(self))


class ParameterDict(_ParameterContainer, NamedValues[Parameter]):
    """Parameters by name, with ``keys``, ``values`` and ``items`` of a dict. Tensors that are put in become Parameters.

    Args:
        parameters: the first ones.

    >>> scales = ag.nn.ParameterDict({"left": ag.ones(2)})
    >>> scales["left"]
    Parameter containing:
    tensor([1., 1.], requires_grad=True)
    """

    _kind = Parameter

    def __init__(self, parameters: Mapping[str, Any] | None = None) -> None:
        self.update(parameters or {})

    def __setitem__(self, name: str, value: Any) -> None:
        self.register_parameter(name, _as_parameter("ParameterDict", value))

    def get(self, name: str, default: Any = None) -> Any:
        """The parameter of a name, or `default`.

        Args:
            name: the name.
            default: the value where there is none.

        Returns:
            The Parameter, or `default`.
        """
        return self._items().get(name, default)

    def pop(self, name: str) -> Parameter:
        """Take one out.

        Args:
            name: the name.

        Returns:
            The Parameter.
        """
        parameter = self[name]
        del self.__dict__[name]
        return parameter

    def update(self, parameters: Mapping[str, Any]) -> None:
        """Add or replace several; all of them, or none if one cannot be a parameter.

        Args:
            parameters: Parameters or Tensors by name.
        """
        found = {name: _as_parameter("ParameterDict", value) for name, value in parameters.items()}
        for name, value in found.items():
            self.register_parameter(name, value)

    def extra_repr(self) -> str:
        return _described(self.items())
