"""How calls are named in messages and spans."""

from __future__ import annotations

from typing import Any

from aiograd.distributed.messages.library import CallMethod, CreateObject
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.rpc.codec import WireReference
from aiograd.errors import ArgumentTypeError, DeadlineError


def late(error: DeadlineError, what: str) -> DeadlineError:
    """The error with the name of the function; a DeadlineError that the function itself raised is returned as it is."""
    return error if error.path else DeadlineError(f"{what}: {error}")


def label(function: str, args: list[Any]) -> str:
    """The name of the called function for messages and spans; for functions of references, the class or method behind them.

    Args:
        function: as in the message.
        args: of any types and any number: they are not checked yet.
    """
    if not function.startswith("aiograd.reference."):
        return function
    first, method = (*args, None, None)[:2]
    if function == CreateObject.form.name and isinstance(first, str):
        return f"{first:.80}"
    if isinstance(first, RemoteRef | WireReference):
        method = method if function == CallMethod.form.name else function.rpartition(".")[2]
        if isinstance(method, str):
            return f"{first.type_name:.80}.{method:.80}"
    return function


def name_of_class(what: str, cls: Any) -> str:
    """The name of a class that a peer exposes.

    Args:
        what: the function that got it, for the error.
        cls: the class, or its name.

    Raises:
        ArgumentTypeError: it is neither.
    """
    name = getattr(cls, "__name__", cls)
    if not isinstance(name, str):
        raise ArgumentTypeError(f"{what}: expected a class that the worker's service exposes, or its name, found {type(cls).__name__}")
    return name


def named(function: str, args: list[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments as the caller knows them."""
    if function in (CreateObject.form.name, CallMethod.form.name):
        args, kwargs = args[-2:]
    return [*((f"argument {i}", arg) for i, arg in enumerate(args)), *((f"argument {name!r}", arg) for name, arg in kwargs.items())]
