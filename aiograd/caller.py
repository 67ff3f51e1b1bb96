"""Warnings that name the user's line, not the package's own."""

from __future__ import annotations

import sys
import warnings

#: packages whose frames are skipped; asyncio's lie between the code of a task and the line that runs the loop
_PASSED_OVER = frozenset({"aiograd", "asyncio"})


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the innermost line outside of the package that led here.

    Args:
        message: text of the warning.
        category: class of the warning.
    """
    frame = innermost = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        if frame.f_back is None:
            frame = innermost
            break
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry)
