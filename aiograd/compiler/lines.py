"""The user's lines, for errors and comments: by their text, and by file and number."""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import sys
from types import FunctionType, MethodType
from typing import Any

_PACKAGE = "aiograd"
_PREFIX = f"{_PACKAGE}."


def user_line() -> tuple[str, str]:
    """File and line of the innermost frame that is not the package's, and the line's text."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_of_package(frame):
        frame = frame.f_back
    return described_line(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


def plain_function(function: Any) -> FunctionType | None:
    """The ``def`` of a function, method, module or other callable; None for one without."""
    plain = inspect.unwrap(function)
    while isinstance(plain, functools.partial):
        plain = inspect.unwrap(plain.func)
    if not isinstance(plain, (FunctionType, MethodType)):
        plain = getattr(plain, "forward", inspect.getattr_static(type(plain), "__call__", None))
    plain = getattr(plain, "__func__", plain)
    return plain if isinstance(plain, FunctionType) else None


def defined_at(function: Any) -> str:
    """File and line of a function's definition."""
    plain = plain_function(function)
    return "" if plain is None else described_line(plain.__code__.co_filename, plain.__code__.co_firstlineno, plain.__globals__)[0]


def is_of_package(frame: Any) -> bool:
    """True if a frame is of the package's own code."""
    name = frame.f_globals.get("__name__", "")
    return bool(name == _PACKAGE or name.startswith(_PREFIX))


def described_line(file: str, number: int, names: dict[str, Any]) -> tuple[str, str]:
    """A line as ``file:number``, and its text."""
    return f"{file.rpartition('/')[2]}:{number}", linecache.getline(file, number, names).strip()


def quoted(place: str, line: str) -> str:
    """A line of the user for an error: by its place, and by its text where there is one."""
    return f"{place}: `{line}`" if line else place


@functools.lru_cache(256)
def async_block(code: Any) -> int | None:
    """The line of the first ``async with`` or ``async for`` of a function; None: it has none."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("BEFORE_ASYNC_WITH", "GET_AITER"):
            positions = instruction.positions
            return code.co_firstlineno if positions is None or positions.lineno is None else positions.lineno
    return None
