"""The user's line that led here, for warnings and profiles."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

#: packages whose frames are skipped; asyncio's lie between the code of a task and the line that runs the loop
_PASSED_OVER = frozenset({"aiograd", "asyncio"})
#: a part of the package that only uses it, as a user would
_USERS = "aiograd.demo"


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


def _users(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in _PASSED_OVER or name.startswith(_USERS):
            return frame
        frame = frame.f_back
    return None
