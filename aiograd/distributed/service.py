"""Service: the functions and classes of a worker that peers may use, and nothing else: there is no import by name and no sending of code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from aiograd.distributed.schema import Schema
from aiograd.errors import ArgumentError, ArgumentTypeError, NotExposedError

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])

#: prefix of the names that are reserved for the library
RESERVED = "aiograd."


class Exposed:
    """A function that others may call, or a method of an object that they hold a reference to."""

    __slots__ = ("name", "function", "schema", "is_async")

    def __init__(self, name: str, function: Callable[..., Any], schema: Schema) -> None:
        self.name: str = name
        self.function: Callable[..., Any] = function
        self.schema: Schema = schema
        #: True if it runs on the loop; other functions, constructors among them, run on the executor
        self.is_async: bool = not inspect.isclass(function) and (
            inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
        )


class ExposedClass:
    """A class that peers may make instances of and hold references to."""

    __slots__ = ("name", "cls", "schema", "_methods")

    def __init__(self, name: str, cls: type[Any]) -> None:
        self.name: str = name
        self.cls: type[Any] = cls
        self.schema: Schema = Schema(name, cls)
        self._methods: dict[str, Schema] = {}

    def method(self, instance: Any, name: str) -> Exposed:
        """A public method of an instance.

        Raises:
            NotExposedError: the class has no such method, or it is private.
        """
        schema = self._schema(name)  # first: getattr would run a property
        return Exposed(schema.name, getattr(instance, name), schema)

    def _schema(self, name: str) -> Schema:
        schema = self._methods.get(name)
        if schema is None:
            function = inspect.getattr_static(self.cls, name, None)
            is_public = not name.startswith("_") or name == "__call__"
            if not is_public or (not isinstance(function, (staticmethod, classmethod)) and not inspect.isfunction(function)):
                raise NotExposedError(f"{self.name} has no public method {name!r}; methods that start with an underscore and attributes are private")
            bound = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
            schema = self._methods[name] = Schema(f"{self.name}.{name}", bound, is_method=not isinstance(function, staticmethod))
        return schema


class Service:
    """Functions and classes that a worker exposes to other workers.

    ::

        service = dist.Service()

        @service.function
        def square(x: ag.Tensor) -> ag.Tensor:
            return x * x

        @service.reference
        class Counter:
            def __init__(self, start: int = 0) -> None:
                self._count = start

            async def increase(self) -> int:
                self._count += 1
                return self._count

    A ``def`` runs on the executor of the worker, an ``async def`` on its loop. Either may use `current_worker` to call further workers and
    `current_context` for the caller's gradients. Parameters that are annotated accept only values of the annotation: None, bool, int, float,
    complex, str, bytes, list, tuple, dict with str keys, Tensor, RemoteRef and unions of them. A parameter of another type needs a default, and
    callers leave it out. An exception of a function reaches its caller as
    `RemoteError`, with type, message and worker; the traceback stays in the worker's log, ``logging.getLogger("aiograd.distributed")``, as a warning.

    >>> service = dist.Service()
    >>> @service.function
    ... def square(x: ag.Tensor) -> ag.Tensor:
    ...     return x * x
    >>> service
    <Service: square>
    """

    def __init__(self) -> None:
        self._functions: dict[str, Exposed] = {}
        self._classes: dict[str, ExposedClass] = {}

    @overload
    def function(self, function: F, /) -> F: ...

    @overload
    def function(self, name: str, /) -> Callable[[F], F]: ...

    def function(self, function: Any, /) -> Any:
        """Expose a function under its own name, or under another: ``@service.function("name")``. Returns the function itself.

        Args:
            function: the function, or the name to expose it under.

        Returns:
            The function itself, or a decorator.

        Raises:
            ArgumentTypeError: it is no function. ArgumentError: the name is taken or reserved, or an annotation names a type that cannot be sent.
        """
        if isinstance(function, str):
            return lambda given: self._add(function, given)
        return self._add(getattr(function, "__name__", None), function)

    def _add(self, name: str | None, function: Any) -> Any:
        if not callable(function) or inspect.isclass(function):
            raise ArgumentTypeError(f"service.function: expected a function, found {_what(function)}; expose a class with service.reference")
        self._check_name(name, self._functions)
        self._functions[str(name)] = Exposed(str(name), function, Schema(str(name), function))
        return function

    def reference(self, cls: C) -> C:
        """Let others make instances of a class with `Worker.remote` and call their public methods. Returns the class itself.

        Public are methods, inherited ones too, that do not begin with an underscore, and ``__call__``. Attributes are private.

        Args:
            cls: the class.

        Returns:
            The class.

        Raises:
            ArgumentTypeError: it is no class. ArgumentError: as for `function`.
        """
        if not inspect.isclass(cls):
            raise ArgumentTypeError(f"service.reference: expected a class, found {_what(cls)}")
        self._check_name(cls.__name__, self._classes)
        self._classes[cls.__name__] = ExposedClass(cls.__name__, cls)
        return cls

    def _check_name(self, name: str | None, taken: Mapping[str, Any]) -> None:
        if not name or name == "<lambda>":
            raise ArgumentError("service: an exposed function needs a name; give one, as in @service.function('name')")
        if name.startswith(RESERVED):
            raise ArgumentError(f"service: names that begin with {RESERVED!r} are reserved, found {name!r}")
        if name in taken:
            raise ArgumentError(f"service: {name!r} is exposed already; choose another name")

    # ---------------------------------------------------------------- lookup by the worker

    def find_function(self, name: str) -> Exposed:
        """The function exposed under a name.

        Args:
            name: the name.

        Returns:
            The function with its schema.

        Raises:
            NotExposedError: there is none.
        """
        exposed = self._functions.get(name)
        if exposed is None:
            raise NotExposedError(f"no function {name[:80]!r} is exposed; expose it with @service.function where the worker's service is made")
        return exposed

    def find_class(self, name: str) -> ExposedClass:
        """The class exposed under a name.

        Args:
            name: the name.

        Returns:
            The class with its schema.

        Raises:
            NotExposedError: there is none.
        """
        exposed = self._classes.get(name)
        if exposed is None:
            raise NotExposedError(f"no class {name[:80]!r} is exposed; expose it with @service.reference where the worker's service is made")
        return exposed

    def class_of(self, value: object) -> ExposedClass | None:
        """The exposed class of an object; None if its class is not exposed.

        Args:
            value: any object.

        Returns:
            The class with its schema, or None.
        """
        exposed = self._classes.get(type(value).__name__)
        return exposed if exposed is not None and exposed.cls is type(value) else None

    @property
    def names(self) -> Sequence[str]:
        """The names of all exposed functions and classes, sorted."""
        return sorted([*self._functions, *self._classes])

    def __repr__(self) -> str:
        return f"<Service: {', '.join(self.names) or 'nothing exposed'}>"


def _what(value: object) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else type(value).__name__
