"""The user's line that led here, for warnings, profiles and coroutines that are never awaited.

Note [A forgotten await]
    Python warns when a coroutine is never awaited: it names the coroutine and the line that runs when it is freed. For a public ``def`` that
    returns the coroutine of an inner function the name is the inner function's, and for a coroutine in a variable the line is any that comes
    later. So such functions return ``called(coroutine, name)``: a plain coroutine still, so that everything that takes one takes it. Its name is
    the public function's, and as text, which is made when it is asked for, the name has the line of the call. A public ``async def`` has its own
    name already and is left as it is: around it a ``def`` would no longer be what ``inspect.iscoroutinefunction`` looks for.
"""

from __future__ import annotations

import opcode
import sys
import warnings
from collections.abc import Coroutine
from types import CodeType, CoroutineType, FrameType
from typing import Any, TypeVar

#: packages; their frames are skipped; asyncio's lie between the code of a task and the line that runs the loop
_PASSED_OVER = frozenset({"aiograd", "asyncio"})
#: a part of the package that only uses it, as a user would
_USERS = "aiograd.running.cli.demo"

T = TypeVar("T")
_getframe = sys._getframe
_CACHE, _GET_AWAITABLE = (opcode.opmap.get(name, -1) for name in ("CACHE", "GET_AWAITABLE"))


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the innermost line outside of the package that led here.

    Args:
        message: text of the warning.
        category: class of the warning.
    """
    frame = _users(sys._getframe(1)) or sys._getframe(1)
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry)


def user_line() -> str | None:
    """``file:line`` of the innermost line outside of the package that led here; None where there is none."""
    frame = _users(sys._getframe(1))
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def short_place(file: str, line: int | str) -> str:
    """The last two parts of a path, and a line: enough to find a place, and nothing of the machine."""
    return f"{'/'.join(file.replace(chr(92), '/').split('/')[-2:])}:{line}"


class CallName(str):
    """Name of the public function that returned a coroutine; as text, with the line of the call. See Note [A forgotten await]."""

    __slots__ = ("_code", "_instruction")

    _code: CodeType
    _instruction: int

    def __str__(self) -> str:
        return f"{self[:]}, called at {self._code.co_filename}:{self._line()}"

    def _line(self) -> int:
        for start, end, line in self._code.co_lines():
            if start <= self._instruction < end and line is not None:
                return line
        return self._code.co_firstlineno


def called(coroutine: Coroutine[Any, Any, T], function: str) -> Coroutine[Any, Any, T]:
    """Let a coroutine that a public function is about to return say where that function was called, if it is never awaited.

    Args:
        coroutine: of an ``async def``, made and not begun.
        function: name of the public function, with its class.

    Returns:
        The same coroutine.
    """
    caller = _getframe(2)
    name = CallName(function)
    name._code, name._instruction = caller.f_code, caller.f_lasti  # not the frame, which would keep its variables alive
    coroutine.__qualname__ = name  # type: ignore[attr-defined]
    return coroutine


def is_awaited() -> bool:
    """True if the function that is running was called in ``await function(...)``: the caller's next instruction awaits the result.

    For functions that return None, so that they can say so before they do anything. Elsewhere than in CPython it is False.
    """
    caller = _getframe(2)
    code, place = caller.f_code.co_code, caller.f_lasti + 2
    while code[place] == _CACHE:
        place += 2
    return code[place] == _GET_AWAITABLE


def type_found(value: object) -> str:
    """Type of a wrong argument, for error messages.

    Args:
        value: the argument.

    Returns:
        The name of its type; for a coroutine also that it is not awaited, and which call made it.
    """
    if isinstance(value, CoroutineType):
        return f"coroutine that is not awaited ({value.__qualname__!s}): write `await` before the call"
    return type(value).__name__


def _users(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in _PASSED_OVER or name.startswith(_USERS):
            return frame
        frame = frame.f_back
    return None
