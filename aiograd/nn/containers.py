"""Modules made of modules.

Note [Sequences with coroutines in them]
    `Sequential` calls its children one after the other without awaiting anything, until one returns a coroutine; from there on it is a
    coroutine itself. A Tensor is awaitable too, so the test is for coroutine objects and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar, overload

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.nn.module import Module

V = TypeVar("V")


class ModuleList(Module):
    """A list of modules, which are registered under their positions.

    Args:
        modules: the first ones.

    >>> layers = ag.nn.ModuleList([ag.nn.Linear(2, 2), ag.nn.ReLU()])
    >>> layers.append(ag.nn.Linear(2, 1))
    ModuleList(
      (0): Linear(in_features=2, out_features=2, bias=True)
      (1): ReLU()
      (2): Linear(in_features=2, out_features=1, bias=True)
    )
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self.extend(modules)

    def _items(self) -> list[Module]:
        return [value for name, value in self.__dict__.items() if name.isdecimal()]

    def _replace(self, modules: list[Module]) -> None:
        for module in modules:
            if not isinstance(module, Module):
                raise ArgumentTypeError(f"{type(self).__name__}: expected Modules, found {type(module).__name__}")
        for name in [name for name in self.__dict__ if name.isdecimal()]:
            del self.__dict__[name]
        self.__dict__.update({str(i): module for i, module in enumerate(modules)})

    def __len__(self) -> int:
        return len(self._items())

    def __iter__(self) -> Iterator[Module]:
        return iter(self._items())

    def __contains__(self, module: object) -> bool:
        return any(own is module for own in self._items())

    @overload
    def __getitem__(self, index: int) -> Module: ...
    @overload
    def __getitem__(self, index: slice) -> ModuleList: ...
    def __getitem__(self, index: int | slice) -> Module | ModuleList:
        items = self._items()
        if isinstance(index, slice):
            return self._of(items[index])
        self._check_index(index, len(items))
        return items[index]

    def _of(self, modules: list[Module]) -> ModuleList:
        return type(self)(modules)

    def __setitem__(self, index: int, module: Module) -> None:
        items = self._items()
        self._check_index(index, len(items))
        items[index] = module
        self._replace(items)

    def __delitem__(self, index: int | slice) -> None:
        items = self._items()
        if not isinstance(index, slice):
            self._check_index(index, len(items))
        del items[index]
        self._replace(items)

    def _check_index(self, index: int, length: int) -> None:
        if not -length <= index < length:
            raise IndexError(f"{type(self).__name__}: index {index} of {length} modules")

    def append(self, module: Module) -> ModuleList:
        """Add one at the end; returns the list.

        Args:
            module: the module.

        Returns:
            The list itself.
        """
        self._replace([*self._items(), module])
        return self

    def extend(self, modules: Iterable[Module]) -> ModuleList:
        """Add several at the end; returns the list.

        Args:
            modules: the modules.

        Returns:
            The list itself.
        """
        self._replace([*self._items(), *modules])
        return self

    def insert(self, index: int, module: Module) -> None:
        """Add one before position `index`.

        Args:
            index: as of ``list.insert``.
            module: the module.
        """
        items = self._items()
        items.insert(index, module)
        self._replace(items)


class Sequential(ModuleList):
    """Modules called one after the other, each with the result of the one before.

    The result is a coroutine where one of the modules returned one: see Note [Sequences with coroutines in them].

    Args:
        modules: in order; or one mapping of names to modules.

    >>> model = ag.nn.Sequential(ag.nn.Linear(3, 8), ag.nn.ReLU(), ag.nn.Linear(8, 1))
    >>> model(ag.ones(5, 3)).shape
    (5, 1)
    >>> model[1]
    ReLU()
    """

    def __init__(self, *modules: Module | Mapping[str, Module]) -> None:
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            self.extend(modules)  # type: ignore[arg-type]

    def _items(self) -> list[Module]:
        return [value for value in self.__dict__.values() if isinstance(value, Module)]

    def _replace(self, modules: list[Module]) -> None:
        names = [name for name, value in self.__dict__.items() if isinstance(value, Module)]
        if any(not name.isdecimal() for name in names):
            raise ArgumentError("Sequential with named modules cannot be changed like a list: assign the attribute, or use add_module()")
        super()._replace(modules)

    def _of(self, modules: list[Module]) -> ModuleList:
        return Sequential(*modules)

    def forward(self, x: Any) -> Any:
        """Apply every module in turn.

        Args:
            x: the argument of the first module.

        Returns:
            The result of the last one, or a coroutine of it.
        """
        modules = self._items()
        for i, module in enumerate(modules):
            x = module(x)
            if inspect.iscoroutine(x):
                return _rest(x, modules[i + 1 :])
        return x


async def _rest(pending: Coroutine[Any, Any, Any], modules: list[Module]) -> Any:
    x = await pending
    for module in modules:
        x = module(x)
        if inspect.iscoroutine(x):
            x = await x
    return x


class NamedValues(Module, Generic[V]):
    """Base of modules that are dicts of values of one class."""

    _kind: ClassVar[type]

    def _items(self) -> dict[str, V]:
        return {name: value for name, value in self.__dict__.items() if isinstance(value, self._kind)}  # type: ignore[misc]

    def __getitem__(self, name: str) -> V:
        try:
            return self._items()[name]
        except KeyError:
            raise KeyError(f"{type(self).__name__} has no {name!r}; it has {', '.join(self._items()) or 'nothing'}") from None

    def __delitem__(self, name: str) -> None:
        self[name]
        del self.__dict__[name]

    def __len__(self) -> int:
        return len(self._items())

    def __iter__(self) -> Iterator[str]:
        return iter(self._items())

    def __contains__(self, name: object) -> bool:
        return name in self._items()

    def keys(self) -> Iterable[str]:
        """The names, in order."""
        return self._items().keys()

    def values(self) -> Iterable[V]:
        """The values, in order."""
        return self._items().values()

    def items(self) -> Iterable[tuple[str, V]]:
        """Pairs of name and value, in order."""
        return self._items().items()


class ModuleDict(NamedValues[Module]):
    """Modules by name, with ``keys``, ``values`` and ``items`` of a dict.

    Args:
        modules: the first ones.

    >>> heads = ag.nn.ModuleDict({"left": ag.nn.Linear(2, 1), "right": ag.nn.Linear(2, 3)})
    >>> heads["right"](ag.ones(4, 2)).shape
    (4, 3)
    """

    _kind = Module

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        self.update(modules or {})

    def __setitem__(self, name: str, module: Module) -> None:
        self.add_module(name, module)

    def update(self, modules: Mapping[str, Module]) -> None:
        """Add or replace several.

        Args:
            modules: modules by name.
        """
        for name, module in modules.items():
            self.add_module(name, module)
