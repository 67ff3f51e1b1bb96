"""Texts of exceptions that are passed on, and the exceptions that futures carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def text_of(error: BaseException) -> str:
    """The text of an exception, whose ``__str__`` may raise: a message about an error must not take its place.

    Args:
        error: any exception.

    Returns:
        ``str(error)``, or what a traceback shows instead.
    """
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def summary_of(error: BaseException, length: int = 200) -> str:
    """The class of an exception and the first line of its text.

    Args:
        error: any exception.
        length: the most characters of the text.

    Returns:
        ``"ValueError: it is odd"``, or ``"ValueError"`` where there is no text.
    """
    text = text_of(error).split("\n", 1)[0][:length]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def for_future(error: BaseException, what: str) -> BaseException:
    """The exception for a future: a RuntimeError in the place of StopIteration, which asyncio refuses, so that the future would never be done.

    Args:
        error: any exception.
        what: the code that raised it, for the message.

    Returns:
        The error itself, or a RuntimeError of which it is the cause.
    """
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{what} raised StopIteration, which no future can carry")
    wrapped.__cause__ = error
    return wrapped


def call_for_future(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose outcome goes into a future; see `for_future`.

    Args:
        what: the function, for the message.
        function: called with `args`.
        args: its arguments.

    Returns:
        The result of the function.

    Raises:
        RuntimeError: the function raised StopIteration.
    """
    try:
        return function(*args)
    except StopIteration as error:
        raise for_future(error, what) from error
